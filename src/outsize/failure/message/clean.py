"""Text as people paste it -> text as the program printed it: the front end that all formats share.

In: a message with colours, log prefixes, quoting, JSON or mail escapes, HTML tags, wrapped lines. Out: `Cleaned`, the same
text on one line in up to three views (line breaks are spaces; only the breaks at the edge of a terminal are nothing; all
breaks are nothing, for text cut in the middle of words and numbers) and with its lines. A log of many megabytes is
first cut to the passages around words that can matter.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

LONGEST = 20_000
"""Characters that are read in full; of a longer text only passages are."""
_BEFORE, _AFTER = 500, 2_500

_TRIGGERS = (
    "memory", "out_of_mem", "outofmem", "out of resource", "oom", "alloc", "exhausted", "killed", "sigkill", "bus error",
    "heap space", "no space left", "exit code", "exit status", "exitcode", "exited", "kv cache", "cache blocks", "mmap",
    "overhead limit", "vram", "available ram",
)  # fmt: skip
"""Lower-case words, one of which stands near everything that can matter."""
_ANSI = re.compile(
    r"(?:\x1b|\\x1b|\\u001b|\\033|\\e|\^\[)\[[0-9;?]{0,20}[A-Za-z]|\[[0-9]{1,2}(?:;[0-9]{1,3}){0,4}m|\x1b\][^\x07]{0,200}\x07"
)
_ENTITY = re.compile(r"&(?:#[0-9]{1,6}|#x[0-9a-fA-F]{1,6}|[a-zA-Z]{2,8});")
_TAG = re.compile(
    r"</?(br|pre|code|p|div|span|td|tr|th|li|ul|ol|strong|em|details|summary|h[1-6])(?: [^<>]{0,200})?/?>",
    re.IGNORECASE,
)
_LITERALS = re.compile(r"(\"|')[ \t]{0,4}\+?[ \t]{0,4}\n?[ \t]{0,80}\+?[ \t]{0,4}\1(?=[A-Za-z0-9( ])")
"""The seam between two string literals that a program's source puts together."""
_WRAPPED = re.compile(
    r"^\{\"(?:log|message|msg|line|text)\": ?\"|"
    r"\n?\", ?\"(?:stream|time)\": ?\"[^\"\n]{0,60}\"(?:, ?\"\w{1,20}\": ?\"[^\"\n]{0,60}\")?\}$",
    re.MULTILINE,
)
_SOFT_BREAK = re.compile(r"=[ \t]{0,4}\r?\n")
_MAIL = re.compile(r"(?m)=3D|=20[ \t]{0,4}\r?$|(?:=[C-F][0-9A-F])(?:=[89AB][0-9A-F])|^[^\n]{60,76}=\r?$")
_OCTETS = re.compile(r"(?m)=3D|=(?:20|09)[ \t]{0,4}\r?$|(?:=[89A-F][0-9A-F]){2,64}")
"""What a mail program must escape: its own sign, blanks at the end of a line and letters beyond ASCII; nothing else, because
`pid=2044` stands in plain text."""
_ESCAPES = (
    (re.compile(r"\\{1,4}r(?=\\{1,4}n)"), ""),
    (re.compile(r"\\{1,4}n"), "\n"),
    (re.compile(r"\\{1,4}t"), " "),
    (re.compile(r"\\{1,4}([\"'/])"), r"\1"),
)
_UNICODE = re.compile(r"\\{1,4}u([0-9a-fA-F]{4})")
_SPACES = str.maketrans(
    dict.fromkeys("\xa0\u202f\u2009\t", " ")
    | dict.fromkeys("\u200b\u200c\ufeff\x00", "")
    | dict.fromkeys("\r\x0b\x0c\x85\u2028\u2029", "\n")
    | {"\u2026": "...", "\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"'}
)
"""Signs that writers and pages put in place of those that programs print."""

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
            r"##\[\w{1,12}\]|[#>|│┃║╎┆]+(?= |$)|[#>]{1,8}(?=\S)|//+ ?|/\*+ |\*+ |;+ |--+ |REM |dnl |%+ |\"\"\"|'''",
            rf"\[? ?{_DATE}[T ,]{{1,2}}{_TIME}(?: [0-9]{{4}})?(?: ?\])?[:,]?(?= |$|\[)",
            rf"\[? ?{_TIME}(?: ?\])?[:,]?(?= )",
            r"\[ {0,8}[0-9]{1,9}\.[0-9]{1,9}\]",
            r"[0-9]{1,3}\.[0-9]{2}\.[0-9]{3}\.[0-9]{3}(?= )",
            rf"(?:- )?\[?{_LEVEL}\]?(?::(?:[\w.]{{1,40}}:)?| - | -$| \|)(?= ?)",
            r"[\w.-]{1,60} (?:kernel|[\w.-]{1,40}\[[0-9]{1,8}\]):(?= |$)",
            rf"(?:\[{_LEVEL}\]|{_LEVEL}) (?=[0-9\[(])",
            r"\[[a-z]{2,12}[ _-]?[0-9]{1,5}\](?::|(?= |$))|\[[0-9]{1,6}(?:,[0-9]{1,6})?\](?:<\w{3,6}>:?|:)",
            r"\([\w.:<>-]{1,60} (?:pid|rank|ip)=[^()\n]{1,80}\)(?= |$)|\(raylet\)|std(?:err|out) [FP] ",
            rf"(?:\[[\w.:-]{{1,40}}\]){{0,2}}\[{_LEVEL}\](?: - | -$|(?= |$))",
            r"[a-z][\w.-]{1,40} {1,20}\|(?= |$)",
            r"\[?[\w./-]{1,60}\.(?:py|cc|cpp|cu|h|go|rs):[0-9]{1,6}\](?= |$)",
            r"[EIWF][0-9]{4} [0-9:.]{8,16} {1,6}[0-9]{1,9} ",
        )
    ),
)
_EDGE_OPEN = re.compile(r"(?:\+ {0,2})?(?:[fbru]{0,2}(?:\"|')) {0,40}(?=[A-Za-z(0-9.#/>$\[`-])")
_EDGE_CLOSE = re.compile(r"(?: ?\\n)?(\"|')(?: ?[,+\\)]{0,3})$")
_FRAME = re.compile(r" {0,200}[│┃║\\]$")
_NARROWEST = 30
"""Characters of the narrowest terminal."""
_NUMBER_START = re.compile(r"[0-9]|[.,][0-9]")
_NUMBER_END = re.compile(r"[0-9][.,]?$")
_COUNTED = re.compile(r" {0,6}([0-9]{1,6})(?:([:|│]) ?|(?= ))")
_BLANKS = re.compile(r" {2,}")


