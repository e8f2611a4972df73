"""The error tree. Every error carries its numbers as attributes, so that no program has to parse the message.

OutsizeError
├── InputError    a user's mistake: a bad shape, an unknown dtype, a missing file   (also a ValueError)
│   ├── MissingExtra  a package that this work needs is not installed           (also an ImportError)
│   └── SeveralArrays a file holds several arrays, and none was named
├── BudgetError   the work does not fit the budget; names the smallest budget that works
├── ClusterError  the cluster went away in the middle of the work; the same call goes on
├── OutOfMemory   memory ran out while running, in spite of the plan                (also a MemoryError)
└── StoreError    a file or store could not be read or written as asked             (also an OSError)
    ├── MissingPath   a file or folder that is not there                        (also an InputError)
    └── NotAnArray    a file or folder that holds no array Outsize can read     (also an InputError)
"""

from __future__ import annotations

from typing import Any


class OutsizeError(Exception):
    """Root of every error Outsize raises on purpose."""


class InputError(OutsizeError, ValueError):
    """The user gave something that cannot be used; the message says what it was and what would be accepted."""


class SeveralArrays(InputError):
    """A file holds several arrays, and none was named."""

    def __init__(self, message: str, *, keys: tuple[str, ...]) -> None:
        super().__init__(message)
        self.keys = keys


class BudgetError(OutsizeError):
    """The projected peak is above the budget."""

    def __init__(
        self,
        message: str,
        *,
        needed: int | None = None,
        budget: int | None = None,
        smallest: int | None = None,
        culprit: str | None = None,
        plan: Any = None,
    ) -> None:
        super().__init__(message)
        self.needed = needed
        """Bytes the work would hold at its peak."""
        self.budget = budget
        self.smallest = smallest
        """Smallest budget in bytes that works, None if none does."""
        self.culprit = culprit
        self.plan = plan


class ClusterError(OutsizeError):
    """Workers, or the engine that reaches them, are gone; what is finished is kept and the same call goes on with it."""


class OutOfMemory(OutsizeError, MemoryError):
    """An allocation failed while running; carries the diagnosis when there is one."""

    def __init__(self, message: str, *, diagnosis: Any = None) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis
        """The `Diagnosis` of this failure, or None."""


class StoreError(OutsizeError, OSError):
    """A file or store is damaged, missing, full, or not what its header claims."""

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path

    def __str__(self) -> str:
        return str(self.args[0])


class MissingPath(StoreError, InputError):
    """A file or folder that the user named is not there."""


class NotAnArray(StoreError, InputError):
    """A file or folder that the user named holds no array that can be read here."""


class MissingExtra(InputError, ImportError):
    """A package that this work needs is not installed; the message has the pip line."""
