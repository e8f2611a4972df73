"""The verbs for steps of JAX: `estimate` says what XLA will take, `fit` makes a step that stays inside a budget.

Nothing here imports torch, and nothing outside this folder imports JAX. `private_parts` has what differs between its
versions.
"""

from __future__ import annotations

from outsize.model.jax.estimate import estimate
from outsize.model.jax.fit import fit

__all__ = ["estimate", "fit"]
