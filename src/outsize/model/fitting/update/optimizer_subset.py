"""An optimizer's step of some parameters alone, and which parameters go together.

In: the user's own optimizer. Out: `step_only`, the same update by the same code: it gives the same bits for every optimizer
that treats its parameters one by one, of which `ONE_BY_ONE` is the list; and groups of parameters of a useful size.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from outsize.core.errors import InputError
from outsize.model.torch_port.objects import has_step_hooks, multiply_each, sizeof

ONE_BY_ONE = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD", "SparseAdam",
)  # fmt: skip
"""Torch's optimizers that treat parameters one by one: the update of one never looks at another."""


def why_not_one_by_one(optimizer: Any) -> str | None:
    """Why parameters cannot be updated a few at a time, or None."""
    import torch

    kind = type(optimizer)
    known = {getattr(torch.optim, name) for name in ONE_BY_ONE if hasattr(torch.optim, name)}
    if kind not in known and not getattr(optimizer, "one_by_one", False):
        return (
            f"{kind.__name__} is not known to treat parameters one by one (set optimizer.one_by_one = True if it does)"
        )
    if has_step_hooks(optimizer):
        return "the optimizer has step hooks, which would run several times a step"
    return None


def needs_closure(optimizer: Any) -> bool:
    """True where a step computes the loss again and again."""
    needed = inspect.signature(type(optimizer).step).parameters.get("closure") if optimizer is not None else None
    return needed is not None and needed.default is inspect.Parameter.empty


def hold_for_closure(optimizer: Any) -> Any:
    """Memory as much as such an optimizer takes beside parameters and gradients, once its history is full.

    L-BFGS keeps two vectors a step of its history; direction, gradients and the trials of a line search are at most twelve.
    """
    import torch

    group = optimizer.param_groups[0]
    count = sum(parameter.numel() for parameter in group["params"])
    first = group["params"][0]
    return torch.empty(((2 * group["history_size"] + 12) * count,), dtype=first.dtype, device=first.device)


def require_plain_step(optimizer: Any, own_step: bool) -> None:
    """An `InputError` where a step needs the loss again and again, and nobody can run it or say what it holds."""
    import torch

    if needs_closure(optimizer) and not (own_step and isinstance(optimizer, torch.optim.LBFGS)):
        raise InputError(
            f"{type(optimizer).__name__}.step needs a closure that computes the loss several times a step: fit runs one forward "
            "and backward pass a step, so use an optimizer that needs no more, such as AdamW"
            + (", or own_step=True" if isinstance(optimizer, torch.optim.LBFGS) else "")
        )


def drop_gradients(optimizer: Any) -> None:
    """As `zero_grad(set_to_none=True)`, without torch: nothing of it can fail, and nobody listens."""
    for parameter in parameters_of(optimizer):
        parameter.grad = None


def parameters_of(optimizer: Any) -> list[Any]:
    """Every parameter of the optimizer, in order; None has none."""
    groups = () if optimizer is None else optimizer.param_groups
    return [parameter for group in groups for parameter in group["params"]]


def state_of(optimizer: Any) -> list[Any]:
    """All that the optimizer keeps for its parameters; None keeps nothing."""
    return [value for values in (() if optimizer is None else optimizer.state.values()) for value in values.values()]


def step_only(optimizer: Any, rows: Iterable[tuple[Any, Any]]) -> None:
    """One `optimizer.step()` that sees the parameters of `rows` alone, each by the tensor that stands in for it."""
    stand_ins = {id(parameter): tensor for parameter, tensor in rows}
    before = [group["params"] for group in optimizer.param_groups]
    for group, parameters in zip(optimizer.param_groups, before, strict=True):
        group["params"] = [stand_ins[id(p)] for p in parameters if id(p) in stand_ins]
    try:
        optimizer.step()
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters


def step_whole(optimizer: Any, scaler: Any) -> None:
    """One `optimizer.step()` of all parameters, by the user's GradScaler where there is one."""
    if scaler is None:
        optimizer.step()
        return
    scaler.step(optimizer)
    scaler.update()


def copy_all(tensors: list[Any]) -> list[Any]:
    """Copies; of a card's tensors of one type in few launches (times one changes no bit), counters as one stack."""
    import torch

    copies: list[Any] = [None] * len(tensors)
    alike: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.is_cuda and (tensor.dtype.is_floating_point or not tensor.dim()):
            alike.setdefault(tensor.dtype, []).append(place)
        else:
            copies[place] = tensor.detach().clone()
    for dtype, places in alike.items():
        given = [tensors[place].detach() for place in places]
        made = multiply_each(given, 1.0) if dtype.is_floating_point else torch.stack(given).unbind()
        for place, copy in zip(places, made, strict=True):
            copies[place] = copy
    return copies


def room_of(largest: int, total: int) -> int:
    """Bytes of parameters that are updated at once: those of the largest or a sixteenth of all: few calls, hardly more
    memory."""
    return max(largest, total // 16)


def room_for(parameters: list[Any]) -> int:
    """The same of these parameters."""
    sizes = list(map(sizeof, parameters))
    return room_of(max(sizes, default=0), sum(sizes))


def largest_part(parameters: list[Any], part: float) -> list[Any]:
    """The largest of them, so many that they hold that part of all bytes."""
    sizes = sorted(parameters, key=sizeof, reverse=True)
    held = itertools.accumulate(map(sizeof, sizes), initial=0)
    wanted = round(part * sum(map(sizeof, parameters)))
    return [parameter for parameter, before in zip(sizes, held, strict=False) if before < wanted or part >= 1]


def in_runs(tensors: list[Any], room: int) -> Iterator[list[Any]]:
    """Runs of tensors, each no larger than `room` together, or one tensor."""
    run: list[Any] = []
    size = 0
    for tensor in tensors:
        mine = sizeof(tensor)
        if run and size + mine > room:
            yield run
            run, size = [], 0
        run.append(tensor)
        size += mine
    if run:
        yield run
