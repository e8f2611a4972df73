"""`with outsize.watch() as w:`: samples of this process ten times a second, growth with its culprit, a recording.

A thread reads what `outsize watch` reads from outside, and the allocators inside. Steps are marked by `w.step()`, or
found from the first torch optimizer that steps. What is seen is kept in memory (thinned when it is long), sent to
listeners, written to a file where `record` names one, and published, so that `outsize watch PID` shows it too.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

from outsize.core.errors import InputError
from outsize.core.outcomes.recording import AllocatorSample, Finding, Head, Mark, Note, Recording, Sample
from outsize.core.outcomes.watch_stream import newest
from outsize.machine import memory
from outsize.monitor.allocators import largest_tensors, read_allocators
from outsize.monitor.card_growth import CardGrowth, read_pools
from outsize.monitor.growth import Growth
from outsize.monitor.history import History
from outsize.monitor.launch import FOLDER
from outsize.monitor.leaks.worker_data import WorkerData, find_worker_data, nothing_known
from outsize.monitor.main_thread import run_in_main_thread
from outsize.monitor.pace import Paced, Pause
from outsize.monitor.publication import Publication, make_folder, publish, user_folder, withdraw
from outsize.monitor.recorder import Item, Recorder
from outsize.monitor.sampler import Sampler
from outsize.monitor.tree_growth import TreeGrowth

F = TypeVar("F", bound=Callable[..., Any])

_ANY, _GONE = -1, 32
"""The optimizer whose steps are marked: any, where others have stepped so often since the first one did (it was made anew)."""


def watch(
    interval: float = 0.1,
    *,
    record: str | os.PathLike[str] | None = None,
    listeners: Sequence[Callable[[Item], None]] = (),
    leaks: bool = True,
) -> Watch:
    """Watch this process: `with outsize.watch() as w:` or `@outsize.watch()`.

    `interval` is in seconds. `record` names a file that `outsize watch` can replay. Each listener gets every sample,
    mark, finding and note as it comes. With `leaks=False` nothing is looked for; memory is only read."""
    if not 0.01 <= interval <= 3600:
        raise InputError(f"interval is the number of seconds between samples, 0.01 to 3600, not {interval}")
    return Watch(interval, record=record, listeners=listeners, leaks=leaks)


class Watch:
    """This process, watched. Made by `outsize.watch()`."""

    def __init__(
        self,
        interval: float,
        *,
        record: str | os.PathLike[str] | None,
        listeners: Sequence[Callable[[Item], None]],
        leaks: bool,
    ) -> None:
        self._interval, self._record, self._look = interval, record, leaks
        self._listeners = list(listeners)
        self._history = History()
        self._recorder: Recorder | None = None
        self._head: Head | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._pid = os.getpid()
        self._steps, self._phase, self._explicit = 0, "", False
        self._optimizer: int | None = None
        self._others = 0
        self._hook: Any = None

    def __enter__(self) -> Watch:
        if self._thread is not None:
            raise InputError("this watch is already running: make another with outsize.watch()")
        started = time.time()
        self._pid = os.getpid()
        self._head = Head(
            command=tuple(sys.argv), pid=self._pid, started=started, interval=self._interval, machine=memory()
        )
        self._recorder = None if self._record is None else Recorder(self._record, self._head)
        self._folder = os.environ.get(FOLDER) or user_folder()
        self._publishes = make_folder(self._folder)
        self._sampler = Sampler(self._pid, started, self._read_allocators)
        self._inside = Paced(read_allocators, every=max(0.2, self._interval), share=0.001)
        self._allocators: tuple[AllocatorSample, ...] = ()
        self._growth = Growth(self._found, self._note, self._look, self._history.count_objects)
        self._growth.ours |= self._history.ids()
        self._tree_growth, self._card_growth = TreeGrowth(_find_data), CardGrowth(read_pools)
        self._publish = Paced(self._publish_now, every=1.0, share=0.0005)
        self._stop.clear()
        self._sample()
        self._find_steps()  # where optimizers are there already, none of their steps is missed
        self._thread = threading.Thread(target=self._run, name="outsize watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._thread is None or os.getpid() != self._pid:
            return
        self._stop.set()
        self._thread.join(timeout=5)
        self._thread = None
        self._growth.close()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._sample()
        self._say_what_is_no_leak()
        if self._recorder is not None:
            self._recorder.close(self._now(), "ended" if kind is None else f"ended by {kind.__name__}")
        if self._publishes:
            withdraw(self._folder, self._pid)

    def __call__(self, function: F) -> F:
        """Decorate a function: each call is watched anew; the last watch is at `function.watch`."""

        @functools.wraps(function)
        def watched(*words: Any, **names: Any) -> Any:
            options: dict[str, Any] = {"record": self._record, "listeners": tuple(self._listeners), "leaks": self._look}
            with Watch(self._interval, **options) as inner:
                watched.watch = inner  # type: ignore[attr-defined]
                return function(*words, **names)

        return cast(F, watched)

    def step(self) -> None:
        """Mark the end of a step. Not needed where a torch optimizer steps."""
        if not self._explicit:
            self._explicit = True
            self._growth.forget()
            self._steps = 0
        self._mark_step()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the program with a name: memory is compared with that of the same part."""
        before = self._phase
        self._set_phase(name)
        try:
            yield
        finally:
            self._set_phase(before)

    @property
    def readings(self) -> tuple[Sample, ...]:
        """The samples so far, in order of time."""
        return tuple(self._history.samples)

    @property
    def peak(self) -> Sample | None:
        """The sample at which this process and its children held the most RAM."""
        return self.recording().peak

    @property
    def notes(self) -> tuple[str, ...]:
        """What else there is to say: growth that is no leak, what could not be read."""
        return tuple(note.text for note in self._history.notes)

    def leaks(self) -> tuple[Finding, ...]:
        """What grows for good and who keeps it, so far; empty where nothing does."""
        return newest(self._history.findings)

    def recording(self) -> Recording:
        """Everything so far as one value."""
        if self._head is None:
            raise InputError("nothing was watched yet: write  with outsize.watch() as w:")
        return self._history.recording(self._head, complete=self._thread is None)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write everything so far as one HTML page."""
        self.recording().save_html(path)

    def snapshot(self) -> Sample:
        """Read now, the largest tensors too."""
        tensors = largest_tensors()
        found = tuple(
            AllocatorSample(pid=self._pid, framework="torch", device="all", tensors=tensors) for _ in tensors[:1]
        )
        self._take(Mark(time=self._now(), kind="snapshot", name="asked for"))
        sample = self._sampler.read(step=self._steps or None, phase=self._phase)
        assert sample is not None
        sample = replace(sample, allocators=(*read_allocators(), *found))
        self._take(sample)
        return sample

    def _repr_html_(self) -> str | None:
        return self.recording()._repr_html_() if self._head is not None else None

    def show(self) -> None:
        """In a notebook: show the watch in this cell and renew it each second while it runs."""
        from IPython.display import display

        handle = display(self, display_id=True)

        def renew() -> None:
            while handle is not None and not self._stop.wait(1.0):
                handle.update(self)
            if handle is not None:
                handle.update(self)

        threading.Thread(target=renew, name="outsize watch view", daemon=True).start()

    def _run(self) -> None:
        pause = Pause(self._interval)
        while not self._stop.wait(pause.seconds):
            began = time.thread_time()
            try:
                self._find_steps()
                sample = self._sample()
                if not self._steps:
                    self._growth.tick(self._phase)
                if sample is not None and not self._growth.inspecting:
                    for finding in self._tree_growth.add(sample):
                        self._found(finding)
                    for item in self._card_growth.add(sample):
                        self._found(item) if isinstance(item, Finding) else self._note(item.text)
                self._publish(time.monotonic())
            except Exception as error:  # a watch never ends its program
                warnings.warn(f"outsize.watch has stopped: {error!r}", RuntimeWarning, stacklevel=1)
                return
            pause.note(time.thread_time() - began)

    def _sample(self) -> Sample | None:
        sample = self._sampler.read(step=self._steps or None, phase=self._phase)
        for text in self._sampler.news():
            self._note(text)
        if sample is not None:
            self._take(sample)
        return sample

    def _read_allocators(self) -> tuple[AllocatorSample, ...]:
        self._allocators = self._inside(time.monotonic()) or self._allocators
        return self._allocators

    def _mark_step(self) -> None:
        if os.getpid() == self._pid and self._thread is not None:  # a forked worker has a copy of us, and no thread
            self._steps += 1
            self._growth.mark(self._steps, self._phase)

    def _set_phase(self, name: str) -> None:
        self._phase = name
        self._take(Mark(time=self._now(), kind="phase", name=name))

    def _find_steps(self) -> None:
        """Hear of optimizer steps as soon as the program has loaded torch's optimizers."""
        module = sys.modules.get("torch.optim.optimizer")
        register = getattr(module, "register_optimizer_step_post_hook", None)
        if self._hook is None and register is not None and "torch" in sys.modules:
            self._hook = register(self._optimizer_stepped)

    def _optimizer_stepped(self, optimizer: Any, *_: Any) -> None:
        if self._explicit or os.getpid() != self._pid:
            return
        if self._optimizer is None:
            self._optimizer = id(optimizer)
            self._growth.forget()
        if self._optimizer not in (id(optimizer), _ANY):
            self._others += 1
            if self._others < _GONE:
                return
            self._optimizer = _ANY
            self._growth.forget()
        self._others = 0
        self._mark_step()

    def _found(self, finding: Finding) -> None:
        self._take(replace(finding, time=self._now(), full_in=self._history.full_in(finding.device)))
        if self._publishes:
            self._publish_now()

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self._take(Note(time=self._now(), text=text))

    def _say_what_is_no_leak(self) -> None:
        for text in self._tree_growth.explain(self._growth.trends()):
            self._note(text)

    def _take(self, item: Item) -> None:
        self._history.add(item)
        if self._recorder is not None:
            self._recorder(item)
        for listener in list(self._listeners):
            try:
                listener(item)
            except Exception as error:
                self._listeners.remove(listener)
                warnings.warn(
                    f"a listener of outsize.watch failed and is dropped: {error!r}", RuntimeWarning, stacklevel=1
                )

    def _publish_now(self) -> None:
        if self._publishes:
            publication = Publication(
                pid=self._pid, time=time.time(), allocators=self._allocators, findings=self.leaks(),
                notes=tuple(self._history.notes), step=self._steps or None, phase=self._phase,
            )  # fmt: skip
            publish(self._folder, publication)

    def _now(self) -> float:
        return time.time() - (self._head.started if self._head is not None else time.time())


def _find_data() -> WorkerData:
    """What workers read, looked for in the program's thread."""
    found = [nothing_known()]
    run_in_main_thread(lambda: found.append(find_worker_data()))
    return found[-1]
