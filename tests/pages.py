"""Pages whose examples are run from the top to the bottom, in this process, and whose outputs are what was printed.

    python tests/pages.py docs/start.md docs/tutorials/*.md      runs each page and writes its outputs into it

A `console` block keeps its `$ outsize ...` line and gets what it printed, 80 columns wide; `lines=9` behind `console` keeps the
first nine. A `python` block that prints is followed by a block titled Output.
`# exit 1` behind a command is its exit status; 0 where nothing is said.
"""

import contextlib
import io
import os
import pathlib
import re
import shlex
import sys
import tempfile

BLOCK = re.compile(r"^```(console|python)([^\n]*)\n(.*?)^```\n(?:\n```text title=\"Output\"\n.*?^```\n)?", re.M | re.S)
ENVIRONMENT = {"COLUMNS": "80", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}


def run_page(page: pathlib.Path, folder: pathlib.Path) -> str:
    """Run a page in a folder; returns its text with the outputs of this run."""
    text, names = page.read_text(), {"__name__": "__main__"}
    pieces, end = [], 0
    before = os.getcwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        for match in BLOCK.finditer(text):
            pieces.append(text[end : match.start()])
            kind, info, code = match.groups()
            pieces.append(run_console(code, info, page) if kind == "console" else run_python(code, info, names, page))
            end = match.end()
    finally:
        os.chdir(before)
        sys.path.remove(str(folder))
        for name in {path.stem for path in folder.glob("*.py")}:
            sys.modules.pop(name, None)
    return "".join([*pieces, text[end:]])


def run_console(code: str, info: str, page: pathlib.Path) -> str:
    """The block with what its commands print."""
    lines = []
    for line in code.splitlines():
        if line.startswith("$ outsize "):
            printed = call(line, page).splitlines()
            most = int(found.group(1)) if (found := re.search(r"lines=(\d+)", info)) else len(printed)
            lines += [line, *printed[:most], *(["..."] if len(printed) > most else [])]
    return f"```console{info}\n" + "\n".join(lines) + "\n```\n"


def call(line: str, page: pathlib.Path) -> str:
    """What a command prints, by `outsize.cli.main` in this process."""
    from outsize.cli import main

    command, _, comment = line.partition("  #")
    expected = int(found.group(1)) if (found := re.search(r"exit (\d+)", comment)) else 0
    words = shlex.split(command.removeprefix("$ outsize "))
    with tempfile.TemporaryFile("w+") as file, changed(ENVIRONMENT), standing_in(file):
        status = main(words)
        file.flush()
        file.seek(0)
        printed = file.read()
    assert status == expected, f"{page}: {line}\n{printed}"
    return "\n".join(part.rstrip() for part in printed.replace(os.getcwd(), "~").splitlines())


def run_python(code: str, info: str, names: dict, page: pathlib.Path) -> str:
    """The block, and what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), changed(ENVIRONMENT):
        exec(compile(code, str(page), "exec"), names)
    printed = "\n".join(part.rstrip() for part in out.getvalue().splitlines())
    shown = f'\n```text title="Output"\n{printed}\n```\n' if printed else ""
    return f"```python{info}\n{code}```\n{shown}"


@contextlib.contextmanager
def changed(settings):
    """The environment with these settings."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


@contextlib.contextmanager
def standing_in(file):
    """Standard output and error of this process and its children go to a file."""
    keep = [(stream, os.dup(number)) for number, stream in ((1, sys.stdout), (2, sys.stderr))]
    sys.stdout.flush()
    sys.stderr.flush()
    before = sys.stdout, sys.stderr
    for number in (1, 2):
        os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = file, file
    try:
        yield
    finally:
        file.flush()
        sys.stdout, sys.stderr = before
        for number, (_, saved) in zip((1, 2), keep, strict=True):
            os.dup2(saved, number)
            os.close(saved)


def main(names):
    for name in names:
        page = pathlib.Path(name).resolve()
        with tempfile.TemporaryDirectory(prefix="outsize-page-") as folder:
            os.environ["XDG_CACHE_HOME"] = folder + "/.cache"
            page.write_text(run_page(page, pathlib.Path(folder)))
        print(f"{name}: written")


if __name__ == "__main__":
    main(sys.argv[1:])
