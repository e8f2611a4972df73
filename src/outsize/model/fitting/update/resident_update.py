"""The update of a model that is on its device: when each parameter is updated, where its state and gradient are meanwhile.

In: the user's own optimizer, gradients at their parameters. Out: the same update by the same code, a few parameters at a
time: after the backward pass, or in it. State and gradients can be elsewhere between their visits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from outsize.core.errors import InputError
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.evicted import EvictedStorages
from outsize.model.fitting.move.out_of_memory import clear_up, is_out_of_memory
from outsize.model.fitting.move.stores import StoredTensor
from outsize.model.fitting.update.clip_and_scale import clip_factor
from outsize.model.fitting.update.gradient_sink import Sink
from outsize.model.fitting.update.optimizer_subset import (
    copy_all,
    drop_gradients,
    in_runs,
    largest_part,
    parameters_of,
    room_for,
    state_of,
    step_only,
    step_whole,
    why_not_one_by_one,
)
from outsize.model.fitting.update.undo_log import UndoRecord
from outsize.model.torch_port.objects import sizeof

CLONED = 64 * 2**20
"""Bytes that are copied on the card at once on their way to the log, so that an update need not wait for the link; a larger
tensor is not."""

ROOMY = 4
"""Bytes free in the allocator's cache for each byte of gradients, above which the whole update runs at once."""

TRIES = 3
"""How often the update of a few parameters is tried."""


