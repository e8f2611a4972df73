"""The peak of a block of code in this process: `with PeakMeter("name") as meter: ...`, then `meter.peaks()`.

RAM: the kernel keeps the highest resident size of a process (`VmHWM`). It only ever rises, so it is reset when the block begins
(`/proc/self/clear_refs`); where that is not allowed, a thread that looks every few milliseconds is all there is, and short
peaks are missed. Before the block garbage is collected and the heap gives back what is free, since a block that fills what others
have left behind would seem to hold nothing. The mark counts file pages too, which the kernel takes back when it must: those that
were mapped at the highest look are left out, and the bound leaves out only those that were mapped all the time. Child processes
add what is theirs alone. A card: torch's allocator counts every byte itself.

The thread also looks where the program is at the highest moments, and who holds memory then. It looks at the holders only above
the budget: a test that keeps its budget pays for a reading every few milliseconds and nothing else.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from outsize.core.memory import HOST, Part, Pool
from outsize.core.noun import Known
from outsize.core.outcomes.measured_peak import MeasuredPeak
from outsize.core.units import MiB, format_bytes
from outsize.engine.heap import trim_heap
from outsize.monitor.processes.tree import ProcessReading, read_private, read_process, read_tree

INTERVAL = 0.005
"""Seconds between two looks."""
FAMILY = 10
"""Every how many looks children and cards are asked too."""
RISE = 1.05
"""A moment is looked at if it is this much higher than the last that was."""
AGAIN = 0.02
"""Seconds after which a moment that is nearly as high is looked at again: what a call makes has a name when it returns."""
LOOKS = 200
"""Most looks at the holders in one block."""
_LIBRARIES = (
    "site-packages",
    "dist-packages",
    "<frozen",
    os.path.dirname(os.__file__),
    os.sep + "outsize" + os.sep + "monitor",
)

Look = Callable[[int], tuple[Part, ...]]
"""The thread that runs the block -> who holds memory now."""


class PeakMeter:
    """Measures the block it is the context of, in this process and its children."""

    def __init__(
        self, name: str, budget: int | None = None, device: int | None = None, look: Look | None = None
    ) -> None:
        self.name, self.budget, self.device = name, budget, device
        self._look = look
        self._thread_id = threading.get_ident()
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="outsize-peak", daemon=True)
        self._seen: dict[Pool, _Highest] = {}
        self._least_files = 0
        self._fullest = (0, 0)
        """(resident bytes, bytes of files among them) at the fullest look."""
        self._children = 0
        self._end: ProcessReading | None = None
        self._cards: dict[int, tuple[int, int]] = {}

    def __enter__(self) -> PeakMeter:
        gc.collect()
        trim_heap()
        self._resets = _reset_high_water()
        self._cards_before = _reset_cards()
        self._begin = _read_self()
        self._least_files, self._fullest = self._begin.files, (self._begin.rss, self._begin.files)
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._sampler.join()
        self._end = _read_self()
        self._cards = _read_cards()

    def peaks(self) -> tuple[MeasuredPeak, ...]:
        """What was measured: RAM first, then every card that torch has used."""
        cards = [self._card(index, most) for index, (_, most) in sorted(self._cards.items())]
        return (self._host(), *(card for card in cards if card.bytes or self.device is not None))

    def _host(self) -> MeasuredPeak:
        assert self._end is not None, "the block has not ended"
        start, seen = _held(self._begin), self._seen.get(HOST, _Highest())
        most = bound = seen.bytes
        how = "seen by looking every 5 ms, because the kernel's high-water mark cannot be reset here: short peaks are missed"
        if self._resets:
            mark = _high_water(self._end)
            most = max(most, mark - self._fullest[1] - start)
            bound = max(most, mark - min(self._least_files, self._end.files) - start)
            how = "the kernel's high-water mark of this process, reset when it began"
            if bound > most + MiB:
                how += f"; files that it mapped meanwhile leave {format_bytes(bound - most)} open"
        if self._children:
            how += f"; what {self._children} child process{'es' * (self._children > 1)} held was seen every 50 ms"
        return MeasuredPeak(
            name=self.name, pool=HOST, bytes=max(0, most), bound=max(0, bound), started_with=start, known=Known.ESTIMATE,
            how=how, budget=self.budget, seen=seen.bytes, line=seen.line, holders=seen.holders,
        )  # fmt: skip

    def _card(self, index: int, most: int) -> MeasuredPeak:
        pool = Pool(kind="device", index=index)
        before = self._cards_before.get(index, 0)
        seen = self._seen.get(pool, _Highest())
        return MeasuredPeak(
            name=self.name, pool=pool, bytes=max(0, most - before), bound=max(0, most - before), started_with=before,
            known=Known.EXACT, how="counted by torch's allocator, whose peak was reset when it began", budget=self.device,
            seen=seen.bytes, line=seen.line, holders=seen.holders,
        )  # fmt: skip

    # -- the thread ----------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        count, children = 0, 0
        while not self._stop.wait(INTERVAL):
            reading = _read_self()
            if count % FAMILY == 0:
                children = self._read_children()
                for index, (now, _) in _read_cards().items() if self.device is not None else ():
                    self._notice(Pool(kind="device", index=index), now - self._cards_before.get(index, 0), self.device)
            count += 1
            self._least_files = min(self._least_files, reading.files)
            self._fullest = max(self._fullest, (reading.rss, reading.files))
            self._notice(HOST, _held(reading) - _held(self._begin) + children, self.budget)

    def _notice(self, pool: Pool, size: int, budget: int | None) -> None:
        """Keep a moment that is higher than all before; look around if it is above the budget and much higher."""
        highest = self._seen.setdefault(pool, _Highest())
        highest.bytes = max(highest.bytes, size)
        over = budget is not None and size > budget and self._look is not None and highest.looks < LOOKS
        again = over and size * RISE > highest.looked and time.monotonic() > highest.again
        if size < MiB or (size < highest.looked * RISE and not again):
            return
        highest.line, highest.looked = _line_of(sys._current_frames().get(self._thread_id)), max(size, highest.looked)
        if over and self._look is not None:
            highest.holders, highest.looks = self._look(self._thread_id), highest.looks + 1
            highest.again = time.monotonic() + AGAIN

    def _read_children(self) -> int:
        family = read_tree(os.getpid()).processes[1:]
        self._children = max(self._children, len(family))
        return sum(read_private(process.pid, ["Private_Dirty"]) or 0 for process in family)


class _Highest:
    """The highest moment so far of one pool."""

    def __init__(self) -> None:
        self.bytes = 0
        self.looked = 0
        self.looks = 0
        self.again = 0.0
        self.line: str | None = None
        self.holders: tuple[Part, ...] = ()


def _read_self() -> ProcessReading:
    reading = read_process(os.getpid())
    assert reading is not None, "/proc has no entry for this process"
    return reading


def _held(reading: ProcessReading) -> int:
    return reading.anonymous + reading.shared


def _high_water(reading: ProcessReading) -> int:
    """The most that the process had resident since the last reset."""
    return reading.highest + reading.files


def _reset_high_water() -> bool:
    """Let the kernel forget this process's highest resident size; False where it does not."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    now = _read_self()
    return _high_water(now) <= now.rss + MiB


def _cuda() -> Any:
    """`torch.cuda` if this program uses it, else None; torch is never imported here."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def _reset_cards() -> dict[int, int]:
    """Card -> bytes allocated now; their peaks begin again."""
    cuda = _cuda()
    found = {}
    for index in range(cuda.device_count()) if cuda is not None else ():
        cuda.reset_peak_memory_stats(index)
        found[index] = int(cuda.memory_allocated(index))
    return found


def _read_cards() -> dict[int, tuple[int, int]]:
    """Card -> (bytes allocated now, the most since the reset)."""
    cuda = _cuda()
    if cuda is None:
        return {}
    return {
        index: (int(cuda.memory_allocated(index)), int(cuda.max_memory_allocated(index)))
        for index in range(cuda.device_count())
    }


def _line_of(frame: FrameType | None) -> str | None:
    """The innermost line of the user's own code."""
    innermost = frame
    while frame is not None:
        code = frame.f_code
        if not any(library in code.co_filename for library in _LIBRARIES):
            return _spell(frame)
        frame = frame.f_back
    return None if innermost is None else _spell(innermost)


def _spell(frame: FrameType) -> str:
    return f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_qualname}"
