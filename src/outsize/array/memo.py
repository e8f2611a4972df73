"""Answers that an object keeps: searches for sizes ask the same things again and again."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def remembered(method: Method) -> Method:
    """A method whose answers stay with its object, by its arguments."""
    return _Remembered(method)  # type: ignore[return-value]


class _Remembered:
    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.owner = name, owner.__name__

    def __get__(self, one: Any, kind: type | None = None) -> Any:
        if one is None:
            return self
        method, itself = self.method, weakref.ref(one)  # no circle: arrays go when their object does
        overridden = getattr(type(one), self.name) is not self
        place = f"{self.name} of {self.owner}" if overridden else self.name  # found there by Python itself from now on
        return one.__dict__.setdefault(place, functools.cache(lambda *asked: method(itself(), *asked)))
