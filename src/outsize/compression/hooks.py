"""A model while it is looked at: in evaluation mode, with hooks that go afterwards, module by module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Inside the block the model is in evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def hooked(hooks: Collection[Any]) -> Iterator[None]:
    """Inside the block the hooks are there."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def following(model: Any, stack: list[str], note: Callable[[str, Any], None]) -> Iterator[None]:
    """Inside the block `stack` names the modules that run, the innermost last, and `note` hears what each has given."""

    def watch(name: str, module: Any) -> Iterator[Any]:
        def end(_module: Any, _args: Any, result: Any) -> None:
            note(name, result)
            stack.pop()

        yield module.register_forward_pre_hook(lambda *_: stack.append(name))
        yield module.register_forward_hook(end)

    with hooked([hook for name, module in model.named_modules() for hook in watch(name, module)]):
        yield
