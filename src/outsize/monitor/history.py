"""What a watch has seen, in bounded memory: when there are many samples, every second one goes, but never the peak."""

from __future__ import annotations

from typing import Any

from outsize.core.noun import Noun
from outsize.core.outcomes.outlook import gpu_outlook, host_outlook
from outsize.core.outcomes.rates import held_bytes
from outsize.core.outcomes.recording import HOST_DEVICE, Finding, Head, Mark, Note, Recording, Sample
from outsize.core.outcomes.watch_stream import newest

_SAMPLES = 4096
_OTHERS = 1000
"""Marks, findings and notes that are kept: the latest."""


class History:
    """Samples, marks, findings and notes."""

    def __init__(self, most: int = _SAMPLES) -> None:
        self._most, self._objects = most, 0.0
        self.samples: list[Sample] = []
        self.marks: list[Mark] = []
        self.findings: list[Finding] = []
        self.notes: list[Note] = []

    def ids(self) -> set[int]:
        """ids of the containers in here, which grow and are no leak."""
        return {id(self.samples), id(self.marks), id(self.findings), id(self.notes)}

    def count_objects(self) -> int:
        """Python objects that the samples here take, about: a long watch must not take itself for a leak."""
        return round(self._objects)

    def add(self, item: Sample | Mark | Finding | Note) -> None:
        """Take one more."""
        if isinstance(item, Sample):
            self._objects += _new_objects(item, self.samples[-1] if self.samples else None)
            self.samples.append(item)
            if len(self.samples) > self._most:
                self._thin()
            return
        lists: dict[type, list[object]] = {Mark: self.marks, Finding: self.findings, Note: self.notes}  # type: ignore[dict-item]
        kept = lists[type(item)]
        kept.append(item)
        del kept[:-_OTHERS]

    def _thin(self) -> None:
        peak, before = max(self.samples, key=held_bytes), len(self.samples)
        self.samples[:] = [
            sample for number, sample in enumerate(self.samples) if number % 2 or sample is peak or number < 2
        ]
        self._objects *= len(self.samples) / before

    def recording(self, head: Head, complete: bool) -> Recording:
        """All of it as one value."""
        return Recording(
            head=head,
            samples=tuple(self.samples),
            marks=tuple(self.marks),
            findings=newest(self.findings),
            notes=tuple(self.notes),
            complete=complete,
        )

    def full_in(self, device: str) -> float | None:
        """Seconds until the limit of a device is reached, None where that is not known."""
        card = device.rpartition(":")[2]
        if device == HOST_DEVICE:
            outlook = host_outlook(self.samples)
        else:
            outlook = gpu_outlook(self.samples, int(card)) if card.isdigit() else None
        return outlook.middle if outlook is not None and outlook.is_known else None


def _new_objects(sample: Sample, before: Sample | None) -> int:
    """Objects that a sample does not share with the one before: itself, its time, and the parts that were made anew."""
    parts = ("host", "gpus", "allocators", "processes")
    return 2 + sum(
        _count_objects(getattr(sample, part))
        for part in parts
        if before is None or getattr(sample, part) is not getattr(before, part)
    )


def _count_objects(value: Any) -> int:
    """Nouns, tuples and numbers; texts and small numbers are there already."""
    names = getattr(type(value), "__slots__", None)
    if names is not None and isinstance(value, Noun):
        return 1 + sum(_count_objects(getattr(value, name)) for name in names)
    if isinstance(value, tuple):
        return bool(value) + sum(map(_count_objects, value))
    return int(isinstance(value, float) or (isinstance(value, int) and value > 256))
