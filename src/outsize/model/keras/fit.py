"""`outsize.fit` of a compiled Keras model: its `fit` then stays inside a budget, with the same results.

In: the model, one batch and a budget. Out: `FittedModel`, after `model.train_step` was replaced. The plain step is followed
first. Where it does not fit, the batch is cut into slices as large as fit, layers are computed again, or both: after the gradient
of a few samples was compared with the plain one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from outsize.core.errors import BudgetError, InputError
from outsize.core.failure import Exactness, Remedy
from outsize.core.fitting import FitPlan
from outsize.core.memory import HOST, Allowance, Pool
from outsize.core.noun import Known
from outsize.core.plan import Peak, Step
from outsize.core.units import format_bytes
from outsize.machine import allowance_of
from outsize.model.keras import contentless, port
from outsize.model.keras.equality import Learned, is_same_again, learn, state_kept
from outsize.model.keras.estimate import Played, largest_batch, play
from outsize.model.keras.recomputed import Again, AgainStep
from outsize.model.keras.sliced_step import Rules, SlicedStep
from outsize.model.keras.trace import trace_model

REMEDIES = ("slices", "checkpoint")
MEANINGLESS = ("device", "host", "weights", "own_step", "clip", "scaler", "batch_axis", "plan")
"""Options of other frameworks."""
FEW = 3
"""Slices that are followed, and one more."""
LOOP_COST = 0.03
"""Part of a step's time that a further slice adds: 8 slices took 1.20 times the processor time of the plain step of a
transformer and of dense layers."""
AGAIN_COST = 0.33
"""The forward pass is a third of a step."""


class FittedModel:
    """What `outsize.fit` returns for a Keras model: a plan that its `fit` obeys, until `undo`."""

    def __init__(self, model: Any, plan: FitPlan, rows: int | None) -> None:
        self.model = model
        self.plan = plan
        """How a step runs."""
        self.rows = rows
        """Samples of a slice; None where the batch is not cut."""

    def undo(self) -> Any:
        """Gives the model its own step back."""
        _give_back(self.model)
        return self.model

    def __repr__(self) -> str:
        return str(self.plan)


def _give_back(model: Any) -> None:
    if isinstance(model.__dict__.get("train_step"), SlicedStep | AgainStep):
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
            return FittedModel(
                model, _plan(rows, allowance, plain, Way(plain.bound, rows, None), Learned(Rules(), "")), None
            )
        search = _Search(model, data, allowance.bytes, without, allow, on_host)
        way = search.find()
        if way is None or way.peak > allowance.bytes:
            raise _refused(rows, allowance, plain, search.learned.why_not, way)
        plan = _plan(rows, allowance, plain, way, search.learned)
    size = way.rows if way.rows < rows else None
    if not dry_run:
        sliced = SlicedStep(model, way.rows, search.learned.rules, again=way.again)
        step = AgainStep(model, way.again) if size is None and way.again is not None else sliced
        object.__setattr__(model, "train_step", step)
        model.train_function = None
    return FittedModel(model, plan, size)


class Way(NamedTuple):
    """A step that was followed."""

    peak: int
    rows: int
    """Samples of a slice."""
    again: Again | None
    """Segments that are computed again."""

    def seconds(self, batch: int) -> float:
        """Predicted time over that of the plain step: an estimate."""
        return 1 + LOOP_COST * (-(-batch // self.rows) - 1) + (AGAIN_COST if self.again is not None else 0.0)


class _Search:
    """Slices alone, layers computed again alone, both: the fastest that fits."""

    def __init__(self, model: Any, data: Any, budget: int, without: tuple[str, ...], allow: str, on_host: bool) -> None:
        self.model, self.data, self.budget, self.on_host = model, data, budget, on_host
        self.batch = int(port.flatten(data)[0].shape[0])
        forbidden = Learned(Rules(), "without= says so")
        self.learned = forbidden if "slices" in without else learn(model, data, allow)
        again = None if "checkpoint" in without else Again(model)
        self.again = again if again is not None and again.useful and is_same_again(model, data, again) else None
        self._seen: dict[tuple[int, bool], int] = {}

    def find(self) -> Way | None:
        """The fastest that fits; where none does, the smallest; None where nothing can be done."""
        slices = None if self.learned.why_not else self._in_slices(None)
        good = slices is not None and slices.peak <= self.budget
        if self.again is None or (good and slices is not None and slices.seconds(self.batch) <= 1 + AGAIN_COST):
            return slices
        whole = play(trace_model(self.model, self.data, AgainStep(self.model, self.again)), self.on_host).bound
        ways = [way for way in (slices, Way(whole, self.batch, self.again)) if way is not None]
        if whole > self.budget and not self.learned.why_not:
            ways.append(self._in_slices(self.again))
        fitting = [way for way in ways if way.peak <= self.budget]
        if fitting:
            return min(fitting, key=lambda way: way.seconds(self.batch))
        return min(ways, key=lambda way: way.peak)

    def _in_slices(self, again: Again | None) -> Way:
        """The largest slices that fit, else the smallest."""
        least = self._bytes(1, again)
        if least > self.budget:
            return Way(least, 1, again)
        size = _largest_slice(lambda size: self._bytes(size, again), self.budget, self.batch)
        return Way(self._bytes(size, again), size, again)

    def _bytes(self, size: int, again: Again | None) -> int:
        """Bytes of a step in slices of this many samples. Of many slices four are followed: each further one adds its part of
        the batch, and of the rows of an embedding's gradient."""
        key = size, again is not None
        if key not in self._seen:
            few, more = (self._followed(size, count, again) for count in (FEW, FEW + 1))
            self._seen[key] = more + max(0, -(-self.batch // size) - FEW - 1) * max(0, more - few)
        return self._seen[key]

    def _followed(self, size: int, count: int, again: Again | None) -> int:
        """Bytes of a step of so many equal slices."""
        even = port.tensorflow().nest.map_structure(lambda leaf: contentless.spec_of(leaf, count * size), self.data)
        step = SlicedStep(self.model, size, self.learned.rules, again=again, even=True)
        return play(trace_model(self.model, even, step), self.on_host).bound


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


def _plan(rows: int, allowance: Allowance, plain: Played, way: Way, learned: Learned) -> FitPlan:
    step = Step(name="training step", peaks=(Peak(pool=allowance.pool, bytes=way.peak, known=Known.BOUND),))
    return FitPlan(
        name=f"training step of {rows} samples", steps=(step,), budgets=(allowance,), smallest=None,
        remedies=tuple(_remedies(rows, plain, way, learned)), slow_down=way.seconds(rows), plain=plain.bound, away=0,
        place="host", notes=(*plain.traced.notes, *learned.notes),
    )  # fmt: skip


def _remedies(rows: int, plain: Played, way: Way, learned: Learned) -> list[Remedy]:
    """Those in use; what they save is known of all together."""
    slices, saves, found = -(-rows // way.rows), max(0, plain.bound - way.peak), []
    random = any("dropout" in note for note in learned.notes)
    if slices > 1:
        found.append(
            Remedy(
                name="slices", saves=saves, known=Known.ESTIMATE, costs=f"+{100 * LOOP_COST * (slices - 1):.0f} % time",
                exactness=Exactness.DISTRIBUTION if random else Exactness.ROUNDING,
                how=f"{slices} slices of {way.rows} samples, one normaliser, one update",
            )
        )  # fmt: skip
    if way.again is not None:
        count = sum(segment.again for segment in way.again.segments)
        found.append(
            Remedy(
                name="checkpoint", saves=saves, known=Known.ESTIMATE, costs=f"+{100 * AGAIN_COST:.0f} % time",
                exactness=Exactness.ROUNDING, how=f"{count} segments of layers run again in the backward pass",
            )
        )  # fmt: skip
    return found


def _refused(rows: int, allowance: Allowance, plain: Played, why: str, way: Way | None) -> BudgetError:
    """The smallest budget that works, and why not less."""
    needed = plain.bound if way is None else min(way.peak, plain.bound)
    reason = f"; slices are not used: {why}" if why else ", with one sample at a time" if needed < plain.bound else ""
    return BudgetError(
        f"a training step of {rows} samples holds {format_bytes(plain.bound)}, the budget is {format_bytes(allowance.bytes)}; "
        f"the smallest budget that works is {format_bytes(needed)}{reason}",
        needed=plain.bound, budget=allowance.bytes, smallest=needed, culprit="training step",
    )  # fmt: skip
