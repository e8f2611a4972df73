"""A suspect with its name and its lines -> `Finding`: one sentence on who keeps what, one on what to change.

`KINDS` are tried in order; the first that fits what is kept gives the kind, the words and the advice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from outsize.core.outcomes.recording import HOST_DEVICE, Finding
from outsize.core.units import format_bytes
from outsize.monitor.leaks.census import GRAPH_NODES
from outsize.monitor.leaks.frameworks import is_array_of, library_of, traced_name
from outsize.monitor.leaks.names import Holding
from outsize.monitor.leaks.suspects import Suspect, has_graph
from outsize.monitor.leaks.user_code import code_line
from outsize.monitor.trend import Trend


class Kind(NamedTuple):
    """One way to lose memory."""

    name: str
    """What a finding calls it."""
    fits: Callable[[Suspect, Holding], bool]
    """True where this is it."""
    keeps: str
    """What is kept, in the plural."""
    advice: str
    """What to change; `{name}` is the holder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """The lines that were seen."""

    kept: str | None
    """The line that added to the holder."""
    allocated: str | None
    """The line that took the memory."""


def _ends_in(*names: str) -> Callable[[Suspect, Holding], bool]:
    return lambda _, holding: any(name in part for name in names for part in holding.chain)


def _is_element(*kinds: type) -> Callable[[Suspect, Holding], bool]:
    return lambda suspect, _: isinstance(suspect.sample, kinds)


def _is_from(*modules: str) -> Callable[[Suspect, Holding], bool]:
    return lambda suspect, _: library_of(type(suspect.sample)) in modules


def _is_closure(suspect: Suspect, _: Holding) -> bool:
    inner = suspect.sample
    return isinstance(inner, FunctionType | MethodType) or type(inner).__name__ in ("partial", "finalize")


def _is_pending(suspect: Suspect, _: Holding) -> bool:
    return type(suspect.sample).__name__ in ("generator", "coroutine", "Task", "Future", "async_generator")


def _is_array_of(library: str) -> Callable[[Suspect, Holding], bool]:
    return lambda suspect, _: any(is_array_of(part, library) for part in (suspect.sample, *_parts(suspect.sample)))


def _parts(element: Any) -> list[Any]:
    """What a small element is made of."""
    values = element.values() if isinstance(element, dict) else element
    return list(values) if isinstance(element, dict | tuple | list) and len(element) <= 32 else []


# Rows of a table: what a finding calls it, where it fits, what is kept, what to change.
# fmt: off
KINDS: tuple[Kind, ...] = (
    Kind("tracing", lambda suspect, _: suspect.kind == "traces" and library_of(type(suspect.item)) == "tensorflow", "traces",
         "pass tensors and not Python numbers, give it an `input_signature`, or set `reduce_retracing=True`"),
    Kind("tracing", lambda suspect, _: suspect.kind == "traces", "compiled programs",
         "pass arrays of few shapes (pad them), and no `static_argnums` that change at each call"),
    Kind("hooks", _ends_in("_hooks", "hooks_dict"), "hooks",
         "register the hook once, or keep its handle and call `handle.remove()`"),
    Kind("modules", _ends_in("_modules", "_parameters", "_buffers", "param_groups"), "parts of the model",
         "add modules, parameters and groups once, before the loop"),
    Kind("graphs", lambda suspect, _: has_graph(suspect.sample), "graphs",
         "append `.item()` or `.detach()` of it: a tensor that needs a gradient keeps everything that made it"),
    Kind("graphs", lambda suspect, _: suspect.kind == "graph", "steps of autograd graph",
         "add `.item()`, or `.detach()` what the next step starts from: each step hangs its graph on the last"),
    Kind("objects", lambda suspect, _: suspect.kind == "kind", "",
         "find who refers to them: each may hold the one before, or C code holds them (`atexit`, a callback of a library)"),
    Kind("cache", lambda suspect, _: suspect.kind == "cache", "results",
         "give the cache a `maxsize`, and no arguments that never come again"),
    Kind("tracebacks", _is_element(BaseException), "exceptions",
         "keep `repr(error)` or `error.with_traceback(None)`: a traceback keeps every variable of its frames"),
    Kind("threads", _is_element(threading.Thread), "threads",
         "end and `join()` each thread, or use one pool for all of them"),
    Kind("closures", _is_closure, "functions",
         "unregister it when it is done, or hand it only what it needs: a function keeps the variables it uses"),
    Kind("tasks", _is_pending, "unfinished tasks", "await or cancel them, or wait before more are made"),
    Kind("array", lambda suspect, _: suspect.kind == "buffer", "",
         "write each part to a file or a fixed array: it is copied whole and grows with each step"),
    Kind("live arrays", _is_array_of("jaxlib"), "live JAX arrays",
         "keep `float(x)` or `jax.device_get(x)` of it: a JAX array takes device memory as long as a name leads to it"),
    Kind("cache", lambda suspect, _: isinstance(suspect.item, dict), "entries",
         "drop entries that are not needed again, or bound their number"),
    Kind("list", _is_from("numpy", "torch", "jaxlib", "tensorflow", "array", "cupy"), "arrays",
         "keep sums or single numbers instead, write them to a file, or clear it each epoch"),
    Kind("list", lambda *_: True, "objects", "drop elements that are not needed again, or bound their number"),
)
# fmt: on
"""In the order in which they are tried."""


