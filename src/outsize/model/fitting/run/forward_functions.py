"""What of a model is changed while a step runs, and put back when it is over.

In: a model. Out: contexts: modules that run other forward functions, transformers without their cache, attention that calls its
children.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def other_forwards() -> Iterator[Callable[[Any, Callable[..., Any]], None]]:
    """Gives put(module, forward): the module runs that until the end of the block, then its own again."""
    changed: list[tuple[Any, Any]] = []

    def put(module: Any, forward: Callable[..., Any]) -> None:
        changed.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward

    try:
        yield put
    finally:
        for module, before in changed:
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before


def find_configs(model: Any) -> list[Any]:
    """Transformers' settings of a model and its parts."""
    found = {id(config): config for m in model.modules() if (config := getattr(m, "config", None)) is not None}
    return list(found.values())


@contextlib.contextmanager
def without_cache(model: Any, configs: list[Any] | None = None) -> Iterator[None]:
    """A training step of a transformers model keeps no keys and values for generation: a second run would add them again."""
    configs = find_configs(model) if configs is None else configs
    off = [c for c in configs if model.training and getattr(c, "use_cache", None) is True]
    for config in off:
        config.use_cache = False
    try:
        yield
    finally:
        for config in off:
            config.use_cache = True


@contextlib.contextmanager
def children_called() -> Iterator[None]:
    """Torch's attention and encoder layers call their children, instead of taking their weights to one fused operator."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
