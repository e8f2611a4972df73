"""Floating-point numbers in 8 or 4 bits: blocks of them, each with a scale of its own.

In: a flat tensor of floating-point numbers. Out: `Codes`, a quarter or an eighth of its bytes, and the numbers again, rounded.
Optimizer state spans many powers of ten, and a second moment that became zero would be divided by: so 8 bits are those of
float8 (e4m3), numbers that are all positive are kept as their roots, and none of those becomes zero. Weights and activations
are of one size in a block, so their 8 bits are steps of equal size. Work goes in pieces, so that little memory is needed beside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

BLOCK = 128
"""Numbers that share a scale."""

PIECE = 2**13
"""Numbers that are worked on at once, or a thirty-second of them: few calls, little memory."""

BESIDE = 16
"""Most bytes that the work holds beside numbers and codes, for each number of a piece."""

LARGEST = 448.0
"""Of float8 e4m3."""

TINIEST = 2.0**-9
"""Of float8 e4m3, above zero."""

SMALL = 4096
"""Tensors of fewer numbers are kept as they are: little is won, and norms and biases matter most."""

LEVELS = (-1.0, -0.7, -0.47, -0.3, -0.18, -0.09, -0.03, 0.0, 0.03, 0.09, 0.18, 0.3, 0.47, 0.7, 1.0)
"""What 4 bits of a number with a sign stand for: close together near zero, where most of them are."""


@dataclass(slots=True)
class Codes:
    """Numbers in fewer bits."""

    bits: int
    steps: bool
    """8 bits are steps of equal size, and not float8."""
    codes: Any
    scales: Any
    roots: bool = False
    """They are the roots of the numbers, which are all positive."""


def sizes_of(count: int, bits: int) -> tuple[int, int]:
    """(bytes of codes, number of scales) of so many numbers."""
    blocks = -(-count // BLOCK)
    return blocks * BLOCK * bits // 8, blocks


def piece_of(count: int) -> int:
    """Numbers of a piece, of so many."""
    return max(PIECE, -(-count // (32 * BLOCK)) * BLOCK)


def beside_of(count: int) -> int:
    """Most bytes that the work holds beside so many numbers and their codes."""
    return BESIDE * min(piece_of(count), count + BLOCK) + 4096


def narrow_share(bits: int, itemsize: int) -> float:
    """Bytes in codes over those of the numbers."""
    return (bits / 8 + 4 / BLOCK) / itemsize


def encode(values: Any, bits: int, steps: bool) -> Codes:
    """The codes of a flat tensor."""
    import torch

    size, blocks = sizes_of(values.numel(), bits)
    found = Codes(
        bits, steps, torch.empty(size, dtype=torch.uint8, device=values.device),
        torch.empty(blocks, dtype=torch.float32, device=values.device),
        roots=not steps and bool(values.numel()) and float(values.min()) >= 0,
    )  # fmt: skip
    for piece, codes, scales in _pieces(found, values):
        rows = torch.zeros(scales.numel(), BLOCK, device=values.device)
        rows.view(-1)[: piece.numel()].copy_(piece)
        scales.copy_(rows.abs().amax(1))
        rows = rows.div_(scales.clamp(min=1e-38)[:, None])
        codes.copy_(_to_codes(rows.sqrt_() if found.roots else rows, found).view(-1))
    return found


def _to_codes(rows: Any, kind: Codes) -> Any:
    """Of numbers between -1 and 1."""
    import torch

    if kind.bits == 8:
        if kind.steps:
            whole = rows.mul_(127).round()
            return whole.add_(rows.sign_().mul_(whole == 0)).to(torch.int8).view(torch.uint8)  # none becomes zero
        scaled = rows.mul_(LARGEST)
        if kind.roots:
            scaled = torch.where(scaled > 0, scaled.clamp(min=TINIEST), scaled)
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    if kind.roots:
        numbers = rows.mul_(16).round_().sub_(1).clamp_(0, 15).to(torch.uint8)
    else:
        levels = torch.tensor(LEVELS, device=rows.device)
        numbers = torch.bucketize(rows, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
    pairs = numbers.view(-1, 2)
    return pairs[:, 0] | (pairs[:, 1] << 4)


def decode(codes: Codes, out: Any) -> None:
    """The numbers, into a flat tensor."""
    import torch

    for piece, some, scales in _pieces(codes, out):
        if codes.bits == 8:
            rows = some.view(torch.int8 if codes.steps else torch.float8_e4m3fn).float().view(-1, BLOCK)
            rows = rows.div_(127.0 if codes.steps else LARGEST)
        else:
            numbers = torch.stack([some & 15, some >> 4], dim=1).view(-1, BLOCK)
            if codes.roots:
                rows = numbers.float().add_(1).div_(16)
            else:
                rows = torch.tensor(LEVELS, device=some.device)[numbers.int()]
        rows = rows.square_() if codes.roots else rows
        piece.copy_(rows.mul_(scales[:, None]).view(-1)[: piece.numel()])


def _pieces(codes: Codes, values: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(numbers, their codes, their scales), piece by piece."""
    piece = piece_of(values.numel())
    for number in range(math.ceil(values.numel() / piece)):
        start, stop = number * piece, min((number + 1) * piece, values.numel())
        blocks = slice(start // BLOCK, -(-stop // BLOCK))
        part = slice(blocks.start * BLOCK * codes.bits // 8, blocks.stop * BLOCK * codes.bits // 8)
        yield values[start:stop], codes.codes[part], codes.scales[blocks]
