"""Which values of a program are never in memory, because XLA computes them inside the operators that read them.

In: a program. Out: `Fused`: for each operator that remains, the arrays it reads and writes. The rules are those of XLA's
fusion, as far as memory goes: a reshape is another name of its input. A cheap operator is computed anew in every reader, if
all of them can take it in; then its inputs live as long as its readers need them. An expensive one goes into its only
reader.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from outsize.model.jax.program import Operator, Program, Value

NAMES = {
    "reshape", "squeeze", "expand_dims", "stop_gradient", "sharding_constraint", "optimization_barrier", "bitcast_convert_type",
    "pvary", "mesh_cast", "random_wrap", "random_unwrap", "layout_constraint", "pcast", "reduce_precision", "copy_p",
    "remat_opt_barrier",
}  # fmt: skip
"""Operators whose results are other names of their inputs, one for one."""
CHEAP = {
    "add", "add_any", "sub", "mul", "neg", "abs", "sign", "max", "min", "and", "or", "xor", "not", "eq", "ne", "lt", "le", "gt",
    "ge", "select_n", "select", "clamp", "convert_element_type", "floor", "ceil", "round", "is_finite", "square",
    "shift_left", "shift_right_logical", "shift_right_arithmetic", "iota", "broadcast_in_dim", "transpose", "slice", "pad",
    "rev", "dynamic_slice", "real", "imag", "complex", "conj", "split", "integer_pow", "copy", "population_count", "clz",
    "eq_to", "le_to", "lt_to", "nextafter", "broadcast", "one_minus_square",
}  # fmt: skip
EXPENSIVE = {
    "div", "rem", "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "pow", "sqrt", "rsqrt", "cbrt", "sin", "cos", "tan",
    "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc", "erf_inv", "lgamma", "digamma",
    "igamma", "igammac", "bessel_i0e", "bessel_i1e", "polygamma", "zeta",
}  # fmt: skip
REDUCTIONS = {
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin", "reduce"
}  # fmt: skip
HEAVY = {"dot_general", "conv_general_dilated"}
TAKES_IN = (
    CHEAP | EXPENSIVE | REDUCTIONS | NAMES | {"concatenate", "dynamic_update_slice", "store", "copy for a product"}
)
"""Operators that may compute their inputs while they read them."""
MOVES = {"transpose", "rev"}
IN_PLACE = (CHEAP | EXPENSIVE) - MOVES | {
    "scatter",
    "scatter-add",
    "scatter_add",
    "scatter_mul",
    "dynamic_update_slice",
    "sort",
}
"""Operators that may write where a dying input of the same size was."""
SPREADS = {"broadcast_in_dim", "iota", "broadcast"}


@dataclass(slots=True)
class Fused:
    """What remains of a program."""

    operators: list[Operator]
    """Those that write to memory, in order."""
    reads: dict[int, frozenset[Value]] = field(default_factory=dict)
    """id of an operator -> arrays it reads, through all that is computed inside it."""
    owner: dict[int, Value] = field(default_factory=dict)
    """id of a value -> the value in whose memory it is."""
    virtual: set[int] = field(default_factory=set)
    """ids of values without memory."""
    written: dict[int, list[Value]] = field(default_factory=dict)
    """id of a reduction -> values that it may have written to memory to read them, and that others may then read there."""
    ends: dict[int, frozenset[int]] = field(default_factory=dict)
    """id of a value without memory -> ids of the operators it ends in."""

    def home(self, value: Value) -> Value:
        """The value in whose memory this one is."""
        return self.owner.get(id(value), value)


def fuse(program: Program) -> Fused:
    """What of a program is in memory."""
    fused = Fused([])
    _name(program, fused)
    readers = _readers(program, fused)
    kept = {id(fused.home(value)) for value in program.outputs}
    _mark(program, fused, readers, kept)
    leaves: dict[int, frozenset[Value]] = {}

    def read_by(operator: Operator) -> frozenset[Value]:
        found: set[Value] = set()
        for value in operator.inputs:
            home = fused.home(value)
            found |= leaves[id(home)] if id(home) in fused.virtual else {home}
        return frozenset(found)

    for operator in program.operators:
        if operator.name in NAMES:
            continue
        reads = read_by(operator)
        for value in operator.outputs:
            if id(value) in fused.virtual:
                leaves[id(value)] = reads
        if not all(id(value) in fused.virtual for value in operator.outputs) or not operator.outputs:
            fused.operators.append(operator)
            fused.reads[id(operator)] = reads
            if operator.name in REDUCTIONS:
                fused.written[id(operator)] = _written(operator, fused)
    return fused


def _written(operator: Operator, fused: Fused) -> list[Value]:
    """What a reduction reads, or what goes into that, without memory of its own and with other readers."""
    read = [fused.home(value) for value in operator.inputs]
    before = [fused.home(v) for value in read if value.maker is not None for v in value.maker.inputs]
    both = {id(value): value for value in (*read, *before) if id(value) in fused.virtual and value.maker is not None}
    return [value for value in both.values() if len(fused.ends[id(value)]) > 1 and _joins(value.maker)]


def _joins(maker: Operator | None) -> bool:
    """True for an operator on several arrays: reading its result is cheaper than reading all of them again."""
    return maker is not None and maker.name not in SPREADS and len(maker.inputs) > 1


def _name(program: Program, fused: Fused) -> None:
    """Give values that are other names of their inputs to these."""
    for operator in program.operators:
        if operator.name in NAMES and len(operator.outputs) <= len(operator.inputs):
            for value, given in zip(operator.outputs, operator.inputs, strict=False):
                if value.bytes == given.bytes:
                    fused.owner[id(value)] = fused.home(given)


def _readers(program: Program, fused: Fused) -> dict[int, list[Operator]]:
    """id of a value with memory -> the operators that read it, under any name."""
    readers: dict[int, list[Operator]] = defaultdict(list)
    for operator in program.operators:
        if operator.name not in NAMES:
            for value in operator.inputs:
                readers[id(fused.home(value))].append(operator)
    return readers


def _mark(program: Program, fused: Fused, readers: dict[int, list[Operator]], kept: set[int]) -> None:
    """Mark values without memory, last operators first: how often one is computed depends on its readers."""
    ends = fused.ends
    for operator in reversed(program.operators):
        cheap = operator.name in CHEAP
        if operator.name in NAMES or not (cheap or operator.name in EXPENSIVE):
            continue
        for value in operator.outputs:
            users = readers[id(value)]
            if id(value) in kept or not users or not all(user.name in TAKES_IN for user in users):
                continue
            reached: set[int] = set()
            for user in users:
                inside = [out for out in user.outputs if id(out) in fused.virtual]
                reached |= frozenset().union(*(ends[id(out)] for out in inside)) if inside else {id(user)}
            spread = any(user.name in SPREADS for user in users)
            if cheap or (len(reached) == 1 and not spread):
                fused.virtual.add(id(value))
                ends[id(value)] = frozenset(reached)
