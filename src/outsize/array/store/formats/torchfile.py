"""Tensors in PyTorch's `.pt`/`.pth` files, read without torch and without running anything that the file says.

The file is a zip: one pickle that describes the objects, and one uncompressed entry for each storage, so a tensor's
data is read directly at its offset. A pickle is a program, and loading one runs it; here its opcodes are walked by a
small reader that knows how to build dictionaries, lists, numbers, text and tensors. Any other class or function in it
becomes an inert `Opaque`: it is named in no call, imports nothing, and only hides what was inside it.
"""

from __future__ import annotations

import io
import os
import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from outsize.array.store.base import Store
from outsize.array.store.formats.strided import open_strided
from outsize.array.store.formats.zip_directory import Member, holds_entry, read_directory
from outsize.array.store.options import DEFAULT, Options, choose_key
from outsize.core.errors import StoreError
from outsize.core.units import MiB, format_bytes

_MOST_PICKLE = 256 * MiB
"""A description of tensors is small; one above this is not read."""

_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64", "UntypedStorage": "uint8",
}  # fmt: skip
"""Class of a storage, as the pickle names it -> dtype of its elements."""

_REBUILD = {"_rebuild_tensor": 4, "_rebuild_tensor_v2": 6, "_rebuild_tensor_v3": 7}
"""Functions of torch._utils that make a tensor -> fewest arguments: storage, offset, shape, strides, ..., (dtype)."""

_PARAMETERS = {"_rebuild_parameter", "_rebuild_parameter_with_state"}
"""Functions of torch._utils that wrap a tensor, their first argument."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name that the pickle mentions; nothing is imported."""

    module: str
    name: str


class Opaque:
    """Whatever the pickle would have built by a call that is not a tensor's."""


@dataclass(frozen=True, slots=True)
class StorageRef:
    """Elements in an entry of the zip."""

    dtype: str
    entry: str


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as the pickle describes it: where its elements stand in a storage."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class _Bad(Exception):
    """The pickle is not one that describes tensors."""


def recognise(path: str, head: bytes, size: int) -> bool:
    """True for a zip with a pickle in it, and for the bare pickles of old."""
    return holds_entry(path, head, ".pkl") or _is_old(path, head)


def _is_old(path: str, head: bytes) -> bool:
    return head[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04") and path.endswith((".pt", ".pth", ".bin", ".ckpt"))


def open_file(path: str, options: Options = DEFAULT) -> Store:
    """One tensor of a `.pt`/`.pth` file; the format before torch 1.6, a bare pickle, is refused."""
    with open(path, "rb") as file:
        if _is_old(path, file.read(2)):
            raise StoreError(
                f"{path} is in torch's old format (before 1.6), which can only be read by running it; where you trust "
                f"it: torch.save(torch.load('{os.path.basename(path)}'), 'new.pt')", path=path,
            )  # fmt: skip
    tensors, members, prefix, swapped = read_tensors(path)
    key = "" if options.key is None and list(tensors) == [""] else options.key
    chosen = choose_key(path, list(tensors), key)
    tensor = tensors[chosen]
    member = members.get(f"{prefix}data/{tensor.storage.entry}")
    name = f"{path}::{chosen}" if chosen else path
    if member is None:
        raise StoreError(f"{name}: the entry data/{tensor.storage.entry} that holds its elements is missing", path=path)
    if member.compressed:
        raise StoreError(
            f"{name}: its elements are compressed, which torch.save never does; load it with torch and save it again",
            path=path,
        )
    return open_strided(
        path, name=name, shape=tensor.shape, strides=tensor.strides, dtype=tensor.dtype, first=tensor.offset,
        offset=member.offset(), size=member.size, swapped=swapped,
    )  # fmt: skip


def read_tensors(path: str) -> tuple[dict[str, TensorRef], dict[str, Member], str, bool]:
    """All tensors of a file by key, the entries of its zip, their prefix, and whether its bytes are big-endian."""
    members = read_directory(path)
    found = [name for name in members if name.rsplit("/", 1)[-1] == "data.pkl" and name.count("/") <= 1]
    if any(name.endswith("/constants.pkl") for name in members):
        raise StoreError(f"{path} is a TorchScript program; save its state_dict() and open that", path=path)
    if len(found) != 1:
        raise StoreError(f"{path} is a zip without data.pkl: not a file that torch.save made", path=path)
    prefix = found[0].removesuffix("data.pkl")
    order = members.get(f"{prefix}byteorder")
    swapped = order is not None and order.read(16).strip() == b"big"
    description = members[found[0]]
    if description.size > _MOST_PICKLE:
        raise StoreError(
            f"{path}: data.pkl has {format_bytes(description.size)}, it cannot be a description of tensors"
        )
    try:
        root = walk_pickle(description.read(_MOST_PICKLE))
    except _Bad as error:
        raise StoreError(f"{path}: its data.pkl does not describe tensors: {error}", path=path) from None
    tensors = dict(_find_tensors(root))
    if not tensors:
        raise StoreError(f"{path} holds no tensors that can be read without running its code", path=path)
    return tensors, members, prefix, swapped


def _find_tensors(root: Any) -> Iterator[tuple[str, TensorRef]]:
    """Tensors by key: names of nested dictionaries and numbers of lists joined by `/`; '' for the root itself."""
    waiting: list[tuple[str, Any]] = [("", root)]
    seen: set[int] = set()
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, TensorRef):
            yield key, value
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            inner = [(f"{key}/{name}" if key else str(name), item) for name, item in items]
            waiting.extend(reversed(inner))


