"""Finds private parts of torch.

In: the name of a part, such as `_C._dispatch_keys`. Out: the part, or an `OutsizeError` in one sentence that names the installed
torch and what to do. The error never names a line of the user's code.
"""

from __future__ import annotations

import functools
import importlib
import re
import traceback
from pathlib import Path
from typing import Any

from outsize.core.errors import OutsizeError
from outsize.core.extras import need

FLOOR = "2.4"
"""The oldest torch that works."""

NEWEST = "2.15"
"""The newest torch that was tried; the table of docs/torch.md says how."""

PACKAGE = Path(__file__).parent.parent.parent
"""Where the package is."""

DRIVER = ("NVIDIA driver", "not compiled with CUDA", "Cannot access accelerator device")
"""What torch says where it looks for a card and there is none."""


@functools.cache
def part(path: str) -> Any:
    """The part of torch with this name, looked for once."""
    import torch

    found: Any = torch
    name = "torch"
    for step in path.split("."):
        name = f"{name}.{step}"
        if not hasattr(found, step):
            try:
                importlib.import_module(name)
            except ImportError:
                raise missing(name) from None
        found = getattr(found, step)
    return found


def has_part(path: str) -> bool:
    """True where this torch has the part."""
    try:
        part(path)
    except OutsizeError:
        return False
    return True


def attribute(owner: Any, name: str) -> Any:
    """A private attribute of one of torch's objects."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise missing(f"{type(owner).__name__}.{name}") from None


def missing(what: str) -> OutsizeError:
    """The error for a part that the installed torch does not have."""
    import torch

    return OutsizeError(
        f"torch {torch.__version__} has no {what}, which Outsize needs: Outsize works with torch {FLOOR} to {NEWEST}"
    )


def find_ours(error: BaseException) -> OutsizeError | None:
    """An error of a step on a fake card as an error of Outsize, if torch looked for a real card or our code for a
    missing part of torch. None if the error is the user's.
    """
    import torch

    text = str(error).splitlines()[0] if str(error) else ""
    frames = traceback.extract_tb(error.__traceback__)
    where = Path(frames[-1].filename) if frames else Path()
    in_ours = isinstance(error, AttributeError | ImportError | NameError) and where.is_relative_to(PACKAGE)
    if not in_ours and not any(words in text for words in DRIVER):
        return None
    place = f"{where.name}:{frames[-1].lineno}" if frames else "an unknown place"
    return OutsizeError(
        f"Outsize does not know this part of torch {torch.__version__} ({place}: {type(error).__name__}: {text}): it works with "
        f"torch {FLOOR} to {NEWEST}, and docs/torch.md says what was tried"
    )


def require_torch(what: str) -> None:
    """An `OutsizeError` where torch, which `what` needs, is missing or older than the oldest that works."""
    torch = need("torch", what)
    if is_older_than(FLOOR):
        raise OutsizeError(f"torch {torch.__version__} is too old: Outsize needs torch {FLOOR} or newer")


def is_older_than(version: str) -> bool:
    """True where the installed torch is older than `version`, such as `2.8`."""
    import torch

    return _numbers(str(torch.__version__)) < _numbers(version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
