"""What a watch has seen, in bounded memory: when there are many samples, every second one goes, but never the peak."""

from __future__ import annotations

from outsize.core.rates import held_bytes
from outsize.core.recording import HOST_DEVICE, Finding, Head, Mark, Note, Recording, Sample
from outsize.core.watch_stream import newest

_SAMPLES = 4096
_OTHERS = 1000
"""Marks, findings and notes that are kept: the latest."""


class History:
    """Samples, marks, findings and notes."""

    def __init__(self, most: int = _SAMPLES) -> None:
        self._most = most
        self.samples: list[Sample] = []
        self.marks: list[Mark] = []
        self.findings: list[Finding] = []
        self.notes: list[Note] = []

    def ids(self) -> set[int]:
        """ids of the containers in here, which grow and are no leak."""
        return {id(self.samples), id(self.marks), id(self.findings), id(self.notes)}

    def add(self, item: Sample | Mark | Finding | Note) -> None:
        """Take one more."""
        if isinstance(item, Sample):
            self.samples.append(item)
            if len(self.samples) > self._most:
                self._thin()
            return
        lists: dict[type, list[object]] = {Mark: self.marks, Finding: self.findings, Note: self.notes}  # type: ignore[dict-item]
        kept = lists[type(item)]
        kept.append(item)
        del kept[:-_OTHERS]

    def _thin(self) -> None:
        peak = max(self.samples, key=held_bytes)
        self.samples[:] = [
            sample for number, sample in enumerate(self.samples) if number % 2 or sample is peak or number < 2
        ]

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

    def full_in(self, finding: Finding) -> float | None:
        """Seconds until the limit is reached at the rate of a finding."""
        if not self.samples or not finding.per_second or finding.per_second <= 0:
            return None
        last = self.samples[-1]
        left = last.host.limit - last.host.used if last.host.limit is not None and last.host.used is not None else None
        if finding.device != HOST_DEVICE:
            card = finding.device.rpartition(":")[2]
            left = next((gpu.free for gpu in last.gpus if str(gpu.index) == card), None)
        return None if left is None else max(0.0, left / finding.per_second)
