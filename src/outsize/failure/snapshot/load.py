"""The pickle of `torch.cuda.memory._dump_snapshot` -> plain dictionaries, without running anything in it.

A snapshot holds dictionaries, lists, tuples, text, numbers and None, nothing else: so a pickle that names any class or function
is refused before that name is looked up, as is one whose contents are not what a snapshot has. What is read is bounded: file
size, number of blocks and trace entries, size of every number.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

from outsize.core.errors import StoreError

LARGEST_FILE = 4 * 2**30
"""Bytes; a history of ten million entries with stacks is well below."""
MOST_ENTRIES = 20_000_000
"""Blocks and trace entries together."""
LARGEST_NUMBER = 2**64
LONGEST_STACK = 512
"""Frames of a stack that are read."""

_BLOCK = {"size": int, "state": str}
_SEGMENT = {"address": int, "total_size": int, "stream": int, "blocks": list}
_ENTRY = {"action": str, "size": int}


class _Refused(pickle.UnpicklingError):
    """The pickle asks for something a snapshot never has."""


class _PlainUnpickler(pickle.Unpickler):
    """Builds only what pickle builds without a name."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise _Refused(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise _Refused("it refers to objects outside the file")


def load_snapshot(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The snapshot in a file, or a `StoreError` that says what is wrong with it."""
    name = os.fspath(path)
    try:
        size = os.stat(name).st_size
        if size > LARGEST_FILE:
            raise StoreError(
                f"{name} has {size:,} bytes; a snapshot of more than {LARGEST_FILE:,} is not read", path=name
            )
        with open(name, "rb") as file:
            content = _unpickle(file, name)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"cannot read {name}: {error.strerror or error}", path=name) from error
    return check_snapshot(content, name)


def _unpickle(file: IO[bytes], name: str) -> Any:
    try:
        return _PlainUnpickler(file).load()
    except _Refused as error:
        raise StoreError(
            f"{name} is not a plain memory snapshot: {error}. Nothing of it was run; a snapshot made by "
            "torch.cuda.memory._dump_snapshot() holds only numbers and text",
            path=name,
        ) from None
    except OSError:
        raise
    except Exception as error:  # bytes that are no pickle can fail in any way
        raise StoreError(
            f"{name} is not a readable pickle ({type(error).__name__}: {str(error)[:120]}): cut short or damaged",
            path=name,
        ) from None


def check_snapshot(content: Any, name: str = "the snapshot") -> dict[str, Any]:
    """The content if it is a snapshot, else a `StoreError`."""
    if not isinstance(content, Mapping) or not isinstance(content.get("segments"), list):
        raise StoreError(f"{name} is no CUDA memory snapshot: it has no list of segments", path=name)
    traces = content.get("device_traces", [])
    if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
        raise StoreError(f"{name} is no CUDA memory snapshot: its device_traces are not lists", path=name)
    count = len(content["segments"]) + sum(map(len, traces))
    for segment in content["segments"]:
        _check(segment, _SEGMENT, "a segment", name)
        count += len(segment["blocks"])
    if count > MOST_ENTRIES:
        raise StoreError(f"{name} has more than {MOST_ENTRIES:,} blocks and trace entries", path=name)
    for segment in content["segments"]:
        for block in segment["blocks"]:
            _check(block, _BLOCK, "a block", name)
    for trace in traces:
        for entry in trace:
            _check(entry, _ENTRY, "a trace entry", name)
    return dict(content)


def _check(item: Any, fields: Mapping[str, type], what: str, name: str) -> None:
    if not isinstance(item, dict):
        raise StoreError(f"{name} is damaged: {what} is a {type(item).__name__}", path=name)
    for field, kind in fields.items():
        value = item.get(field)
        if not isinstance(value, kind) or (isinstance(value, int) and not 0 <= value < LARGEST_NUMBER):
            raise StoreError(f"{name} is damaged: {what} has no valid {field!r}", path=name)


def frames_of(item: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The stack an item was allocated from, innermost first; empty where none was recorded."""
    frames = item.get("frames") or ()
    if not frames and isinstance(item.get("history"), list) and item["history"]:
        last = item["history"][-1]
        frames = (last.get("frames") or ()) if isinstance(last, Mapping) else ()
    if not isinstance(frames, list | tuple):
        return ()
    return [frame for frame in frames[:LONGEST_STACK] if isinstance(frame, dict)]