@dataclass(frozen=True, slots=True)
class Cleaned:
    """One message in several views."""

    views: tuple[str, ...]
    """The text on one line, likeliest view first."""
    lines: str
    """Line breaks kept, prefixes and colours gone."""
    key: str
    """Lower case without any white space: only to ask quickly whether a word is there."""


@dataclass(frozen=True, slots=True)
class _Line:
    text: str
    """The line without its prefix."""
    width: int
    """Columns it took."""
    glue: str
    """What stood between it and the next line if the break is no break: nothing, or a space at the edge."""


def clean(text: str) -> Cleaned:
    """The views of a message."""
    raw = _uncounted(textwrap.dedent(_decode(_cut(text))).split("\n"))
    stripped = [_strip_line(line) for line in raw]
    lines = [
        _Line(text, len(line), " " if line[-1:] == " " or after[:1] == " " else "")
        for line, text, after in zip(raw, stripped, [*raw[1:], ""], strict=True)
        if text
    ]
    widest = max((line.width for line in lines), default=0)
    edges = [index for index, line in enumerate(lines[:-1]) if line.width == widest >= _NARROWEST]
    flat = _one_line((line.text, " ") for line in lines)
    joined = _one_line((line.text, "") for line in lines)
    mended = _one_line((line.text, line.glue if index in edges else " ") for index, line in enumerate(lines))
    cut = len(edges) > 1 or any(_is_cut_number(lines[index].text, lines[index + 1].text) for index in edges)
    return Cleaned(
        views=tuple(dict.fromkeys((mended, joined, flat) if cut else (flat, mended, joined))),
        lines="\n".join(line.text for line in lines),
        key="".join(flat.lower().split()),
    )


