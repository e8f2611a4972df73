"""Every script and notebook of examples/ runs; those that trace or fit models only in the long run."""

import json
import pathlib
import runpy

import pytest
from effort import long

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))
LONG = {"4-models", "fit_a_step"}


def skip_if_long(path):
    if path.stem in LONG and not long():
        pytest.skip("many seconds: scripts/check --long")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_this_script_runs_and_leaves_nothing_behind(path, tmp_path, monkeypatch, capsys):
    skip_if_long(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
    assert [name for name in tmp_path.iterdir() if name.name != ".cache"] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_this_notebook_run(path, tmp_path, monkeypatch):
    skip_if_long(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    names = {}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), str(path), "exec"), names)


def test_there_are_ten_scripts_and_five_notebooks_and_the_list_names_them():
    text = (EXAMPLES / "README.md").read_text()
    assert len(SCRIPTS) == 10 and len(NOTEBOOKS) == 5
    assert all(f"`{path.name}`" in text for path in SCRIPTS)
