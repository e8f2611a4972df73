"""A training step in slices: the same gradient as the whole batch's, with the activations of one slice at a time.

The batch is cut along its first axis. A loop runs forward and backward pass of one slice after another and adds up gradients;
then the model's own optimizer updates the weights once. Metrics are updated slice by slice, losses once.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from outsize.model.keras import port
from outsize.model.keras.slice_losses import Slice, Term, sums_noted


class Rules(NamedTuple):
    """How what is no loss of Keras adds up, as it was found on a few samples."""

    added: str = "mean"
    """Losses that layers add in their calls: `mean` or `sum` over samples."""


class Sum(NamedTuple):
    """What the slices added up to."""

    gradients: list[Any]
    """By trainable weight; None where the loss does not depend on it."""
    loss: Any
    """The whole's loss."""
    losses: list[Any]
    """Each compiled loss of the whole, without its weight."""


class SlicedStep:
    """Takes the place of `model.train_step`."""

    def __init__(
        self, model: Any, rows: int, rules: Rules | None = None, *, again: Any = None, even: bool = False
    ) -> None:
        self.model, self.rows, self.rules = model, rows, rules or Rules()
        self.again = again
        """Segments that are computed again, None where none is."""
        self.even = even
        """Every slice has as many samples: shapes are known while the step is traced."""

    def __call__(self, data: Any) -> Any:
        """One step on (x, y, sample_weight)."""
        tf, model = port.tensorflow(), self.model
        summed = self.sum_up(data, scaled=True, metrics=True)
        leaf = port.flatten(data)[0]
        model._loss_tracker.update_state(summed.loss, sample_weight=tf.shape(leaf)[0])
        trackers = [] if model._compile_loss is None else model._compile_loss.metrics
        for tracker, value in zip(trackers, summed.losses, strict=False):
            tracker.update_state(value, sample_weight=leaf.shape[0])
        model.optimizer.apply_gradients(zip(summed.gradients, model.trainable_weights, strict=True))
        return model.get_metrics_result()

    def sum_up(self, data: Any, *, scaled: bool = False, metrics: bool = False) -> Sum:
        """Gradients and losses of the whole batch."""
        tf = port.tensorflow()
        all_rows = tf.shape(port.flatten(data)[0])[0]
        weights = self.model.trainable_weights
        layout = _Layout()

        def body(first: Any, sums: Any, totals: Any) -> Any:
            noted = Slice(tf.minimum(self.rows, all_rows - first), all_rows)
            part = tf.nest.map_structure(lambda leaf: self._part(leaf, first, noted.rows), data)
            found, values = self._slice(part, noted, weights, layout, scaled, metrics)
            number = first // self.rows
            added = [
                [_add(total, one, number) for total, one in zip(*pair, strict=True)]
                for pair in zip(sums, found, strict=True)
            ]
            return first + self.rows, added, [old + new for old, new in zip(totals, values, strict=True)]

        groups, numbers = self._probe(data, layout, weights)
        count = -(-all_rows // self.rows)
        zeros = [
            [_nothing(weight, count, sparse) for weight, sparse in zip(weights, layout.sparse, strict=True)]
            for _ in range(groups)
        ]
        loop = tf.while_loop(
            lambda first, *_: first < all_rows, body, (tf.constant(0), zeros, [tf.constant(0.0)] * numbers),
            parallel_iterations=1,
        )  # fmt: skip
        return _finish(loop[1], loop[2], layout)

    def _part(self, leaf: Any, first: Any, rows: Any) -> Any:
        if leaf is None or leaf.shape.rank == 0:
            return leaf
        part = leaf[first : first + rows]
        if self.even:
            part.set_shape([self.rows, *leaf.shape[1:]])
        return part

    def _slice(
        self, data: Any, noted: Slice, weights: list[Any], layout: _Layout, scaled: bool, metrics: bool
    ) -> tuple[list[list[Any]], list[Any]]:
        """Gradients of every group of losses, and numbers to add up."""
        tf, model = port.tensorflow(), self.model
        x, y, sample_weight = port.keras().utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape(persistent=True) as tape:
            with contextlib.nullcontext() if self.again is None else self.again.in_use():
                y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
            with sums_noted(model, noted):
                static = self._loss(x, y, y_pred, sample_weight, noted)
            open_terms = [term for term in noted.terms if term.count is not None]
            losses = [static, *(term.weight * term.value for term in open_terms)]
            layout.read(noted.terms, static is not None, len(weights))
            losses = [loss for loss in losses if loss is not None]
            goals = [model.optimizer.scale_loss(loss) if scaled else loss for loss in losses]
        found = []
        for goal in goals:
            gradients = tape.gradient(goal, weights)
            layout.missing = [
                gradient is None and missing for gradient, missing in zip(gradients, layout.missing, strict=True)
            ]
            layout.sparse = [
                isinstance(gradient, tf.IndexedSlices) or sparse
                for gradient, sparse in zip(gradients, layout.sparse, strict=True)
            ]
            found.append([_parts(gradient, weight) for gradient, weight in zip(gradients, weights, strict=True)])
        del tape
        if metrics:
            model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        numbers = [tf.cast(0.0 if static is None else static, tf.float32)]
        for term in noted.terms:
            numbers += [term.value, tf.cast(0.0 if term.count is None else term.count / term.assumed, tf.float32)]
        return found, numbers

    def _loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, noted: Slice) -> Any:
        """The part of the loss whose share in the whole is known: all but terms with counts of their own; None without one."""
        tf, model = port.tensorflow(), self.model
        share = tf.cast(noted.rows, tf.float32) / tf.cast(noted.all_rows, tf.float32)
        if type(model).compute_loss is not port.keras().Model.compute_loss:
            return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True) * share
        if model._compile_loss is not None:
            model._compile_loss(y, y_pred, sample_weight)
        regular = model._get_regularization_losses()
        every = model.losses
        added = every[: len(every) - len(regular)]
        found = [term.weight * term.value for term in noted.terms if term.count is None]
        found += [tf.reduce_sum(tf.cast(loss, tf.float32)) * share for loss in regular]
        found += [
            tf.reduce_sum(tf.cast(loss, tf.float32)) * (share if self.rules.added == "mean" else 1.0) for loss in added
        ]
        return tf.add_n(found) if found else None

    def _probe(self, data: Any, layout: _Layout, weights: list[Any]) -> tuple[int, int]:
        """(groups of gradients, numbers) that a slice gives: seen on a graph that is thrown away."""
        tf = port.tensorflow()
        specs = tf.nest.map_structure(_spec, data)

        def one(part: Any) -> Any:
            rows = tf.shape(port.flatten(part)[0])[0]
            return self._slice(part, Slice(rows, rows), weights, layout, False, False)

        tf.function(one, autograph=False).get_concrete_function(specs)
        return layout.groups, 1 + 2 * len(layout.weights)


