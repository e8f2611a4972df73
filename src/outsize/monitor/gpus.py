"""GPUs through NVIDIA's management library, kept open between readings -> `GpuSample`, and one line on what is hidden.

`machine.gpu` opens the library for one reading; that takes tens of milliseconds, too long ten times a second. Names are read
once, memory each time if that is cheap, how busy a card is and who holds it less often, each as its cost allows. Without the
library a process that has started CUDA through torch is asked; other processes' cards stay unknown.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

from outsize.core.outcomes.recording import GpuSample
from outsize.machine import current_system
from outsize.machine.gpu import INSTALL, open_devices, read_holders, text_of
from outsize.monitor.allocators import torch_devices
from outsize.monitor.pace import Paced


class Gpus:
    """The cards of this machine, as this process numbers them."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        """What could not be read and why, a sentence each."""
        self._nvml: Any = None
        self._handles: list[Any] = []
        self._names: list[str] = []
        self._failure: type[Exception] = OSError
        self._cards: tuple[GpuSample, ...] = ()
        self._parts = (
            Paced(self._read_memory, every=0.0, share=0.002),
            Paced(self._read_busy, every=1.0, share=0.0005),
            Paced(self._read_holders, every=2.0, share=0.0005),
        )
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
            self._handles = open_devices(pynvml, current_system().environ)
            self._names = [text_of(pynvml.nvmlDeviceGetName(handle)) for handle in self._handles]
            self._nvml, self._failure = pynvml, pynvml.NVMLError
        except pynvml.NVMLError as error:
            self.notes += [f"GPUs are not shown: the NVIDIA driver did not answer: {error}"] * driver

    def read(self, now: float | None = None) -> tuple[GpuSample, ...]:
        """Every card; the same object as last time where nothing has changed."""
        now = time.monotonic() if now is None else now
        before = self._cards
        try:
            for read in self._parts:
                read(now)
        except self._failure as error:
            self._note(f"GPUs are no longer shown: the NVIDIA driver did not answer: {error}")
            self._nvml, self._handles, self._cards = None, [], ()
        self._cards = before if before == self._cards else self._cards
        return self._cards

    def _read_memory(self) -> None:
        """What is taken and free."""
        if self._nvml is None:
            self._cards = _ask_torch()
            return
        found = []
        for index, handle in enumerate(self._handles):
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            used, free, total = int(memory.used), int(memory.free), int(memory.total)
            if self._cards:
                found.append(replace(self._cards[index], used=used, free=free, total=total))
            else:
                found.append(GpuSample(index=index, name=self._names[index], used=used, free=free, total=total))
        self._cards = tuple(found)

    def _read_busy(self) -> None:
        """The share of the last moments in which each card was at work."""
        pairs = zip(self._cards, self._handles, strict=False)
        found = [replace(card, utilisation=self._utilisation(card.index, handle)) for card, handle in pairs]
        self._cards = tuple(found) or self._cards

    def _read_holders(self) -> None:
        """The processes on each card."""
        pairs = zip(self._cards, self._handles, strict=False)
        found = [replace(card, holders=read_holders(self._nvml, handle)) for card, handle in pairs]
        for card in found:
            if any(holder.bytes is None for holder in card.holders):
                self._note(f"GPU {card.index}: the driver hides what each process holds")
            elif not card.holders and (card.used or 0) > 2**30:
                self._note(
                    f"GPU {card.index}: memory is taken and the driver names no process: it hides those of other containers"
                )
        self._cards = tuple(found) or self._cards

    def _utilisation(self, index: int, handle: Any) -> float | None:
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
        except self._failure:  # a slice of a card (MIG) has none
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
