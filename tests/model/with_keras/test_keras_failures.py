"""Failures of TensorFlow, made for real inside its own limit and explained from the exception and from its text."""

import json
import os
import pathlib
import subprocess
import sys

import cgroup
import pytest

import outsize

ROOT = pathlib.Path(__file__).resolve().parents[3]
LIMITED = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "256", "TF_ENABLE_ONEDNN_OPTS": "0"}
"""On a processor too TensorFlow obeys a limit, as on a card; oneDNN would bring an allocator of its own."""
PROGRAM = """
import json
import keras, numpy as np, tensorflow as tf
import outsize

kept = tf.ones((3000, 1000))
try:
    with outsize.guard():
        {work}
except Exception as error:
    said = outsize.explain(f"{{type(error).__module__}}.{{type(error).__name__}}: {{error}}")
    failure = None if said.failure is None else [said.failure.framework, said.failure.shape]
    print(json.dumps({{"note": error.__notes__[-1], "failure": failure, "cause": said.cause.name}}))
"""
FIT = """layers = [keras.layers.Dense(384, "relu") for _ in range(6)]
        model = keras.Sequential([keras.Input((384,)), *layers, keras.layers.Dense(192)])
        model.compile("adam", "mse")
        model.fit(np.ones((30000, 384)), np.ones((30000, 192)), batch_size=30000, verbose=0)"""
WORKS = {
    "an array": ("tf.ones((300000, 512))", [300000, 512], "exactly 614,400,000 bytes"),
    "a fit": (FIT, [30000, 384], "exactly 46,080,000 bytes"),
    "a constant": ("tf.function(lambda: tf.constant(np.zeros((3075200, 512), 'f4')))()", None, "at most 2 GiB"),
}


def environment(**more):
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TF_CPP_MIN_LOG_LEVEL": "3", **more}


@pytest.mark.parametrize("name", WORKS)
def test_a_refused_allocation_is_explained_live_and_from_text_with_what_tensorflow_holds(tf, name):
    work, shape, said = WORKS[name]
    command = [sys.executable, "-c", PROGRAM.format(work=work)]
    done = subprocess.run(command, env=environment(**LIMITED), capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["failure"] == ["tensorflow", shape]
    assert said in found["note"]
    assert "arrays of TensorFlow hold" in found["note"] and "get_memory_info('CPU:0')" in found["note"]
    assert "float32[3000, 1000]: `kept`" in found["note"]


def test_a_graph_that_is_too_large_is_no_lack_of_memory_and_the_way_out_is_an_argument():
    texts = (
        "ValueError: Cannot create a tensor proto whose content is larger than 2GB.",
        "ValueError: GraphDef cannot be larger than 2GB.",
        "[libprotobuf ERROR message_lite.cc:449] tensorflow.GraphDef exceeded maximum protobuf size of 2GB: 2468012345",
    )
    for text in texts:
        found = outsize.explain(text)
        assert found.cause.name == "request larger than the limit" and "2 GiB" in found.cause.text
        assert "argument" in found.remedies[0].name


def test_a_keras_fit_that_a_container_kills_is_explained_by_run(tf, tmp_path):
    (tmp_path / "train.py").write_text(
        "import keras, numpy as np\n" + FIT.replace("\n        ", "\n").replace("30000", "400000")
    )
    command = [sys.executable, "-m", "outsize", "run", str(tmp_path / "train.py")]
    done = cgroup.run(command, 1300 << 20, env=environment())
    text = done.stdout + done.stderr
    assert "container" in text and "1.27 GiB" in text, text[-3000:]


def test_memory_says_what_tensorflow_holds_and_asks_nothing_of_one_that_has_not_started(tf):
    program = "import tensorflow as tf, outsize; a = outsize.memory().frameworks; x = tf.ones(10**6); print(a, outsize.memory())"
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert done.stdout.startswith("() "), done.stderr
    assert "TensorFlow in this process, RAM: in use " in done.stdout


@pytest.mark.parametrize("name", ["data", "picture", "update", "shape", "larger"])
def test_the_plain_script_of_the_five_tensors_fails_and_ours_works(tf, name):
    script = ROOT / "examples" / "five_tensors" / "in_tensorflow.py"
    plain, ours = (
        subprocess.run(
            [sys.executable, str(script), name, way], env=environment(SCALE="16"), capture_output=True, text=True
        )
        for way in ("plain", "ours")
    )
    assert plain.returncode == 1 and "OOM when allocating tensor with shape" in plain.stdout
    assert ours.returncode == 0, ours.stdout + ours.stderr
