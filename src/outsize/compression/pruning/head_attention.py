"""Multi-head attention whose heads can be fewer than the embedding is wide. Imports torch; only `attention.py` imports it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from outsize.model.torch_port.objects import parameter_table


class HeadAttention(nn.Module):  # type: ignore[misc]
    """What `torch.nn.MultiheadAttention` computes, with a projection each for queries, keys and values."""

    in_proj_bias = None
    """Layers of torch look at this, and then do without their fused path."""
    in_proj_weight = None
    _qkv_same_embed_dim = False

    def __init__(self, embed_dim: int, num_heads: int, dropout: float, batch_first: bool) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.dropout, self.batch_first = dropout, batch_first

    @staticmethod
    def can_replace(module: nn.MultiheadAttention) -> bool:
        """The common form: one width, no extra keys, no parametrizations."""
        plain = module.bias_k is None and module.bias_v is None and not module.add_zero_attn
        return plain and module.in_proj_weight is not None and "in_proj_weight" in parameter_table(module)

    @classmethod
    def of(cls, module: nn.MultiheadAttention) -> HeadAttention:
        """The same attention, with copies of the projections."""
        made = cls(module.embed_dim, module.num_heads, module.dropout, module.batch_first)
        weights = module.in_proj_weight.detach().chunk(3)
        biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.detach().chunk(3)
        for name, weight, bias in zip(("q_proj", "k_proj", "v_proj"), weights, biases, strict=True):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
            linear.weight = nn.Parameter(weight.clone(), module.in_proj_weight.requires_grad)
            if bias is not None:
                linear.bias = nn.Parameter(bias.clone(), module.in_proj_weight.requires_grad)
            made.add_module(name, linear)
        projection = module.out_proj
        made.out_proj = nn.Linear(
            projection.in_features, projection.out_features, projection.bias is not None, device="meta"
        )
        made.out_proj.weight, made.out_proj.bias = projection.weight, projection.bias
        made.train(module.training)
        return made

    def forward(
        self, query: Any, key: Any, value: Any, key_padding_mask: Any = None, need_weights: bool = True, attn_mask: Any = None,
        average_attn_weights: bool = True, is_causal: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        """As torch's."""
        batched = query.ndim == 3
        tensors = [one if batched else one.unsqueeze(0 if self.batch_first else 1) for one in (query, key, value)]
        if not self.batch_first:
            tensors = [one.transpose(0, 1) for one in tensors]
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (
            cast(nn.Linear, project)(one).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project, one in zip(projections, tensors, strict=True)
        )
        mask = self._mask(q, k, attn_mask, key_padding_mask)
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / self.head_dim**0.5
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = nn.functional.dropout(weights, self.dropout, self.training)
            found = weights @ v
        else:
            drop = self.dropout if self.training else 0.0
            found = nn.functional.scaled_dot_product_attention(q, k, v, mask, drop, scale=self.head_dim**-0.5)
        result = self.out_proj(found.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            result, weights = result.squeeze(0), None if weights is None else weights.squeeze(0)
        elif not self.batch_first:
            result = result.transpose(0, 1)
        return result, weights

    def _mask(self, q: Any, k: Any, attn_mask: Any, key_padding_mask: Any) -> Any:
        """One mask to add, None where all may be seen."""
        found = None
        for mask, shape in ((attn_mask, None), (key_padding_mask, (q.shape[0], 1, 1, k.shape[2]))):
            if mask is None:
                continue
            if mask.dtype == torch.bool:
                mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(mask, float("-inf"))
            if shape is not None:
                mask = mask.reshape(shape)
            elif mask.ndim == 3:
                mask = mask.unflatten(0, (-1, self.num_heads))
            found = mask if found is None else found + mask
        return found
