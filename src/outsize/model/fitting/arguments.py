"""What fit was asked for, checked before anything is touched.

In: the arguments of `outsize.fit`. Out: a `Request`, or an `InputError` that says what was given and what would do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from outsize.core.errors import InputError
from outsize.core.memory import DISK, HOST, Allowance, Pool
from outsize.core.units import parse_bytes
from outsize.machine import allowance_of, current_budget
from outsize.machine.budget import current_wishes
from outsize.machine.disk import is_in_memory
from outsize.machine.host import read_rss
from outsize.machine.system import LiveSystem
from outsize.model.fitting import batch as batches
from outsize.model.fitting.axes import Axes, find_axes, read_axes
from outsize.model.fitting.move.evicted import require_home
from outsize.model.fitting.move.mover import Mover, open_mover
from outsize.model.fitting.move.weight_files import find_weights
from outsize.model.fitting.plan.facts import HostSide
from outsize.model.fitting.plan.foreign_tensors import held_on, look_beside
from outsize.model.fitting.plan.host_memory import in_memory
from outsize.model.fitting.plan.remedies import ALLOWED, REMEDIES
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.update.clip_and_scale import check_scaler
from outsize.model.fitting.update.optimizer_subset import parameters_of, require_plain_step, why_not_one_by_one
from outsize.model.torch_port.objects import is_compiled, is_compiled_copy, sizeof
from outsize.model.torch_port.sharding import device_of_shards

KEYS = tuple(dict.fromkeys(kind.key for kind in REMEDIES))
"""Names that `without` may hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for, checked."""

    work: Work
    batch: Any
    rows: int
    """Samples of the batch."""
    readings: tuple[Axes, ...]
    """Which axes of the batch may count samples, the likeliest first."""
    device: Any
    """Where the step runs."""
    budgets: tuple[Allowance, ...]
    """Of the device; then of the host, where the model lives there."""
    scratch: str
    """The scratch folder."""
    allow: str
    own_step: bool
    without: tuple[str, ...]
    dry_run: bool
    call: Callable[[Any, Any], Any] | None
    """How an inference calls the model; None: a training step."""
    host: HostSide | None
    """None where the model lives on its device."""
    compiled_here: bool = False
    """The model was compiled for this fit."""


def read_request(
    model: Any, loss: Any, optimizer: Any, batch: Any, *, budget: Any = None, device: Any = None, host: Any = None,
    weights: Any = None, allow: str = "exact", own_step: bool = False, clip: float | None = None, scaler: Any = None,
    without: tuple[str, ...] = (), batch_axis: Any = None, dry_run: bool = False, compile: bool | str = False,
) -> Request:  # fmt: skip
    """The user's mistakes, named before anything is touched."""
    optimizer = _bare(optimizer)
    hosted = device is not None or weights is not None or host is not None
    trains = not hosted and (optimizer is not None or own_step)
    check_words(model, loss, optimizer, allow, without, own_step, clip, scaler, compile)
    if not trains or compile is False:
        _refuse_compiled(model)
    target = _read_device(device, dry_run) if hosted else _device_of(model)
    call = None
    if optimizer is None and not own_step:
        loss, call = None, loss or batches.call_model
    scaler = check_scaler(scaler, target) if hosted else scaler
    require_home(model, optimizer)
    files = _find_files(model, optimizer, target, weights, dry_run) if hosted else None
    if optimizer is not None:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise InputError("no parameter of the model requires a gradient: there is nothing to train")
        check_optimizer(model, optimizer, own_step)
    said = batch_axis is not None
    readings = (read_axes(batch, batch_axis),) if said else find_axes(batch, _takes_time_first(model))
    rows = readings[0].count(batch)
    if not hosted:
        for path, tensor in batches.tensors_of(batch).items():
            if tensor.device != target:
                raise InputError(
                    f"{path} is on {tensor.device} and the model on {target}: move the batch to the model's device"
                )
    side = None
    budgets: tuple[Allowance, ...] = ()
    scratch = current_budget()
    if hosted:
        budgets, base, before = _hosted_budgets(model, optimizer, target, budget, host)
        disk = next((a for a in scratch.allowances if a.pool == DISK), None)
        side = HostSide(
            base=base, before=before, mover=_mover_to(target, dry_run), files=files,
            forced=_why_gradients_wait(optimizer, own_step, clip, scaler),
            later=optimizer is not None and not own_step and why_not_one_by_one(optimizer) is None,
            grounded=_why_in_memory(optimizer, own_step, without, scratch.scratch, files), disk=disk,
            beside=look_beside(target, [*model.buffers(), *batches.tensors_of(batch).values()]),
        )  # fmt: skip
    backwards = 1 + any(parameter.grad is not None for parameter in model.parameters()) if own_step else 0
    work = Work(
        model=model, loss=loss, optimizer=optimizer, clip=clip, scaler=scaler, device=target.type, backwards=backwards,
        axes=readings[0], compiled=any(map(is_compiled, model.modules())),
    )  # fmt: skip
    return Request(
        work=work, batch=batch, rows=rows, readings=readings, device=target, budgets=budgets or (device_budget(budget, target),),
        scratch=scratch.scratch, allow=allow, own_step=own_step, without=tuple(without), dry_run=dry_run, call=call, host=side,
    )  # fmt: skip


