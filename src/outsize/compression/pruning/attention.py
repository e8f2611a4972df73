"""`torch.nn.MultiheadAttention` with heads that can leave.

torch's module needs as many columns in its projections as the embedding has, so it cannot hold fewer heads. `HeadAttention`
computes the same with a projection each for queries, keys and values. It stands in for torch's module while a model is traced,
and stays where heads have left: such a model needs Outsize to be unpickled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outsize.compression.weights import put


def open_attention(model: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The model with `HeadAttention` for torch's attention where that can stand in for it, and what puts untouched ones back."""
    import torch

    from outsize.compression.pruning.head_attention import HeadAttention

    pairs = []
    for module in list(model.modules()):
        if type(module) is torch.nn.MultiheadAttention and HeadAttention.can_replace(module):
            other = HeadAttention.of(module)
            model = put(model, module, other)
            pairs.append((module, other, {name: tensor.shape for name, tensor in other.state_dict().items()}))

    def close(found: Any) -> Any:
        for module, other, shapes in pairs:
            if all(tensor.shape == shapes[name] for name, tensor in other.state_dict().items()):
                found = put(found, other, module)
        return found

    return model, close
