"""What memory is here, seen from inside this process: host, container, process limits, GPUs, disk -> `Reading`, `Budget`."""

from __future__ import annotations

from typing import Any

from outsize.core.errors import InputError
from outsize.core.memory import HOST, Allowance, Budget, Pool, Reading
from outsize.core.units import parse_bytes
from outsize.machine.budget import budget, choose_budget, current_wishes
from outsize.machine.cgroup import Counters, read_counters
from outsize.machine.disk import default_scratch, read_disk
from outsize.machine.frameworks import read_frameworks
from outsize.machine.host import read_host, read_overcommit, read_rss, read_shm, read_swap
from outsize.machine.system import LiveSystem, ReadOnce, System

__all__ = ["allowance_of", "budget", "count_kills", "current_budget", "memory", "use_system"]

_system: System = LiveSystem()


def use_system(system: System) -> System:
    """Read another system from now on (a fake one, in tests); returns the one before."""
    global _system
    before, _system = _system, system
    return before


def current_system() -> System:
    return _system


def memory() -> Reading:
    """Read this machine: its memory, what limits it, who holds it, and the budget that follows.

    >>> outsize.memory().host.available
    """
    system, wishes = ReadOnce(_system), current_wishes()
    host, kills = read_host(system)
    devices, notes = system.devices()
    disk = read_disk(system, wishes.scratch or default_scratch(system))
    swap_total, swap_free = read_swap(system)
    return Reading(
        time=system.now(), host=host, devices=devices, disk=disk, shm=read_shm(system), swap_total=swap_total,
        swap_free=swap_free, overcommit=read_overcommit(system), rss=read_rss(system), oom_kills=kills,
        budget=choose_budget(wishes, (host, *devices, disk), disk.name), notes=notes,
        frameworks=read_frameworks(system.environ),
    )  # fmt: skip


def count_kills() -> Counters:
    """What the kernel counts for our control group: its kills for memory, and the group's peak."""
    return read_counters(_system)


def allowance_of(pool: Pool, budget: int | str | None, name: Any) -> Allowance:
    """What may be had of a pool: what the user says, else the current budget; an `InputError` where nothing is known of it."""
    if budget is not None:
        return Allowance(pool=pool, bytes=parse_bytes(budget), reason="set by you")
    found = next((each for each in current_budget(devices=pool != HOST).allowances if each.pool == pool), None)
    if found is None:
        raise InputError(f"nothing is known about the memory of {name}: give a budget, such as budget='16GiB'")
    return found


def current_budget(*, devices: bool = False) -> Budget:
    """The current budget: what `outsize.budget` set, else the default rule. GPUs are read only on request."""
    system, wishes = ReadOnce(_system), current_wishes()
    gpus = system.devices()[0] if devices else ()
    disk = read_disk(system, wishes.scratch or default_scratch(system))
    return choose_budget(wishes, (read_host(system)[0], *gpus, disk), disk.name)
