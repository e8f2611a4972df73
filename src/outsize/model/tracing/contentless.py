"""Copies real modules, optimizers and tensors without their contents; the real ones are not touched.

In: a step, its arguments, and what the step reaches through its closure, its module's globals and the attributes of objects.
Out: copies of all that. Each tensor in them is one without contents on the device that was asked for. Tensors that shared a
storage still share one. Small tensors that are no weights keep their values, so that a count of steps or a mask is still known.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from outsize.model.torch_port.compiler import (
    backend_of,
    compiled_call,
    compiled_function,
    copying_compiled,
    set_compiled_call,
)
from outsize.model.torch_port.dispatch import is_wrapper, torch_off
from outsize.model.torch_port.objects import key_of
from outsize.model.torch_port.patches import copying_tensors
from outsize.model.torch_port.sharding import is_spread
from outsize.model.tracing.rules import known_values
from outsize.model.tracing.tracer import Tracer

T = TypeVar("T")

KINDS = (
    torch.Tensor,
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.amp.GradScaler,
    torch.optim.lr_scheduler.LRScheduler,
)
"""What is copied without the contents of its tensors."""

MOST = 1000
"""The most values that are searched for tensors in an object that a step reaches."""


def convert(tracer: Tracer, step: Callable[..., Any], args: tuple[Any, ...], label: str) -> tuple[Any, tuple[Any, ...]]:
    """(step, arguments) without contents."""
    return _converted(tracer, label, lambda memo: (_rebind(step, memo), copy.deepcopy(args, memo)))


def convert_builder(tracer: Tracer, step: Any, build: Any, label: str, moved: bool) -> tuple[Any, Any]:
    """(step, builder): what they reach is without contents, where it is or `moved`; as they are where they reach no tensor."""
    if not (_reaches_tensors(step) or _reaches_tensors(build)):
        return step, build
    return _converted(tracer, label, lambda memo: (_rebind(step, memo), _rebind(build, memo)), moved)


def _converted(tracer: Tracer, label: str, convert_all: Callable[[Copies], T], moved: bool = True) -> T:
    """`convert_all(copies so far)`; `moved`: what is on the host goes to `label` too."""
    memo = Copies()
    memo.compile = tracer.compile
    with copying(tracer, label, moved), copying_compiled(tracer.compile):
        made = convert_all(memo)
    for module in memo.get(id(memo), ()):  # a copied module forgets that it was compiled by its own compile()
        own = compiled_call(module)
        if own is not None:
            set_compiled_call(memo[id(module)], tracer.compile, own)
    return made


class Copies(dict[int, Any]):
    """Address of what was copied -> its copy."""

    compile: Callable[..., Any]
    """Stands for `torch.compile`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, dict[str, Any]] = {}
        """Address of a module's globals -> those of its copied functions."""


@contextlib.contextmanager
def copying(tracer: Tracer, label: str, moved: bool = True) -> Iterator[None]:
    """While the block runs, a deep copy of a tensor is one without contents, on `label`; on the host if it is not `moved`."""
    bases: dict[int, Any] = {}

    def empty_copy(value: Any, memo: dict[int, Any]) -> Any:
        if id(value) in memo:
            return memo[id(value)]
        if is_wrapper(value) and not is_spread(value):
            return memo.setdefault(id(value), _wrapped(value, lambda inner: empty_copy(inner, memo)))
        with torch_off():
            storage = value.untyped_storage()
            base = bases.get(key_of(storage))
            if base is None:
                base = bases[key_of(storage)] = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
                stays = not moved and not value.is_meta and value.device.type == "cpu"
                tracer.ledger.add(base, "cpu" if stays else label, "given")
                known = tracer.ledger.values.get(key_of(storage)) if value.is_meta else storage
                if known is not None and not value.requires_grad and not isinstance(value, torch.nn.Parameter):
                    known_values.keep(tracer, base, known)  # counts of steps, lengths, masks
            made = torch.empty(0, dtype=value.dtype, device="meta")
            made.set_(base.untyped_storage(), value.storage_offset(), value.shape, value.stride())
            if isinstance(value, torch.nn.Parameter):
                made = torch.nn.Parameter(made, requires_grad=value.requires_grad)
            else:
                made.requires_grad_(value.requires_grad and value.is_leaf)
            memo[id(value)] = made
            if value.is_leaf and value.grad is not None:
                made.grad = empty_copy(value.grad, memo)
        return made

    with copying_tensors(empty_copy):
        yield


