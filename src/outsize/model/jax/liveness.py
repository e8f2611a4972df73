"""How much a program holds at its peak, if every array lives from its first write to its last read.

In: a closed jaxpr, which arguments are donated. Out: `Lived`: bytes of arguments, results and temporaries at the highest
moment, and memory over time. It is meant never to be below what XLA's own assignment of buffers takes: operators run in the
order of the program, and where XLA may choose, the choice that takes more is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from outsize.model.jax import scratch
from outsize.model.jax.fusion import HEAVY, IN_PLACE, REDUCTIONS, Fused, fuse
from outsize.model.jax.program import Operator, Program, Value, read

MARGIN = 0.15
"""What XLA's own order of operators may hold above the program's, as a part of the temporaries: 14 % in the worst of 27 steps
(benchmarks/results/2026-11-18-jax.md)."""


@dataclass(slots=True)
class Moment:
    """One operator of the program while it runs."""

    bytes: int
    """Temporaries alive."""
    line: str
    name: str


@dataclass(slots=True)
class Lived:
    """What a program holds."""

    arguments: list[int]
    """Bytes of each argument."""
    outputs: list[int]
    """Bytes of each result."""
    aliased: int
    """Bytes of results that are written into donated arguments."""
    constants: int
    temporaries: int
    """Bytes of temporaries at the highest moment."""
    alive: list[Value] = field(default_factory=list)
    """Temporaries at that moment, largest first."""
    moments: list[Moment] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    """What makes the sizes a guess."""

    @property
    def peak(self) -> int:
        return self.held + self.temporaries

    @property
    def held(self) -> int:
        """Bytes that are there all the time: arguments, results and constants."""
        return sum(self.arguments) + sum(self.outputs) - self.aliased + self.constants

    @property
    def bound(self) -> int:
        """The peak with what XLA's order and packing may add."""
        return self.held + int(self.temporaries * (1 + MARGIN))


def follow(closed: Any, donated: Sequence[bool] = ()) -> Lived:
    """What a closed jaxpr holds."""
    program = read(closed)
    pairs = _aliases(program, donated)
    return _Walk(program, pairs).run()


def _aliases(program: Program, donated: Sequence[bool]) -> dict[int, int]:
    """Position of a result -> that of the donated argument in whose memory it is: the first of the same size, as XLA does."""
    left = [number for number, given in enumerate(donated) if given]
    pairs = {}
    for number, value in enumerate(program.outputs):
        found = next((place for place in left if program.inputs[place].bytes == value.bytes), None)
        if found is not None:
            left.remove(found)
            pairs[number] = found
    return pairs


