"""A step on one of many ranks: the user's model is spread before it is traced, and the rank that holds most is followed.

In: what a builder made, a number of ranks, a way to spread. Out: the same objects as the first rank would have them. FSDP2's own
code runs on tensors without contents in a group of ranks that sends nothing, so gathered groups, copies around collective
calls, prefetched groups and reduced gradients are its own. DDP is the model with its buckets, ZeRO-1 that with the largest part
of the optimizer. The model counts as built in parts: what was whole before it was spread is forgotten.
"""

from __future__ import annotations

import contextlib
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from outsize.core.errors import InputError
from outsize.core.footprint import FewestCards, Footprint
from outsize.core.noun import Known
from outsize.core.units import format_bytes
from outsize.model.estimation.configurations import SHARDINGS
from outsize.model.torch_port.objects import parameter_table
from outsize.model.torch_port.one_process import make_buckets, replica_rows
from outsize.model.torch_port.parts import has_part
from outsize.model.torch_port.ranked import is_started, pretended_ranks
from outsize.model.tracing.contentless import inside
from outsize.model.tracing.tracer import Tracer

NODE = 8
"""Cards of a node, inside which HSDP shards."""

NCCL_LIKELY, NCCL_MOST = 700_000_000, 1_600_000_000
"""Bytes of a card that one communicator takes beside torch's allocator, in reports of NCCL's users: 544 to 688 MB on four A100
(NVIDIA/nccl#964), about 1.6 GB (NVIDIA/nccl#864)."""

COUNTS = tuple(2**power for power in range(11))
"""Numbers of cards that are tried for the fewest."""

DEEP = 3
"""Objects inside objects in which models and optimizers are looked for."""


