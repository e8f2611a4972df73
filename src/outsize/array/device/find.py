"""From what a user calls a device to a `DeviceBudget`: which device, how many bytes of it, and a clear word where it cannot be.

`cuda`, `cuda:1` and `cupy:0` name a device: what stands in the way is an error. `auto` takes the first CUDA device if
there is one with room, and says why not otherwise. `fake` is the pretended device, for trying things without a card.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from outsize.array.device.base import Device, DeviceBudget
from outsize.core.errors import InputError, OutOfMemory
from outsize.core.extras import need
from outsize.core.units import format_bytes
from outsize.machine.budget import SHARE, current_wishes

_NAMES = "'cuda', 'cuda:1', 'cupy', 'auto' or 'cpu'"
_MARGIN = 128 << 20
"""Bytes left alone on a card that others have nearly filled: kernels are loaded as they are first used."""
_FAKE_LIMIT = 64 << 20
"""Bytes of the pretended device where no budget is set."""


def find_device(device: Any, tf32: bool = False) -> tuple[DeviceBudget | None, tuple[str, ...]]:
    """(the device_budget, notes): None for the processor alone."""
    if isinstance(device, Device):
        return _level(device, tf32, strict=True), ()
    name = "cpu" if device is None else str(device).lower()
    if name == "cpu":
        if tf32:
            raise InputError("tf32=True is for products on a device: give device='cuda' with it")
        return None, ()
    if name != "auto":
        return _level(_find(name), tf32, strict=True), ()
    try:
        found = _find("cuda")
        device_budget = _level(found, tf32, strict=False)
    except (InputError, OutOfMemory) as error:
        return None, (_warn(f"on the processor: {str(error).partition(';')[0]}"),)
    if device_budget.room == 0:
        left, why = found.available()
        return None, (_warn(f"on the processor: {found.name} has {format_bytes(left)} left, {why}"),)
    return device_budget, ()


def _warn(note: str) -> str:
    warnings.warn(note, stacklevel=2)
    return note


def _level(device: Device, tf32: bool, *, strict: bool) -> DeviceBudget:
    wishes = current_wishes()
    wish = wishes.device
    try:
        left, why = device.available()
    except RuntimeError as error:  # the driver needs a few hundred MiB before it says anything
        raise OutOfMemory(f"{device.name} cannot be started, others may hold all of it: {error}") from None
    device.limit = min(left, wish or left)
    if wish is None:
        budget, reason = int(left * SHARE), f"{SHARE:.0%} of the {format_bytes(left)} available"
    elif left < wish:
        kept = _MARGIN * (device.outside > 0)
        budget = max(0, left - kept)
        free = f", {format_bytes(kept)} stay free" if kept else ""
        reason = f"{format_bytes(wish)} set by you, {format_bytes(left)} left{free}: {why}"
    else:
        budget, reason = wish, "set by you"
    return DeviceBudget(device, budget, reason, strict, tf32, wishes.pinned)


def _find(name: str) -> Device:
    kind, colon, number = name.partition(":")
    if kind not in ("cuda", "cupy", "fake") or (colon and not number.isdigit()):
        raise InputError(f"device={name!r} is none: say {_NAMES}")
    index = int(number) if number else 0
    if kind == "fake":
        return make_fake(current_wishes().device or _FAKE_LIMIT)
    count, make = _find_cuda(name) if kind == "cuda" else _find_cupy(name)
    if index >= count:
        raise InputError(f"device={name!r} does not exist: there are {count}, {kind}:0 to {kind}:{count - 1}")
    return make(index)


def make_fake(limit: int, **options: Any) -> Device:
    """The pretended device, over torch where it is installed, else over NumPy."""
    from outsize.array.device.fake import FakeDevice

    try:
        from outsize.array.device.torch_kernels import TorchKernels
    except ImportError:
        import numpy as np

        from outsize.array.device.array_kernels import ArrayKernels

        return FakeDevice(ArrayKernels(np), limit=limit, **options)
    return FakeDevice(TorchKernels("cpu"), limit=limit, **options)


def _find_cuda(name: str) -> tuple[int, Callable[[int], Device]]:
    torch = need("torch", f"device={name!r}", "leave device= out")
    if not torch.cuda.is_available():
        why = "this torch was built without CUDA" if torch.version.cuda is None else "its driver shows none"
        raise InputError(f"device={name!r}: torch sees no CUDA device ({why}); leave device= out, or use 'auto'")
    from outsize.array.device.cuda import TorchDevice

    return torch.cuda.device_count(), TorchDevice


def _find_cupy(name: str) -> tuple[int, Callable[[int], Device]]:
    cupy = need("cupy", f"device={name!r}", "use 'cuda'")
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise InputError(f"device={name!r}: CuPy sees no CUDA device ({error})") from None
    from outsize.array.device.cupy_device import CupyDevice

    return count, CupyDevice
