"""What tests of the array room share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from outsize.array.tuning import current, use


@pytest.fixture(autouse=True)
def planned() -> Iterator[None]:
    """Small work is planned and run in passes as large work is; tests of the other way set `at_once`."""
    with use(replace(current(), at_once=0)):
        yield


@pytest.fixture
def tune(planned: None) -> Iterator[Callable[..., None]]:
    """Change fields of the tuning in use, until the end of the test."""
    with contextlib.ExitStack() as stack:

        def change(**fields: Any) -> None:
            stack.enter_context(use(replace(current(), **fields)))

        yield change
