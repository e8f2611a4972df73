"""These tests need TensorFlow, too large for the usual environment: `scripts/framework_tests` runs them in one of its own."""

import os
import pathlib
import sys

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture(scope="session")
def tf():
    return pytest.importorskip(
        "tensorflow", reason="TensorFlow is not installed: scripts/framework_tests runs these tests"
    )


@pytest.fixture
def models(tf):
    import keras
    import keras_models

    keras.utils.set_random_seed(0)
    return keras_models
