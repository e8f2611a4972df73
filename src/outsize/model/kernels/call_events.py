"""What happens inside one call of an operator: blocks and results in the order in which they come and go.

Out: `CallEvent`, in which the rules of this room say what a kernel takes besides its results.
"""

from __future__ import annotations

from typing import NamedTuple


class CallEvent(NamedTuple):
    """One thing that happens inside a call."""

    what: str
    """`take` or `free` a block, `keep` one forever, or `result`: the next result is made."""
    name: str = ""
    bytes: int = 0
    more: int = 0
    """What the block may have beyond that."""


RESULT = CallEvent("result")
