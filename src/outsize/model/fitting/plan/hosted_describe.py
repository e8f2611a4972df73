"""A hosted choice as the plan that a user reads: peaks on device and host, what goes over the link, how fast it may be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outsize.core.failure import Exactness, Remedy
from outsize.core.fitting import FitPlan
from outsize.core.memory import DISK, HOST, Allowance
from outsize.core.noun import Known
from outsize.core.plan import Peak, Step
from outsize.core.units import format_bytes
from outsize.model.fitting import batch as batches
from outsize.model.fitting.move.pinned_blocks import state_bytes
from outsize.model.fitting.move.units import Cut, cut_model, sizeof
from outsize.model.fitting.plan.choice import Choice
from outsize.model.fitting.plan.describe import bound
from outsize.model.fitting.plan.foreign_tensors import note_beside
from outsize.model.fitting.plan.host_memory import filed_bytes, host_bytes
from outsize.model.fitting.plan.hosted_dry_run import Sketch
from outsize.model.fitting.run.runner import Work

if TYPE_CHECKING:
    from outsize.model.fitting.plan.hosted_search import Search


def tell(
    work: Work, batch: Any, rows: int, budgets: tuple[Allowance, Allowance], search: Search, choice: Choice, sketch: Sketch
) -> FitPlan:  # fmt: skip
    """The plan."""
    there, _ = budgets
    known = Known.EXACT if search.kind == "cpu" else Known.ESTIMATE
    host = Peak(pool=HOST, bytes=host_bytes(search, choice, sketch), known=Known.ESTIMATE)
    filed = filed_bytes(search, choice)
    beside = (host, *([Peak(pool=DISK, bytes=sum(filed.values()), known=Known.EXACT)] if choice.transfer_bytes else ()))
    traffic = _traffic(choice, filed)
    steps = tuple(
        Step(
            name=name, peaks=(Peak(pool=there.pool, bytes=size, known=known), *beside),
            read=traffic.get(name, (0, 0))[0], written=traffic.get(name, (0, 0))[1],
        )
        for name, size in _peaks(sketch, there).items()
    )  # fmt: skip
    weights = sum(sizeof(p) for p in {id(p): p for p in work.model.parameters()}.values())
    state = sum(state_bytes(shapes) for shapes in search.layout.values())
    back = _sent(choice, weights, state, sketch.inputs)
    moved = sketch.brought + sketch.inputs + back
    link = max((sketch.brought + sketch.inputs) / search.rates.both, back / search.rates.both)
    if choice.update == "host":
        link = max(link, weights / search.rates.host)
    elif choice.update == "kept":
        link += (2 * weights + state) / search.rates.both if choice.state_ring else weights / search.rates.host
    read, written = (sum(row[way] for row in traffic.values()) for way in (0, 1))
    disk = read / search.rates.read + written / search.rates.write if choice.transfer_bytes else 0.0
    seconds = max(sketch.seconds, link, disk)
    tokens = _tokens(batch, rows)
    cut = cut_model(work.model, choice.unit_bytes, choice.held, search.order)
    plain = weights + (0 if choice.update == "none" else weights + state)
    return FitPlan(
        name=f"{'inference' if choice.update == 'none' else 'training step'} of {rows} samples on {there.pool}", steps=steps,
        budgets=budgets if not choice.transfer_bytes or search.disk is None else (*budgets, search.disk), smallest=None,
        remedies=_remedies(choice, cut.weights, state, sum(filed.values()), sketch), plain=plain,
        slow_down=seconds / max(sketch.seconds * (0.75 if choice.update != "none" else 1.0), 1e-9),
        away=host.bytes, place="disk" if search.streamed else "host", moved=moved, seconds=seconds, tokens=tokens,
        notes=tuple(_notes(search, choice, sketch, cut, filed, (read, written, disk))),
    )  # fmt: skip


def _peaks(sketch: Sketch, there: Allowance) -> dict[str, int]:
    """Peaks on the device by phase."""
    reserved = sketch.peaks.get("reserved")
    return sketch.peaks | ({} if reserved is None else {"reserved": bound(reserved, there.bytes, limited=False)})


def _notes(
    search: Search, choice: Choice, sketch: Sketch, cut: Cut, filed: dict[str, int], disk: tuple[int, int, float]
) -> list[str]:
    """What was found and decided; `disk`: bytes read and written in a step, and the seconds of both."""
    rates = search.rates
    read, written, seconds = disk
    measured = "measured" if rates.measured else "assumed"
    notes = [
        f"{len(cut.units)} units of at most {format_bytes(cut.largest)} visit the device through {format_bytes(choice.ring)}; "
        f"{format_bytes(cut.held.size)} stay on it",
        f"link: {rates.bring / 1e9:.1f} GB/s in, {rates.send / 1e9:.1f} GB/s out, {rates.both / 1e9:.1f} GB/s each way at once "
        f"({measured})",
    ]
    if choice.update != "none":
        notes.append(f"the optimizer on the host: {rates.host / 1e9:.1f} GB/s of parameters ({measured})")
        if search.forced:
            after = "on the device, a few parameters at a time" if choice.state_ring else "on the host"
            notes.append(f"gradients wait on the host: {search.forced}; the update follows {after}")
        else:
            notes.append(_where(choice))
    if choice.transfer_bytes:
        parts = ", ".join(f"{format_bytes(size)} of {kind}" for kind, size in filed.items() if size)
        notes.append(
            f"the host has no room for all of it: {parts} in a file in {search.folder}, {format_bytes(read)} read and "
            f"{format_bytes(written)} written a step ({rates.read / 1e9:.1f} and {rates.write / 1e9:.1f} GB/s measured, "
            f"{seconds:.2g} s)"
        )
    if sketch.random:
        notes.append(f"random numbers are drawn ({', '.join(sketch.random[:3])}) and drawn again alike")
    return notes + note_beside(sketch.beside)


def _traffic(choice: Choice, filed: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Bytes that each phase reads from the scratch file and writes to it."""
    weights, state, gradients = (filed[kind] for kind in ("weights", "state", "gradients"))
    if choice.update == "none":
        return {"forward": (weights, 0)}
    if choice.update == "kept":
        after = (weights + state + gradients, weights + state)
        return {"forward": (weights, 0), "backward": (weights, gradients), "optimizer": after}
    return {"forward": (weights, 0), "backward": (weights + state, weights + state)}


