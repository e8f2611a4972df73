"""TensorFlow and Keras, imported when they are first needed, and the private parts of them that are used."""

from __future__ import annotations

import os
import re
from typing import Any

from outsize.core.errors import OutsizeError
from outsize.core.extras import need

FLOOR = "2.16"
"""The oldest TensorFlow that works: the first with Keras 3."""


def tensorflow() -> Any:
    """TensorFlow, or one sentence that says how to get it."""
    tf = need("tensorflow", "a Keras or TensorFlow step")
    if _numbers(str(tf.__version__)) < _numbers(FLOOR):
        raise OutsizeError(
            f"TensorFlow {tf.__version__} is too old: Outsize needs TensorFlow {FLOOR} or newer, with Keras 3"
        )
    return tf


def keras() -> Any:
    """Keras 3 on TensorFlow, or one sentence."""
    tensorflow()
    found = need("keras", "a Keras model")
    if not str(found.__version__).startswith("3."):
        raise OutsizeError(f"Keras {found.__version__} is too old: Outsize needs Keras 3")
    if found.backend.backend() != "tensorflow":
        raise OutsizeError(
            f"Keras runs on {found.backend.backend()} here: Outsize follows Keras models on TensorFlow; "
            "KERAS_BACKEND=tensorflow chooses it, before Keras is imported"
        )
    return found


def threads_of_operators() -> int:
    """Threads among which TensorFlow shares out the operators of a graph."""
    return int(tensorflow().config.threading.get_inter_op_parallelism_threads()) or os.cpu_count() or 1


def is_model(given: Any) -> bool:
    return any(
        kind.__module__.startswith("keras.src.models") and kind.__name__ == "Model" for kind in type(given).__mro__
    )


def graph_of(model: Any) -> Any:
    """The graph of layers of a functional or sequential model that Keras runs; None where the model's own code calls layers."""
    found = getattr(model, "_functional", None) or model
    own = next((kind for kind in type(found).__mro__ if "call" in vars(kind)), None)
    if own is None or own.__module__ != "keras.src.models.functional" or not hasattr(found, "_run_through_graph"):
        return None
    sequential = next(kind for kind in type(model).__mro__ if "call" in vars(kind))
    return found if sequential.__module__ in (own.__module__, "keras.src.models.sequential") else None


def not_recorded() -> Any:
    """A context in which no tape records what is computed."""
    tensorflow()
    from tensorflow.python.eager import record

    return record.stop_recording()


def flatten(data: Any) -> list[Any]:
    """Leaves of nested data, without None."""
    return [leaf for leaf in tensorflow().nest.flatten(data) if leaf is not None]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
