"""`outsize.fit` of a compiled Keras model: its `fit` then stays inside a budget, with the same results.

In: the model, one batch and a budget. Out: `FittedModel`, after `model.train_step` was replaced. The plain step is followed
first. Where it does not fit, the batch is cut into slices as large as fit, after their gradient was compared with the plain one.
"""

from __future__ import annotations

from typing import Any

from outsize.core.errors import BudgetError, InputError
from outsize.core.failure import Exactness, Remedy
from outsize.core.fitting import FitPlan
from outsize.core.memory import HOST, Allowance, Pool
from outsize.core.noun import Known
from outsize.core.plan import Peak, Step
from outsize.core.units import format_bytes
from outsize.machine import allowance_of
from outsize.model.keras import contentless, port
from outsize.model.keras.equality import Learned, learn, state_kept
from outsize.model.keras.estimate import Played, largest_batch, play
from outsize.model.keras.sliced_step import Rules, SlicedStep
from outsize.model.keras.trace import trace_model

REMEDIES = ("slices",)
MEANINGLESS = ("device", "host", "weights", "own_step", "clip", "scaler", "batch_axis")
"""Options of other frameworks."""
FEW = 3
"""Slices that are followed, and one more."""
LOOP_COST = 0.03
"""Part of a step's time that a further slice adds: 8 slices took 1.20 times the processor time of the plain step of a
transformer and of dense layers."""


class FittedModel:
    """What `outsize.fit` returns for a Keras model: a plan that its `fit` obeys, until `undo`."""

    def __init__(self, model: Any, plan: FitPlan, rows: int | None) -> None:
        self.model = model
        self.plan = plan
        """How a step runs."""
        self.rows = rows
        """Samples of a slice; None where the plain step fits."""

    def undo(self) -> Any:
        """Gives the model its own step back."""
        _give_back(self.model)
        return self.model

    def __repr__(self) -> str:
        return str(self.plan)


def _give_back(model: Any) -> None:
    if isinstance(model.__dict__.get("train_step"), SlicedStep):
        object.__delattr__(model, "train_step")
        model.train_function = None


