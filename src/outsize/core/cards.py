"""Accelerators people have: the memory they report and their compute capability, for "would it fit there?".

Memory is the total that the driver reports (`nvidia-smi`, `rocm-smi`), a little less than the box says. ECC and the
driver's own share differ between machines by a percent or two. So everything derived from this table is an estimate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from outsize.core.errors import InputError
from outsize.core.noun import Noun
from outsize.core.units import MiB

CONTEXT_BYTES = 800 * MiB
"""What a CUDA context and loaded kernels take beside tensors: 619 MiB bare, 771 MiB after training steps on an H200."""
DRIVER_SHARE = 0.02
"""Part of the reported total that the driver keeps: 0.4 % on an H200, 1.5 % on an RTX 4090 (what torch sees as total)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card(Noun):
    """One kind of accelerator."""

    name: str
    total: int
    """Bytes the driver reports."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None for other makers."""
    common: bool = False
    """True if `outsize size` lists it by default."""

    @property
    def usable(self) -> int:
        """Bytes left for tensors after the driver and the context, on the safe side."""
        return int(self.total * (1 - DRIVER_SHARE)) - CONTEXT_BYTES


def _card(name: str, mib: int, capability: tuple[int, int] | None = None, common: bool = False) -> Card:
    return Card(name=name, total=mib * MiB, capability=capability, common=common)


CARDS: tuple[Card, ...] = (
    _card("GTX 1080 Ti", 11264, (6, 1)),
    _card("P100 16GB", 16280, (6, 0)),
    _card("V100 16GB", 16160, (7, 0)),
    _card("V100 32GB", 32510, (7, 0)),
    _card("T4", 15360, (7, 5), common=True),
    _card("RTX 2080 Ti", 11264, (7, 5)),
    _card("RTX 3060", 12288, (8, 6)),
    _card("RTX 3070", 8192, (8, 6)),
    _card("RTX 3080", 10240, (8, 6)),
    _card("RTX 3090", 24576, (8, 6)),
    _card("RTX A4000", 16376, (8, 6)),
    _card("RTX A5000", 24564, (8, 6)),
    _card("RTX A6000", 49140, (8, 6)),
    _card("A10", 23028, (8, 6)),
    _card("A10G", 23028, (8, 6)),
    _card("A30", 24576, (8, 0)),
    _card("A40", 46068, (8, 6)),
    _card("A100 40GB", 40960, (8, 0), common=True),
    _card("A100 80GB", 81920, (8, 0), common=True),
    _card("RTX 4060", 8188, (8, 9), common=True),
    _card("RTX 4060 Ti 16GB", 16380, (8, 9)),
    _card("RTX 4070", 12282, (8, 9), common=True),
    _card("RTX 4080", 16376, (8, 9)),
    _card("RTX 4090", 24564, (8, 9), common=True),
    _card("RTX 6000 Ada", 49140, (8, 9)),
    _card("L4", 23034, (8, 9)),
    _card("L40S", 46068, (8, 9), common=True),
    _card("H100 80GB", 81559, (9, 0), common=True),
    _card("H100 NVL", 95830, (9, 0)),
    _card("GH200 96GB", 97871, (9, 0)),
    _card("H200", 143771, (9, 0), common=True),
    _card("B200", 183359, (10, 0), common=True),
    _card("RTX 5070", 12227, (12, 0)),
    _card("RTX 5080", 16303, (12, 0)),
    _card("RTX 5090", 32607, (12, 0), common=True),
    _card("RTX PRO 6000 Blackwell", 97887, (12, 0)),
    _card("MI210", 65520),
    _card("MI250X (one die)", 65520),
    _card("MI300X", 196592),
    _card("MI325X", 262128),
)
"""Known cards by age."""


def _key(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|quadro|amd|instinct|[^a-z0-9]", "", name.lower())


def find_card(name: str) -> Card:
    """`rtx4090`, `RTX 4090`, `NVIDIA GeForce RTX 4090`, `4090`, `h100` -> the card; an `InputError` with near names otherwise."""
    wanted = _key(name)
    keys = {_key(card.name): card for card in CARDS}
    if wanted in keys:
        return keys[wanted]
    starting = [card for key, card in keys.items() if wanted and key.startswith(wanted)]
    if not starting and len(wanted) >= 4:  # `3090`, `a6000`: the name without what stands before it
        starting = [card for key, card in keys.items() if key.endswith(wanted)]
    if len(starting) > 1:  # a card of several sizes: the common one, where there is only one of those
        starting = [card for card in starting if card.common] or starting
    if len(starting) == 1:
        return starting[0]
    import difflib  # slow to load, and only needed for a mistake

    near = starting or [keys[key] for key in difflib.get_close_matches(wanted, keys, n=3, cutoff=0.5)]
    some = ", ".join(card.name for card in CARDS[:: max(1, len(CARDS) // 8)])
    hint = (
        f": did you mean {' or '.join(card.name for card in near)}?"
        if near
        else f": known are {some} and others like them"
    )
    raise InputError(f"unknown card {name!r}{hint}")
