"""GPUs: total, free, and who holds what.

NVIDIA's management library (nvidia-ml-py, the `gpu` extra) answers without using the card. If it is missing, torch is
asked, but only if the program has already imported it and started the device. Starting the device would take half a
gigabyte. What cannot be read is reported as unknown. Devices are numbered as CUDA numbers them for
this process (`CUDA_VISIBLE_DEVICES`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from outsize.core.memory import Holder, Limit, Pool, PoolReading
from outsize.machine.system import System

Answer = tuple[tuple[PoolReading, ...], tuple[str, ...]]


def read_devices(system: System) -> Answer:
    """Every GPU that can be seen, and notes on those that cannot."""
    for ask in (_ask_nvml, _ask_torch):
        answer = ask(system)
        if answer is not None:
            return answer
    return _ask_driver_files(system)


def _ask_nvml(system: System) -> Answer | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = open_devices(pynvml, system.environ)
        return tuple(_read_nvml(pynvml, index, handle) for index, handle in enumerate(handles)), ()
    except pynvml.NVMLError as error:
        return (), (f"the NVIDIA driver did not answer: {error}",)
    finally:
        pynvml.nvmlShutdown()


def open_devices(nvml: Any, environ: Mapping[str, str]) -> list[Any]:
    """The devices this process may use, in CUDA's order; like CUDA, stop at the first invalid name."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return handles
    by_name = {str(index): handle for index, handle in enumerate(handles)}
    by_name |= {text_of(nvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
    seen = []
    for name in (word.strip() for word in wanted.split(",")):
        matches = [key for key in by_name if key == name or (name.startswith("GPU-") and key.startswith(name))]
        if not matches:
            break
        seen.append(by_name[matches[0]])
    return seen


def _read_nvml(nvml: Any, index: int, handle: Any) -> PoolReading:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return PoolReading(
        pool=Pool(kind="device", index=index), name=text_of(nvml.nvmlDeviceGetName(handle)), total=int(memory.total),
        available=int(memory.free), limits=_fraction_limit(index, int(memory.total)),
        holders=read_holders(nvml, handle), source="nvidia-ml-py",
    )  # fmt: skip


def read_holders(nvml: Any, handle: Any) -> tuple[Holder, ...]:
    held: dict[int, int | None] = {}
    for ask in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            held |= {process.pid: process.usedGpuMemory for process in ask(handle)}
        except nvml.NVMLError:
            continue
    holders = [Holder(pid=pid, name=_process_name(pid), bytes=bytes_) for pid, bytes_ in held.items()]
    return tuple(sorted(holders, key=lambda holder: -(holder.bytes or 0)))


def _process_name(pid: int) -> str | None:
    """None where there is no such process: in a container the driver gives the host's ids."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def _ask_torch(system: System) -> Answer | None:
    """CUDA, ROCm, XPU and Apple through a torch that the program has already imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if torch.cuda.is_available():
        if not torch.cuda.is_initialized():
            return (), (f"{torch.cuda.device_count()} GPU(s) seen by torch, not started yet: {INSTALL}",)
        return tuple(_read_torch_cuda(torch, index) for index in range(torch.cuda.device_count())), ()
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return tuple(_read_torch_xpu(torch, index) for index in range(torch.xpu.device_count())), ()
    if hasattr(torch, "mps") and torch.backends.mps.is_available():
        return (_read_torch_mps(torch),), ()
    return None


def _read_torch_cuda(torch: Any, index: int) -> PoolReading:
    free, total = torch.cuda.mem_get_info(index)
    return PoolReading(
        pool=Pool(kind="device", index=index), name=torch.cuda.get_device_name(index), total=total, available=free,
        limits=_fraction_limit(index, total), source="torch", notes=("who holds it is unknown: " + INSTALL,),
    )  # fmt: skip


def _read_torch_xpu(torch: Any, index: int) -> PoolReading:
    total = int(torch.xpu.get_device_properties(index).total_memory)
    free = torch.xpu.mem_get_info(index)[0] if hasattr(torch.xpu, "mem_get_info") else None
    return PoolReading(
        pool=Pool(kind="device", index=index), name=torch.xpu.get_device_name(index), total=total, available=free,
        source="torch",
    )  # fmt: skip


def _read_torch_mps(torch: Any) -> PoolReading:
    total = int(torch.mps.recommended_max_memory())
    return PoolReading(
        pool=Pool(kind="device", index=0), name="Apple GPU", total=total,
        available=max(0, total - int(torch.mps.driver_allocated_memory())), source="torch",
        notes=("shares its memory with RAM",),
    )  # fmt: skip


def _fraction_limit(index: int, total: int) -> tuple[Limit, ...]:
    """`torch.cuda.set_per_process_memory_fraction`, where this process has set it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or not hasattr(torch.cuda, "get_per_process_memory_fraction"):
        return ()
    fraction = torch.cuda.get_per_process_memory_fraction(index)
    if fraction >= 1:
        return ()
    return (
        Limit(
            name="memory fraction", bytes=int(total * fraction), used=torch.cuda.memory_reserved(index),
            source="torch.cuda.set_per_process_memory_fraction",
        ),
    )  # fmt: skip


INSTALL = "pip install 'outsize[gpu]'"


def _ask_driver_files(system: System) -> Answer:
    """Without a library, the driver's files still show that there is a driver."""
    version = (system.read_text("/proc/driver/nvidia/version") or "").strip()
    if version:
        return (), (f"an NVIDIA driver is here, but its memory is unknown: {INSTALL}",)
    return (), ()


def text_of(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
