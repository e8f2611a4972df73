"""Hooks of mkdocs: pages that follow from the source, so that nobody writes them twice.

Every page of `docs/` that stands in no list of `mkdocs.yml` is a verb's or a topic's page and goes under Verbs. Comparison pages
go under Comparisons. `api.md` gets one entry for each public name, from the imports at the top of the package.
"""

from __future__ import annotations

import ast
import pathlib
import re
from typing import Any

ELSEWHERE = "https://unpkg.com/iframe-worker/shim"
"""What the theme would load from the network, so that search works in pages opened from files."""
WORKER = "assets/file_worker.js"
"""What is loaded in its place: `scripts/file_worker.js`."""
ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "outsize" / "__init__.py"


def on_config(config: Any) -> Any:
    """Fill the two lists that follow from the files there are."""
    named = set(_names(config["nav"]))
    for entry in config["nav"]:
        if "Verbs" in entry:
            entry["Verbs"] = [page.name for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in named]
        if "Comparisons" in entry:
            pages = sorted(
                (ROOT / "docs" / "comparisons").glob("*.md"), key=lambda page: (page.stem != "index", page.stem)
            )
            entry["Comparisons"] = [f"comparisons/{page.name}" for page in pages]
    return config


def _names(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [name for part in parts for name in _names(part)]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """`api.md` with every public name; fences with their language alone, since the site knows no other words there."""
    markdown = re.sub(r"^( *)```(\w+) (?!title=)[^\n]*$", r"\1```\2", markdown, flags=re.M)
    if page.file.src_uri != "api.md":
        return markdown
    return markdown + "\n\n".join(f"::: {path}" for path in public_paths())


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The page with our own script in place of one from the network."""
    return output.replace(ELSEWHERE, "../" * page.file.dest_uri.count("/") + WORKER)


def on_post_build(config: Any) -> None:
    """That script beside the pages; the page for missing ones has no place in a folder of files."""
    site = pathlib.Path(config["site_dir"])
    (site / WORKER).write_text((ROOT / "scripts" / "file_worker.js").read_text())
    (site / "404.html").unlink(missing_ok=True)


def public_paths() -> list[str]:
    """Where each public name is defined: `outsize.sizing.size.size`, ..."""
    tree = ast.parse(SOURCE.read_text())
    found = {}
    for block in tree.body:
        if isinstance(block, ast.If):
            for line in block.body:
                if isinstance(line, ast.ImportFrom) and line.module and line.module != "outsize":
                    found |= {alias.name: f"{line.module}.{alias.name}" for alias in line.names}
    return [found[name] for name in sorted(found, key=str.lower)]
