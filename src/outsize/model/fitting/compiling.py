"""Whether a step is fitted as compiled: as the user left it, compiled for this fit, or as it was written.

In: the model, and `compile` of `outsize.fit`. Out: the model that is fitted, with a way back to how it was given, and what is
known of compiling it. Probes are cheap, as every fit asks them: nothing is compiled, and torch's compiler is not imported, unless
it was asked for.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sysconfig
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from outsize.core.errors import InputError
from outsize.core.fitting import FitPlan
from outsize.core.units import format_bytes
from outsize.model.fitting.arguments import Request
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.user_errors import in_users_code, say
from outsize.model.torch_port import compiler
from outsize.model.torch_port.objects import is_compiled, is_compiled_copy
from outsize.model.torch_port.parts import is_older_than

BACKEND = "inductor"
"""By which a model is compiled for a fit."""

FIRST = "2.9"
"""The first torch whose compiler is followed."""


class Traced(NamedTuple):
    """What the plain step of a model holds, by traces."""

    written: int
    """Bytes as it was written."""
    compiled: int
    """Bytes as compiled."""


_traced: weakref.WeakKeyDictionary[Any, Traced] = weakref.WeakKeyDictionary()
"""Model -> what fits that compiled it have shown."""


class Compiling:
    """How one fit treats what is compiled, and the way back."""

    def __init__(self, model: Any, compile: bool | str) -> None:
        self.given = model
        self.asked = compile
        self.stripped = (
            compile is False and isinstance(model, torch.nn.Module) and any(map(is_compiled, model.modules()))
        )
        """It came compiled and is fitted as it was written."""
        self.by_us = False
        """It is compiled for this fit."""
        self._written = 0
        self._back: list[Callable[[], None]] = []
        self.model = model
        """The model that is fitted."""
        if self.stripped:
            self.model = compiler.module_in(model) if is_compiled_copy(model) else model
            self._strip()

    def apply(self, request: Request, wanted: bool) -> Request:
        """The request with its model compiled where that is `wanted` (a saved plan may ask for it too) and it is not yet."""
        trains = request.host is None and request.call is None
        if not wanted or request.work.compiled:
            return request
        if not trains:
            raise InputError(
                "compile=True is for training a model on its device: leave it out for an inference, and for a model on the host"
            )
        why_not = why_not_compiled(request.device.type)
        if why_not:
            raise InputError(f"the model cannot be compiled here: {why_not}; compile=False fits it as it was written")
        with in_users_code("the step, followed without contents (values that it reads are chosen),"):
            self._written = Stage(request.work, request.batch).project(Choice()).peak
        model = self.model
        try:
            model.compile(backend=BACKEND)
        except RuntimeError as error:
            raise InputError(
                f"torch.compile refuses the model: {say(error)}; compile=False fits it as it was written"
            ) from error
        self._back.append(lambda: compiler.call_by(model, None))
        self.by_us = True
        return replace(request, work=replace(request.work, compiled=True), compiled_here=True)

    def describe(self, plan: FitPlan, request: Request) -> FitPlan:
        """The plan with what is known of compiling."""
        if self.by_us:
            _traced[self.model] = found = Traced(self._written, plan.plain)
            return plan.with_note(
                f"compiled by {BACKEND} for this fit, in the first step, until undo(): {_compare(found)}"
            )
        if self.stripped:
            return plan.with_note("the model came compiled and is fitted as it was written (compile=False)")
        known = request.host is not None or request.call is not None or request.work.compiled
        if known or self.asked is False or why_not_compiled(request.device.type):
            return plan
        found_before = _traced.get(self.model)
        gain = "bytes and time not measured" if found_before is None else _compare(found_before)
        return plan.with_note(
            f"not compiled ({gain}); compile=True compiles the model once a process and plans its bytes as compiled"
        )

    def undo(self) -> None:
        """The model is as it was given."""
        while self._back:
            self._back.pop()()

    def _strip(self) -> None:
        """Modules are called as they were written: those in copies too."""
        for module in self.model.modules():
            own = compiler.compiled_call(module)
            if own is not None:
                compiler.call_by(module, None)
                self._back.append(functools.partial(compiler.call_by, module, own))
            elif is_compiled_copy(module):
                before = module.__dict__["forward"]
                module.__dict__["forward"] = compiler.module_in(module).__call__
                self._back.append(functools.partial(module.__dict__.update, forward=before))


def why_not_compiled(device: str) -> str:
    """Why torch.compile cannot be used for a kind of device, empty where nothing speaks against it."""
    if is_older_than(FIRST):
        return f"torch {torch.__version__} is older than {FIRST}, the first whose compiler is followed"
    if device == "cuda":
        there = importlib.util.find_spec("triton") is not None
        return "" if there else "triton is not installed, and kernels for the card are written in it"
    names = (os.environ.get("CXX", ""), "g++", "c++", "clang++")
    if not any(name and shutil.which(name) for name in names):
        return "there is no C++ compiler (g++, c++, clang++ or the one that CXX names)"
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if headers.exists() else f"Python's headers are not installed ({headers} is not there)"


def _compare(found: Traced) -> str:
    return (
        f"the plain step holds {format_bytes(found.compiled)} compiled and {format_bytes(found.written)} as written, by traces; "
        "time not measured"
    )
