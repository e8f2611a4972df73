"""How many allocation events a second each allocator model replays.

    python benchmarks/allocator_speed.py [EVENTS]

In: a recording of torch's allocator on an H200 (GPT-2 training steps), repeated up to EVENTS events (a million), and
random sizes with a thousand blocks alive, which is harder on the free lists than any recording seen so far. Out: seconds,
events a second and the reserved peak of each model.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "allocator")]

from recorded import entries_of, load  # noqa: E402

from outsize.allocator import MODELS, read_trace, replay  # noqa: E402
from outsize.core.allocation import AllocationEvent  # noqa: E402
from outsize.core.units import format_bytes  # noqa: E402


def recorded(count: int) -> list[AllocationEvent]:
    """The recorded steps again and again; what is still alive at the end of one round is freed before the next."""
    once = read_trace(entries_of(load("gpt2"))).events
    alive = {event.id: event.alloc for event in once}
    once += tuple(AllocationEvent(0, False, id, 0) for id, held in alive.items() if held)
    return (list(once) * (count // len(once) + 1))[: count // len(once) * len(once)]


def mixed(count: int) -> list[AllocationEvent]:
    """Sizes from 16 B to 64 MiB, frees in random order, at most a thousand blocks alive."""
    pick, live, events = random.Random(1), [], []
    for number in range(count):
        if not live or (len(live) < 1000 and pick.random() < 0.6):
            events.append(AllocationEvent(number, True, number, int(2 ** pick.uniform(4, 26))))
            live.append(number)
        else:
            place = pick.randrange(len(live))
            live[place], live[-1] = live[-1], live[place]
            events.append(AllocationEvent(number, False, live.pop(), 0))
    return events


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    print(f"{'events':<10} {'model':<16} {'count':>9} {'seconds':>8} {'events/s':>10}  reserved peak")
    for name, make in (("recorded", recorded), ("mixed", mixed)):
        events = make(count)
        for model in MODELS:
            began = time.perf_counter()
            result = replay(events, model)
            took = time.perf_counter() - began
            speed = f"{len(events) / took:,.0f}"
            print(
                f"{name:<10} {model:<16} {len(events):>9} {took:>8.2f} {speed:>10}  {format_bytes(result.peak.reserved)}"
            )


if __name__ == "__main__":
    main()
