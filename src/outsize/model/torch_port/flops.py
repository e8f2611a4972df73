"""How many multiplications and additions an operator does.

In: an operator. Out: torch's own rule for it, or ours for attention. Up to torch 2.11 torch's rule refuses
grouped-query attention (keys and values with fewer heads than the queries). It does not know the CPU's kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outsize.model.torch_port.parts import part

ATTENTION = "_scaled_dot_product_"
"""How the names of all fused attention operators begin."""


def flop_rule(operator: Any) -> Callable[..., int] | None:
    """Counts the operations of a call from its arguments and `out_val`; None if they are few."""
    name = str(operator.overloadpacket).rpartition(".")[2]
    if name.startswith(ATTENTION) and "math" not in name:
        return _attention_backward if name.endswith("_backward") else _attention
    return part("utils.flop_counter.flop_registry").get(operator.overloadpacket)  # type: ignore[no-any-return]


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Scores, and their product with the values; each query head has its own, whatever heads share keys."""
    return 2 * int(q.shape[:3].numel()) * int(k.shape[2]) * int(q.shape[3] + v.shape[3])


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Scores once more, and the gradients of scores, values, queries and keys."""
    return 2 * int(q.shape[:3].numel()) * int(k.shape[2]) * int(3 * q.shape[3] + 2 * v.shape[3])
