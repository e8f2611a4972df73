"""All methods in one list. A method is added by its file here and its line in `METHODS`."""

from __future__ import annotations

from collections.abc import Sequence

from outsize.compression.method import Method
from outsize.compression.methods.channels import Channels
from outsize.compression.methods.precision import Precision
from outsize.core.errors import InputError

METHODS: tuple[Method, ...] = (Channels(), Precision("bf16"), Precision("float8"), Precision("int8"), Precision("int4"))


def choose(names: str | Sequence[str] | None) -> tuple[Method, ...]:
    """The methods of these names; all for None."""
    if names is None:
        return METHODS
    wanted = [names] if isinstance(names, str) else list(names)
    known = {method.name: method for method in METHODS}
    for name in wanted:
        if name not in known:
            raise InputError(f"there is no method {name!r}: the methods are {', '.join(known)}")
    if not wanted:
        raise InputError(f"methods is empty: name some of {', '.join(known)}, or leave it out for all")
    return tuple(known[name] for name in dict.fromkeys(wanted))
