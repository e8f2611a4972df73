"""Text as people paste it -> text as the program printed it: the front end that all formats share.

In: a message with colours, log prefixes, quoting, JSON or mail escapes, HTML entities, wrapped lines. Out: `Cleaned`, the
same text in three views: `flat` (line breaks are spaces), `joined` (line breaks are nothing, for text cut in the middle of
a word or a number) and `lines`. A log of many megabytes is first cut to the passages around words that can matter.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass

LONGEST = 24_000
"""Characters that are read in full; of a longer text only passages are."""
_BEFORE, _AFTER = 800, 3_200

_STRONG = (
    "out of memory", "out_of_memory", "outofmemory", "out of gpu memory", "out of shared memory", "oom when", "oom-kill",
    "oom_kill",
    "oomkill", "unable to allocate", "tried to allocate", "maxinuse", "resource_exhausted", "resourceexhausted", "bad_alloc",
    "killed process", "heap space", "cannot allocate", "can't allocate", "alloc_failed", "bus error",
)  # fmt: skip
_WEAK = (
    "memoryerror", "failed to alloc", "not enough memory", "insufficient", "memory limit", "killed", "sigkill", "no space left",
    "exit code", "exit status", "exitcode", "exited with", "memory pressure", "memory budget", "kv cache", "cache blocks",
    "overhead limit", "exceed", "malloc", "mmap",
)  # fmt: skip
"""Words around which a long text is read, the telling ones first."""
_MOST_PLACES = 64
_ANSI = re.compile(
    r"(?:\x1b|\\x1b|\\u001b|\\033|\\e|\^\[)\[[0-9;?]{0,20}[A-Za-z]|\[[0-9]{1,2}(?:;[0-9]{1,3}){0,4}m|"
    r"\x1b\][^\x07]{0,200}\x07"
)
_ENTITY = re.compile(r"&(?:#[0-9]{1,6}|#x[0-9a-fA-F]{1,6}|[a-zA-Z]{2,8});")
_QUOTED_PRINTABLE = re.compile(r"=[ \t]{0,4}\r?\n|=3D")
_SOFT_BREAK = re.compile(r"=[ \t]{0,4}\r?\n")
_OCTETS = re.compile(r"(?:=[0-9A-F]{2}){1,64}")
_ESCAPES = (
    (re.compile(r"\\{1,4}r(?=\\{1,4}n)"), ""),
    (re.compile(r"\\{1,4}n"), "\n"),
    (re.compile(r"\\{1,4}t"), " "),
    (re.compile(r"\\{1,4}([\"'/])"), r"\1"),
)
_UNICODE = re.compile(r"\\{1,4}u([0-9a-fA-F]{4})")
_SPACES = str.maketrans(
    {
        "\xa0": " ",
        "\u202f": " ",
        "\u2009": " ",
        "\u200b": "",
        "\u200c": "",
        "\ufeff": "",
        "\x00": "",
        "\u2026": "...",
        "\u2019": "'",
        "\u2018": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\t": " ",
        "\r": "\n",
        "\x0b": "\n",
        "\x0c": "\n",
        "\x85": "\n",
        "\u2028": "\n",
        "\u2029": "\n",
    }
)

_TIME = r"[0-9]{1,2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]{1,9})?)?(?: ?[AP]M)?Z?(?:[+-][0-9]{2}:?[0-9]{2})?"
_DATE = (
    r"(?:[0-9]{4}[-/][0-9]{1,2}[-/][0-9]{1,2}|[0-9]{1,2}[-/][0-9]{1,2}(?:[-/][0-9]{2,4})?|"
    r"(?:[A-Z][a-z]{2},? )?[A-Z][a-z]{2} {1,2}[0-9]{1,2}(?: [0-9]{4})?)"
)
_LEVEL = r"(?:DEBUG|INFO|NOTICE|WARN(?:ING)?|ERROR|CRITICAL|FATAL|SEVERE|TRACE|[DIWEF])"
_PREFIX = re.compile(
    "|".join(
        f"(?:{rule})"
        for rule in (
            r"[#>|│┃║╎┆]+(?= |$)|[#>]{1,8}(?=\S)|//+ ?|/\*+ |\*+ |;+ |--+ |REM |dnl |%+ |\"\"\"|'''",
            rf"\[? ?{_DATE}[T ,]{{1,2}}{_TIME}(?: [0-9]{{4}})?(?: ?\])?[:,]?(?= |$)",
            rf"\[? ?{_TIME}(?: ?\])?[:,]?(?= )",
            r"\[ {0,8}[0-9]{1,9}\.[0-9]{1,9}\]",
            r"[0-9]{1,3}\.[0-9]{2}\.[0-9]{3}\.[0-9]{3}(?= )",
            rf"(?:- )?\[?{_LEVEL}\]?(?::(?:[\w.]{{1,40}}:)?| - | -$| \|)(?= ?)",
            r"[\w.-]{1,60} (?:kernel|[\w.-]{1,40}\[[0-9]{1,8}\]):(?= |$)",
            rf"(?:\[{_LEVEL}\]|{_LEVEL}) (?=[0-9\[(])",
            r"\[[a-z]{2,12}[ _-]?[0-9]{1,5}\](?::|(?= |$))|\[[0-9]{1,6}(?:,[0-9]{1,6})?\](?:<\w{3,6}>)?(?::|(?= |"
            r"$))|[0-9]{1,5}: ",
            r"\([A-Z]\w{0,40} [^()\n]{0,20}pid=[^()\n]{1,80}\)(?= |$)|\(raylet\)",
            r"[a-z][\w.-]{1,40} {1,20}\|(?= |$)",
            r"[\w./-]{1,60}\.(?:py|cc|cpp|cu|h|go|rs):[0-9]{1,6}\](?= |$)|\[[\w./-]{1,60}\.(?:py|cc|cpp|cu|h|go|"
            r"rs):[0-9]{1,6}\](?= |$)",
            r"[EIWF][0-9]{4} [0-9:.]{8,16} {1,6}[0-9]{1,9} ",
        )
    ),
)
_EDGE_OPEN = re.compile(r"(?:[fbru]{0,2}(?:\"|'))(?=[A-Za-z(0-9])")
_EDGE_CLOSE = re.compile(r"(?: ?\\n)?(?:\"|')(?: ?[,+\\)]{0,3})$| ?[│┃║\\]$")
_NARROWEST = 30
"""Characters of the narrowest terminal."""
_CUT_NUMBER_START = re.compile(r"[0-9]|[.,][0-9]")
_CUT_NUMBER_END = re.compile(r"[0-9][.,]?$")
_BLANKS = re.compile(r" {2,}")


@dataclass(frozen=True, slots=True)
class Cleaned:
    """One message in three views."""

    flat: str
    """Every run of white space, line breaks included, is one space."""
    joined: str
    """Line breaks are gone without a trace."""
    lines: str
    """Line breaks kept, prefixes and colours gone."""
    cut: bool
    """The lines end at one column, so they were cut by a terminal, not by a writer."""
    key: str
    """Lower case without any white space: only to ask quickly whether a word is there."""


def clean(text: str) -> Cleaned:
    """The three views of a message."""
    text = _cut(_decode(_cut(text)))
    raw = text.split("\n")
    lines = _mend([(len(line), _strip_line(line)) for line in raw])
    flat = _BLANKS.sub(" ", " ".join(lines))
    joined = _BLANKS.sub(" ", "".join(lines))
    return Cleaned(
        flat=flat, joined=joined, lines="\n".join(lines), cut=_is_cut(raw), key="".join(flat.lower().split())
    )


def _mend(lines: list[tuple[int, str]]) -> list[str]:
    """The lines that say something; a number that the edge of a terminal cut in two is one again."""
    widest = max((width for width, _ in lines), default=0)
    mended: list[str] = []
    at_edge = False
    for width, line in lines:
        if (
            at_edge
            and line
            and _CUT_NUMBER_START.match(line)
            and _CUT_NUMBER_END.search(mended[-1], len(mended[-1]) - 3)
        ):
            mended[-1] += line
        elif line:
            mended.append(line)
        at_edge = bool(line) and width == widest and width >= _NARROWEST and bool(mended)
    return mended


def _is_cut(lines: list[str]) -> bool:
    """True where at least two lines, and all but the last of some paragraph, are equally long."""
    widths = [len(line) for line in lines if line.strip()]
    widest = max(widths, default=0)
    return widest >= _NARROWEST and sum(width == widest for width in widths[:-1]) >= 2 and widths[0] == widest


def _cut(text: str) -> str:
    """The passages of a long text that can matter, the telling ones first, as many as fit."""
    if len(text) <= LONGEST:
        return text
    passages: list[tuple[int, int]] = []
    taken, lower = 0, text.lower()
    for words in (_STRONG, _WEAK):
        for place in sorted(place for word in words for place in _places(lower, word)):
            if any(low <= place < high for low, high in passages):
                continue
            passages.append((max(0, place - _BEFORE), min(len(text), place + _AFTER)))
            taken += passages[-1][1] - passages[-1][0]
            if taken >= LONGEST - _BEFORE - _AFTER:
                return _join(text, passages)
    return _join(text, passages)


def _places(text: str, word: str) -> Iterator[int]:
    """Where a word stands, a number of times at most: plain search is ten times as fast here as a regular expression."""
    place = text.find(word)
    for _ in range(_MOST_PLACES):
        if place < 0:
            return
        yield place
        place = text.find(word, place + _BEFORE)


def _join(text: str, passages: list[tuple[int, int]]) -> str:
    """The passages in the order of the text, none of it twice."""
    pieces, done = [], 0
    for start, end in sorted(passages):
        if end > done:
            pieces.append(text[max(start, done) : end])
            done = end
    return "\n".join(pieces)


def _decode(text: str) -> str:
    """Escapes of mail, HTML, JSON and terminals undone."""
    if _QUOTED_PRINTABLE.search(text):
        text = _OCTETS.sub(_decode_octets, _SOFT_BREAK.sub("", text))
    if "&" in text:
        text = _ENTITY.sub(lambda entity: html.unescape(entity.group()), text)
    if "[" in text:
        text = _ANSI.sub("", text)
    if "\\" in text:
        for escape, plain in _ESCAPES:
            text = escape.sub(plain, text)
        text = _UNICODE.sub(lambda match: chr(int(match.group(1), 16)), text)
        text = _ANSI.sub("", text)
    return text.translate(_SPACES)


def _decode_octets(match: re.Match[str]) -> str:
    return bytes.fromhex(match.group().replace("=", "")).decode("utf-8", "replace")


def _strip_line(line: str) -> str:
    """A line without what a terminal, a log or a quotation put around it."""
    line = line.strip()
    for _ in range(8):
        prefix = _PREFIX.match(line)
        if prefix is None or prefix.end() == 0:
            break
        line = line[prefix.end() :].lstrip()
    opening = _EDGE_OPEN.match(line)
    closing = _EDGE_CLOSE.search(line, max(0, len(line) - 12))
    if closing is not None:
        line = line[: closing.start()].rstrip()
    return line[opening.end() :] if opening is not None else line
