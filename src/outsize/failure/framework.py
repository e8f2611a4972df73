"""What is known of each framework, in one table: a row a framework, found by the name that `Failure.framework` has.

A row of `frameworks.toml` says how the framework is written, which device it means where a message names none, which of its
limits can be raised and where, how it splits and casts, and the advice that belongs to it alone. Rules of causes and
remedies ask the row, so that a new framework is one row there and its wordings in `message/`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from outsize.failure.advice import Advice, Framework, read_advice, read_table

LAUNCHERS = ("elastic", "deepspeed")
"""Wordings of launchers whose processes were killed: RAM ran out, whatever the device."""

CONTAINER = ("raise the container's limit", "docker run --memory={mib}m ...   # systemd: MemoryMax={mib}M")
"""How a limit is raised that no framework set."""

ALLOCATOR_SETTINGS = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NPU_ALLOC_CONF",
)
"""Environment variables that configure PyTorch's allocator."""

_NOTHING = Framework()


@functools.cache
def read_frameworks() -> dict[str, Framework]:
    """Name -> row. A framework without a row has nothing of its own."""
    table = read_table("frameworks.toml")
    shared = {name: tuple(map(read_advice, rows)) for name, rows in table["shared"].items()}

    def advice(row: Mapping[str, Any]) -> tuple[Advice, ...]:
        return shared[row["shared"]] if "shared" in row else (read_advice(row),)

    made: dict[str, Framework] = {}
    for row in table["frameworks"]:
        fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        names = fields.pop("names")
        fields["advice"] = sum((advice(way) for way in row.get("advice", ())), ())
        made |= dict.fromkeys(names, Framework(**fields))
    return made


def framework(name: str) -> Framework:
    """What is known of a framework."""
    return read_frameworks().get(name, _NOTHING)


def list_variables() -> tuple[str, ...]:
    """Environment variables that advice depends on."""
    told = (advice.variable for row in read_frameworks().values() for advice in row.advice if advice.variable)
    return (*ALLOCATOR_SETTINGS, "XLA_PYTHON_CLIENT_PREALLOCATE", *told)
