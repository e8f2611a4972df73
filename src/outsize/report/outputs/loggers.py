"""A listener that hands every sample to the logger a program already has.

It needs only the logger's public method: `log(dict, step=)` (Weights & Biases, Lightning), `log_metrics(dict, step=)` or
`log_metric(name, value, step=)` (MLflow), or `add_scalar(name, value, step)` (TensorBoard's writers). A sample at a step mark is
logged under the number of its step. Other samples are logged only while the program has marked no step, under their own
running number: two counts in one log would mix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outsize.core.errors import InputError
from outsize.core.noun import Noun
from outsize.core.outcomes.recording import Sample
from outsize.report.outputs.numbers import numbers

Listener = Callable[[Noun], None]


def log_to(logger: Any, every: float = 1.0) -> Listener:
    """A listener for `outsize.watch(listeners=[...])` that logs memory to `logger`; without steps, once in `every` seconds."""
    send = _sender(logger)
    last, count, steps = float("-inf"), 0, False

    def listen(item: Noun) -> None:
        nonlocal last, count, steps
        if not isinstance(item, Sample):
            return
        if item.step is not None:
            steps = True
        elif steps or item.time - last < every:
            return
        send({number.path: number.value for number in numbers(item)}, count if item.step is None else item.step)
        last, count = item.time, count + 1

    return listen


def _sender(logger: Any) -> Callable[[dict[str, float], int], None]:
    """How this logger takes numbers."""
    for name in ("log_metrics", "log"):
        if callable(getattr(logger, name, None)):
            return lambda values, step: getattr(logger, name)(values, step=step)
    if callable(getattr(logger, "log_metric", None)):
        return lambda values, step: _each(lambda name, value: logger.log_metric(name, value, step=step), values)
    if callable(getattr(logger, "add_scalar", None)):
        return lambda values, step: _each(lambda name, value: logger.add_scalar(name, value, step), values)
    raise InputError(
        f"{type(logger).__name__} is no logger: it has none of log(dict, step=), log_metrics, log_metric and add_scalar"
    )


def _each(send: Callable[[str, float], Any], values: dict[str, float]) -> None:
    for name, value in values.items():
        send(name, value)
