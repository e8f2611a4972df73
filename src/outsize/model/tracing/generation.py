"""Generation of transformers is followed to its longest.

Whether a sequence ends early is a question to the contents of tokens, which a trace does not have. So none does: tokens come
until the length that was asked for, and the cache of keys and values grows to its largest. Without this a trace would end after
the first token, and promise too little.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from outsize.model.torch_port.patches import replaced


@contextlib.contextmanager
def longest_generation() -> Iterator[None]:
    """While the block runs, no sequence ends before the longest one may."""
    if "transformers" not in sys.modules:
        yield
        return
    from transformers.generation.stopping_criteria import StoppingCriteriaList

    before = StoppingCriteriaList.__call__

    def at_the_end(self: Any, input_ids: Any, scores: Any, **named: Any) -> Any:
        longest = self.max_length
        if longest is None:
            return before(self, input_ids, scores, **named)
        done = input_ids.shape[1] >= longest
        return torch.full((input_ids.shape[0],), done, device=input_ids.device, dtype=torch.bool)

    with replaced([(StoppingCriteriaList, "__call__", at_the_end)]):
        yield
