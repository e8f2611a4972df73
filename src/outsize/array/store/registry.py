"""From what a user names to a store or a sink: one table, one row a format.

A file's first bytes decide what it is, its suffix only what to say when they do not fit; a target's suffix decides
what is written. Nothing but headers is read.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, NamedTuple

import numpy as np

from outsize.array.store.base import Sink, Store
from outsize.array.store.formats.remote import open_remote
from outsize.array.store.io.addresses import is_remote
from outsize.array.store.io.file import naming
from outsize.array.store.options import Options, as_numpy, split_key
from outsize.core.dtypes import parse_dtype
from outsize.core.errors import InputError, MissingPath, NotAnArray, StoreError
from outsize.core.spec import parse_shape


class Format(NamedTuple):
    """One row of the table: what is known of a format before its module is imported.

    A module has `recognise(path, head, size) -> bool`, of a path, the file's first bytes and its length, where these are not
    `magic`, and `open_file(path, options) -> Store`; where the row says so, `describe(path, shape, dtype, options) -> Sink` for
    outputs and `wrap(source, options) -> Store` for a library's array objects.
    """

    name: str
    """As users call it."""
    file: str
    """Its module in `formats`; a name with dots is a module of a room above, which is only known here by its name."""
    suffixes: tuple[str, ...] = ()
    magic: tuple[bytes, ...] = ()
    """With which bytes they begin, where that says all."""
    writes: bool = False
    """True where an output may be in it."""
    in_place: bool = False
    """True where `r+` is understood."""
    keyed: bool = False
    """True where a file may hold several arrays."""
    chunked: bool = False
    """True where an output may have chunks."""
    folder: bool = False
    """True where an output is a folder, of one array."""
    bfloat16: bool = False
    """True where an output may be of bfloat16, which NumPy does not have: its blocks are float32."""
    made_by: str = ""
    """The verb that writes it, where an array is not written in it as it is."""
    library: str = ""
    """The package whose array objects are arrays in this format."""

    def recognises(self, path: str, head: bytes, size: int) -> bool:
        """True where a path is in this format."""
        return head.startswith(self.magic) if self.magic else bool(self.module.recognise(path, head, size))

    @property
    def module(self) -> Any:
        """Its module, imported when it is first needed."""
        return importlib.import_module(self.file if "." in self.file else f"outsize.array.store.formats.{self.file}")


FORMATS = (
    Format("zarr", "zarr", (".zarr",), writes=True, in_place=True, keyed=True, chunked=True, folder=True, library="zarr"),
    Format("folder of .npy blocks", "blocks"),
    Format(".npy", "npy", (".npy",), (b"\x93NUMPY",), writes=True, in_place=True),
    Format("HDF5", "hdf5", (".h5", ".hdf5", ".he5"), (b"\x89HDF\r\n\x1a\n",), writes=True, in_place=True, keyed=True,
           chunked=True, library="h5py"),
    Format(".npz", "npz", (".npz",), keyed=True),
    Format("torch", "torchfile", (".pt", ".pth"), keyed=True),
    Format("factors", "outsize.factor.files", (".tucker", ".tt", ".train", ".cp", ".svd", ".zfp"), made_by="outsize.decompose"),
    Format("safetensors", "safetensors", (".safetensors",), writes=True, in_place=True, keyed=True, bfloat16=True),
    Format("Parquet or Arrow", "parquet", (".parquet", ".arrow", ".feather"), (b"PAR1", b"ARROW1"), keyed=True),
    Format("TIFF", "tiff", (".tif", ".tiff"), (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), keyed=True),
    Format("raw binary", "raw", (".bin", ".raw", ".dat"), writes=True, in_place=True),
)  # fmt: skip
"""Every format, in the order in which a file is tried: those with magic bytes before those that only look likely."""


_PICTURE = "read it with imageio or Pillow, or write a stack of them as TIFF"
_PICKLE = "a pickle, which can run any code when it is read: write the array with np.save where it was made"
_ELSEWHERE: tuple[tuple[bytes, tuple[str, ...], str], ...] = (
    (b"CDF", (), "a netCDF file of the classic format, which is not read: `nccopy -k nc4 in.nc out.nc` makes one that is"),
    (b"", (".csv", ".tsv", ".txt"), "text, which is never taken for an array by itself: read it with pandas or polars, a part at "
     "a time where it is large, and write Parquet, which is read here"),
    (b"\x89PNG", (".png",), f"a PNG picture: {_PICTURE}"),
    (b"\xff\xd8\xff", (".jpg", ".jpeg"), f"a JPEG picture: {_PICTURE}"),
    (b"MATLAB 5.0", (".mat",), "a MATLAB file: save it from MATLAB with -v7.3 (HDF5, which is read here)"),
    (b"\x80\x04", (".pkl", ".pickle"), _PICKLE),
    (b"\x80\x05", (), _PICKLE),
    (b"", (".xlsx", ".xls"), "a spreadsheet: read it with pandas.read_excel and write Parquet"),
    (b"", (".fits", ".fit"), "a FITS file: read it with astropy.io.fits, whose memory-mapped data outsize.open takes"),
    (b"", (".nii",), "a NIfTI image: read it with nibabel, whose dataobj outsize.open takes as an array"),
    (b"GRIB", (".grib", ".grb", ".grib2"), "a GRIB file: open it with xarray and cfgrib, and write zarr"),
)  # fmt: skip
"""Formats that are not read: (first bytes, suffixes, what it is and the way in)."""


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
    if is_remote(path):
        path, key = split_key(path, key)
        return open_remote(path, Options(key=key, mode=mode, missing=missing))
    if not os.path.lexists(path):
        path, key = split_key(path, key)
    if shape is not None or dtype is not None:
        from outsize.array.store.formats.raw import open_raw

        return open_raw(path, shape, dtype, offset=offset, order=order, mode=mode)
    if offset or order != "C":
        raise InputError(f"offset= and order= describe raw binary: {path} needs shape= and dtype= with them")
    found = find_format(path)
    if key is not None and not found.keyed:
        raise InputError(f"{path} ({found.name}) holds one array: leave the key {key!r} out")
    if mode == "r+" and not found.in_place:
        writable = ", ".join(row.name for row in FORMATS if row.in_place)
        raise InputError(f"{path} ({found.name}) cannot be written in place; these can: {writable}")
    store: Store = found.module.open_file(path, Options(key=key, mode=mode, missing=missing))
    return store


def _open_object(source: Any, options: Options) -> Store:
    """An array object: in memory, or a library's handle on a file."""
    from outsize.array.store.formats.memory import open_memory

    library = type(source).__module__.partition(".")[0]
    row = next((row for row in FORMATS if row.library == library), None)
    store: Store = open_memory(source, options.mode) if row is None else row.module.wrap(source, options)
    return store


