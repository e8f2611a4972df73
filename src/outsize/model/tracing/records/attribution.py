"""Who an allocation belongs to: its kind, its module and the line that asked for it.

Weights, gradients and optimizer state are found in modules and optimizers as they are used. What a forward pass
allocates is an activation. What a backward pass allocates is a temporary. It belongs to the module whose forward pass
made the running autograd node.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim import optimizer as optimizers

from outsize.model.torch_port.dispatch import in_backward, next_node, parts_of, running_node
from outsize.model.torch_port.objects import around_modules, hooked
from outsize.model.torch_port.parts import PACKAGE
from outsize.model.tracing.records.ledger import Held, Ledger

FILLING = str(Path("torch", "nn", "init.py"))
"""Where torch fills weights."""

OURS = str(PACKAGE)


class Owners:
    """Writes kind, module and line into a ledger's records."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.in_optimizer = False
        self.evaluating = False
        """True while a script runs its model without gradients."""
        self._stack: list[str] = []
        self._names: dict[int, str] = {}
        self._roots: weakref.WeakSet[Any] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._made: dict[int, tuple[str, str]] = {}
        self._torch = ""
        ledger.phase = self.phase
        ledger.where = self.locate

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Follow modules and optimizers while the block runs."""
        self._torch = str(Path(torch.__file__).parent)
        steps = hooked(
            optimizers.register_optimizer_step_pre_hook(self._before_step),
            optimizers.register_optimizer_step_post_hook(self._after_step),
        )
        with around_modules(self._enter, self._leave, always=True), steps:
            yield

    def phase(self) -> str:
        if self.ledger.step < 0:
            return "build"
        if self.in_optimizer:
            return "optimizer"
        if in_backward():
            return "backward"
        return "evaluation" if self.evaluating else "forward"

    @property
    def depth(self) -> int:
        """How many modules are inside each other now."""
        return len(self._stack)

    def node(self) -> int:
        """Number of the autograd node that runs now, -1 outside a backward pass."""

        return running_node()

    def filling(self) -> bool:
        """True while torch fills weights."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.endswith(FILLING):
                return True
            frame = frame.f_back
        return False

    def place(self) -> str:
        """The current module and line, for a note."""
        held = Held(-1, 0, "", "", 0, 0, self.phase())
        self.locate(held)
        return ", ".join(part for part in (held.module, held.line) if part)

    def locate(self, held: Held) -> None:
        """Write module and line of a record that is being made."""

        if held.phase == "backward":
            held.node = self.node()
            held.module, held.line = self._made.get(held.node, ("", ""))
            return
        held.module = self._stack[-1] if self._stack else ""
        held.line = self._line()
        if held.phase == "forward":
            self._made[next_node() - 1] = (held.module, held.line)

    def _line(self) -> str:
        name, number = self.where()
        return f"{Path(name).name}:{number}" if name else ""

    def where(self) -> tuple[str, int]:
        """File and line of the user's code that is at work."""
        frame: Any = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if not name.startswith((self._torch, OURS, "<")):
                return name, frame.f_lineno
            frame = frame.f_back
        return "", 0

    def _enter(self, module: Any, args: Any) -> None:
        if id(module) not in self._names or not self._stack:
            self._adopt(module)
        self._stack.append(self._names[id(module)])

    def _leave(self, module: Any, args: Any, out: Any) -> None:
        if self._stack:
            self._stack.pop()

    def _adopt(self, module: Any) -> None:
        if module in self._roots:
            return
        if id(module) not in self._names:
            root = type(module).__name__
            for name, child in module.named_modules():
                self._names[id(child)] = f"{root}.{name}" if name else root
            self._roots.add(module)
            self.mark()

    def inputs(self, args: Any) -> None:
        """Name what modules and optimizers among the step's arguments hold."""
        for value in args:
            if isinstance(value, torch.nn.Module):
                self._adopt(value)
            elif isinstance(value, torch.optim.Optimizer):
                self._optimizers.add(value)
        self.mark()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._optimizers.add(optimizer)
        self.mark()
        self.in_optimizer = True

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.in_optimizer = False
        self.mark()

    def mark(self) -> None:
        """Look at every module and optimizer seen so far and name what they hold."""
        for optimizer in list(self._optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._name(parameter, "weights")
                    self._name(parameter.grad, "gradients")
            for state in optimizer.state.values():
                for value in state.values() if isinstance(state, dict) else ():
                    self._name(value, "optimizer state")
        for module in list(self._roots):
            for parameter in module.parameters():
                self._name(parameter, "weights")
                self._name(parameter.grad, "gradients")
            for buffer in module.buffers():
                self._name(buffer, "buffers")

    def _name(self, value: Any, kind: str) -> None:
        if isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value):
            for one in parts_of(value):
                held = self.ledger.of(one)
                if held is not None:
                    held.kind = kind
