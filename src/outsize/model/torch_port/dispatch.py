"""Modes, dispatch keys, operators and autograd's engine: private parts of torch between Python and its kernels.

In: what the tracer and the fitted step want to see or to leave out. Out: torch's own context managers, classes and answers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from outsize.model.torch_port.parts import attribute, has_part, part

# modes


@functools.cache
def dispatch_mode() -> Any:
    """The class of modes that see every operator at the dispatcher.

    Torch turns its compiler off around each call of one, which takes as long as the call. Here it does so only where the compiler
    listens.
    """
    name = "utils._python_dispatch.TorchDispatchMode"
    if not has_part("_C._dynamo.eval_frame.get_eval_frame_callback") or not has_part(f"{name}._should_skip_dynamo"):
        return part(name)

    class Quick(part(name)):  # type: ignore[misc]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            if "__torch_dispatch__" in vars(cls):
                cls.__torch_dispatch__ = _uncompiled(vars(cls)["__torch_dispatch__"])

    return Quick


def _uncompiled(method: Any) -> Any:
    """A method of a mode, around which torch's compiler is off where it listens."""
    import torch

    listener = part("_C._dynamo.eval_frame.get_eval_frame_callback")
    without = functools.cache(lambda: torch.compiler.disable(method))

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (method if listener() is None else without())(self, func, types, args, kwargs)

    leave_uncompiled(dispatch.__code__)
    return dispatch


def seeing(call: Callable[[Any, Any, dict[str, Any]], Any]) -> Any:
    """A mode in which `call(operator, args, kwargs)` stands for every operator at the dispatcher."""

    class Seeing(dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return call(func, args, kwargs or {})

    return Seeing()


def no_modes() -> Any:
    """No mode sees the block's operators."""
    return part("utils._python_dispatch._disable_current_modes")()


def unseen(make: Callable[..., Any], *args: Any) -> Any:
    """`make(*args)`, such as an alias that no mode may count as an allocation."""
    with no_modes():
        return make(*args)


def has_modes() -> bool:
    """True while a mode sees operators."""
    return bool(part("_C._len_torch_dispatch_stack")())


def no_functions() -> Any:
    """Neither a mode nor a subclass sees the block's calls of torch functions."""
    return part("_C.DisableTorchFunction")()


def no_subclass_functions() -> Any:
    """No subclass sees the block's calls of torch functions."""
    return part("_C.DisableTorchFunctionSubclass")()


@contextlib.contextmanager
def torch_off() -> Iterator[None]:
    """No mode and no subclass sees the block: real tensors may be read."""
    with no_modes(), no_functions():
        yield


def asks_for_functions(kind: Any) -> bool:
    """True for a class of tensors with a `__torch_function__` that is not torch's empty one."""
    return kind.__torch_function__ is not part("_C._disabled_torch_function_impl")


def is_wrapper(tensor: Any) -> bool:
    """True for a tensor subclass that is made of other tensors and can list them."""
    return bool(part("utils._python_dispatch.is_traceable_wrapper_subclass")(tensor))


def are_wrappers(kinds: Any) -> bool:
    """True where a class of tensors is made of others: it asks for its own way through the dispatcher."""
    return any(hasattr(kind, "__tensor_flatten__") for kind in kinds)


def parts_of(tensor: Any) -> Iterator[Any]:
    """A tensor, or those that it is made of; a spread one also lists the mesh that it lies on."""
    import torch

    if not is_wrapper(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):
            yield from parts_of(inner)


def is_functorch(tensor: Any) -> bool:
    """True for a tensor that `torch.func` has wrapped: it has no storage."""
    return bool(part("_C._functorch.is_functorch_wrapped_tensor")(tensor))


def unwrap_functorch(tensor: Any) -> Any:
    """The tensor that `torch.func` has wrapped."""
    return part("_C._functorch.get_unwrapped")(tensor)


# dispatch keys


def keys_of(tensor: Any) -> Any:
    """The dispatch keys of a tensor: its device, and whether it is a negated or conjugated view."""
    return part("_C._dispatch_keys")(tensor)


def key_bits(tensor: Any) -> Any:
    """The same as a value that a dict can hold."""
    return _bits()(keys_of(tensor))


@functools.cache
def _bits() -> Callable[[Any], Any]:
    """torch 2.4 writes a set of keys only as text."""
    return part("_C.DispatchKeySet.raw_repr") if has_part("_C.DispatchKeySet.raw_repr") else repr


def registered_for(key: str) -> list[str]:
    """Names of the operators that have a kernel for a dispatch key."""
    return list(part("_C._dispatch_get_registrations_for_dispatch_key")(key))


def has_kernel(operator: str, key: str) -> bool:
    """True where an operator has a kernel for a dispatch key."""
    return bool(part("_C._dispatch_has_kernel_for_dispatch_key")(operator, key))


def with_key(key: str) -> Any:
    """Operators in the block go through the kernels of a dispatch key."""
    return part("_C._IncludeDispatchKeyGuard")(part(f"_C.DispatchKey.{key}"))


def without_key(key: str) -> Callable[[], Any]:
    """Makes blocks whose operators skip the kernels of a dispatch key."""
    keys = part("_C.DispatchKeySet")(part(f"_C.DispatchKey.{key}"))
    return functools.partial(part("_C._ExcludeDispatchKeyGuard"), keys)


def below_autograd() -> Any:
    """Operators in the block are not recorded by autograd."""
    return part("_C._AutoDispatchBelowAutograd")()


@contextlib.contextmanager
def below_autocast() -> Iterator[None]:
    """Operators in the block run as they are called: neither recorded by autograd nor cast by autocast."""
    with below_autograd(), part("_C._DisableAutocast")():
        yield


def same_memory(tensor: Any, place: tuple[Any, int, Any, Any]) -> Any:
    """A tensor without a graph on the memory of another, at (type, offset, shape, strides); no mode sees it."""
    import torch

    dtype, offset, shape, strides = place
    storage = tensor.untyped_storage()
    with part("_C._DisableTorchDispatch")(), no_functions():
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)


