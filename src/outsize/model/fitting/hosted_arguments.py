"""What a hosted step was asked for: the user's model, optimizer, device and budgets, checked before anything is touched.

In: the arguments of `outsize.fit(..., device=...)`. Out: `Given`, or an `InputError` that says what would do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outsize.core.errors import InputError
from outsize.core.memory import DISK, HOST, Allowance, Pool
from outsize.core.units import parse_bytes
from outsize.machine import current_budget
from outsize.machine.budget import current_wishes
from outsize.machine.disk import is_in_memory
from outsize.machine.host import read_rss
from outsize.machine.system import LiveSystem
from outsize.model.fitting import batch as batches
from outsize.model.fitting.arguments import check_optimizer
from outsize.model.fitting.guarded import call_model
from outsize.model.fitting.move.evicted import require_home
from outsize.model.fitting.move.mover import Mover, open_mover
from outsize.model.fitting.move.scratch_file import ScratchFile
from outsize.model.fitting.move.units import sizeof
from outsize.model.fitting.move.weight_files import find_weights
from outsize.model.fitting.plan.foreign_tensors import Beside, held_on, look_beside
from outsize.model.fitting.plan.host_memory import in_memory
from outsize.model.fitting.plan.link_speeds import Rates
from outsize.model.fitting.run.clip_and_scale import check_scaler
from outsize.model.fitting.run.optimizer_subset import why_not_one_by_one
from outsize.model.fitting.run.runner import Work


@dataclass(slots=True)
class Given:
    """What the user gave, checked."""

    work: Work
    batch: Any
    rows: int
    device: Any
    mover: Mover
    budgets: tuple[Allowance, Allowance]
    """Device, host."""
    base: int
    """Bytes that the process holds beside model and optimizer state."""
    forced: str
    """Why gradients wait on the host."""
    later: bool
    """Parameters can be updated a few at a time all the same."""
    forbidden: set[str]
    files: Any
    """Where weights are read from, None where they are in host memory."""
    call: Callable[[Any, Any], Any] | None
    dry: bool
    exact: bool = True
    """Random numbers have to be those of the plain step."""
    outside: dict[str, None] = field(default_factory=dict)
    """Parameters that a rehearsal has found to be used outside of their units."""
    rates: Rates | None = None
    """Measured once, while the device is empty."""
    projected: int = 0
    """Bytes of host memory that the present plan holds."""
    before: int = 0
    """Bytes of memory that model and optimizer state take before anything is moved."""
    grounded: str = ""
    """Why nothing can be in a scratch file."""
    folder: str = ""
    """The scratch folder."""
    disk: Allowance | None = None
    """Its room."""
    scratch: ScratchFile | None = None
    """The scratch file, once something is in it."""
    beside: Beside = field(default_factory=Beside)
    """What the process holds on the device that is not the step's."""


def check_given(
    model: Any, loss: Any, optimizer: Any, batch: Any, device: Any, budget: Any, host: Any, weights: Any, own_step: bool,
    clip: float | None, scaler: Any, without: tuple[str, ...], dry: bool, call: Any,
) -> Given:  # fmt: skip
    """The user's mistakes, named before anything is touched."""
    import torch

    device = _read_device(device)
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device={device} is not supported: cuda or cpu")
    if device.type == "cuda" and not torch.cuda.is_available() and not dry:
        raise InputError("device='cuda' was asked for and torch sees no card; dry_run=True plans without one")
    if optimizer is None and not own_step:
        loss, call = None, call or loss
    scaler = check_scaler(scaler, device)
    require_home(model, optimizer)
    _check_memory(model)
    kinds = {p.device.type for p in model.parameters()}
    files = None
    if weights is not None:
        if optimizer is not None:
            raise InputError("weights= streams a file for inference: load them into a model in host memory to train")
        files = find_weights(model, weights)
    elif kinds - {"cpu"} and not (dry and kinds == {"meta"}):
        raise InputError(
            f"the model is on {', '.join(sorted(kinds))}: with device={device} it has to be in host memory, or on the meta "
            "device with weights='model.safetensors'"
        )
    if optimizer is not None and not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("no parameter of the model requires a gradient: there is nothing to train")
    rows = batches.count_rows(batch)
    forced = "you step the optimizer yourself" if own_step else ""
    if optimizer is not None:
        check_optimizer(model, optimizer)
        forced = forced or why_not_one_by_one(optimizer) or ""
        forced = forced or ("a GradScaler looks at all gradients before the first update" if scaler is not None else "")
        forced = forced or ("clipping needs the norm of all gradients before the first update" if clip else "")
    later = optimizer is not None and not own_step and why_not_one_by_one(optimizer) is None
    work = Work(model=model, loss=loss, optimizer=optimizer, clip=clip, scaler=scaler, device=device.type)
    mover = (
        open_mover(device) if not dry or device.type == "cpu" or torch.cuda.is_available() else open_mover(the_cpu())
    )
    budgets, base, before = _budgets(model, optimizer, device, budget, host)
    beside = look_beside(device, [*model.buffers(), *batches.tensors_of(batch).values()])
    scratch = current_budget()
    return Given(
        work=work, batch=batch, rows=rows, device=device, mover=mover, budgets=budgets, base=base, forced=forced, later=later,
        forbidden=set(without), files=files, call=None if loss is not None else (call or call_model), dry=dry,
        before=before, folder=scratch.scratch, disk=next((a for a in scratch.allowances if a.pool == DISK), None),
        grounded=_why_in_memory(optimizer, own_step, without, scratch.scratch), beside=beside,
    )  # fmt: skip


