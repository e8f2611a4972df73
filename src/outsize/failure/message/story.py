"""A user's story without the message of a program: who asks, what happened, and what it was about.

In: a cleaned text in which no format was found. Out: a `Failure` that says only what the story says, or None. A story is one
where somebody asks or speaks of himself, and one of its sentences tells an event: memory ran out, a process was killed, a
kernel of a notebook died, a machine froze, memory keeps rising. The words of a manual tell no event: what may happen, what is
prevented, what was fixed. An event that has other reasons as well needs words of memory or of size beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outsize.core.failure import Failure
from outsize.failure.message.clean import Cleaned
from outsize.failure.signs import ASKS, CARD, RAM_IS_FULL

_LONGEST = 6_000
"""Characters of a story; a longer text is a manual or a log, whose wordings are formats."""
_TITLE = re.compile(r"(?:# )?[\w\[(\"'][^\n]{8,160}")
"""A line that may stand alone."""
_CHANGE = re.compile(
    r"\b(?:plug(?:s|ged)?|fix(?:es|ed)?|bugs?|bugfix|merged?|used|assert|raises?|was|were|has been|test)\b|[#`_=]\w|^[*-]",
    re.IGNORECASE,
)
"""Words of a list of changes, of a manual, or of code."""
_MANUAL = re.compile(
    r"\b(?:avoid\w*|prevent\w*|fix(?:ed|es)?|handl\w+|no longer|without|support\w*|should|would|may|might|could|can|cannot|if|"
    r"in case|will|instead of|unless|until|add(?:s|ed)?|detect\w*|check\w*|reduc\w+|not|never|no|zero|don't|"
    r"doesn't|isn't)\b[^.!?]{0,50}\Z",
    re.IGNORECASE,
)
"""What stands before an event that did not happen."""
_HAPPENS = re.compile(
    r"\b(?:I|it|we|this|they|always|still|then)\b (?:\w+ )?(?:gets?|got|throws?|gives?|shows?|crash\w*|fail\w*|runs?|ran|hits?|"
    r"says?|dies|met|faced?|have|am|was|keeps?)\b",
    re.IGNORECASE,
)
"""What stands between such words and an event that did."""
_HOW = re.compile(r"\bhow (?:to|can|do|could|should)\b|\?\s*\Z", re.IGNORECASE)
"""A question about an event that did."""
_SIZE = re.compile(
    r"\b(?:memory|V?RAM|swap|large|larger|big|huge|data ?sets?|data ?frames?|read_csv|[0-9.]+ ?[GT]i?B|arrays?)\b",
    re.IGNORECASE,
)
_MEMORY = re.compile(r"\b(?:memory|V?RAM|swap)\b", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[.!?。？])\s+|\n")
_OTHER = re.compile(
    r"native thread|valgrind|sanitizer|\bECC\b|corrupt|illegal memory|memory access|segmentation fault|uncorrectable|heap-use|"
    r"double free|\bdisk (?:is )?full|\b(?:written (?:a|this)|(?:guide|tips) (?:to|for|on)|release notes|changelog)\b",
    re.IGNORECASE,
)
"""Failures of memory that are no lack of it, and texts that teach."""


@dataclass(frozen=True, slots=True)
class _Event:
    framework: str
    format: str
    told: re.Pattern[str]
    about: re.Pattern[str] | None = None
    """What the story must speak of beside it."""
    extra: Mapping[str, Any] = field(default_factory=dict)


_EVENTS = (
    _Event("notebook", "notebook", re.compile(
        r"\b(?:kernel|notebook|session|runtime|colab)s?\b[^.\n]{0,50}\b(?:dies|died|dying|dead|crash\w*|restart\w*|disconnect\w*)\b|"
        r"\bdead kernel\b", re.IGNORECASE), _SIZE, {"signal": "Killed"}),
    _Event("linux", "killed", re.compile(
        r"\b(?:gets?|got|getting|being|is|was|were|are|been) (?:\w{3,14}ly |always |just )?killed\b"
        r"(?! (?:by|with) (?!the (?:system|kernel|os|oom)|system|kernel|os\b|oom|linux))",
        re.IGNORECASE), None, {"signal": "Killed"}),
    _Event("unknown", "told", re.compile(
        r"\b(?:wo|does|did|ca|could)(?:n't|n’t| not|nnot) fit (?:in|into)(?: the| my| system| GPU| main)? (?:memory|V?RAM)\b|"
        r"\b(?:RAM|(?:system |main )?memory) (?:is|was|gets|got|becomes|being) (?:\w{1,9} )?(?:full|exhausted|used up|filled)\b|"
        r"\bmemory ?errors?\b(?!:)|\bout[- ]of[- ](?:\w{2,8} )?(?:memory|V?RAM)\b|(?-i:\bOOM\b(?! ?-?kill)|\boom(?= error))|"
        r"\bresources? exhaust\w+|\b(?:not enough|insufficient|lack of) (?:\w{2,8} )?(?:memory|V?RAM)\b|\berror de memoria\b",
        re.IGNORECASE)),
    _Event("unknown", "all-used", re.compile(
        r"\b(?:memory|V?RAM|RSS)\b(?:[- ](?!quick|rapid|sudden|immediate|fast)\w+){0,3}? (?:leak\w*|"
        r"(?:keeps? |is |was |slowly |constantly |steadily |continuously )*"
        r"(?:grow|increas|climb|ris)(?:e[sn]?|ing|s)?\b)|\bmemory leak\b", re.IGNORECASE)),
    _Event("unknown", "all-used", re.compile(
        r"\b(?:computer|machine|laptop|system|PC|Mac|server|everything|entire|whole|desktop|OS|node|VM)\b[^.\n]{0,60}"
        r"\b(?:freez\w+|froze|hangs?|hung|lock(?:s|ed|ing)? (?:up|out)|unresponsive|stuck)\b|"
        r"\b(?:freez\w+|froze|hangs?|hung|lock(?:s|ed|ing)? (?:up|out))\b[^.\n]{0,60}\b(?:computer|machine|"
        r"laptop|system|PC|Mac|server|"
        r"application|OS|node|VM)\b", re.IGNORECASE), _MEMORY),
)  # fmt: skip
"""Asked in this order."""
_WHOSE = (
    ("jax", re.compile(r"\bjax(?:lib)?\b|\bjnp\.|\bflax\b|\bxla\b", re.IGNORECASE)),
    ("tensorflow", re.compile(r"tensorflow|\bkeras\b|\btf\.", re.IGNORECASE)),
    ("python", re.compile(
        r"\bMemory ?Errors?\b[\s\S]*(?:pandas|\bpd\.|numpy|\bnp\.|python)|"
        r"(?:pandas|\bpd\.|numpy|\bnp\.|python)[\s\S]*\bMemory ?Errors?\b|\bMemory ?Errors?\b[\s\S]*(?:\bpickl|\bjoblib|\.npy\b)",
        re.IGNORECASE)),
)  # fmt: skip
"""Who failed, where the story names a framework whose advice differs."""


def read_story(text: Cleaned) -> Failure | None:
    """What a user's story says, or None where it is none."""
    story = text.lines.strip()
    asks = ASKS.search(story) is not None
    if len(story) > _LONGEST or _OTHER.search(story) is not None or not (asks or _is_title(story)):
        return None
    for event in _EVENTS if asks else _EVENTS[:-2]:
        if (event.about is None or event.about.search(story)) and _tells(event, story, asks):
            framework = next((name for name, sign in _WHOSE if sign.search(story)), event.framework)
            framework = framework if event.format == "told" else event.framework
            device = "cuda" if framework in ("jax", "tensorflow") and CARD.search(story) is not None else None
            device = "cpu" if RAM_IS_FULL.search(story) is not None else device
            return Failure(framework=framework, device=device, extra={"format": event.format} | dict(event.extra))
    return None


def _is_title(story: str) -> bool:
    """True for one line that says what happened, and nothing else."""
    return _TITLE.fullmatch(story) is not None and _CHANGE.search(story) is None


def _tells(event: _Event, story: str, asks: bool) -> bool:
    """True where a sentence tells the event as one that happened."""
    for sentence in _SENTENCE.split(story):
        for place in event.told.finditer(sentence):
            manual = _MANUAL.search(sentence[: place.start()])
            if manual is None or (asks and (_HOW.search(sentence) or _HAPPENS.search(manual.group()))):
                return True
    return False
