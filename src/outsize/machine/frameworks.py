"""What the allocators of frameworks in this process have taken: JAX, TensorFlow, PyTorch.

Only a framework that the program has loaded and started is asked: to load one takes hundreds of MiB, to start one may take the
whole card. Without a framework there is nothing to read, and nothing is said.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from outsize.core.memory import HOST, Arena, Pool

Environment = Mapping[str, str]
OFF = ("false", "0")


def read_frameworks(environ: Environment) -> tuple[Arena, ...]:
    """One for each framework and device, of those that have started."""
    found: list[Arena] = []
    for name, ask in ASKED.items():
        module = sys.modules.get(name)
        if module is None:
            continue
        try:
            found += ask(module, environ)
        except Exception:  # half loaded, half unloaded, or of a version with other names: then it is not known
            continue
    return tuple(found)


def _ask_jax(jax: Any, environ: Environment) -> Iterator[Arena]:
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is None or not bridge.backends_are_initialized():
        return
    held: dict[Any, int] = {}
    for array in jax.live_arrays():
        if not array.is_deleted():
            for shard in array.addressable_shards:
                held[shard.device] = held.get(shard.device, 0) + int(shard.data.nbytes)
    for device in jax.local_devices():
        counts = device.memory_stats() if device.platform != "cpu" else None
        if counts is None:
            if device in held:
                pool = HOST if device.platform == "cpu" else Pool(kind="device", index=device.id)
                yield Arena(framework="JAX", pool=pool, in_use=held[device], source="jax.live_arrays()")
            continue
        yield Arena(
            framework="JAX", pool=Pool(kind="device", index=device.id), in_use=counts.get("bytes_in_use"),
            peak=counts.get("peak_bytes_in_use"), reserved=counts.get("pool_bytes") or counts.get("bytes_reserved") or None,
            limit=counts.get("bytes_limit"), source="device.memory_stats()",
            notes=tuple(_jax_settings(environ) if device.platform in ("gpu", "cuda", "rocm") else ()),
        )  # fmt: skip


def _jax_settings(environ: Environment) -> Iterator[str]:
    """How JAX takes memory of a card, as its settings say."""
    if environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform":
        yield "XLA_PYTHON_CLIENT_ALLOCATOR=platform: every array is asked of the driver, without a limit, slowly"
        return
    part = float(environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or environ.get("XLA_CLIENT_MEM_FRACTION") or 0.75)
    whose = "XLA_PYTHON_CLIENT_MEM_FRACTION changes that"
    if environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() in OFF:
        yield f"JAX grows up to {part:.0%} of the card; {whose}"
    else:
        took = f"JAX took {part:.0%} of the card when it started, used or not"
        yield f"{took}: XLA_PYTHON_CLIENT_PREALLOCATE=false lets it grow; {whose}"


def _ask_tensorflow(tf: Any, environ: Environment) -> Iterator[Arena]:
    context = sys.modules.get("tensorflow.python.eager.context")
    if context is None or not context.context()._initialized:
        return
    cards = tf.config.list_physical_devices("GPU")
    for kind in ("GPU", "CPU"):
        for index, device in enumerate(tf.config.list_logical_devices(kind)):
            try:
                counts = tf.config.experimental.get_memory_info(f"{kind}:{index}")
            except (ValueError, KeyError):
                continue  # an allocator that keeps no account
            card = cards[index] if kind == "GPU" and len(cards) == len(tf.config.list_logical_devices(kind)) else None
            limit, notes = (None, ()) if card is None else _tensorflow_settings(tf, card, environ)
            pool = Pool(kind="device", index=index) if kind == "GPU" else HOST
            yield Arena(
                framework="TensorFlow", pool=pool, in_use=int(counts["current"]), peak=int(counts["peak"]),
                limit=limit, source=f"tf.config.experimental.get_memory_info({device.name.rpartition('device:')[2]!r})",
                notes=notes,
            )  # fmt: skip


def _tensorflow_settings(tf: Any, card: Any, environ: Environment) -> tuple[int | None, tuple[str, ...]]:
    """(limit of a card's logical device, how TensorFlow takes its memory)."""
    asynchronous = environ.get("TF_GPU_ALLOCATOR") == "cuda_malloc_async"
    notes = (
        ("TF_GPU_ALLOCATOR=cuda_malloc_async: the driver's own pool, which gives back what is free",)
        if asynchronous
        else ()
    )
    logical = tf.config.get_logical_device_configuration(card) or ()
    limit = getattr(logical[0], "memory_limit", None) if logical else None
    if limit:
        return int(limit) * 2**20, (*notes, "a logical device with memory_limit: all of it was taken at the start")
    grows = environ.get("TF_FORCE_GPU_ALLOW_GROWTH", "").lower() == "true"
    if grows or tf.config.experimental.get_memory_growth(card):
        return None, (*notes, "memory growth is on: TensorFlow keeps what it once took, until it ends")
    took = "TensorFlow took nearly the whole card when it started, used or not"
    return None, (*notes, f"{took}: TF_FORCE_GPU_ALLOW_GROWTH=true or set_memory_growth lets it grow")


def _ask_torch(torch: Any, environ: Environment) -> Iterator[Arena]:
    if not torch.cuda.is_initialized():
        return
    for index in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(index):
            yield Arena(
                framework="PyTorch", pool=Pool(kind="device", index=index), in_use=torch.cuda.memory_allocated(index),
                peak=torch.cuda.max_memory_allocated(index), reserved=torch.cuda.memory_reserved(index), source="torch.cuda",
            )  # fmt: skip


ASKED: dict[str, Callable[[Any, Environment], Iterator[Arena]]] = {
    "jax": _ask_jax,
    "tensorflow": _ask_tensorflow,
    "torch": _ask_torch,
}
"""Module -> who reads it."""
