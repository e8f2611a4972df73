"""Outsize: tensors and models that do not fit in memory.

`size` says what a tensor takes, `memory` what this machine has, and `explain` why memory ran out. The other verbs run
work inside a memory budget. Every name below is loaded when it is first used, so `import outsize` is fast.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from outsize.core.errors import BudgetError, ClusterError, InputError, OutOfMemory, OutsizeError, StoreError
from outsize.core.events import Listener, set_default_listener
from outsize.core.noun import Drawing, set_drawing

if TYPE_CHECKING:
    from outsize import array as array
    from outsize import compression as compression
    from outsize import factor as factor
    from outsize.array import arange as arange
    from outsize.array import full as full
    from outsize.array import linspace as linspace
    from outsize.array import ones as ones
    from outsize.array import open as open
    from outsize.array import zeros as zeros
    from outsize.array.api.empty import empty as empty
    from outsize.array.api.together import compute as compute
    from outsize.array.api.together import save as save
    from outsize.array.feed.source import DataSource as DataSource
    from outsize.array.run.cluster import cluster as cluster
    from outsize.array.run.contents import show as show
    from outsize.array.run.convert import convert as convert
    from outsize.compression.shrink import shrink as shrink
    from outsize.factor.decompose import decompose as decompose
    from outsize.failure.explain import explain as explain
    from outsize.failure.guard import explain_uncaught as explain_uncaught
    from outsize.failure.guard import guard as guard
    from outsize.machine import budget as budget
    from outsize.machine import memory as memory
    from outsize.model.estimation.calibration import calibrate as calibrate
    from outsize.model.estimation.calibration import learn_from_run as learn_from_run
    from outsize.model.estimation.estimate import estimate as estimate
    from outsize.model.fitting.data_loader import data_loader as data_loader
    from outsize.model.fitting.fit import fit as fit
    from outsize.model.fitting.largest_batch import batch_size as batch_size
    from outsize.monitor.watching import watch as watch
    from outsize.report.outputs.loggers import log_to as log_to
    from outsize.sizing import size as size

__version__ = "0.1.0"

_VERBS = {
    "DataSource": "outsize.array.feed.source",
    "arange": "outsize.array",
    "batch_size": "outsize.model.fitting.largest_batch",
    "budget": "outsize.machine",
    "calibrate": "outsize.model.estimation.calibration",
    "cluster": "outsize.array.run.cluster",
    "compute": "outsize.array.api.together",
    "convert": "outsize.array.run.convert",
    "data_loader": "outsize.model.fitting.data_loader",
    "decompose": "outsize.factor.decompose",
    "empty": "outsize.array.api.empty",
    "estimate": "outsize.model.estimation.estimate",
    "explain": "outsize.failure",
    "explain_uncaught": "outsize.failure",
    "fit": "outsize.model.fitting.fit",
    "full": "outsize.array",
    "guard": "outsize.failure",
    "learn_from_run": "outsize.model.estimation.calibration",
    "linspace": "outsize.array",
    "log_to": "outsize.report.outputs.loggers",
    "memory": "outsize.machine",
    "ones": "outsize.array",
    "open": "outsize.array",
    "save": "outsize.array.api.together",
    "shrink": "outsize.compression.shrink",
    "show": "outsize.array.run.contents",
    "size": "outsize.sizing",
    "watch": "outsize.monitor.watching",
    "zeros": "outsize.array",
}
"""Public verb -> the module it lives in."""

_OLD = {"install": "explain_uncaught", "keep": "learn_from_run", "loader": "data_loader"}
"""Names of version 0.1 -> what they are called now. They go with the next version."""

_ROOMS: tuple[str, ...] = ("array", "compression", "factor")
"""Rooms that are public as they are."""

__all__ = ["BudgetError", "ClusterError", "InputError", "OutOfMemory", "OutsizeError", "StoreError", *_VERBS, *_ROOMS]


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return getattr(importlib.import_module(_VERBS[name]), name)
    if name in _OLD:
        import warnings

        warnings.warn(f"outsize.{name} is called outsize.{_OLD[name]} now", DeprecationWarning, stacklevel=2)
        return __getattr__(_OLD[name])
    if name in _ROOMS:
        return importlib.import_module(f"outsize.{name}")
    raise AttributeError(f"module 'outsize' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def _load_drawing() -> Drawing:
    with _same_draws():
        from outsize.report import draw

    return draw


@contextlib.contextmanager
def _same_draws() -> Iterator[None]:
    """Python's random numbers as they were: rich draws one when it is imported, and a user may have set a seed."""
    import random

    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)


set_drawing(_load_drawing)


def _load_listener() -> Listener | None:
    if "ipykernel" in sys.modules:
        from outsize.report.notebook_progress import notebook_listener

        return notebook_listener()
    if sys.stderr is None or not sys.stderr.isatty():  # asked first: drawing is slow to import
        return None
    with _same_draws():
        from outsize.report.progress import terminal_listener

    return terminal_listener()


set_default_listener(_load_listener)
