"""Failures of JAX, made for real inside a limit and explained from the exception and from its text; what JAX holds is read."""

import json
import os
import pathlib
import subprocess
import sys

import cgroup
import pytest

jax = pytest.importorskip("jax", reason="JAX is in the extra outsize[jax]")

ROOT = pathlib.Path(__file__).resolve().parents[3]
PROGRAM = """
import json, pathlib, resource
import jax, jax.numpy as jnp
import outsize

kept = jnp.ones((3000, 1000))
words = pathlib.Path("/proc/self/status").read_text().split()
taken = int(words[words.index("VmData:") + 1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (taken + 2**28, resource.RLIM_INFINITY))
try:
    with outsize.guard():
        {work}
except Exception as error:
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    said = outsize.explain(f"{{type(error).__module__}}.{{type(error).__name__}}: {{error}}")
    print(json.dumps({{"note": error.__notes__[-1], "asked": said.failure.requested_bytes, "cause": said.cause.name}}))
"""
WORKS = {
    "an array": ("jnp.ones((3000000, 100)).block_until_ready()", 1_200_000_000, "1.12 GiB"),
    "a step": (
        "jax.jit(jax.grad(lambda w, x: jnp.tanh(x @ w).sum()))(jnp.ones((64, 30000)), jnp.ones((9000, 64))).block_until_ready()",
        None,
        "",
    ),
    "all pairs": (
        "x = jnp.arange(50001.0); jax.vmap(lambda a: jnp.abs(a - x))(x).block_until_ready()",
        4 * 50001**2,
        "50,001",
    ),
}


@pytest.mark.parametrize("name", WORKS)
def test_a_refused_allocation_is_explained_live_and_from_text_with_what_jax_holds(name):
    work, asked, said = WORKS[name]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", PROGRAM.format(work=work)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert asked is None or found["asked"] == asked
    assert said in found["note"]
    assert "ulimit -d" in found["note"] or "one number for every pair" in found["note"]
    assert "arrays of JAX hold" in found["note"] and "jax.live_arrays()" in found["note"]
    assert "float32[3000, 1000]: `kept`" in found["note"]


TOO_LARGE = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import serialize_executable
import outsize

found = []
array = np.random.default_rng(0).random(540_000_000, dtype="float32")
program = jax.jit(lambda x: x + jnp.asarray(array).sum()).lower(1.0)
compiled = program.compile()
for write in (
    lambda: serialize_executable.serialize(compiled),
    lambda: program.compiler_ir("hlo").as_serialized_hlo_module_proto(),
    lambda: jax.jit(jax.jacobian(jnp.tanh))(jnp.ones((2000, 2000))).block_until_ready(),
):
    try:
        with outsize.guard():
            write()
    except jax.errors.JaxRuntimeError as error:
        said = outsize.explain(f"{type(error).__module__}.{type(error).__name__}: {error}")
        ways = [way.name for way in said.remedies]
        found.append([str(error), error.__notes__[-1], said.cause.name, said.cause.text, ways])
print(json.dumps(found))
"""


def test_a_program_that_is_too_large_is_explained_live_and_from_text():
    # JAX hands captured arrays to the run as they are; a program with more than 2 GiB of them cannot be written
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS": "false"}
    done = subprocess.run([sys.executable, "-c", TOO_LARGE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    executable, program, run = json.loads(done.stdout)
    for message, note, cause, text, ways in (executable, program):
        assert "Failed to serialize" in message
        assert cause == "request larger than the limit" and "at most 2 GiB" in text and "at most 2 GiB" in note
        assert len(ways) == 1 and "as an argument" in ways[0] and "as an argument" in note
        assert "could not write its program as one message" in note
        assert "2.01 GiB  float32[540000000]: `array`" in note
    message, note, cause, text, ways = run
    assert "Out of memory allocating 64000000000000 bytes" in message
    assert cause == "request larger than the device" and "58.21 TiB" in text  # a text does not tell the device
    assert "cause: request larger than the machine" in note and "58.21 TiB is larger than all the RAM" in note
    assert "corrupt" not in note + text and "work through it in pieces" in ways


def test_a_program_written_by_export_that_is_too_large_is_known_by_its_traceback():
    import outsize

    last = "flatbuffers.builder.BuilderSizeError: flatbuffers: cannot grow buffer beyond 2 gigabytes"
    text = f"""Traceback (most recent call last):
  File "/usr/lib/python3/site-packages/jax/_src/export/serialization.py", line 190, in _serialize_exported
    mlir_module_serialized = builder.CreateByteVector(exp.mlir_module_serialized)
{last}"""
    found = outsize.explain(text)
    assert found.cause.name == "request larger than the limit" and "as an argument" in found.remedies[0].name
    assert outsize.explain(last).failure is None  # others write with FlatBuffers too


TRAINING = """
import jax, jax.numpy as jnp