def find_format(path: str) -> Format:
    """The first row whose bytes match; a `StoreError` that says what is there instead where none does."""
    head, size = b"", 0
    if not os.path.lexists(path):
        raise MissingPath(f"{path}: no such file or folder: check the path, seen from {os.getcwd()}", path=path)
    if not os.path.isdir(path):
        with naming(path):
            if not os.path.isfile(path):
                raise NotAnArray(f"{path} is neither a file nor a folder", path=path)
            with open(path, "rb") as file:
                head, size = file.read(16), os.fstat(file.fileno()).st_size
    for row in FORMATS:
        with naming(path):
            if row.recognises(path, head, size):
                return row
    suffix = os.path.splitext(path)[1].lower()
    meant = next((row for row in FORMATS if suffix in row.suffixes), None)
    if os.path.isdir(path):
        raise NotAnArray(f"{path} is a folder without zarr metadata and without .npy blocks", path=path)
    if size == 0:
        raise StoreError(f"{path} is empty", path=path)
    if meant is not None:
        raise StoreError(f"{path} is not {meant.name}: it begins with {head[:8]!r} ({size} bytes)", path=path)
    told = next((way for start, end, way in _ELSEWHERE if (start and head.startswith(start)) or suffix in end), None)
    if told is not None:
        raise NotAnArray(f"{path} is {told}", path=path)
    raise NotAnArray(
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
    remote = is_remote(target)
    if remote and not target.rstrip("/").endswith(".zarr"):
        raise InputError(
            f"cannot write {target}: only zarr arrays are written behind an address, such as s3://bucket/x.zarr"
        )
    suffix = os.path.splitext(target.rstrip("/"))[1].lower()
    row = next((row for row in FORMATS if suffix in row.suffixes and row.writes), None)
    if row is None:
        known = ", ".join(suffix for row in FORMATS if row.writes for suffix in row.suffixes)
        verb = next((row.made_by for row in FORMATS if suffix in row.suffixes and row.made_by), None)
        if verb is not None:
            raise InputError(
                f"cannot write an array to {target} as it is: {verb} makes such files, or end in one of {known}"
            )
        raise InputError(f"cannot write {target}: the name must end in one of {known}")
    if chunks is not None and not row.chunked:
        raise InputError(f"{target} ({row.name}) has no chunks: leave chunks= out, or write zarr or HDF5")
    if key is not None and (not row.keyed or row.folder):
        raise InputError(f"{target} ({row.name}) is written as one array: leave the key {key!r} out")
    if os.path.isdir(target) and not row.folder:
        raise InputError(f"{target} is a folder: it is not overwritten by a file")
    if key is not None and os.path.isfile(target):
        _check_alone(target, key)
    lengths, pieces = parse_shape(shape), None if chunks is None else parse_shape(chunks)
    if pieces is not None and (len(pieces) != len(lengths) or 0 in pieces):
        raise InputError(f"chunks {pieces} do not suit shape {lengths}: give one length of 1 or more for each axis")
    options = Options(key=key, chunks=pieces, compress=compress)
    if remote:
        from outsize.array.store.formats.remote_zarr import RemoteZarrSink

        return RemoteZarrSink(target, lengths, as_numpy(dtype), options)
    element = "bfloat16" if row.bfloat16 and is_bfloat16(dtype) else as_numpy(dtype)
    sink: Sink = row.module.describe(target, lengths, element, options)
    return sink


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