def _where(choice: Choice) -> str:
    return {
        "card": "parameters are updated on the device as their gradients come; state visits",
        "host": "parameters are updated on the host, beside the backward pass",
    }[choice.update]


def _sent(choice: Choice, weights: int, state: int, inputs: int) -> int:
    """Bytes that go from the device to the host in a step."""
    if choice.update == "none":
        return 0
    if choice.update == "kept" and choice.state_ring:
        return inputs + 2 * weights + state
    return inputs + weights + (state if choice.update == "card" else 0)


def _tokens(batch: Any, rows: int) -> int:
    """Elements of the first tensor of whole numbers with two axes, else samples."""
    for tensor in batches.tensors_of(batch).values():
        if tensor.dim() == 2 and not tensor.dtype.is_floating_point:
            return int(tensor.numel())
    return rows


def _remedies(choice: Choice, weights: int, state: int, away: int, sketch: Sketch) -> tuple[Remedy, ...]:
    def remedy(name: str, saves: int, costs: str, how: str, exactness: Exactness = Exactness.BITWISE) -> Remedy:
        return Remedy(name=name, saves=saves, known=Known.ESTIMATE, costs=costs, exactness=exactness, how=how)

    found = [
        remedy("stream weights", max(0, weights - choice.ring), "copies", "from the host, the next unit while one runs")
    ]
    if choice.update == "card":
        found.append(remedy("keep optimizer state elsewhere", state, "copies", "on the host; visits as gradients come"))
    if choice.update in ("card", "host"):
        found.append(remedy("update in the backward pass", weights, "", "each gradient is used and freed as it comes"))
    if choice.update != "none":
        found.append(remedy("compute activations again", 0, "a forward pass", "every unit keeps its inputs only"))
    if choice.transfer_bytes:
        what = " and ".join(choice.disk)
        found.append(remedy("keep it on disk", away, "reads and writes", f"{what} that the host has no room for"))
    if choice.inputs_away:
        found.append(remedy("keep activations elsewhere", sketch.inputs, "copies", "inputs of units on the host"))
    if choice.pieces > 1:
        how = f"each unit's rows in {choice.pieces} pieces"
        found.append(remedy("rows in pieces", 0, "smaller kernels", how, Exactness.ROUNDING))
    if choice.chunks:
        found.append(remedy("loss in pieces", 0, "", f"{choice.chunks} pieces of head and loss", Exactness.ROUNDING))
    return tuple(found)
