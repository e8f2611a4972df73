"""A jaxpr as one list of operators on values, calls opened up.

In: a closed jaxpr. Out: `Program`: values with their bytes and operators in order. Functions inside (jit, remat, custom
derivatives, shard_map) become part of the list, since XLA opens them too. Loops and branches stay one operator each; what
they hold inside is found by `liveness`. Equal operators on equal values become one, and what nobody reads is dropped, as XLA
does both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from outsize.model.jax import private_parts as parts

CALLS = {
    "pjit": "jaxpr", "jit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat_call": "call_jaxpr",
    "checkpoint": "jaxpr", "remat2": "jaxpr", "remat": "jaxpr", "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr", "shard_map": "jaxpr", "xla_call": "call_jaxpr",
    "custom_lin": "jaxpr", "run_state": "jaxpr", "core_closed_call": "call_jaxpr",
}  # fmt: skip
"""Operators that are functions -> the parameter with their body."""
REMAT = ("checkpoint", "remat2", "remat")
LOOPS = ("scan", "while", "cond")
UNKNOWN = {
    "pure_callback": "a callback to Python", "io_callback": "a callback to Python", "ffi_call": "a foreign function",
    "custom_call": "a foreign function", "pallas_call": "a Pallas kernel", "tpu_custom_call": "a foreign function",
    "xla_pmap": "pmap", "infeed": "infeed",
}  # fmt: skip
"""Operators whose own memory nobody outside them knows."""


@dataclass(slots=True, eq=False)
class Value:
    """One array of the program."""

    bytes: int
    line: str = ""
    name: str = ""
    """The operator that made it, or the argument's name."""
    kind: str = "temporaries"
    maker: Operator | None = None
    """None for arguments and constants."""


