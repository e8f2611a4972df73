"""Replaces functions of torch while a block runs.

In: functions of ours. Out: torch calls them instead of its own until the block ends. Torch has no public way to do
this.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from outsize.model.torch_port.dispatch import asks_for_functions, no_functions, numbered_card, torch_off
from outsize.model.torch_port.parts import attribute, part

Row = tuple[Any, str, Any]
"""(module or class, name, what stands there while the block runs)."""


@contextlib.contextmanager
def replaced(rows: list[Row]) -> Iterator[None]:
    """Other values under these names; a name that this torch does not have is passed over."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in rows:
            if name in vars(owner):
                stack.callback(setattr, owner, name, vars(owner)[name])
                setattr(owner, name, value)
        yield


def wrapping_backward(mode: Callable[[], Any]) -> contextlib.AbstractContextManager[None]:
    """Every backward pass in the block runs under a mode."""
    part("autograd._engine_run_backward")
    engine = vars(torch.autograd)["_engine_run_backward"]  # another block may have replaced it

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with mode():
            return engine(*args, **kwargs)

    return replaced([(torch.autograd, "_engine_run_backward", run_backward)])


def on_autocast_end(clear: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """`clear` is called where torch forgets what autocast has cast."""
    before = torch.clear_autocast_cache

    def clear_all() -> None:
        clear()
        before()

    return replaced([(torch, "clear_autocast_cache", clear_all)])


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """Autocast that user code turns on does nothing."""
    kind = part("amp.autocast_mode.autocast")
    enter = kind.__enter__

    def entered(self: Any) -> Any:
        attribute(self, "_enabled")
        self._enabled = False
        return enter(self)

    return replaced([(kind, "__enter__", entered)])


def copying_tensors(copy: Callable[[Any, dict[int, Any]], Any]) -> contextlib.AbstractContextManager[None]:
    """`copy.deepcopy` makes copies of tensors by this function."""
    return replaced([(owner, "__deepcopy__", copy) for owner in (torch.Tensor, torch.nn.Parameter)])


def registering_parameters(register: Callable[[Any, str, Any], None]) -> contextlib.AbstractContextManager[None]:
    """Modules register their parameters by this function."""
    return replaced([(torch.nn.Module, "register_parameter", register)])


def checkpoints_compared_by(describe: Callable[[Any], Any]) -> contextlib.AbstractContextManager[None]:
    """Checkpointing compares what `describe` gives of forward and recomputed tensors, and forgets the default device it finds."""
    name = "_allowed_determinism_checks_to_fns"
    checks = {**part(f"utils.checkpoint.{name}"), "default": describe}
    default, kind = part("utils.checkpoint.DefaultDeviceType"), "_default_device_type"
    return replaced([(part("utils.checkpoint"), name, checks), (default, kind, attribute(default, kind))])


def inner_functions_seen() -> list[Row]:
    """Torch functions written in Python turn the mode off for the calls they make; with these rows it stays on."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    owners = (torch.nn.functional, torch.functional, torch.nn.init)
    return [(owner, name, _has_subclass) for owner in owners for name in names]


def foreach_everywhere() -> list[Row]:
    """Rows with which gradients without contents are clipped as those of a device: many at once."""

    def plain(tensors: Any, device: Any) -> bool:
        return all(tensor is None or type(tensor) is torch.Tensor for tensor in tensors)

    clip = importlib.import_module("torch.nn.utils.clip_grad")
    return [(clip, "_device_has_foreach_support", lambda device: True), (clip, "_has_foreach_support", plain)]


def numbered_cards() -> Row:
    """`module.to(0)` and `module.to(device="cuda")` are read as they stand: without a card torch does not know the first, and
    a mode would rewrite the second."""
    parse = part("_C._nn._parse_to")

    def parse_to(*args: Any, **kwargs: Any) -> Any:
        with no_functions():
            return parse(*map(numbered_card, args), **kwargs)

    return part("_C._nn"), "_parse_to", parse_to


def steps_unmarked() -> list[Row]:
    """Optimizers mark their steps for profilers, which takes as long as ten operators where a mode sees the mark."""
    record = torch.autograd.profiler.record_function
    return [(record, "__enter__", lambda mark: mark), (record, "__exit__", lambda mark, *_: None)]


def scripting_undisturbed(rows: list[Row]) -> Row:
    """`torch.jit.script` with unpatched torch: a library that the step imports may compile functions."""
    script = torch.jit.script
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in rows if name in vars(owner)]

    def compile(*args: Any, **kwargs: Any) -> Any:
        with replaced(before), torch_off():
            return script(*args, **kwargs)

    return torch.jit, "script", compile


def _has_subclass(*values: Any) -> bool:
    """True where a tensor subclass wants to be asked, the mode itself not counted."""
    if not part("_C._is_torch_function_enabled")():  # a subclass has been asked and calls on
        return False
    plain = (torch.Tensor, torch.nn.Parameter)
    flat = values[0] if len(values) == 1 and isinstance(values[0], tuple | list) else values
    return any(isinstance(v, torch.Tensor) and type(v) not in plain and _asks(type(v)) for v in flat)


def _asks(kind: Any) -> bool:
    return asks_for_functions(kind) and "Buffer" not in kind.__name__
