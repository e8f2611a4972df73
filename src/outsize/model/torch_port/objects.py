"""Private attributes of tensors, modules, optimizers, scalers and the allocator. In: one of torch's objects. Out: the
attribute; if it is a table, it may be written.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from outsize.model.torch_port.parts import attribute, has_part, missing, part

# tensors and storages


def key_of(storage: Any) -> int:
    """The address of a storage: two tensors with one memory have the same. Asked several times for every operator."""
    try:
        return storage._cdata  # type: ignore[no-any-return]
    except AttributeError:
        raise missing("UntypedStorage._cdata") from None


def storage_key(tensor: Any) -> int:
    return key_of(tensor.untyped_storage())


def holders_of(key: int) -> int:
    """How many references the storage at an address has: tensors, saved tensors, and Python's own."""
    return int(part("_C._storage_Use_Count")(key))


def sizeof(tensor: Any) -> int:
    """Bytes of a tensor's elements."""
    return int(tensor.numel()) * int(tensor.element_size())


def version_of(tensor: Any) -> int:
    """Grows with every write into a tensor. Asked for every tensor that autograd saves."""
    try:
        return tensor._version  # type: ignore[no-any-return]
    except AttributeError:
        raise missing(f"{type(tensor).__name__}._version") from None


def is_view(tensor: Any) -> bool:
    """True for a view that autograd knows of."""
    return bool(attribute(tensor, "_is_view")())


def base_of(view: Any) -> Any:
    return attribute(view, "_base")


def is_zero_tensor(tensor: Any) -> bool:
    """True for a tensor of zeros that has no memory. Asked for every tensor that autograd saves."""
    try:
        return tensor._is_zerotensor()  # type: ignore[no-any-return]
    except AttributeError:
        raise missing(f"{type(tensor).__name__}._is_zerotensor") from None


def multiply_each(tensors: list[Any], factor: float) -> list[Any]:
    """New tensors, made in few launches."""
    return list(part("_foreach_mul")(tensors, factor))


# modules


@contextlib.contextmanager
def hooked(*handles: Any) -> Iterator[None]:
    """Hooks that were registered just now are there for as long as the block runs."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def around_modules(enter: Callable[..., Any], leave: Callable[..., Any], always: bool = False) -> Any:
    """In the block `enter(module, args)` and `leave(module, args, out)` are called around every forward pass of a module;
    `always`: also of one that fails."""
    hooks = part("nn.modules.module")
    after = hooks.register_module_forward_hook(leave, always_call=always)
    return hooked(hooks.register_module_forward_pre_hook(enter), after)


def buffer_table(module: Any) -> dict[str, Any]:
    return attribute(module, "_buffers")  # type: ignore[no-any-return]


def parameter_table(module: Any) -> dict[str, Any]:
    """A module's own table of parameters."""
    return attribute(module, "_parameters")  # type: ignore[no-any-return]


def flat_weights(module: Any) -> list[Any] | None:
    """The list in which a recurrent layer keeps its weights once more, None for other modules."""
    found = module.__dict__.get("_flat_weights")
    return found if isinstance(found, list) else None


def set_flat_weights(module: Any, weights: list[Any]) -> None:
    """Give a recurrent layer another such list."""
    module.__dict__["_flat_weights"] = weights


def count_flat_weights(layer: Any) -> int:
    """How many weights a recurrent layer has."""
    return len(attribute(layer, "_flat_weights_names"))


def batch_norm() -> Any:
    return part("nn.modules.batchnorm._BatchNorm")


def norm_with_statistics() -> Any:
    """The class of all norms that may keep running statistics."""
    return part("nn.modules.batchnorm._NormBase")


def has_hooks(module: Any) -> bool:
    """True if a module has forward or backward hooks."""
    return any(attribute(module, name) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"))


def is_compiled(module: Any) -> bool:
    """True for what `torch.compile(module)` and `module.compile()` make, unless it is called as it was written."""
    if is_compiled_copy(module):
        return getattr(module.__dict__.get("forward"), "__self__", None) is not module._orig_mod
    return getattr(module, "_compiled_call_impl", None) is not None


def is_compiled_copy(module: Any) -> bool:
    """True for what `torch.compile(module)` makes, which has the module inside."""
    return hasattr(module, "_orig_mod")


def add_saving_hook(module: Any, hook: Callable[..., Any]) -> Any:
    """Call `hook` after a module's `state_dict()`; the public name came late."""
    return attribute(module, "_register_state_dict_hook")(hook)


def add_loading_hook(module: Any, hook: Callable[..., Any]) -> Any:
    """Call `hook` before a module's `load_state_dict()`; the public name came late."""
    return attribute(module, "_register_load_state_dict_pre_hook")(hook, with_module=True)


# optimizers and scalers


def has_step_hooks(optimizer: Any) -> bool:
    """True if an optimizer has step hooks of somebody else."""
    tables = (attribute(optimizer, name) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"))
    return any(not getattr(hook, "ours", False) for table in tables for hook in table.values())


def forget_step_hooks(optimizer: Any) -> None:
    """Remove the hooks and warnings of a copied optimizer."""
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()
    optimizer._warned_capturable_if_run_uncaptured = True  # a copy forgets it, and some have no such setting to look at


def device_of(scaler: Any) -> str:
    """The kind of device that a GradScaler is for."""
    return str(attribute(scaler, "_device"))


def forget_optimizer(scaler: Any, optimizer: Any) -> None:
    """Make a GradScaler forget what it found in an optimizer's gradients."""
    attribute(scaler, "_per_optimizer_states").pop(id(optimizer), None)


# the allocator of a card


def clear_workspaces() -> None:
    """Give back the workspaces that matrix products keep on a card."""
    part("_C._cuda_clearCublasWorkspaces")()


def allocator_setter() -> Callable[[str], None] | None:
    """Changes the settings of the card's allocator while it runs; None where this torch cannot."""
    for path in ("_C._accelerator_setAllocatorSettings", "cuda.memory._set_allocator_settings"):
        if has_part(path):
            return part(path)  # type: ignore[no-any-return]
    return None


# the allocator of the CPU


def start_allocator_events() -> bool:
    """Note every block that the CPU's allocator hands out or takes back; False if somebody profiles already, or torch cannot."""
    if not has_part("_C._autograd._enable_profiler_legacy") or part("_C._autograd._profiler_enabled")():
        return False
    kinds = part("_C._profiler")
    given = (kinds.ProfilerState.CPU, False, True, False, False, False, kinds._ExperimentalConfig())
    part("_C._autograd._enable_profiler_legacy")(kinds.ProfilerConfig(*given))
    _note_operators(False)
    return True


def _note_operators(on: bool) -> None:
    """Profilers note operators too, ten lines for one of the allocator's: a step of small ones would take five times as long."""
    if has_part("_C._autograd._enable_record_function"):
        part("_C._autograd._enable_record_function")(on)


def stop_allocator_events() -> list[int]:
    """The bytes of every block since `start_allocator_events`, in order, below zero where one was taken back."""
    _note_operators(True)
    if not part("_C._autograd._profiler_enabled")():  # whoever profiles has ended ours
        return []
    noted = part("_C._autograd._disable_profiler_legacy")()
    threads = [[(e, size) for e in thread if (size := e.cpu_memory_usage())] for thread in noted]
    threads = [events for events in threads if events]  # others only mark beginnings and ends
    if len(threads) > 1:
        threads = [sorted(itertools.chain(*threads), key=lambda event: event[0].start_us())]
    return [size for events in threads for _, size in events]