def _one_line(pieces: Iterable[tuple[str, str]]) -> str:
    return _BLANKS.sub(" ", "".join(text + glue for text, glue in pieces)).strip()


def _is_cut_number(line: str, after: str) -> bool:
    return _NUMBER_END.search(line) is not None and _NUMBER_START.match(after) is not None


def _uncounted(lines: list[str]) -> list[str]:
    """The lines without the number that a launcher, an editor or a pager put before each of them."""
    full = [line for line in lines if line.strip()]
    counted = [count for count in map(_COUNTED.match, full) if count is not None]
    numbers = [int(count.group(1)) for count in counted]
    if len(full) < 2 or len(counted) < len(full):
        return lines
    if all(count.group(2) for count in counted) or (
        len(full) > 2 and numbers == [numbers[0] + step for step in range(len(full))]
    ):
        return [line[count.end() :] if (count := _COUNTED.match(line)) else line for line in lines]
    return lines


def _cut(text: str) -> str:
    """The passages of a long text that can matter; of too many the first and the last, because a failure is announced at
    the end of a log, and its cause where it begins."""
    if len(text) <= LONGEST:
        return text
    lower = text.lower()
    places = {word: lower.find(word) for word in _TRIGGERS}
    passages: list[tuple[int, int]] = []
    while places := {word: place for word, place in places.items() if place >= 0}:
        at = min(places.values())
        passages.append((max(0, at - _BEFORE), at + _AFTER))
        places = {
            word: lower.find(word, at + _AFTER) if place < at + _AFTER else place for word, place in places.items()
        }
    kept = "\n".join(text[start:end] for start, end in passages)
    return kept if len(kept) <= LONGEST else kept[: LONGEST // 2] + "\n" + kept[-LONGEST // 2 :]


def _decode(text: str) -> str:
    """Escapes of mail, HTML, JSON and terminals undone."""
    if "=" in text and _MAIL.search(text):
        text = _OCTETS.sub(_decode_octets, _SOFT_BREAK.sub("", text))
    if "&" in text:
        text = _ENTITY.sub(lambda entity: html.unescape(entity.group()), text)
    if "<" in text:
        text = _TAG.sub(lambda tag: "\n" if tag.group(1) == "br" else "", text)
    if "[" in text:
        text = _ANSI.sub("", text)
    if "\\" in text:
        for escape, plain in _ESCAPES:
            text = escape.sub(plain, text)
        text = _UNICODE.sub(lambda match: chr(int(match.group(1), 16)), text)
        text = _ANSI.sub("", text)
    text = _LITERALS.sub("", text)
    if text.startswith("{"):
        text = _WRAPPED.sub("", text)
    return text.translate(_SPACES)


def _decode_octets(match: re.Match[str]) -> str:
    return bytes.fromhex(match.group().strip().replace("=", "")).decode("utf-8", "replace")


def _strip_line(line: str) -> str:
    """A line without what a terminal, a log, a quotation or a program's source put around it."""
    line = _FRAME.sub("", _strip_prefixes(line.strip()))
    opening = _EDGE_OPEN.match(line)
    closing = _EDGE_CLOSE.search(line, max(0, len(line) - 12))
    if closing is not None and (opening or line.count(closing.group(1)) % 2 or closing.group().endswith("+")):
        line = line[: closing.start()].rstrip()
    return _strip_prefixes(line[opening.end() :]) if opening is not None else line


def _strip_prefixes(line: str) -> str:
    for _ in range(8):
        prefix = _PREFIX.match(line)
        if prefix is None or prefix.end() == 0:
            break
        line = line[prefix.end() :].lstrip()
    return line
