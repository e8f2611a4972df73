"""What the text of a case shows around its message, whatever the numbers say: the part of a `Case` that only reads.

In: the text. Out: one property a question, computed when it is first asked.
"""

from __future__ import annotations

import re
from functools import cached_property

from outsize.failure import signs
from outsize.failure.growth import rise
from outsize.failure.work import Work, work_of


def _shown(*signs: re.Pattern[str]) -> cached_property[bool]:
    """Whether the text of a case has one of some signs."""
    return cached_property(lambda case: any(sign.search(case.text) is not None for sign in signs))


class Shown:
    """The answers that a text alone gives."""

    text: str

    cannot_grow = _shown(signs.CANNOT_GROW)
    """True where PyTorch's wording shows that its segments cannot grow: it is older than 2.1."""
    can_split = _shown(signs.SPLIT)
    split_is_set = _shown(signs.SPLIT_IS_SET)
    """True where blocks are cut less already."""
    narrow = _shown(signs.NARROW)
    """True where the text shows a program of 32 bits."""
    spared_by_limit = _shown(signs.SPARED)
    """True where the text shows that its container did not kill it."""
    on_mac = _shown(signs.MAC)
    """True where the text shows that it happened on a Mac."""
    in_frames = _shown(signs.FRAMES)
    """True where the traceback goes through pandas."""
    loads_shards = _shown(signs.SHARDS)
    """True where the weights of a model were being read into RAM."""
    says_rising = _shown(signs.RISES)
    """True where the text says that memory rises."""
    makes_tensor = _shown(signs.MAKES_TENSOR)
    """True where one tensor in RAM was made of all that was read."""
    joins_results = _shown(signs.JOINS_RESULTS)
    """True where what every batch gave was put together in RAM."""
    names_tokens = _shown(signs.TOKENS)
    """True where the text speaks of tokens or points, of which a batch has many."""
    in_package = _shown(signs.PACKAGE)
    """True where the traceback goes through a package that computes for the user."""
    reads_raster = _shown(signs.RASTER)
    """True where a map or a scan is read whole."""

    @cached_property
    def computes(self) -> bool:
        """True where a traceback ends in a line that computes: no file is read, and no list of parts is put together."""
        lines = signs.LAST_LINE.findall(self.text)
        return bool(lines) and signs.READS.search(lines[-1]) is None

    is_node = _shown(signs.NODE)
    """True where the tensor is made inside a graph: nobody's code can take a part of it."""
    on_tpu = _shown(signs.TPU)
    """True where the text shows a TPU."""
    writes_grid = _shown(signs.GRIDS)
    """True where every point of a grid was being written out."""
    names_data = _shown(signs.DATA)
    """True where the text speaks of data that are read, kept or written."""
    in_image_build = _shown(signs.BUILD)
    """True where it happened while an image was built."""

    @cached_property
    def one_at_a_time(self) -> bool:
        """True where the text shows that the batch is one already, or that a smaller one was tried; one that was made 8 or more
        can become smaller still."""
        if signs.ONE.search(self.text) is not None:
            return True
        for match in signs.TRIED.finditer(self.text):
            made = re.search(r"\bto ([0-9]{1,5})\b", match.group())
            if made is None or int(made.group(1)) < 8:
                return True
        return False

    @cached_property
    def work(self) -> Work:
        """What the text shows was being done."""
        return work_of(self.text)

    @cached_property
    def grows(self) -> bool:
        """True where the text says that it went well for a while: something is kept that should be let go."""
        return self.rise is not None or signs.GROWS.search(self.text) is not None

    @cached_property
    def rise(self) -> tuple[int, int] | None:
        """Bytes at the start and at the end of a log in the text that shows memory rising."""
        return rise(self.text)

    @cached_property
    def names_card(self) -> bool:
        """True where the text speaks of a card, and does not say that none is used."""
        return signs.NO_CARD.search(self.text) is None and signs.CARD.search(self.text) is not None

    @cached_property
    def has_line(self) -> bool:
        """True where a traceback already shows the line."""
        return (
            re.search(
                r'File "[^"\n]{1,300}", line [0-9]|^[ \t]+\S[^\n]*\(.*\n\s*(?:\w+\.)*MemoryError', self.text, re.M
            )
            is not None
        )

    @cached_property
    def of_another(self) -> bool:
        """True where somebody tells of a program and shows no line of code: what makes the array is not in his hands."""
        return not self.has_line and signs.ASKS.search(self.text) is not None and signs.CODE.search(self.text) is None
