"""A loss whose parts are computed again in the backward pass, cut without the user's help.

In: a loss, a number of segments. Out: a loss with the same value and gradient. Its jaxpr is cut into consecutive segments of
about equal bytes, where few bytes are alive, and each runs under `jax.checkpoint`; so does the body of every loop inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from outsize.model.cuts import bytes_across, narrowest_cuts
from outsize.model.jax import private_parts as parts
from outsize.model.jax.fitting.slices import Loss
from outsize.model.jax.program import CALLS

OPENED = ("pjit", "jit", "closed_call", "core_call", "xla_call")
"""Calls that are opened up, so that there are places to cut."""


SENT, HELD = "outsize: sent to the host", "outsize: held"
"""Names of values between segments that wait on the host, and of those that are too small for it."""
LEAST_SENT = 4096
"""Bytes of the smallest array that is sent: a page."""


def recomputed(loss: Loss, segments: int, kept: str = "", away: bool = False) -> Loss:
    """The loss, cut into segments that are computed again.

    `kept` is not computed again: `products` of matrices or values with `names`. With `away` it waits on the host, and so does
    what stands between segments where nothing is kept.
    """
    jax = parts.require_jax()

    def run(params: Any, batch: Any) -> Any:
        leaves, tree = jax.tree_util.tree_flatten((params, batch))
        shape: list[Any] = []

        def flat(*arrays: Any) -> list[Any]:
            result = loss(*jax.tree_util.tree_unflatten(tree, arrays))
            found, made = jax.tree_util.tree_flatten(result)
            shape[:] = [made]
            return found  # type: ignore[no-any-return]

        opened = jax.make_jaxpr(lambda *arrays: _open(jax.make_jaxpr(flat)(*arrays), arrays))(*leaves)
        cut = _Segments(opened, segments, kept, away)
        around = _around(kept, away, opened)
        whole = cut.run if around is None else jax.checkpoint(cut.run, policy=around)
        results = whole(*leaves)
        return jax.tree_util.tree_unflatten(shape[0], results)

    return run


AWAY = {"offload_src": "device", "offload_dst": "pinned_host"}


def _around(kept: str, away: bool, closed: Any) -> Any:
    """What all segments together keep, as JAX says it; None where each keeps what comes in."""
    policies = parts.require_jax().checkpoint_policies
    names = sorted(parts.names_in(closed))
    if kept == "names" and not away:
        return policies.save_only_these_names(*names)
    if kept == "names" or (away and not kept):
        held, sent = ([], names) if kept else ([HELD], [SENT])
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=held, names_which_can_be_offloaded=sent, **AWAY
        )
    return None


def _inside(kept: str, away: bool) -> Any:
    """What a segment keeps, as JAX says it; None for nothing."""
    policies = parts.require_jax().checkpoint_policies
    if kept != "products":
        return None
    if away:
        return policies.offload_dot_with_no_batch_dims(AWAY["offload_src"], AWAY["offload_dst"])
    return policies.dots_with_no_batch_dims_saveable


def _open(closed: Any, arrays: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr with its calls opened up."""
    return _evaluate(parts.inner_jaxpr(closed), parts.constants_of(closed), arrays, _bind_open)


def _bind_open(equation: Any, values: list[Any]) -> list[Any]:
    if equation.primitive.name in OPENED:
        return _open(equation.params[CALLS[equation.primitive.name]], values)
    return parts.bind(equation, values)


Bind = Callable[[Any, list[Any]], list[Any]]


def _evaluate(jaxpr: Any, constants: Sequence[Any], arrays: Sequence[Any], bind: Bind) -> list[Any]:
    here: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    here.update(zip(jaxpr.invars, arrays, strict=True))
    for equation in jaxpr.eqns:
        _step(equation, here, bind)
    return [atom.val if parts.is_literal(atom) else here[atom] for atom in jaxpr.outvars]


def _step(equation: Any, here: dict[Any, Any], bind: Bind) -> None:
    values = [atom.val if parts.is_literal(atom) else here[atom] for atom in equation.invars]
    here.update(zip(equation.outvars, bind(equation, values), strict=True))


