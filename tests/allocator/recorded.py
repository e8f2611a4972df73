"""Recordings of torch's real allocator on an H200, made by benchmarks/allocator_record.py, as torch's own entries."""

import gzip
import json
import pathlib
from dataclasses import replace

from outsize.allocator import parse_settings

DATA = pathlib.Path(__file__).parent / "data"
ACTIONS = {
    "a": "alloc",
    "r": "free_requested",
    "f": "free_completed",
    "A": "segment_alloc",
    "F": "segment_free",
    "M": "segment_map",
    "U": "segment_unmap",
    "o": "oom",
    "s": "snapshot",
}
CASES = sorted(path.name.removesuffix(".json.gz") for path in DATA.glob("*.json.gz"))


def load(case):
    return json.loads(gzip.decompress((DATA / f"{case}.json.gz").read_bytes()))


def entries_of(recording):
    columns = zip(recording["action"], recording["address"], recording["bytes"], recording["stream"], strict=True)
    return [
        {"action": ACTIONS[action], "addr": address * 512, "size": size, "stream": stream}
        for action, address, size, stream in columns
    ]


def settings_of(recording):
    return replace(parse_settings(recording["settings"]), limit=recording["result"].get("limit"))


def reserved_at_allocations(recording):
    """Bytes torch had reserved when each allocation was done, summed from its own segment entries."""
    signs = {"A": 1, "M": 1, "F": -1, "U": -1}
    reserved, out = 0, []
    for action, size in zip(recording["action"], recording["bytes"], strict=True):
        reserved += signs.get(action, 0) * size
        if action == "a":
            out.append(reserved)
    return out
