"""A disk that is full: one clear error, nothing under the final name, and the input untouched."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from stores import write

from outsize.array.store.registry import create_sink, open_store
from outsize.core.errors import StoreError


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no small file system can be mounted here: {made.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


@pytest.mark.parametrize("target", ["y.npy", "y.bin", "y.zarr", "y.h5", "y.safetensors", "chunked.h5"])
def test_a_full_disk_is_one_clear_error_and_leaves_nothing(target: str, small_disk: Path) -> None:
    np.save(small_disk / "x.npy", np.arange(1000))
    before = (small_disk / "x.npy").read_bytes()
    values = np.random.default_rng(0).standard_normal((1000, 1000))
    chunks = (100, 100) if target in ("y.zarr", "chunked.h5") else None
    sink = None
    with pytest.raises(StoreError, match=r"no space is left on the disk|No space left") as caught:
        sink = create_sink(small_disk / target, values.shape, values.dtype, chunks=chunks)
        write(sink, values)
    assert "\n" not in str(caught.value)
    if sink is not None:
        sink.abort()
    assert os.listdir(small_disk) == ["x.npy"]
    assert (small_disk / "x.npy").read_bytes() == before
    assert open_store(small_disk / "x.npy").shape == (1000,)
