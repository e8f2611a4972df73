"""Pages in a real browser: they open without an error or a request, zoom and hover work, and nothing in a name is run."""

import dataclasses
import json
import os
import time

import numpy as np
import pytest
from answers import MESSAGE, GiB, MiB, array_plan, fit_plan, footprint, recording
from browser import MISSING, PROGRAM, Browser
from snapshots import make_snapshot

import outsize
from outsize.core.answers import parse_answer
from outsize.failure.snapshot.load import check_snapshot

HOSTILE = '</script><script>console.error("run")</script><img src=x onerror=alert(1)>"\'&'


NOUNS = {
    "footprint": footprint,
    "plan": array_plan,
    "fit plan": fit_plan,
    "diagnosis": lambda: outsize.explain(MESSAGE),
    "snapshot": lambda: outsize.explain(make_snapshot()),
    "recording": recording,
    "reading": outsize.memory,
    "hostile": lambda: footprint(HOSTILE),
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if PROGRAM is None:
        pytest.skip(MISSING)
    with Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def show(browser, tmp_path):
    def opened(noun):
        browser.problems.clear()
        browser.requests.clear()
        noun.save_html(tmp_path / "page.html")
        seconds = browser.open(tmp_path / "page.html")
        return browser, seconds

    return opened


@pytest.mark.parametrize("make", NOUNS.values(), ids=NOUNS)
def test_a_page_opens_without_an_error_or_a_request(make, show, tmp_path):
    page, seconds = show(make())
    assert page.problems == []
    assert page.requests == [f"file://{tmp_path}/page.html"]
    assert seconds < 10  # two seconds on an idle machine; benchmarks/results has them
    assert os.path.getsize(tmp_path / "page.html") < 3 * MiB
    text = page.evaluate("document.body.innerText")
    assert len(text) > 100 and "undefined" not in text and "NaN" not in text


def hover(page, share, selector="svg.plot"):
    """Move the mouse over a picture, `share` of its way from left to right; what is then told."""
    left, top, width, height = page.box(selector)
    page.mouse("mouseMoved", left + width * share, top + height / 2)
    page.settle()
    return page.evaluate("document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent")


def span(page):
    return page.evaluate(
        "[+document.querySelector('svg.plot').dataset.from, +document.querySelector('svg.plot').dataset.to]"
    )


@pytest.mark.parametrize("kind", ["footprint", "snapshot"])
def test_hovering_tells_the_moment_its_bytes_and_the_line_of_code(kind, show):
    page, _ = show(NOUNS[kind]())
    told = hover(page, 0.55)
    assert ("together" in told and "reserved by the allocator" in told and "iB  train" in told) or "iB  weights" in told
    assert "at train.py:" in told
    assert hover(page, 0.9) != told


def test_wheel_drag_keys_and_double_click_zoom_and_buttons_go_to_the_peak_and_back(show):
    page, _ = show(footprint())
    whole = span(page)
    left, top, width, height = page.box("svg.plot")
    x, y = left + width * 0.5, top + height / 2
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-200)
    page.settle()
    wheeled = span(page)
    assert whole[0] < wheeled[0] < wheeled[1] < whole[1]
    page.mouse("mousePressed", left + width * 0.4, y, button="left", clickCount=1)
    page.mouse("mouseMoved", left + width * 0.6, y, button="left")
    page.mouse("mouseReleased", left + width * 0.6, y, button="left", clickCount=1)
    page.settle()
    dragged = span(page)
    assert dragged[1] - dragged[0] < (wheeled[1] - wheeled[0]) / 3
    page.evaluate("document.querySelector('svg.plot').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}))")
    page.settle()
    assert span(page)[0] > dragged[0]
    page.evaluate("document.querySelectorAll('.tools button')[1].click()")
    at_peak = span(page)
    assert at_peak[0] <= 990 <= at_peak[1] and at_peak[1] - at_peak[0] < 0.1 * whole[1]
    page.evaluate("document.querySelector('svg.plot').dispatchEvent(new MouseEvent('dblclick'))")
    page.settle()
    assert span(page) == whole
    assert page.problems == []


def test_a_layer_is_switched_off_by_its_name_and_the_picture_grows(show):
    page, _ = show(footprint())
    before = page.evaluate("document.querySelectorAll('.drawing path[fill]').length")
    page.evaluate("document.querySelectorAll('[data-layer]')[1].click()")
    assert page.evaluate("document.querySelectorAll('.drawing path[fill]').length") == before - 1
    assert "activations" not in hover(page, 0.5)


