"""Every example of README.md and docs/ runs: Python blocks of a page share a namespace, `$ outsize ...` lines are executed."""

import importlib.util
import os
import pathlib
import re
import shlex

import forks
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)

COMMAND = "import sys\nfrom outsize.cli import main\nsys.exit(main(sys.argv[1:]))"
"""The command line, in a fork: `tests/cli` has what needs real processes."""
OF_MODELS = {"estimate", "shrink"}
"""Verbs that load torch."""


def blocks(page: pathlib.Path, language: str) -> list[str]:
    """Examples in a language; one that says `needs PACKAGE` behind it runs where that is installed."""
    found = [
        (code, info.partition("needs ")[2].split())
        for name, info, code in BLOCK.findall(page.read_text())
        if name == language
    ]
    return [code for code, needs in found if all(importlib.util.find_spec(name) for name in needs)]


def run_outsize(line: str) -> None:
    command, _, comment = line.partition("  #")
    expected = int(match.group(1)) if (match := re.search(r"exit (\d+)", comment)) else 0
    words = shlex.split(command.removeprefix("$ "))
    assert words[0] == "outsize"
    imported = forks.TORCH if words[1] in OF_MODELS else forks.IMPORTED
    answer = forks.start(COMMAND, *words[1:], imported=imported)
    told = answer.communicate()
    assert answer.returncode == expected, "\n".join((line, *told))


@pytest.fixture(autouse=True)
def one_thread():
    """Two processes run tests on two cores: more threads only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_this_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names: dict[str, object] = {"__name__": "__main__"}
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), names)
    for code in blocks(page, "console"):
        for line in code.splitlines():
            if line.startswith("$ outsize "):
                run_outsize(line)
    assert os.getcwd() == str(tmp_path)


def test_every_verb_of_the_command_line_has_a_page():
    from outsize.cli import VERBS

    pages = {page.stem for page in PAGES}
    assert set(VERBS) - {"tour", "completion"} <= pages
