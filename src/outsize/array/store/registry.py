"""From what a user names to a store or a sink: one table, one row a format.

A file's first bytes decide what it is, its suffix only what to say when they do not fit; a target's suffix decides
what is written. Nothing but headers is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from outsize.array.store.base import Sink, Store
from outsize.array.store.io.file import naming
from outsize.array.store.keys import split_key
from outsize.core.dtypes import parse_dtype
from outsize.core.errors import InputError, StoreError
from outsize.core.spec import parse_shape


class Options(NamedTuple):
    """What a user may say beside the path."""

    key: str | None = None
    """Which array of a file that holds several."""
    mode: str = "r"
    """`r`, or `r+` to write in place."""
    missing: str = "error"
    """What a missing zarr chunk means: `error` or `fill`."""
    chunks: tuple[int, ...] | None = None
    """Shape of the chunks of an output."""
    compress: bool = True
    """Compress the chunks of an output where the format can."""


class Format(NamedTuple):
    """One row of the table."""

    name: str
    """As users call it."""
    suffixes: tuple[str, ...]
    """How its files are called."""
    matches: Callable[[str, bytes, int], bool]
    """(path, first bytes, length of the file) -> is it this format?"""
    open: Callable[[str, Options], Store]
    """Opens it for reading, or for writing in place."""
    in_place: bool = False
    """True where `r+` is understood."""
    describe: Callable[[str, tuple[int, ...], np.dtype[Any], Options], Sink] | None = None
    """Describes an output, None where the format is only read."""
    bfloat16: bool = False
    """True where an output may be of bfloat16, which NumPy does not have: its blocks are float32."""
    keyed: bool = False
    """True where a file may hold several arrays."""
    chunked: bool = False
    """True where an output may have chunks."""
    library: str = ""
    """The package whose array objects are arrays in this format."""
    wrap: Callable[[Any, Options], Store] | None = None
    """Opens such an object where it lies."""


def _open_npy(path: str, options: Options) -> Store:
    from outsize.array.store.formats.npy import open_npy

    return open_npy(path, options.mode)


def _describe_npy(path: str, shape: tuple[int, ...], dtype: np.dtype[Any], options: Options) -> Sink:
    from outsize.array.store.formats.npy import describe_npy

    return describe_npy(path, shape, dtype)


def _open_npz(path: str, options: Options) -> Store:
    from outsize.array.store.formats.npz import open_npz

    return open_npz(path, options.key)


def _open_torch(path: str, options: Options) -> Store:
    from outsize.array.store.formats.torchfile import open_torchfile

    return open_torchfile(path, options.key)


def _open_old_torch(path: str, options: Options) -> Store:
    from outsize.array.store.formats.torchfile import refuse_legacy

    raise refuse_legacy(path)


def _open_hdf5(path: str, options: Options) -> Store:
    from outsize.array.store.formats.hdf5 import open_hdf5

    return open_hdf5(path, options.key, options.mode)


def _wrap_hdf5(source: Any, options: Options) -> Store:
    from outsize.array.store.formats.hdf5 import open_dataset

    return open_dataset(source, options.mode)


def _describe_hdf5(path: str, shape: tuple[int, ...], dtype: np.dtype[Any], options: Options) -> Sink:
    from outsize.array.store.formats.hdf5 import describe_hdf5

    return describe_hdf5(path, shape, dtype, key=options.key, chunks=options.chunks)


def _open_safetensors(path: str, options: Options) -> Store:
    from outsize.array.store.formats.safetensors import open_safetensors

    return open_safetensors(path, options.key, options.mode)


def _describe_safetensors(path: str, shape: tuple[int, ...], dtype: np.dtype[Any], options: Options) -> Sink:
    from outsize.array.store.formats.safetensors import describe_safetensors

    return describe_safetensors(path, shape, dtype, key=options.key)


def _open_zarr(path: str, options: Options) -> Store:
    from outsize.array.store.formats.zarr import ZarrStore

    return ZarrStore(path, key=options.key, mode=options.mode, missing=options.missing)  # type: ignore[arg-type]


def _wrap_zarr(source: Any, options: Options) -> Store:
    from outsize.array.store.formats.zarr import open_array

    return open_array(source, options.mode, options.missing)  # type: ignore[arg-type]


def _describe_zarr(path: str, shape: tuple[int, ...], dtype: np.dtype[Any], options: Options) -> Sink:
    from outsize.array.store.formats.zarr import ZarrSink

    return ZarrSink(path, shape, dtype, chunks=options.chunks, compress=options.compress)


def _open_blocks(path: str, options: Options) -> Store:
    from outsize.array.store.formats.blocks import BlocksStore

    return BlocksStore(path)


def _raw_needs_more(path: str, options: Options) -> Store:
    raise InputError(
        f"{path} looks like raw binary: say its shape= and dtype=, and offset= if a header stands before them"
    )


def _describe_raw(path: str, shape: tuple[int, ...], dtype: np.dtype[Any], options: Options) -> Sink:
    from outsize.array.store.formats.raw import describe_raw

    return describe_raw(path, shape, dtype)


def _is_zip_with(ending: str) -> Callable[[str, bytes, int], bool]:
    def matches(path: str, head: bytes, size: int) -> bool:
        if head[:4] != b"PK\x03\x04":
            return False
        from outsize.array.store.formats.zip_directory import read_directory

        return any(name.endswith(ending) for name in read_directory(path))

    return matches


def _is_hdf5(path: str, head: bytes, size: int) -> bool:
    return head[:8] == b"\x89HDF\r\n\x1a\n"


def _is_old_torch(path: str, head: bytes, size: int) -> bool:
    return head[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04") and path.endswith((".pt", ".pth", ".bin", ".ckpt"))


def _is_safetensors(path: str, head: bytes, size: int) -> bool:
    from outsize.array.store.formats.safetensors import looks_like_safetensors

    return looks_like_safetensors(head, size)


def _is_zarr(path: str, head: bytes, size: int) -> bool:
    return any(os.path.exists(os.path.join(path, marker)) for marker in ("zarr.json", ".zarray", ".zgroup"))


def _is_blocks(path: str, head: bytes, size: int) -> bool:
    return os.path.isdir(path) and any(name.endswith(".npy") for name in os.listdir(path))


def _never(path: str, head: bytes, size: int) -> bool:
    return False


FORMATS = (
    Format("zarr", (".zarr",), _is_zarr, _open_zarr, True, _describe_zarr, keyed=True, chunked=True, library="zarr",
           wrap=_wrap_zarr),
    Format("folder of .npy blocks", (), _is_blocks, _open_blocks),
    Format(".npy", (".npy",), lambda path, head, size: head[:6] == b"\x93NUMPY", _open_npy, True, _describe_npy),
    Format("HDF5", (".h5", ".hdf5", ".he5"), _is_hdf5, _open_hdf5, True, _describe_hdf5, keyed=True, chunked=True,
           library="h5py", wrap=_wrap_hdf5),
    Format(".npz", (".npz",), _is_zip_with(".npy"), _open_npz, keyed=True),
    Format("torch", (".pt", ".pth"), _is_zip_with(".pkl"), _open_torch, keyed=True),
    Format("old torch", (), _is_old_torch, _open_old_torch, keyed=True),
    Format("safetensors", (".safetensors",), _is_safetensors, _open_safetensors, True, _describe_safetensors, True, keyed=True),
    Format("raw binary", (".bin", ".raw", ".dat"), _never, _raw_needs_more, True, _describe_raw),
)  # fmt: skip
"""Every format, in the order in which a file is tried."""


def open_store(
    source: Any, *, key: str | None = None, shape: Any = None, dtype: Any = None, offset: int = 0, order: str = "C",
    mode: str = "r", missing: str = "error",
) -> Store:  # fmt: skip
    """The store that `source` names: a path (`file::key` for one of several arrays), or an array in memory.

    `shape` and `dtype` (and `offset`, `order`) open a file as raw binary, whatever its name.
    """
    if mode not in ("r", "r+"):
        raise InputError(f"mode is 'r' (read) or 'r+' (write in place), not {mode!r}")
    if not isinstance(source, str | os.PathLike):
        return _open_object(source, Options(mode=mode, missing=missing))
    path = os.fspath(source)
    if not os.path.lexists(path):
        path, key = split_key(path, key)
    if shape is not None or dtype is not None:
        return _open_raw(path, shape, dtype, offset, order, mode)
    if offset or order != "C":
        raise InputError(f"offset= and order= describe raw binary: {path} needs shape= and dtype= with them")
    found = _find_format(path)
    if key is not None and not found.keyed:
        raise InputError(f"{path} ({found.name}) holds one array: leave the key {key!r} out")
    if mode == "r+" and not found.in_place:
        writable = ", ".join(row.name for row in FORMATS if row.in_place)
        raise InputError(f"{path} ({found.name}) cannot be written in place; these can: {writable}")
    return found.open(path, Options(key=key, mode=mode, missing=missing))


def _open_object(source: Any, options: Options) -> Store:
    """An array object: in memory, or a library's handle on a file."""
    from outsize.array.store.formats.foreign import open_memory

    library = type(source).__module__.partition(".")[0]
    row = next((row for row in FORMATS if row.library == library), None)
    return open_memory(source, options.mode) if row is None or row.wrap is None else row.wrap(source, options)


