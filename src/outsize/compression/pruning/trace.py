"""Runs a model once and finds out which indices of its weights belong together.

In: a model and a function that runs it. Out: a `Trace`: the axes of all parameters and buffers (`axes.py`), the axes that
each module has to do with, and those of what each module gave. Operators are seen at the dispatcher, so skip
connections, shared weights, functions and autograd functions of the user's own need no special case.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outsize.compression.hooks import following
from outsize.compression.pruning.axes import Axis, freeze, size_of
from outsize.compression.pruning.call import Axes, Call, fresh
from outsize.compression.pruning.rules import RULES, Rule, opaque, pointwise
from outsize.model.torch_port.dispatch import arguments_of, decomposition_of, dispatch_mode, tensors_in
from outsize.model.torch_port.objects import storage_key

OUTSIDE = "it comes from outside the model"
OUTPUT = "it is an output of the model"
IDLE = "it took no part in the run"


@dataclass(slots=True, kw_only=True)
class Trace:
    """What one run has shown."""

    tensors: dict[str, Axes] = field(default_factory=dict)
    """Parameter or buffer -> its axes. Tensors of several names stand under all of them."""
    inside: dict[str, dict[int, Axis]] = field(default_factory=dict)
    """Module -> axes of all tensors that its own operators took or gave."""
    outputs: list[tuple[str, list[Axes]]] = field(default_factory=list)
    """(module, axes of the tensors that it gave), for each call of a module, in order of their ends."""


def trace(model: Any, run: Callable[[], Any], through_norms: bool) -> Trace:
    """The axes of a model, from one run without gradients in evaluation mode."""
    import torch

    seen = _Seen(model, through_norms)
    with following(model, seen.stack, seen.gave), torch.no_grad(), seen.mode():
        run()
    for name, axes in seen.trace.tensors.items():
        if name not in seen.used:
            for axis in axes:
                freeze(axis, IDLE)
    return seen.trace


class _Seen:
    """What is known of tensors while the model runs."""

    def __init__(self, model: Any, through_norms: bool) -> None:
        self.trace = Trace()
        self.through_norms = through_norms
        self.used: set[str] = set()
        self.stack: list[str] = []
        self._known: dict[Any, tuple[Axes, bool]] = {}
        self._names: dict[Any, list[str]] = {}
        self._held: list[Any] = []
        buffers = dict(model.named_buffers(remove_duplicate=False))
        for name, tensor in {**dict(model.named_parameters(remove_duplicate=False)), **buffers}.items():
            found = self._known.setdefault(_key(tensor), (fresh(tensor), True))
            self.trace.tensors[name] = found[0]
            self._names.setdefault(_key(tensor), []).append(name)

    def gave(self, name: str, result: Any) -> None:
        """What a module gave; what the model itself gives stays whole."""
        axes = [self.axes(tensor) for tensor in tensors_in(result)]
        self.trace.outputs.append((name, axes))
        if not name:
            for axis in (axis for some in axes for axis in some):
                freeze(axis, OUTPUT)

    def axes(self, tensor: Any) -> Axes:
        found = self._known.get(_key(tensor))
        if found is None:
            found = self._known[_key(tensor)] = (fresh(tensor, OUTSIDE), False)
        return found[0]

    def is_weight(self, tensor: Any) -> bool:
        found = self._known.get(_key(tensor))
        return found is not None and found[1]

    def mode(self) -> Any:
        seen = self

        class Mode(dispatch_mode()):  # type: ignore[misc]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                kwargs = kwargs or {}
                name = func.name().split("::")[-1].split(".")[0]
                if not seen.has_rule(func, name):
                    for smaller in (func.decompose, decomposition_of(func)):
                        if smaller is None:
                            continue
                        with self:
                            result = smaller(*args, **kwargs)
                        if result is not NotImplemented:
                            return result
                result = func(*args, **kwargs)
                seen.note(func, name, args, kwargs, result)
                return result

        return Mode()

    @staticmethod
    def has_rule(func: Any, name: str) -> bool:
        """True where no smaller operators are needed."""
        import torch

        return name in RULES or torch.Tag.pointwise in func.tags

    def note(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        outs = tuple(tensors_in(result))
        tensors = tuple(tensor for tensor in tensors_in((args, kwargs)) if tensor.ndim or not outs)
        self._held += outs  # so that no other tensor gets their addresses
        if not outs:
            return
        for tensor in tensors:
            self.used.update(self._names.get(_key(tensor), ()))
        weights = bool(tensors) and all(self.is_weight(tensor) for tensor in tensors)
        call = Call(name=name, values=_bind(func, args, kwargs), tensors=tensors, outs=outs, known=self,
                    through_norms=self.through_norms)  # fmt: skip
        if not tensors and name not in RULES:
            axes = [fresh(out, OUTSIDE) for out in outs]
        else:
            axes = _apply(RULES.get(name, pointwise if self.has_rule(func, name) else opaque), call)
        inside = self.trace.inside.setdefault(self.stack[-1] if self.stack else "", {})
        for out, found in zip(outs, axes, strict=True):
            self._known[_key(out)] = (found, weights)
        for tensor in (*tensors, *outs):
            inside.update((id(axis), axis) for axis in self.axes(tensor))


def _apply(rule: Rule, call: Call) -> list[Axes]:
    """What a rule says. A call of a form that it does not know is left whole like an unknown operator."""
    try:
        axes = rule(call)
        if [tuple(map(size_of, some)) for some in axes] == [tuple(out.shape) for out in call.outs]:
            return axes
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        pass
    return opaque(call)


def _key(tensor: Any) -> Any:
    """Two tensors of one storage, shape and layout are the same."""
    return (storage_key(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


@functools.cache
def _arguments(func: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((one.name, one.default_value) for one in arguments_of(func))


def _bind(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by their names in the schema."""
    found = dict(_arguments(func))
    found.update(zip(found, args, strict=False))
    found.update(kwargs)
    return found
