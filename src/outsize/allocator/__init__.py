"""Models of allocators: what they take from the system for the blocks a program asks for.

In: allocation events (a trace of a real run, a traced step, a list of tensors). Out: requested, allocated, active and
reserved bytes at every event, their peaks, the segment map. `trace` reads torch's own recordings.
"""

from __future__ import annotations

from outsize.allocator.bfc import BfcSettings
from outsize.allocator.glibc import GlibcSettings
from outsize.allocator.replay import MODELS, PhaseEvent, StepsReplay, replay, replay_steps
from outsize.allocator.settings import CudaSettings, parse_settings, settings_from_environment
from outsize.allocator.take import TAKERS, take
from outsize.allocator.trace import Recording, read_snapshot, read_trace

__all__ = [
    "MODELS",
    "TAKERS",
    "BfcSettings",
    "CudaSettings",
    "GlibcSettings",
    "PhaseEvent",
    "Recording",
    "StepsReplay",
    "parse_settings",
    "read_snapshot",
    "read_trace",
    "replay",
    "replay_steps",
    "settings_from_environment",
    "take",
]