class _Walk:
    """One pass over a program."""

    def __init__(self, program: Program, pairs: dict[int, int], loop: bool = False) -> None:
        self.program, self.pairs, self.loop = program, pairs, loop
        self.fused: Fused = fuse(program)
        homes = [self.fused.home(value) for value in program.outputs]
        given = {id(value) for value in (*program.inputs, *program.constants)}
        self.free = given | ({id(value) for value in homes} if not loop else set())
        """ids of values that are counted elsewhere: arguments, constants, results."""
        self.last: dict[int, int] = {}
        for number, operator in enumerate(self.fused.operators):
            for value in self.fused.reads[id(operator)]:
                self.last[id(value)] = number
        self.numbers = {id(operator): number for number, operator in enumerate(self.fused.operators)}
        self._delay()
        self.unknown = set(program.unknown)

    def _delay(self) -> None:
        """What a product read last is held until the next has run and is transposed: XLA may run the first after it."""
        heavy = [number for number, operator in enumerate(self.fused.operators) if operator.name in HEAVY]
        after = {first: self._transposed(second) for first, second in pairwise(heavy)}
        self.last = {key: after.get(number, number) for key, number in self.last.items()}

    def _transposed(self, number: int) -> int:
        """Number of the operator that transposes the result of this one; its own where none does."""
        made = self.fused.operators[number].outputs
        copies = (
            place
            for place, operator in enumerate(self.fused.operators)
            if operator.name == "transpose" and any(value in self.fused.reads[id(operator)] for value in made)
        )
        return next(copies, number)

    def run(self) -> Lived:
        alive: dict[int, Value] = {}
        copies = [] if self.loop else self._copies()
        for value in copies:
            alive[id(value)] = value
            self.last[id(value)] = self.last.get(id(self.copied[id(value)]), len(self.fused.operators))
        held = sum(value.bytes for value in copies)
        best: tuple[int, list[Value]] = (held, list(copies))
        moments = []
        for number, operator in enumerate(self.fused.operators):
            new = [value for value in operator.outputs if self._takes(value)]
            beside = self.fused.written.get(id(operator), ())
            new += [value for value in beside if id(value) not in alive and number < self._end(value)]
            inner = self._inside(operator)
            dying = [value for value in self.fused.reads[id(operator)] if self.last.get(id(value)) == number]
            shared = self._shared(operator, new, dying)
            now = held + sum(value.bytes for value in new if id(value) not in shared) + sum(v.bytes for v in inner)
            moments.append(Moment(now, operator.line, operator.name))
            if now > best[0]:
                best = (now, [*alive.values(), *(v for v in new if id(v) not in shared), *inner])
            for value in new:
                alive[id(value)] = value
                held += value.bytes
                self.last.setdefault(id(value), self._end(value) if id(value) in self.fused.virtual else number)
            for key in [key for key in alive if self.last[key] <= number]:
                held -= alive.pop(key).bytes
        return self._lived(best, moments)

    def _end(self, value: Value) -> int:
        """Number of the last operator that reads a value without memory of its own."""
        return max(self.numbers.get(key, 0) for key in self.fused.ends[id(value)])

    def _lived(self, best: tuple[int, list[Value]], moments: list[Moment]) -> Lived:
        program = self.program
        return Lived(
            arguments=[value.bytes for value in program.inputs], outputs=[value.bytes for value in program.outputs],
            aliased=sum(program.outputs[number].bytes for number in self.pairs),
            constants=sum(value.bytes for value in program.constants), temporaries=best[0],
            alive=sorted(best[1], key=lambda value: -value.bytes), moments=moments, unknown=self.unknown,
        )  # fmt: skip

    def _takes(self, value: Value) -> bool:
        """True where a result of an operator needs memory that is not counted elsewhere."""
        return value.bytes > 0 and id(value) not in self.fused.virtual and id(self.fused.home(value)) not in self.free

    def _shared(self, operator: Operator, new: list[Value], dying: list[Value]) -> set[int]:
        """ids of results that are written where a dying input was."""
        if operator.name not in IN_PLACE and operator.name not in ("scan", "while"):
            return set()
        shared, left = set(), list(dying)
        for value in new:
            place = next((one for one in left if self._gives(one, value)), None)
            if place is not None:
                left.remove(place)
                shared.add(id(value))
        return shared

    def _gives(self, given: Value, value: Value) -> bool:
        if given.bytes != value.bytes:
            return False
        if not self.loop:
            return id(given) not in self.free
        if id(given) not in self.free:
            return True
        return any(  # the carry of a loop is updated where it is
            self.program.inputs[place] is given and self.fused.home(self.program.outputs[number]) is value
            for number, place in self.pairs.items()
        )

    def _copies(self) -> list[Value]:
        """Copies of donated arguments that are still read, for all the data's order says, when their memory is written.

        XLA:CPU makes these before it chooses an order. XLA:GPU chooses first and makes fewer.
        """
        self.copied: dict[int, Value] = {}
        if not self.pairs:
            return []
        before = self._ancestors()
        made = []
        for number, place in self.pairs.items():
            given, home = self.program.inputs[place], self.fused.home(self.program.outputs[number])
            writer = home.maker
            if writer is None or id(writer) not in before:
                continue
            readers = [o for o in self.fused.operators if given in self.fused.reads[id(o)] and o is not writer]
            if any(not before[id(writer)] >> self.numbers[id(o)] & 1 for o in readers):
                copy = Value(given.bytes, "", "copy of a donated argument")
                made.append(copy)
                self.copied[id(copy)] = given
        return made

    def _ancestors(self) -> dict[int, int]:
        """id of an operator -> bits of the operators whose results it needs."""
        before: dict[int, int] = {}
        for operator in self.fused.operators:
            bits = 0
            for value in self.fused.reads[id(operator)]:
                maker = value.maker
                if maker is not None and id(maker) in before:
                    bits |= before[id(maker)] | 1 << self.numbers[id(maker)]
            before[id(operator)] = bits
        return before

    # loops and branches

    def _inside(self, operator: Operator) -> list[Value]:
        """What an operator holds while it runs, beside what it reads and writes."""
        if operator.name == "scan":
            count, carry = operator.params["num_consts"], operator.params["num_carry"]
            body = self._body(operator.params["jaxpr"], count, carry)
            zeros = Value(scratch.beside(operator), operator.line, "zeros of stacks")
            return [*body, zeros]
        if operator.name == "while":
            consts, tests = operator.params["body_nconsts"], operator.params["cond_nconsts"]
            carry = len(operator.outputs)
            body = self._body(operator.params["body_jaxpr"], consts, carry)
            test = self._body(operator.params["cond_jaxpr"], tests, 0)
            return max((body, test), key=lambda values: sum(value.bytes for value in values))
        if operator.name == "cond":
            found = [self._branch(branch) for branch in operator.params["branches"]]
            return max(found, key=lambda values: sum(value.bytes for value in values))
        size = scratch.beside(operator)
        if operator.name in REDUCTIONS:
            size += sum(value.bytes for value in operator.inputs if id(self.fused.home(value)) in self.fused.virtual)
        return [Value(size, operator.line, f"scratch of {operator.name}")] if size else []

    def _branch(self, closed: Any) -> list[Value]:
        lived = _Walk(read(closed), {}).run()
        self.unknown |= lived.unknown
        return lived.alive

    def _body(self, closed: Any, constants: int, carry: int) -> list[Value]:
        """What one round of a loop holds beside its carry, its constants, and the stacks that it reads and writes."""
        program = read(closed)
        slices = program.inputs[constants + carry :]
        first = []
        for value in slices:  # a row of a stack is read like any cheap operator
            stack = Value(0, "", "stack")
            value.maker = Operator("dynamic_slice", [stack], [value])
            first.append(value.maker)
        program.inputs = program.inputs[: constants + carry]
        last = [Operator("carry", [value], []) for value in program.outputs[:carry]]
        last += [Operator("store", [value], []) for value in program.outputs[carry:]]
        program.operators = [*first, *program.operators, *last]
        pairs = {number: constants + number for number in range(carry)}
        outputs, program.outputs = program.outputs, []
        walk = _Walk(program, pairs, loop=True)
        program.outputs = outputs
        lived = walk.run()
        self.unknown |= lived.unknown
        return lived.alive
