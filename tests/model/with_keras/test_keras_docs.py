"""The examples of docs/keras.md run where TensorFlow is."""

import pathlib
import re
import textwrap

import pytest

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "keras.md"


def test_the_examples_of_the_page_run(tf):
    names = {"__name__": "__main__"}
    blocks = re.findall(r"^```python needs tensorflow\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for code in blocks:
        exec(compile(code, str(PAGE), "exec"), names)


TABS = [PAGE.with_name(f"{name}.md") for name in ("explain", "estimate", "fit", "data")]


@pytest.mark.parametrize("page", TABS, ids=lambda page: page.stem)
def test_the_tab_of_this_page_runs(tf, page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    codes = re.findall(r"^    ```python needs tensorflow\n(.*?)^    ```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert len(codes) == 1
    exec(compile(textwrap.dedent(codes[0]), str(page), "exec"), {"__name__": "__main__"})
