"""Runs the programs that Inductor writes, without their kernels.

In: the text of a program and how a buffer is made. Out: a function that runs it on tensors without contents: buffers are made,
used again and let go of in the program's own order, operators of torch are called, and generated kernels do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from outsize.model.torch_port.compiler import loader_rows
from outsize.model.torch_port.patches import replaced

Make = Callable[[tuple[int, ...], tuple[int, ...], Any, str], Any]
"""(shape, strides, dtype, `cuda` or `cpu`) -> a buffer without contents."""

NEVER_RUN = ("import triton", "from torch._inductor.runtime.triton_heuristics", "from torch._C import _cuda_getCurrentRawStream")
"""How lines begin that only kernels need."""


class Kernel:
    """A kernel that does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass

    run = __call__

    def __getattr__(self, name: str) -> Any:
        return self


class Compiling:
    """Stands for Inductor's `AsyncCompile`."""

    def wait(self, scope: dict[str, Any]) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Kernel]:
        return lambda *args, **kwargs: Kernel()


def load_program(text: str, make: Make) -> Callable[[list[Any]], Any]:
    """The program's function, as Inductor calls it: it takes a list, which it empties."""
    lines = [line for line in text.splitlines() if not line.startswith(NEVER_RUN)]
    scope: dict[str, Any] = {"__name__": "outsize_program", "get_raw_stream": _nothing}
    with replaced(loader_rows(Compiling)):
        exec(compile("\n".join(lines), "<outsize program>", "exec"), scope)
    made = {name: _maker(make, name.removeprefix("empty_strided_")) for name in scope if name.startswith("empty_strided_")}
    checks = {name: _nothing for name in ("assert_size_stride", "assert_alignment") if name in scope}
    scope.update(
        {**made, **checks, "get_raw_stream": _nothing, "copy_if_misaligned": lambda tensor: tensor},
        reinterpret_tensor=_reinterpret, start_graph=_nothing, end_graph=_nothing,
    )  # fmt: skip
    call: Callable[[list[Any]], Any] = scope["call"]
    return call


def _maker(make: Make, kind: str) -> Callable[..., Any]:
    return lambda shape, strides, dtype: make(tuple(shape), tuple(strides), dtype, kind)


def _nothing(*args: Any, **kwargs: Any) -> int:
    return 0


def _reinterpret(tensor: Any, shape: Any, strides: Any, offset: int = 0) -> Any:
    """Another view of the same memory; `offset` counts from where the tensor begins."""
    import torch

    with contextlib.nullcontext():
        return torch.as_strided(tensor, shape, strides, tensor.storage_offset() + offset)
