"""The examples of docs/jax.md run. They are marked `py`, not `python`: tests/test_docs.py runs those where JAX need not be."""

import pathlib
import re
import textwrap

import pytest

pytest.importorskip("jax", reason="JAX is in the extra outsize[jax]")
pytest.importorskip("optax", reason="optax is in the extra outsize[jax]")

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "jax.md"


def test_the_examples_of_the_page_run():
    names = {"__name__": "__main__"}
    codes = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(codes) == 2
    for code in codes:
        exec(compile(code, str(PAGE), "exec"), names)


TABS = [PAGE.with_name(f"{name}.md") for name in ("explain", "estimate", "fit", "data")]


@pytest.mark.parametrize("page", TABS, ids=lambda page: page.stem)
def test_the_tab_of_this_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    codes = re.findall(r"^    ```python needs jax\n(.*?)^    ```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert len(codes) == 1
    exec(compile(textwrap.dedent(codes[0]), str(page), "exec"), {"__name__": "__main__"})
