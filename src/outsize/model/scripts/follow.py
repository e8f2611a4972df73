"""The process in which a script is followed: `python -m outsize.model.scripts.follow REQUEST`.

In: a request as JSON (script, its arguments, device, card, budget, steps). Out: a file with the pickled footprint, or an
error in one sentence. The script runs as `__main__` on tensors without contents. When it has been followed far enough, the
footprint is computed where the script stands and the process ends: no exception that a script might catch is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import runpy
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from outsize.core.cards import find_card
from outsize.core.errors import InputError, OutsizeError
from outsize.core.footprint import Footprint
from outsize.model.estimation import loaders, replayed_steps
from outsize.model.estimation.estimate import DEFAULT_CARD, capacity_of, label_of
from outsize.model.estimation.job import UNEVEN, Job, note_growth
from outsize.model.scripts import stand_ins
from outsize.model.scripts.follower import PHASES, Follower
from outsize.model.scripts.outside import Outside
from outsize.model.scripts.overlay import Overlay
from outsize.model.scripts.start import ANSWER
from outsize.model.torch_port.compiler import CompilerFailed
from outsize.model.torch_port.dispatch import torch_off
from outsize.model.torch_port.patches import replaced
from outsize.model.tracing.tracer import Tracer

KEEP = 2**18
"""Elements of host tensors whose contents are kept: tokens and images of a batch."""

EVENING = 60.0
"""Seconds that a script gets for its evaluation after the last step."""


class Script:
    """One script that is being followed."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.path = request["script"]
        self.name = os.path.basename(self.path)
        label = label_of(request["device"])
        self.card = None if request["card"] is None else find_card(request["card"])
        self.job = Job(self.run, (), None, label, self.card or find_card(DEFAULT_CARD), request["steps"])
        self.tracer = Tracer(label, self.job.card.capability or (9, 0), self.job.card.usable)
        self.tracer.alone = self.tracer.strict = True
        self.tracer.keep = KEEP
        self.tracer.uncompiled = request["uncompiled"]
        self.follower = Follower(self.tracer, request["steps"], self.end)
        self.overlay = Overlay(request["folder"])
        self.outside = Outside(self.overlay)
        self.main = threading.main_thread()
        self._ending = threading.Lock()

    def run(self) -> NoReturn:
        """Follow the script until it has done enough or ends."""
        threading.Thread(target=self._watch, daemon=True).start()
        sys.argv = [self.path, *self.request["words"]]
        sys.path.insert(0, os.path.dirname(os.path.abspath(self.path)))
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.overlay.installed())
            stack.enter_context(self.tracer.running())
            stack.enter_context(replaced(stand_ins.rows(self.tracer, self.follower)))
            stack.enter_context(self.follower.watching())
            self.outside.install()
            try:
                runpy.run_path(self.path, run_name="__main__")
            except BaseException as error:  # SystemExit and KeyboardInterrupt are ends of a script too
                self.end(error)
            self.end()

    def end(self, error: BaseException | None = None) -> NoReturn:
        """Send what is known and leave the process."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread is at it
        self.overlay.off = self.tracer.ledger.closed = True
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        try:
            with torch_off():
                found: Footprint | OutsizeError = self._result(error)
        except OutsizeError as problem:
            found = problem
        except Exception as problem:
            found = OutsizeError(f"following {self.name} failed: {type(problem).__name__}: {problem}")
            traceback.print_exc()
        _send(self.request, found)
        os._exit(0)

    def _watch(self) -> None:
        """End a script that does not come to its end in time."""
        waited, pause, after = 0.0, 0.25, 0.0
        while waited < self.request["seconds"] and after < EVENING:
            threading.Event().wait(pause)
            waited += pause
            after += pause if self.follower.finished else 0
        if self.follower.finished:
            self.tracer.note(f"the script was stopped after {EVENING:.0f} seconds of evaluation")
            self.end()
        self.end(TimeoutError(f"it took longer than {waited:.0f} seconds"))

    def _result(self, error: BaseException | None) -> Footprint:
        self.follower.close()
        steps = self.follower.steps
        if isinstance(error, CompilerFailed):
            raise error  # it is followed again, uncompiled
        uses = self.follower.only_uses
        stopped = isinstance(error, TimeoutError) and not error.__traceback__
        ended = isinstance(error, SystemExit) and (steps or (uses and not error.code))
        if error is not None and not self.follower.finished and not ended and not (uses and stopped):
            raise self._explained(error)
        if uses:
            steps = 1
            self._note_use(stopped)
        if not steps:
            last = next((held.line for held in reversed(self.tracer.ledger.all) if held.line), "")
            raise InputError(
                f"{self.name} ended without a call of optimizer.step(): the last line that used a tensor is {last or 'not there'}"
            )
        if self.follower.finished and error is not None and not isinstance(error, SystemExit):
            self.tracer.guess(f"{self._explained(error)}, after {steps} steps: what comes later is not counted")
        self.job.steps = steps
        self._settle_device()
        for sentence in self.outside.refused:
            self.tracer.note(sentence)
        if self._is_uneven(steps):
            self.tracer.guess("the steps differ in size: a later one may take more")
        for sentence in self.follower.histories():
            self.tracer.guess(sentence)
        if steps > 2:
            note_growth(self.tracer, self.job.label, steps, self.follower.ends[-1])
        if all(name != PHASES[3] for _, name in self.follower.marks) and self._has_evaluation():
            self.tracer.guess(
                f"its evaluation (.eval() in the code) was not reached in {steps} steps and is not counted"
            )
        loaded = None
        if self.follower.loader is not None and self.job.label != "cpu":
            with contextlib.suppress(InputError):
                loaded = loaders.of(self.follower.loader)
        replayed = self.job.replay(self.tracer)
        capacity = capacity_of(self.card, self.request["budget"])
        found = self.job.footprint(self.tracer, replayed, self.card, capacity, loaded)
        phases = replayed_steps.phases(replayed, self.tracer.ledger, self.job.label, self.follower.marks, PHASES)
        return dataclasses.replace(found, name=self.name, phases=phases)

    def _note_use(self, stopped: bool) -> None:
        """A script that trains nothing was followed to its end, if it has one."""
        self.follower.marks = [(event, name if name == PHASES[0] else PHASES[3]) for event, name in self.follower.marks]
        self.tracer.note("the script trains nothing: all of its forward passes are counted as evaluation")
        if stopped:
            self.tracer.guess(
                f"the script was stopped after {self.request['seconds']:.0f} seconds: what comes later is not counted"
            )

    def _settle_device(self) -> None:
        """A script that decides for the host is estimated there; one that wants a card that it was not given is refused."""
        labels = {held.label for held in self.tracer.ledger.all if held.bytes and held.kind != "workspace"}
        cards = sorted(label for label in labels if label.startswith("cuda"))
        if self.job.label == "cpu" and cards:
            raise InputError(
                f"{self.name} puts tensors on {cards[0]} without asking whether it is there: leave out --device cpu"
            )
        if self.job.label == "cpu" or self.job.label in labels:
            return
        if cards:
            raise InputError(
                f"{self.name} puts nothing on {self.job.label}, but on {', '.join(cards)}: give --device {cards[0]}"
            )
        if self.card is not None:
            raise InputError(
                f"{self.name} puts nothing on a card, so it is not known what it would take on the {self.card.name}: give it the "
                "argument that makes it use CUDA"
            )
        self.job.label = "cpu"
        self.tracer.note("the script puts nothing on a card, so this is what it takes on the host")

    def _has_evaluation(self) -> bool:
        """True where the script, or a file beside it, puts a model into evaluation mode."""
        files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
        beside = {file for file in files if file.endswith(".py") and self._is_beside(file) and os.path.isfile(file)}
        return any(".eval()" in Path(file).read_text(errors="replace") for file in beside | {self.path})

    def _is_beside(self, file: str) -> bool:
        """True for a file of the script's own folder."""
        here = os.path.dirname(os.path.abspath(self.path)) + os.sep
        return not file.startswith("<") and os.path.abspath(file).startswith(here) and "site-packages" not in file

    def _asked(self, step: int) -> list[int]:
        """Sizes that a step requested, its evaluation left out."""
        return [
            held.bytes
            for alloc, held in self.tracer.ledger.events
            if alloc and held.step == step and held.label == self.job.label and held.phase != "evaluation"
        ]

    def _is_uneven(self, steps: int) -> bool:
        """True where the last two steps, which both have state and gradients, requested different amounts."""
        if steps < 3:
            return False
        before, last = sum(self._asked(steps - 2)), sum(self._asked(steps - 1))
        return abs(last - before) > UNEVEN * max(last, before)

    def _explained(self, error: BaseException) -> InputError:
        """One sentence: the script's line, what it wanted, and what to give."""
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, TimeoutError) and not frames:
            frames = traceback.extract_stack(sys._current_frames()[self.main.ident or 0])
        own = [f for f in frames if self._is_beside(f.filename)]
        place = own[-1] if own else frames[-1] if frames else None
        where = f"{os.path.basename(place.filename)}:{place.lineno}" if place is not None else self.name
        text = str(error).splitlines()[0] if str(error) else ""
        if isinstance(error, OutsizeError):
            return InputError(f"{where}: {error}")
        if isinstance(error, SystemExit):
            return InputError(
                f"{self.name} ended at {where} with status {error.code or 0}, before a call of optimizer.step()"
            )
        if isinstance(error, TimeoutError) and not error.__traceback__:
            return InputError(
                f"{self.name} is at {where} after {self.follower.steps} steps: {text}; give it more with --seconds"
            )
        if isinstance(error, ModuleNotFoundError):
            return InputError(f"{where} needs the module {error.name!r}, which is not installed")
        if self.outside.network and _is_about_network(error):
            return InputError(
                f"{where} wants the network ({self.outside.network}), and nothing is downloaded while a script is followed: "
                "run its download once on its own, or give it a local path"
            )
        if isinstance(error, FileNotFoundError) and error.filename:
            return InputError(
                f"{where} reads {os.fsdecode(error.filename)}, which is not there: make it first, or give the script a small "
                "file of the same form"
            )
        if isinstance(error, KeyError) and error.args and error.args[0] in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            return InputError(
                f"{where} wants {error.args[0]}, which torchrun sets: say RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 "
                f"outsize estimate {self.name}"
            )
        line = f" ({place.line})" if place is not None and place.line else ""
        return InputError(f"{where}{line} raised {type(error).__name__}: {text}")


def _is_about_network(error: BaseException | None) -> bool:
    """True for an error that comes from a refused connection, also where a library has wrapped it."""
    seen = 0
    while error is not None and seen < 20:
        if "nothing is sent or downloaded" in str(error) or isinstance(error, ConnectionError):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def main(words: Sequence[str]) -> None:
    request = json.loads(words[0])
    try:
        script = Script(request)
    except OutsizeError as error:
        _send(request, error)
        return
    script.run()


def _send(request: dict[str, Any], found: Footprint | OutsizeError) -> None:
    with open(os.path.join(request["folder"], ANSWER), "wb") as file:
        pickle.dump(found if isinstance(found, Footprint) else (_kind(found), str(found)), file)


def _kind(error: OutsizeError) -> str:
    return "mistake" if isinstance(error, InputError) else "uncompiled" if isinstance(error, CompilerFailed) else ""


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    main(sys.argv[1:])
