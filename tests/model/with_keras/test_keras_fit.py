"""A fitted `model.fit` gives the weights of the plain one, inside its budget."""

import numpy as np
import pytest

import outsize
from outsize import BudgetError, InputError


def train(model, batch, steps=20):
    x, y, *weights = batch
    rows = len(x[0]) if isinstance(x, list) else len(x)
    weight = weights[0] if weights else None
    history = model.fit(x, y, sample_weight=weight, batch_size=rows, epochs=steps, shuffle=False, verbose=0)
    return model.get_weights(), history.history


def pair(make):
    """The same model twice, and its batch."""
    (plain, batch), (fitted, _) = make(), make()
    fitted.set_weights(plain.get_weights())
    return plain, fitted, batch


def part_of_plain(model, batch, part=0.6):
    return int(outsize.estimate(model, *batch, device="cpu").peak_requested.bound * part)


@pytest.mark.parametrize("name", ["cnn", "lstm", "transformer", "autoencoder", "two_inputs"])
def test_twenty_steps_give_the_same_weights_losses_and_metrics(models, name):
    plain, model, batch = pair(models.ALL[name])
    budget = part_of_plain(model, batch)
    fitted = outsize.fit(model, batch=batch, budget=budget)
    assert 1 <= fitted.rows < models.ROWS
    assert fitted.plan.peak() <= budget < fitted.plan.plain
    weights, history = train(plain, batch)
    found, seen = train(model, batch)
    for one, other in zip(weights, found, strict=True):
        assert np.max(np.abs(one - other)) <= 1e-5
    for key, values in history.items():
        assert seen[key] == pytest.approx(values, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["cnn", "lstm", "transformer", "autoencoder", "two_inputs"])
def test_twenty_steps_of_adam_in_float64_give_the_same_weights(models, name):
    # Adam divides by small second moments, so float32 shows its own rounding; here a wrong step would be all there is
    import keras

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        plain, model, batch = pair(models.ALL[name])
        for each in (plain, model):
            each.compile("adam", each.loss, loss_weights=[1.0, 0.5] if name == "two_inputs" else None)
        fitted = outsize.fit(model, batch=batch, budget=part_of_plain(model, batch, 0.7))
        assert 1 <= fitted.rows < models.ROWS
        weights, _ = train(plain, batch)
        found, _ = train(model, batch)
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
    assert all(each.dtype == np.float64 for each in found)
    assert max(np.max(np.abs(one - other)) for one, other in zip(weights, found, strict=True)) <= 1e-9


def test_undo_gives_the_model_its_own_step_back(models):
    model, batch = models.cnn()
    fitted = outsize.fit(model, batch=batch, budget=part_of_plain(model, batch))
    assert "train_step" in model.__dict__
    assert fitted.undo() is model
    assert "train_step" not in model.__dict__
    train(model, batch, steps=1)


def test_a_batch_that_is_no_multiple_of_the_slice_is_trained_too(models):
    plain, model, batch = pair(models.cnn)
    outsize.fit(model, batch=batch, budget=part_of_plain(model, batch))
    x, y = batch
    for each in (plain, model):
        each.fit(x[:29], y[:29], batch_size=13, epochs=2, shuffle=False, verbose=0)
    for one, other in zip(plain.get_weights(), model.get_weights(), strict=True):
        assert np.max(np.abs(one - other)) <= 1e-5


def test_a_plain_step_that_fits_is_left_alone(models):
    model, batch = models.cnn()
    fitted = outsize.fit(model, batch=batch, budget="1GiB")
    assert fitted.rows is None and not fitted.plan.remedies
    assert "train_step" not in model.__dict__


def test_batch_normalization_is_named_and_not_sliced(models):
    import keras
    from keras import layers

    net = [layers.Conv2D(8, 3), layers.BatchNormalization(name="norm"), layers.Flatten(), layers.Dense(1)]
    model = keras.Sequential([keras.Input((16, 16, 3)), *net])
    model.compile("sgd", "mse")
    batch = np.random.default_rng(0).random((32, 16, 16, 3), dtype="float32"), np.ones((32, 1), "float32")
    before = [np.asarray(variable.value).copy() for variable in model.variables]
    with pytest.raises(BudgetError, match="norm normalises over the batch") as error:
        outsize.fit(model, batch=batch, budget=part_of_plain(model, batch))
    assert error.value.smallest == error.value.needed
    for old, new in zip(before, model.variables, strict=True):
        assert np.array_equal(old, np.asarray(new.value))  # the trial left no trace


def test_dropout_is_sliced_only_where_other_masks_are_allowed(models):
    import keras
    from keras import layers

    net = [layers.Dense(256, activation="relu"), layers.Dropout(0.5), layers.Dense(1)]
    model = keras.Sequential([keras.Input((32,)), *net])
    model.compile("sgd", "mse")
    batch = np.ones((512, 32), "float32"), np.ones((512, 1), "float32")
    budget = part_of_plain(model, batch)
    with pytest.raises(BudgetError, match="allow='distribution'"):
        outsize.fit(model, batch=batch, budget=budget)
    fitted = outsize.fit(model, batch=batch, budget=budget, allow="distribution")
    assert fitted.plan.remedies[0].exactness == "same in distribution"
    train(model, batch, steps=2)


def test_mixed_precision_keeps_its_loss_scale(models):
    import keras
    from keras import layers

    def make():
        policy = keras.DTypePolicy("mixed_float16")
        net = [layers.Dense(64, activation="relu", dtype=policy), layers.Dense(1, dtype="float32")]
        model = keras.Sequential([keras.Input((16,)), *net])
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01)), "mse")
        data = np.random.default_rng(0)
        return model, (data.random((512, 16), dtype="float32"), data.random((512, 1), dtype="float32"))

    plain, model, batch = pair(make)
    outsize.fit(model, batch=batch, budget=part_of_plain(model, batch, 0.8))
    weights, _ = train(plain, batch, steps=5)
    found, _ = train(model, batch, steps=5)
    for one, other in zip(weights, found, strict=True):
        assert np.max(np.abs(one - other)) <= 1e-3
    assert float(plain.optimizer.dynamic_scale) == float(model.optimizer.dynamic_scale)


def test_a_budget_below_one_sample_names_the_smallest(models):
    model, batch = models.cnn()
    with pytest.raises(BudgetError, match="smallest budget that works") as error:
        outsize.fit(model, batch=batch, budget=1000)
    fitted = outsize.fit(model, batch=batch, budget=error.value.smallest)
    assert fitted.plan.peak() <= error.value.smallest


def test_options_of_other_frameworks_are_refused(models):
    model, batch = models.cnn()
    for wrong in (
        {"host": "1GiB"},
        {"clip": 1.0},
        {"own_step": True},
        {"without": ("offload",)},
        {"allow": "anything"},
    ):
        with pytest.raises(InputError):
            outsize.fit(model, batch=batch, **wrong)
    with pytest.raises(InputError, match="brings its loss"):
        outsize.fit(model, "mse", None, batch)
    with pytest.raises(InputError, match="one batch"):
        outsize.fit(model)
