"""The training step that a choice stands for, compiled.

In: the user's work and a choice. Out: a function on flat arrays, its shapes, and its compilation for the device, with exact
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outsize.model.jax.arguments import guarded, shape_of
from outsize.model.jax.compiled import Compiled, compile_for
from outsize.model.jax.fitting.batches import Axes
from outsize.model.jax.fitting.choice import Choice
from outsize.model.jax.fitting.segments import LEAST_SENT, recomputed
from outsize.model.jax.fitting.slices import Gradients, Loss, Rule, sliced
from outsize.model.jax.private_parts import bytes_of, in_memory, require_jax

KEEPS = {"xla_disable_hlo_passes": "cse_barrier_expander,optimization-barrier-expander"}
"""XLA:CPU takes away the barriers of `jax.checkpoint` and then finds that it has computed the same before."""
ORDERS = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
"""XLA:CPU orders for parallel work unless told otherwise; on a card XLA orders for memory anyway."""


@dataclass(frozen=True)
class Work:
    """What the user gave."""

    loss: Loss
    optimizer: Any
    """None where the user updates the parameters."""
    rule: Rule
    """How the loss is called, or how its slices add up."""
    device: Any


@dataclass(frozen=True)
class Shapes:
    """Arguments of a step without contents."""

    params: Any
    state: Any
    batch: Any
    axes: Axes


def shapes_of(work: Work, params: Any, batch: Any, axes: Axes) -> Shapes:
    """The shapes of what was given, and of the optimizer's state."""
    jax = require_jax()
    params, batch = (jax.tree_util.tree_map(shape_of, tree) for tree in (params, batch))
    state = (
        () if work.optimizer is None else guarded("the optimizer", lambda: jax.eval_shape(work.optimizer.init, params))
    )
    return Shapes(params, state, batch, axes)


def gradients_for(work: Work, axes: Axes, choice: Choice) -> Gradients:
    """(params, batch) -> (loss, gradients) by a choice."""
    loss = work.loss
    if choice.segments:
        loss = recomputed(loss, choice.segments, choice.kept, choice.kept_away)
    return sliced(loss, work.rule, axes, choice.slices)


def step_for(work: Work, axes: Axes, choice: Choice) -> Callable[..., Any]:
    """(params, state, batch) -> (params, state, loss); without an optimizer (params, batch) -> (loss, gradients)."""
    gradients = gradients_for(work, axes, choice)
    if work.optimizer is None:
        return gradients
    tree = require_jax().tree_util

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        loss, grads = gradients(params, batch)
        state = placed(state, work.device, "device") if choice.state_away else state
        changes, state = work.optimizer.update(grads, state, params)
        params = tree.tree_map(lambda leaf, change: (leaf + change).astype(leaf.dtype), params, changes)
        return params, placed(state, work.device, "pinned_host") if choice.state_away else state, loss

    return step


def placed(state: Any, device: Any, kind: str) -> Any:
    """Optimizer state with its large arrays in a kind of memory; small ones stay on the device."""
    jax, there = require_jax(), in_memory(device, kind)
    return jax.tree_util.tree_map(lambda leaf: jax.device_put(leaf, there) if is_sent(leaf) else leaf, state)


def is_sent(leaf: Any) -> bool:
    """True for an array that is worth its way to the host."""
    return hasattr(leaf, "dtype") and (bytes_of(leaf) or 0) >= LEAST_SENT


def arguments_of(work: Work, shapes: Shapes, choice: Choice = Choice()) -> tuple[Any, ...]:  # noqa: B008
    """In the order of the step's own arguments."""
    if work.optimizer is None:
        return shapes.params, shapes.batch
    if not choice.state_away:
        return shapes.params, shapes.state, shapes.batch
    jax, there = require_jax(), in_memory(work.device, "pinned_host")

    def away(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there) if is_sent(leaf) else leaf

    return shapes.params, jax.tree_util.tree_map(away, shapes.state), shapes.batch


def donated_of(work: Work) -> tuple[int, ...]:
    """Arguments whose memory the results take over."""
    return () if work.optimizer is None else (0, 1)


def compile_step(work: Work, shapes: Shapes, choice: Choice) -> Compiled:
    step, arguments = step_for(work, shapes.axes, choice), arguments_of(work, shapes, choice)
    for options in _options(work, choice):
        try:
            return compile_for(work.device, step, arguments, donated_of(work), options)
        except Exception as error:  # an XLA that does not know an option says so before it compiles
            if not any(word in str(error) for word in ("option", "flag", "xla_cpu", "xla_disable")):
                raise
    return guarded("the step", lambda: compile_for(work.device, step, arguments, donated_of(work)))  # type: ignore[no-any-return]


def _options(work: Work, choice: Choice) -> Sequence[dict[str, str]]:
    """Options for XLA, those that may be unknown to an older one first."""
    if work.device.platform != "cpu":
        return ()
    keeps = KEEPS if choice.segments else {}
    tried = [keeps | ORDERS] if choice.ordered else []
    return [options for options in (*tried, keeps) if options]
