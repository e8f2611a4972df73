"""What JAX and TensorFlow keep: the bytes of their arrays, and functions that are traced again and again.

Only public parts are used, and only of frameworks that the program has loaded. A function that is compiled by `jax.jit` or
`tf.function` keeps a program for each kind of arguments it was called with; one that is called with ever new ones (Python
numbers, shapes that change) grows for good.
"""

from __future__ import annotations

from typing import Any

_COUNTS = ("experimental_get_tracing_count", "_cache_size")
"""Methods that say how often a function was traced: of `tf.function`, of `jax.jit`."""
_LIBRARIES = ("tensorflow", "jaxlib", "jax")


def library_of(kind: type) -> str:
    """The package that a type comes from: `torch`, `jaxlib`; empty where its module is something of its own."""
    module = kind.__module__
    return module.partition(".")[0] if isinstance(module, str) else ""


def is_traced_kind(kind: type) -> bool:
    """True for the type of functions that TensorFlow or JAX compile."""
    return library_of(kind) in _LIBRARIES and any(hasattr(kind, name) for name in _COUNTS)


def count_traces(function: Any) -> int:
    """How often a function was traced; 0 where it does not say."""
    for name in _COUNTS:
        count = getattr(function, name, None)
        if count is not None:
            try:
                return int(count())
            except Exception:  # one that was never called, or of a version that asks for more
                return 0
    return 0


def traced_name(function: Any) -> str | None:
    """The name of the Python function inside."""
    inner = getattr(function, "python_function", None) or getattr(function, "__wrapped__", None)
    return getattr(inner, "__qualname__", None)


def is_array_of(item: Any, library: str) -> bool:
    """True for an array of one of the two libraries."""
    kind = type(item)
    return library_of(kind) == library and hasattr(kind, "dtype") and hasattr(kind, "shape")


def array_bytes(item: Any) -> int | None:
    """Bytes of an array of JAX or TensorFlow without a copy; None for anything else."""
    if is_array_of(item, "jaxlib"):
        return int(item.nbytes)
    if is_array_of(item, "tensorflow"):
        return int(item.shape.num_elements() or 0) * int(item.dtype.size)
    return None
