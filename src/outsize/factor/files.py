"""Factors in a file: one safetensors file that any reader of the format opens, whose metadata say what they are.

In: a path. Out: a store that rebuilds regions. Opening reads the header, checks every length in it against the file, and then
the factors, which are small beside the tensor; nothing is unpickled. complex128, which the format lacks, is written as pairs of
float64. A file is written beside its target and renamed when it is complete.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

import numpy as np

from outsize.array.api.lazy import Array
from outsize.array.graph.build import source
from outsize.array.plan.prepare import prepare, run_prepared
from outsize.array.run.results import write_all
from outsize.array.store.base import Block, Store
from outsize.array.store.formats import safetensors
from outsize.array.store.formats.flat import FlatStore
from outsize.array.store.io.file import naming, written_whole
from outsize.array.store.io.partial import hold, partial_path, publish
from outsize.array.store.options import DEFAULT, Options
from outsize.array.store.registry import describe_sink, open_store
from outsize.core.errors import BudgetError, InputError, StoreError
from outsize.core.events import default_listener
from outsize.core.noun import Known, to_plain
from outsize.core.outcomes.factoring import Spectrum
from outsize.core.units import format_bytes
from outsize.factor.factored import Factored
from outsize.factor.facts import Facts
from outsize.factor.formats import KINDS, Narrow, Resident
from outsize.factor.formats.form import DTYPES
from outsize.factor.store import FactorStore

_NAME = "outsize.factors"
"""The metadata's name of what a file holds."""
_PAIRS = "complex128"
"""The metadata's row that lists arrays which are pairs of float64."""
_PEEKED = 4096
"""Bytes of a file in which its metadata begin."""


def recognise(path: str, head: bytes, size: int) -> bool:
    """True for a safetensors file whose metadata, which come first, say that it holds factors."""
    if not safetensors.recognise(path, head, size):
        return False
    with open(path, "rb") as file:
        begin = file.read(_PEEKED)[8:]
    return begin.startswith(b'{"__metadata__":{') and f'"{_NAME}"'.encode() in begin


def open_file(path: str, options: Options = DEFAULT) -> Store:
    """The tensor that the factors stand for."""
    table, _, size = safetensors.read_header(path)
    metadata = table.pop("__metadata__", None)
    facts, method, pairs = _read_facts(path, metadata)
    _check_room(path, size)
    form = _assemble(path, KINDS[method], {name: _read_array(path, name, name in pairs) for name in table})
    far = "an unknown distance" if facts.error is None else f"at most {facts.error:.3g} of their norm"
    note = (
        f"the values are rebuilt from {os.path.basename(path)}: they are {far} away from the data that were decomposed"
    )
    return FactorStore(form, path, path, held_as=lambda node: _holding(node, facts), note=note)


def _holding(node: Any, facts: Facts) -> Factored:
    made = Factored.of(node.store.form, facts, node.store.paths[0])
    made.node = node
    return made


