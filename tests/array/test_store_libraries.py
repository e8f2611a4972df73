"""Formats that a library decodes, against that library: Parquet and Arrow, TIFF, addresses; and what is refused."""

import threading

import numpy as np
import pytest
from stores import make_buffer, peak_of

import outsize
import outsize.array as xp
from outsize.array.store.registry import open_store

A = np.random.default_rng(0).normal(size=(1000, 3))
BUDGETS = [None, "64KiB"]


@pytest.fixture
def parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.feather
    import pyarrow.parquet

    table = arrow.table({"a": A[:, 0], "b": A[:, 1].astype("f4"), "c": np.arange(1000, dtype="i4")})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", row_group_size=137)
    pyarrow.feather.write_feather(table, str(tmp_path / "x.feather"), compression="uncompressed")
    mixed = table.append_column("name", [["x"] * 1000]).append_column("n", [[None] + [1] * 999])
    pyarrow.parquet.write_table(mixed, tmp_path / "mixed.parquet", row_group_size=300)
    return tmp_path


@pytest.mark.parametrize("name", ["x.parquet", "x.feather"])
def test_columns_of_numbers_are_a_matrix_or_one_by_its_name(parquet, name):
    want = np.stack([A[:, 0], A[:, 1].astype("f4"), np.arange(1000)], axis=1)
    x = outsize.open(parquet / name)
    assert x.shape == (1000, 3) and x.dtype == "f8"
    np.testing.assert_array_equal((x[100:900, 1:] * 2).compute("256KiB"), want[100:900, 1:] * 2)
    one = outsize.open(f"{parquet / name}::c")
    assert one.dtype == "i4" and int(one.sum()) == 499500
    np.testing.assert_array_equal(one[::-7].compute(), np.arange(1000)[::-7])


def test_columns_that_are_no_numbers_are_named(parquet):
    path = parquet / "mixed.parquet"
    with pytest.raises(outsize.InputError, match=r"no numbers \(name\): name one that is"):
        outsize.open(path)
    with pytest.raises(outsize.InputError, match="has no column of numbers 'name'"):
        outsize.open(path, key="name")
    with pytest.raises(outsize.StoreError, match="missing values among int64"):
        outsize.open(path, key="n").compute()
    (parquet / "cut.parquet").write_bytes(path.read_bytes()[:-50])
    with pytest.raises(outsize.StoreError, match="cannot be read as Parquet"):
        outsize.open(parquet / "cut.parquet")


@pytest.mark.parametrize("shape,options", [
    ((7, 20, 30), {}), ((7, 20, 30), {"compression": "zlib"}), ((20, 30, 3), {"photometric": "rgb", "compression": "zlib"}),
    ((2, 3, 20, 30), {"compression": "zlib", "photometric": "minisblack"}), ((64, 48), {"tile": (16, 16), "compression": "zlib"}),
    ((5, 20, 30), {"bigtiff": True, "byteorder": ">"}),
])  # fmt: skip
def test_a_stack_of_pictures_is_an_array(tmp_path, shape, options):
    tifffile = pytest.importorskip("tifffile")
    array = np.random.default_rng(1).integers(0, 60000, shape).astype("u2")
    tifffile.imwrite(tmp_path / "x.tif", array, **options)
    x = outsize.open(tmp_path / "x.tif")
    assert x.shape == shape
    np.testing.assert_array_equal(x.compute(), array)
    np.testing.assert_array_equal(x[..., 3:17].mean(axis=0).compute("128KiB"), array[..., 3:17].mean(axis=0))
    with pytest.raises(outsize.InputError, match="1 series of pictures, numbered from 0, not '4'"):
        outsize.open(tmp_path / "x.tif", key="4")


def test_an_array_behind_an_address_is_read_by_ranges():
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    for order in "CF":
        with files.open(f"/{order}.npy", "wb") as file:
            np.save(file, np.asarray(A, order=order))
        x = outsize.open(f"memory://{order}.npy")
        np.testing.assert_array_equal(x.compute(), A)
        np.testing.assert_array_equal(x[17:900:3, 1].compute(), A[17:900:3, 1])
    files.pipe("/cut.npy", files.cat("/C.npy")[:-8])
    files.pipe("/text.npy", b"no array at all")
    for name, said in (("cut", "cut short"), ("text", "is not a .npy file"), ("none", "no such file")):
        with pytest.raises(outsize.StoreError, match=said):
            outsize.open(f"memory://{name}.npy")
    with pytest.raises(outsize.InputError, match="cannot be written in place"):
        outsize.open("memory://C.npy", mode="r+")
    with pytest.raises(outsize.InputError, match="cannot be reached"):
        outsize.open("nowhere://x.npy")


def test_a_zarr_array_behind_an_address(tmp_path):
    pytest.importorskip("fsspec")
    zarr = pytest.importorskip("zarr")
    made = zarr.create_array("memory://z.zarr", shape=A.shape, chunks=(100, 2), dtype="f8", overwrite=True)
    made[...] = A
    x = outsize.open("memory://z.zarr")
    np.testing.assert_array_equal(x[50:733].compute("2MiB"), A[50:733])
    np.testing.assert_allclose(float(x.sum()), A.sum())
    assert isinstance(x.save(tmp_path / "z.npy"), xp.Array)


