"""What the house promises about itself: its surface, its layers, its weight, its commands."""

import pathlib
import shutil
import subprocess
import sys

import outsize

ROOT = pathlib.Path(__file__).resolve().parent.parent
BIN = pathlib.Path(sys.executable).parent

SURFACE = [
    "BudgetError",
    "InputError",
    "OutOfMemory",
    "OutsizeError",
    "StoreError",
    "array",
    "batch_size",
    "budget",
    "calibrate",
    "empty",
    "estimate",
    "explain",
    "fit",
    "guard",
    "install",
    "keep",
    "loader",
    "memory",
    "open",
    "size",
]


def test_the_public_surface_is_exactly_this():
    assert sorted(outsize.__all__) == sorted(SURFACE)
    for name in SURFACE:
        assert getattr(outsize, name) is not None
    assert set(SURFACE) <= set(dir(outsize))


def test_an_unknown_name_is_an_attribute_error():
    try:
        outsize.no_such_verb  # noqa: B018
    except AttributeError as error:
        assert "no_such_verb" in str(error)
    else:
        raise AssertionError("outsize.no_such_verb should not exist")


def test_import_loads_neither_numpy_nor_rich_nor_any_extra():
    heavy = ["numpy", "rich", "psutil", "torch", "jax", "tensorflow", "zarr", "h5py", "safetensors", "dask", "pynvml"]
    code = f"import sys, outsize; print([name for name in {heavy!r} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def lint_imports(folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "lint-imports"), "--no-cache"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(folder / "src"), "PATH": str(BIN)},
    )


def test_a_planted_upward_import_breaks_the_contract(tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    clean = lint_imports(tmp_path)
    assert clean.returncode == 0, clean.stdout + clean.stderr
    (tmp_path / "src/outsize/core/planted.py").write_text(
        '"""Planted."""\nfrom outsize.machine import memory  # noqa\n'
    )
    (tmp_path / "src/outsize/array/kernels/planted.py").write_text(
        '"""Planted."""\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from outsize.array.passes import base  # noqa\n'
    )
    planted = lint_imports(tmp_path)
    assert planted.returncode != 0
    assert "outsize.core.planted -> outsize.machine" in planted.stdout
    assert "outsize.array.kernels.planted -> outsize.array.passes.base" in planted.stdout


def test_ci_runs_the_test_command_of_the_readme():
    command = "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]' && .venv/bin/python scripts/check"
    assert command in (ROOT / "README.md").read_text()
    assert command in (ROOT / ".ci" / "run").read_text()
