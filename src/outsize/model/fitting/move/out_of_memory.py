"""Tells an out-of-memory failure from any other, and clears up after it.

In: an exception. Out: yes or no. Torch says it in several ways: its own error class, a RuntimeError of the CPU allocator,
of cuBLAS or cuDNN.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

from outsize.engine.heap import trim_heap

T = TypeVar("T")

MESSAGES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """True for every way in which torch says that memory ran out."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in MESSAGES)


def in_a_line(error: BaseException) -> str:
    """What an error says first, or its name."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def clear_up() -> None:
    """Let go of what failed frames held; to be called outside the `except` block, which holds them."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def where_room(act: Callable[[], T]) -> T | None:
    """What an act gives, None where memory does not suffice for it; then what it left is cleared up."""
    try:
        return act()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    clear_up()
    return None


def give_back_heap() -> None:
    """Clear up. Freed blocks below 32 MiB stay in the heap of the C library: the system gets them where that can be asked for."""
    clear_up()
    trim_heap()
