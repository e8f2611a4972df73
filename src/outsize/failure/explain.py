"""`explain`: an exception, a message, a log, a snapshot -> a `Diagnosis`.

An exception happened here, so the machine is read; a text may come from anywhere, so the machine stays out of it unless
`here` says otherwise. Where a text is no out-of-memory message the diagnosis has no failure: its cause says what it is instead,
where that is known, and nothing is made up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from outsize.core.errors import InputError
from outsize.core.failure import Diagnosis, Failure
from outsize.failure.case import Case, process_settings
from outsize.failure.causes.find import find_causes
from outsize.failure.evidence import find_evidence
from outsize.failure.message import read
from outsize.failure.otherwise import find_otherwise
from outsize.failure.remedies.find import find_remedies
from outsize.machine import memory

NOTHING = Diagnosis(failure=None, cause=None)
"""What is said of a text that is no out-of-memory message, nor anything that is taken for one."""


def explain(
    what: BaseException | str | bytes | os.PathLike[str] | Mapping[str, Any],
    *,
    here: bool | None = None,
    after: os.PathLike[str] | Mapping[str, Any] | None = None,
) -> Diagnosis:
    """Why memory ran out, and what would mend it.

    `what` is an exception, the text of a message or log, the path of a log or of a CUDA memory snapshot, or the snapshot
    itself. `here` says whether it happened on this machine (an exception did; a text may not have). `after` is a later
    snapshot of the same program: what grew between the two is added.

    >>> outsize.explain("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; ...)").cause.name
    """
    if isinstance(what, BaseException):
        return explain_exception(what, here=here is not False)
    if isinstance(what, bytes):
        what = what.decode("utf-8", "replace")
    if isinstance(what, str):
        return explain_text(what, here=bool(here))
    if isinstance(what, Mapping | os.PathLike):
        from outsize.failure.snapshot import explain_path, explain_snapshot

        if isinstance(what, Mapping):
            return explain_snapshot(what, here=bool(here), after=after)
        return explain_path(what, here=bool(here), after=after)
    raise InputError(f"cannot explain a {type(what).__name__}: give an exception, a text, a path or a memory snapshot")


def explain_text(text: str, *, here: bool = False) -> Diagnosis:
    """The diagnosis of a message."""
    return _diagnose_message(read(text), text, here)


def explain_exception(error: BaseException, *, here: bool = True) -> Diagnosis:
    """The diagnosis of an exception, or of the one that led to it."""
    for link in _chain(error):
        ready = getattr(link, "diagnosis", None)
        if isinstance(ready, Diagnosis):
            return ready
        text = describe(link)
        diagnosis = _diagnose_message(_refine(read(text), link), text, here)
        if diagnosis.failure is not None:
            return diagnosis
    return NOTHING


def _diagnose_message(failure: Failure | None, text: str, here: bool) -> Diagnosis:
    if failure is None:
        return find_otherwise(text) or NOTHING
    if not here:
        return diagnose(Case(failure=failure, text=text))
    watched = "OUTSIZE_RUN_FOLDER" in os.environ
    return diagnose(Case(failure=failure, text=text, reading=memory(), settings=process_settings(), watched=watched))


def diagnose(case: Case) -> Diagnosis:
    """Causes, evidence and remedies of a case."""
    causes = find_causes(case)
    return Diagnosis(
        failure=case.failure,
        cause=causes[0],
        candidates=causes[1:],
        evidence=find_evidence(case),
        remedies=find_remedies(case, causes),
    )


def describe(error: BaseException) -> str:
    """An exception as its traceback would end."""
    kind = type(error)
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{kind.__module__}.{kind.__qualname__}: {text}".removeprefix("builtins.")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, those in its group, and those that led to it."""
    seen: set[int] = set()
    queue = [error]
    while queue:
        link = queue.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        queue += [
            *getattr(link, "exceptions", ()),
            *(cause for cause in (link.__cause__, link.__context__) if cause is not None),
        ]


def _refine(failure: Failure | None, error: BaseException) -> Failure | None:
    """NumPy's error carries shape and dtype themselves, not only their text."""
    shape, dtype = getattr(error, "shape", None), getattr(error, "dtype", None)
    if failure is None or failure.framework != "numpy" or not isinstance(shape, tuple) or dtype is None:
        return failure
    return replace(failure, shape=tuple(int(axis) for axis in shape), dtype=str(dtype))