def describe(suspect: Suspect, holding: Holding, lines: Lines, trend: Trend, device: str, steps: int) -> Finding:
    """The finding."""
    kind = next(kind for kind in KINDS if kind.fits(suspect, holding))
    name, where = _name(suspect, holding, kind), lines.kept or _inherent_line(suspect) or holding.where
    what = type(suspect.item).__name__ if suspect.kind == "container" else suspect.kind
    place = f" in {where}" if where else ""
    rate = f"{on(device)}: {trend.rate(steps > 0)}"
    called = f"`{name}`" if name else f"a {what} without a name"
    if suspect.kind == "buffer":
        text = f"{called}{place} has grown to {format_bytes(suspect.length)}{rate}"
    elif suspect.kind == "traces":
        again = f"is traced again and again{f' at {where}' if where else ''}"
        text = f"{called} {again}, and keeps {suspect.length:,} {kind.keeps}{rate}"
    elif suspect.kind == "kind":
        text = f"there are {suspect.length:,} objects of `{type(suspect.sample).__qualname__}`, made{place}{rate}"
    elif suspect.kind == "graph":
        more = "at least " if suspect.length >= GRAPH_NODES else ""
        text = f"{called}{place} keeps {more}{suspect.length:,} {kind.keeps}{rate}"
    else:
        text = f"{called} ({what}){place} keeps {suspect.length:,} {kind.keeps}{rate}"
    return trend.finding(
        steps > 0,
        kind=kind.name,
        device=device,
        text=text,
        advice=kind.advice,
        name=name,
        where=where,
        allocated_at=lines.allocated,
        chain=holding.chain,
        count=suspect.length if suspect.kind != "buffer" else None,
    )


def on(device: str) -> str:
    """Where bytes lie, in words; RAM needs none."""
    return "" if device == HOST_DEVICE else f" on {device}"


def _name(suspect: Suspect, holding: Holding, kind: Kind) -> str | None:
    if suspect.name is not None:
        owner, name = suspect.name
        return f"{owner}{name}" if name.startswith(".") else name
    if suspect.kind == "traces":
        return traced_name(suspect.item) or holding.name
    if suspect.kind == "cache":
        return getattr(getattr(suspect.item, "__wrapped__", None), "__qualname__", holding.name)
    if kind.name == "threads":
        target = getattr(suspect.sample, "_target", None)
        return getattr(target, "__qualname__", None) or type(suspect.sample).__name__
    return holding.name


def _inherent_line(suspect: Suspect) -> str | None:
    """Where the function of a cache or a thread begins."""
    source: Any = suspect.sample if isinstance(suspect.sample, threading.Thread) else suspect.item
    function = getattr(source, "_target", None) or getattr(source, "__wrapped__", None)
    code = getattr(function, "__code__", None)
    return None if code is None else code_line(code)
