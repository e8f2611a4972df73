"""How much a run of the tests tries: few cases in the normal run, many in the long one (`scripts/check --long`).

Both are hypothesis profiles, so `pytest --hypothesis-profile=long` chooses the long one. A test says what it needs on the
scale of `FULL` with `examples(40)`; the profile takes a tenth of that, or twice as much. Where a test goes through a list
of its own, `points(...)` gives all of the list in the long run and an even choice of it otherwise. The normal run tries the
same examples each time, so that what is green stays green until the code changes; the long one looks for new ones.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

from hypothesis import settings

FULL = 100
"""The examples of a test that says nothing of its own, on the scale in which tests speak."""
LEAST = 4
T = TypeVar("T")

settings.register_profile("normal", max_examples=FULL // 10, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=2 * FULL, deadline=None)
settings.load_profile("normal")


def long() -> bool:
    """True in the long run."""
    return settings.get_current_profile_name() == "long"


def examples(count: int, **more: Any) -> settings:
    """Settings with `count` examples, as the profile scales them; `more` is handed to hypothesis."""
    return settings(max_examples=max(LEAST, count * settings.default.max_examples // FULL), **more)


def points(all_of_them: Sequence[T], few: int) -> Sequence[T]:
    """All points in the long run; otherwise `few` of them, evenly apart, with the first and the last; of one, the last."""
    last = len(all_of_them) - 1
    if long() or last < few:
        return all_of_them
    if few == 1:
        return all_of_them[-1:]
    return [all_of_them[number * last // (few - 1)] for number in range(few)]
