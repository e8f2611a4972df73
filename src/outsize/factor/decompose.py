"""The verb: an array larger than memory in, a `Factored` out, inside a budget and with a promised error."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from outsize.array.api.lazy import Array
from outsize.array.graph.node import Node, walk
from outsize.array.plan.prepare import resolve_budget
from outsize.array.run.now import make_now
from outsize.core.errors import InputError
from outsize.core.events import Listener, default_listener
from outsize.core.factoring import Spectrum
from outsize.core.memory import Budget
from outsize.core.noun import Known
from outsize.core.units import format_bytes
from outsize.factor.algorithms.auto import choose
from outsize.factor.algorithms.canonical import canonical
from outsize.factor.algorithms.checkpoint import Checkpoint, checkpoint, digest_of
from outsize.factor.algorithms.coded import Compressed, coded
from outsize.factor.algorithms.found import Found, stored
from outsize.factor.algorithms.narrow import narrow_error, rounded
from outsize.factor.algorithms.request import Request, read_request
from outsize.factor.algorithms.session import Session
from outsize.factor.algorithms.tensor import Tensor
from outsize.factor.algorithms.train import train
from outsize.factor.algorithms.tucker import tucker
from outsize.factor.factored import Factored
from outsize.factor.formats import Canonical, Form, Narrow, Svd, Train, Tucker

_GUESS = (
    "ranks are known after the first passes: what follows them supposes an eighth of each length, and is an estimate"
)
_TRIES = 8
"""Times that the error is tightened until the largest difference is small enough."""


def decompose(
    x: Any, method: str = "auto", error: float | str = 0.01, rank: int | tuple[int, ...] | None = None,
    budget: int | str | Budget | None = None, device: Any = None, *, dry_run: bool = False, resume: bool = True,
    listener: Listener | None = None,
) -> Any:  # fmt: skip
    """Keep a tensor as a few small factors, at most `error` away from it (relative, Frobenius norm): `Factored`.

    `x` is an array, a path, a store, a NumPy or torch array of any size. `method`: `tucker`, `tt` (tensor train), `cp`, `svd`
    (matrices), or `auto`, which takes the smallest. `error="1e-3 max"` bounds the largest difference instead, as a share of
    the largest element. `rank=` asks for ranks and says the error. `dry_run=True` returns the plan. The same call goes on
    after a kill.

    >>> f = outsize.decompose("x.npy", error=0.01, budget="512MiB")
    >>> f.error, f.ratio
    """
    node = _open(x)
    request = read_request(method, error, rank, node.shape)
    allowed = resolve_budget(budget)
    if dry_run:
        session = Session(allowed, Checkpoint(None, allowed.host or 0), None, _title(node, request), device, dry=True)
        _find(session, node, replace(request, error=request.error or request.largest))
        return session.plan(() if request.ranks else (_GUESS,))
    if any(each.barrier for each in walk(node)):
        node = make_now(node)
    digest = digest_of(node, f"{request.text()} {device}")
    with checkpoint(allowed.scratch, digest, allowed.host or 0, resume) as states:
        session = Session(allowed, states, listener or default_listener(), _title(node, request), device)
        try:
            return _factor_to_largest(session, node, request) if request.largest else _factor(session, node, request)
        finally:
            session.close()


def _open(x: Any) -> Node:
    if isinstance(x, Array):
        node = x.node
    else:
        from outsize.array import open as open_array

        node = open_array(x).node
    if node.dtype.kind not in "biufc":
        raise InputError(f"an array of {node.dtype} has no norm: give one of numbers")
    return node


def _title(node: Node, request: Request) -> str:
    return f"decompose {node.label()} {node.dtype}{list(node.shape)} by {request.method}"


def _factor(session: Session, node: Node, request: Request) -> Factored:
    if request.method in ("float16", "bfloat16"):
        return _narrow(session, node, request, request.method, None, ())
    answer = _find(session, node, request)
    assert answer is not None
    method, found, notes = answer
    if isinstance(found, Compressed):
        return Factored(found.form, error=found.error, known=Known.BOUND, asked=request.error, notes=notes, plan=session.plan(),
                        norm=found.norm, original=node.dtype)  # fmt: skip
    if isinstance(found, float):
        return _narrow(session, node, request, method, found, notes)
    return finish(session, node, replace(request, method=method), found, notes)


def _find(
    session: Session, node: Node, request: Request
) -> tuple[str, Found | Compressed | float, tuple[str, ...]] | None:  # fmt: skip
    """(method, factors or the error of a plain dtype, notes); None in a dry session."""
    tensor = Tensor(node)
    if request.method == "auto":
        choice = choose(session, node, request)
        if choice is None:
            return None
        return choice.method, choice.error if choice.found is None else choice.found, choice.notes
    if request.method == "zfp":
        packed = None if session.dry or request.error is None else coded(session, node, request.error, node.nbytes)
        if packed is None and not session.dry:
            raise InputError(
                f"zfp cannot take {node.dtype}{list(node.shape)} here: it takes float32 and float64, needs zfpy, and holds its "
                f"blocks in a quarter of the budget, {format_bytes(session.room // 4)}"
            )
        return None if packed is None else ("zfp", packed, ())
    if request.method == "cp":
        fitted = canonical(session, tensor, request)
        return None if fitted is None else ("cp", *fitted)
    if request.method == "tt":
        found = train(session, tensor, request)
    elif request.method == "svd":
        found = matrix(tucker(session, tensor, replace(request, ranks=request.ranks and request.ranks * 2)))
    else:
        found = tucker(session, tensor, request)
    return None if found is None else (request.method, found, ())


def _factor_to_largest(session: Session, node: Node, request: Request) -> Factored:
    """Tighten the error of the norm until the largest difference, measured, is small enough."""
    assert request.largest is not None
    x = Array(node)
    highest = float(abs(x).max().compute(budget=session.host))
    error = request.largest
    for _ in range(_TRIES):
        session.held.clear()
        made = _factor(session, node, replace(request, error=error, largest=None))
        apart = float(abs(x - made.array).max().compute(budget=session.host)) if highest else 0.0
        if apart <= request.largest * highest:
            note = f"the largest difference is {apart:.3g}, measured; {request.largest * highest:.3g} was asked"
            facts = replace(made.facts, notes=(*made.facts.notes, note))
            return Factored.of(made.form, facts)
        error *= max(0.05, 0.7 * request.largest * highest / apart)
        if error < 1e-11:
            break
    raise InputError(
        f"no factors come within {request.largest:g} of the largest element everywhere: "
        f"the nearest were {apart / highest:.2g} away"
    )


def _narrow(
    session: Session, node: Node, request: Request, name: str, error: float | None, notes: tuple[str, ...]
) -> Factored:
    """The data in a plain narrower dtype."""
    if node.dtype.kind == "c":
        raise InputError(f"complex numbers have no {name}: use method='tucker' or 'tt'")
    if error is None:
        error = narrow_error(node, name, session.host)
    if request.error is not None and error > request.error:
        raise InputError(f"{name} is {error:.2g} away from these data, {request.error:g} was asked: use another method")
    form = Narrow(rounded(node, name), name)
    return Factored(form, error=error, known=Known.BOUND, asked=request.error, notes=notes, plan=session.plan(),
                    original=node.dtype)  # fmt: skip


def matrix(found: Found | None) -> Found | None:
    """A Tucker decomposition of a matrix as its singular value decomposition."""
    if found is None:
        return None
    core, left, right = found.arrays
    u, s, vh = np.linalg.svd(core, full_matrices=False)
    return replace(found, arrays=(left @ u, s, vh @ right.T), values=(s,), kept=(len(s),))


def finish(session: Session, node: Node, request: Request, found: Found, more: tuple[str, ...]) -> Factored:
    """Store factors as narrow as the error allows, and promise."""
    narrow = node.dtype.char in "?bBhHef" or node.dtype.char == "F"
    complex_ = node.dtype.kind == "c"
    wide = np.dtype(np.complex128 if complex_ else np.float64)
    single = np.dtype(np.complex64 if complex_ else np.float32)
    arrays, error = stored(found, single if narrow else wide, request.method, math.prod(node.shape))
    if request.error is not None and error > request.error and narrow:
        arrays, error = stored(found, wide, request.method, math.prod(node.shape))
    if request.error is not None and error > request.error:
        raise InputError(
            f"an error of {request.error:g} cannot be promised for these data in double precision: the least is {error:.1e}"
        )
    form = _form(request.method, arrays)
    notes = list(more)
    if form.nbytes >= node.nbytes:
        notes.append(
            f"the factors take {format_bytes(form.nbytes)}, the data {format_bytes(node.nbytes)}: nothing is saved"
        )
    return Factored(
        form, error=error, known=Known.BOUND, asked=request.error, notes=tuple(notes), spectra=_spectra(found, request, node),
        plan=session.plan(), norm=found.norm, original=node.dtype,
    )  # fmt: skip


def _form(method: str, arrays: tuple[Any, ...]) -> Form:
    if method == "tt":
        return Train(tuple(arrays))
    if method == "svd":
        return Svd(*arrays)
    if method == "cp":
        return Canonical(arrays[0], tuple(arrays[1:]))
    return Tucker(arrays[0], tuple(arrays[1:]))


def _spectra(found: Found, request: Request, node: Node) -> tuple[Spectrum, ...]:
    rows = []
    for place, (values, kept) in enumerate(zip(found.values, found.kept, strict=True)):
        name = {"tt": f"cut {place} | {place + 1}", "svd": "matrix"}.get(request.method, f"mode {place}")
        length = node.shape[place] if request.method == "tucker" else len(values)
        rows.append(Spectrum(name=name, values=tuple(map(float, values)), kept=kept, length=length))
    return tuple(rows)
