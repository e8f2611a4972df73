"""What frameworks in this process have taken, with scripted ones: the real ones run in environments of their own."""

import sys
import types

import pytest

import outsize
from outsize.core.memory import HOST, Pool
from outsize.failure.live import live_arrays
from outsize.machine.fake import FakeMachine
from outsize.machine.frameworks import read_frameworks

GIB = 2**30


class Card:
    platform, id = "gpu", 0

    def memory_stats(self):
        return {"bytes_in_use": 3 * GIB, "peak_bytes_in_use": 5 * GIB, "pool_bytes": 60 * GIB, "bytes_limit": 60 * GIB}


@pytest.fixture
def jax(monkeypatch):
    module = types.SimpleNamespace(local_devices=lambda: [Card()], live_arrays=list)
    bridge = types.SimpleNamespace(backends_are_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "jax", module)
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", bridge)
    return bridge


def of(framework, environ=()):
    return [arena for arena in read_frameworks(dict(environ)) if arena.framework == framework]


def test_jax_says_what_is_in_use_what_it_took_and_which_setting_changes_that(jax):
    (arena,) = of("JAX")
    assert (arena.pool, arena.in_use, arena.peak, arena.limit) == (
        Pool(kind="device", index=0),
        3 * GIB,
        5 * GIB,
        60 * GIB,
    )
    assert "took 75% of the card" in arena.notes[0] and "PREALLOCATE=false" in arena.notes[0]
    assert (
        "grows up to 90%"
        in of("JAX", {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"})[0].notes[0]
    )
    assert "without a limit" in of("JAX", {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"})[0].notes[0]


def test_a_jax_that_has_not_started_or_is_half_loaded_is_not_asked(jax, monkeypatch):
    jax.backends_are_initialized = lambda: False
    sys.modules["jax"].live_arrays = lambda: pytest.fail("this starts JAX")
    assert of("JAX") == []
    live_arrays()
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", types.SimpleNamespace())
    assert of("JAX") == []


@pytest.fixture
def tensorflow(monkeypatch):
    experimental = types.SimpleNamespace(
        get_memory_info=lambda name: {"current": GIB, "peak": 2 * GIB}, get_memory_growth=lambda card: False
    )
    config = types.SimpleNamespace(
        list_physical_devices=lambda kind: ["card"], experimental=experimental,
        list_logical_devices=lambda kind: [types.SimpleNamespace(name=f"/device:{kind}:0")] if kind == "GPU" else [],
        get_logical_device_configuration=lambda card: None,
    )  # fmt: skip
    started = types.SimpleNamespace(context=lambda: types.SimpleNamespace(_initialized=True))
    monkeypatch.setitem(sys.modules, "tensorflow", types.SimpleNamespace(config=config))
    monkeypatch.setitem(sys.modules, "tensorflow.python.eager.context", started)
    return config


def test_tensorflow_says_how_it_takes_a_card(tensorflow):
    (arena,) = of("TensorFlow")
    assert (arena.in_use, arena.peak, arena.limit) == (GIB, 2 * GIB, None)
    assert "nearly the whole card" in arena.notes[0]
    assert "growth is on" in of("TensorFlow", {"TF_FORCE_GPU_ALLOW_GROWTH": "true"})[0].notes[0]
    assert "driver's own pool" in of("TensorFlow", {"TF_GPU_ALLOCATOR": "cuda_malloc_async"})[0].notes[0]
    tensorflow.get_logical_device_configuration = lambda card: [types.SimpleNamespace(memory_limit=4096)]
    assert of("TensorFlow")[0].limit == 4 * GIB


def test_a_diagnosis_says_what_the_framework_holds_of_the_card_that_is_full(jax):
    text = "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9000000000 bytes. GPU_0_bfc"
    with FakeMachine(gpus=[("H100", "80GiB", "1GiB")]):
        found = outsize.explain(text, here=True)
        assert "JAX in this process, GPU 0: in use 3.00 GiB" in str(outsize.memory())
    told = [each.text for each in found.evidence if each.kind == "machine"]
    assert any("arrays of JAX hold 3.00 GiB of GPU 0, at most 5.00 GiB" in text for text in told)
    assert outsize.memory().frameworks[0].pool != HOST
