"""The plan of a fitted step of JAX as the user reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outsize.core.failure import Exactness, Remedy
from outsize.core.fitting import FitPlan, Neighbour
from outsize.core.memory import Allowance, Part
from outsize.core.noun import Known
from outsize.core.plan import Peak, Step
from outsize.model.jax.fitting.choice import Choice
from outsize.model.jax.fitting.search import Candidate, Search
from outsize.model.jax.fitting.step import is_sent
from outsize.model.jax.private_parts import bytes_of, require_jax

KEPT = {"": "values between segments", "products": "results of products", "names": "values with names"}


def describe(search: Search, found: Candidate, allowance: Allowance, notes: Sequence[str]) -> FitPlan:
    """Peaks, remedies with what each saves, and the choices beside this one."""
    own = search.work.optimizer is None
    known = Known.BOUND if found.lost else Known.EXACT
    return FitPlan(
        name=f"{'gradients' if own else 'training step'} of {search.shapes.axes.rows} samples",
        steps=(
            Step(
                name="gradients" if own else "step",
                peaks=(Peak(pool=allowance.pool, bytes=found.peak, known=known),), parts=_parts(search, found),
            ),
        ),
        budgets=(allowance,), smallest=None, remedies=tuple(_remedies(search, found)), slow_down=search.slow_down(found.choice),
        plain=search.plain.peak, away=found.compiled.away, place="host", cheaper=_neighbour(search, found, cheaper=True),
        smaller=_neighbour(search, found, cheaper=False), notes=tuple(notes),
    )  # fmt: skip


def _parts(search: Search, found: Candidate) -> tuple[Part, ...]:
    jax, made, shapes = require_jax(), found.compiled, search.shapes
    sizes = {
        name: sum(bytes_of(leaf) or 0 for leaf in jax.tree_util.tree_leaves(tree))
        for name, tree in (("weights", shapes.params), ("optimizer state", shapes.state), ("inputs", shapes.batch))
    }
    if found.choice.state_away and made.away:
        sizes["optimizer state"] -= sum(
            bytes_of(leaf) or 0 for leaf in jax.tree_util.tree_leaves(shapes.state) if is_sent(leaf)
        )
    sizes |= {
        "outputs": made.outputs - made.aliased,
        "temporaries": made.temporaries + made.code,
        "constants": made.constants,
    }
    parts = [Part(name=name, bytes=size, known=Known.EXACT) for name, size in sizes.items() if size]
    lost = [Part(name="between arrays", bytes=found.lost, known=Known.BOUND)] if found.lost else []
    return (*parts, *lost)


def _remedies(search: Search, found: Candidate) -> list[Remedy]:
    """Those in use; what one saves is known where the choice without it was compiled."""
    choice, rows = found.choice, []
    if choice.slices > 1:
        size = -(-search.shapes.axes.rows // choice.slices)
        rows.append(("slices", replace(choice, slices=1), Exactness.ROUNDING,
                     f"{choice.slices} slices of {size} samples in a lax.scan, one normaliser"))  # fmt: skip
    if choice.segments:
        kept = "named values kept" if choice.kept == "names" else f"{choice.kept or 'nothing'} kept"
        rows.append(("checkpoint", replace(choice, segments=0, kept="", kept_away=False), Exactness.ROUNDING,
                     f"jax.checkpoint over {choice.segments} segments of the loss and bodies of loops, {kept}"))  # fmt: skip
    if choice.ordered:
        rows.append(
            ("order", replace(choice, ordered=False), Exactness.ROUNDING, "XLA orders the operators for memory")
        )
    if choice.kept_away:
        rows.append(("offload", replace(choice, kept_away=False), Exactness.ROUNDING,
                     f"{KEPT[choice.kept]} wait in page-locked memory of the host"))  # fmt: skip
    if choice.state_away:
        rows.append(("offload", replace(choice, state_away=False), Exactness.BITWISE,
                     "optimizer state in page-locked memory of the host between steps"))  # fmt: skip
    return [
        Remedy(
            name=name, saves=max(0, _bytes(search, without) - found.peak), known=Known.ESTIMATE,
            costs=f"+{100 * (search.slow_down(choice) - search.slow_down(without)):.0f} % time", exactness=exactness, how=how,
        )
        for name, without, exactness, how in rows
    ]  # fmt: skip


def _bytes(search: Search, choice: Choice) -> int:
    known = search.tried.get(choice)
    return known.peak if known is not None else search.predict(choice)


def _neighbour(search: Search, found: Candidate, cheaper: bool) -> Neighbour | None:
    """The next faster compiled choice that is larger, or the next smaller one that is slower."""
    time, rows = search.slow_down(found.choice), [one for one in search.tried.values() if one.choice != found.choice]
    if cheaper:
        beside = [one for one in rows if search.slow_down(one.choice) <= time and one.peak > found.peak]
        best = max(beside, key=lambda one: (search.slow_down(one.choice), -one.peak), default=None)
    else:
        beside = [one for one in rows if one.peak < found.peak]
        best = min(beside, key=lambda one: (search.slow_down(one.choice), one.peak), default=None)
    if best is None:
        return None
    return Neighbour(name=str(best.choice), peak=best.peak, slow_down=search.slow_down(best.choice), traced=True)
