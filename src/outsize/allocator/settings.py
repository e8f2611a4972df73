"""The settings of torch's allocator: the text of `PYTORCH_ALLOC_CONF` in, a `CudaSettings` out.

The text is `key:value,key:[low:divisions,>:divisions]`. torch refuses a key it does not know. Here unknown keys are
kept and reported, because the text may be for a newer torch. A wrong value is an `InputError` with the bounds of torch
2.13.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outsize.allocator.model import AllocatorSettings
from outsize.core.errors import InputError
from outsize.core.units import MiB

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where the text is looked for; the first that is set counts. The order is what torch 2.13 does, not what it documents."""

INTERVALS = 16
"""`roundup_power2_divisions` has one entry for each power of two of MiB, 1 MiB to 64 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaSettings(AllocatorSettings):
    """Settings of torch's CUDA caching allocator; the defaults are torch's."""

    expandable_segments: bool = False
    """One growing segment per stream and pool instead of many fixed ones."""
    max_split_size: int | None = None
    """Bytes from which a block is never split; None for no such bound."""
    large_segment_size: int = 20 * MiB
    """Bytes of the segment made for a request between 1 MiB and 10 MiB; of a large page of an expandable segment."""
    max_non_split_rounding: int | None = None
    """Bytes by which a block that may not be split can be larger than the request; None for `large_segment_size`."""
    roundup_power2_divisions: tuple[int, ...] = ()
    """Steps between two powers of two a size is rounded up to, per interval from 1 MiB; empty when off."""
    garbage_collection_threshold: float = 0.0
    """Share of `limit` above which unused old blocks are given back; 0 when off. Without a limit it does nothing."""
    memory_fraction: float | None = None
    """Share of the device this process may take; the limit is this times the capacity."""
    limit: int | None = None
    """Bytes this process may reserve (`set_per_process_memory_fraction`); None for what the device has."""
    backend: str = "native"
    """`native`, or `cudaMallocAsync`: the driver's own pool, to which none of the other settings apply."""
    caching: bool = True
    """False where `PYTORCH_NO_CUDA_MEMORY_CACHING` is set: every block is a plain cudaMalloc."""
    pinned_reserve_segment_size: int = 0
    """Bytes of pinned host memory taken at once, from which requests are served while it lasts; 0 when off."""
    pinned_max_round_threshold: int | None = None
    """Bytes above which a pinned block is not rounded up to a power of two; None for no such bound."""
    pinned_max_cached_size: int | None = None
    """Bytes above which a freed pinned block goes back to the system at once; None for no such bound."""
    without_effect: tuple[tuple[str, str], ...] = ()
    """Keys that change speed but no bytes, as written."""
    unknown: tuple[tuple[str, str], ...] = ()
    """Keys we do not know, as written; they are not modelled."""


def _whole(key: str, text: str, low: int = 0) -> int:
    if not text.isdecimal() or int(text) < low:
        raise InputError(f"{key} takes a whole number from {low} up, not {text!r}")
    return int(text)


def _mebibytes(low: int) -> Callable[[str, str], int]:
    return lambda key, text: _whole(key, text, low) * MiB


def _truth(key: str, text: str) -> bool:
    if text not in {"True", "False"}:
        raise InputError(f"{key} takes True or False, spelled so, not {text!r}")
    return text == "True"


