"""A model that is on its device: its weights are at home there, or wait elsewhere while other modules run.

In: a model and a `Choice`. Out: a runner whose modules are computed again, keep what they save elsewhere, and have their weights
only while they run, as the choice says.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from outsize.model.fitting import batch as batches
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.evicted import EvictedStorages, EvictedTensor
from outsize.model.fitting.move.loaded_state import load_elsewhere
from outsize.model.fitting.move.narrow_store import NarrowStore
from outsize.model.fitting.move.stores import Store
from outsize.model.fitting.recipes.forward_pass import ForwardPass
from outsize.model.fitting.recipes.nodes import Placing
from outsize.model.fitting.recipes.survey import Survey
from outsize.model.fitting.run.chunked_loss import chunked_heads
from outsize.model.fitting.run.forward_functions import find_configs, other_forwards, without_cache
from outsize.model.fitting.run.frozen_weights import FrozenWeights
from outsize.model.fitting.run.narrow_saved import NarrowSaved
from outsize.model.fitting.run.offload import Offload
from outsize.model.fitting.run.recompute import checkpointed, generators_of
from outsize.model.fitting.run.runner import Residence, Runner, Work
from outsize.model.fitting.run.sequential_runs import in_spans, is_span, owner_of
from outsize.model.fitting.run.streamed import Streamer
from outsize.model.fitting.update.gradient_sink import InPlace, Sink
from outsize.model.fitting.update.optimizer_subset import state_of
from outsize.model.fitting.update.resident_update import Update, forget_replaced
from outsize.model.torch_port.dispatch import is_functorch
from outsize.model.torch_port.objects import storage_key


class Resident(Residence):
    """Where the weights of such a model are while it runs."""

    def __init__(self, work: Work, choice: Choice, store: Store, evicted: EvictedStorages, rows: int) -> None:
        self.work = work
        self.choice = choice
        self.store = store
        self.evicted = evicted
        self.real = evicted.real
        self._rows = rows
        """Samples of the batch that was planned for; 0: unknown."""
        self._modules = dict(work.model.named_modules())
        units = {name: self._modules[name] for name in choice.stream}
        self.streamer = Streamer(units, evicted, work.device == "cuda") if units else None
        self.frozen = FrozenWeights(work.model, evicted) if choice.frozen_bits else None
        self.listens = self.streamer is not None
        self.steady = not (units or choice.frozen_bits or choice.offload or choice.tensors_away)
        self._configs = find_configs(work.model)
        self.generators = [*generators_of(next(work.model.parameters()).device), *work.sources] if self.real else []
        self._states = self.generators if work.replay is None else [*self.generators, work.replay]
        """What a second run of a module has to find as the first one did."""
        self.survey: Survey | None = None
        """Notes every call of a forward pass, to plan recipes by."""
        self.placing: Callable[[Any], Placing] | None = None
        """Where a result without contents was made; None: it says so itself."""
        self._pass: ForwardPass | None = None
        """The passes of the step that runs, where tensors are made again or moved."""

    @property
    def streamed(self) -> set[int]:
        """ids of parameters that live elsewhere."""
        return self.streamer.ids if self.streamer is not None else set()

    def cut(self, rows: int) -> list[tuple[int, int]]:
        """Slices no larger than planned; of a batch of another size than that, equal ones."""
        choice = self.choice
        if self._rows in (0, rows):
            return batches.cut(rows, choice.slices, choice.first)
        if choice.slices == 1 and (choice.in_backward or not self.work.splits):
            return [(0, rows)]
        start, stop = batches.cut(self._rows, choice.slices, choice.first)[1 if choice.first else 0]
        return batches.cut(rows, -(-rows // (stop - start)))

    def holders(self) -> Iterable[tuple[Any, Any]]:
        return [(parameter, parameter) for parameter in self.work.model.parameters() if parameter.requires_grad]

    def forward_pass(self) -> contextlib.AbstractContextManager[None]:
        """Saved tensors are kept, made again or moved, as the choice says."""
        if self.survey is not None:
            return self.survey.running()
        return contextlib.nullcontext() if self._pass is None else self._pass.running()

    def begin_backward(self) -> None:
        """What waits for the backward pass need not be here twice."""
        self.store.land()

    def accumulated(self, parameter: Any) -> None:
        if self.streamer is not None:
            self.streamer.accumulated(parameter)

    def end_slice(self) -> None:
        """What is streamed and still here leaves."""
        if self._pass is not None:
            self._pass.end()
        if self.streamer is not None:
            self.streamer.leave()

    @contextlib.contextmanager
    def applied(self, batch: Any, sink: Sink) -> Iterator[None]:
        choice, work = self.choice, self.work
        offload = Offload(self.store, ahead=work.device == "cuda", device=work.device)
        fixed = (*work.model.parameters(), *work.model.buffers()) if choice.offload else ()
        stays = {storage_key(tensor) for tensor in fixed}
        self._pass = self._open_pass(offload, batch) if choice.recipes or choice.tensors_away else None
        names = [*choice.checkpoint, *choice.offload, *(n for n in choice.stream if n not in choice.checkpoint)]
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_cache(work.model, self._configs))
            if choice.chunks:
                pieces = -(-choice.chunks // choice.slices)
                stack.enter_context(chunked_heads(work.model, work.heads, pieces, work.device))
            put = stack.enter_context(other_forwards())  # last in, first out: what it covers is put back under it
            for name in dict.fromkeys(name for name in names if not is_span(name)):
                module = self._modules[name]
                forward = module.forward
                streamed = self.streamer is not None and name in choice.stream
                if streamed:
                    assert self.streamer is not None
                    forward = self.streamer.hold(name, forward)
                if name in choice.checkpoint:
                    forward = checkpointed(module, forward, work.written, work.device, self._states)
                if name in choice.offload:  # of a module that is computed again, its input
                    forward = offload.wrap(forward, stays)
                if streamed:
                    assert self.streamer is not None
                    forward = self.streamer.wrap(name, forward)
                put(module, forward)
            for sequence, spans in itertools.groupby(
                sorted(filter(is_span, choice.checkpoint), key=owner_of), owner_of
            ):
                module = self._modules[sequence]
                put(
                    module,
                    in_spans(module, spans, lambda h, f: checkpointed(h, f, work.written, work.device, self._states)),
                )
            narrow = None
            if choice.kept_bits:
                kept = (*work.model.parameters(), *work.model.buffers(), *batches.tensors_of(batch).values())
                narrow = NarrowSaved({storage_key(tensor) for tensor in kept}, work.device)
                put(work.model, narrow.wrap(work.model.forward))
            if self.frozen is not None:
                for name in self.frozen.weights:
                    put(self._modules[name], self.frozen.wrap(name, self._modules[name].forward, narrow))
                self.frozen.pack()
            stack.enter_context(self.evicted.working())
            try:
                if self.streamer is not None:
                    self.streamer.leave()
                yield
            finally:
                self._pass = None
                self.store.finish()  # before anything that a copy still reads or fills is let go
                if self.streamer is not None:
                    self.streamer.leave()
                self.store.land()

    def _open_pass(self, offload: Offload, batch: Any) -> ForwardPass:
        model, choice = self.work.model, self.choice
        fixed = [*model.parameters(), *model.buffers(), *batches.tensors_of(batch).values()]
        stays = {storage_key(tensor) for tensor in fixed if not is_functorch(tensor)}
        return ForwardPass(model, choice.recipes, choice.tensors_away, offload, self._states, stays, self.placing)

    def settle(self, sink: Sink) -> None:
        """Take over from another choice: what this one wants at home comes home."""
        away = set(self.streamed) | {id(weight) for weight in (self.frozen.all if self.frozen is not None else ())}
        if isinstance(sink, Update):
            away |= {id(tensor) for tensor in sink.state_away()}
        self.evicted.settle(lambda tensor: id(tensor) in away, "another plan")

    def leave_home(self) -> None:
        if self.frozen is not None:
            self.frozen.pack()
        if self.streamer is not None:
            self.streamer.leave()
            self.store.land()

    def packed(self) -> list[Any]:
        return self.evicted.packed()

    def bring_weights(self) -> None:
        """Weights home; the optimizer's state stays where it is."""
        weights = {id(parameter) for parameter in self.work.model.parameters()}
        self.evicted.settle(lambda tensor: id(tensor) not in weights, "a comparison with the plain step")

    def forget_replaced(self) -> None:
        """State that is no longer the optimizer's need not be kept, unless the user holds it."""
        forget_replaced(self.evicted, self.work.model.parameters(), self.work.optimizer)

    def gather(self) -> None:
        self.evicted.gather()

    def before_saving(self, thing: Any) -> None:
        """What it saves is lent to it where it has no room at home."""
        tensors = list(thing.parameters()) if isinstance(thing, torch.nn.Module) else state_of(thing)
        self.evicted.before_saving(thing, tensors)

    def after_saving(self, thing: Any, saved: Any) -> Any:
        saving = self.evicted.saving
        if saving is not None and saving.asker is thing:
            self.evicted.saving = None
        return saving.instead(saved, EvictedTensor) if saving is not None and thing is self.work.optimizer else None

    def before_loading(self, thing: Any, saved: Any) -> Any:
        """State that lives elsewhere is loaded there."""
        self.evicted.saving = None
        if thing is not self.work.optimizer:
            return None  # into weights that are away is written where they are
        self.forget_replaced()  # by a load that failed
        if not self.choice.state_moved:
            return None
        self.end_slice()  # before the first step weights are at home, in the room that is needed
        self.store.land()
        return load_elsewhere(saved, self.evicted)

    def after_loading(self) -> None:
        self.forget_replaced()

    def close(self, home: bool = True) -> None:
        self.forget_replaced()
        self.evicted.gather("undo()")
        self.store.close()


