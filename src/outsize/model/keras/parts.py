"""What is alive at the peak: by kind, by layer, by line of code, and over time.

In: the events of a followed step. Out: parts of a `Footprint`. Kinds come from where a tensor was made (forward pass, gradients,
update) and who reads it; layers from the scopes in operators' names, lines from what TensorFlow remembers of each operator.
"""

from __future__ import annotations

import os
from typing import Any

from outsize.core.allocation import AllocationEvent
from outsize.model.keras.buffers import Buffer
from outsize.model.keras.graph import GRADIENTS, Flat, is_gradient
from outsize.model.keras.kernels import SHARE
from outsize.model.keras.trace import Followed, Traced, after_gradients, phase_of

KINDS = ("weights", "buffers", "gradients", "optimizer state", "inputs", "activations", "temporaries")


def name_kinds(traced: Traced, followed: Followed) -> dict[int, str]:
    """Gives every buffer its kind; answers with the phase of each, by id."""
    after = after_gradients(traced.flat)
    saved, given = _read_by_gradients(traced.flat, after)
    phases = {}
    for alloc, buffer in followed.events:
        if not alloc:
            continue
        phase = phases[buffer.id] = phase_of(buffer.node, after)
        if buffer.kind in KINDS or buffer.kind:
            continue
        name = "" if buffer.node is None else buffer.node.name
        if phase == "backward" and name in given:
            buffer.kind = "gradients"
        elif phase == "forward" and (name in saved or "accumulator" in name or _in_loop(buffer, traced.flat)):
            buffer.kind = "activations"
        else:
            buffer.kind = "temporaries"
    return phases


def _in_loop(buffer: Buffer, flat: Flat) -> bool:
    """Made in a loop of the forward pass: kept for the backward pass where it lives on."""
    return buffer.node is not None and buffer.node not in flat.nodes and not is_gradient(buffer.name)


def _read_by_gradients(flat: Flat, after: set[str]) -> tuple[set[str], set[str]]:
    """(nodes of the forward pass that the backward pass reads, nodes of the backward pass that the update reads)."""
    saved: set[str] = set()
    given: set[str] = set()
    for node in reversed(flat.nodes):  # readers come after what they read
        backward = is_gradient(node.name)
        for source, _ in node.inputs:
            before = flat.nodes[source]
            if (backward or (node.type in SHARE and node.name in saved)) and not is_gradient(before.name):
                saved.add(before.name)
            elif not backward and node.name in after and is_gradient(before.name):
                given.add(before.name)
    return saved, given


def as_events(followed: Followed) -> list[AllocationEvent]:
    return [
        AllocationEvent(number, alloc, buffer.id, buffer.bytes)
        for number, (alloc, buffer) in enumerate(followed.events)
    ]


def layer_of(buffer: Buffer) -> str:
    """The layer in an operator's name: `gradient_tape/sequential/dense/MatMul` -> `sequential/dense`."""
    name = buffer.name
    for prefix in GRADIENTS:
        name = name.rpartition(prefix)[2]
    parts = [part for part in name.split("/") if part]
    return "/".join(parts[:-1][:3]) or (parts[0] if parts else "")


def line_of(buffer: Buffer) -> str:
    """The user's line that made an operator, where TensorFlow remembers one."""
    op = None if buffer.node is None else buffer.node.op
    if op is None:
        return ""
    try:
        frames: list[Any] = list(op.traceback)
    except (AttributeError, TypeError):
        return ""
    for frame in reversed(frames):
        file = str(frame.filename)
        if f"{os.sep}outsize{os.sep}model{os.sep}" in file:
            return ""  # what is before is the call of `estimate`
        if "site-packages" not in file and not file.startswith("<"):
            return f"{os.path.basename(file)}:{frame.lineno}"
    return ""


def moment(buffer: Buffer, phases: dict[int, str]) -> str:
    """When a buffer was made: `step 2 backward`."""
    return "build" if buffer.step < 0 else f"step {buffer.step + 1} {phases.get(buffer.id, 'forward')}"
