"""A model that stays on the host and visits a device, unit by unit.

In: a model in host memory (or weights in a file) and a `Choice`. Out: a runner in which every unit's weights come before it
runs, and what it saves is computed again from inputs that may wait on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from outsize.core.errors import InputError, StoreError
from outsize.model.fitting import batch as batches
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.mover import Mover
from outsize.model.fitting.move.pinned_blocks import State, Weights
from outsize.model.fitting.move.scratch_file import ScratchFile
from outsize.model.fitting.move.stores import KeptInputs
from outsize.model.fitting.move.units import Cut
from outsize.model.fitting.move.visits import Source, Visits
from outsize.model.fitting.run.chunked_loss import chunked_heads
from outsize.model.fitting.run.forward_functions import children_called, other_forwards, without_cache
from outsize.model.fitting.run.random_sources import GLOBAL
from outsize.model.fitting.run.recompute import generators_of, keep_inputs, recomputed
from outsize.model.fitting.run.row_pieces import MixesRows, in_pieces, mixes_rows
from outsize.model.fitting.run.runner import Residence, Runner, Work
from outsize.model.fitting.update.clip_and_scale import GradientCheck
from outsize.model.fitting.update.gradient_sink import Dropped, Sink
from outsize.model.fitting.update.update_on_card import UpdateOnCard
from outsize.model.fitting.update.update_on_host import HandedOver, KeptGradients, UpdateOnHost

ONCE = (
    "the loss goes back through the model more than once (gradients of gradients, retain_graph): a unit on a visit can do it "
    "once, so fit a model that the device holds, without device="
)
"""What is said where saved tensors are asked for a second time."""


class Hosted(Residence):
    """Where the weights of such a model are while it runs."""

    def __init__(
        self, work: Work, choice: Choice, cut: Cut, mover: Mover, source: Source, order: list[str], *,
        weights: Weights | None = None, state: State | None = None, rows: int = 0, scratch: ScratchFile | None = None,
    ) -> None:  # fmt: skip
        self.work = work
        self.choice = choice
        self.mover = mover
        self.real = mover.real
        self.weights = weights
        """On the host; None: they are in a file of the user's, or have no contents."""
        self.state = state
        self.scratch = scratch
        """Where that lies which the host has no room for, None where there is nothing."""
        self.visits = Visits(work.model, cut, source, mover, choice.ring, order)
        self.kept_inputs = KeptInputs(mover) if choice.inputs_away else None
        self._rows = rows
        self._generators = [*generators_of(mover.device), *work.sources] if self.real else [*GLOBAL]
        """What a unit draws again in its second run; a trace, of which others are learned, draws from no other."""
        self._source = source
        self._heads: Any = None
        self.checked: dict[str, bool] = {}
        """Units that a rehearsal has looked at: do they mix rows?"""

    @property
    def heads_taken(self) -> bool:
        """True where head and loss ran in pieces and nobody looked at the logits."""
        return self._heads is not None and bool(self._heads.taken) and not self._heads.made

    def place(self, batch: Any) -> Any:
        if not self.real:
            return batch
        return batches.transform(batch, lambda _, tensor: tensor.to(self.mover.device, non_blocking=True))

    def holders(self) -> Iterable[tuple[Any, Any]]:
        trained = (place.parameter for place in self.visits.cut.places() if place.parameter.requires_grad)
        return [(parameter, self.visits.proxies[id(parameter)]) for parameter in trained]

    @contextlib.contextmanager
    def applied(self, batch: Any, sink: Sink) -> Iterator[None]:
        visits, choice = self.visits, self.choice
        if self.scratch is not None:
            self.scratch.settle()
        pieces = choice.pieces
        if self._rows and (pieces > 1 or choice.more_pieces):  # a larger batch runs in more pieces
            pieces = -(-pieces * self.work.axes.count(batch) // self._rows)
        keep = keep_inputs(self.kept_inputs.keep if self.kept_inputs is not None else None)
        with contextlib.ExitStack() as stack:
            stack.enter_context(visits.standing_in())
            stack.enter_context(children_called())
            if choice.update != "none":
                stack.enter_context(without_cache(self.work.model))
            if choice.chunks:
                work, kind = self.work, self.mover.device.type
                self._heads = stack.enter_context(chunked_heads(work.model, work.heads, choice.chunks, kind))
            put = stack.enter_context(other_forwards())  # last in, first out: what it covers is put back under it
            for unit in visits.cut.units.values():
                module = unit.module
                forward = module.forward
                second = visits.hold(unit, forward, sink.flush)
                args = (keep, self.work.written, self.mover.device.type, self._generators, ONCE)
                twice = recomputed(module, forward, second, *args)
                if pieces > 1:
                    twice = self._checking(unit.name, forward, in_pieces(twice, pieces))
                put(module, visits.wrap(unit, twice))
            yield
            visits.end_pass(sink.flush)
            if self.kept_inputs is not None:
                self.kept_inputs.end_pass()

    def _checking(self, name: str, forward: Callable[..., Any], twice: Callable[..., Any]) -> Callable[..., Any]:
        """The first time: does the unit treat its rows one by one?"""
        if self.checked.get(name) is False or (not self.real and self.choice.update != "none"):
            return twice

        def run(*args: Any, **kwargs: Any) -> Any:
            if name not in self.checked:
                self.checked[name] = mixes_rows(forward, args, kwargs, self.real)
            if self.checked[name] and (self.rehearsing or not self.real):  # a plan without pieces is made
                raise MixesRows(name)
            if self.checked[name]:
                raise InputError(
                    f"the batch is larger than the one that was planned with, and {name} cannot run on a few rows at a time: fit "
                    "with the larger batch"
                )
            return twice(*args, **kwargs)

        return run

    def roll_back(self) -> None:
        with contextlib.suppress(StoreError):  # of what nobody wants any more
            self.mover.drain()
        self.visits.reset()
        if self.kept_inputs is not None:
            self.kept_inputs.end_pass()
        for proxy in self.visits.proxies.values():
            proxy.grad = None

    def drain(self) -> None:
        self.mover.drain()

    def gather(self) -> None:
        """The user's own parameters never left the host, or have windows to where they are."""
        self.mover.drain()
        if self.scratch is not None:
            self.scratch.looked = True

    @property
    def stays(self) -> str:
        """There where the host has no room for what is in the scratch file."""
        return self.scratch.stays if self.scratch is not None else ""

    def check_model(self) -> None:
        """Every parameter has its proxy, and is trained or frozen as it was."""
        for name, parameter in self.work.model.named_parameters():
            if id(parameter) not in self.visits.proxies:
                raise InputError(
                    f"{name} is a parameter that the model did not have when it was fitted: undo() and fit it again"
                )
            if parameter.requires_grad and id(parameter) in self.visits.frozen and self.work.loss is not None:
                raise InputError(
                    f"{name} was frozen when the model was fitted and is to be trained now: undo() and fit it again"
                )

    def leave_device(self) -> None:
        self.visits.leave_device()
        if self.kept_inputs is not None:
            self.kept_inputs.store.close()

    def close(self, home: bool = True) -> None:
        """Everything is the user's own again, in ordinary memory; without `home` the scratch file keeps what it has."""
        if self.weights is not None:
            self.weights.close(home)
        if self.state is not None:
            self.state.close(self.work.optimizer, home)
        self._source.close()
        if self.kept_inputs is not None:
            self.kept_inputs.store.close()
        if self.scratch is not None:
            self.scratch.close()


HostedRunner = Runner[Hosted]
"""A plan bound to a model that visits a device."""


def open_hosted(
    work: Work, choice: Choice, cut: Cut, mover: Mover, source: Source, order: list[str], *,
    weights: Weights | None = None, state: State | None = None, rows: int = 0, scratch: ScratchFile | None = None,
) -> HostedRunner:  # fmt: skip
    """A runner of a model that visits a device."""
    hosted = Hosted(work, choice, cut, mover, source, order, weights=weights, state=state, rows=rows, scratch=scratch)
    sink, own = _open_sink(hosted)
    return HostedRunner(work, choice, hosted, sink, own)


def _open_sink(hosted: Hosted) -> tuple[Sink, Sink | None]:
    """Where gradients go in a step, and where for a user who steps the optimizer."""
    work, choice, mover, cut = hosted.work, hosted.choice, hosted.mover, hosted.visits.cut
    if choice.update == "host" and hosted.real:
        return UpdateOnHost(work.optimizer, mover, choice.state_ring), None
    if choice.update not in ("card", "kept"):
        return Dropped(mover), None
    on_card = None
    if choice.state_ring and hosted.state is not None:
        on_card = UpdateOnCard(
            work.optimizer, hosted.visits, hosted.weights, hosted.state, mover, choice.state_ring, choice.small_bytes
        )
    if choice.update == "card":
        assert on_card is not None
        return on_card, None
    check = GradientCheck(work.model, work.optimizer, work.clip, work.scaler) if hosted.real else None
    filed = {id(place.parameter) for place in cut.places() if place.name in choice.disk.get("gradients", ())}
    kept = KeptGradients(work.optimizer, cut, mover, check, on_card, filed, hosted.scratch)
    return kept, HandedOver(kept, work.scaler)
