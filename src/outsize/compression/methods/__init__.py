"""All methods in one list. A method is added by its file here and its line in `METHODS`."""

from __future__ import annotations

from collections.abc import Sequence

from outsize.compression.method import Method
from outsize.compression.methods.blocks import DropBlocks
from outsize.compression.methods.channels import Channels
from outsize.compression.methods.low_rank import LowRank
from outsize.compression.methods.precision import Precision
from outsize.compression.methods.tucker import TuckerConvolution
from outsize.compression.methods.vocabulary import Vocabulary
from outsize.core.errors import InputError

METHODS: tuple[Method, ...] = (
    DropBlocks(),
    Channels(),
    Vocabulary(),
    LowRank(),
    TuckerConvolution(),
    *(Precision(name) for name in ("bf16", "float8", "int8", "int4")),
)
"""In the order in which they are applied."""
BY_NAME = ("vocabulary",)
"""Methods that are used only where the user names them: the data cannot show what they cost."""


def choose(names: str | Sequence[str] | None) -> tuple[Method, ...]:
    """The methods of these names; for None all but those of `BY_NAME`."""
    if names is None:
        return tuple(method for method in METHODS if method.name not in BY_NAME)
    wanted = [names] if isinstance(names, str) else list(names)
    known = {method.name: method for method in METHODS}
    for name in wanted:
        if name not in known:
            raise InputError(f"there is no method {name!r}: the methods are {', '.join(known)}")
    if not wanted:
        raise InputError(f"methods is empty: name some of {', '.join(known)}, or leave it out for all")
    return tuple(known[name] for name in dict.fromkeys(wanted))