@dataclass(frozen=True, slots=True)
class Spreading:
    """So many ranks, and how a model is spread over them; None: as the step's own code does."""

    count: int
    sharding: str | None

    @property
    def communicators(self) -> int:
        """Groups of ranks that talk."""
        return 0 if self.count == 1 else 2 if self.sharding == "hsdp" and self.count > NODE else 1

    @contextlib.contextmanager
    def around(self, label: str) -> Iterator[None]:
        """The process believes to be the first rank."""
        if is_started():
            raise InputError("this process is a rank already: estimate ranks in a process that is none")
        has_part("distributed.fsdp.fully_shard")  # imported before the trace begins, which follows its buffers
        with pretended_ranks(self.count, label.partition(":")[0], replica_rows()):
            yield

    def apply(self, tracer: Tracer, given: tuple[Any, ...]) -> Any:
        """Spread every model that a step can reach; what comes back has to be held as long as the trace."""
        if self.sharding is None:
            return None
        models, optimizers = find_objects(given)
        if not models:
            raise InputError(
                f"no torch.nn.Module was found in the step and its arguments, so nothing can be spread as {self.sharding!r}: "
                "let build return the model, or spread it in your own code and leave sharding out"
            )
        held: list[Any] = []
        for model in models:
            if self.sharding in ("ddp", "zero1"):
                held += make_buckets(model)
            else:
                self._shard(tracer, model, optimizers)
        for bucket in held:
            tracer.ledger.add(bucket, tracer.device, "bucket").kind = "gradients"
        if self.sharding == "zero1":
            for optimizer in optimizers:
                _keep_part(optimizer, self.count)
        tracer.ledger.begin_anew()
        return held

    def _shard(self, tracer: Tracer, model: Any, optimizers: list[Any]) -> None:
        """`fully_shard` on the model's blocks and on the rest of it."""
        _require_shards(self.sharding)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        kind = tracer.device.partition(":")[0]
        across = self.count // NODE if self.sharding == "hsdp" and self.count > NODE else 0
        sizes = (across, NODE) if across else (self.count,)
        mesh = init_device_mesh(kind, sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
        given = {
            "mesh": mesh, "reshard_after_forward": self.sharding != "zero2",
            "offload_policy": CPUOffloadPolicy(pin_memory=kind != "cpu") if self.sharding == "offload" else OffloadPolicy(),
        }  # fmt: skip
        before = [(m, name, p) for m in model.modules() for name, p in parameter_table(m).items() if p is not None]
        blocks = find_blocks(model)
        if not blocks:
            tracer.note("no list of equal blocks was found: all weights are gathered at once, as one group")
        for block in blocks:
            fully_shard(block, **given)
        fully_shard(model, **given)
        new = {id(old): parameter_table(m)[name] for m, name, old in before}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [new.get(id(p), p) for p in group["params"]]
            optimizer.state = defaultdict(dict)


def read_spreading(ranks: Any, sharding: str | None) -> Spreading | None:
    """The user's words, checked; None for one process."""
    if sharding is not None and sharding not in SHARDINGS:
        raise InputError(f"sharding={sharding!r} is unknown: one of {', '.join(SHARDINGS)}")
    if ranks is None or ranks == "fewest":
        if sharding is not None and ranks is None:
            raise InputError(f"sharding={sharding!r} needs a number of ranks, such as ranks=8, or ranks='fewest'")
        return None
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise InputError(f"ranks={ranks!r} is no number of ranks: give a whole number above 0, or 'fewest'")
    if sharding == "hsdp" and ranks > NODE and ranks % NODE:
        raise InputError(f"hsdp shards inside nodes of {NODE} cards: {ranks} ranks are not whole nodes")
    if sharding not in (None, "ddp", "zero1"):
        _require_shards(sharding)
    return Spreading(ranks, sharding)


def _require_shards(sharding: str | None) -> None:
    if not has_part("distributed.fsdp.fully_shard"):
        raise InputError(
            f"this torch has no torch.distributed.fsdp.fully_shard, which sharding={sharding!r} runs: torch 2.6 has"
        )


def nccl_of(spreading: Spreading | None) -> tuple[int, int]:
    """(likely, most) bytes of a card that NCCL takes for its buffers."""
    count = 0 if spreading is None else spreading.communicators
    return count * NCCL_LIKELY, count * NCCL_MOST


def notes_of(spreading: Spreading, on_host: bool) -> list[str]:
    """What was assumed of the ranks."""
    if spreading.count == 1:
        return []
    found = [
        f"one of {spreading.count} ranks, the first: no other has larger shards; each rank has a batch of its own like this one"
    ]
    if spreading.sharding is not None:
        found.append("the model counts as built in parts (on the meta device or on the host), never whole on the card")
    if not on_host:
        likely, most = map(format_bytes, nccl_of(spreading))
        found.append(
            f"NCCL's buffers, {likely} and at most {most} by reports of its users, are in the bytes on the device"
        )
        if spreading.sharding not in ("ddp", "zero1"):
            found.append(
                "fully_shard gathers on streams of its own, whose free blocks others cannot use: more may be reserved"
            )
    return found


def shape_of(given: Any) -> tuple[float, int]:
    """(part of the parameters' elements that is in matrices, number of blocks) of the models that a step can reach."""
    models = find_objects(given)[0]
    parameters = [p for model in models for p in model.parameters()]
    every = sum(p.numel() for p in parameters)
    blocks = max((len(find_blocks(model)) for model in models), default=0)
    return (sum(p.numel() for p in parameters if p.dim() > 1) / every if every else 1.0), blocks


def find_objects(given: Any) -> tuple[list[Any], list[Any]]:
    """Models and optimizers that values hold: in containers, attributes, partial functions and what functions close over."""
    models: list[Any] = []
    optimizers: list[Any] = []
    seen: set[int] = set()

    def look(value: Any, depth: int) -> None:
        if id(value) in seen or depth > DEEP or isinstance(value, type | types.ModuleType):
            return
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            models.append(value)
        elif isinstance(value, torch.optim.Optimizer):
            optimizers.append(value)
        else:
            for item in inside(value):
                look(item, depth + 1)

    look(given, 0)
    children = {id(child) for model in models for child in model.modules() if child is not model}
    return [m for m in models if id(m) not in children and any(True for _ in m.parameters())], optimizers


def find_blocks(model: Any) -> list[Any]:
    """The modules in the outermost lists of equal ones, which is what people call `fully_shard` on."""
    found: list[Any] = []

    def look(module: Any) -> None:
        children = [child for child in module.children() if any(True for _ in child.parameters())]
        alike = len({type(child) for child in children}) == 1 and len(children) > 1
        lists = torch.nn.ModuleList | torch.nn.Sequential | torch.nn.ModuleDict
        if isinstance(module, lists) and alike and any(True for child in children for _ in child.children()):
            found.extend(children)
            return
        for child in children:
            look(child)

    look(model)
    return found


def _keep_part(optimizer: Any, count: int) -> None:
    """Only the parameters of the rank that has most stay; each goes to the rank that has least so far, the largest first."""
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    sizes = [0] * count
    owner: dict[int, int] = {}
    for parameter in sorted(everything, key=lambda p: -p.numel()):
        rank = sizes.index(min(sizes))
        owner[id(parameter)] = rank
        sizes[rank] += parameter.numel()
    most = sizes.index(max(sizes))

    def zero_grad(set_to_none: bool = True) -> None:
        for parameter in everything:
            if parameter.grad is not None:
                parameter.grad = None if set_to_none else parameter.grad.zero_()

    optimizer.zero_grad = zero_grad  # of all, as ZeroRedundancyOptimizer does
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if owner[id(p)] == most]


