"""What operators of XLA take beside their operands and results.

In: an operator. Out: bytes, on the safe side. A convolution is given operands in the library's own layout; sums along an
axis and sorts work in a few copies.
"""

from __future__ import annotations

from outsize.model.jax.program import Operator

COPIES = {
    "cumsum": 2, "cumprod": 2, "cummax": 2, "cummin": 2, "cumlogsumexp": 2, "top_k": 2, "approx_top_k": 2, "sort": 1,
    "random_bits": 2, "threefry2x32": 2, "rng_bit_generator": 1, "random_gamma": 4, "fft": 1, "reduce_window": 1,
    "reduce_window_max": 1, "reduce_window_sum": 1, "select_and_gather_add": 2,
    "eigh": 3, "eig": 4, "svd": 4, "qr": 2, "geqrf": 2, "lu": 2, "cholesky": 1, "triangular_solve": 1, "householder_product": 2,
    "schur": 3, "hessenberg": 2,
}  # fmt: skip
"""Operator -> how often its largest operand or result is held once more."""


def beside(operator: Operator) -> int:
    """Bytes that an operator takes for itself."""
    if operator.name == "conv_general_dilated":
        return _convolution(operator)
    if operator.name == "select_and_scatter_add":  # places of the largest are found with one whole number per axis
        return (1 + len(operator.shapes[0])) * max(value.bytes for value in operator.outputs)
    if operator.name == "scan":  # stacks begin as zeros that are copied, once for each size
        stacks = operator.outputs[operator.params["num_carry"] :]
        return sum({value.bytes for value in stacks})
    sizes = [value.bytes for value in (*operator.inputs, *operator.outputs)]
    return COPIES.get(operator.name, 0) * max(sizes, default=0)


def _convolution(operator: Operator) -> int:
    """Weight gradients and inputs of other layouts are transposed first."""
    numbers = operator.params["dimension_numbers"]
    specs = [tuple(spec) for spec in (numbers.lhs_spec, numbers.out_spec)]
    plain = [batch == 0 and features == len(rest) + 1 for batch, features, *rest in specs]
    return 0 if all(plain) else sum(value.bytes for value in (*operator.inputs, *operator.outputs))
