"""Weights that `fully_shard` (FSDP2) spreads over ranks: private parts of it.

In: a sharded model. Out: its groups of parameters, its shards without contents in the place of the real ones while a block runs,
word of every buffer that is filled or emptied, and a way back after a pass that failed half way.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from outsize.model.torch_port.dispatch import torch_off
from outsize.model.torch_port.parts import attribute, has_part, part
from outsize.model.torch_port.patches import replaced

INSIDE = "torch.distributed.fsdp._fully_shard"
"""Where FSDP2 lives; it is imported only by whoever shards."""


def is_loaded() -> bool:
    """True where somebody has imported FSDP2: without that no model is sharded."""
    return f"{INSIDE}._fsdp_param" in sys.modules


def is_spread(tensor: Any) -> bool:
    """True for a tensor of which every rank has a part: a DTensor."""
    return "torch.distributed.tensor" in sys.modules and isinstance(tensor, _distributed_tensor())


def local_part(tensor: Any) -> Any:
    """This rank's part of a tensor; a tensor that is not spread is its own."""
    return attribute(tensor, "_local_tensor") if is_spread(tensor) else tensor


def spread_like(tensor: Any, local: Any) -> Any:
    """A spread tensor like another one, with this part of it here."""
    return _distributed_tensor()(local, attribute(tensor, "_spec"), requires_grad=False)


@functools.cache
def _distributed_tensor() -> Any:
    """The class; no class where torch, before 2.5, has the folder without it."""
    return part("distributed.tensor.DTensor") if has_part("distributed.tensor.DTensor") else ()


def states_of(model: Any) -> list[Any]:
    """What FSDP2 keeps for each module that `fully_shard` was called on, in the order of the model."""
    if not is_loaded():
        return []
    kind = part("distributed.fsdp.FSDPModule")
    found = {id(s): s for m in model.modules() if isinstance(m, kind) for s in (attribute(m, "_get_fsdp_state")(),)}
    return list(found.values())


def groups_of(state: Any) -> list[Any]:
    """Parameters that are gathered together; one torch keeps a list of groups, another one group or None."""
    many = getattr(state, "_fsdp_param_groups", None)
    if many is not None:
        return list(many)
    one = attribute(state, "_fsdp_param_group")
    return [] if one is None else [one]


def shards_of(model: Any) -> list[Any]:
    """FSDP2's own record of every parameter that it spreads."""
    return [shard for state in states_of(model) for group in groups_of(state) for shard in group.fsdp_params]


def modules_with_shards_inside(model: Any) -> list[str]:
    """Names of modules that have a sharded module somewhere below them: they cannot stop half way through a second run."""
    if not is_loaded():
        return []
    kind = part("distributed.fsdp.FSDPModule")
    own = [name for name, module in model.named_modules() if isinstance(module, kind)]
    return [name for name, _ in model.named_modules() if any(o != name and _is_inside(o, name) for o in own)]


def _is_inside(name: str, owner: str) -> bool:
    return not owner or name.startswith(f"{owner}.")


def device_of_shards(model: Any) -> Any:
    """Where gathered weights are and the step computes; the shards may be on the host."""
    states = states_of(model)
    return attribute(states[0], "_device") if states else None


# tensors without contents


def make_shard(shard: Any, make: Callable[[tuple[int, ...], Any, bool], Any]) -> Any:
    """A parameter without contents for a shard. `make(shape, dtype, on_host)` gives a tensor of that kind; FSDP2's own record
    is changed, which `swapped_shards` puts back."""
    real = shard.sharded_param
    flat = make(tuple(attribute(shard, "_sharded_param_data").shape), real.dtype, bool(shard.offload_to_cpu))
    padded = flat.view(tuple(shard.padded_sharded_param_size))
    dim, here = shard.fsdp_placement.dim, shard.sharded_size
    local = padded.narrow(dim, 0, here[dim] if here.numel() else 0)
    made = torch.nn.Parameter(spread_like(real, local), requires_grad=real.requires_grad)
    shard._sharded_param_data, shard.sharded_param = flat, made
    return made