class _Segments:
    """A jaxpr, cut."""

    def __init__(self, closed: Any, count: int, kept: str, away: bool) -> None:
        self.jaxpr, self.constants = parts.inner_jaxpr(closed), parts.constants_of(closed)
        self.policy, self.sends = _inside(kept, away), away and not kept
        self.in_loops = _around(kept, away, closed) if kept == "names" else self.policy
        self.by_names = kept == "names"
        self.cuts = _at_names(self.jaxpr) if kept == "names" else cuts_of(self.jaxpr, count)

    def run(self, *arrays: Any) -> list[Any]:
        jax, jaxpr = parts.require_jax(), self.jaxpr
        here: dict[Any, Any] = dict(zip(jaxpr.constvars, self.constants, strict=True))
        here.update(zip(jaxpr.invars, arrays, strict=True))
        bounds = [0, *self.cuts, len(jaxpr.eqns)]
        for start, end in pairwise(bounds):
            equations = jaxpr.eqns[start:end]
            takes, gives = _between(jaxpr, start, end)
            run = self._part(equations, takes, gives)
            last = end == len(jaxpr.eqns) and self.cuts and self.policy is None  # it is needed at once
            if not last and not (self.by_names and any(map(_has_names, equations))):
                run = jax.checkpoint(run, policy=self.policy)
            made = run(*(here[var] for var in takes))
            here.update(zip(gives, map(_named, made) if self.sends else made, strict=True))
        return [atom.val if parts.is_literal(atom) else here[atom] for atom in jaxpr.outvars]

    def _part(self, equations: Sequence[Any], takes: list[Any], gives: list[Any]) -> Callable[..., list[Any]]:
        def run(*values: Any) -> list[Any]:
            here = dict(zip(takes, values, strict=True))
            for equation in equations:
                _step(equation, here, self._bind)
            return [here[var] for var in gives]

        return run

    def _bind(self, equation: Any, values: list[Any]) -> list[Any]:
        """A loop's body is computed again round by round."""
        if equation.primitive.name != "scan":
            return parts.bind(equation, values)
        jax, params = parts.require_jax(), equation.params
        constants, carry = parts.scan_counts(equation)
        closed = params["jaxpr"]

        def body(state: Any, row: Any) -> tuple[list[Any], list[Any]]:
            made = _evaluate(
                parts.inner_jaxpr(closed), parts.constants_of(closed), [*values[:constants], *state, *row], self._bind
            )
            return made[:carry], made[carry:]

        again = jax.checkpoint(body, prevent_cse=False, policy=self.in_loops)
        state, rows = jax.lax.scan(
            again, values[constants : constants + carry], values[constants + carry :], length=params["length"],
            reverse=params["reverse"], unroll=params["unroll"],
        )  # fmt: skip
        return [*state, *rows]


def _has_names(equation: Any) -> bool:
    """True for a loop or a call whose body names values: around it nothing may be forgotten."""
    return any(parts.names_in(value) for value in equation.params.values() if hasattr(parts.inner_jaxpr(value), "eqns"))


def _at_names(jaxpr: Any) -> list[int]:
    """Cuts behind named values, and around what names values inside."""
    found = set()
    for place, equation in enumerate(jaxpr.eqns):
        if equation.primitive.name == "name":
            found.add(place + 1)
        elif _has_names(equation):
            found |= {place, place + 1}
    return sorted(found - {0, len(jaxpr.eqns)})


def _named(value: Any) -> Any:
    """A value between segments with the name that says where it waits."""
    from jax.ad_checkpoint import checkpoint_name

    return checkpoint_name(value, SENT if (parts.bytes_of(value) or 0) >= LEAST_SENT else HELD)


def _between(jaxpr: Any, start: int, end: int) -> tuple[list[Any], list[Any]]:
    """What a segment takes from before it, and gives to those behind it."""
    made = {var for equation in jaxpr.eqns[start:end] for var in equation.outvars if not parts.is_dropped(var)}
    used = [atom for equation in jaxpr.eqns[start:end] for atom in equation.invars if not parts.is_literal(atom)]
    takes = [var for var in dict.fromkeys(used) if var not in made]
    later = {atom for equation in jaxpr.eqns[end:] for atom in equation.invars if not parts.is_literal(atom)}
    later |= {atom for atom in jaxpr.outvars if not parts.is_literal(atom)}
    ordered = [var for equation in jaxpr.eqns[start:end] for var in equation.outvars]
    return takes, [var for var in ordered if var in made and var in later]


def cuts_of(jaxpr: Any, count: int) -> list[int]:
    """Where to cut into `count` segments; arguments are there anyway."""
    equations = jaxpr.eqns
    made = [[(var, parts.bytes_of(var.aval) or 0) for var in equation.outvars] for equation in equations]
    read = [[atom for atom in equation.invars if not parts.is_literal(atom)] for equation in equations]
    results = [atom for atom in jaxpr.outvars if not parts.is_literal(atom)]
    sizes = [sum(size for _, size in values) for values in made]
    return narrowest_cuts(sizes, bytes_across(made, read, results), count)
