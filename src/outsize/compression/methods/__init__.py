"""All methods in one list. A method is added by its file here and its line in `METHODS`."""

from __future__ import annotations

from collections.abc import Sequence, Set

from outsize.compression.method import Method
from outsize.compression.methods.blocks import DropBlocks
from outsize.compression.methods.channels import Channels
from outsize.compression.methods.lora import Lora
from outsize.compression.methods.low_rank import LowRank
from outsize.compression.methods.precision import Precision
from outsize.compression.methods.state import State
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
    Lora(),
    State(8),
    State(4),
)
"""In the order in which they are applied."""
BY_NAME = ("vocabulary", "lora")
"""Methods that are used only where the user names them: the data cannot show what they cost."""
OF_STATE = ("state8", "state4")
"""Methods that save bytes of training alone."""


def choose(names: str | Sequence[str] | None, training: bool = False) -> tuple[Method, ...]:
    """The methods of these names; for None all but those of `BY_NAME`. Where bytes of `training` count, those after which the
    model can be trained."""
    if names is None:
        return tuple(
            method
            for method in METHODS
            if method.name not in BY_NAME and (method.trains if training else method.name not in OF_STATE)
        )
    if not isinstance(names, str | Sequence | Set):
        raise InputError(f"methods is {names!r}: give names, such as ['int8', 'low-rank']")
    wanted = [one.strip() for one in names.split(",")] if isinstance(names, str) else list(names)
    known = {method.name: method for method in METHODS}
    for name in wanted:
        if name not in known:
            raise InputError(f"there is no method {name!r}: the methods are {', '.join(known)}")
    if not wanted:
        raise InputError(f"methods is empty: name some of {', '.join(known)}, or leave it out for all")
    chosen = tuple(known[name] for name in dict.fromkeys(wanted))
    for method in chosen:
        if training and not method.trains:
            raise InputError(
                f"{method.name} leaves weights that no step can train, and bytes of training are asked for: leave it out, or "
                "name lora, which trains adapters beside such weights"
            )
        if not training and method.name in OF_STATE:
            raise InputError(f"{method.name} saves bytes of training: ask for them with of='training'")
    return chosen