def fit(
    model: Any, loss: Any = None, optimizer: Any = None, batch: Any = None, *, budget: int | str | None = None,
    allow: str = "exact", without: tuple[str, ...] = (), dry_run: bool = False, **others: Any,
) -> FittedModel:  # fmt: skip
    """Make `model.fit` stay inside a budget; see `outsize.fit`."""
    _check(model, loss, optimizer, batch, allow, without, others)
    data = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    rows = int(port.flatten(data)[0].shape[0])
    allowance = _allowance(budget)
    on_host = allowance.pool == HOST
    _give_back(model)
    with state_kept(model):
        plain = play(trace_model(model, data), on_host)
        if plain.bound <= allowance.bytes:
            return FittedModel(model, _plan(rows, allowance, plain, plain.bound, None, Learned(Rules(), "")), None)
        forbidden = "slices" in without
        learned = Learned(Rules(), "without= says so") if forbidden else learn(model, data, allow)
        if learned.why_not:
            raise _refused(rows, allowance, plain, learned.why_not)
        seen: dict[int, int] = {}

        def sliced(size: int) -> int:
            """Bytes of a step in slices of this many samples. Of many slices four are followed: each further one adds its part of
            the batch, and of the rows of an embedding's gradient."""
            if size not in seen:
                few, more = (_bytes_of(model, data, size, count, learned, on_host) for count in (FEW, FEW + 1))
                seen[size] = more + max(0, -(-rows // size) - FEW - 1) * max(0, more - few)
            return seen[size]

        least = sliced(1)
        if least > allowance.bytes:
            raise _refused(rows, allowance, plain, "", smallest=least)
        size = _largest_slice(sliced, allowance.bytes, rows)
        plan = _plan(rows, allowance, plain, seen[size], size, learned)
    fitted = FittedModel(model, plan, size)
    if not dry_run:
        object.__setattr__(model, "train_step", SlicedStep(model, size, learned.rules))
        model.train_function = None
    return fitted


def _bytes_of(model: Any, data: Any, size: int, count: int, learned: Learned, on_host: bool) -> int:
    """Bytes of a step of so many equal slices."""
    even = port.tensorflow().nest.map_structure(lambda leaf: contentless.spec_of(leaf, count * size), data)
    return play(trace_model(model, even, SlicedStep(model, size, learned.rules, even=True)), on_host).bound


def _largest_slice(sliced: Any, capacity: int, rows: int) -> int:
    """Samples of the largest slice that fits, cut down to what the same number of slices needs."""
    one, half = sliced(1), sliced(max(1, rows // 2))
    each = max(1.0, (half - one) / max(1, rows // 2 - 1))
    guess = max(1, min(rows // 2, int((capacity - one) / each)))
    size, _ = largest_batch(lambda each: sliced(each) if each < rows else capacity + 1, capacity, guess)
    size = max(1, size)
    even = -(-rows // -(-rows // size))
    return even if sliced(even) <= capacity else size


def _check(
    model: Any, loss: Any, optimizer: Any, batch: Any, allow: str, without: tuple[str, ...], others: dict[str, Any]
) -> None:
    if not port.is_model(model):
        raise InputError(
            f"fit takes a compiled Keras model, not {type(model).__name__}: a step of your own can be estimated"
        )
    port.keras()
    if loss is not None or optimizer is not None:
        raise InputError(
            "a Keras model brings its loss and optimizer: model.compile(optimizer, loss), then fit(model, batch=...)"
        )
    if batch is None:
        raise InputError("fit needs one batch as example: outsize.fit(model, batch=(x, y), budget='2GiB')")
    given = [name for name in MEANINGLESS if others.get(name) not in (None, False)]
    if given:
        raise InputError(f"{given[0]}= means nothing for a Keras model: budget=, allow=, without= and dry_run= do")
    if allow not in ("exact", "distribution", "approximate"):
        raise InputError(f"allow is 'exact', 'distribution' or 'approximate', not {allow!r}")
    unknown = [name for name in without if name not in REMEDIES]
    if unknown:
        raise InputError(f"without= names {unknown[0]!r}, which is no remedy for a Keras model: {', '.join(REMEDIES)}")


def _allowance(budget: int | str | None) -> Allowance:
    """The budget of the device that TensorFlow uses."""
    tf = port.tensorflow()
    pool = Pool(kind="device", index=0) if tf.config.list_physical_devices("GPU") else HOST
    return allowance_of(pool, budget, "the device")


def _plan(rows: int, allowance: Allowance, plain: Played, peak: int, size: int | None, learned: Learned) -> FitPlan:
    slices = 1 if size is None else -(-rows // size)
    random = any("dropout" in note for note in learned.notes)
    remedies = () if size is None else (
        Remedy(
            name="slices", saves=max(0, plain.bound - peak), known=Known.ESTIMATE,
            costs=f"+{100 * LOOP_COST * (slices - 1):.0f} % time",
            exactness=Exactness.DISTRIBUTION if random else Exactness.ROUNDING,
            how=f"{slices} slices of {size} samples, one normaliser, one update",
        ),
    )  # fmt: skip
    step = Step(name="training step", peaks=(Peak(pool=allowance.pool, bytes=peak, known=Known.BOUND),))
    return FitPlan(
        name=f"training step of {rows} samples", steps=(step,), budgets=(allowance,), smallest=None, remedies=remedies,
        slow_down=1 + LOOP_COST * (slices - 1), plain=plain.bound, away=0, place="host",
        notes=(*plain.traced.notes, *learned.notes),
    )  # fmt: skip


def _refused(rows: int, allowance: Allowance, plain: Played, why: str, smallest: int | None = None) -> BudgetError:
    """The smallest budget that works, and why not less."""
    needed = plain.bound if smallest is None else min(smallest, plain.bound)
    reason = f"; slices are not used: {why}" if why else ", with one sample at a time" if needed < plain.bound else ""
    return BudgetError(
        f"a training step of {rows} samples holds {format_bytes(plain.bound)}, the budget is {format_bytes(allowance.bytes)}; "
        f"the smallest budget that works is {format_bytes(needed)}{reason}",
        needed=plain.bound, budget=allowance.bytes, smallest=needed, culprit="training step",
    )  # fmt: skip
