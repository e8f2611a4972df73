"""Element types of all frameworks, each under one name, with their exact number of bits.

In: what users write or frameworks print (`torch.bfloat16`, `np.float32`, `<f4`, `DT_HALF`, `tf.qint8`, `jnp.float8_e4m3fn`,
`BF16`, `pred`), or a dtype object of any framework. Out: a `DType`. NumPy's reading wins where spellings clash (`u8` is
uint64, `U8` a string of 8 characters); `dialect="xla"` or `"safetensors"` reads them as those programs mean them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from outsize.core.errors import InputError
from outsize.core.noun import Noun

Dialect = Literal["numpy", "xla", "safetensors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DType(Noun):
    """An element type."""

    name: str
    """The one name Outsize prints: NumPy's where NumPy has the type, else torch's."""
    bits: int
    """Bits of one element as stored; packed types have fewer than 8."""
    kind: Literal["bool", "int", "uint", "float", "complex", "text", "bytes", "time", "struct"]

    @property
    def itemsize(self) -> int | None:
        """Bytes of one element, None for packed types."""
        return self.bits // 8 if self.bits % 8 == 0 else None

    def __str__(self) -> str:
        return self.name


def _table() -> dict[str, DType]:
    rows: list[tuple[str, int, str]] = [("bool", 8, "bool")]
    rows += [(f"int{bits}", bits, "int") for bits in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)]
    rows += [(f"uint{bits}", bits, "uint") for bits in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)]
    rows += [("float16", 16, "float"), ("bfloat16", 16, "float"), ("float32", 32, "float"), ("float64", 64, "float")]
    rows += [("float128", 128, "float"), ("tfloat32", 32, "float")]
    rows += [(f"float8_{kind}", 8, "float") for kind in ("e3m4", "e4m3", "e4m3fn", "e4m3fnuz", "e4m3b11fnuz")]
    rows += [(f"float8_{kind}", 8, "float") for kind in ("e5m2", "e5m2fnuz", "e8m0fnu")]
    rows += [("float6_e2m3fn", 6, "float"), ("float6_e3m2fn", 6, "float"), ("float4_e2m1fn", 4, "float")]
    rows += [("float4_e2m1fn_x2", 8, "float")]
    rows += [("complex32", 32, "complex"), ("complex64", 64, "complex"), ("complex128", 128, "complex")]
    rows += [("complex256", 256, "complex")]
    rows += [("qint8", 8, "int"), ("qint16", 16, "int"), ("qint32", 32, "int"), ("quint8", 8, "uint")]
    rows += [("quint16", 16, "uint"), ("quint4x2", 4, "uint"), ("quint2x4", 2, "uint")]
    return {name: DType(name=name, bits=bits, kind=kind) for name, bits, kind in rows}  # type: ignore[arg-type]


DTYPES = _table()
"""Every fixed-size type by its one name."""

_ALIASES = {
    "bool_": "bool", "boolean": "bool", "pred": "bool", "?": "bool", "b1": "bool", "bool8": "bool",
    "byte": "int8", "char": "int8", "short": "int16", "int": "int64", "long": "int64", "longlong": "int64",
    "intp": "int64", "int_": "int64", "intc": "int32", "ubyte": "uint8", "ushort": "uint16", "uintc": "uint32",
    "uint": "uint64", "ulong": "uint64", "ulonglong": "uint64", "uintp": "uint64",
    "half": "float16", "single": "float32", "double": "float64", "longdouble": "float128", "fp16": "float16",
    "fp32": "float32", "fp64": "float64", "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64",
    "chalf": "complex32", "cfloat": "complex64", "cdouble": "complex128", "csingle": "complex64",
    "clongdouble": "complex256", "complex": "complex128", "c64": "complex64", "c128": "complex128",
    "float8_e4m3fn_": "float8_e4m3fn", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
    "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "f8e4m3": "float8_e4m3", "f8e3m4": "float8_e3m4",
    "f8e4m3fnuz": "float8_e4m3fnuz", "f8e5m2fnuz": "float8_e5m2fnuz", "f8e4m3b11fnuz": "float8_e4m3b11fnuz",
    "f8e8m0fnu": "float8_e8m0fnu", "f4e2m1fn": "float4_e2m1fn", "f8_e4m3": "float8_e4m3fn", "f8_e5m2": "float8_e5m2",
    "f8_e8m0": "float8_e8m0fnu", "f4": "float32", "f2": "float16", "f8": "float64", "c8": "complex64",
    "s4": "int4", "s8": "int8", "s16": "int16", "s32": "int32", "s64": "int64", "i16": "int16", "i32": "int32",
    "i64": "int64", "u16": "uint16", "u32": "uint32", "u64": "uint64", "tf32": "tfloat32",
    "float": "float32",
}  # fmt: skip
"""Other spellings, in lower case. `float` is float32 as torch and TensorFlow print it; Python's own `float` is float64."""

_DIALECTS: dict[str, dict[str, str]] = {
    "xla": {"u2": "uint2", "u4": "uint4", "u8": "uint8", "s1": "int1", "s2": "int2", "i1": "bool", "i4": "int4",
            "i8": "int8", "ui8": "uint8", "ui16": "uint16", "ui32": "uint32", "ui64": "uint64"},
    "safetensors": {"bool": "bool", "u8": "uint8", "i8": "int8", "i16": "int16", "u16": "uint16", "f4": "float4_e2m1fn",
                    "f6_e2m3": "float6_e2m3fn", "f6_e3m2": "float6_e3m2fn"},
}  # fmt: skip

