"""Torch's CUDA allocator with segments that grow, while somebody wants it.

In: who wants it. Out: the process's allocator, which maps memory into one growing segment a stream instead of making many
of fixed size, so that free pieces join and little is reserved beyond what is handed out. Torch lets this be switched
while it runs: blocks of the other kind stay in use until they are freed.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch

from outsize.allocator import settings_from_environment
from outsize.allocator.settings import VARIABLES
from outsize.model.fitting.move.out_of_memory import clear_up
from outsize.model.torch_port.objects import allocator_setter

_wanting: weakref.WeakSet[Any] = weakref.WeakSet()


def can_grow() -> bool:
    """True where segments do not grow yet and could."""
    if settings_from_environment(os.environ).expandable_segments or not torch.cuda.is_available():
        return False
    return allocator_setter() is not None and torch.cuda.get_allocator_backend() == "native"


def let_grow(who: Any, wanted: bool) -> None:
    """Segments grow from now on, as long as anybody wants it."""
    before = bool(_wanting)
    (_wanting.add if wanted else _wanting.discard)(who)
    setter = allocator_setter()
    if bool(_wanting) == before or setter is None:
        return
    # torch forgets what is not said again
    given = next((os.environ[name] for name in VARIABLES if name in os.environ), "")
    setter(",".join(filter(None, (given, f"expandable_segments:{bool(_wanting)}"))))
    clear_up()  # free segments of the other kind go