params = [0.01 * jnp.ones((512, 512)) for _ in range(8)]


def loss(params, x):
    for weights in params:
        x = jnp.tanh(x @ weights)
    return (x**2).mean()


step = jax.jit(lambda params, x: jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x)))
jax.block_until_ready(step(params, jnp.ones((300000, 512))))
"""


def test_a_training_that_a_container_kills_is_explained_by_run(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    command = [sys.executable, "-m", "outsize", "run", str(tmp_path / "train.py")]
    done = cgroup.run(command, 1300 << 20, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    text = " ".join((done.stdout + done.stderr).split())
    assert done.status == 137 and done.killed, text[-3000:]
    assert "cause: limit" in text and "the memory limit of 1.27 GiB of its container" in text
    # XLA reserves a program's 5.15 GiB of temporaries at once, beside 0.58 GiB of the batch and JAX itself
    asked = float(text.split("and had asked for ")[1].split(" GiB")[0])
    assert 5.7 < asked < 6.5
    assert "optax.MultiSteps" in text and "jax.checkpoint(loss)" in text


def test_memory_says_what_jax_holds_and_asks_nothing_of_a_jax_that_has_not_started():
    program = (
        "import jax, outsize; a = outsize.memory().frameworks; x = jax.numpy.ones(10**6); print(a, outsize.memory())"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.stdout.startswith("() "), done.stderr
    assert "JAX in this process, RAM: in use 3.81 MiB (jax.live_arrays())" in done.stdout


def test_batches_of_a_data_source_are_arrays_of_jax_in_order(tmp_path):
    import numpy as np

    import outsize

    values = np.arange(100 * 4, dtype="float32").reshape(100, 4)
    np.save(tmp_path / "x.npy", values)
    source = outsize.DataSource(tmp_path / "x.npy", np.arange(100), budget="1MiB")
    batches = list(source.to_jax(32, device=jax.devices()[0]))
    assert [len(labels) for _, labels in batches] == [32, 32, 32, 4]
    assert all(isinstance(part, jax.Array) for batch in batches for part in batch)
    assert np.array_equal(np.concatenate([rows for rows, _ in batches]), values)
    assert sum(len(rows) for rows, _ in source.to_jax(32, shuffle=True, drop_last=True)) == 96


def test_a_data_source_is_a_random_access_source_of_grain(tmp_path):
    grain = pytest.importorskip("grain")
    import numpy as np

    import outsize

    np.save(tmp_path / "x.npy", np.arange(20.0))
    dataset = grain.MapDataset.source(outsize.DataSource(tmp_path / "x.npy", budget="1MiB")).shuffle(seed=1).batch(5)
    assert sorted(np.concatenate(list(dataset)).tolist()) == list(range(20))


@pytest.mark.parametrize("name", ["data", "picture", "update", "shape", "larger"])
def test_the_plain_script_of_the_five_tensors_fails_and_ours_works(name):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "SCALE": "16"}
    script = ROOT / "examples" / "five_tensors" / "in_jax.py"
    plain, ours = (
        subprocess.run([sys.executable, str(script), name, way], env=env, capture_output=True, text=True)
        for way in ("plain", "ours")
    )
    refused = ("Out of memory allocating", "YNNPACK operation failed")
    assert plain.returncode == 1 and any(words in plain.stdout for words in refused)
    assert ours.returncode == 0, ours.stdout + ours.stderr


def test_a_kernel_library_that_got_no_memory_is_known_by_its_own_words():
    import outsize

    error = "jax.errors.JaxRuntimeError: INTERNAL: Error dispatching computation: YNNPACK operation failed: error"
    assert outsize.explain(f"allocate of <4> failed.\n{error}").failure.framework == "jax"
    assert outsize.explain(error).failure is None  # it fails for other reasons too
