"""Which passes run on the device: all that it can do where the user named it, those that pay under `auto`.

A pass pays where the time of its slowest level (link, device memory, arithmetic) is well below the processor's time for
the same work; where the disk binds both, it does not. The rates of the processor are rough and on its side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outsize.array.device.base import DeviceBudget
from outsize.array.device.lower import Refused, Trivial
from outsize.array.device.passes import DeviceMapPass, DeviceReducePass, OnDevice
from outsize.array.device.product_pass import DeviceContractPass
from outsize.array.graph.barrier import Contract, Lane, Reduce, Scan, Select
from outsize.array.graph.elementwise import SLOW
from outsize.array.graph.external_sort import Merged, Runs
from outsize.array.graph.node import Node, Source, walk
from outsize.array.graph.rearrange import Affine
from outsize.array.passes.base import Pass
from outsize.array.store.base import Sink, Store
from outsize.array.tuning import Tuning
from outsize.core.errors import InputError
from outsize.engine.pool import cores

_TIMES = {"f": 2.0, "d": 1.0, "F": 1.0, "D": 0.5}
"""How many times as fast products of a dtype are as those of float64."""
Outputs = Sequence[tuple[Node, Sink]]


def pass_on_device(
    outputs: Outputs, bindings: Mapping[Node, Store], tuning: Tuning, device_budget: DeviceBudget, notes: list[str]
) -> Pass | None:
    """The pass on the device, or None with a note: refused by an `InputError` where the user named the device."""
    node = outputs[0][0]
    try:
        made = _make(outputs, bindings, tuning, device_budget)
    except Refused as refusal:
        if device_budget.strict and not isinstance(refusal, Trivial):
            raise InputError(
                f"{node.label()} cannot run on {device_budget.device.name}: {refusal}; "
                "use device='auto' to let the processor do it"
            ) from None
        notes.append(f"{node.label()} stays on the processor: {refusal}")
        return None
    if not device_budget.strict:
        why = _does_not_pay(made)
        if why is not None:
            notes.append(f"{made.label()} stays on the processor: {why}")
            return None
    return made


def _make(
    outputs: Outputs, bindings: Mapping[Node, Store], tuning: Tuning, device_budget: DeviceBudget
) -> OnDevice | DeviceContractPass:
    node, sink = outputs[0]
    if any(isinstance(made, Select | Scan | Lane | Runs | Merged) for made, _ in outputs):
        raise Refused("it has no rule for a device")
    if isinstance(node, Reduce):
        return DeviceReducePass(outputs, bindings, tuning, device_budget)  # type: ignore[arg-type]
    if isinstance(node, Contract):
        return DeviceContractPass(node, sink, bindings, tuning, device_budget)
    made = DeviceMapPass(node, sink, bindings, tuning, device_budget)
    little = sum(leaf.nbytes for leaf in made.leaves) <= tuning.device_least
    if little and all((leaf.inputs[0] if isinstance(leaf, Affine) else leaf) in bindings for leaf in made.leaves):
        raise Trivial("the little that reductions came to is in memory already")
    return made


def _does_not_pay(work: OnDevice | DeviceContractPass) -> str | None:
    rates = work.device_budget.device.rates()
    sent = sum(leaf.nbytes for leaf in work.leaves)
    back = sum(node.nbytes for node, _ in work.outputs)
    below = (node for leaf in work.leaves for node in walk(leaf) if isinstance(node, Source))
    disk = sum(node.nbytes for node in below if not node.store.resident) / work.tuning.disk_rate
    there = max(sent / rates.link_in, back / rates.link_out, disk)
    if isinstance(work, DeviceContractPass):
        there = max(there, work.flops / rates.product(work.node.dtype.char, work.device_budget.tf32)[1])
        here = work.flops / (cores() * work.tuning.core_flops * _TIMES.get(work.node.dtype.char, 1 / 3))
    else:
        here = sum(_chain_seconds(chain.program, sent, work.tuning) for chain in work.chains.values()) / cores()
    if max(here, disk) < work.tuning.device_moment:
        return f"the processor needs about {max(here, disk) * 1000:.1f} ms"
    if max(here, disk) < work.tuning.device_margin * there:
        what = "the disk binds both" if disk >= there * 0.99 else f"the link alone takes {there:.2f} s"
        return f"{what}, the processor about {max(here, disk):.2f} s"
    return None


def _chain_seconds(program: Any, sent: int, tuning: Tuning) -> float:
    """Seconds of one core for a chain and one reduction over it."""
    names = [instruction.operation.name for instruction in program.instructions]
    return sum(sent / (tuning.core_slow_bytes if name in SLOW else tuning.core_bytes) for name in (*names, "fold"))
