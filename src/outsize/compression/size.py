"""How small: `"50%"`, bytes, or `"fits rtx3060"` -> bytes of parameters."""

from __future__ import annotations

import re
from typing import Any

from outsize.core.errors import InputError
from outsize.core.units import parse_bytes

_SHARE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*%\s*")


def read_size(to: Any, before: int) -> int:
    """Bytes of parameters that are asked for."""
    if isinstance(to, float):
        raise InputError(f"to is {to}: write a share as text, such as '{to:.0%}', or whole bytes")
    match = _SHARE.fullmatch(to) if isinstance(to, str) else None
    if match is None:
        size = parse_bytes(to)
        if 0 < size <= 100:
            raise InputError(f"to is {to!r}, which is {size} bytes: write '{size}%' for a share of the size")
    else:
        share = float(match.group(1)) / 100
        if not 0 < share <= 1:
            raise InputError(f"to is {to!r}: a share of the size lies between 0 % and 100 %")
        size = int(before * share)
    if size <= 0:
        raise InputError(f"to is {to!r}: a model cannot have no bytes")
    return size