def without_graph(tensor: Any) -> Any:
    """The same tensor without a graph, which shares its version also where autograd is off; no mode sees it."""
    guard, on, off, silent = _detaching()
    with guard(on, off), silent():
        return tensor.detach()


@functools.cache
def _detaching() -> tuple[Any, Any, Any, Any]:
    """A guard, dispatch keys that are on in it, and those that are off; and another for torch functions."""
    keys = part("_C.DispatchKeySet")
    on = keys(part("_C.DispatchKey.ADInplaceOrView"))
    off = keys(part("_C.DispatchKey.Python")) | keys(part("_C.DispatchKey.PythonTLSSnapshot"))
    return part("_C._ForceDispatchKeyGuard"), on, off, part("_C.DisableTorchFunction")


# operators


def below_python(operator: Any) -> Any:
    """What calls an operator, without the step in Python that hands it over."""
    return getattr(operator, "_op", operator)


def aten_operator(name: str) -> Any:
    """One of torch's operators without a public name, such as `_cudnn_rnn`."""
    return part(f"ops.aten.{name}")


@functools.cache
def host_attention_takes_groups() -> bool:
    """True where torch's fused attention for the CPU takes keys and values with fewer heads than the queries have."""
    import torch

    try:
        with torch_off():
            q, k = torch.zeros(1, 2, 2, 8), torch.zeros(1, 1, 2, 8)
            return bool(part("_fused_sdp_choice")(q, k, k, enable_gqa=True) == 1)  # 1: the fused kernel
    except (RuntimeError, TypeError):  # a torch that does not know the word
        return False


def arguments_of(operator: Any) -> list[Any]:
    """The arguments of an operator, as its schema names them."""
    return list(attribute(operator, "_schema").arguments)


def decomposition_of(operator: Any) -> Callable[..., Any] | None:
    """Python code that computes an operator by smaller ones, None where torch has none."""
    found: Callable[..., Any] | None = part("_decomp.decomposition_table").get(operator)
    return found


def is_mutable(operator: Any) -> bool:
    """True for an operator that writes into its arguments."""
    return bool(attribute(operator, "_schema").is_mutable)


