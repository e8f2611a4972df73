"""`torch.FloatTensor`, `torch.cuda.LongTensor` and their like, for tensors without contents.

Out: rows for `patches.replaced`. Torch's own look at a tensor's real device, and those of a card need the card.
"""

from __future__ import annotations

from typing import Any

import torch

from outsize.model.torch_port.patches import Row

DTYPES = {
    "FloatTensor": "float32", "DoubleTensor": "float64", "HalfTensor": "float16", "BFloat16Tensor": "bfloat16",
    "ByteTensor": "uint8", "CharTensor": "int8", "ShortTensor": "int16", "IntTensor": "int32", "LongTensor": "int64",
    "BoolTensor": "bool",
}  # fmt: skip


class LegacyType(type):
    """A class of tensors by dtype and device: it makes such tensors and knows them."""

    dtype: Any
    kind: str

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype == cls.dtype and value.device.type == cls.kind

    def __call__(cls, *args: Any, device: Any = None) -> Any:
        if all(isinstance(arg, int) for arg in args):
            return torch.empty(args or (0,), dtype=cls.dtype, device=cls.kind)
        if isinstance(args[0], torch.Size):
            return torch.empty(args[0], dtype=cls.dtype, device=cls.kind)
        return torch.as_tensor(args[0], dtype=cls.dtype, device=cls.kind)


def legacy_rows() -> list[Row]:
    """The classes for the host and for a card."""
    rows: list[Row] = []
    for owner, kind in ((torch, "cpu"), (torch.cuda, "cuda")):
        for name, dtype in DTYPES.items():
            made = LegacyType(name, (), {"dtype": getattr(torch, dtype), "kind": kind, "__module__": owner.__name__})
            rows.append((owner, name, made))
    return rows