def _share(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < 1.0 and not (value == 1.0 and key.endswith("fraction")):
        raise InputError(f"{key} takes a share between 0 and 1, not {text!r}")
    return value


def _backend(key: str, text: str) -> str:
    if text not in {"native", "cudaMallocAsync", "hipMallocAsync"}:
        raise InputError(f"{key} is native or cudaMallocAsync, not {text!r}")
    return "native" if text == "native" else "cudaMallocAsync"


def _power_of_two(key: str, text: str, low: int = 1) -> int:
    value = _whole(key, text, low)
    if value & (value - 1):
        raise InputError(f"{key} takes powers of two, not {value}")
    return value


def _divisions(key: str, text: str) -> tuple[int, ...]:
    """`4` for all sizes, or `[256:1,1024:4,>:8]` per interval in MiB. Sizes below the first entry use the first; `>`
    is the rest."""
    if not text.startswith("["):
        return (_power_of_two(key, text),) * INTERVALS
    table = [0] * INTERVALS
    last: int | None = None
    for entry in text.strip("[]").split(","):
        interval, colon, count = entry.partition(":")
        if not colon:
            raise InputError(f"{key} takes entries such as 256:4 or >:8, not {entry!r}")
        divisions = _power_of_two(key, count, 0)
        if interval == ">":
            rest = 0 if last is None else last + 1
            table[rest:] = [divisions] * (INTERVALS - rest)
            continue
        place = min(_power_of_two(key, interval).bit_length() - 1, INTERVALS - 1)
        if last is None:
            table[:place] = [divisions] * place
        table[place] = divisions
        last = place
    return tuple(table)


_KEYS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "expandable_segments": ("expandable_segments", _truth),
    "max_split_size_mb": ("max_split_size", _mebibytes(1)),
    "large_segment_size_mb": ("large_segment_size", _mebibytes(11)),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _mebibytes(1)),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _share),
    "per_process_memory_fraction": ("memory_fraction", _share),
    "backend": ("backend", _backend),
    "pinned_reserve_segment_size_mb": ("pinned_reserve_segment_size", _mebibytes(1)),
    "pinned_max_round_threshold_mb": ("pinned_max_round_threshold", _mebibytes(0)),
    "pinned_max_cached_size_mb": ("pinned_max_cached_size", _mebibytes(0)),
}
"""Key in the text -> field, reader of the value."""

_SWITCHES = (
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "pinned_use_cuda_host_register", "pinned_use_hip_host_register",
    "pinned_use_background_threads", "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom",
)  # fmt: skip
_WITHOUT_EFFECT = dict.fromkeys(_SWITCHES, _truth) | {"pinned_num_register_threads": _power_of_two}
"""Keys that are read and checked but change no bytes outside CUDA graphs."""

_ENTRY = re.compile(r"([^:,\[\]]+):(\[[^\]]*\]|[^,\[\]]*)(?:,|$)")
"""One key and its value, with the comma behind."""


def parse_settings(text: str, **given: Any) -> CudaSettings:
    """`"expandable_segments:True,max_split_size_mb:128"` -> CudaSettings; a wrong value is an `InputError`."""
    squeezed = "".join(text.split())
    values: dict[str, Any] = dict(given)
    without_effect: list[tuple[str, str]] = []
    unknown: list[tuple[str, str]] = []
    at = 0
    while at < len(squeezed):
        match = _ENTRY.match(squeezed, at)
        if match is None:
            raise InputError(f"cannot read {squeezed[at:]!r} in allocator settings: write key:value,key:value")
        key, value = match.groups()
        if key in _KEYS:
            field, read = _KEYS[key]
            values[field] = read(key, value)
        elif key in _WITHOUT_EFFECT:
            _WITHOUT_EFFECT[key](key, value)
            without_effect.append((key, value))
        else:
            unknown.append((key, value))
        at = match.end()
    settings = CudaSettings(**values, without_effect=tuple(without_effect), unknown=tuple(unknown))
    for name in ("max_split_size", "max_non_split_rounding"):
        value = getattr(settings, name)
        if value is not None and value < settings.large_segment_size:
            raise InputError(
                f"{name}_mb is {value // MiB}, but must be at least the large segment: {settings.large_segment_size // MiB}"
            )
    return settings


def settings_from_environment(environ: Mapping[str, str]) -> CudaSettings:
    """What torch would read from these environment variables."""
    text = next((environ[name] for name in VARIABLES if name in environ), "")
    return parse_settings(text, caching="PYTORCH_NO_CUDA_MEMORY_CACHING" not in environ)
