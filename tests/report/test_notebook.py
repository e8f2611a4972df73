"""In a notebook: a noun's text is text, and a cell shows it once."""

import builtins
import io
import json

import numpy as np
import pytest

import outsize
from outsize.allocator import replay
from outsize.core.allocation import AllocationEvent


class ZMQInteractiveShell:
    """What rich takes for a notebook's shell, by its name."""


NOUNS = {
    "Factoring": lambda: outsize.factor.from_factors([np.ones((1, 9, 1))]).summary(),
    "Diagnosis": lambda: outsize.explain("CUDA out of memory. Tried to allocate 20.00 MiB"),
    "Sizing": lambda: outsize.size((1000, 1000), "float32"),
    "Plan": lambda: outsize.array.ones((2000, 2000)).sum().plan(),
    "Reading": outsize.memory,
    "Replay": lambda: replay([AllocationEvent(0, True, 0, 2**20)]),
}


@pytest.fixture
def notebook(monkeypatch):
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)


@pytest.mark.parametrize("make", NOUNS.values(), ids=NOUNS)
def test_text_and_html_are_the_same_as_elsewhere(make, monkeypatch):
    noun = make()
    plain, page = str(noun), noun._repr_html_()
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    assert len(plain) > 20 and len(page) > 20
    assert (str(noun), noun._repr_html_()) == (plain, page)


def test_the_guards_note_has_its_text(notebook):
    with pytest.raises(MemoryError) as caught, outsize.guard():
        np.empty(10**13)
    assert "cause: request larger than the machine" in caught.value.__notes__[0]


CELLS = """
import outsize
out = outsize.explain("CUDA out of memory. Tried to allocate 20.00 MiB")
out
"""


def test_a_cell_of_a_real_kernel_shows_a_noun_once():
    nbclient = pytest.importorskip(
        "nbclient", reason="a kernel is started only where nbclient and ipykernel are installed"
    )
    pytest.importorskip("ipykernel")
    import nbformat

    cells = [CELLS, "print(str(out)[:6])", "outsize.array.ones((2000, 2000)).sum().plan()"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    nbclient.NotebookClient(notebook, timeout=900).execute()
    first, second, third = (cell.outputs for cell in notebook.cells)
    assert [set(output.data) for output in first] == [{"text/plain", "text/html"}]
    assert "cause:" in first[0].data["text/plain"] and "cause:" in first[0].data["text/html"]
    assert [output.text for output in second] == ["cause:\n"]
    assert [output.output_type for output in third] == ["execute_result"]


def test_the_command_prints_json_and_text_to_the_stream(notebook, capsys):
    from outsize import report

    diagnosis = NOUNS["Diagnosis"]()
    report.show(diagnosis)
    report.show(diagnosis, stderr=True)
    report.show(diagnosis, as_json=True)
    text, error = capsys.readouterr()
    assert error.startswith("cause:") and text.startswith("cause:")
    assert json.load(io.StringIO(text[text.index("{\n") :]))["failure"]["framework"] == "pytorch"
