"""The examples of docs/keras.md run where TensorFlow is."""

import pathlib
import re

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "keras.md"


def test_the_examples_of_the_page_run(tf):
    names = {"__name__": "__main__"}
    blocks = re.findall(r"^```python needs tensorflow\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for code in blocks:
        exec(compile(code, str(PAGE), "exec"), names)
