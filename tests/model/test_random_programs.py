"""Random small training programs, run for real and foreseen: what takes more than was foreseen was announced by a guess."""

# ruff: noqa: E501  the lines of programs are kept whole

import pytest

pytest.importorskip("torch")

from effort import examples, long
from hypothesis import HealthCheck, Phase, assume, given, note
from hypothesis import strategies as st
from training_programs import load, real_peak, write_program

import outsize

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example, HealthCheck.filter_too_much]
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, *((Phase.shrink,) if long() else ()))


@pytest.mark.filterwarnings("ignore")
@examples(100 if long() else 16, suppress_health_check=CHECKS, phases=PHASES)
@given(st.randoms(use_true_random=False))
def test_a_program_takes_what_was_foreseen_or_the_estimate_says_that_it_does_not_know(source):
    text = write_program(source)
    real = real_peak(text)
    assume(isinstance(real, int))  # torch refuses a few of them
    program = load(text)
    footprint = outsize.estimate(program["step"], build=program["build"], device="cpu")
    note(f"{text}\nreal {real:,}, foreseen {footprint.peak_requested}")
    assert footprint.guesses or real <= footprint.peak_requested.bound


PROGRAM = """
import torch
import torch.nn.functional as F
from torch import nn


def build():
    torch.manual_seed(0)
    model = {model}
    return {{"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "kept": []}}


def step(job):
    {lines}
    loss = {loss}
    loss.backward()
    {update}
"""
KINDS = {
    "small maps": {"model": "nn.Conv2d(320, 320, 7, padding=3, groups=320)", "loss": "model(torch.rand(8, 320, 2, 2)).mean()"},
    "channels last": {
        "model": "nn.Conv2d(32, 64, 3, padding=1).to(memory_format=torch.channels_last)",
        "loss": "model(torch.rand(8, 32, 28, 28).to(memory_format=torch.channels_last)).mean()",
    },
    "interpolation": {
        "model": "nn.Conv2d(8, 8, 1)",
        "loss": "F.interpolate(model(torch.rand(16, 8, 32, 32)), size=(48, 48), mode='bilinear', antialias=True).mean()",
    },
    "fourier": {"model": "nn.Linear(128, 128)", "loss": "torch.fft.irfft2(torch.fft.rfft2(model(torch.rand(32, 64, 128)))).square().mean()"},
    "embedding bag": {"model": "nn.EmbeddingBag(5000, 64)", "loss": "model(torch.randint(0, 5000, (256, 40))).square().mean()"},
    "order": {"model": "nn.Linear(64, 64)", "loss": "model(torch.rand(256, 100, 64)).sort(1).values.kthvalue(50, 1).values.mean()"},
    "complex": {"model": "nn.Linear(300, 300, dtype=torch.cfloat)", "loss": "model(torch.rand(500, 300).to(torch.cfloat)).abs().mean()"},
    "many gradients": {
        "model": "nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])", "loss": "model(torch.rand(4, 256)).mean()",
        "update": "nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)",
    },
    "packed without gradients": {
        "model": "nn.LSTM(32, 32, batch_first=True)", "loss": "model(torch.rand(8, 20, 32))[0].mean()",
        "update": """with torch.inference_mode():
        packed = nn.utils.rnn.pack_padded_sequence(torch.rand(8, 20, 32), torch.arange(5, 13), True, False)
        nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)""",
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_kernel_takes_inside_is_foreseen(kind):
    text = PROGRAM.format(**{"lines": "model = job['model']", "update": "pass", **KINDS[kind]})
    program = load(text)
    footprint = outsize.estimate(program["step"], build=program["build"], device="cpu")
    real = real_peak(text)
    assert real <= 1.01 * footprint.peak_requested.bytes + 2**14
    assert not footprint.guesses


def test_lengths_drawn_after_the_weights_are_those_of_the_run():
    text = (
        PROGRAM.format(
            model="nn.Linear(64, 64)", lines="model = job['model']", loss="model(job['x']).mean()", update="pass"
        )
        .replace('"kept": []}}', '"kept": []}')
        .replace('"kept": []}', '"x": torch.rand(int(torch.randint(1, 4000, ())), 64)}')
    )
    program = load(text)
    footprint = outsize.estimate(program["step"], build=program["build"], device="cpu")
    assert footprint.peak_requested.bytes == pytest.approx(real_peak(text), rel=0.01)


@pytest.mark.parametrize(
    ("update", "word"),
    [
        ("job['kept'].append(torch.ones(8192))", "memory may grow with every step"),
        ("torch.ones(1000 * random.randint(1, 50)).square().sum()", "differ in size"),
    ],
)
def test_steps_that_are_not_alike_are_announced(update, word):
    text = "import random\n" + PROGRAM.format(
        model="nn.Linear(64, 64)", lines="model = job['model']", loss="model(torch.rand(4, 64)).mean()", update=update
    )
    program = load(text)
    footprint = outsize.estimate(program["step"], build=program["build"], device="cpu")
    assert any(word in guess for guess in footprint.guesses)


def test_no_operator_is_called_for_real_beyond_a_small_size(monkeypatch):
    from outsize.model.tracing.rules import host_calls

    made = []
    monkeypatch.setattr(host_calls, "_measure", lambda func, *rest: made.append(str(func)))
    monkeypatch.setattr(host_calls, "_SEEN", {})
    monkeypatch.setattr(host_calls, "MOST_BYTES", 2**20)
    text = PROGRAM.format(
        model="nn.Linear(64, 64)", lines="model = job['model']", loss="torch.fft.fft(model(torch.rand(10000, 64))).abs().mean()", update="pass"
    )  # fmt: skip
    program = load(text)
    footprint = outsize.estimate(program["step"], build=program["build"], device="cpu")
    assert not any("fft" in name for name in made)
    assert any("fft" in guess and "not known" in guess for guess in footprint.guesses)


def test_a_large_call_may_copy_what_is_not_contiguous(monkeypatch):
    from outsize.model.tracing.rules import host_calls

    text = PROGRAM.format(
        model="nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(200))", lines="model = job['model']",
        loss="model(torch.rand(200, 200, 8)).sum()", update="pass",
    )  # fmt: skip
    program = load(text)
    monkeypatch.setattr(host_calls, "_SEEN", {})
    monkeypatch.setattr(host_calls, "MOST_BYTES", 0)
    footprint = outsize.estimate(program["step"], build=program["build"], device="cpu")
    real, foreseen = real_peak(text), footprint.peak_requested
    assert foreseen.bytes == pytest.approx(real, rel=0.02)
    assert foreseen.bound >= foreseen.bytes + 4 * 200 * 200 * 8  # the gradient of a sum is one number, spread out
    assert not footprint.guesses


def test_an_lstm_in_half_precision_is_not_known():
    text = PROGRAM.format(
        model="nn.LSTM(64, 64)", lines="model = job['model'].bfloat16()", loss="model(torch.rand(9, 9, 64).bfloat16())[0].sum()",
        update="pass",
    )  # fmt: skip
    program = load(text)
    footprint = outsize.estimate(program["step"], build=program["build"], device="cpu")
    assert any("LSTM" in guess for guess in footprint.guesses)


def test_columns_that_are_summed_may_be_copied():
    text = PROGRAM.format(
        model="nn.Conv2d(3, 64, 3, padding=1)", lines="model = job['model']", update="pass",
        loss="F.fold(F.unfold(model(torch.rand(16, 3, 7, 7)), 3, padding=1), (7, 7), 3, padding=1).mean()",
    )  # fmt: skip
    program = load(text)
    footprint = outsize.estimate(program["step"], build=program["build"], device="cpu")
    assert real_peak(text) <= footprint.peak_requested.bound
