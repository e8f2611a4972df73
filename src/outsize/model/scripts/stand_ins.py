"""What stands in the place of torch's own while a script is followed: loaders, saving, loading, other processes, threads.

Out: rows for `patches.replaced`. What a script saves is kept without contents, so that it can load it again.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from outsize.model.scripts import processes
from outsize.model.scripts.follower import Follower
from outsize.model.torch_port.dispatch import torch_off
from outsize.model.torch_port.fake_cuda import answer
from outsize.model.torch_port.one_process import single_process_rows
from outsize.model.torch_port.patches import Row
from outsize.model.tracing import contentless
from outsize.model.tracing.fake_card import label_for
from outsize.model.tracing.tracer import Tracer

SAVED = "saved"
"""Label of tensors that were saved: they count on no device."""


def rows(tracer: Tracer, follower: Follower) -> list[Row]:
    """All of them."""
    from torch.utils.data import DataLoader

    saved = _Saved(tracer)
    found: list[Row] = [
        *single_process_rows(),
        (DataLoader, "__iter__", lambda loader: follower.batches(loader)),
        (torch, "save", saved.save),
        (torch, "load", saved.load),
        (torch.jit, "save", answer(None)),
        (threading.Thread, "run", _traced_run(tracer)),
        *processes.rows(tracer, follower.stop),
    ]
    try:
        import safetensors.torch

        found += [(safetensors.torch, name, answer(None)) for name in ("save_file", "save_model")]
    except ImportError:
        pass
    return found


def _traced_run(tracer: Tracer) -> Callable[[threading.Thread], None]:
    """Modes belong to a thread, so that each new one needs them."""
    run = threading.Thread.run

    def traced(thread: threading.Thread) -> None:
        with tracer.in_thread():
            run(thread)

    return traced


class _Saved:
    """Files of tensors."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.paths: dict[str, Any] = {}
        self.buffers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.load_real: Callable[..., Any] = torch.load

    def save(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        path = _path_of(f)
        if isinstance(f, str | os.PathLike):
            with open(f, "wb"):  # the file is there afterwards, in the overlay
                pass
        with contentless.copying(self.tracer, SAVED):
            kept = copy.deepcopy(obj)
        if path is None:
            self.buffers[f] = kept
        else:
            self.paths[path] = kept

    def load(self, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        path = _path_of(f)
        found = self.buffers.get(f) if path is None else self.paths.get(path)
        label = _label(self.tracer, map_location)
        if found is None:
            with torch_off():
                found = self.load_real(f, "cpu", *args, **kwargs)
            label = label or "cpu"
        with contentless.copying(self.tracer, label or self.tracer.device):
            return copy.deepcopy(found)


def _path_of(f: Any) -> str | None:
    name = f if isinstance(f, str | os.PathLike) else getattr(f, "name", None)
    return os.path.abspath(os.fsdecode(name)) if isinstance(name, str | bytes | os.PathLike) else None


def _label(tracer: Tracer, location: Any) -> str | None:
    """The device that `map_location` names; a function or a table of devices is taken as the step's device."""
    if location is None:
        return None
    if callable(location) or isinstance(location, dict):
        return tracer.device
    return label_for(tracer, location)