_NUMPY = re.compile(r"[<>=|]?([?bBhHiIlLqQefdgFDGuicfSaUVmM])([0-9]*)(\[.*\])?")
_NUMPY_LETTERS = {
    "?": "bool", "b": "int8", "B": "uint8", "h": "int16", "H": "uint16", "i": "int32", "I": "uint32", "l": "int64",
    "L": "uint64", "q": "int64", "Q": "uint64", "e": "float16", "f": "float32", "d": "float64", "g": "float128",
    "F": "complex64", "D": "complex128", "G": "complex256",
}  # fmt: skip
_NUMPY_SIZED = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}
_PREFIXES = re.compile(r"^(torch|np|numpy|tf|tensorflow|jnp|jax\.numpy|ml_dtypes|mx|paddle|cupy|cp)\.", re.IGNORECASE)
_CLASS = re.compile(r"^<(?:class|dtype:) '(.*)'>$")


def parse_dtype(value: Any, dialect: Dialect = "numpy") -> DType:
    """The type that `value` spells, or an `InputError` with near spellings."""
    if isinstance(value, DType):
        return value
    if isinstance(value, type) and value in (bool, int, float, complex):
        return DTYPES[{bool: "bool", int: "int64", float: "float64", complex: "complex128"}[value]]
    if not isinstance(value, str):
        return _from_object(value, dialect)
    found = _from_text(value.strip(), dialect)
    if found is None:
        raise InputError(f"unknown dtype {value!r}{_hint(value)}")
    return found


def _from_object(value: Any, dialect: Dialect) -> DType:
    """Dtype objects of any framework, told apart by what they answer, so that none has to be imported."""
    if isinstance(value, type):
        return parse_dtype(value.__name__, dialect)
    if hasattr(value, "kind") and hasattr(value, "itemsize") and hasattr(value, "str"):  # NumPy
        if value.kind == "O" or getattr(value, "hasobject", False):
            raise InputError(f"dtype {value} holds Python objects, so shape and dtype do not tell its size")
        named = DTYPES.get(value.name)
        if named is not None:
            return named
        kinds = {"U": "text", "S": "bytes", "V": "struct", "M": "time", "m": "time"}
        return DType(name=str(value), bits=8 * value.itemsize, kind=kinds.get(value.kind, "struct"))  # type: ignore[arg-type]
    return parse_dtype(str(getattr(value, "name", value)), dialect)


def _from_text(text: str, dialect: Dialect) -> DType | None:
    match = _CLASS.match(text)
    text = _PREFIXES.sub("", match.group(1) if match else text)
    lower = text.lower()
    first = _DIALECTS.get(dialect, {}) | {"f16": "float16"}  # in NumPy f16 is 16 bytes; nobody who writes it means that
    if lower in first:
        return DTYPES[first[lower]]
    found = _from_numpy(text)
    if found is not None:
        return found
    bare = lower.removeprefix("dt_").removesuffix("tensor")
    return DTYPES.get(_ALIASES.get(bare, bare)) or _from_fields(text)


def _from_numpy(text: str) -> DType | None:
    """`<f4`, `>i8`, `U10`, `S5`, `V16`, `datetime64[ns]`, `M8[s]`."""
    if re.fullmatch(r"(datetime64|timedelta64)(\[\w+\])?", text):
        return DType(name=text, bits=64, kind="time")
    match = _NUMPY.fullmatch(text)
    if match is None:
        return None
    letter, digits = match.group(1), match.group(2)
    if letter in "SaUV":
        if not digits:
            return None
        width = int(digits) * (32 if letter == "U" else 8)
        kinds = {"U": "text", "S": "bytes", "a": "bytes", "V": "struct"}
        return DType(name=text, bits=width, kind=kinds[letter])  # type: ignore[arg-type]
    if letter in "mM":
        return DType(name=text, bits=64, kind="time") if digits in ("", "8") else None
    if not digits:
        return DTYPES.get(_NUMPY_LETTERS[letter]) if letter in _NUMPY_LETTERS else None
    if letter not in _NUMPY_SIZED:
        return None
    if letter == "b":
        return DTYPES["bool"] if digits == "1" else None
    found = DTYPES.get(f"{_NUMPY_SIZED[letter]}{8 * int(digits)}")
    return found if found is not None and found.bits >= 8 else None


def _from_fields(text: str) -> DType | None:
    """NumPy's comma form of a structured type: `f4,i8,(2,3)f8`, packed without padding."""
    if "," not in text:
        return None
    bits = 0
    for part in re.split(r",(?![^()]*\))", text):
        match = re.fullmatch(r"\s*(?:\((\d+(?:,\d+)*),?\)|(\d+))?\s*(.+?)\s*", part)
        field = _from_text(match.group(3), "numpy") if match else None
        if match is None or field is None or field.bits % 8:
            return None
        bits += math.prod(map(int, (match.group(1) or match.group(2) or "1").split(","))) * field.bits
    return DType(name=text, bits=bits, kind="struct")


def _hint(text: str) -> str:
    import difflib

    lower = _PREFIXES.sub("", text).lower()
    if lower in {"string", "str", "object", "object_", "o", "variant", "resource"}:
        return ": its elements vary in length, so shape and dtype do not tell its size"
    near = difflib.get_close_matches(lower, [*DTYPES, *_ALIASES], n=3)
    return f": did you mean {' or '.join(near)}?" if near else ": try float32, float16, bfloat16, int8 or complex64"
