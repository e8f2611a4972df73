"""Where a failure happened: on which device, in whose framework and program, under which settings.

In: a `Failure`, the text it came in, a `Reading` and settings where they are known. Out: one property a question.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property

from outsize.core.failure import Failure
from outsize.core.memory import Reading
from outsize.failure import signs
from outsize.failure.advice import Framework
from outsize.failure.framework import ALLOCATOR_SETTINGS, framework
from outsize.failure.message.clean import clean
from outsize.failure.program import Program, managers_of, places_of, programs_of
from outsize.failure.shown import Shown
from outsize.failure.work import Work


class Scene(Shown):
    """The part of a `Case` that counts no bytes."""

    failure: Failure
    reading: Reading | None
    settings: Mapping[str, str]
    watched: bool
    library: str | None

    @cached_property
    def format(self) -> str:
        """Which wording it was; the driver's bare words are those of pinned RAM where weights or an optimizer's
        state go there."""
        said = str(self.failure.extra.get("format", ""))
        return "pinned" if said == "cuda-bare" and signs.OFFLOADS.search(self.text) is not None else said

    @property
    def framework(self) -> Framework:
        """What is known of who failed."""
        return framework(self.failure.framework)

    @cached_property
    def tool(self) -> str:
        """The command that lists who is on the device."""
        place = (self.failure.device or "").partition(":")[0]
        return _TOOLS.get("tpu" if self.on_tpu and self.failure.framework == "jax" else place, "nvidia-smi")

    @property
    def who_holds(self) -> str:
        """What decides whether others hold the device."""
        return f"`{self.tool}` on that machine, or `outsize memory`: who holds the card"

    @cached_property
    def torch_module(self) -> str:
        """Where PyTorch keeps what belongs to the device; a HIP device is `torch.cuda` there."""
        place = (self.failure.device or "").partition(":")[0]
        return f"torch.{place}" if place in ("xpu", "npu") else "torch.cuda"

    @cached_property
    def expandable(self) -> bool:
        """True where expandable segments were already on."""
        spoken = any("expandable_segments:true" in self.settings.get(name, "").lower() for name in ALLOCATOR_SETTINGS)
        return spoken or signs.EXPANDABLE.search(clean(self.text).views[0]) is not None

    def setting(self, name: str) -> str | None:
        """The value of an environment variable, where it is known or the text shows that it was set."""
        if not name or name in self.settings:
            return self.settings.get(name)
        shown = re.search(rf"(?<!Use )(?<!setting )(?<!setting `){name}[\"']?\]? ?[=:] ?[\"']?([\w.:]+)", self.text)
        return None if shown is None else shown.group(1)

    @property
    def on_host(self) -> bool:
        """True where RAM ran out, not a device's memory."""
        if self.failure.device is not None:
            return self.failure.device == "cpu"
        if self.failure.framework == "jax":  # names no device; where there is no GPU it was RAM
            none = self.reading is not None and not self.reading.devices
            return none or (self.reading is None and signs.WITHOUT_GPU.search(self.text) is not None)
        return self.framework.host or self.format == "errno12"

    @property
    def on_device(self) -> bool:
        """True where a device's memory ran out, as far as is known."""
        return not self.on_host and (self.failure.device is not None or self.framework.accelerated)

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """Whose program it was, as the text shows; a process that is known by name shows it too."""
        return programs_of(f"{self.text}\n{self.failure.process or ''}", self.failure.framework)

    @cached_property
    def managers(self) -> tuple[Program, ...]:
        """What started it, where that asks for memory on its behalf."""
        return managers_of(self.text)

    @cached_property
    def places(self) -> tuple[Program, ...]:
        """Where it ran, as the text shows."""
        return places_of(self.text)

    @property
    def shows_torch(self) -> bool:
        """True where PyTorch computes on a card, as the message or the words around it show."""
        told = self.failure.framework == "unknown" and self.place == "cuda"
        return self.on_torch_gpu or (told and signs.TORCH.search(self.text) is not None)

    @property
    def place(self) -> str:
        """Kind of device whose memory ran out, `cpu` for RAM."""
        ended = self.failure.extra.get("signal") == "Killed"  # the kernel ends nothing for a card that is full
        kind = (self.failure.device or "").partition(":")[0] or ("cpu" if self.on_host or ended else "")
        used = (
            self.format in ("told", "said", "said-otherwise", "contiguous")
            and self.work is not Work.UNKNOWN
            and signs.RAM.search(self.text) is None
            and signs.NO_CARD.search(self.text) is None
        )
        return kind or ("cuda" if self.on_device or used or self.names_card else "cpu")

    @cached_property
    def on_windows(self) -> bool:
        """True where the text shows that it happened on Windows."""
        told = signs.WINDOWS.search(self.text) is not None and signs.ANDROID.search(self.text) is None
        return self.failure.framework == "windows" or told

    @property
    def may_be_python(self) -> bool:
        """False where the program is known not to be Python's, or not on Linux, so that nothing of Outsize can run it."""
        name = (self.failure.process or "python").lower()
        if self.on_windows or self.in_image_build or signs.OTHER_TOOLS.search(self.text) is not None:
            return False
        shown = self.failure.process is not None or self.reading is not None or self.library is not None or self.watched
        if self.failure.framework in signs.ANY_LANGUAGE and not shown and signs.PYTHON.search(self.text) is None:
            return False
        return self.framework.python and any(word in name for word in ("python", "ray::", "jupyter", "pt_", "torchrun"))

    @property
    def in_graph(self) -> bool:
        """True where the tensor is one of a graph: what the user cuts is the batch, not the tensor."""
        return self.failure.framework == "tensorflow" and self.on_device

    @property
    def on_torch(self) -> bool:
        """True where PyTorch computes, on whatever device, and not one of its loader's workers."""
        pytorch = "pytorch" in (self.failure.framework, self.library) and self.format not in ("shm-map", "pinned")
        return pytorch and self.failure.process != "DataLoader worker" and not self.failure.extra.get("shared_memory")

    @property
    def can_be_fitted(self) -> bool:
        """True where `outsize.fit` runs: PyTorch on Linux, on a CPU or a CUDA or HIP device, and a model that is trained."""
        place = (self.failure.device or "cpu").partition(":")[0]
        fits = self.work in (Work.TRAINS, Work.EVALUATES, Work.UNKNOWN)
        return self.on_torch and place in ("cpu", "cuda", "hip") and fits and not self.on_windows

    @property
    def on_torch_gpu(self) -> bool:
        """True for PyTorch's caching allocator on a CUDA, HIP or XPU device."""
        device = self.failure.device or ""
        return self.failure.framework == "pytorch" and device.split(":")[0] in {"cuda", "hip", "xpu", "npu"}


_TOOLS = {
    "hip": "rocm-smi", "xpu": "xpu-smi ps", "npu": "npu-smi info", "mps": "Activity Monitor", "metal": "Activity Monitor",
    "vulkan": "nvtop", "dml": "Task Manager", "tpu": "tpu-info",
}  # fmt: skip
