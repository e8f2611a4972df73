"""What was seen of a machine or a program over time: samples, step marks, growth findings and notes.

`monitor` makes these, `core.watch_stream` writes them as lines and reads them back, `report` draws them. Times are seconds since
the head's `started`. Bytes are whole numbers and None is "not known here".
"""

from __future__ import annotations

from dataclasses import dataclass

from outsize.core.memory import Holder, Reading
from outsize.core.noun import Noun

HOST_DEVICE = "host"
"""The device name of memory that is RAM, in `AllocatorSample` and `Finding`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample(Noun):
    """One process of the tree at one moment."""

    pid: int
    name: str
    anonymous: int
    """Bytes of RAM that are not file pages: its own, and those it shares with the process it was forked from."""
    shared: int = 0
    """Bytes of shared memory that it has touched."""
    files: int = 0
    """Bytes of file pages that it maps."""
    swap: int = 0
    uss: int | None = None
    """Bytes that would be free if it ended; None where it was not read this time."""

    @property
    def rss(self) -> int:
        """Bytes of RAM it has mapped."""
        return self.anonymous + self.shared + self.files


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample(Noun):
    """RAM at one moment: what the watched processes hold, and what is left."""

    rss: int
    """Bytes of RAM that the tree has mapped, file pages included; the machine's used bytes where no process is watched."""
    anonymous: int
    """Bytes of the tree that are not file pages: what a limit counts and the kernel cannot take back."""
    shared: int
    """Bytes of shared memory of the tree, counted once."""
    uss: int | None = None
    """Bytes that would be free if the tree ended; None where it was not read this time."""
    swap: int = 0
    """Bytes of the tree in swap; of the machine where no process is watched."""
    page_cache: int | None = None
    """File pages that the kernel keeps for the container (or the machine) and frees before it kills."""
    used: int | None = None
    """Bytes that count against `limit`, page cache that can be freed left out."""
    limit: int | None = None
    """The limit that is reached first: the container's, a `ulimit`, or RAM itself."""
    limit_name: str = "RAM"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample(Noun):
    """One GPU at one moment, as its driver says."""

    index: int
    """Number, as CUDA counts them for this process."""
    name: str
    used: int | None
    """Bytes taken, by whomever."""
    free: int | None
    total: int | None
    utilisation: float | None = None
    """Share of the last moments in which a kernel ran, 0 to 1."""
    holders: tuple[Holder, ...] = ()
    """Processes and what each holds; bytes are None where the driver hides them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSample(Noun):
    """One allocator inside a cooperating process."""

    pid: int
    framework: str
    """`malloc` (the C library and Python), `torch`, `tensorflow`, `jax`."""
    device: str
    """`host`, `cuda:0`, ..."""
    requested: int | None = None
    """Bytes the program has asked for and not given back: what grows in a leak."""
    allocated: int | None = None
    """Bytes in blocks handed out."""
    reserved: int | None = None
    """Bytes the allocator holds from the system, used or not."""
    fragments: int | None = None
    """Bytes of its free blocks that other blocks of the same segment keep from being given back."""
    tensors: tuple[str, ...] = ()
    """The largest tensors, one line each; empty where they were not looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Noun):
    """Everything that was read at one moment."""

    time: float
    """Seconds since the start of the recording."""
    host: HostSample
    gpus: tuple[GpuSample, ...] = ()
    """One per GPU; empty where none can be read."""
    allocators: tuple[AllocatorSample, ...] = ()
    """Allocators of processes that cooperate."""
    processes: tuple[ProcessSample, ...] = ()
    """The largest processes of the tree, the largest first."""
    process_count: int = 0
    step: int | None = None
    """Steps that the program had done by then; None where no steps are known."""
    phase: str = ""
    """What the program called this part: `train`, `evaluate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark(Noun):
    """A moment that has a name."""

    time: float
    """Seconds since the start of the recording."""
    kind: str
    """`phase` (a part of the program begins), `snapshot` (a key was pressed), `end` (the program has ended)."""
    name: str
    """Name of the phase, or what happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Noun):
    """Memory that grows step after step, and who keeps it."""

    kind: str
    """`graphs`, `hooks`, `cache`, `list`, `array`, `closures`, `tracebacks`, `threads`, `cycles`, `workers`, `shared memory`,
    `modules`, `tracing`, `live arrays`, `CUDA graphs`, `objects`, `unknown`, ..."""
    device: str
    """`host`, `cuda:0`, ..."""
    text: str
    """One sentence: who keeps what, with numbers."""
    advice: str
    """One sentence: what to change."""
    name: str | None = None
    """The variable, attribute or function that keeps it."""
    where: str | None = None
    """The line that keeps it, as `train.py:41`."""
    allocated_at: str | None = None
    """The line that allocates it, as `train.py:38`."""
    chain: tuple[str, ...] = ()
    """From the name down to what is kept."""
    count: int | None = None
    grown: int = 0
    """Bytes it grew while it was watched."""
    per_step: float | None = None
    """Bytes each step adds; None where no steps are known."""
    per_second: float | None = None
    """Bytes each second adds."""
    full_in: float | None = None
    """Seconds until the limit is reached at this rate; None where there is no limit."""
    time: float = 0.0
    """Seconds since the start of the recording when this was found."""
    ended: bool = False
    """True in the last word on something that has stopped growing: it is no finding any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note(Noun):
    """What else a user should know: growth that is no leak, what could not be read and why."""

    time: float
    """Seconds since the start of the recording."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Head(Noun):
    """What was watched, where and since when."""

    command: tuple[str, ...]
    """The program's words; empty where the whole machine is watched."""
    pid: int | None
    """The root process, None where the whole machine is watched."""
    started: float
    """Seconds since the epoch."""
    interval: float
    """Seconds between samples that were asked for."""
    machine: Reading | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Recording(Noun):
    """A watched run."""

    head: Head
    samples: tuple[Sample, ...] = ()
    marks: tuple[Mark, ...] = ()
    findings: tuple[Finding, ...] = ()
    """What grows and who keeps it; the newest finding of each culprit."""
    notes: tuple[Note, ...] = ()
    complete: bool = True
    """False where the end was cut off: a full disk, a kill."""

    @property
    def peak(self) -> Sample | None:
        """The sample at which the processes held the most RAM."""
        return max(self.samples, key=lambda sample: sample.host.anonymous + sample.host.shared, default=None)

    @property
    def seconds(self) -> float:
        return self.samples[-1].time if self.samples else 0.0