def test_tiles_bars_and_blocks_tell_what_they_are(show):
    page, _ = show(array_plan())
    assert "tile 1 of" in hover(page, 0.5, ".tiles rect.tile")
    page, _ = show(outsize.explain(make_snapshot()))
    assert "train.py:10 in keep" in hover(page, 0.5, ".map rect[fill]")
    assert "1,073,741,824 bytes" in hover(page, 0.5, ".bar")


def test_a_dark_screen_gets_a_dark_page_and_paper_a_white_one_without_buttons(show):
    page, _ = show(footprint())
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.dark()
    assert page.evaluate(colour) != light
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.evaluate(colour) == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.querySelector('.tools')).display") == "none"
    page.call("Emulation.setEmulatedMedia", media="", features=[])


def test_a_page_can_be_read_without_its_script(show, tmp_path):
    page = footprint()
    page.save_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text.count('<path d="M') >= 2 and "900.00 MiB reserved at the peak" in text
    assert "http://" not in text and "https://" not in text and "default-src 'none'" in text


@pytest.mark.parametrize("make", NOUNS.values(), ids=NOUNS)
def test_what_json_keeps_gives_the_same_page(make, tmp_path):
    noun = make()
    again = parse_answer(json.dumps(noun.to_dict()))
    assert again == noun
    if getattr(noun, "history", None) is None:  # a snapshot's history is left out of JSON
        again.save_html(tmp_path / "again.html")
        noun.save_html(tmp_path / "page.html")
        assert (tmp_path / "again.html").read_text() == (tmp_path / "page.html").read_text()


def test_a_cell_of_a_notebook_has_the_same_parts_and_no_script():
    small = footprint()._repr_html_()
    assert "<svg" in small and "Alive at the peak" in small and "<script" not in small
    assert len(small) < 80_000
    assert "<script" not in footprint(HOSTILE)._repr_html_()


def test_a_page_that_cannot_be_written_says_so_and_leaves_nothing(tmp_path):
    with pytest.raises(outsize.StoreError, match="cannot write"):
        footprint().save_html(tmp_path / "no" / "page.html")
    assert list(tmp_path.iterdir()) == []
    footprint().save_html(os.devnull)
    assert not os.path.isfile(os.devnull)


def test_many_samples_are_thinned_and_the_peak_stays(tmp_path):
    base = recording()
    generator = np.random.default_rng(0)
    sizes = (generator.random(20_000) * GiB).astype(int).tolist()
    sizes[13_415] = 7 * GiB
    samples = tuple(
        dataclasses.replace(base.samples[0], time=number / 10, host=dataclasses.replace(base.samples[0].host, anonymous=size))
        for number, size in enumerate(sizes)
    )  # fmt: skip
    dataclasses.replace(base, samples=samples).save_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert len(text) < 3 * MiB
    table = json.loads(text.partition('<script type="application/json">')[2].partition("</script>")[0])
    values = np.cumsum(table["layers"][0]["values"])
    assert values.max() == 7 * GiB and len(values) <= 8002
    assert np.all(np.diff(np.cumsum(table["times"])) > 0)


def test_one_endless_stack_that_everything_shares_does_not_stand_still():
    snapshot = make_snapshot()
    stack = [{"filename": "x.py", "line": 1, "name": "f"}] * 3_000_000
    for item in (*snapshot["device_traces"][0], *(block for one in snapshot["segments"] for block in one["blocks"])):
        item["frames"] = stack
    begin = time.process_time()
    outsize.explain(check_snapshot(snapshot))
    assert time.process_time() - begin < 5


def test_a_snapshot_with_fields_of_any_type_is_drawn_or_refused():
    snapshot = make_snapshot()
    for number, wrong in enumerate((None, "text", -1, [1], {"a": 1}, 2.5, True, 2**70)):
        entry = snapshot["device_traces"][0][10 + number]
        for key in ("addr", "time_us", "frames", "stream"):
            entry[key] = wrong
        snapshot["segments"][0]["blocks"][number]["frames"] = wrong
        snapshot["segments"][number]["segment_type"] = wrong
    diagnosis = outsize.explain(check_snapshot(snapshot))
    assert "Allocator map" in outsize.report.draw(diagnosis, "page")


BARE = {
    "nothing": {"samples": (), "marks": (), "findings": (), "notes": (), "complete": False},
    "no marks": {"marks": (), "complete": False},
    "one sample": {"samples": recording().samples[:1]},
    "host only": {
        "samples": tuple(dataclasses.replace(one, gpus=(), allocators=(), processes=()) for one in recording().samples)
    },
}


@pytest.mark.parametrize("changes", BARE.values(), ids=BARE)
def test_a_recording_that_lacks_things_still_opens(changes, show):
    page, _ = show(dataclasses.replace(recording(), **changes))
    assert page.problems == []
    assert ("The recording has no end" in page.evaluate("document.body.innerText")) == (
        not changes.get("complete", True)
    )
