"""A recording as scalars for TensorBoard, with the recording's own clock. Needs `outsize[tensorboard]`."""

from __future__ import annotations

import os
from collections.abc import Iterable

from outsize.core.extras import need
from outsize.core.outcomes.recording import Recording, Sample
from outsize.report.outputs.numbers import numbers


def write_scalars(recording: Recording, folder: str | os.PathLike[str]) -> None:
    """Write every sample into an event file in `folder`: at its step if steps were marked, else one after another."""
    need("tensorboard", "writing TensorBoard's files")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(os.fspath(folder))
    try:
        for step, sample in _steps(recording.samples):
            values = [Summary.Value(tag=number.path, simple_value=number.value) for number in numbers(sample)]
            writer.add_event(
                Event(wall_time=recording.head.started + sample.time, step=step, summary=Summary(value=values))
            )
    finally:
        writer.close()


def _steps(samples: tuple[Sample, ...]) -> Iterable[tuple[int, Sample]]:
    marked = [(sample.step, sample) for sample in samples if sample.step is not None]
    return marked or list(enumerate(samples))
