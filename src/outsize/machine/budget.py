"""What Outsize may use: the default rule, and what the user has set.

Default: 80 % of what is available now in each pool, all limits applied. The rest is for what no plan knows: other
processes, the kernel, the growth of the interpreter. A number set by the user is used as it is.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, replace

from outsize.core.memory import PINNED, Allowance, Budget, PoolReading
from outsize.core.units import format_bytes, parse_bytes

SHARE = 0.8
"""Part of the available memory that Outsize uses by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user has set; None means the default rule."""

    host: int | None = None
    device: int | None = None
    pinned: int | None = None
    disk: int | None = None
    scratch: str | None = None


_lock, _wishes = threading.Lock(), Wishes()


class budget(contextlib.AbstractContextManager["budget"]):
    """Set what Outsize may use, from now on or for a `with` block: `outsize.budget(host="2GiB", device="8GiB")`.

    Values that are not given stay as they are. Sizes are bytes or text such as `"2GiB"`.
    """

    def __init__(
        self,
        host: int | str | None = None,
        device: int | str | None = None,
        *,
        pinned: int | str | None = None,
        disk: int | str | None = None,
        scratch: str | None = None,
    ) -> None:
        sizes = {"host": host, "device": device, "pinned": pinned, "disk": disk}
        given: dict[str, int] = {name: parse_bytes(size) for name, size in sizes.items() if size is not None}
        folder = {} if scratch is None else {"scratch": str(scratch)}
        global _wishes
        with _lock:
            self._before = _wishes
            _wishes = replace(self._before, **given, **folder)  # type: ignore[arg-type]

    def __exit__(self, *_: object) -> None:
        global _wishes
        with _lock:
            _wishes = self._before

    def __repr__(self) -> str:
        return repr(current_wishes()).replace("Wishes", "outsize.budget")


def current_wishes() -> Wishes:
    with _lock:
        return _wishes


def choose_budget(wishes: Wishes, pools: tuple[PoolReading, ...], scratch: str) -> Budget:
    """The budget of every pool that was read: the user's number, else the default rule with its reason."""
    said = {"host": wishes.host, "device": wishes.device, "disk": wishes.disk}
    allowances = [
        choose_allowance(said.get(reading.pool.kind), reading) for reading in pools if reading.pool.kind in said
    ]
    if wishes.pinned is not None:
        allowances.append(Allowance(pool=PINNED, bytes=wishes.pinned, reason="set by you"))
    known = tuple(allowance for allowance in allowances if allowance is not None)
    return Budget(allowances=known, scratch=scratch)


def choose_allowance(wish: int | None, reading: PoolReading) -> Allowance | None:
    """One pool's budget; None where nothing is set and nothing is known."""
    if wish is not None:
        return Allowance(pool=reading.pool, bytes=wish, reason="set by you")
    if reading.available is None:
        return None
    biting = reading.biting
    left = format_bytes(reading.available)
    why = f"{left} that the {biting.name} leaves" if biting else f"the {left} available now"
    return Allowance(pool=reading.pool, bytes=int(reading.available * SHARE), reason=f"{SHARE:.0%} of {why}")
