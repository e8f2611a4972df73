"""Decomposes a file in a process of its own and dies after so many events, if it lives that long.

Arguments: path, method, budget, scratch, events to live (0: all), `memory` or `disk` for what is left between passes. Prints a
digest of the factors and how many passes were taken up in their middle.
"""

import hashlib
import json
import os
import sys
from dataclasses import replace

import outsize
from outsize.array.tuning import Tuning, use
from outsize.core.events import Event, Started
from outsize.factor.algorithms import checkpoint, session

path, method, budget, scratch, life, places = sys.argv[1:7]
checkpoint.INTERVAL = 0.0
checkpoint._SHARE = 0
if places == "disk":
    session.IN_MEMORY = 1 << 40
left, done = int(life), 0


def listen(event: Event) -> None:
    global left, done
    if isinstance(event, Started):
        done += event.done > 0
    left -= 1
    if left == 0:
        os._exit(9)


with (
    outsize.budget(scratch=scratch),
    use(replace(Tuning(), small=0, chunk=256 << 10, largest=128 << 10, least_box=64 << 10)),
):
    made = outsize.decompose(path, method, 0.01, budget=budget, listener=listen)
digest = hashlib.sha256(b"".join(array.tobytes() for array in made.form.arrays().values())).hexdigest()
print(json.dumps({"digest": digest, "error": made.error, "events": int(life) - left, "taken_up": done}))
