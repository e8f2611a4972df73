"""Steps of Keras and TensorFlow are followed without running them."""

import numpy as np
import pytest

import outsize
from outsize import BudgetError, InputError


def measured(tf, step):
    """Peak of tensor bytes in TensorFlow's own account, the highest of several runs; small tensors are not in it."""
    step()
    peaks = []
    for _ in range(4):
        tf.config.experimental.reset_memory_stats("CPU:0")
        step()
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
    return max(peaks)


def test_the_bound_of_a_dense_model_holds_what_tensorflow_measures(tf):
    import keras

    layers = [keras.layers.Dense(512, activation="relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((512,)), *layers, keras.layers.Dense(8)])
    model.compile("adam", "mse")
    x, y = np.ones((4096, 512), "float32"), np.ones((4096, 8), "float32")
    found = outsize.estimate(model, x, y, device="cpu")
    assert not model.optimizer.built  # the state of the optimizer was foreseen without making it
    model.optimizer.build(model.trainable_variables)
    batch = tf.constant(x), tf.constant(y)
    step = tf.function(model.train_step, autograph=False)
    peak = measured(tf, lambda: step(batch))
    weights = model.count_params() * 4
    activations = 4 * 4096 * 512 * 4
    assert found.peak_requested.bytes > 3 * weights + activations
    assert 0.75 * found.peak_requested.bytes < peak <= found.peak_requested.bound
    waiting = (
        7 * 4096 * 512 * 4
    )  # the input, activations and gradients, if gradients of weights wait: threads may meet so
    assert found.peak_requested.bound > 3 * weights + waiting
    kinds = {part.name: part.bytes for part in found.parts}
    assert kinds["weights"] >= weights and kinds["optimizer state"] >= 2 * weights
    assert kinds["activations"] + kinds["temporaries"] >= activations


def test_one_thread_for_operators_has_one_order_and_a_lower_bound(models, monkeypatch):
    from outsize.model.keras import port

    model, batch = models.transformer()
    many = outsize.estimate(model, *batch, device="cpu").peak_requested
    monkeypatch.setattr(port, "threads_of_operators", lambda: 1)
    one = outsize.estimate(model, *batch, device="cpu")
    assert one.peak_requested.bytes <= one.peak_requested.bound < many.bound
    assert not any("inter_op" in note for note in one.notes)


def test_a_loop_keeps_what_its_backward_pass_reads_for_every_time_step(models):
    import keras

    def peak(steps):
        model = keras.Sequential([keras.Input((steps, 16)), keras.layers.LSTM(32)])
        model.compile("sgd", "mse")
        return outsize.estimate(model, batch=64, device="cpu").peak_requested.bytes

    each = (peak(40) - peak(20)) / 20
    gates = 64 * 32 * 4
    assert 7 * gates <= each <= 12 * gates  # four gates, two states, their input and products of them


def test_a_function_of_tensorflow_code_is_followed_through_calls_and_branches(tf):
    @tf.function
    def twice(x):
        return tf.tanh(x @ x)

    def step(x):
        y = twice(x)
        return tf.cond(tf.reduce_sum(y) > 0, lambda: tf.concat([y, y], 0), lambda: y)

    found = outsize.estimate(step, tf.TensorSpec((256, 256)), device="cpu")
    each = 256 * 256 * 4
    assert 4 * each <= found.peak_requested.bytes < 5 * each
    assert found.lines[0].name.startswith("test_keras_estimate.py:")


def test_weights_of_a_model_that_is_built_for_the_estimate_take_no_memory(tf):
    import keras
    import psutil

    def build():
        model = keras.Sequential([keras.Input((20_000,)), keras.layers.Dense(20_000), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model, tf.TensorSpec((8, 20_000)), tf.TensorSpec((8, 1))

    before = psutil.Process().memory_info().rss
    found = outsize.estimate(None, build=lambda: build(), card="t4")
    assert psutil.Process().memory_info().rss - before < 400 << 20
    assert found.peak_requested.bytes > 3 * 20_000 * 20_000 * 4
    assert found.fits is True
    assert any("whole card" in note for note in found.notes)


def test_a_batch_size_gives_growth_and_the_largest_batch(models):
    model, _ = models.cnn()
    found = outsize.estimate(model, batch=16, device="cpu", budget="4MiB")
    assert found.growth[0].size == "batch"
    largest = found.largest[0].largest
    assert outsize.estimate(model, batch=largest, device="cpu").peak_reserved.bound <= 4 << 20


def test_what_means_nothing_is_refused(models):
    model, batch = models.cnn()
    for options in ({"seq": 3}, {"loader": object()}, {"device": "tpu"}):
        with pytest.raises(InputError):
            outsize.estimate(model, *batch, **options)
    with pytest.raises(InputError, match="needs a batch"):
        outsize.estimate(model)
    assert issubclass(BudgetError, Exception)


def test_the_command_line_takes_a_model_and_a_batch(tf, tmp_path):
    import subprocess
    import sys

    (tmp_path / "train.py").write_text(
        "import keras, numpy as np\n"
        "def make(rows=32):\n"
        "    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128), keras.layers.Dense(10)])\n"
        "    model.compile('adam', 'mse')\n"
        "    return model, np.ones((rows, 64), 'float32'), np.ones((rows, 10), 'float32')\n"
    )
    for more, status, words in (([], 0, "FITS"), (["--budget", "100KiB"], 1, "DOES NOT FIT")):
        answer = subprocess.run(
            [sys.executable, "-m", "outsize", "estimate", "train:make", "--device", "cpu", "--budget", "1GiB", *more],
            cwd=tmp_path, capture_output=True, text=True,
        )  # fmt: skip
        assert answer.returncode == status, answer.stdout + answer.stderr
        assert words in answer.stdout.upper()
