"""Every example of README.md and docs/ runs: Python blocks of a page share a namespace, `$ outsize ...` lines are executed."""

import ast
import functools
import importlib.util
import inspect
import os
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap

import forks
import pytest
from effort import long
from pages import run_page
from readability import LONGEST, sentences, words

import outsize

ROOT = pathlib.Path(__file__).resolve().parent.parent
IN_ORDER = [ROOT / "docs" / "start.md", ROOT / "docs" / "which-gpu.md", *sorted((ROOT / "docs").glob("*/*.md"))]
"""Pages that are read from the top to the bottom, with the output of each example (`tests/pages.py`)."""
LONG = {"3-cuda-out-of-memory", "4-model-larger-than-card", "which-gpu", "batch-size", "memory-in-ci"}
"""Those that trace models for many seconds: only in the long run."""
DEAR = {"shrink"}
"""The same of the other pages; in the normal run their examples are read, and what they name is there."""
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").glob("*.md") if page not in IN_ORDER)]
BLOCK = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
"""An example; one that stands in a tab is indented."""

COMMAND = "import sys\nfrom outsize.cli import main\nsys.exit(main(sys.argv[1:]))"
"""The command line, in a fork: `tests/cli` has what needs real processes."""
OF_MODELS = {"estimate", "shrink"}
"""Verbs that load torch."""
BASE = """from outsize.model.estimation import host_memory
host_memory._measure_base = lambda names: 2**28  # takes another process
"""


def blocks(page: pathlib.Path, language: str) -> list[str]:
    """Examples in a language; one that says `needs PACKAGE` behind it runs where that is installed."""
    found = [
        (textwrap.dedent(code), info.partition("needs ")[2].split())
        for _, name, info, code in BLOCK.findall(page.read_text())
        if name == language
    ]
    return [code for code, needs in found if all(importlib.util.find_spec(name) for name in needs)]


def run_outsize(line: str) -> None:
    command, _, comment = line.partition("  #")
    expected = int(match.group(1)) if (match := re.search(r"exit (\d+)", comment)) else 0
    words = shlex.split(command.removeprefix("$ "))
    assert words[0] == "outsize"
    imported, before = (forks.TORCH, BASE) if words[1] in OF_MODELS else (forks.IMPORTED, "")
    answer = forks.start(before + COMMAND, *words[1:], imported=imported)
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
    if page.stem in DEAR and not long():
        return check_names(page)
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


def check_names(page: pathlib.Path) -> None:
    """Examples are Python, and Outsize has the functions and words that they use; commands have the options that they name."""
    from outsize.cli import VERBS

    for code in blocks(page, "python"):
        for call in [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]:
            path = ast.unparse(call.func)
            if path.startswith("outsize."):
                function = functools.reduce(getattr, path.split(".")[1:], outsize)
                known = inspect.signature(function).parameters
                assert {word.arg for word in call.keywords} <= set(known), f"{page}: {ast.unparse(call)}"
    for code in blocks(page, "console"):
        for line in re.findall(r"^\$ outsize (.*?)(?:  #.*)?$", code, re.M):
            verb, *words = shlex.split(line)
            verb_help = forks.start(COMMAND, verb, "--help").communicate()[0]
            assert verb in VERBS
            assert all(word in verb_help for word in words if word.startswith("--")), f"{page}: {line}"


@pytest.mark.parametrize("page", IN_ORDER, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_a_page_that_is_read_in_order_runs_in_order(page, tmp_path, monkeypatch):
    if page.stem in LONG and not long():
        pytest.skip("many seconds: scripts/check --long")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    run_page(page, tmp_path)


def test_comparisons_are_what_their_script_makes_of_the_dated_results():
    answer = subprocess.run(
        [sys.executable, "scripts/comparisons", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stdout


USERS_PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name not in ("comparisons", "internals")),
]


@pytest.mark.parametrize("page", USERS_PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_no_sentence_of_a_users_page_has_more_than_25_words(page):
    too_long = [sentence for sentence in sentences(page.read_text()) if words(sentence) > LONGEST]
    assert not too_long


LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")


def test_every_link_between_pages_leads_somewhere():
    dead = [
        f"{page.name}: {link}"
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for link in LINK.findall(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S))
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert not dead


def test_every_page_stands_in_the_list_of_the_site():
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "scripts" / "site_pages.py")
    site_pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site_pages)
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    below = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("*/*.md")}
    assert {name for name in below if not name.startswith("comparisons/")} <= listed
    assert [name for name in listed if not (ROOT / "docs" / name).exists()] == []
    public = {path.rpartition(".")[2] for path in site_pages.public_paths()}
    apart = {"OutOfMemory", "array", "compression", "factor"}
    assert public == {name for name in outsize.__all__ if not name.endswith("Error")} - apart


def test_every_verb_of_the_command_line_has_a_page():
    from outsize.cli import VERBS

    pages = {page.stem for page in PAGES}
    assert set(VERBS) - {"tour", "completion"} <= pages