def _wrapped(value: Any, make: Callable[[Any], Any]) -> Any:
    """A tensor that is made of others, such as a quantised weight of torchao, made of their copies."""
    names, more = value.__tensor_flatten__()
    held = {name: getattr(value, name) for name in names}
    inner = {name: make(one) if isinstance(one, torch.Tensor) else one for name, one in held.items()}
    with torch_off():
        made = type(value).__tensor_unflatten__(inner, more, value.shape, value.stride())
        if isinstance(value, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=value.requires_grad)
    return made


def _rebind(step: Any, memo: Copies) -> Any:
    """The step with what it closes over replaced."""
    if isinstance(step, functools.partial):
        kept = {name: _replaced(value, memo) for name, value in step.keywords.items()}
        return functools.partial(_rebind(step.func, memo), *(_replaced(value, memo) for value in step.args), **kept)
    if isinstance(step, types.MethodType):
        return types.MethodType(step.__func__, _replaced(step.__self__, memo))
    if not isinstance(step, types.FunctionType):
        return copy.deepcopy(step, memo)
    original = compiled_function(step)
    if original is not None:
        return memo.compile(_rebind(original, memo), backend=backend_of(step))
    names = memo.names.setdefault(id(step.__globals__), dict(step.__globals__))
    for name in _names_used(step):
        value = step.__globals__[name]
        if isinstance(value, types.FunctionType) and value.__globals__ is step.__globals__:
            names[name] = _with_globals(value, names, memo)
        else:
            names[name] = _replaced(value, memo)
    return _with_globals(step, names, memo)


def _names_used(function: types.FunctionType) -> dict[str, None]:
    """Globals that a function uses, and functions of its module that it calls: the rest of a notebook is no part of a step."""
    found: dict[str, None] = {}
    codes: list[types.CodeType] = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for name in code.co_names:
            if name in found or name not in function.__globals__:
                continue
            found[name] = None
            value = function.__globals__[name]
            if isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__:
                codes.append(value.__code__)
    return found


def _reaches_tensors(function: Any) -> bool:
    """True where torch's tensors are in what a step or a builder closes over, or in globals that it uses."""
    names = _names_used(function) if isinstance(function, types.FunctionType) else ()
    seen: set[int] = set()
    return _holds_tensors(function, seen) or any(_holds_tensors(function.__globals__[name], seen) for name in names)


def _with_globals(function: types.FunctionType, names: dict[str, Any], memo: Copies) -> types.FunctionType:
    cells = tuple(
        cell if _is_empty(cell) else types.CellType(_replaced(cell.cell_contents, memo))
        for cell in function.__closure__ or ()
    )
    new = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells or None)
    new.__kwdefaults__ = function.__kwdefaults__
    return new


def _replaced(value: Any, memo: Copies) -> Any:
    """The value without contents if torch's tensors are in it, else the value itself."""
    if id(value) in memo:
        return memo[id(value)]
    if not _holds_tensors(value, set()):
        return value
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        made = _rebind(value, memo)
    elif isinstance(value, (*KINDS, list, tuple, dict, set)) or hasattr(type(value), "__deepcopy__"):
        return copy.deepcopy(value, memo)
    else:  # only what holds tensors is copied: an object may also hold files, locks and large arrays
        try:
            made = copy.copy(value)
        except TypeError:  # it cannot be copied, so the step meets it as it is
            return value
        memo[id(value)] = made
        vars(made).update({name: _replaced(item, memo) for name, item in vars(value).items()})
    memo[id(value)] = made
    return made


def _holds_tensors(value: Any, seen: set[int]) -> bool:
    """True where torch's tensors are in a value: in a container, an attribute, or what a function closes over."""
    if isinstance(value, KINDS):
        return True
    if id(value) in seen or len(seen) > MOST or isinstance(value, type | types.ModuleType):
        return False
    seen.add(id(value))
    return any(_holds_tensors(item, seen) for item in inside(value))


def inside(value: Any) -> list[Any]:
    """What a value is made of, as far as tensors may be in it."""
    if isinstance(value, dict):
        return list(value.values())[:MOST]
    if isinstance(value, list | tuple | set):
        return list(value)[:MOST]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, types.FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if not _is_empty(cell)]
    return list(getattr(value, "__dict__", {}).values())


def _is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:  # a name that has no value yet
        return True
