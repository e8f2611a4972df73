"""What a method of making a model smaller is, and how one is added.

A method looks at a model and offers candidates: one place (`site`) and one level each ("the layer `blocks.3.fc1` at rank 24").
The search applies candidates to copies, counts the bytes that are left and measures the loss on the user's data. So a method
declares neither bytes nor loss: it only says what can be done, and does it.

To add a method: a class made from `Method` in a file of `methods/` (or a folder beside it), and a line in `METHODS` of
`methods/__init__.py`. Rules that `apply` keeps:

- The model that it gets is a copy whose modules are new and whose tensors are those of the user's model. Put new parameters and
  modules in; never write into a tensor that is there.
- Candidates of earlier stages may have changed the model. Find the site by its name. Where it is gone, or is no longer what the
  method needs, return the model as it is.
- What it leaves is smaller in bytes now, not masked. The forward pass takes and gives the same shapes and dtypes as before.
- It draws no random numbers, so that the same candidate gives the same model twice.
"""

from __future__ import annotations

import abc
import enum
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outsize.compression.weights import count_bytes


class Stage(enum.IntEnum):
    """The order in which candidates are applied. A later stage sees what the earlier ones left.

    What removes comes before what rewrites, and narrow dtypes come last: pruned or factored weights can be rounded, rounded ones
    cannot be pruned well.
    """

    BLOCKS = 1
    CHANNELS = 2
    ROWS = 3
    FACTORS = 4
    PRECISION = 5
    ADAPTERS = 6
    STATE = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a method may look at."""

    model: Any
    """The user's model in evaluation mode. It is not changed."""
    batches: Sequence[Any]
    """Some of the user's data."""
    loss: Callable[[Any, Any], Any]
    """`loss(model, batch)`: a scalar, or (total, count)."""
    count: Callable[[Any], int] = count_bytes
    """model -> the bytes that are to become fewer: of the model, or of a training step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One method at one place and one level."""

    method: str
    site: str
    """Name of the module that it changes, as in `named_modules`; "" is the whole model."""
    level: str
    """How far it goes, in a few words: `int8`, `rank 24`, `half of the heads`."""
    stage: Stage
    touches: frozenset[str]
    """Names of all modules whose own parameters it changes. Two candidates of one stage that touch the same module exclude
    each other."""
    apply: Callable[[Any], Any]
    """model -> model, by the rules above."""
    elsewhere: tuple[Candidate, ...] = ()
    """The same place and level fitted to other batches, one for each part of the data (`judge.py`), on which it is judged."""


class Method(abc.ABC):
    """A way to make a model smaller. What most of them say stands here."""

    name: str
    """One word or two, which `methods=` takes."""
    stage: Stage
    """When its candidates are applied."""
    needs: str
    """What the model must have, in a few words."""
    trains = True
    """True where a model can be trained further with what it leaves."""
    fitted = False
    """True where its candidates are fitted to the data: they are judged on batches to which they were not."""

    @abc.abstractmethod
    def candidates(self, subject: Subject) -> list[Candidate]:
        """What can be done, for each site the gentlest level first; empty where the model lacks what the method needs."""

    def candidate(
        self, site: str, level: str, touches: Iterable[str], apply: Callable[..., Any], **options: Any
    ) -> Candidate:
        """One of this method; `apply` gets the model and the options."""
        return Candidate(
            method=self.name, site=site, level=level, stage=self.stage, touches=frozenset(touches),
            apply=functools.partial(apply, **options),
        )  # fmt: skip