def _bare(optimizer: Any) -> Any:
    """The optimizer inside those that accelerate and Lightning wrap around it."""
    while hasattr(optimizer, "param_groups") and isinstance(
        inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer
    ):
        optimizer = inner
    return optimizer


def _takes_time_first(model: Any) -> bool:
    """True where a layer of the model takes time along the first axis and samples along the second."""
    kinds = (torch.nn.RNNBase, torch.nn.MultiheadAttention)
    return any(isinstance(module, kinds) and not module.batch_first for module in model.modules())


def check_words(
    model: Any, loss: Any, optimizer: Any, allow: Any, without: Any, own_step: bool, clip: Any, scaler: Any,
    compile: bool | str = False,
) -> None:  # fmt: skip
    """What can be said of each argument by itself."""
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"fit needs a torch.nn.Module, not {type(model).__name__}")
    if compile not in (True, False, "auto"):
        raise InputError(f"compile={compile!r} is unknown: one of True, False, 'auto'")
    scripted = next((n or "the model" for n, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise InputError(
            f"{scripted} is compiled by TorchScript, whose graph fit cannot change: give fit the module that it was made from"
        )
    _check_modules(model, optimizer)
    if not callable(loss) and not (loss is None and optimizer is None):
        raise InputError(f"fit needs a function loss(model, batch), not {type(loss).__name__}")
    if optimizer is not None and (isinstance(optimizer, type) or not hasattr(optimizer, "param_groups")):
        said = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise InputError(f"fit needs an optimizer such as torch.optim.AdamW(model.parameters()), not {said}")
    if allow not in tuple(ALLOWED):
        raise InputError(f"allow={allow!r} is unknown: one of {', '.join(ALLOWED)}")
    if not isinstance(without, tuple | list | set | frozenset):
        raise InputError(f"without={without!r} is no tuple of remedies: without=('stream',) leaves one out")
    unknown = [name for name in without if name not in KEYS]
    if unknown:
        raise InputError(f"without names {unknown[0]!r}, which is no remedy: one of {', '.join(KEYS)}")
    _check_update(own_step, clip, scaler)


def _refuse_compiled(model: Any) -> None:
    """Of what is fitted as it was written only."""
    compiled = next(((name, module) for name, module in model.named_modules() if is_compiled(module)), None)
    if compiled is not None:
        name, module = compiled
        wrapped = is_compiled_copy(module)
        before = (
            "a compiled model has it as `_orig_mod`" if wrapped else "leave out `.compile()`, which changes it for good"
        )
        raise InputError(
            f"{name or 'the model'} is compiled by {'torch.compile' if wrapped else 'its own compile()'}, whose graph fit cannot "
            f"change: compile=False fits it as it was written, or give fit the module as it was before ({before})"
        )


def _check_modules(model: Any, optimizer: Any) -> None:
    """Modules that have no weights yet, or gradients whose bytes are not known."""
    from torch.nn.parameter import is_lazy

    empty = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if empty is not None:
        raise InputError(
            f"{empty} has no shape before a first forward pass: run the model once on a batch, then fit it"
        )
    sparse = next((name for name, module in model.named_modules() if getattr(module, "sparse", None) is True), None)
    if optimizer is not None and sparse is not None:
        raise InputError(
            f"{sparse} makes sparse gradients, whose bytes nobody knows beforehand: build it with sparse=False"
        )


def _check_update(own_step: bool, clip: Any, scaler: Any) -> None:
    if clip is not None:
        if isinstance(clip, bool) or not isinstance(clip, int | float) or not 0 < clip < math.inf:
            raise InputError(f"clip={clip!r} is no norm to clip to: give a number above zero, such as 1.0")
        if own_step:
            raise InputError(
                f"clip={clip} is for step(batch): with own_step=True you clip between backward and your own step"
            )
    if scaler is not None and not all(hasattr(scaler, name) for name in ("scale", "unscale_", "step", "update")):
        raise InputError(f"scaler needs a GradScaler such as torch.amp.GradScaler(), not {type(scaler).__name__}")


def check_optimizer(model: Any, optimizer: Any, own_step: bool) -> None:
    """Its parameters are the model's, and a step needs no closure."""
    require_plain_step(optimizer, own_step)
    known = {id(parameter) for parameter in model.parameters()}
    strange = [p for p in parameters_of(optimizer) if id(p) not in known]
    if strange:
        raise InputError(
            f"the optimizer holds {len(strange)} parameters that the model does not have (the first has shape "
            f"{tuple(strange[0].shape)}): it belongs to another model"
        )


def _device_of(model: Any) -> Any:
    """The one device of a model; that of a sharded one is where its weights are gathered."""
    if (gathered := device_of_shards(model)) is not None:
        return gathered
    devices = {parameter.device for parameter in model.parameters()}
    if not devices:
        raise InputError(f"{type(model).__name__} has no parameters: there is nothing to fit")
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise InputError(
            f"the model's parameters are on {', '.join(map(str, devices))}: fit works on one CPU or CUDA device"
        )
    return next(iter(devices))


def _read_device(device: Any, dry_run: bool) -> Any:
    """The device that a model is to visit."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(f"device={device!r} is no device: cuda, cuda:1 or cpu") from None
    if found.type not in ("cpu", "cuda"):
        raise InputError(f"device={found} is not supported: cuda or cpu")
    if found.type == "cuda" and not torch.cuda.is_available() and not dry_run:
        raise InputError("device='cuda' was asked for and torch sees no card; dry_run=True plans without one")
    return found


def _mover_to(device: Any, dry_run: bool) -> Mover:
    """The way there; to the CPU itself where a dry run has no card."""
    there = not dry_run or device.type == "cpu" or torch.cuda.is_available()
    return open_mover(device if there else torch.device("cpu"))


def _find_files(model: Any, optimizer: Any, device: Any, weights: Any, dry_run: bool) -> Any:
    """Where the weights of a hosted model are read from, None where they are in host memory."""
    _check_memory(model)
    if weights is not None:
        if optimizer is not None:
            raise InputError("weights= streams a file for inference: load them into a model in host memory to train")
        return find_weights(model, weights)
    kinds = {p.device.type for p in model.parameters()}
    if kinds - {"cpu"} and not (dry_run and kinds == {"meta"}):
        raise InputError(
            f"the model is on {', '.join(sorted(kinds))}: with device={device} it has to be in host memory, or on the meta "
            "device with weights='model.safetensors'"
        )
    return None


def _why_gradients_wait(optimizer: Any, own_step: bool, clip: Any, scaler: Any) -> str:
    """Why all gradients of a hosted model have to be known before the first update, empty where they need not."""
    if own_step or optimizer is None:
        return "you step the optimizer yourself" if own_step else ""
    reasons = (
        why_not_one_by_one(optimizer),
        "a GradScaler looks at all gradients before the first update" if scaler is not None else "",
        "clipping needs the norm of all gradients before the first update" if clip else "",
    )
    return next(filter(None, reasons), "")


def _why_in_memory(optimizer: Any, own_step: bool, without: tuple[str, ...], folder: str, files: Any) -> str:
    """Why nothing of a model in host memory can be in a scratch file, empty where it can."""
    if files is not None:
        return "it is read from a file already"
    if own_step:
        return "you step the optimizer yourself, which takes all of it in memory"
    if forbidden := [key for key in ("disk", "state_away") if key in without]:
        return f"you forbade {forbidden[0]}"
    if is_in_memory(LiveSystem(), folder):
        return f"the scratch folder {folder} is in RAM, so name another with outsize.budget(scratch=...)"
    return (why_not_one_by_one(optimizer) or "") if optimizer is not None else ""


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


def device_budget(budget: int | str | None, device: Any) -> Allowance:
    """Bytes of the device that a model is on."""
    pool = HOST if device.type == "cpu" else Pool(kind="device", index=device.index or 0)
    found = allowance_of(pool, budget, device)
    held = held_on(device) if budget is None and current_wishes().device is None else 0
    return replace(found, bytes=found.bytes + held, reason=f"{found.reason}, and what is held") if held else found


def _hosted_budgets(
    model: Any, optimizer: Any, device: Any, budget: Any, host: Any
) -> tuple[tuple[Allowance, ...], int, int]:
    """Device and host budget, what this process holds beside the model, and what it holds of it."""
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
