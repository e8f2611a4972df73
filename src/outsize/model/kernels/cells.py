"""GRU and plain recurrent layers as torch runs them on a CPU: a cell for each step, whose outputs live until the layer ends.

In: what a layer is given. Out: its results, by the operators that torch's own loop calls, in its order. The decomposition for
compilers computes the same with other operators, and lets go of outputs that this loop still holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Cell = Callable[[Any, Any, Any, Any], Any]
"""(a step's gates of the input, hidden state, weight and bias of the hidden state) -> the next hidden state."""


def run_cells(
    kind: str, x: Any, state: Any, weights: Any, biases: bool, layers: int, dropout: float, train: bool, both: bool,
    first: bool,
) -> Any:  # fmt: skip
    """A layer of `gru`, `rnn_tanh` or `rnn_relu`."""
    sides, each = (2 if both else 1), (4 if biases else 2)
    x = x.transpose(0, 1) if first else x
    hidden, ends = state.unbind(0), []
    for layer in range(layers):
        outs, held = [], []
        for side in range(sides):
            index = layer * sides + side
            some = [*weights[index * each : (index + 1) * each], None, None]
            steps = list(torch.nn.functional.linear(x, some[0], some[2]).unbind(0))
            out = _steps(CELLS[kind], steps[::-1] if side else steps, hidden[index], some)
            ends.append(out[-1])
            held.append(out)  # until both directions are joined
            outs.append(torch.stack(out[::-1] if side else out))
        x = outs[0] if sides == 1 else torch.cat(outs, -1)
        del outs, held, out, steps
        if dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    return (x.transpose(0, 1) if first else x), torch.stack(ends)


def _steps(cell: Cell, steps: list[Any], hidden: Any, weights: list[Any]) -> list[Any]:
    out = []
    for gates in steps:
        hidden = cell(gates, hidden, weights[1], weights[3])
        out.append(hidden)
    return out


def _gru(gates: Any, hidden: Any, weight: Any, bias: Any) -> Any:
    of_input = gates.unsafe_chunk(3, 1)
    of_hidden = torch.nn.functional.linear(hidden, weight, bias).unsafe_chunk(3, 1)
    reset = of_hidden[0].add_(of_input[0]).sigmoid_()
    update = of_hidden[1].add_(of_input[1]).sigmoid_()
    new = of_input[2].add(of_hidden[2].mul_(reset)).tanh_()
    return (hidden - new).mul_(update).add_(new)


def _tanh(gates: Any, hidden: Any, weight: Any, bias: Any) -> Any:
    return torch.nn.functional.linear(hidden, weight, bias).add_(gates).tanh()


def _relu(gates: Any, hidden: Any, weight: Any, bias: Any) -> Any:
    return torch.nn.functional.linear(hidden, weight, bias).add_(gates).relu()


CELLS: dict[str, Cell] = {"gru": _gru, "rnn_tanh": _tanh, "rnn_relu": _relu}
"""What one step computes."""
