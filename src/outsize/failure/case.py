"""The numbers that rules ask for, derived once from a failure, the machine and the settings.

In: a `Failure`, a `Reading` where the failure happened here, the text it came in. Out: a `Case`. Every derived number is
None where the message does not give what it needs, so that a rule cannot decide on a guess.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from outsize.core.errors import InputError
from outsize.core.failure import Cause, CauseName, Exactness, Failure, Remedy
from outsize.core.memory import Limit, Reading
from outsize.core.noun import Known
from outsize.core.spec import Spec
from outsize.failure import signs
from outsize.failure.advice import BITWISE
from outsize.failure.framework import list_variables
from outsize.failure.scene import Scene
from outsize.failure.work import Work

CONTEXT = 3 * 2**29
"""Bytes that a CUDA context, its libraries and a desktop may hold beside an allocator before we speak of another process."""
PAGES = 1 << 16
"""Bytes that an allocation of whole pages may take beside what was asked for."""

_MANY_ROWS = 5_000_000
"""Rows that a table of ordinary size does not have."""
SMALL = 64 * 2**20
"""A request below this many bytes is never the whole story."""

DMESG = (
    "`dmesg -T | grep -i 'killed process'` (or `journalctl -k`), and `memory.events` of the container: an oom_kill "
    "there settles it"
)
"""What decides where a message does not."""


@dataclass(frozen=True, kw_only=True)
class Case(Scene):
    """A failure with everything that is known around it."""

    failure: Failure
    """What the message says."""
    reading: Reading | None = None
    """The machine it happened on, None where that is not this one."""
    text: str = ""
    """The message itself."""
    growth: int | None = None
    """Bytes by which the process grew in its last minute, where it was watched."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment of the process, where it is known."""
    watched: bool = False
    """True where it ran under `outsize run`."""
    peak: int | None = None
    """The most bytes of RAM the program held, where it was watched."""
    library: str | None = None
    """The framework for tensors that the process had loaded, where that is known."""

    def extra(self, name: str) -> int | None:
        """A further byte count of the message that can be true."""
        value = self.failure.extra.get(name)
        return value if isinstance(value, int) and value < 2**57 else None

    @cached_property
    def spec(self) -> Spec | None:
        """The tensor that was asked for, where the message names it."""
        if self.failure.shape is None or self.failure.dtype is None:
            return None
        double = self.failure.framework == "numpy" and self.failure.dtype == "float"  # Python's float has 64 bits
        try:
            return Spec.of(self.failure.shape, "float64" if double else self.failure.dtype)
        except InputError:
            return None

    @cached_property
    def need(self) -> int | None:
        """Bytes that were asked for: exact from the shape where that is known, else as printed."""
        spec, said = self.spec, self.failure.requested_bytes
        return spec.bytes if spec is not None else said

    @cached_property
    def long_pair(self) -> tuple[int, int] | None:
        """The two axes that a broadcast of two long vectors would have made; None where it does not look like one. JAX prints no
        shape: bytes that are exactly one number for every pair of so many things show it too."""
        if self.failure.shape is not None:
            return pair_of_long_axes(self.failure.shape)
        exact = self.failure.framework == "jax" or (self.failure.framework == "pytorch" and self.on_host)
        need = self.need if exact else None
        for width in (4, 8, 2) if need else ():
            side = math.isqrt((need or 0) // width)
            if (
                side * side * width == need and side >= 10_000 and side % 1000 and side % 1024
            ):  # no product of round axes
                return side, side
        return None

    @property
    def paired(self) -> int | None:
        """How many things a flat array of distances compares: n where it has n (n - 1) / 2 numbers."""
        shape = self.failure.shape
        if shape is None or len(shape) != 1 or shape[0] < 10_000_000:
            return None
        count = (1 + math.isqrt(1 + 8 * shape[0])) // 2
        return count if count * (count - 1) // 2 == shape[0] else None

    @property
    def is_beyond_page_file(self) -> bool:
        """True where one request is more than a page file should serve, or where the text names a large input."""
        computes = self.work in (Work.TRAINS, Work.EVALUATES, Work.INFERS)
        named = self.need is None and signs.LARGE_INPUT.search(self.text) is not None
        return named or (self.need or 0) >= (2**30 if computes else 2**32)

    @cached_property
    def slack(self) -> int | None:
        """Bytes the framework's allocator holds without using them."""
        for name in ("reserved_unallocated_bytes", "cached_bytes"):
            if self.extra(name) is not None:
                return self.extra(name)
        held, used = self.failure.reserved_bytes, self.failure.allocated_bytes
        return None if held is None or used is None else max(0, held - used)

    @cached_property
    def slack_is_little(self) -> bool:
        """True where what is unused saves this request at best: the next one meets the same end."""
        total, used = self.failure.total_bytes, self.failure.allocated_bytes or 0
        if self.slack is None or total is None:
            return False
        return self.slack < max(2**28, (0.12 if used > 0.85 * total else 0.08) * total)

    @cached_property
    def pictures(self) -> tuple[int, int, int] | None:
        """How many pictures of what height and width an array in RAM holds, where its shape is that of pictures."""
        shape = self.failure.shape or ()
        if not self.on_host or len(shape) not in (3, 4) or shape[-1] not in (1, 2, 3, 4) or min(shape[-3:-1]) < 240:
            return None
        if len(shape) == 3 and signs.PICTURES.search(self.text) is None:
            return None
        return (shape[0] if len(shape) == 4 else 1, shape[-3], shape[-2])

    @cached_property
    def told_ram(self) -> int | None:
        """Bytes of RAM that the text says the machine has."""
        for match in signs.MACHINE_RAM.finditer(self.text):
            before = self.text[max(0, match.start() - 40) : match.start()]
            if signs.OF_A_CARD.search(before) is None and signs.WANTED.search(before) is None:
                number, unit = match["number"] or match["number2"], match["unit"] or match["unit2"]
                return int(float(number) * (1 << {"g": 30, "t": 40}[unit.lower()])) or None
        return None

    @cached_property
    def told_free(self) -> int | None:
        """Bytes that the text says were free, where they are several times what was asked for and no message counts them."""
        need = self.need or (SMALL if self.failure.shape is None and self.on_host else None)
        told = max((_told_bytes(match) for match in signs.FREE.finditer(self.text)), default=0)
        return told if self._is_uncounted and need and told >= 4 * need and told >= 2**30 else None

    @property
    def told_enough(self) -> bool:
        """True where the text says, in a number or in words, that there was memory enough for a request of ordinary size."""
        words = self.need is not None and self.need < 2**32 and signs.ENOUGH.search(self.text) is not None
        return self.told_free is not None or (words and self._is_uncounted)

    @property
    def _is_uncounted(self) -> bool:
        """True where the message has no count of what was free: RAM, or the pool of TensorFlow and JAX."""
        graph = self.on_device and self.failure.framework in ("tensorflow", "jax") and self.failure.total_bytes is None
        return self.on_host or (graph and self.failure.limit_bytes is None)

    @cached_property
    def holds_nothing(self) -> bool:
        """True where next to nothing was asked for, and the framework holds next to nothing: the card gives nothing at all."""
        need, used, total = (
            self.need,
            self.failure.allocated_bytes,
            self.failure.limit_bytes or self.failure.total_bytes,
        )
        other = self.extra("other_allocations_bytes") or 0
        free = self.failure.free_bytes
        if need is None or used is None or total is None or (free is not None and free < total // 2):
            return False
        return need < 2**20 and used + other < 2**26 < total // 4

    @property
    def is_library(self) -> bool:
        """True where a library of the card found no room for its own handle, and nobody says how full the card was."""
        silent = self.failure.free_bytes is None and self.failure.allocated_bytes is None
        return self.format in ("library", "library-handle") and silent and self.on_torch

    @cached_property
    def held(self) -> int | None:
        """Bytes the framework's allocator holds in all."""
        if self.failure.reserved_bytes is not None:
            return self.failure.reserved_bytes
        used = self.failure.allocated_bytes
        return None if used is None else used + (self.slack or 0)

    @cached_property
    def gap(self) -> int | None:
        """Bytes that were missing beyond what was free; the last few pages of a device cannot be had in one piece."""
        need, free = self.need, self.failure.free_bytes
        if need is None or free is None:
            return None
        held = self.held or 0
        total = self.failure.total_bytes or (held + free if held and self.failure.framework == "paddle" else 0)
        crowded = bool(total) and (self.others or 0) > total // 4  # others have much of it
        full = (
            free < SMALL
            or (held > 0.9 * total > 0 and free < total // 50)
            or ((held > total // 2 > 0 or crowded) and free < total // 32)
        )
        last = (
            self.on_device
            and full
            and need <= free < need + max(SMALL // 4, total // (32 if held > total // 2 or crowded else 200))
        )
        return need if last else max(0, need - free)

    @property
    def takes_all_free(self) -> bool:
        """True where one large request is nearly all that was free: the driver hardly ever has that in one piece."""
        free = self.failure.free_bytes
        return self.need is not None and free is not None and self.need >= 2**30 and 0.95 * free < self.need <= free

    @cached_property
    def passes_limit(self) -> bool:
        """True where what is held and what was asked for pass the limit that the message states, as exactly as it prints
        them."""
        limit, need, held = self.failure.limit_bytes, self.need, self.held
        if limit is None or need is None or held is None or limit >= 2**57:
            return False
        return held + need > limit - _rounding(limit) - _rounding(held)

    @cached_property
    def unused(self) -> int | None:
        """Bytes of the allocator's limit that are not in use."""
        limit, used = self.failure.limit_bytes, self.failure.allocated_bytes
        return None if limit is None or used is None else limit - used

    @cached_property
    def half_of_batch(self) -> int | None:
        """Bytes of the tensor that half the batch would not need; 0 where its first axis cannot be halved."""
        shape = self.failure.shape
        if self.makes_weights or (shape and shape[0] == 1) or (self.on_device and self.one_at_a_time):
            return 0
        if self.spec is None:
            return None
        return self.spec.bytes // 2 if self.spec.shape and self.spec.shape[0] > 1 else 0

    @cached_property
    def smaller_sample(self) -> int | None:
        """Bytes of the tensor that samples of half the height and width would not need, where one alone is large, or is all that
        a layer was given."""
        spec = self.spec
        if spec is None or not self.in_graph or len(spec.shape) < 3:
            return None
        alone = spec.shape[0] == 1 and self.is_node
        if spec.bytes < (2**26 if alone else spec.shape[0] * 2**30):
            return None
        return spec.bytes * 3 // 4

    @cached_property
    def in_use(self) -> int | None:
        """Bytes this process held of the device as the driver counts them; None where it counts fewer than the allocator holds,
        as in a container that hides its processes."""
        said = self.extra("process_in_use_bytes")
        return None if said is None or said < (self.failure.allocated_bytes or 0) else said

    @cached_property
    def mine(self) -> int | None:
        """Bytes this process held of the device, context included."""
        return self.held if self.in_use is None else self.in_use

    @cached_property
    def others(self) -> int | None:
        """Bytes of the device that neither this process nor its context explains."""
        total, free, mine = self.failure.total_bytes, self.failure.free_bytes, self.mine
        if total is None or free is None or mine is None:
            return None
        if self.strangers:
            return sum(size for _, size in self.strangers)
        context = 0 if self.in_use is not None else CONTEXT
        return max(0, total - free - mine - context)

    @cached_property
    def strangers(self) -> tuple[tuple[int, int], ...]:
        """(pid, bytes) of other processes on the device. In a container this process may be listed under a foreign pid."""
        listed = [(row["pid"], row["bytes"]) for row in self.failure.extra.get("processes", ()) if row.get("bytes")]
        held = self.held
        if self.in_use is None and held:
            total = self.failure.total_bytes or 2**63
            own = [
                row
                for row in listed
                if held <= row[1] * 1.02 and (row[1] <= held + 2 * CONTEXT or held + row[1] > total)  # both do not fit
            ]
            listed = [row for row in listed if row not in own[:1]]
        return tuple(sorted(listed, key=lambda row: -row[1]))

    @cached_property
    def biting(self) -> Limit | None:
        """The limit of this machine that the request meets first, below what RAM itself has left; where the size of the
        request is not known, a `ulimit` that is as good as taken."""
        limit = None if self.reading is None else self.reading.host.biting
        if limit is None:
            return None
        if self.need is None:
            full = limit.name.startswith("ulimit") and limit.available < max(2 * SMALL, limit.bytes // 16)
            return limit if full else None
        return limit if limit.available < self.need + PAGES else None

    @cached_property
    def outside(self) -> int | None:
        """Bytes of the device that this process holds outside the framework's allocator: context, libraries."""
        return None if self.in_use is None or self.held is None else max(0, self.in_use - self.held)

    @cached_property
    def known_need(self) -> int | None:
        """Bytes of RAM that the program is known to have needed, all in all; None where nothing is known."""
        if not self.on_host and self.failure.device is not None:
            return None
        told = [self.extra(name) for name in ("asked_bytes", "anon_rss_bytes", "usage_bytes", "used_bytes")]
        told += [None if self.need is None else self.need + (self.reading.rss if self.reading else 0)]
        return max((size for size in (*told, self.peak) if size is not None), default=None)

    @cached_property
    def host_room(self) -> int | None:
        """Bytes of RAM that the program may have under every limit that is known; None where none is."""
        told = [] if self.failure.device not in (None, "cpu") else [self.failure.limit_bytes]
        if self.reading is not None:
            told += [self.reading.host.total, *(limit.bytes for limit in self.reading.host.limits)]
        return min((size for size in told if size), default=None)

    @cached_property
    def device_room(self) -> int | None:
        """Bytes of the device that this process may have: under its limit, beside what others hold."""
        room = self.failure.limit_bytes or self.failure.total_bytes
        if room is None or self.failure.total_bytes is None or room >= 2**57:
            return room if room is None or room < 2**57 else self.failure.total_bytes
        return max(0, min(room, self.failure.total_bytes - (self.others or 0), self.reach or room))

    @cached_property
    def reach(self) -> int | None:
        """Bytes that the framework's allocator had or could have had: its own and what was free. The rest of the device is
        held by others, by contexts and by libraries."""
        free, held = self.failure.free_bytes, self.held
        return None if not free or not held or max(free, held) >= 2**57 else free + held

    @cached_property
    def beside(self) -> int:
        """Bytes of the device out of the allocator's reach where they are most of it; 0 otherwise."""
        total = self.failure.total_bytes or 0
        return total - self.reach if self.reach and 2 * self.reach < total and self.on_torch_gpu else 0

    @cached_property
    def multiplies(self) -> bool:
        """True where the rows of a table were multiplied: by a function that does it, or as little became much."""
        shape = self.failure.shape
        if not self.on_host or shape is None or max(shape, default=0) < _MANY_ROWS:
            return False
        return any(sign.search(self.text) is not None for sign in (signs.MULTIPLIES, signs.LITTLE))

    @cached_property
    def makes_dense(self) -> bool:
        """True where the text shows that something sparse was being written out with all its zeros."""
        return self.on_host and signs.DENSE.search(self.text) is not None

    @cached_property
    def ranks_on_one_card(self) -> int:
        """How many other processes look like ranks of the same job that opened this card too: nothing but a context each, or one
        number after the other."""
        pids = sorted(row["pid"] for row in self.failure.extra.get("processes", ()))
        if len(pids) >= 3 and pids[-1] - pids[0] < 2 * len(pids):  # started one after the other
            return len(pids)
        small = [size for _, size in self.strangers if size < CONTEXT]
        alike = len(small) >= 2 and max(small) - min(small) <= 0.1 * max(small)
        return len(small) if alike and re.search(r"\brank ?[0-9]|\[rank[0-9]|torchrun|local_rank", self.text) else 0

    @cached_property
    def makes_weights(self) -> bool:
        """True where the tensor of a graph is a weight, or an optimizer's: no batch makes it smaller."""
        shape = self.failure.shape or ()
        kernel = len(shape) == 4 and shape[0] == shape[1] <= 11 and min(shape[2:]) >= 64  # height, width, from, to
        matrix = len(shape) == 2 and min(shape) >= 512
        dense = matrix and min(shape) >= 1024 and math.prod(shape) >= 2**26 and not self.names_tokens
        layer = kernel or dense or (matrix and self.one_at_a_time)  # no batch of one makes a matrix
        return self.failure.framework == "tensorflow" and (layer or signs.WEIGHTS.search(self.text) is not None)

    @cached_property
    def weights_of_graph(self) -> int | None:
        """Bytes of a weight that did not fit, in 32 bits where its type is not told; 0 where it is none."""
        shape = self.failure.shape
        return (self.need or (math.prod(shape) * 4 if shape else None)) if self.makes_weights else 0


def _told_bytes(match: re.Match[str]) -> int:
    number, unit = next((match[f"number{way}"], match[f"unit{way}"]) for way in "abc" if match[f"number{way}"])
    return int(float(number) * (1 << {"g": 30, "t": 40}[unit.lower()]))


def _rounding(size: int) -> int:
    """Half of the last digit with which PyTorch prints a size: 1.05 GiB may be 5 MiB less."""
    unit = max(0, (size.bit_length() - 1) // 10 * 10)
    return (1 << unit) // 200


def process_settings() -> dict[str, str]:
    """The allocator settings of this very process."""
    return {name: os.environ[name] for name in list_variables() if name in os.environ}


def pair_of_long_axes(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The two axes that a broadcast of two long vectors would have made, None where the shape does not look like it."""
    long = sorted((axis for axis in shape if axis >= 10_000), reverse=True)
    if len(long) < 2 or math.prod(shape) > 64 * long[0] * long[1]:
        return None
    return long[0], long[1]


def make_cause(name: CauseName, text: str, certain: bool | None = None, decide: str = "") -> Cause:
    """A cause; one that something would still decide is not certain, unless it says so."""
    return Cause(name=name, text=text, certain=not decide if certain is None else certain, decide=decide)


def make_remedy(
    name: str,
    saves: int | None,
    how: str,
    costs: str = "nothing",
    exactness: Exactness = BITWISE,
    known: Known = Known.ESTIMATE,
) -> Remedy:
    return Remedy(name=name, saves=saves, known=known, costs=costs, exactness=exactness, how=how)