@dataclass(slots=True, eq=False)
class Operator:
    """One step of the program."""

    name: str
    inputs: list[Value]
    outputs: list[Value]
    params: dict[str, Any] = field(default_factory=dict)
    line: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of its inputs."""


@dataclass(slots=True)
class Program:
    """Operators in order, between the values that come in and those that go out."""

    inputs: list[Value]
    constants: list[Value]
    operators: list[Operator]
    outputs: list[Value]
    unknown: set[str] = field(default_factory=set)
    """What makes the sizes a guess, a few words each."""


def read(closed: Any) -> Program:
    return _Reader().read(closed)


class _Reader:
    def __init__(self) -> None:
        self.operators: list[Operator] = []
        self.unknown: set[str] = set()
        self.known: dict[Any, list[Value]] = {}
        """Operator with its inputs -> its results: the same again is the same value."""
        self.constants: dict[int, Value] = {}

    def read(self, closed: Any) -> Program:
        jaxpr = parts.inner_jaxpr(closed)
        inputs = [self._value(var.aval, "argument") for var in jaxpr.invars]
        values = self._open(jaxpr, parts.constants_of(closed), inputs)
        made = Program(inputs, list(self.constants.values()), self.operators, values, self.unknown)
        return _moved_in_time(_without_dead(made))

    def _value(self, aval: Any, name: str, line: str = "") -> Value:
        size = parts.bytes_of(aval)
        if size is None:
            self.unknown.add("a size that is not a number")
        return Value(size or 0, line, name)

    def _open(self, jaxpr: Any, constants: Iterable[Any], inputs: list[Value]) -> list[Value]:
        """Append the operators of a jaxpr; its results."""
        here: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, value in zip(jaxpr.constvars, constants, strict=False):
            here[var] = self._constant(var, value)
        for var in jaxpr.constvars:
            here.setdefault(var, self._value(var.aval, "constant"))

        def of(atom: Any) -> Value:
            return self._literal(atom) if parts.is_literal(atom) else here[atom]

        for equation in jaxpr.eqns:
            made = self._equation(equation, [of(atom) for atom in equation.invars])
            here.update(
                (var, value) for var, value in zip(equation.outvars, made, strict=True) if not parts.is_dropped(var)
            )
        return [of(atom) for atom in jaxpr.outvars]

    def _constant(self, var: Any, value: Any) -> Value:
        if id(value) not in self.constants:
            found = self._value(var.aval, "constant")
            found.kind = "constants"
            self.constants[id(value)] = found
        return self.constants[id(value)]

    def _literal(self, atom: Any) -> Value:
        key = ("literal", str(atom.aval), str(atom.val))
        if key not in self.known:
            self.known[key] = [Value(0, "", "literal", "constants")]
        return self.known[key][0]

    def _equation(self, equation: Any, inputs: list[Value]) -> list[Value]:
        name = str(equation.primitive)
        name = getattr(equation.primitive, "name", name)
        body = equation.params.get(CALLS[name]) if name in CALLS else None
        if body is not None:
            if name in REMAT and equation.params.get("differentiated") and equation.params.get("prevent_cse", True):
                inputs = self._barrier(inputs)
            return self._open(parts.inner_jaxpr(body), parts.constants_of(body), inputs)
        if name in UNKNOWN:
            self.unknown.add(UNKNOWN[name])
        key = self._key(name, equation, inputs)
        if key is not None and key in self.known:
            return self.known[key]
        line = parts.line_of(equation)
        if name == "dot_general":
            inputs = self._batch_first(equation, inputs, line)
        outputs = [self._value(var.aval, name, line) for var in equation.outvars]
        shapes = tuple(tuple(getattr(atom.aval, "shape", ())) for atom in equation.invars)
        params = dict(equation.params)
        if name == "scan":
            params["num_consts"], params["num_carry"] = parts.scan_counts(equation)
        if name == "device_put" and len(inputs) == 1:
            came, goes = parts.is_away(equation.invars[0].aval), parts.is_away(equation.outvars[0].aval)
            params["loads"], params["sends"] = came and not goes, goes and not came
        self._add(Operator(name, inputs, outputs, params, line, shapes))
        if key is not None:
            self.known[key] = outputs
        return outputs

    def _add(self, made: Operator) -> list[Value]:
        for value in made.outputs:
            value.maker = made
        self.operators.append(made)
        return made.outputs

    def _batch_first(self, equation: Any, inputs: list[Value], line: str) -> list[Value]:
        """Operands of a product with their batch axes in front: XLA copies those that are not, and keeps the copies."""
        contracted, batched = equation.params["dimension_numbers"]
        found = []
        for value, atom, axes, batch in zip(inputs, equation.invars, contracted, batched, strict=True):
            rank = len(atom.aval.shape)
            order = (*batch, *(axis for axis in range(rank) if axis not in batch))
            free = [axis for axis in range(rank) if axis not in axes and axis not in batch]
            plain = ([*batch, *free, *axes], [*batch, *axes, *free])
            if list(range(rank)) in [list(map(int, one)) for one in plain]:
                found.append(value)
                continue
            key = ("batch first", order, id(value))
            if key not in self.known:
                copy = Value(value.bytes, line, "copy for a product")
                self.known[key] = self._add(Operator(copy.name, [value], [copy], line=line))
            found += self.known[key]
        return found

    def _barrier(self, inputs: list[Value]) -> list[Value]:
        """The same values under other names, so that what is computed again is not taken for what was computed before."""
        outputs = [Value(value.bytes, value.line, "optimization_barrier") for value in inputs]
        return self._add(Operator("optimization_barrier", inputs, outputs))

    def _key(self, name: str, equation: Any, inputs: list[Value]) -> Any:
        if name in LOOPS or name in UNKNOWN or equation.effects:
            return None
        said = str(sorted((key, str(value)) for key, value in equation.params.items()))
        return name, said, tuple(map(id, inputs)), str([var.aval for var in equation.outvars])


def _without_dead(program: Program) -> Program:
    """Only what the results, or the outside, need."""
    needed = {id(value) for value in program.outputs}
    kept = []
    for operator in reversed(program.operators):
        effects = operator.name in UNKNOWN
        if effects or any(id(value) in needed for value in operator.outputs):
            kept.append(operator)
            needed.update(id(value) for value in operator.inputs)
    program.operators = kept[::-1]
    return program


def _moved_in_time(program: Program) -> Program:
    """What goes to the host goes when it is made, and comes back just before it is read: XLA orders such copies so."""
    sent: dict[int, list[Operator]] = defaultdict(list)
    for operator in program.operators:
        if operator.params.get("sends"):
            sent[id(operator.inputs[0])].append(operator)
    ordered: list[Operator] = []
    waiting: dict[int, Operator] = {}
    for operator in program.operators:
        if operator.params.get("loads"):
            waiting[id(operator.outputs[0])] = operator
        elif not operator.params.get("sends") or operator.inputs[0].maker is None:
            ordered += [waiting.pop(id(value)) for value in operator.inputs if id(value) in waiting]
            ordered.append(operator)
            ordered += [one for value in operator.outputs for one in sent[id(value)]]
    program.operators = [*ordered, *waiting.values()]
    return program
