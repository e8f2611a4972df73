"""What the house promises about itself: its surface, its layers, its weight, its commands."""

import pathlib
import re
import shutil
import subprocess
import sys

import outsize

ROOT = pathlib.Path(__file__).resolve().parent.parent
BIN = pathlib.Path(sys.executable).parent

SURFACE = [
    "BudgetError",
    "DataSource",
    "ClusterError",
    "InputError",
    "OutOfMemory",
    "OutsizeError",
    "StoreError",
    "arange",
    "array",
    "batch_size",
    "budget",
    "calibrate",
    "cluster",
    "compression",
    "compute",
    "convert",
    "data_loader",
    "decompose",
    "empty",
    "estimate",
    "explain",
    "explain_uncaught",
    "factor",
    "fit",
    "full",
    "guard",
    "learn_from_run",
    "linspace",
    "log_to",
    "memory",
    "ones",
    "open",
    "save",
    "shrink",
    "show",
    "size",
    "watch",
    "zeros",
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


def test_without_torch_every_verb_for_its_models_says_how_to_get_it():
    calls = {
        "estimate": "estimate(lambda: 1)", "fit": "fit(1, 2, 3, 4)", "batch_size": "batch_size(1, 2, 3, 4)",
        "data_loader": "data_loader([1], 1)", "calibrate": "calibrate()", "shrink": "shrink(1)",
    }  # fmt: skip
    code = (
        "import sys; sys.modules['torch'] = None\nimport outsize\n"
        "for name, call in " + repr(calls) + ".items():\n"
        "    try:\n        eval('outsize.' + call)\n"
        "    except outsize.InputError as error:\n        print(name, 'pip install' in str(error))\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines() == [f"{name} True" for name in calls]


def lint_imports(folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "lint-imports"), "--no-cache"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(folder / "src"), "PATH": str(BIN)},
    )


PLANTED = {
    "outsize.core.planted": "outsize.machine",
    "outsize.core.plan": "outsize.core.outcomes.outcome",
    "outsize.compression.method": "outsize.compression.search",
    "outsize.model.kernels.call_events": "outsize.model.tracing.records.ledger",
    "outsize.model.tracing.trace": "outsize.model.tracing.tracer",
    "outsize.model.tracing.records.ledger": "outsize.model.tracing.records.blocks",
    "outsize.model.tracing.rules.counts": "outsize.model.tracing.rules.draws",
    "outsize.model.kernels.layouts": "outsize.model.kernels.cuda",
    "outsize.model.estimation.pressure": "outsize.model.estimation.growth",
    "outsize.model.torch_port.parts": "outsize.model.torch_port.patches",
    "outsize.model.fitting.choice": "outsize.model.fitting.fit",
    "outsize.model.fitting.run.loss": "outsize.model.fitting.learn.findings",
    "outsize.array.kernels.planted": "outsize.array.passes.base",
    "outsize.array.graph.compile": "outsize.array.graph.frame",
    "outsize.array.api.lanes": "outsize.array.functions.sorting",
    "outsize.failure.advice": "outsize.failure.case",
    "outsize.monitor.trend": "outsize.monitor.sampler",
    "outsize.monitor.processes.tree": "outsize.monitor.processes.follower",
    "outsize.monitor.leaks.census": "outsize.monitor.leaks.describe",
    "outsize.report.html.parts": "outsize.report.html.plan",
    "outsize.report.text.layout": "outsize.report.html.page",
    "outsize.model.fitting.plan.facts": "outsize.model.fitting.plan.remedies",
    "outsize.model.fitting.run.recompute": "outsize.model.fitting.run.runner",
    "outsize.model.fitting.move.mover": "outsize.model.fitting.move.ring",
    "outsize.model.jax.program": "outsize.model.jax.liveness",
    "outsize.model.jax.fitting.slices": "outsize.model.jax.fitting.step",
}
"""One import that goes up, for each contract: who imports -> what."""


def test_a_planted_upward_import_breaks_the_contract(tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    clean = lint_imports(tmp_path)
    assert clean.returncode == 0, clean.stdout + clean.stderr
    for place, target in PLANTED.items():
        name = target.rpartition(".")
        file = tmp_path / "src" / (place.replace(".", "/") + ".py")
        before = file.read_text() if file.exists() else '"""Planted."""\n'
        file.write_text(f"{before}\nfrom {name[0]} import {name[2]} as planted  # noqa\n")
    planted = lint_imports(tmp_path)
    assert planted.returncode != 0
    for place, target in PLANTED.items():
        assert f"{place} -> {target}" in planted.stdout


def test_every_file_of_the_walks_exists_and_stands_once_in_its_walk():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    walks = text[text.index("## Five walks") : text.index("## How to add")].split("### ")[1:]
    assert len(walks) == 5
    for walk in walks:
        files = re.findall(r"^\d+\. `([^`]+)`", walk, re.M)
        assert len(files) == len(set(files)) >= 10
        assert [name for name in files if not (ROOT / "src/outsize" / name).is_file()] == []


def test_ci_runs_the_test_command_of_the_readme():
    command = "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]' && .venv/bin/python scripts/check"
    assert command in (ROOT / "README.md").read_text()
    assert command in (ROOT / ".ci" / "run").read_text()
