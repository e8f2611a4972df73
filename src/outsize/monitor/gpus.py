"""GPUs through NVIDIA's management library, kept open between readings -> `GpuSample`, and one line on what is hidden.

`machine.gpu` opens the library for one reading; that takes tens of milliseconds, too long ten times a second. Without the
library a process that has started CUDA through torch is asked; other processes' cards stay unknown.
"""

from __future__ import annotations

import sys
from typing import Any

from outsize.core.outcomes.recording import GpuSample
from outsize.machine import current_system
from outsize.machine.gpu import INSTALL, read_holders, text_of, visible_devices
from outsize.monitor.allocators import torch_devices


class Gpus:
    """The cards of this machine, as this process numbers them."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        """What could not be read and why, a sentence each."""
        self._nvml: Any = None
        self._handles: list[Any] = []
        self._open()

    def _open(self) -> None:
        driver = bool((current_system().read_text("/proc/driver/nvidia/version") or "").strip())
        try:
            import pynvml
        except ImportError:
            self.notes += [f"GPUs are not shown: the NVIDIA driver is here, its library is not: {INSTALL}"] * driver
            return
        try:
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            self._handles = visible_devices(pynvml, handles, current_system().environ)
            self._nvml = pynvml
        except pynvml.NVMLError as error:
            self.notes += [f"GPUs are not shown: the NVIDIA driver did not answer: {error}"] * driver

    def read(self) -> tuple[GpuSample, ...]:
        """Every card now."""
        if self._nvml is None:
            return _ask_torch()
        try:
            return tuple(self._read(index, handle) for index, handle in enumerate(self._handles))
        except self._nvml.NVMLError as error:
            self._note(f"GPUs are no longer shown: the NVIDIA driver did not answer: {error}")
            self._nvml = None
            return ()

    def _read(self, index: int, handle: Any) -> GpuSample:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        holders = read_holders(self._nvml, handle)
        if any(holder.bytes is None for holder in holders):
            self._note(f"GPU {index}: the driver hides what each process holds")
        elif not holders and int(memory.used) > 2**30:
            self._note(
                f"GPU {index}: memory is taken and the driver names no process: it hides those of other containers"
            )
        return GpuSample(
            index=index,
            name=text_of(self._nvml.nvmlDeviceGetName(handle)),
            used=int(memory.used),
            free=int(memory.free),
            total=int(memory.total),
            utilisation=self._utilisation(index, handle),
            holders=holders,
        )

    def _utilisation(self, index: int, handle: Any) -> float | None:
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
        except self._nvml.NVMLError:  # a slice of a card (MIG) has none
            self._note(f"GPU {index}: the driver does not say how busy it is")
            return None

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _ask_torch() -> tuple[GpuSample, ...]:
    """Cards of this process through a torch that has started them."""
    found = []
    for index in torch_devices():
        cuda = sys.modules["torch"].cuda
        free, total = cuda.mem_get_info(index)
        name = str(cuda.get_device_name(index))
        found.append(GpuSample(index=index, name=name, used=total - free, free=free, total=total))
    return tuple(found)
