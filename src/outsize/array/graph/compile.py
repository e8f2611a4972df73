"""Elementwise nodes as a program: which blocks it reads, its instructions in order, and which registers they share."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np

from outsize.array.graph.elementwise import Elementwise, Scalar
from outsize.array.graph.node import Node
from outsize.array.kernels.fused import Instruction, Program


def compile_program(root: Node, bindings: Container[Node], slice_bytes: int) -> Program:
    """The elementwise nodes that end in `root` and have its shape, as a program over what they read: that, and what is bound."""
    inside: list[Elementwise] = []
    leaves: list[Node] = []
    seen: set[int] = set()
    stack = [(root, False)]
    while stack:
        node, done = stack.pop()
        if done:
            assert isinstance(node, Elementwise)
            inside.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            if not isinstance(node, Elementwise) or node in bindings or node.shape != root.shape:
                leaves.append(node)
                continue
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(node.inputs))
    return _assign_registers(inside, leaves, root, slice_bytes)


def _assign_registers(inside: list[Elementwise], leaves: list[Node], root: Node, slice_bytes: int) -> Program:
    last_use = {id(arg): step for step, node in enumerate(inside) for arg in node.args}
    leaf_number = {id(leaf): number for number, leaf in enumerate(leaves)}
    where: dict[int, int] = {}
    registers: list[np.dtype[Any]] = []
    free: list[int] = []
    instructions = []
    for step, node in enumerate(inside):
        args: list[tuple[str, Any]] = []
        for arg in node.args:
            if isinstance(arg, Scalar):
                args.append(("scalar", arg.value))
            elif id(arg) in leaf_number:
                args.append(("leaf", leaf_number[id(arg)]))
            else:
                args.append(("register", where[id(arg)]))
        dying = {where[id(a)] for a in node.args if id(a) in where and last_use[id(a)] == step}
        if node.operation.in_place:
            free += sorted(dying)
        target = next((r for r in free if registers[r] == node.dtype), None)
        if target is None:
            target = len(registers)
            registers.append(node.dtype)
        else:
            free.remove(target)
        if not node.operation.in_place:
            free += sorted(dying)
        where[id(node)] = target
        instructions.append(Instruction(node.operation, tuple(args), target, node.operation.apply))
    result = where.get(id(root), -1)
    return Program(tuple(leaves), tuple(instructions), tuple(registers), root.dtype, result, slice_bytes)