Trace = Callable[[Spreading], Footprint]
"""The footprint of a step that is spread in one way."""


def find_fewest(
    trace: Trace, sharding: str | None, plain: Footprint, matrices: float, blocks: int
) -> tuple[FewestCards, ...]:
    """The fewest cards for each way to spread, or for the one that was named."""
    # hsdp holds what fsdp in a node does
    ways = [way for way in SHARDINGS if way != "hsdp"] if sharding is None else [sharding]
    rows = [_fewest(trace, way) for way in ways]
    if sharding is None:
        rows += [_sized("tensor parallel", plain, lambda n: _tensor_parallel(plain, n, matrices))]
        rows += [_sized("pipeline", plain, lambda n: _pipeline(plain, n, blocks))] if blocks else []
    return tuple(rows)


def _fewest(trace: Trace, sharding: str) -> FewestCards:
    """More cards never hold more on one: the counts are halved until one is left."""
    counts = [n for n in COUNTS if sharding != "hsdp" or n == 1 or n % NODE == 0]
    if sharding == "ddp":
        counts = [2]  # the same on every number
    found = {counts[-1]: trace(Spreading(counts[-1], sharding))}
    if not found[counts[-1]].fits:
        last = found[counts[-1]]
        return FewestCards(
            sharding=sharding,
            cards=None,
            peak=last.peak_reserved.bytes,
            most=counts[-1],
            known=last.peak_reserved.known,
        )
    low, high = -1, len(counts) - 1
    while high - low > 1:
        middle = (low + high) // 2
        found[counts[middle]] = trace(Spreading(counts[middle], sharding))
        low, high = (low, middle) if found[counts[middle]].fits else (middle, high)
    fewest = counts[high] if sharding != "ddp" else 1
    peak = found[counts[high]].peak_reserved.bytes
    return FewestCards(sharding=sharding, cards=fewest, peak=peak, most=counts[-1], known=Known.BOUND)


def _sized(name: str, plain: Footprint, size: Callable[[int], int | None]) -> FewestCards:
    capacity = plain.capacity or 0
    sizes = [(n, needs) for n in COUNTS if (needs := size(n)) is not None]
    found = next(((n, needs) for n, needs in sizes if needs <= capacity), None)
    most, least = sizes[-1]
    return FewestCards(
        sharding=name, cards=None if found is None else found[0], peak=least if found is None else found[1], most=most,
        known=Known.ESTIMATE,
    )  # fmt: skip


STATE = ("weights", "gradients", "optimizer state")
"""Parts that belong to parameters."""


def _parts(plain: Footprint) -> tuple[int, int, int]:
    """(bytes of parameters with gradients and state, of activations, of the rest) at the peak of one card."""
    sizes = {part.name: part.bytes for part in plain.parts}
    state, active = sum(sizes.get(name, 0) for name in STATE), sizes.get("activations", 0)
    return state, active, max(0, plain.peak_reserved.bytes - state - active)


def _tensor_parallel(plain: Footprint, count: int, matrices: float) -> int:
    """Matrices are cut, the rest and all activations are whole."""
    state, active, rest = _parts(plain)
    return int(state * (matrices / count + 1 - matrices)) + active + rest


def _pipeline(plain: Footprint, count: int, blocks: int) -> int | None:
    """The stage with most blocks; as many parts of the batch are under way as there are stages, so its activations are whole."""
    if count > blocks:
        return None
    state, active, rest = _parts(plain)
    return (state + active) * -(-blocks // count) // blocks + rest
