"""Bytes to text and text to bytes: the only module that knows units.

KB, MB, GB, TB, PB are powers of 1000 and KiB, MiB, GiB, TiB, PiB powers of 1024, as the standards say. GB and GiB
differ by 7 %, so a budget must not mix them up. A bare K, M, G, T, P is a power of 1024, as Docker, Slurm and Java read it.
Text with a small number and no unit is refused: `--budget 16` was never meant to be 16 bytes.
"""

from __future__ import annotations

import math
import re
from numbers import Integral

from outsize.core.errors import InputError

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

_DECIMAL = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15}
_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50}
_LETTERS = {unit[0]: scale for unit, scale in _BINARY.items()}
_UNITS = _DECIMAL | _BINARY | _LETTERS | {"": 1, "byte": 1, "bytes": 1}
_TEXT = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)
_LEAST = 2**16
"""Text without a unit is a number of bytes from here on."""
_TIMES = (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800), ("days", 86400, 0))
"""Unit, its seconds, and the seconds up to which it is used."""
_PRINTED = (("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def parse_bytes(value: int | str) -> int:
    """`"1.5 GiB"` -> 1610612736, `"2GB"` -> 2000000000, `4096` -> 4096; anything else is an `InputError`."""
    if isinstance(value, bool) or not isinstance(value, Integral | str):
        raise InputError(f"a size is a whole number of bytes or text such as '2GiB', not {value!r}")
    if not isinstance(value, str):
        if value < 0:
            raise InputError(f"a size cannot be negative: {value}")
        return int(value)
    match = _TEXT.fullmatch(value)
    if match is None:
        raise InputError(f"cannot read {value!r} as a size: write a number and a unit, such as 512MiB, 2GiB or 2GB")
    number, unit = match.group(1), match.group(2).lower()
    if unit not in _UNITS:
        raise InputError(
            f"unknown unit {match.group(2)!r} in {value!r}: use B, KiB, MiB, GiB, TiB (1024) or KB, MB, GB, TB (1000)"
        )
    if not unit and ("." in number or int(number) < _LEAST) and number.strip("0_."):
        raise InputError(f"{value!r} has no unit: write {number}MiB or {number}GiB, or {number}B for bytes")
    from fractions import Fraction

    return int(Fraction(number.replace("_", "")) * _UNITS[unit])


def format_bytes(value: int | None) -> str:
    """1070596096 -> `'1021.00 MiB'`; None -> `'-'`. Below 1 KiB the exact count is given."""
    if value is None:
        return "-"
    sign, size = ("-" if value < 0 else ""), abs(value)
    for unit, scale in _PRINTED:
        if size >= scale:
            hundredths = (size * 100 + scale // 2) // scale
            return f"{sign}{hundredths // 100:,}.{hundredths % 100:02d} {unit}"
    return f"{sign}{size} B"


def format_seconds(seconds: float) -> str:
    """90.0 -> `'90 s'`, 400.0 -> `'6.7 min'`, 9000.0 -> `'2.5 h'`."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.0f} days"


def format_span(earliest: float, latest: float) -> str:
    """40.2, 49.7 -> `'40 to 50 s'`, 310.0, 420.0 -> `'5.1 to 7.0 min'`: outwards, in the unit of the later one."""
    unit, scale = next(row for row in _TIMES if latest < row[2] or row is _TIMES[-1])[:2]
    digits = 0 if latest / scale >= 10 else 1
    low = math.floor(earliest / scale * 10**digits) / 10**digits
    high = math.ceil(latest / scale * 10**digits) / 10**digits
    return f"{low:.{digits}f} to {high:.{digits}f} {unit}" if low < high else f"{low:.{digits}f} {unit}"


def parse_seconds(text: str) -> float:
    """`"5s"` -> 5.0, `"2min"` -> 120.0, `"1.5h"` -> 5400.0; a bare number is seconds."""
    match = _TEXT.fullmatch(text)
    scale = {"": 1, "s": 1, "ms": 0.001, "m": 60, "min": 60, "h": 3600}.get(match.group(2).lower()) if match else None
    if match is None or scale is None:
        raise InputError(f"cannot read {text!r} as a time: write a number and a unit, such as 500ms, 5s, 2min or 1h")
    return float(match.group(1).replace("_", "")) * scale
