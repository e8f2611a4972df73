"""Runs the programs that Inductor writes, without their kernels.

In: the text of a program and how a buffer is made. Out: a function that runs it on tensors without contents: buffers are made,
used again and let go of in the program's own order, operators of torch are called, and generated kernels do nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from outsize.model.torch_port.compiler import loader_rows
from outsize.model.torch_port.patches import replaced

Make = Callable[[tuple[int, ...], tuple[int, ...], Any, str], Any]
"""(shape, strides, dtype, `cuda` or `cpu`) -> a buffer without contents."""

Copied = Callable[[list[Any]], None]
"""Told of tensors that are copied for a moment."""

NEVER_RUN = (
    "import triton",
    "from torch._inductor.runtime.triton_heuristics",
    "from torch._C import _cuda_getCurrentRawStream",
)
"""How lines begin that only kernels need."""


class Kernel:
    """A kernel that does nothing. Triton's are tuned at their first call, on copies of what they write into."""

    def __init__(self, text: str, copied: Copied) -> None:
        self._written = _written_in(text)
        self._copied: Copied | None = copied if "triton" in text else None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        copied, self._copied = self._copied, None
        if copied is not None:
            copied([args[place] for place in self._written if place < len(args)])

    run = __call__

    def __getattr__(self, name: str) -> Any:
        return self


def _written_in(text: str) -> list[int]:
    """Positions of the arguments that a kernel of Triton writes over; those that it only fills are not copied."""
    named = re.search(r"'mutated_arg_names': \[(.*?)\]", text)
    signature = re.search(r"'signature': \{(.*?)\}", text)
    if named is None or signature is None or not named[1] or "'optimize_mem': True" in text:
        return []
    order = re.findall(r"'(\w+)':", signature[1])
    return [order.index(name) for name in re.findall(r"'(\w+)'", named[1]) if name in order]


def _compiling(copied: Copied) -> Any:
    """Stands for Inductor's `AsyncCompile`."""

    class Compiling:
        def wait(self, scope: dict[str, Any]) -> None:
            pass

        def __getattr__(self, name: str) -> Callable[..., Kernel]:
            return lambda *args, **kwargs: Kernel(next((a for a in args[1:] if isinstance(a, str)), ""), copied)

    return Compiling


def load_program(text: str, make: Make, copied: Copied) -> Callable[[list[Any]], Any]:
    """The program's function, as Inductor calls it: it takes a list, which it empties."""
    lines = [line for line in text.splitlines() if not line.startswith(NEVER_RUN)]
    scope: dict[str, Any] = {"__name__": "outsize_program", "get_raw_stream": _nothing}
    with replaced(loader_rows(_compiling(copied))):
        exec(compile("\n".join(lines), "<outsize program>", "exec"), scope)
    for name in [name for name in scope if name.startswith("empty_strided_")]:
        scope[name] = _maker(make, name.removeprefix("empty_strided_"))
    for name in ("assert_size_stride", "assert_alignment", "get_raw_stream", "start_graph", "end_graph"):
        scope[name] = _nothing
    scope.update(copy_if_misaligned=lambda tensor: tensor, reinterpret_tensor=_reinterpret)
    call: Callable[[list[Any]], Any] = scope["call"]
    return call


def _maker(make: Make, kind: str) -> Callable[..., Any]:
    return lambda shape, strides, dtype: make(tuple(shape), tuple(strides), dtype, kind)


def _nothing(*args: Any, **kwargs: Any) -> int:
    return 0


def _reinterpret(tensor: Any, shape: Any, strides: Any, offset: int = 0) -> Any:
    """Another view of the same memory; `offset` counts from where the tensor begins."""
    return torch.as_strided(tensor, shape, strides, tensor.storage_offset() + offset)