class _Layout:
    """Which terms a slice has: the same in every slice."""

    def __init__(self) -> None:
        self.weights: list[Any] = []
        self.open: list[bool] = []
        self.static = False
        self.missing: list[bool] = []
        """By weight: no loss depends on it."""
        self.sparse: list[bool] = []
        """By weight: its gradient is rows of it, as an embedding's."""

    @property
    def groups(self) -> int:
        return int(self.static) + sum(self.open)

    def read(self, terms: list[Term], static: bool, weights: int) -> None:
        self.weights, self.open, self.static = (
            [term.weight for term in terms],
            [term.count is not None for term in terms],
            static,
        )
        self.missing, self.sparse = [True] * weights, [False] * weights


def _finish(sums: list[list[Any]], numbers: list[Any], layout: _Layout) -> Sum:
    """Divides by the true counts."""
    tf = port.tensorflow()
    values, shares = numbers[1::2], numbers[2::2]
    factors = [
        tf.math.divide_no_nan(1.0, share) if is_open else 1.0
        for share, is_open in zip(shares, layout.open, strict=True)
    ]
    of_groups = [None] * layout.static + [
        factor for factor, is_open in zip(factors, layout.open, strict=True) if is_open
    ]
    losses = [value * factor for value, factor in zip(values, factors, strict=True)]
    loss = numbers[0]
    for value, weight, is_open in zip(losses, layout.weights, layout.open, strict=True):
        loss = loss + weight * value if is_open else loss
    gradients = [
        None if missing else _join([group[place] for group in sums], of_groups)
        for place, missing in enumerate(layout.missing)
    ]
    return Sum(gradients, loss, losses)


def _join(parts: list[Any], factors: list[Any]) -> Any:
    """The gradient of one weight from those of the groups of losses."""
    tf = port.tensorflow()
    sparse = isinstance(parts[0], tuple)
    dense = [part[0].concat() if sparse else part for part in parts]
    scaled = [
        part if factor is None else part * tf.cast(factor, part.dtype)
        for part, factor in zip(dense, factors, strict=True)
    ]
    total = scaled[0] if len(scaled) == 1 else tf.add_n(scaled)
    return tf.IndexedSlices(total, parts[0][1].concat(), parts[0][2]) if sparse else total


def _nothing(weight: Any, count: Any, sparse: bool) -> Any:
    """What gradients of slices are added to. Rows of an embedding are kept as they come, in order: Keras's optimizers take
    rows that come twice in another way than their sum."""
    tf = port.tensorflow()
    if not sparse:
        return tf.zeros(weight.shape, weight.dtype)
    rows = tf.TensorArray(weight.dtype, size=count, infer_shape=False, element_shape=[None, *weight.shape[1:]])
    places = tf.TensorArray(tf.int32, size=count, infer_shape=False, element_shape=[None])
    return rows, places, tf.constant(tuple(weight.shape))


def _parts(gradient: Any, weight: Any) -> Any:
    tf = port.tensorflow()
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values, tf.cast(gradient.indices, tf.int32)
    return tf.zeros(weight.shape, weight.dtype) if gradient is None else tf.convert_to_tensor(gradient)


def _add(total: Any, one: Any, number: Any) -> Any:
    tf = port.tensorflow()
    if not isinstance(total, tuple):
        return total + one
    if not isinstance(one, tuple):  # a slice whose rows were all taken
        one = one, tf.range(tf.shape(one)[0])
    return total[0].write(number, one[0]), total[1].write(number, one[1]), total[2]


def _spec(leaf: Any) -> Any:
    tf = port.tensorflow()
    return None if leaf is None else tf.TensorSpec(leaf.shape, leaf.dtype)