def walk_pickle(data: bytes) -> Any:
    """The value a pickle describes, with `TensorRef` for tensors and `Opaque` for whatever it would have run."""
    walker = _Walker()
    try:
        for opcode, argument, _ in pickletools.genops(io.BytesIO(data)):
            if opcode.name == "STOP":
                return walker.stack.pop()
            if opcode.name not in _ACTIONS:
                raise _Bad(f"opcode {opcode.name} has no place in a file of tensors")
            _ACTIONS[opcode.name](walker, argument)
    except _Bad:
        raise
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, RecursionError) as error:
        raise _Bad(f"damaged pickle ({type(error).__name__}: {str(error)[:100]})") from None
    raise _Bad("it has no end")


_MARK = object()


class _Walker:
    """A stack and a memo, as a pickle machine has, and nothing else of it."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self, number: int) -> list[Any]:
        return [self.stack.pop() for _ in range(number)][::-1]

    def pop_to_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise _Bad("a mark is missing")
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def remember(self, place: Any) -> None:
        self.memo[int(place)] = self.stack[-1]

    def make_dict(self, items: list[Any]) -> None:
        self.push({})
        self.set_items(items)

    def set_items(self, items: list[Any]) -> None:
        """Pairs into the dictionary on top; what is opaque there takes them and forgets them."""
        if isinstance(self.stack[-1], dict):
            for key, value in zip(items[::2], items[1::2], strict=True):
                self.stack[-1][key if isinstance(key, str | int | float | bool | None) else id(key)] = value

    def extend(self, items: list[Any]) -> None:
        if isinstance(self.stack[-1], list):
            self.stack[-1].extend(items)

    def hide(self, used: list[Any]) -> None:
        """Whatever these would have become."""
        self.push(Opaque())


_ACTIONS: dict[str, Callable[[_Walker, Any], None]] = {
    **dict.fromkeys(
        ("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "BINUNICODE",
         "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE", "STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES",
         "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
        lambda walker, value: walker.push(value),
    ),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda walker, place: walker.remember(place)),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda walker, place: walker.push(walker.memo[int(place)])),
    "MEMOIZE": lambda walker, _: walker.remember(len(walker.memo)),
    **dict.fromkeys(("PROTO", "FRAME"), lambda walker, _: None),
    "NONE": lambda walker, _: walker.push(None),
    "NEWTRUE": lambda walker, _: walker.push(True),
    "NEWFALSE": lambda walker, _: walker.push(False),
    "EMPTY_DICT": lambda walker, _: walker.push({}),
    "EMPTY_LIST": lambda walker, _: walker.push([]),
    "EMPTY_TUPLE": lambda walker, _: walker.push(()),
    "EMPTY_SET": lambda walker, _: walker.hide([]),
    "MARK": lambda walker, _: walker.push(_MARK),
    "DUP": lambda walker, _: walker.push(walker.stack[-1]),
    "POP": lambda walker, _: _forget(walker.pop(1)),
    "POP_MARK": lambda walker, _: _forget(walker.pop_to_mark()),
    "ADDITEMS": lambda walker, _: _forget(walker.pop_to_mark()),
    "BUILD": lambda walker, _: _forget(walker.pop(1)),  # a dictionary keeps its items and loses its attributes (`_metadata`)
    "TUPLE": lambda walker, _: walker.push(tuple(walker.pop_to_mark())),
    "TUPLE1": lambda walker, _: walker.push(tuple(walker.pop(1))),
    "TUPLE2": lambda walker, _: walker.push(tuple(walker.pop(2))),
    "TUPLE3": lambda walker, _: walker.push(tuple(walker.pop(3))),
    "LIST": lambda walker, _: walker.push(walker.pop_to_mark()),
    "DICT": lambda walker, _: walker.make_dict(walker.pop_to_mark()),
    "SETITEM": lambda walker, _: walker.set_items(walker.pop(2)),
    "SETITEMS": lambda walker, _: walker.set_items(walker.pop_to_mark()),
    "APPEND": lambda walker, _: walker.extend(walker.pop(1)),
    "APPENDS": lambda walker, _: walker.extend(walker.pop_to_mark()),
    "GLOBAL": lambda walker, names: walker.push(Global(*names.partition(" ")[::2])),
    "STACK_GLOBAL": lambda walker, _: walker.push(Global(*map(str, walker.pop(2)))),
    "BINPERSID": lambda walker, _: walker.push(_storage(*walker.pop(1))),
    "REDUCE": lambda walker, _: walker.push(_call(*walker.pop(2))),
    "NEWOBJ": lambda walker, _: walker.hide(walker.pop(2)),
    "NEWOBJ_EX": lambda walker, _: walker.hide(walker.pop(3)),
    **dict.fromkeys(("FROZENSET", "INST", "OBJ"), lambda walker, _: walker.hide(walker.pop_to_mark())),
}  # fmt: skip
"""Opcode -> what it does here; any other has no place in a file of tensors."""


def _forget(items: list[Any]) -> None:
    """Nothing is made of these."""


def _storage(reference: Any) -> Any:
    """('storage', class, entry, device, elements) -> where the elements are."""
    match reference:
        case ("storage", Global(module=module, name=name), str(entry), _, *_) if module.split(".")[0] == "torch":
            if name in _STORAGES:
                return StorageRef(_STORAGES[name], entry)
    return Opaque()


def _call(called: Any, arguments: Any) -> Any:
    """What a call in the pickle makes: a tensor, an empty dictionary, or something opaque. No call is made."""
    if not isinstance(called, Global) or not isinstance(arguments, tuple):
        return Opaque()
    if called == Global("collections", "OrderedDict"):
        return dict(_pairs(arguments))
    if called.module != "torch._utils" and called.module != "torch.nn.parameter":
        return Opaque()
    if called.name in _PARAMETERS and arguments:
        return arguments[0]
    if called.name in _REBUILD and len(arguments) >= _REBUILD[called.name]:
        return _tensor(arguments, typed=called.name == "_rebuild_tensor_v3")
    return Opaque()


def _pairs(arguments: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    """Items that old pickles hand to OrderedDict as a list of pairs."""
    for item in arguments[0] if arguments and isinstance(arguments[0], list) else ():
        match item:
            case [str() | int() as key, value] | (str() | int() as key, value):
                yield key, value


def _tensor(arguments: tuple[Any, ...], typed: bool) -> Any:
    storage, offset, shape, strides = arguments[:4]
    if not isinstance(storage, StorageRef):
        return Opaque()
    dtype = storage.dtype
    if typed:
        given = arguments[6]
        if not isinstance(given, Global) or given.module != "torch":
            return Opaque()
        dtype = given.name
    counts = (offset, *shape, *strides)
    if len(shape) != len(strides) or any(type(count) is not int or count < 0 for count in counts):
        raise _Bad(f"a tensor of shape {shape!r:.60} with strides {strides!r:.60} at {offset!r:.30}")
    return TensorRef(storage, offset, tuple(shape), tuple(strides), dtype)
