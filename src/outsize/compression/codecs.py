"""How a weight is stored in fewer bytes: a narrower dtype, whole numbers with a scale for each row or group.

A codec is a frozen value. It is stored with the model, so that a file says how its numbers are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

GROUP = 32
"""Numbers that share a scale in 4 bits."""
CLIPS = (1.0, 0.92, 0.84, 0.76)
"""Shares of the largest number of a group that the scale may end at: large numbers are rare, and a shorter scale is finer."""


@dataclass(frozen=True, slots=True)
class Narrow:
    """A narrower floating-point dtype."""

    name: str
    """bfloat16"""
    dtype: str
    """What is computed with."""

    trains: ClassVar[tuple[str, ...]] = ("narrow",)

    def encode(self, tensor: Any) -> dict[str, Any]:
        import torch

        return {"narrow": tensor.to(getattr(torch, self.name)).contiguous()}

    def decode(self, stored: dict[str, Any]) -> Any:
        import torch

        return stored["narrow"].to(getattr(torch, self.dtype))


@dataclass(frozen=True, slots=True)
class RowScaled:
    """8 bits, whole numbers or float8, and one scale for each row."""

    name: str
    """int8 or float8"""
    dtype: str

    trains: ClassVar[tuple[str, ...]] = ()

    def encode(self, tensor: Any) -> dict[str, Any]:
        import torch

        rows = tensor.float().reshape(tensor.shape[0], -1)
        most = rows.abs().amax(1).clamp_min(1e-12)
        if self.name == "int8":
            scale = most / 127
            codes = (rows / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        else:
            kind = torch.float8_e4m3fn
            scale = most / torch.finfo(kind).max
            codes = (rows / scale[:, None]).to(kind)
        return {"codes": codes.reshape(tensor.shape), "scale": scale.to(getattr(torch, self.dtype))}

    def decode(self, stored: dict[str, Any]) -> Any:
        codes, scale = stored["codes"], stored["scale"]
        return codes.to(scale.dtype) * scale.reshape(-1, *[1] * (codes.dim() - 1))


@dataclass(frozen=True, slots=True)
class Grouped:
    """4 bits, two numbers in a byte, and one bfloat16 scale for each group of numbers."""

    name: str
    """int4"""
    dtype: str
    shape: tuple[int, ...]

    trains: ClassVar[tuple[str, ...]] = ()

    def encode(self, tensor: Any) -> dict[str, Any]:
        import torch

        flat = tensor.float().flatten()
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % GROUP))
        groups = flat.reshape(-1, GROUP)
        most = groups.abs().amax(1).clamp_min(1e-12)
        best = torch.full_like(most, torch.inf)
        scale = most / 7
        for clip in CLIPS:
            tried = (most * clip / 7).bfloat16().float()
            error = (_round4(groups, tried) * tried[:, None] - groups).square().sum(1)
            scale = torch.where(error < best, tried, scale)
            best = torch.minimum(best, error)
        codes = (_round4(groups, scale) + 8).to(torch.uint8).flatten()
        return {"codes": codes[::2] | codes[1::2] << 4, "scale": scale.bfloat16()}

    def decode(self, stored: dict[str, Any]) -> Any:
        import torch

        codes, scale = stored["codes"], stored["scale"].to(getattr(torch, self.dtype))
        pairs = torch.stack([codes & 15, codes >> 4], 1).reshape(-1, GROUP)
        return ((pairs.to(scale.dtype) - 8) * scale[:, None]).flatten()[: math.prod(self.shape)].reshape(self.shape)


def _round4(groups: Any, scale: Any) -> Any:
    return (groups / scale[:, None]).round().clamp(-8, 7)


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows, and for each row of the whole which of them it is."""

    name: str

    trains: ClassVar[tuple[str, ...]] = ("rows",)

    def decode(self, stored: dict[str, Any]) -> Any:
        return stored["rows"][stored["index"].long()]


CODECS: dict[str, Any] = {kind.__name__: kind for kind in (Narrow, RowScaled, Grouped, Rows)}
"""Name -> codec, for files."""
