"""What XLA itself takes for a function, by its own assignment of buffers. Nothing runs, and nothing is allocated.

In: a function on arrays, shapes, donated positions, a device that is there. Out: `Compiled`. XLA allocates arguments,
results and one block of temporaries before a program runs, so this is exact for that compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from outsize.model.jax.private_parts import require_jax
from outsize.model.jax.program import read

PLATFORMS = {"cuda": ("cuda", "gpu"), "gpu": ("gpu",), "rocm": ("rocm", "gpu"), "cpu": ("cpu",), "tpu": ("tpu",)}
"""A device as users write it -> names of JAX's backends, tried in order."""


class Compiled(NamedTuple):
    """Bytes of one compilation."""

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    """Results that are written into donated arguments."""
    code: int
    constants: int
    """Arrays that the function closes over, as far as the code does not hold them: newer versions keep them beside it."""
    away: int = 0
    """Bytes that the program holds in page-locked memory of the host, where the backend counts them apart (cards do)."""
    program: Any = None
    """What runs."""

    @property
    def peak(self) -> int:
        """All of it together, without what is on the host."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code + self.constants


def find_device(device: str) -> Any | None:
    """The device of JAX with this name (`cuda`, `cuda:1`, `cpu`), None where there is no such backend here."""
    jax = require_jax()
    kind, _, index = device.partition(":")
    for platform in PLATFORMS.get(kind, (kind,)):
        try:
            found = jax.devices(platform)
        except RuntimeError:
            continue
        return found[int(index or 0)] if int(index or 0) < len(found) else None
    return None


def compile_for(
    device: Any, function: Callable[..., Any], shapes: Sequence[Any], donated: Sequence[int],
    options: Mapping[str, Any] | None = None,
) -> Compiled:  # fmt: skip
    """Compile for a device; arguments that are not used are in memory all the same."""
    jax = require_jax()
    with jax.default_device(device):
        lowered = jax.jit(function, donate_argnums=tuple(donated), keep_unused=True).lower(*shapes)
        made = lowered.compile(compiler_options=dict(options)) if options else lowered.compile()
    found = made.memory_analysis()
    closed_over = sum(value.bytes for value in read(jax.make_jaxpr(function)(*shapes)).constants)
    constants = max(0, closed_over - found.generated_code_size_in_bytes)
    return Compiled(
        found.argument_size_in_bytes, found.output_size_in_bytes, found.temp_size_in_bytes, found.alias_size_in_bytes,
        found.generated_code_size_in_bytes, constants, _away(found), made,
    )  # fmt: skip


def _away(found: Any) -> int:
    sizes = (
        getattr(found, f"host_{name}_size_in_bytes", 0) for name in ("argument", "output", "temp", "generated_code")
    )
    return sum(sizes) - int(getattr(found, "host_alias_size_in_bytes", 0))
