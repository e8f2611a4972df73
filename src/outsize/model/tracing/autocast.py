"""Does what `torch.autocast` does, for meta tensors that stand for tensors on a card or on the host.

The C++ autocast looks at a tensor's real device, so it ignores meta tensors. While a trace runs, these kernels replace
it. The list of operators comes from torch itself. The casts follow torch's documented policies.
Casts happen above autograd, as on the card, so the graph saves what it would save there.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from outsize.model.torch_port.dispatch import arguments_of, registered_for, replacing_kernels, with_key, without_key
from outsize.model.torch_port.objects import is_view
from outsize.model.torch_port.patches import on_autocast_end

LOWER = (
    "_convolution", "_convolution.deprecated", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "cudnn_convolution",
    "cudnn_convolution_transpose", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot",
    "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
)  # fmt: skip
"""Run in the lower precision."""

PROMOTE = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
)  # fmt: skip
"""Run in the widest type among their arguments."""

RESULT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList",
    "linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord",
)  # fmt: skip
"""Read what they get and give float32: their `dtype` argument is set where the caller left it out."""

OWN = ("_cudnn_rnn",)
"""Cast by the caller: for recurrent layers `rewrites` does what torch does on a card."""

HOST_LOWER = (
    "_addmm_activation", "_convolution.deprecated", "_native_multi_head_attention", "addbmm", "addmm", "baddbmm", "bmm",
    "conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "linalg_vecdot", "linear", "matmul", "mkldnn_rnn_layer", "mm",
    "prelu", "scaled_dot_product_attention",
)  # fmt: skip
HOST_PROMOTE = ("stack", "cat", "index_copy")
"""The same on the host, where all other operators run in float32."""

REFUSED = ("binary_cross_entropy",)
"""Torch raises for these under a card's autocast; its own kernel does that well."""

Labelled = Callable[[Any], bool]


class Autocast:
    """The casting rules of a kind of device, `cuda` or `cpu`, for the tensors for which `there(tensor)` holds."""

    def __init__(self, kind: str, there: Labelled) -> None:
        self.kind = kind
        self._there = there
        self._cache: dict[int, tuple[Any, Any]] = {}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """The rules instead of torch's own kernels, for as long as the block runs."""
        key = f"Autocast{self.kind.upper()}"
        with replacing_kernels() as library:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for name, op in _operators(self.kind):
                    library.impl(op, self._kernel(op, name), key)
            try:
                with on_autocast_end(self._cache.clear), with_key(key):
                    yield
            finally:
                self._cache.clear()

    def lower(self, value: Any) -> Any:
        """A tensor in the lower precision, for rules that live above the dispatcher."""
        return self._cast(value, torch.get_autocast_dtype(self.kind))

    def _kernel(self, op: Any, name: str) -> Callable[..., Any]:

        below = without_key(f"Autocast{self.kind.upper()}")
        prepare = self._policy(name)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with below():
                args, kwargs = prepare(op, args, kwargs)
                return op(*args, **kwargs)

        return kernel

    def _policy(self, name: str) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
        host = self.kind == "cpu"
        if name in (HOST_LOWER if host else LOWER):
            return self._lower_all
        if name in (HOST_PROMOTE if host else PROMOTE):
            return self._widest
        if name in RESULT and not host:
            return self._set_result
        if name in OWN:
            return lambda op, args, kwargs: (args, kwargs)
        return self._float_all

    def _lower_all(self, op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self._cast_all(args, kwargs, torch.get_autocast_dtype(self.kind))

    def _float_all(self, op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self._cast_all(args, kwargs, torch.float32)

    def _widest(self, op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtypes = {item.dtype for item in _leaves(args) + _leaves(kwargs) if self._eligible(item)}
        wide = torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype(self.kind)
        return self._cast_all(args, kwargs, wide)

    def _set_result(self, op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        position = next(i for i, argument in enumerate(arguments_of(op)) if argument.name == "dtype")
        given = args[position] if len(args) > position else kwargs.get("dtype")
        if given is not None or not self._eligible(args[0]):
            return args, kwargs
        return args[:position], {**kwargs, "dtype": torch.float32}

    def _cast_all(self, args: Any, kwargs: Any, dtype: Any) -> tuple[Any, Any]:
        """Every argument, the last one first: compiled kernels evaluate them in this order, and the allocator sees
        it."""
        cast = [self._cast_item(item, dtype) for item in reversed([*args, *kwargs.values()])][::-1]
        return tuple(cast[: len(args)]), dict(zip(kwargs, cast[len(args) :], strict=True))

    def _cast_item(self, value: Any, dtype: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._cast_item(item, dtype) for item in value)
        return self._cast(value, dtype)

    def _eligible(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point or value.dtype == torch.float64:
            return False
        return self._there(value)

    def _cast(self, value: Any, dtype: Any) -> Any:
        """As `cached_cast`: a leaf weight is cast once and kept until the outermost autocast block ends."""
        if not self._eligible(value) or value.dtype == dtype:
            return value
        keep = (
            dtype == torch.get_autocast_dtype(self.kind) and value.dtype == torch.float32 and value.requires_grad
            and value.is_leaf and not is_view(value) and torch.is_autocast_cache_enabled()
        )  # fmt: skip
        if not keep:
            return torch.ops.aten.to.dtype(value, dtype)
        found = self._cache.get(id(value))
        if found is None or found[0] is not value:
            found = self._cache[id(value)] = (value, torch.ops.aten.to.dtype(value, dtype))
        return found[1]


@functools.cache
def _operators(kind: str) -> list[tuple[str, Any]]:
    """Name and operator of each that torch itself casts on this kind of device."""
    import torch

    found = []
    for name in registered_for(f"Autocast{kind.upper()}"):
        base, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and (base not in REFUSED or kind == "cpu"):
            found.append((name.removeprefix("aten::"), getattr(getattr(torch.ops.aten, base), overload or "default")))
    return found


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]