def packed_tensors(model: Any, choice: Choice, device: str, real: bool) -> Callable[[Any], NarrowStore | None]:
    """Which tensors a choice keeps in fewer bits: optimizer state, and weights that are not trained."""
    weights = {id(parameter): parameter.requires_grad for parameter in model.parameters()}

    def narrow(tensor: Any) -> NarrowStore | None:
        trained = weights.get(id(tensor))
        bits = choice.state_bits if trained is None else 0 if trained else choice.frozen_bits
        return NarrowStore(tensor, bits, trained is not None, device, real) if bits else None

    return narrow


ResidentRunner = Runner[Resident]
"""A plan bound to a model on its device."""


def open_resident(
    work: Work, choice: Choice, store: Store, *, real: bool = True, rows: int = 0,
    evicted: EvictedStorages | None = None,
) -> ResidentRunner:  # fmt: skip
    """A runner of a model on its device; `evicted`: what is elsewhere already."""
    evicted = EvictedStorages(store, real) if evicted is None else evicted
    evicted.narrow = packed_tensors(work.model, choice, work.device, real)
    weights = Resident(work, choice, store, evicted, rows)
    own = InPlace(work.model, work.scaler)
    sink: Sink = own
    if work.optimizer is not None:
        sink = Update(work.optimizer, choice, weights.evicted, work.model, weights.streamed, work.clip, work.scaler)
    return Runner(work, choice, weights, sink, own)


def reopen_resident(work: Work, choice: Choice, old: ResidentRunner, rows: int) -> ResidentRunner:
    """The runner of another choice, in the place of the one so far: what this one wants at home comes home."""
    following = open_resident(work, choice, old.weights.store, rows=rows, evicted=old.weights.evicted)
    following.weights.settle(following.sink)
    return following
