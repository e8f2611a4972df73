"""The scripts of examples/five_tensors, here the one in torch; those in JAX and TensorFlow run where these are."""

import os
import pathlib
import subprocess
import sys

import pytest
from effort import long

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "examples" / "five_tensors" / "in_torch.py"


@pytest.mark.parametrize("name", ["data", "picture", "update", "shape", "larger"])
def test_the_plain_script_fails_and_the_line_of_ours_works(name):
    if not long():
        pytest.skip("files of 800 MB: scripts/check --long")
    env = {**os.environ, "SCALE": "8"}
    plain, ours = (
        subprocess.run([sys.executable, str(SCRIPT), name, way], env=env, capture_output=True, text=True)
        for way in ("plain", "ours")
    )
    assert plain.returncode == 1 and "can't allocate memory: you tried to allocate" in plain.stdout
    assert ours.returncode == 0, ours.stdout + ours.stderr