@contextlib.contextmanager
def replacing_kernels() -> Iterator[Any]:
    """A library whose kernels replace torch's own for as long as the block runs."""
    import torch

    library = torch.library.Library("aten", "IMPL")
    try:
        yield library
    finally:
        attribute(library, "_destroy")()


def parse_to(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    """(device, dtype, memory format) of the arguments of `Tensor.to`."""
    device, dtype, _, layout = part("_C._nn._parse_to")(*map(numbered_card, args), **kwargs)
    return device, dtype, layout


def numbered_card(value: Any) -> Any:
    """The card that a plain number means where a device is expected; any other value unchanged."""
    import torch

    return torch.device("cuda", value) if type(value) is int else value


def leave_uncompiled(code: Any) -> None:
    """Make torch.compile skip a function; `code` is its code."""
    part("_dynamo.eval_frame.skip_code")(code)


def profiled_bytes(call: Callable[[], Any]) -> tuple[list[int], Any]:
    """(what the allocator of the CPU gave out and, negative, took back during a call, its result). The profiler of
    `torch.profiler` writes a line for each use and takes seconds to start, so this is the one before it.
    """
    config = part("_C._profiler.ProfilerConfig")
    more = part("_C._profiler._ExperimentalConfig")()
    start, stop = part("_C._autograd._enable_profiler_legacy"), part("_C._autograd._disable_profiler_legacy")
    start(config(part("_C._profiler.ProfilerState.CPU"), False, True, False, False, False, more))
    try:
        out = call()
    finally:
        threads = stop()
    return [e.cpu_memory_usage() for events in threads for e in events if e.kind() == "memory_alloc"], out


# nested values


def leaves_of(value: Any) -> list[Any]:
    """What is in nested lists, tuples and dicts, in order."""
    return list(part("utils._pytree.tree_leaves")(value))


_NESTS = (list, tuple, dict)
"""What an operator's arguments nest; as a union it would be made anew in every call."""


def tensors_in(value: Any) -> list[Any]:
    """Tensors among the arguments or results of an operator, which nests only lists, tuples and dicts: torch's own walk
    knows more kinds and takes a fifth of a plan's time."""
    import torch

    tensor = torch.Tensor
    if isinstance(value, tensor):
        return [value]
    found: list[Any] = []
    if isinstance(value, _NESTS):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, tensor):
                found.append(item)
            elif isinstance(item, _NESTS):
                found += tensors_in(item)
    return found


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """The same nested value with each leaf changed."""
    return part("utils._pytree.tree_map")(change, value)


def map_tensors(change: Callable[[Any], Any], value: Any) -> Any:
    """The same nested value with each tensor changed."""
    import torch

    return part("utils._pytree.tree_map_only")(torch.Tensor, change, value)


def flatten_value(value: Any) -> tuple[list[Any], Any]:
    """(leaves, how they are nested)."""
    leaves, nesting = part("utils._pytree.tree_flatten")(value)
    return leaves, nesting


def nest_value(leaves: list[Any], nesting: Any) -> Any:
    """The nested value with these leaves."""
    return part("utils._pytree.tree_unflatten")(leaves, nesting)


# autograd's engine


def in_backward() -> bool:
    return bool(part("_C._current_graph_task_id")() != -1)


def running_node() -> int:
    """Number of the autograd node that runs now, -1 outside a backward pass."""
    node = part("_C._current_autograd_node")()
    return -1 if node is None else int(attribute(node, "_sequence_nr")())


def next_node() -> int:
    """Number of the autograd node that is made next."""
    return int(part("_C._autograd._get_sequence_nr")())


def fused_rms_norm() -> tuple[Any, Any] | None:
    """torch's kernel for `rms_norm` on CUDA, and that of its gradient. None before torch 2.9: what was there gives one result,
    and not the numbers that it keeps of rows."""
    import torch

    forward = getattr(torch.ops.aten, "_fused_rms_norm", None)
    if forward is None or len(forward.default._schema.returns) != 2:
        return None
    return forward.default, torch.ops.aten._fused_rms_norm_backward.default
