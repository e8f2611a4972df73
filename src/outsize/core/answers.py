"""JSON answers read back: what `outsize VERB --json` printed, or `noun.to_dict()` gave, becomes the noun again.

In: text whose top has a `kind`. Out: the noun, checked field by field, or one sentence that says why it is none. Nothing in the
text is run, and its size is bounded.
"""

from __future__ import annotations

import importlib
import json
import os
from typing import NoReturn

from outsize.core.errors import InputError, StoreError
from outsize.core.noun import Noun, from_plain

KINDS = {
    "Contents": "contents", "Conversion": "outcomes.conversion", "Diagnosis": "failure", "Factoring": "outcomes.factoring",
    "FitPlan": "fitting", "Footprint": "footprint", "FootprintChange": "footprint_change",
    "MeasuredPeak": "outcomes.measured_peak", "Outcome": "outcomes.outcome", "Plan": "plan",
    "ProgramRun": "outcomes.program_run", "Reading": "memory", "Receipt": "footprint", "Recording": "outcomes.recording",
    "Replay": "allocation", "Shrinking": "outcomes.shrinking", "Simulation": "simulation", "Sizing": "sizing",
}  # fmt: skip
"""Name of a noun that is an answer -> its module in `core`."""
LARGEST = 256 * 2**20
"""Bytes of the largest answer that is read."""


def read_answer(path: str | os.PathLike[str]) -> Noun:
    name = os.fspath(path)
    try:
        with open(name, encoding="utf-8", errors="replace") as file:
            text = file.read(LARGEST + 1)
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror or error}") from error
    if len(text) > LARGEST:
        raise StoreError(f"{name} has more than {LARGEST:,} characters: no answer is that long", path=name)
    return parse_answer(text, name)


def parse_answer(text: str, name: str = "the text") -> Noun:
    try:
        data = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        where = f": line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise StoreError(
            f"{name} is not JSON{where}: give an answer of a verb's --json, a recording (.watch) or a snapshot (.pickle)",
            path=name,
        ) from None
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join(KINDS)
        raise StoreError(f"{name} is no answer of Outsize: its `kind` is {kind!r:.40}, not one of {known}", path=name)
    noun: type[Noun] = getattr(importlib.import_module(f"outsize.core.{KINDS[kind]}"), kind)
    try:
        return from_plain(noun, data)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"{name} says that it is a {kind}, but is damaged: {error}", path=name) from None


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")
