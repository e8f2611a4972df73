"""Open pages of `outsize report` in a headless browser: bytes, seconds until painted, errors, requests, hover and zoom.

python benchmarks/report_pages.py PAGE.html ...
"""

from __future__ import annotations

import os
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))

from browser import Browser

SPAN = "(e => +e.dataset.to - +e.dataset.from)(document.querySelector('svg.plot'))"
TOLD = "document.getElementById('tip').textContent.split('\\n').slice(0, 2).join(', ')"


def use(browser: Browser, path: str) -> str:
    """One row of the table."""
    browser.problems.clear()
    browser.requests.clear()
    seconds = [browser.open(path) for _ in range(3)]
    hover = zoom = "-"
    if browser.evaluate("!!document.querySelector('svg.plot')"):
        left, top, width, height = browser.box("svg.plot")
        browser.mouse("mouseMoved", left + width * 0.6, top + height / 2)
        browser.settle()
        hover = browser.evaluate(TOLD)
        before, begin = browser.evaluate(SPAN), time.perf_counter()
        for _ in range(10):
            browser.mouse("mouseWheel", left + width / 2, top + height / 2, deltaX=0, deltaY=-100)
            browser.settle()
        each = (time.perf_counter() - begin) / 10
        zoom = f"{before / browser.evaluate(SPAN):.1f}x, {1000 * each:.0f} ms a notch"
    foreign = [url for url in browser.requests if not url.startswith("file:")]
    return (
        f"| {pathlib.Path(path).stem} | {os.path.getsize(path):,} | {min(seconds):.2f} | {max(seconds):.2f} | "
        f"{len(browser.problems)} | {len(foreign)} | {hover} | {zoom} |"
    )


if __name__ == "__main__":
    print("| page | bytes | s, best of 3 | s, worst | errors | requests | hover tells | ten notches of the wheel |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, Browser(folder) as opened:
        for name in sys.argv[1:]:
            print(use(opened, os.path.abspath(name)), flush=True)
