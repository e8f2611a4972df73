"""The verb: an array larger than memory in, a `Factored` out, inside a budget and with a promised error."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from outsize.array.api.lazy import Array
from outsize.array.device.find import find_device
from outsize.array.graph.node import Node, walk
from outsize.array.plan.prepare import resolve_budget
from outsize.array.run.cluster import on_one_worker
from outsize.array.run.now import make_now
from outsize.array.store.io.addresses import is_remote
from outsize.core.errors import BudgetError, InputError
from outsize.core.events import Listener, default_listener
from outsize.core.extras import need
from outsize.core.memory import Budget
from outsize.core.plan import Plan
from outsize.core.units import format_bytes
from outsize.engine.cluster import Cluster, current_cluster, use_cluster
from outsize.engine.pool import cores, cores_of_workers
from outsize.factor.algorithms.auto import choose
from outsize.factor.algorithms.canonical import canonical
from outsize.factor.algorithms.checkpoint import Checkpoint, checkpoint, digest_of
from outsize.factor.algorithms.coded import Compressed, can_code, coded
from outsize.factor.algorithms.found import Found, stored
from outsize.factor.algorithms.narrow import narrow_error, rounded
from outsize.factor.algorithms.ranks import Ranks
from outsize.factor.algorithms.request import Request, read_request
from outsize.factor.algorithms.session import Session
from outsize.factor.algorithms.smallest import find_smallest, find_way, fits_at_once
from outsize.factor.algorithms.tensor import Tensor
from outsize.factor.algorithms.train import train
from outsize.factor.algorithms.tucker import tucker
from outsize.factor.factored import Factored, describe_cut
from outsize.factor.formats import Canonical, Form, Narrow, Svd, Train, Tucker

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
    node, joined = _open(x), current_cluster()
    request = read_request(method, error, rank, node.shape)
    if joined is not None and (device not in (None, "cpu") or is_remote(joined.scratch or "")):
        return _on_one_worker(Array(node), method, error, rank, budget, device, dry_run=dry_run, resume=resume)
    if not dry_run and any(each.barrier for each in walk(node)):
        node = make_now(node)
    with (
        use_cluster(None),
        contextlib.nullcontext() if joined is None else cores_of_workers(min(joined.cores, cores())),
    ):
        return _decompose(
            node, request, _budget(budget, joined), device, joined, listener, dry_run=dry_run, resume=resume
        )


def _budget(given: Any, joined: Cluster | None) -> Budget:
    """What a process may hold: on a cluster each worker, and this process, which joins what they found."""
    with use_cluster(joined):
        allowed = resolve_budget(given)
    if joined is None:
        return allowed
    here = resolve_budget(None)
    return allowed if (here.host or 0) >= (allowed.host or 0) else replace(here, scratch=allowed.scratch)


def _decompose(
    node: Node, request: Request, allowed: Budget, device: Any, joined: Cluster | None, listener: Listener | None, *,
    dry_run: bool, resume: bool,
) -> Any:  # fmt: skip
    there = find_device(device)[0]
    title = f"decompose {node.label()} {node.dtype}{list(node.shape)} by {request.method}"

    def plan(host: int, ranks: Ranks, *, strict: bool = True, at_once: bool = False) -> Session:
        session = Session(allowed, Checkpoint(None, host), None, title, there, dry=True, strict=strict, ranks=ranks,
                          at_once=at_once, cluster=joined)  # fmt: skip
        _plan(session, node, request)
        return session

    if dry_run:
        return _describe(plan, request, allowed.host or 0)
    digest = digest_of(node, f"{request.text()} {there and there.device.name}{' on workers' if joined else ''}")
    with checkpoint(allowed.scratch, digest, allowed.host or 0, resume) as states:
        session = Session(allowed, states, listener or default_listener(), title, there, cluster=joined)
        try:
            return _work(session, node, request, plan)
        except BudgetError as error:
            raise _refusal(error, plan, request, session) from None
        finally:
            session.close()


def _on_one_worker(x: Array, method: str, error: Any, rank: Any, budget: Any, device: Any, **options: Any) -> Any:
    """The whole work on one worker: it has the device, or a disk for what an object store does not take piece by piece."""
    made = on_one_worker(decompose, budget, x, method, error, rank, device=device, **options)
    return replace(made, workers=1, useful_workers=1) if isinstance(made, Plan) else made


def _work(session: Session, node: Node, request: Request, plan: Callable[..., Session]) -> Factored:
    """Decompose; where passes do not fit, in another way, if one does."""
    work = _factor_to_largest if request.largest else _factor
    try:
        return work(session, node, request)
    except BudgetError:
        way = find_way(plan, session.ranks, session.host)
        if way in (None, (session.host, False)):
            way = (session.host, True) if fits_at_once(plan, session.host) else None
        if way is None:
            raise
    session.start_again(way[0], at_once=way[1])
    return work(session, node, request)


def _plan(session: Session, node: Node, request: Request) -> None:
    """Go through the work without data."""
    if request.largest:
        session.compute(abs(Array(node)).max(), "largest element")
    _find(session, node, replace(request, error=request.error or request.largest, largest=None))


def _describe(plan: Callable[..., Session], request: Request, host: int) -> Plan:
    """The plan, with the smallest budget; what it supposes is said."""
    smallest = find_smallest(plan, Ranks(), given=request.known)
    way = find_way(plan, Ranks(), host) or (host, False)
    session = plan(way[0], Ranks(), strict=False, at_once=way[1])
    session.asked = host
    notes = () if request.known else (f"ranks are known after the first passes; {smallest.words()}",)
    return session.plan(smallest.bytes, notes)


def _refusal(error: BudgetError, plan: Callable[..., Session], request: Request, session: Session) -> BudgetError:
    """The same error, with the smallest budget: found with what was seen of the data."""
    above = max(session.asked, error.smallest or 0)
    smallest = find_smallest(plan, session.ranks, given=request.known, above=above)
    return BudgetError(
        f"{str(error).partition('; the smallest')[0]}; {smallest.words()}", needed=error.needed, budget=session.asked,
        smallest=smallest.bytes, culprit=error.culprit,
        plan=replace(error.plan or session.plan(), smallest=smallest.bytes),
    )  # fmt: skip


def _open(x: Any) -> Node:
    if isinstance(x, Array):
        node = x.node
    else:
        from outsize.array import open as open_array

        node = open_array(x).node
    if node.dtype.kind not in "biufc":
        raise InputError(f"an array of {node.dtype} has no norm: give one of numbers")
    return node


def _factor(session: Session, node: Node, request: Request) -> Factored:
    if request.method in ("float16", "bfloat16"):
        return _narrow(session, node, request, request.method, None, ())
    answer = _find(session, node, request)
    assert answer is not None
    method, found, notes = answer
    if isinstance(found, Compressed):
        return _promised(session, node, request, found.form, found.error, notes, norm=found.norm)
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
        return _code(session, node, request)
    if request.method in ("float16", "bfloat16"):
        narrow_error(session, node, request.method)  # a plan; the work itself begins elsewhere
        return None
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


def _code(session: Session, node: Node, request: Request) -> tuple[str, Compressed, tuple[str, ...]] | None:
    assert request.error is not None
    need("zfpy", "method='zfp'", "use another method")
    if not can_code(node):
        raise InputError(f"zfp cannot take {node.dtype}{list(node.shape)} here: it takes float32 and float64")
    packed = coded(session, node, request.error, node.nbytes, must=True)
    if packed is None and not session.dry:
        raise InputError(
            f"zfp cannot take fewer than the {format_bytes(node.nbytes)} of the data at an error of {request.error:g}: ask for a "
            "larger error, or keep the data as they are"
        )
    return None if packed is None else ("zfp", packed, ())


def _factor_to_largest(session: Session, node: Node, request: Request) -> Factored:
    """Tighten the error of the norm until the largest difference, measured, is small enough."""
    assert request.largest is not None
    x = Array(node)
    highest = float(session.compute(abs(x).max(), "largest element"))
    error = request.largest
    for _ in range(_TRIES):
        session.held.clear()
        made = _factor(session, node, replace(request, error=error, largest=None))
        session.held = {"the factors": made.nbytes}
        apart = float(session.compute(abs(x - made.array).max(), "largest difference")) if highest else 0.0
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
        error = narrow_error(session, node, name)
    if request.error is not None and error > request.error:
        raise InputError(f"{name} is {error:.2g} away from these data, {request.error:g} was asked: use another method")
    return _promised(session, node, request, Narrow(rounded(node, name), name), error, notes)


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
    if narrow and not error <= (sys.float_info.max if request.error is None else request.error):
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
    spectra = describe_cut(found.values, found.kept, request.method, node.shape)
    return _promised(session, node, request, form, error, tuple(notes), spectra=spectra, norm=found.norm)


def _promised(
    session: Session, node: Node, request: Request, form: Form, error: float, notes: tuple[str, ...], **known: Any
) -> Factored:
    """What a user gets, with all that is known of it."""
    return Factored(
        form, error=error, asked=request.error, notes=notes, plan=session.plan(), original=node.dtype, **known
    )


def _form(method: str, arrays: tuple[Any, ...]) -> Form:
    if method == "tt":
        return Train(tuple(arrays))
    if method == "svd":
        return Svd(*arrays)
    if method == "cp":
        return Canonical(arrays[0], tuple(arrays[1:]))
    return Tucker(arrays[0], tuple(arrays[1:]))
