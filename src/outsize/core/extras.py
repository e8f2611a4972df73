"""Packages that only some work needs: imported where it is done, or one sentence with the pip line.

In: a package and what needs it. Out: the module, or a `MissingExtra`, which is an `InputError` and an `ImportError`.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from outsize.core.errors import MissingExtra

EXTRAS = {
    "torch": "torch", "transformers": "hf", "tensorflow": "tensorflow", "keras": "tensorflow", "jax": "jax", "optax": "jax",
    "zarr": "zarr", "h5py": "hdf5", "pyarrow": "parquet", "tifffile": "tiff", "fsspec": "remote", "s3fs": "s3", "aiohttp": "web",
    "requests": "web", "gcsfs": "gcs", "tensorly": "tensorly", "zfpy": "zfp", "tensorboard": "tensorboard", "xarray": "xarray",
    "distributed": "dask", "ray": "ray",
}  # fmt: skip
"""Package -> the extra of Outsize that installs it."""


def need(package: str, what: str, otherwise: str = "") -> Any:
    """The module `package`, which `what` needs; `otherwise` says what to do without it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise MissingExtra(missing(package, what, otherwise)) from None


def has(package: str) -> bool:
    """True where a package is installed; it is not imported."""
    return importlib.util.find_spec(package) is not None


def missing(package: str, what: str, otherwise: str = "") -> str:
    """The sentence for a package that is not installed."""
    top = package.partition(".")[0]
    extra = EXTRAS.get(top)
    line = f"pip install 'outsize[{extra}]'" if extra else f"pip install {top}"
    return f"{what} needs {top}, which is not installed: {line}{', or ' + otherwise if otherwise else ''}"
