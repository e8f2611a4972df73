"""What tests of the array room share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from outsize.array.tuning import current, use


@pytest.fixture
def tune() -> Iterator[Callable[..., None]]:
    """Change fields of the tuning in use, until the end of the test."""
    with contextlib.ExitStack() as stack:

        def change(**fields: Any) -> None:
            stack.enter_context(use(replace(current(), **fields)))

        yield change