def _open_raw(path: str, shape: Any, dtype: Any, offset: int, order: str, mode: str) -> Store:
    from outsize.array.store.formats.raw import open_raw

    if shape is None or dtype is None:
        raise InputError(f"{path} as raw binary needs both shape= and dtype=")
    if offset < 0:
        raise InputError(f"offset is a number of bytes from the file's start, not {offset}")
    if os.path.isdir(path):
        raise StoreError(f"{path} is a folder, not a file of raw binary", path=path)
    return open_raw(path, shape, as_numpy(dtype), offset=offset, order=order, mode=mode)


def _find_format(path: str) -> Format:
    """The first row whose bytes match; a `StoreError` that says what is there instead where none does."""
    head, size = b"", 0
    if not os.path.lexists(path):
        raise StoreError(f"{path}: no such file or folder: check the path, seen from {os.getcwd()}", path=path)
    if not os.path.isdir(path):
        with naming(path):
            if not os.path.isfile(path):
                raise StoreError(f"{path} is neither a file nor a folder", path=path)
            with open(path, "rb") as file:
                head, size = file.read(16), os.fstat(file.fileno()).st_size
    for row in FORMATS:
        with naming(path):
            if row.matches(path, head, size):
                return row
    suffix = os.path.splitext(path)[1].lower()
    meant = next((row for row in FORMATS if suffix in row.suffixes), None)
    if os.path.isdir(path):
        raise StoreError(f"{path} is a folder without zarr metadata and without .npy blocks", path=path)
    if meant is not None and meant.matches is _never:
        return meant
    if size == 0:
        raise StoreError(f"{path} is empty", path=path)
    if meant is not None:
        raise StoreError(f"{path} is not {meant.name}: it begins with {head[:8]!r} ({size} bytes)", path=path)
    raise StoreError(
        f"{path} is in no format Outsize knows (it begins with {head[:8]!r}); if it is raw binary, say its shape= and "
        f"dtype=",
        path=path,
    )