def _why_in_memory(optimizer: Any, own_step: bool, without: tuple[str, ...], folder: str) -> str:
    """Why nothing of a model in host memory can be in a scratch file, empty where it can."""
    if own_step:
        return "you step the optimizer yourself, which takes all of it in memory"
    if "state_away" in without:
        return "you forbade state_away"
    if is_in_memory(LiveSystem(), folder):
        return f"the scratch folder {folder} is in RAM, so name another with outsize.budget(scratch=...)"
    return (why_not_one_by_one(optimizer) or "") if optimizer is not None else ""


def _read_device(device: Any) -> Any:
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(f"device={device!r} is no device: cuda, cuda:1 or cpu") from None


def _check_memory(model: Any) -> None:
    """Every parameter gets memory of its own on the host, so two on the same memory would part."""
    named = [(name, p) for name, p in model.named_parameters() if p.device.type == "cpu" and p.numel()]
    rows = sorted(
        (p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name) for name, p in named if p.is_contiguous()
    )
    for (_, end, first), (start, _, second) in itertools.pairwise(rows):
        if start < end:
            raise InputError(
                f"{first} and {second} are two parameters on the same memory: tie them by assigning one parameter to both"
            )


def the_cpu() -> Any:
    import torch

    return torch.device("cpu")


def _budgets(
    model: Any, optimizer: Any, device: Any, budget: Any, host: Any
) -> tuple[tuple[Allowance, Allowance], int, int]:
    """Device and host budget, what this process holds beside the model, and what it holds of it."""
    import torch

    if device.type == "cuda" and torch.cuda.is_available():
        torch.zeros(1, device=device)  # the context is part of what the process holds
    rss = read_rss(LiveSystem())
    mine = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    if optimizer is not None:
        values = (v for state in optimizer.state.values() for v in state.values())
        mine += [value for value in values if isinstance(value, torch.Tensor)]
    before = sum(sizeof(t) for t in in_memory(mine))
    base = max(0, rss - before)
    pool = Pool(kind="device", index=device.index or 0)
    found = current_budget(devices=device.type == "cuda" and budget is None)
    if budget is not None:
        there = Allowance(pool=pool, bytes=parse_bytes(budget), reason="set by you")
    else:
        left = found.device(device.index or 0) if device.type == "cuda" else found.host
        size = current_wishes().device or (None if left is None else left + held_on(device))
        if size is None:
            raise InputError(f"nothing is known about the memory of {device}: give a budget, such as budget='16GiB'")
        there = Allowance(pool=pool, bytes=size, reason="what is available")
    wished = parse_bytes(host) if host is not None else current_wishes().host
    if wished is not None:
        here = Allowance(pool=HOST, bytes=wished, reason="set by you")
    else:
        here = Allowance(pool=HOST, bytes=rss + (found.host or 0), reason="what is held and what is available")
    return (there, here), base, before
