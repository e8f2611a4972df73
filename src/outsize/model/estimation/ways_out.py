"""What would make a step fit, measured: the same step is traced again with each change, and the peaks stand side by side.

In: a configuration of transformers, or a step and its builder. Out: `WayOut`s. Nothing is said that was not traced: a
change that the model refuses is left out. Two steps are enough, since the optimizer's state is there in the second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from outsize.core.errors import OutsizeError
from outsize.core.footprint import Footprint, WayOut
from outsize.model.estimation.adapters import add_low_rank, keep_in_bits
from outsize.model.estimation.configurations import PRECISIONS, step_from
from outsize.model.estimation.estimate import estimate
from outsize.model.frameworks import TORCH, framework_of

STEPS = 2
"""Steps of each trace."""
EXACT, ROUNDING, APPROXIMATE, OTHER = "bitwise", "same up to rounding", "approximate", "another training"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model of a configuration is run."""

    path: str
    batch: int
    seq: int
    optimizer: str | None
    precision: str
    checkpointing: bool = False
    low_rank: int | None = None
    """Rank of adapters that are trained in place of the weights."""
    bits: int | None = None
    """Bits of the weights of linear layers, where they are kept in fewer."""


def measure_precisions(setting: Setting, common: dict[str, Any]) -> tuple[WayOut, ...]:
    found = [(name, APPROXIMATE, f"--precision {name}", replace(setting, precision=name)) for name in PRECISIONS]
    return tuple(filter(None, (_measure(*row, common) for row in found)))


def measure_ways_out(setting: Setting, common: dict[str, Any]) -> tuple[WayOut, ...]:
    """Every change that can be made to this setting, the gentlest first."""
    found = [_measure(*row, common) for row in _changes(setting)]
    return tuple(way for way in found if way is not None)


def measure_for_step(
    step: Callable[..., Any],
    build: Callable[..., Any],
    sizes: list[tuple[str, tuple[int, ...]]],
    common: dict[str, Any],
) -> tuple[WayOut, ...]:
    """The ways out of a user's own step: other sizes, and autocast around one of torch."""

    def cast(*args: Any) -> Any:
        import torch

        with torch.autocast(common["device"], dtype=torch.bfloat16):
            return step(*args)

    cast.__name__ = "step"
    whole = sizes[0][1] if sizes else ()
    rows = [(name, OTHER, name, step, given) for name, given in sizes[1:]]
    if framework_of(step, build) == TORCH:
        rows.append(("autocast to bfloat16", APPROXIMATE, 'with torch.autocast("cuda", torch.bfloat16):', cast, whole))
    found = []
    for name, exactness, how, one, given in rows:
        with contextlib.suppress(OutsizeError, RuntimeError):
            made = estimate(one, build=lambda given=given: build(*given), **{**common, "steps": STEPS})
            found.append(_way(name, exactness, how, made))
    return tuple(found)


def _changes(setting: Setting) -> Iterator[tuple[str, str, str, Setting]]:
    """(name, exactness, what to type, setting) of each change."""
    training = setting.optimizer is not None
    if training and not setting.checkpointing:
        yield "compute activations again", EXACT, "--checkpointing", replace(setting, checkpointing=True)
    if setting.batch > 1:
        how = "--batch 1; outsize.fit slices the batch" if training else "--batch 1"
        yield "batch of 1", ROUNDING if training else EXACT, how, replace(setting, batch=1)
    for name in ("bf16-amp", "bf16") if training else ("bf16",):
        if setting.precision != name:
            yield f"precision {name}", APPROXIMATE, f"--precision {name}", replace(setting, precision=name)
    if training and setting.optimizer != "adafactor":
        yield "optimizer adafactor", OTHER, "--optimizer adafactor", replace(setting, optimizer="adafactor")
    if training:
        lean = replace(setting, precision="bf16", checkpointing=True, batch=1)
        yield "bf16, activations again, batch of 1", APPROXIMATE, "--precision bf16 --checkpointing --batch 1", lean
        low = replace(lean, low_rank=16)
        yield (
            "LoRA of rank 16 on bf16 weights",
            OTHER,
            "outsize.compression.adapt(model, rank=16, bits=16), or peft",
            low,
        )
        yield (
            "LoRA of rank 16 on 4-bit weights",
            OTHER,
            "outsize.compression.adapt(model, rank=16, bits=4), or peft and bitsandbytes",
            replace(low, bits=4),
        )
    if setting.seq >= 2:
        shorter = replace(setting, seq=setting.seq // 2)
        yield f"{setting.seq // 2} tokens instead of {setting.seq}", OTHER, f"--seq {setting.seq // 2}", shorter
    if not training:
        for bits in (8, 4):
            small = replace(setting, precision="bf16", bits=bits)
            yield f"weights of {bits} bits", APPROXIMATE, f"outsize.shrink, or load_in_{bits}bit=True", small


def _measure(name: str, exactness: str, how: str, setting: Setting, common: dict[str, Any]) -> WayOut | None:
    step, build = step_from(
        setting.path, setting.seq, setting.optimizer, setting.precision, setting.checkpointing, common["device"],
        change=_change_for(setting),
    )  # fmt: skip
    try:
        found = estimate(step, build=lambda: build(setting.batch), **{**common, "steps": STEPS})
    except (OutsizeError, RuntimeError, ValueError, TypeError):  # this model does not take that change
        return None
    return _way(name, exactness, how, found)


def _change_for(setting: Setting) -> Callable[[Any], None] | None:
    if setting.bits is None and setting.low_rank is None:
        return None

    def change(model: Any) -> None:
        if setting.bits is not None:
            keep_in_bits(model, setting.bits)
        if setting.low_rank is not None:
            add_low_rank(model, setting.low_rank)

    return change


def _way(name: str, exactness: str, how: str, found: Footprint) -> WayOut:
    return WayOut(name=name, exactness=exactness, how=how, peak=found.peak_reserved, fits=found.fits)
