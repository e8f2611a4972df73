"""The bar that runs draw, and who is told of what."""

import io

import pytest
from rich.console import Console

import outsize
from outsize.core import events
from outsize.core.events import Advanced, Finished, Started, told
from outsize.report.progress import Bar


def make_bar():
    text = io.StringIO()
    return Bar(Console(file=text, force_terminal=True, width=120)), text


def test_a_bar_shows_bytes_and_leaves_the_screen_as_it_was():
    bar, text = make_bar()
    bar(Started(step="sum", index=0, steps=2, bytes=2**20))
    bar(Advanced(step="sum", bytes=2**19))
    bar(Finished(step="sum", seconds=0.1))
    bar(Started(step="write", index=1, steps=2, bytes=2**20))
    assert not bar._progress.finished or bar._progress.live.is_started
    bar(Finished(step="write", seconds=0.1))
    assert "1/2 sum" in text.getvalue() and "MiB" in text.getvalue() and not bar._progress.live.is_started


def test_a_bar_counts_what_is_not_bytes():
    bar, text = make_bar()
    bar(Started(step="tracing plans", index=0, steps=1, bytes=0, unit="plans"))
    for _ in range(3):
        bar(Advanced(step="tracing plans", bytes=1))
    bar._progress.refresh()
    bar(Finished(step="tracing plans", seconds=0.1))
    assert "tracing plans" in text.getvalue() and "3 plans" in text.getvalue() and "MiB" not in text.getvalue()
    assert not bar._progress.live.is_started


def test_an_error_ends_what_was_told(monkeypatch):
    heard = []
    monkeypatch.setattr(events, "_default", lambda: heard.append)
    try:
        with told("a step", "plans") as done:
            done()
            raise KeyError("planted")
    except KeyError:
        pass
    assert [type(event) for event in heard] == [Started, Advanced, Finished]


def test_planning_a_fit_tells_what_it_does(monkeypatch):
    torch = pytest.importorskip("torch")
    heard = []
    monkeypatch.setattr(events, "_default", lambda: heard.append)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = outsize.fit(
        model, lambda m, x: m(x).square().mean(), optimizer, torch.randn(4096, 64), budget="4MiB", dry_run=True
    ).plan
    assert plan.remedies
    begun = [event.step for event in heard if isinstance(event, Started)]
    assert begun == ["looking at the step", "tracing plans", "comparing gradients"]
    assert sum(isinstance(event, Advanced) and event.step == "tracing plans" for event in heard) >= 1
    assert sum(isinstance(event, Finished) for event in heard) == len(begun)


class Shown:
    """What a notebook shows in one place."""

    def __init__(self):
        self.contents = []

    def __call__(self, content, **_):
        self.contents.append(content["text/html"])
        return self

    def update(self, content, **_):
        self.contents.append(content["text/html"])


def test_a_bar_in_a_notebook_is_renewed_in_its_place_and_goes(monkeypatch):
    from outsize.report import notebook_progress

    clock = iter(range(100))
    monkeypatch.setattr(notebook_progress.time, "monotonic", lambda: float(next(clock)))
    shown = Shown()
    bar = notebook_progress.NotebookBar(shown)
    bar(Started(step="write <x>", index=0, steps=1, bytes=2**20))
    bar(Advanced(step="write <x>", bytes=2**19))
    bar(Finished(step="write <x>", seconds=1.0))
    assert 'value="524288"' in shown.contents[-2] and "write &lt;x&gt;: 512.00 KiB of 1.00 MiB" in shown.contents[-2]
    assert shown.contents[-1] == ""


def test_no_bar_of_a_notebook_outside_of_one():
    from outsize.report.notebook_progress import notebook_listener

    assert notebook_listener() is None