def create_sink(path: str | os.PathLike[str], shape: Any, dtype: Any, *, resume: bool = False, **options: Any) -> Sink:
    """Begin an output; nothing stands under the final name before `commit`. Options are those of `describe_sink`."""
    sink = describe_sink(path, shape, dtype, **options)
    sink.create(resume=resume)
    return sink


def describe_sink(
    path: str | os.PathLike[str], shape: Any, dtype: Any, *, chunks: Any = None, key: str | None = None,
    compress: bool = True,
) -> Sink:  # fmt: skip
    """An output in the format of the path's suffix, which nothing has been made of yet."""
    target, key = split_key(os.fspath(path), key)
    suffix = os.path.splitext(target.rstrip("/"))[1].lower()
    row = next((row for row in FORMATS if suffix in row.suffixes and row.describe is not None), None)
    if row is None or row.describe is None:
        known = ", ".join(suffix for row in FORMATS if row.describe is not None for suffix in row.suffixes)
        raise InputError(f"cannot write {target}: the name must end in one of {known}")
    if chunks is not None and not row.chunked:
        raise InputError(f"{target} ({row.name}) has no chunks: leave chunks= out, or write zarr or HDF5")
    if key is not None and (not row.keyed or row.name == "zarr"):
        raise InputError(f"{target} ({row.name}) is written as one array: leave the key {key!r} out")
    if os.path.isdir(target) and row.name != "zarr":
        raise InputError(f"{target} is a folder: it is not overwritten by a file")
    if key is not None and os.path.isfile(target):
        _check_alone(target, key)
    options = Options(key=key, chunks=None if chunks is None else parse_shape(chunks), compress=compress)
    if row.bfloat16 and is_bfloat16(dtype):
        return row.describe(target, parse_shape(shape), "bfloat16", options)  # type: ignore[arg-type]
    return row.describe(target, parse_shape(shape), as_numpy(dtype), options)


def _check_alone(target: str, key: str) -> None:
    """An output is a file with one array, so one that is named does not go over a file that holds others."""
    try:
        store = open_store(target)
        store.close()
        alone = store.name.partition("::")[2].strip("/") == key.strip("/")
    except InputError:  # several, or none
        alone = False
    except StoreError:  # not a whole file: nothing is lost
        return
    if not alone:
        raise InputError(
            f"{target} holds other arrays than {key!r}, and an output is a file of its own that would replace them: "
            f"choose another file"
        )


def is_bfloat16(dtype: Any) -> bool:
    """True for every spelling of bfloat16, and torch's and JAX's own."""
    if isinstance(dtype, np.dtype):
        return bool(dtype.name == "bfloat16")
    return "bf" in str(dtype).lower() and parse_dtype(dtype).name == "bfloat16"


def as_numpy(dtype: Any) -> np.dtype[Any]:
    """NumPy's own reading first; then the names of other frameworks. `f16` is float16, as everywhere in Outsize."""
    if isinstance(dtype, str) and dtype.lower() == "f16":
        dtype = "float16"
    try:
        return np.dtype(dtype)  # type: ignore[no-any-return]
    except TypeError:
        name = parse_dtype(dtype).name
    try:
        return np.dtype(name)
    except TypeError:
        way_out = "only .safetensors can hold it" if name == "bfloat16" else "use float16 or float32 instead"
        raise InputError(f"NumPy has no {name}: {way_out}") from None