@contextlib.contextmanager
def swapped_shards(model: Any) -> Iterator[None]:
    """Whatever the block does to FSDP2's records is undone; inside, nothing is gathered yet and its streams are those of the
    device that the block sees."""
    states = states_of(model)
    owners = [*states]
    for state in states:
        owners += [attribute(state, "_state_ctx"), attribute(state, "_comm_ctx")]
        for group in groups_of(state):
            owners += [group, group.comm_ctx, *group.fsdp_params]
    before = [(owner, dict(vars(owner)), _tables(owner)) for owner in {id(o): o for o in owners}.values()]
    try:
        for state in states:
            for shard in (shard for group in groups_of(state) for shard in group.fsdp_params):
                shard.all_gather_outputs, shard.unsharded_accumulated_grad = [], None
                vars(shard).pop("_unsharded_param", None)
        for context in {id(c): c for s in states for c in (attribute(s, "_comm_ctx"),)}.values():
            context.lazy_init(attribute(states[0], "_device"))
        yield
    finally:
        for owner, attributes, tables in before:
            vars(owner).clear()
            vars(owner).update(attributes)
            for table, items in tables:
                table.clear()
                table.extend(items) if isinstance(table, list) else table.update(items)


def _tables(owner: Any) -> list[tuple[Any, Any]]:
    """Lists, sets and dicts of an object, with what is in them."""
    tables = [value for value in vars(owner).values() if isinstance(value, list | dict | set)]
    return [(table, table.copy()) for table in tables]


@contextlib.contextmanager
def following_buffers(resized: Callable[[Any], None]) -> Iterator[None]:
    """`resized(tensor)` is called after FSDP2 has given memory to a gathered parameter or taken it, and tensors without contents
    count as tensors with some."""
    if not is_loaded():
        yield
        return
    inside = importlib.import_module(f"{INSIDE}._fsdp_param")

    def told(act: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(tensor: Any) -> None:
            before = tensor.untyped_storage().size()
            act(tensor)
            if tensor.untyped_storage().size() != before:
                resized(tensor)

        return run

    rules = part("distributed.tensor._sharding_prop.ShardingPropagator")

    def unseen(act: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch_off():  # a DTensor tries each operator on whole shapes first, which takes no memory
                return act(*args, **kwargs)

        return run

    shapes = ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta")
    groups = importlib.import_module(f"{INSIDE}._fsdp_param_group")
    names = ("alloc_storage", "free_storage")
    checks = ("_validate_no_meta_params", "_validate_cpu_offload_params")
    rows = [(owner, name, told(vars(inside)[name])) for owner in (inside, groups) for name in names]
    rows += [(groups.FSDPParamGroup, name, lambda group: None) for name in checks]
    rows += [(rules, name, unseen(vars(rules)[name])) for name in shapes if name in vars(rules)]
    with replaced(rows):
        yield


# after a failure


def reset_shards(model: Any) -> None:
    """A pass has failed half way: nothing is gathered, nothing is under way, and no gradient of it is left."""
    states = states_of(model)
    for state in states:
        for shard in (shard for group in groups_of(state) for shard in group.fsdp_params):
            shard.unsharded_accumulated_grad = None
            if (gathered := vars(shard).get("_unsharded_param")) is not None:
                gathered.grad = None
    for state in states:
        if not attribute(state, "_is_root"):
            continue
        module = attribute(state, "_modules")[0]
        if hasattr(module, "reset_iter_state"):
            module.reset_iter_state()
        else:
            _reset_by_hand(states)


def _reset_by_hand(states: list[Any]) -> None:
    """What `reset_iter_state` does, for a torch that does not have it."""
    idle = part("distributed.fsdp._fully_shard._fsdp_common.TrainingState").IDLE
    for state in states:
        state._training_state = idle
        context, shared = attribute(state, "_comm_ctx"), attribute(state, "_state_ctx")
        context.all_gather_state = None
        for name in ("reduce_scatter_state", "reduce_scatter_states"):
            if hasattr(context, name):
                setattr(context, name, [] if name.endswith("s") else None)
        context.post_forward_order.clear()
        shared.iter_forward_root = None
        shared.post_backward_final_callback_queued = False
        for group in groups_of(state):
            result = attribute(group, "_all_gather_result")
            work: Any = getattr(result, "all_gather_work", None)
            if hasattr(work, "wait"):
                work.wait()
            for name in ("_all_gather_result", "_post_reduce_event", "_all_reduce_state", "_partial_reduce_output"):
                setattr(group, name, None)
            group._training_state = idle
            attribute(group, "_post_forward_indices").clear()
            attribute(group, "_to_sharded")()
