"""Batches on a device of JAX: one is copied there while the one before it is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def put_ahead(batches: Iterable[Any], device: Any) -> Iterator[Any]:
    """`jax.device_put` starts a copy and returns; so the next batch is put before the present one is handed out."""
    import jax

    before: Any = None
    for batch in batches:
        now = jax.device_put(batch, device)
        del batch
        if before is not None:
            yield before
        before = now
    if before is not None:
        yield before