@pytest.mark.parametrize("options", [
    {}, {"compressors": None}, {"shards": (200, 4)}, {"zarr_format": 2}, {"filters": "delta"},
], ids=str)  # fmt: skip
def test_every_coding_of_a_zarr_array_behind_an_address_reads_as_it_does_in_a_folder(options):
    files = pytest.importorskip("fsspec").filesystem("memory")
    zarr = pytest.importorskip("zarr")
    if options.get("filters"):
        options = {"filters": [zarr.codecs.TransposeCodec(order=(1, 0))]}
    made = zarr.create_array(
        "memory://coded.zarr", shape=A.shape, chunks=(50, 2), dtype="f8", overwrite=True, fill_value=3.0, **options
    )
    made[...] = A
    x = outsize.open("memory://coded.zarr")
    np.testing.assert_array_equal(x.compute(), A)
    np.testing.assert_array_equal((x[7:733, 1] * 2).compute("8MiB"), A[7:733, 1] * 2)
    np.testing.assert_allclose(x.mean(axis=0).compute("8MiB"), A.mean(axis=0))
    chunk = min(path for path in files.find("/coded.zarr") if "/z" not in path[7:] and "/." not in path)
    files.rm(chunk)
    with pytest.raises(outsize.StoreError, match="missing='fill'"):
        outsize.open("memory://coded.zarr").compute()
    whole = np.asarray(outsize.open("memory://coded.zarr", missing="fill").compute())
    rows = 200 if "shards" in options else 50
    np.testing.assert_array_equal(whole[:rows, :2], 3.0)
    np.testing.assert_array_equal(whole[rows:], A[rows:])


@pytest.mark.parametrize("name,head,said", [
    ("x.csv", b"a,b\n1,2\n", "write Parquet"), ("x.png", b"\x89PNG\r\n", "PNG picture"), ("x.jpg", b"\xff\xd8\xff\xe0", "JPEG"),
    ("x.nc", b"CDF\x01rest", "nccopy -k nc4"), ("x.mat", b"MATLAB 5.0 MAT", "-v7.3"), ("x.pkl", b"\x80\x04]", "run any code"),
    ("x.nii", b"\x5c\x01", "nibabel"),
])  # fmt: skip
def test_what_is_not_read_is_named_with_the_way_in(tmp_path, name, head, said):
    (tmp_path / name).write_bytes(head)
    with pytest.raises(outsize.StoreError, match=said):
        outsize.open(tmp_path / name)


READ = """
import numpy as np
from stores import make_buffer
from outsize.array.store.registry import open_store
if sys.argv[1].startswith("memory"):
    import fsspec, io, zarr
    for name, rows in (("small", 4), ("x", 1024)):
        values, file = np.random.default_rng(0).normal(size=(rows, 512)), io.BytesIO()
        np.save(file, values)
        fsspec.filesystem("memory").pipe(f"/{name}.npy", file.getvalue())
        zarr.create_array(f"memory://{name}.zarr", shape=values.shape, chunks=(min(rows, 128), 512), dtype="f8")[...] = values
for path in sys.argv[1:]:
    store = open_store(path)
    region = tuple((0, n) for n in store.shape)
    begin()
    buffer = make_buffer(store.extent(region))
    buffer[:] = 1
    store.read(region, buffer)
    extent = store.extent(region)
end()
print("EXTENT", extent)
assert _status("VmHWM") - _before <= extent + (1 << 20), (_status("VmHWM") - _before, extent)
"""


@pytest.mark.parametrize(
    "kind", ["parquet", "parquet wide", "feather", "tif", "tif tiles", "memory npy", "memory zarr"]
)
def test_extent_is_above_all_memory_that_reading_takes_in_a_fresh_process(tmp_path, kind):
    format_, wide = kind.split()[0], kind.endswith(("wide", "tiles"))
    if format_ == "memory":
        suffix = kind.split()[1]
        assert peak_of(READ, f"memory://small.{suffix}", f"memory://x.{suffix}") > 4 << 20
        return
    paths = [str(tmp_path / f"{name}.{format_}") for name in ("small", "x")]
    for path, rows in zip(paths, (8, 1 << 11 if wide else 1 << 17), strict=True):
        values = np.random.default_rng(0).normal(size=(rows, 256 if wide else 4))
        if format_ == "tif":
            tifffile = pytest.importorskip("tifffile")
            tifffile.imwrite(path, values, compression="zlib", **({"tile": (128, 128)} if wide else {}))
        else:
            arrow = pytest.importorskip("pyarrow")
            import pyarrow.feather
            import pyarrow.parquet

            table = arrow.table({f"c{place}": column for place, column in enumerate(values.T)})
            if format_ == "parquet":
                pyarrow.parquet.write_table(table, path, compression="zstd")
            else:
                pyarrow.feather.write_feather(table, path, compression="zstd")
    store = open_store(paths[1])
    assert store.bytes_of(((0, store.shape[0]), (0, store.shape[1]))) <= peak_of(READ, *paths)


def test_shards_behind_an_address_are_read_by_several_workers_at_once():
    zarr = pytest.importorskip("zarr")
    values = np.arange(2048 * 256, dtype="f4").reshape(2048, 256)
    made = zarr.create_array(
        "memory://shards.zarr", shape=values.shape, chunks=(16, 256), shards=(128, 256), dtype="f4", overwrite=True
    )
    made[...] = values
    store, region = open_store("memory://shards.zarr"), ((0, 2048), (0, 256))
    found: list[bool] = []

    def work() -> None:
        found.append(np.array_equal(store.read(region, make_buffer(store.extent(region))), values))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [True] * 6
