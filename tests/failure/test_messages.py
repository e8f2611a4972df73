"""Every format is read exactly, wherever it is pasted from; lookalikes are left alone; hostile text costs nothing."""

import html
import json
import quopri
import textwrap

import hypothesis.strategies as st
import pytest
from effort import examples
from failure_messages import LOOKALIKES, MESSAGES, V2, WRAPPED
from hypothesis import given

import outsize
from outsize.failure.message import read
from outsize.failure.message.formats import read_formats

FIELDS = (
    "requested_bytes",
    "shape",
    "dtype",
    "device",
    "total_bytes",
    "free_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "limit_bytes",
    "pid",
    "process",
)


@pytest.mark.parametrize(
    ("framework", "text", "expected"), MESSAGES, ids=[f"{row[0]}-{n}" for n, row in enumerate(MESSAGES)]
)
def test_a_message_is_read_exactly(framework, text, expected):
    failure = read(text)
    assert failure is not None
    assert failure.framework == framework
    assert {name: getattr(failure, name) for name in expected} == expected


@pytest.mark.parametrize("text", LOOKALIKES)
def test_a_lookalike_is_not_called_out_of_memory(text):
    assert outsize.explain(text).failure is None


def prefixed(prefix):
    return lambda text: "\n".join(prefix + line for line in textwrap.wrap(text, 70, break_on_hyphens=False))


DISGUISES = {
    "soft wrapped": lambda text: "\n".join(textwrap.wrap(text, 61, break_long_words=False, break_on_hyphens=False)),
    "cut at a column": lambda text: "\n".join(text[start : start + 47] for start in range(0, len(text), 47)),
    "json": lambda text: json.dumps({"level": "error", "message": text}),
    "json in json": lambda text: json.dumps({"body": json.dumps({"error": text})}),
    "html": html.escape,
    "quoted-printable": lambda text: quopri.encodestring(text.encode()).decode(),
    "repr": repr,
    "colours": lambda text: "\x1b[1;31m" + text.replace("memory", "\x1b[0mmemory") + "\x1b[0m",
    "no-break spaces": lambda text: text.replace(" ", "\xa0"),
    "comment": prefixed("# "),
    "quotation": prefixed("> > "),
    "rank": prefixed("[rank3]: "),
    "compose": prefixed("trainer-1  | "),
    "timestamps": prefixed("2031-02-03T04:05:06.789Z "),
    "python logging": prefixed("2031-02-03 04:05:06,789 - ERROR - "),
    "glog": prefixed("E0203 04:05:06.789012   123 worker.cc:45] "),
    "ray": prefixed("(RayTrainWorker pid=1234, ip=10.0.0.9) "),
    "mpi": prefixed("[1,3]<stderr>:"),
    "box": lambda text: "\n".join(f"│ {line:<72} │" for line in textwrap.wrap(text, 72, break_on_hyphens=False)),
    "source code": lambda text: "\n".join(f'    "{line} "' for line in textwrap.wrap(text, 60, break_on_hyphens=False)),
}


@pytest.mark.parametrize("disguise", DISGUISES.values(), ids=DISGUISES)
def test_where_a_message_was_pasted_from_does_not_matter(disguise):
    for framework, text, _ in MESSAGES:
        if framework in {"slurm", "kubernetes"} or text in {"Killed"} or "\n" in text:
            continue  # their line breaks mean something
        plain, dressed = read(text), read(disguise(text))
        assert dressed is not None, text
        assert [getattr(dressed, name) for name in FIELDS] == [getattr(plain, name) for name in FIELDS], text


def test_parts_left_out_leave_the_others_readable():
    failure = read(
        "... CUDA out of memory. Tried to allocate 5.00 GiB. GPU 1 ... Of the allocated memory 30.00 GiB is "
        "allocated by PyTorch ..."
    )
    assert (failure.requested_bytes, failure.allocated_bytes, failure.device) == (5 * 2**30, 30 * 2**30, "cuda:1")


def test_the_message_is_found_in_a_long_log():
    log = "step 1 loss 0.3 lr 1e-4 throughput 812 samples a second\n" * 60_000 + V2 + "\nbye\n" * 10
    failure = read(log)
    assert failure is not None and failure.device == "cuda:3" and failure.requested_bytes == 512 * 2**20


def test_a_wrapped_counter_is_said_to_be_one():
    diagnosis = outsize.explain(WRAPPED)
    assert diagnosis.failure.extra["wrapped"] == ("process_in_use_bytes",)
    assert any("wrapped at 2^64" in item.text for item in diagnosis.evidence)


def test_a_length_no_machine_can_have_is_called_impossible():
    diagnosis = outsize.explain("ArrowMemoryError: malloc of size 1751093230692206223 failed")
    assert diagnosis.cause.name == "impossible request"
    assert diagnosis.failure.extra["impossible"] == ("requested_bytes",)


@examples(300)
@given(st.sampled_from([row[1] for row in MESSAGES]), st.data())
def test_no_mutation_raises_or_slips_an_absurd_number_through(text, data):
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    junk = data.draw(st.text(alphabet=st.sampled_from("0123456789.,:;()[]{}<>=\\\n\r\t \"'KMGTPEiBx-"), max_size=60))
    check_no_absurd_number(text[:start] + junk + text[end:])


@examples(200)
@given(st.text(max_size=400))
def test_any_text_can_be_explained(text):
    check_no_absurd_number(text)


def check_no_absurd_number(text):
    diagnosis = outsize.explain(text)
    str(diagnosis)
    if diagnosis.failure is None:
        return
    named = {*diagnosis.failure.extra.get("wrapped", ()), *diagnosis.failure.extra.get("impossible", ())}
    for name in FIELDS:
        value = getattr(diagnosis.failure, name)
        if name.endswith("_bytes") and value is not None:
            assert value >= 0
            assert value <= 2**57 or name in named


def test_every_wording_compiles_though_a_message_needs_only_a_few():
    for row in read_formats():
        patterns = [row.anchor, *row.clauses, *row.each.values(), *([] if row.unless is None else [row.unless])]
        assert all(set(pattern.regex.groupindex) >= set(pattern.holes) for pattern in patterns), row.name
