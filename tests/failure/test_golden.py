"""The diagnoses printed in the docs are the ones a user gets."""

import pathlib
import re

import pytest

import outsize

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "explain.md"
PAIRS = re.findall(r"^```message\n(.*?)\n```\n\n```diagnosis\n(.*?)\n```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_there_are_ten():
    assert len(PAIRS) == 10


@pytest.mark.parametrize(("message", "diagnosis"), PAIRS, ids=range(1, len(PAIRS) + 1))
def test_the_page_shows_what_explain_says(message, diagnosis):
    assert str(outsize.explain(message)) == diagnosis
