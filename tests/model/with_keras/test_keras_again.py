"""Layers that are computed again in the backward pass give the weights of the plain step, in less memory."""

import numpy as np
import pytest
from test_keras_fit import part_of_plain, train

import outsize


def deep(norm=False, dropout=False):
    import keras
    from keras import layers

    x = first = keras.Input((16, 16, 3))
    for number in range(8):
        x = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
        if number in (2, 5) and norm:
            x = layers.BatchNormalization()(x)
        if number in (2, 5) and dropout:
            x = layers.Dropout(0.2, seed=3)(x)
    model = keras.Model(first, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))
    model.compile("adam", "mse")
    data = np.random.default_rng(0)
    return model, (data.random((32, 16, 16, 3), dtype="float32"), data.random((32, 1), dtype="float32"))


def pair(make, **options):
    (plain, batch), (model, _) = make(**options), make(**options)
    model.set_weights(plain.get_weights())
    return plain, model, batch


def assert_same_course(plain, model, batch, steps=20):
    (weights, history), (found, seen) = train(plain, batch, steps), train(model, batch, steps)
    for one, other in zip(weights, found, strict=True):
        assert np.max(np.abs(one - other)) <= 1e-5
    assert seen["loss"] == pytest.approx(history["loss"], rel=1e-4, abs=1e-5)


def test_twenty_steps_of_a_batch_in_one_piece_are_the_plain_ones(models):
    plain, model, batch = pair(deep)
    budget = part_of_plain(model, batch, 0.75)
    fitted = outsize.fit(model, batch=batch, budget=budget, without=("slices",))
    assert fitted.rows is None and fitted.plan.peak() <= budget < fitted.plan.plain
    assert [remedy.name for remedy in fitted.plan.remedies] == ["checkpoint"]
    assert_same_course(plain, model, batch)
    fitted.undo()
    assert "train_step" not in model.__dict__ and "_run_through_graph" not in model.__dict__


@pytest.mark.parametrize("options", [{"norm": True}, {"dropout": True}], ids=["normalisation", "dropout"])
def test_layers_that_write_or_draw_are_run_once(models, options):
    from outsize.model.keras.recomputed import Again, AgainStep

    plain, model, batch = pair(deep, **options)
    again = Again(model)
    kept = [node.operation for segment in again.segments if not segment.again for node in segment.nodes]
    assert again.useful
    assert sum(type(layer).__name__ in ("BatchNormalization", "Dropout") for layer in kept) == 2
    object.__setattr__(model, "train_step", AgainStep(model, again))
    assert_same_course(plain, model, batch, steps=5)


@pytest.mark.parametrize("name", ["cnn", "lstm", "transformer", "autoencoder", "two_inputs"])
def test_slices_of_models_whose_layers_run_again_give_the_same_weights(models, name):
    from outsize.model.keras.equality import learn
    from outsize.model.keras.recomputed import Again
    from outsize.model.keras.sliced_step import SlicedStep

    plain, model, batch = pair(models.ALL[name])
    again = Again(model)
    learn(model, batch, "exact")  # Keras builds what it compiles at its first loss
    object.__setattr__(model, "train_step", SlicedStep(model, 13, again=again))
    (weights, _), (found, _) = train(plain, batch), train(model, batch)
    for one, other in zip(weights, found, strict=True):
        assert np.max(np.abs(one - other)) <= 1e-5


def test_a_model_that_calls_its_layers_itself_is_not_cut_into_segments(models):
    import keras

    from outsize.model.keras.recomputed import Again

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(4)

        def call(self, x):
            return self.dense(x)

    assert not Again(Own()).useful
