"""A footprint is drawn as text and HTML from the same noun."""

from outsize import report
from outsize.core.cards import find_card
from outsize.core.footprint import Amount, Footprint, Layers
from outsize.core.memory import Part, Pool
from outsize.core.noun import Known

GiB = 2**30
KINDS = ("weights", "buffers", "gradients", "optimizer state", "inputs", "activations", "temporaries", "workspace")


def amount(size):
    return Amount(bytes=size, bound=size + size // 10, known=Known.ESTIMATE)


def moment(number):
    grown = number * GiB // 20
    return Layers(
        time=number, label=f"step {1 + number // 20} forward", bytes=(GiB, 0, 0, 0, 0, grown, 0, 0), reserved=4 * GiB
    )


def footprint(**changes):
    fields = {
        "name": "train", "pool": Pool(kind="device", index=0), "steps": 3, "peak_requested": amount(3 * GiB),
        "peak_allocated": amount(3 * GiB), "peak_reserved": amount(4 * GiB), "device_use": amount(5 * GiB),
        "parts": (Part(name="weights", bytes=GiB, known=Known.EXACT), Part(name="activations", bytes=2 * GiB, known=Known.EXACT)),
        "modules": (Part(name="Net.layer", bytes=2 * GiB, known=Known.EXACT),),
        "lines": (Part(name="train.py:7", bytes=2 * GiB, known=Known.EXACT),), "kinds": KINDS,
        "timeline": tuple(moment(number) for number in range(40)),
        "peak_label": "step 2 backward",
    }  # fmt: skip
    return Footprint(**{**fields, **changes})


def test_the_verdict_comes_first():
    text = str(footprint(card=find_card("rtx4090"), capacity=find_card("rtx4090").usable, fits=True))
    assert text.splitlines()[0].startswith("train: fits: 4.00 GiB reserved at the peak, at most 4.40 GiB")
    assert "does not fit" in str(footprint(capacity=GiB, fits=False))
    assert "may not fit" in str(footprint(capacity=4 * GiB, fits=None))


def test_the_picture_stacks_kinds_and_fits_the_width():
    text = str(footprint())
    assert "WWWW" in text and "AAAA" in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_a_notebook_gets_the_same_picture_as_html():
    html = footprint()._repr_html_()
    assert html is not None and "step 2 backward" in html


def test_json_has_every_number():
    plain = footprint().to_dict()
    assert plain["peak_reserved"] == {"bytes": 4 * GiB, "bound": 4 * GiB + 4 * GiB // 10, "known": "estimate"}
    assert plain["fragmentation"] == GiB
    assert report.to_json(footprint())


def test_a_receipt_shows_projected_beside_measured():
    text = str(footprint().compare(allocated=3 * GiB, reserved=5 * GiB))
    assert "-20.0%" in text