class Update(Sink):
    """Runs the optimizer as a choice says."""

    def __init__(
        self, optimizer: Any, choice: Choice, evicted: EvictedStorages, model: Any, streamed: Collection[int] = (),
        clip: float | None = None, scaler: Any = None,
    ) -> None:  # fmt: skip
        """`streamed`: ids of parameters that live elsewhere; their bytes are brought for the update."""
        self.optimizer = optimizer
        self.choice = choice
        self.evicted = evicted
        self.clip = clip
        self.scaler = scaler
        self.listens = choice.in_backward or choice.gradients_away
        self._one_by_one = why_not_one_by_one(optimizer) is None
        self.safe = self._one_by_one and scaler is None
        self._streamed = streamed
        self._known = list(model.parameters())
        """The model's parameters."""
        trained = [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]
        self._visiting = {id(parameter) for parameter in largest_part(trained, choice.state_moved)}
        """Ids of parameters whose state lives elsewhere, where that is not all of it."""
        self._away: dict[Any, Any] = {}
        """Parameter -> its gradient in the store."""
        self._others: list[Any] = []
        """Parameters that are not the optimizer's in this step."""
        self._aside: list[tuple[Any, Any]] = []
        """Those with a gradient from before this step, which is no part of it."""
        self._log: list[tuple[Any, UndoRecord]] = []
        """What parameters and their state were before this step's backward pass changed them, in the store."""
        self._ahead: list[Any] = []
        """Parameters whose turn comes next, and what they need with them."""
        self._waiting: dict[Any, None] = {}
        """Parameters whose gradients are complete, until there is a group of them to be updated at once."""
        self._due: set[int] = set()
        """Ids of those that the backward pass has not updated yet."""
        self._room = 0
        """Bytes of a group."""

    def begin_step(self) -> None:
        """Nothing of a step that was given up half way is part of it; state is where it belongs."""
        self._forget()
        drop_gradients(self.optimizer)
        self.leave_home()

    def leave_home(self) -> None:
        """State that the optimizer brought along goes away before the first step, and from a checkpoint the rest comes home."""
        if self.evicted.real and self.choice.state_moved:
            own_memory(self.optimizer)
        if self.evicted.loaded:
            forget_replaced(self.evicted, self._known, self.optimizer)
            away = {id(tensor) for tensor in self.state_away()}
            self.evicted.bring([value for value in state_of(self.optimizer) if id(value) not in away], "a step")
            self.evicted.loaded = False
        if self.choice.state_moved:
            self.evicted.send(self.state_away())
            self.evicted.store.land()

    def accumulated(self, parameter: Any, holder: Any) -> None:
        if self.choice.in_backward:
            self._wait(parameter)
        elif self.choice.gradients_away:
            self._keep(parameter)

    def waits(self, parameter: Any) -> bool:
        return parameter in self._waiting

    def _wait(self, parameter: Any) -> None:
        """Autograd adds up all uses of a parameter before it says that its gradient is complete, once in a backward pass."""
        if id(parameter) not in self._due:
            if any(parameter is other for other in self._others):
                return
            raise InputError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} was complete twice in one backward pass, as "
                "where two parts under checkpoint(use_reentrant=True) share it: say use_reentrant=False, or fit with "
                "without=('in_backward',)"
            )
        size = sum(map(sizeof, self._waiting))
        if self._waiting and parameter not in self._waiting and size + sizeof(parameter) > self._room:
            self._update_waiting()
            size = 0
        self._waiting[parameter] = None
        self._begin([parameter])  # what it needs comes while the backward pass goes on
        if size + sizeof(parameter) >= self._room:
            self._update_waiting()

    def _update_waiting(self) -> None:
        """The group at once; where that fails, the log takes it back with all others."""
        group = list(self._waiting)
        self.evicted.store.land()  # what left with the last group makes room, in the first step as in others
        self._fetch(group)
        self._log += zip(group, UndoRecord.of(group, self.optimizer, self._keep_all), strict=True)
        self._run(group)
        self._send_back(group)
        for parameter in group:
            parameter.grad = None
        self._due -= {id(parameter) for parameter in group}
        self._waiting.clear()

    def finish(self, scale: Any) -> None:
        """The update of what the backward pass has not updated; the step is whole then."""
        self._update_rest(scale)
        self.done = True
        self._log.clear()
        drop_gradients(self.optimizer)
        for parameter, before in self._aside:  # gradients that nobody used add up as without us
            parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        self._aside.clear()

    def _update_rest(self, scale: Any) -> None:
        if self._waiting:
            self._update_waiting()
        parameters, others = (
            [p for p in some if p.grad is not None or p in self._away]
            for some in (parameters_of(self.optimizer), self._others)
        )
        if scale is not None:
            self._each([*parameters, *others], lambda gradient: gradient.mul_(scale))
        if self.clip is not None and parameters:
            self._clip([*parameters, *others], self.clip)
        if not self.safe or self._roomy(parameters):
            self._changed = True  # until it is done, nobody knows what it has changed
            step_whole(self.optimizer, self.scaler)
            self._changed = False
            return
        self._update_groups(parameters)

    def update_own(self) -> bool:
        parameters = [parameter for parameter in parameters_of(self.optimizer) if parameter.grad is not None]
        grouped = self._one_by_one and not self._roomy(parameters)
        if grouped:
            self._update_groups(parameters)
        return grouped

    def _update_groups(self, parameters: list[Any]) -> None:
        groups = list(in_runs(parameters, room_for(parameters)))
        for group, following in itertools.pairwise([*groups, []]):
            self._again(self._fetch, group)
            self._fetch_ahead(following)
            self._again(self._step, group)
            self._changed = True
            self._again(self._send_back, group)  # apart: what is updated is not updated twice
            for parameter in group:
                parameter.grad = None
        self.evicted.store.land()
        self._changed = False

    def _roomy(self, parameters: list[Any]) -> bool:
        """True where the allocator's cache, full of what the passes let go, holds far more than an update makes."""
        choice = self.choice
        if choice.state_moved or choice.gradients_away or choice.stream or not self.evicted.real:
            return False
        if not parameters or not parameters[0].is_cuda or len(self.optimizer.state) < len(parameters):
            return False
        free = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return bool(free >= ROOMY * sum(map(sizeof, parameters)))

    def _step(self, parameters: list[Any]) -> None:
        """Update a few parameters; where that fails they are as before."""
        before = list(zip(parameters, UndoRecord.of(parameters, self.optimizer, copy_all), strict=True))
        try:
            self._run(parameters)
        except BaseException:
            for parameter, kept in before:
                kept.restore(parameter, self.optimizer, lambda copy: copy)
            raise

    def _run(self, parameters: list[Any]) -> None:
        """The optimizer's step of these parameters alone; it may make new tensors for their state, and is done with the old."""
        before = self._state(parameters)
        self._step_only(parameters)
        self._let_go(before, parameters)

    def _step_only(self, parameters: list[Any]) -> None:
        step_only(self.optimizer, ((parameter, parameter) for parameter in parameters))

    def _let_go(self, tensors: list[Any], parameters: list[Any]) -> None:
        """Those of them that are no state of these parameters any more never go elsewhere again."""
        stay = set(map(id, self._state(parameters)))
        self.evicted.forget(tensor for tensor in tensors if id(tensor) not in stay)

    def _again(self, act: Callable[[list[Any]], None], parameters: list[Any]) -> None:
        """Do a part of the update; gradients are all there, so after a failure that part runs again, not the step."""
        for _ in range(TRIES - 1):
            try:
                return act(parameters)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            self._give_way()
            clear_up()
        act(parameters)

    def _begin(self, parameters: list[Any]) -> None:
        """Begin to bring what these parameters need."""
        for parameter in parameters:
            if parameter in self._away:
                parameter.grad = self._away[parameter].fetch()
        self.evicted.begin(self._visitors(parameters))
        if not self.evicted.real and any(parameter not in self.optimizer.state for parameter in parameters):
            self._step_only(parameters)  # a dry run's only step stands for later ones, which find state
            for tensor in self._state(parameters):
                self.evicted.of(tensor).pretend()

    def _fetch(self, parameters: list[Any]) -> None:
        self._begin(parameters)
        self.evicted.store.finish()
        for parameter in parameters:
            self._away.pop(parameter, None)  # not before it is here: what finds no room is tried again

    def _fetch_ahead(self, parameters: list[Any]) -> None:
        """Where copies run beside kernels, the next few come while these are updated and the last ones leave; without room
        for them they come when it is their turn."""
        if not self.evicted.store.beside:
            return
        self.evicted.store.land()  # what has left makes room for what comes: two groups are here, not three
        self._ahead = parameters
        try:
            self._begin(parameters)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._give_way()

    def _give_way(self) -> None:
        """Away again with what came ahead."""
        ahead, self._ahead = self._ahead, []
        for parameter in ahead:
            if parameter in self._away:
                parameter.grad = None
        self.evicted.send(self._visitors(ahead), dirty=False)

    def _send_back(self, parameters: list[Any]) -> None:
        """Away again with what was brought."""
        self.evicted.send(self._visitors(parameters))

    def _visitors(self, parameters: list[Any]) -> list[Any]:
        """What lives elsewhere of these parameters: themselves, their state."""
        streamed = [p for p in parameters if id(p) in self._streamed]
        return [*streamed, *self._state(parameters)]

    def _state(self, parameters: list[Any]) -> list[Any]:
        """Their state tensors that live elsewhere and are worth moving: the size of the parameter, not step counters."""
        whole = self.choice.state_moved >= 1  # also of parameters that the optimizer was given later
        visiting = (p for p in parameters if whole or id(p) in self._visiting)
        values = (value for p in visiting for value in self.optimizer.state.get(p, {}).values())
        return [value for value in values if isinstance(value, torch.Tensor) and value.dim() and value.numel() > 1]

    def state_away(self) -> list[Any]:
        """All state tensors that live elsewhere."""
        return self._state(parameters_of(self.optimizer))

    def _keep_all(self, tensors: list[Any]) -> list[Any]:
        """Copies in the store: what came from there has one; others are made on the card first, in few launches, so that an
        update need not wait for the link."""
        store = self.evicted.store
        slots = ((tensor, self.evicted.hand_over(tensor)) for tensor in tensors)
        kept = {
            id(tensor): StoredTensor(tensor, self.evicted.of(tensor).store, slot=slot)
            for tensor, slot in slots
            if slot is not None
        }
        for run in in_runs([tensor for tensor in tensors if id(tensor) not in kept], CLONED):
            large = store.beside and sizeof(run[0]) > CLONED
            copies = copy_all(run) if store.beside and not large else [t if t.dim() else t.clone() for t in run]
            for tensor, copy in zip(run, copies, strict=True):
                kept[id(tensor)] = StoredTensor(copy, store) if copy.dim() else copy
            if large:
                store.land()  # a copy would take its room: the update waits for the link
        return [kept[id(tensor)] for tensor in tensors]

    def _get(self, kept: Any) -> Any:
        tensor = kept if isinstance(kept, torch.Tensor) else kept.fetch()
        self.evicted.store.finish()
        return tensor

    def _forget(self) -> None:
        self._changed = False
        self._away.clear()
        self._log.clear()
        self._waiting.clear()
        self._ahead = []
        mine = parameters_of(self.optimizer)
        ids = {id(parameter) for parameter in mine}
        self._others = [parameter for parameter in self._known if id(parameter) not in ids]
        due = [parameter for parameter in mine if parameter.requires_grad and self.choice.in_backward]
        self._due, self._room = {id(parameter) for parameter in due}, room_for(due)
        self._aside = [(parameter, parameter.grad) for parameter in self._others if parameter.grad is not None]
        for parameter, _ in self._aside:
            parameter.grad = None

    def roll_back(self) -> None:
        self._give_way()
        self._away.clear()
        for parameter in self._others:
            parameter.grad = None
        for parameter, before in self._aside:
            parameter.grad = before
        self._aside.clear()
        log, self._log = self._log, []
        for parameter, before in reversed(log):
            self.evicted.fetch(self._visitors([parameter]))
            made = self._state([parameter])
            before.restore(parameter, self.optimizer, self._get)
            self._let_go(made, [parameter])
            self.evicted.send(self._visitors([parameter]))
        self.evicted.send(self._visitors(list(self._waiting)), dirty=False)
        self._waiting.clear()
        self.evicted.store.land()
        drop_gradients(self.optimizer)

    # gradients that are away

    def _keep(self, parameter: Any) -> None:
        gradient = parameter.grad
        if parameter in self._away:
            total = self._bring(parameter)
            total.add_(gradient)
            gradient = total
        parameter.grad = None
        self._send(parameter, gradient)

    def _send(self, parameter: Any, gradient: Any) -> None:
        self._away[parameter] = StoredTensor(gradient, self.evicted.store)

    def _bring(self, parameter: Any) -> Any:
        gradient = self._away[parameter].fetch()
        self.evicted.store.finish()
        del self._away[parameter]  # not before it is here: an update that found no room for it is tried again
        return gradient

    def _each(self, parameters: list[Any], change: Any) -> None:
        for parameter in parameters:
            if parameter in self._away:
                gradient = self._bring(parameter)
                change(gradient)
                self._send(parameter, gradient)
            else:
                change(parameter.grad)

    def _clip(self, parameters: list[Any], clip: float) -> None:
        """As `torch.nn.utils.clip_grad_norm_`: the norm of the norms, then one factor for all."""
        norms: list[Any] = []
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self._each(parameters, lambda gradient: norms.append(torch.linalg.vector_norm(gradient, 2.0)))
        factor = clip_factor(norms, clip)
        self._each(parameters, lambda gradient: gradient.mul_(factor))


def own_memory(optimizer: Any) -> None:
    """State that was loaded from a file lies in memory that torch cannot let go of: it gets some of its own, one by one."""
    for value in state_of(optimizer):
        if isinstance(value, torch.Tensor) and value.dim() and not value.untyped_storage().resizable():
            value.data = value.detach().clone()


def forget_replaced(evicted: EvictedStorages, parameters: Iterable[Any], optimizer: Any) -> None:
    """State that is no longer the optimizer's need not be kept, unless the user holds it."""
    evicted.prune({id(tensor) for tensor in (*parameters, *state_of(optimizer))})
