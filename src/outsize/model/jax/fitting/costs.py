"""How long a step takes beside another, counted from its jaxpr: an estimate that compares choices.

In: a closed jaxpr, a device's platform. Out: work, in bytes that memory could have moved in that time. Products and
convolutions count their floating-point operations, what runs again included; every array that is written counts its bytes
twice, since somebody reads it.
"""

from __future__ import annotations

import math
from typing import Any

from outsize.model.jax.fusion import fuse
from outsize.model.jax.program import Operator, Program, read

BALANCE = {1: 400, 2: 200, 4: 100}
"""Bytes of an element -> floating-point operations that a card does while its memory moves a byte: an H200's sheet, with
TensorFloat-32 for float32 as JAX has it by default."""
PRECISE = 12
"""The same in full float32: 54 TFLOP/s measured on an H200, whose memory moves 4.8 TB/s."""
PROCESSOR = 8
"""The same on a processor."""


def work_of(closed: Any, platform: str) -> float:
    """Bytes, or what takes as long."""
    return _work(read(closed), platform)


def _work(program: Program, platform: str) -> float:
    fused = fuse(program)
    written = sum(
        value.bytes for operator in fused.operators for value in operator.outputs if id(value) not in fused.virtual
    )
    return 2.0 * written + sum(
        _products(operator, platform) + _inside(operator, platform) for operator in fused.operators
    )


def _inside(operator: Operator, platform: str) -> float:
    """Work of a loop's rounds or of a branch; a `while` is taken to run once."""
    if operator.name == "scan":
        return float(operator.params["length"] * _work(read(operator.params["jaxpr"]), platform))
    if operator.name == "while":
        return _work(read(operator.params["body_jaxpr"]), platform)
    if operator.name == "cond":
        return max(_work(read(branch), platform) for branch in operator.params["branches"])
    return 0.0


def _products(operator: Operator, platform: str) -> float:
    """Bytes that memory moves while a product is computed."""
    if operator.name == "dot_general":
        (axes, _), (batch, _) = operator.params["dimension_numbers"]
        one, two = operator.shapes
        done: float = 2 * math.prod(one) * math.prod(two) / max(1, math.prod(one[axis] for axis in (*axes, *batch)))
    elif operator.name == "conv_general_dilated":
        outputs = operator.params["dimension_numbers"].rhs_spec[0]
        kernel = math.prod(operator.shapes[1]) / max(1, operator.shapes[1][outputs])
        done = 2 * kernel * sum(value.bytes for value in operator.outputs) / max(1, _element(operator))
    else:
        return 0.0
    return done / _balance(operator, platform)


def _element(operator: Operator) -> int:
    """Bytes of an element of the first operand."""
    return operator.inputs[0].bytes // max(1, math.prod(operator.shapes[0]))


def _balance(operator: Operator, platform: str) -> int:
    if platform == "cpu":
        return PROCESSOR
    size = _element(operator)
    precise = size >= 4 and "HIGHEST" in str(operator.params.get("precision"))
    return PRECISE if precise or size > 4 else BALANCE.get(size, PRECISE)
