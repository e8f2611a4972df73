"""The allocators inside this process -> `AllocatorSample`: the C library's and Python's, torch's, TensorFlow's, JAX's.

Nothing is imported and no device is started: a framework is asked only where the program has loaded it and has started its
device. `requested` counts what the program asked for and has not given back, so that what an allocator only keeps for later
(arenas, cached blocks, fragments) is no growth.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from outsize.core.outcomes.recording import HOST_DEVICE, AllocatorSample

_BLOCK = 64
"""Bytes that one of Python's small blocks is taken to have: they are counted, not measured."""


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and newer."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    )  # fmt: skip


@functools.cache
def _mallinfo() -> Any:
    """The C library's own count, None where it has none or where another allocator has taken its place."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    function.restype = _Mallinfo
    replaced = "malloc" in os.environ.get("LD_PRELOAD", "")
    return function if function().uordblks > 0 and not replaced else None


def read_malloc() -> int | None:
    """Bytes asked of the C library and not given back, None where it does not say. Takes about a microsecond."""
    function = _mallinfo()
    if function is None:
        return None
    info = function()
    return int(info.uordblks + info.hblkhd)


def read_small() -> int:
    """Bytes of Python's small blocks, each taken to have `_BLOCK`. Takes tens of microseconds, and more in a large heap."""
    return size_small(sys.getallocatedblocks())


def size_small(count: int) -> int:
    """Bytes that so many small blocks of Python are taken to have."""
    return count * _BLOCK


def read_device_requested(index: int) -> int | None:
    """Bytes that tensors of a CUDA device have asked for and not given back, None where torch does not say."""
    stats = sys.modules["torch"].cuda.memory_stats(index)
    found = stats.get("requested_bytes.all.current", stats.get("allocated_bytes.all.current"))
    return None if found is None else int(found)


def device_meters() -> dict[str, Callable[[], int | None]]:
    """Device -> what reads the bytes that its arrays take, for every device that a framework has started here."""
    found: dict[str, Callable[[], int | None]] = {
        f"cuda:{index}": functools.partial(read_device_requested, index) for index in torch_devices()
    }
    for device in _jax_devices():
        found[f"{device.platform}:{device.id}"] = functools.partial(_read_jax_device, device)
    return found


def _read_jax_device(device: Any) -> int | None:
    found = (device.memory_stats() or {}).get("bytes_in_use")
    return None if found is None else int(found)


def _jax_devices() -> list[Any]:
    """Devices beside the processor that JAX has started in this process."""
    jax = sys.modules.get("jax")
    bridge = sys.modules.get("jax._src.xla_bridge")
    if jax is None or not getattr(bridge, "_backends", None):  # asking for devices would start them
        return []
    return [device for device in jax.local_devices() if device.platform != "cpu"]


def read_allocators() -> tuple[AllocatorSample, ...]:
    """Every allocator that can be read without starting anything."""
    return (*_read_malloc(), *_read_torch(), *_read_jax(), *_read_tensorflow())


def _read_malloc() -> tuple[AllocatorSample, ...]:
    function = _mallinfo()
    if function is None:
        return ()
    info, small = function(), read_small()
    asked, reserved = int(info.uordblks + info.hblkhd) + small, int(info.arena + info.hblkhd) + small
    return (_sample("malloc", HOST_DEVICE, requested=asked, reserved=reserved, fragments=int(info.fordblks)),)


def _sample(framework: str, device: str, **sizes: int | None) -> AllocatorSample:
    return AllocatorSample(pid=os.getpid(), framework=framework, device=device, **sizes)  # type: ignore[arg-type]


def torch_devices() -> range:
    """CUDA devices that torch has started in this process."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return range(0)
    return range(torch.cuda.device_count())


def _read_torch() -> tuple[AllocatorSample, ...]:
    found = []
    for index in torch_devices():
        stats = sys.modules["torch"].cuda.memory_stats(index)
        names = {name: name for name in ("requested", "allocated", "reserved")} | {"fragments": "inactive_split"}
        sizes = {name: stats.get(f"{torch}_bytes.all.current") for name, torch in names.items()}
        if sizes["reserved"]:
            found.append(_sample("torch", f"cuda:{index}", **sizes))
    return tuple(found)


def _read_jax() -> tuple[AllocatorSample, ...]:
    found = []
    for device in _jax_devices():
        stats = device.memory_stats() or {}
        if stats:
            used, reserved = stats.get("bytes_in_use"), stats.get("pool_bytes") or stats.get("bytes_reserved")
            name = f"{device.platform}:{device.id}"
            found.append(_sample("jax", name, requested=used, allocated=used, reserved=reserved))
    return tuple(found)


def _read_tensorflow() -> tuple[AllocatorSample, ...]:
    tensorflow = sys.modules.get("tensorflow")
    context = sys.modules.get("tensorflow.python.eager.context")
    if tensorflow is None or context is None or not getattr(context.context(), "_initialized", False):
        return ()
    found = []
    for device in tensorflow.config.list_logical_devices("GPU"):
        name = device.name.removeprefix("/device:")
        used = tensorflow.config.experimental.get_memory_info(name)["current"]
        found.append(_sample("tensorflow", name.lower(), requested=used, allocated=used))
    return tuple(found)


def largest_tensors(most: int = 5) -> tuple[str, ...]:
    """The largest tensors that Python can reach, a line each, counted by their storage. Looks through the whole heap."""
    import gc

    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):
        return ()
    seen: dict[int, tuple[int, str]] = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor):
            try:
                storage = item.untyped_storage()
                line = f"{tuple(item.shape)} {str(item.dtype).removeprefix('torch.')} {item.device}"
                seen[storage.data_ptr()] = (storage.nbytes(), line)
            except Exception:  # tensors without contents or with a class of their own answer as they like
                continue
    ranked = sorted(seen.values(), reverse=True)[:most]
    return tuple(f"{bytes_ / 2**20:,.1f} MiB {line}" for bytes_, line in ranked)
