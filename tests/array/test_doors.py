"""Other libraries on lazy arrays: each test needs the library and is skipped where it is not installed."""

import subprocess
import sys

import numpy as np
import pytest

import outsize
import outsize.array as xp

A = np.random.default_rng(0).normal(size=(60, 5))


@pytest.fixture
def managed(monkeypatch):
    """xarray with the chunk manager that an installed package brings."""
    xarray = pytest.importorskip("xarray")
    from xarray.namedarray import parallelcompat

    from outsize.array.xarray_manager import OutsizeManager

    found = {**parallelcompat.list_chunkmanagers(), "outsize": OutsizeManager()}
    monkeypatch.setattr(parallelcompat, "list_chunkmanagers", lambda: found)
    return xarray


def test_xarray_reduces_groups_and_weighs_lazily(managed):
    coordinates = {"g": ("t", np.arange(60) % 4)}
    ours = managed.DataArray(outsize.open(A), dims=("t", "c"), coords=coordinates)
    theirs = managed.DataArray(A, dims=("t", "c"), coords=coordinates)
    weights = managed.DataArray(np.arange(60.0), dims="t")
    for call in (
        lambda d: d.mean("t"), lambda d: d.std("t"), lambda d: d.median("t"), lambda d: d.quantile(0.3, "t"),
        lambda d: d.where(d > 0).max("t"), lambda d: d.cumsum("t"), lambda d: d.coarsen(t=10).mean(), lambda d: d.argmax("t"),
        lambda d: d.groupby("g").mean(), lambda d: d.weighted(weights).mean("t"), lambda d: managed.dot(d, d, dim="t"),
        lambda d: d.groupby("g") - d.groupby("g").mean(),
    ):  # fmt: skip
        lazy = call(ours)
        assert isinstance(lazy.data, xp.Array)
        found = lazy.compute()
        assert isinstance(found.data, np.ndarray)
        np.testing.assert_allclose(found, call(theirs), atol=1e-12)


def test_xarray_opens_and_writes_through_the_chunk_manager(managed, tmp_path):
    pytest.importorskip("zarr")
    data = managed.Dataset({"v": (("t", "c"), A)})
    data.to_zarr(tmp_path / "x.zarr")
    opened = managed.open_zarr(tmp_path / "x.zarr", chunked_array_type="outsize", chunks={})
    assert isinstance(opened.v.data, xp.Array)
    anomaly = opened - opened.mean("t")
    anomaly.drop_encoding().to_zarr(tmp_path / "y.zarr")
    np.testing.assert_allclose(managed.open_zarr(tmp_path / "y.zarr", chunks=None).v, A - A.mean(0))
    assert isinstance(data.chunk(t=7, chunked_array_type="outsize").v.data, xp.Array)


def test_xarray_reads_zarr_through_our_store_and_writes_in_one_plan(managed, tmp_path, monkeypatch):
    pytest.importorskip("zarr")
    from outsize.array.run import results
    from outsize.array.store.formats.zarr import ZarrStore

    holes = np.where(A > 1, np.nan, A)
    days = ("t", np.arange(60) % 4)
    managed.Dataset({"v": (("t", "c"), holes)}).to_zarr(
        tmp_path / "x.zarr", encoding={"v": {"_FillValue": -9.0, "chunks": (7, 5)}}
    )
    opened = managed.open_zarr(tmp_path / "x.zarr", chunked_array_type="outsize", chunks={}).assign_coords(g=days)
    node = opened.v.data.node
    while node.inputs:
        (node,) = node.inputs
    assert isinstance(node.store, ZarrStore)
    plans = []
    monkeypatch.setattr(
        results, "prepare_all", lambda *a, real=results.prepare_all, **o: plans.append(1) or real(*a, **o)
    )
    anomaly = opened.v.groupby("g") - opened.v.groupby("g").mean()
    managed.Dataset({"a": anomaly, "m": opened.v.mean("t")}).drop_encoding().to_zarr(tmp_path / "y.zarr")
    assert len(plans) == 1
    theirs = managed.DataArray(holes, dims=("t", "c"), coords={"g": days})
    written = managed.open_zarr(tmp_path / "y.zarr", chunks=None)
    np.testing.assert_allclose(written.a, theirs.groupby("g") - theirs.groupby("g").mean())
    np.testing.assert_allclose(written.m, theirs.mean("t"))


def test_astype_of_the_namespace_takes_numpys_arrays():
    assert xp.astype(np.ones(3), xp.int8).dtype == np.int8


def test_einops_through_the_standard():
    pytest.importorskip("einops")
    import einops.array_api

    got = einops.array_api.reduce(outsize.open(A), "(a b) c -> a c", "mean", a=10)
    np.testing.assert_allclose(got.compute(), A.reshape(10, 6, 5).mean(1))


def test_arrow_takes_columns_and_tables():
    arrow = pytest.importorskip("pyarrow")
    assert arrow.array(outsize.open(A)[:, 0]).to_numpy().tolist() == A[:, 0].tolist()
    assert arrow.table(outsize.open(A)).column("3").to_numpy().tolist() == A[:, 3].tolist()
    np.testing.assert_array_equal(outsize.open(arrow.array(A[:, 1])).compute(), A[:, 1])


def test_pandas_takes_and_gives_tables():
    pandas = pytest.importorskip("pandas")
    np.testing.assert_array_equal(pandas.DataFrame(outsize.open(A)).to_numpy(), A)
    assert len(pandas.Series(outsize.open(A)[:, 0])) == 60
    np.testing.assert_array_equal(outsize.open(pandas.DataFrame(A)).compute(), A)


SKLEARN = """
import numpy as np, outsize, sklearn, scipy.special, scipy.stats
from sklearn import decomposition, linear_model, preprocessing
a = np.random.default_rng(0).normal(size=(60, 5))
y = a @ np.arange(5.0)
x = outsize.open(a)
with sklearn.config_context(array_api_dispatch=True):
    for scaler in (preprocessing.StandardScaler, preprocessing.MinMaxScaler, preprocessing.MaxAbsScaler):
        found = scaler().fit_transform(x)
        assert isinstance(found, outsize.array.Array), scaler
        np.testing.assert_allclose(found.compute(), scaler().fit_transform(a), atol=1e-12)
    pca = decomposition.PCA(2, svd_solver="covariance_eigh")
    np.testing.assert_allclose(np.asarray(pca.fit(x).explained_variance_), pca.fit(a).explained_variance_)
    ridge = linear_model.Ridge(solver="svd")
    np.testing.assert_allclose(np.asarray(ridge.fit(x, outsize.open(y)).coef_), ridge.fit(a, y).coef_)
np.testing.assert_allclose(np.asarray(scipy.stats.zscore(x)), scipy.stats.zscore(a))
np.testing.assert_allclose(np.asarray(scipy.special.logsumexp(x, axis=1)), scipy.special.logsumexp(a, axis=1))
"""


def test_scikit_learn_and_scipy_dispatch():
    pytest.importorskip("sklearn")
    import os

    answer = subprocess.run(
        [sys.executable, "-c", SKLEARN], env={**os.environ, "SCIPY_ARRAY_API": "1"}, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
