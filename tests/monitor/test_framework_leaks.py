"""Arrays that JAX programs keep and functions that TensorFlow and JAX trace again and again: with small stand-ins that have
the same public names, and with the libraries themselves where they are installed."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

from outsize.monitor.leaks.frameworks import array_bytes, count_traces, is_traced_kind, traced_name

RUNNER = """
import json, os, runpy, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import outsize
from outsize.monitor import growth
growth._SHARE, growth._LEAST_PAUSE = 1.0, 0.0
with outsize.watch() as w:
    runpy.run_path(sys.argv[1], {"pause": w.step}, run_name="__main__")
print(json.dumps([[one.kind, one.name, one.where, one.advice] for one in w.leaks()]))
"""
STAND_INS = """
class Function:
    __module__ = "tensorflow.stand_in"
    def __init__(self, python_function):
        self.python_function, self.traces = python_function, {}
    def experimental_get_tracing_count(self):
        return len(self.traces)
    def __call__(self, x):
        if x not in self.traces:
            self.traces[x] = bytearray(40000)  # TRACE
        return self.python_function(x)
class Array:
    __module__ = "jaxlib.stand_in"
    dtype = shape = None
    def __init__(self): self.data, self.nbytes = memoryview(bytearray(40000)), 40000
"""
STOOD_IN = {
    "traces": (("tracing", "step"), STAND_INS + """
step = Function(lambda x: x)
step.python_function.__qualname__ = "step"
for number in range(150):
    step(number)
    pause()
"""),
    "arrays": (("live arrays", "history"), STAND_INS + """
history = {}
def log(number):
    history[number] = (0.5, Array())  # LEAK
for number in range(150):
    log(number)
    pause()
"""),
    "few shapes": (None, STAND_INS + """
step = Function(lambda x: x)
for number in range(150):
    step(number % 5)
    pause()
"""),
}  # fmt: skip
REAL = {
    "jax: a list of arrays": (("live arrays", "history"), """
import jax.numpy as jnp
history = []
def log(x): history.append(x * 2)  # LEAK
for number in range(150):
    log(jnp.full(6000, float(number)))
    pause()
"""),
    "jax: a function of many shapes": (("tracing", "step"), """
import jax, jax.numpy as jnp
@jax.jit
def step(x): return (x * 2 + 1).sum()
for number in range(90):
    step(jnp.ones(number + 1))  # LEAK
    pause()
"""),
    "jax: clean": (None, """
import jax, jax.numpy as jnp
step = jax.jit(lambda w, x: w - 0.1 * (x * w).mean() * x)
w = jnp.ones(6000)
for number in range(150):
    w = step(w, jnp.full(6000, float(number % 7)))
    pause()
"""),
    "tensorflow: a function of Python numbers": (("tracing", "step"), """
import tensorflow as tf
@tf.function
def step(x): return tf.reduce_sum(tf.ones(10) * x + 1)
for number in range(90):
    step(number)  # LEAK
    pause()
"""),
    "tensorflow: clean": (None, """
import tensorflow as tf
@tf.function
def step(x): return tf.reduce_sum(tf.ones(10) * x + 1)
for number in range(150):
    step(tf.ones([number % 5 + 1, 10]))
    pause()
"""),
}  # fmt: skip


def watch(tmp_path, code):
    path = tmp_path / "program.py"
    path.write_text(code)
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, path.name], capture_output=True, text=True, cwd=tmp_path, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(found, expected, code):
    if expected is None:
        assert found == []
        return
    mark = "# LEAK" if "# LEAK" in code else "# TRACE"
    line = next(number for number, text in enumerate(code.splitlines(), 1) if mark in text)
    assert found and found[0][:3] == [*expected, f"program.py:{line}"], found


@pytest.mark.parametrize("name", STOOD_IN)
def test_what_a_framework_keeps_is_found_with_its_line(tmp_path, name):
    expected, code = STOOD_IN[name]
    check(watch(tmp_path, code), expected, code)


@pytest.mark.parametrize("name", REAL)
def test_what_the_framework_itself_keeps_is_found_with_its_line(tmp_path, name):
    library = name.partition(":")[0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    expected, code = REAL[name]
    check(watch(tmp_path, code), expected, code)


def test_the_advice_is_the_frameworks_own(tmp_path):
    (_, _, _, advice), *_ = watch(tmp_path, STOOD_IN["traces"][1])
    assert "pass tensors" in advice and "input_signature" in advice and "reduce_retracing" in advice


class Compiled:
    __module__ = "jaxlib.stand_in"
    __wrapped__ = staticmethod(pathlib.Path.exists)

    def _cache_size(self):
        return 7


class OtherModule:
    """Its `__module__` is no text, as some of JAX's classes have it."""

    __module__ = property(lambda self: "here")


def test_functions_are_asked_only_through_public_names():
    assert is_traced_kind(Compiled) and not is_traced_kind(OtherModule) and not is_traced_kind(dict)
    assert (count_traces(Compiled()), traced_name(Compiled())) == (7, "Path.exists")
    assert array_bytes([1]) is None and array_bytes(OtherModule()) is None