def _read_facts(path: str, metadata: Any) -> tuple[Facts, str, frozenset[str]]:
    """What the metadata say, each of the kind that it has to be."""
    try:
        said = {str(name): str(text) for name, text in metadata.items()}
        method, version = said["method"], int(said["version"])
        facts = Facts(
            error=_number(said, "error"), lost=_number(said, "lost"), known=Known(said["known"]), asked=_number(said, "asked"),
            norm=_number(said, "norm"), original=np.dtype(said["original"]) if "original" in said else None,
            notes=tuple(str(note) for note in json.loads(said.get("notes", "[]"))),
            spectra=tuple(_read_spectrum(row) for row in json.loads(said.get("spectra", "[]"))),
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise StoreError(
            f"{path}: its metadata are damaged: {type(error).__name__} {str(error)[:80]}", path=path
        ) from None
    if version != 1 or method not in KINDS:
        raise StoreError(
            f"{path} holds {method[:40]!r} of version {version}; Outsize reads {', '.join(KINDS)} of version 1",
            path=path,
        )
    return facts, method, frozenset(said.get(_PAIRS, "").split())


def _number(said: dict[str, str], name: str) -> float | None:
    if name not in said:
        return None
    value = float(said[name])
    if math.isnan(value) or value < 0:
        raise ValueError(f"{name} is {said[name]}")
    return value


def _read_spectrum(row: dict[str, Any]) -> Spectrum:
    values = tuple(float(value) for value in row["values"])
    return Spectrum(name=str(row["name"]), values=values, kept=int(row["kept"]), length=int(row["length"]))


def _check_room(path: str, size: int) -> None:
    """Factors are held in memory as long as they are open."""
    from outsize.machine import current_budget

    host = current_budget().host
    if host is not None and size > host:
        raise BudgetError(
            f"{path} holds {format_bytes(size)} of factors, which are kept in memory, and the budget is {format_bytes(host)}: "
            "give a larger one with outsize.budget(host=...)", needed=size, budget=host, smallest=size, culprit=path,
        )  # fmt: skip


def _read_array(path: str, name: str, pairs: bool) -> Block:
    """One array, read straight into the memory that it stays in."""
    store = safetensors.open_file(path, Options(key=name))  # which checks its row
    store.close()
    if not isinstance(store, FlatStore):
        raise StoreError(f"{path}::{name} is damaged: factors are of {', '.join(map(str, DTYPES))}", path=path)
    stored = np.empty(store.shape, store.dtype)
    with naming(path), open(path, "rb") as file:
        file.seek(store.layout.offset)
        if stored.size and file.readinto(stored.reshape(-1).view(np.uint8).data) != stored.nbytes:
            raise StoreError(f"{path}::{name}: the file ended early", path=path)
    array: Block = np.asarray(stored, store.dtype.newbyteorder("="))
    if not pairs:
        return array
    if array.dtype != np.float64 or array.shape[-1:] != (2,):
        raise StoreError(f"{path}::{name} is not of pairs of float64, as its metadata say", path=path)
    return array.view(np.complex128)[..., 0]


def _assemble(path: str, kind: type[Resident], arrays: dict[str, Block]) -> Resident:
    try:
        form = kind.assemble(arrays)
        if set(form.arrays()) != set(arrays):
            raise InputError(f"{', '.join(sorted(set(arrays) - set(form.arrays())))[:80]} belong to no factor")
    except KeyError as error:
        raise StoreError(f"{path} is damaged: it has no array {error}", path=path) from None
    except InputError as error:
        raise StoreError(f"{path} is damaged: {error}", path=path) from None
    return form


def save_factors(factored: Factored, path: str) -> Factored:
    """Write factors to one file, and give back what is open of it."""
    form = factored.form
    assert isinstance(form, Resident)
    _check_suffix(path, form)
    arrays, pairs = {}, []
    for name, array in form.arrays().items():
        array = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
        if array.dtype == np.complex128:
            array = array[..., None].view(np.float64)
            pairs.append(name)
        arrays[name] = array
    header = safetensors.make_header(
        {"__metadata__": _write_facts(factored, pairs)} | safetensors.describe_tensors(arrays)
    )
    with hold(path), naming(path), written_whole(path, partial_path(path), publish) as file:
        file.write(header)
        for array in arrays.values():
            file.write(array.reshape(-1).view(np.uint8).data)
    return Factored.of(form, factored.facts, path)


def _write_facts(factored: Factored, pairs: list[str]) -> dict[str, str]:
    facts = factored.facts
    numbers = {"error": facts.error, "lost": facts.lost, "asked": facts.asked, "norm": facts.norm}
    said = {"format": _NAME, "version": "1", "method": factored.method, "known": facts.known.value}
    said |= {name: repr(float(value)) for name, value in numbers.items() if value is not None}
    if facts.original is not None:
        said["original"] = facts.original.name
    spectra = [to_plain(row) for row in facts.spectra]
    return said | {_PAIRS: " ".join(pairs), "notes": json.dumps(list(facts.notes)), "spectra": json.dumps(spectra)}


def _check_suffix(path: str, form: Resident) -> None:
    suffix = os.path.splitext(path)[1].lower()
    if suffix != ".safetensors" and suffix not in form.suffixes:
        raise InputError(f"{path} names another format than {form.method}: write {form.suffixes[0]} or .safetensors")
    if os.path.isdir(path):
        raise InputError(f"{path} is a folder: it is not overwritten by a file")


def save_narrow(
    factored: Factored, path: str, budget: Any, progress: Any, resume: bool, options: dict[str, Any]
) -> Array:  # fmt: skip
    """The data in their narrower type, streamed."""
    form = factored.form
    assert isinstance(form, Narrow)
    if form.stored != "bfloat16":
        return form.array.astype(form.stored).save(path, budget, progress, resume, **options)
    listener = default_listener() if progress is None or progress is True else progress or None
    with hold(path):
        sink = describe_sink(path, form.shape, "bfloat16", **options)
        prepared = prepare(form.array.astype(np.float32).node, sink, budget, name=f"save {os.path.basename(path)}")
        run_prepared(prepared, lambda work: write_all(work, listener)[0].close())
    return Array(source(open_store(path)))
