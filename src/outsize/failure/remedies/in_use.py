"""Whether a text shows that a way out is taken already: its settings, with values that go at least as far.

In: a `Remedy` and a text. Out: the remedy, one with a larger value where more of it still helps, or None. What follows `#` in the
line of a remedy is a remark and no setting.
"""

from __future__ import annotations

import re
from dataclasses import replace

from outsize.core.failure import Remedy

_SETTING = re.compile(
    r"(?<![\w./-])(?:--?)?(?P<name>[A-Za-z][\w.-]{0,60})(?:\"?\s?[=:]\s?\"?| )"
    r"(?P<value>-?[0-9][0-9_.]*(?:[KMGTkmgt]i?[Bb]?)?|[Tt]rue|[Ff]alse|[A-Za-z]+[0-9]\w*)(?![\w.])"
)
"""A name with a value: an option, an argument, a variable."""
_FLAG = re.compile(r"(?<![\w-])--(?P<name>[a-z][\w-]{3,60})(?=\s|$)(?! +[\"'0-9])")
"""An option without a value."""
_CALL = re.compile(r"\b([A-Za-z_]\w*)\(")
"""A function that is called."""
_GROWS = re.compile(
    r"utili[sz]ation|fraction|old-space|heap|swap|offload|accumul|memory$|mem$|shm|-Xmx|nofile|limit$|memory_usage",
    re.IGNORECASE,
)
"""Settings of which more helps; of every other less does."""
_MOST = re.compile(r"utili[sz]ation|fraction", re.IGNORECASE)
"""Settings that no value past 1 makes larger."""

_ADVICE = re.compile(
    r"\b(?:use|try|(?-i:setting|set)|increas\w+|consider|pass(?:ing)?|add(?:ing)?)\b[\W\d]{0,8}(?:the )?\W{0,4}"
    r"(?:\w{1,40}=)?\Z|# ?\Z",
    re.IGNORECASE,
)
"""Words before a setting that is advised."""


def left_to_do(remedy: Remedy, text: str) -> Remedy | None:
    """The remedy, as far as the text does not show it in use."""
    code = re.split(r"\s#", remedy.how, maxsplit=1)[0]
    less = "less than yours" in remedy.how
    settings = list(_SETTING.finditer(code))
    valued = {match.group("name") for match in settings}
    flags = [name for match in _FLAG.finditer(code) if (name := match.group("name")) not in valued]
    if not settings and not flags:
        return remedy
    shown = [_shown(match.group("name"), text) for match in settings]
    done = [
        _goes_as_far(match.group("name"), told, match.group("value"), less)
        for match, told in zip(settings, shown, strict=True)
    ]
    if any(call not in text for call in _CALL.findall(code)):
        return remedy
    given = [_is_given(name, text) for name in flags]
    if not all((*done, *given)):
        used = [match.group("name") for match, is_done in zip(settings, done, strict=True) if is_done]
        return _rest(remedy, [*used, *(name for name, is_given in zip(flags, given, strict=True) if is_given)])
    if len(settings) == 1 and not flags and shown[0] is not None and not less:
        return _further(remedy, settings[0], shown[0])
    return None


def _rest(remedy: Remedy, used: list[str]) -> Remedy:
    """The remedy without the options that are in use, where its line is nothing but options."""
    code, mark, remark = remedy.how.partition("   #")
    options = re.split(r" (?=--)", code)
    if not used or not all(option.startswith("--") for option in options):
        return remedy
    left = [option for option in options if re.split(r"[ =]", option[2:])[0] not in used]
    return replace(remedy, how=" ".join(left) + mark + remark) if left else remedy


def _pattern(name: str) -> str:
    return "[-_ ]".join(map(re.escape, re.split("[-_]", name)))


def _shown(name: str, text: str) -> str | None:
    """The value with which the text shows that setting, not only advises it."""
    sign = (
        rf"(?<![\w.-])(?:--?)?{_pattern(name)}[\"'`]?\s?(?:[=: ]|\bis\b|\bto\b)\s?[\"'`]?"
        r"(-?[0-9][0-9_.]*(?: ?[KMGT]i?B?\b)?|[Tt]rue|[Ff]alse|[A-Za-z]+[0-9]\w*)"
    )
    told = (match for match in re.finditer(sign, text, re.IGNORECASE) if not _is_advice(text, match.start()))
    return next((match.group(1).rstrip(".") for match in told), None)


def _is_advice(text: str, place: int) -> bool:
    """True where what stands before it shows that a message or a person only advises it."""
    return _ADVICE.search(text[max(0, place - 64) : place]) is not None


def _is_given(name: str, text: str) -> bool:
    found = re.finditer(rf"--{_pattern(name)}(?![\w-])|\b{_pattern(name)}[\"']?\s?[=:]\s?true\b", text, re.IGNORECASE)
    return any(not _is_advice(text, match.start()) for match in found)


def _number(value: str) -> float | None:
    digits = re.match(r"-?[0-9][0-9_.]*", value)
    if digits is None:
        return None
    unit = value[digits.end() :].strip()[:1].lower()
    try:
        return float(digits.group().replace("_", "")) * (1 << 10 * " kmgt".find(unit or " "))
    except ValueError:
        return None


def _goes_as_far(name: str, told: str | None, advised: str, less: bool) -> bool:
    """True where the value of the text does what the advised one would."""
    if told is None:
        return False
    there, wanted = _number(told), _number(advised)
    if there is None or wanted is None:
        return told.lower() == advised.lower()
    return there >= wanted if _GROWS.search(name) is not None and not less else there <= wanted


def _further(remedy: Remedy, setting: re.Match[str], told: str) -> Remedy | None:
    """Twice of what is set already, where that can be had."""
    there = _number(told)
    if (
        there is None
        or not setting["value"][-1].isdigit()
        or _GROWS.search(setting["name"]) is None
        or _MOST.search(setting["name"]) is not None
    ):
        return None
    start, end = setting.span("value")
    return replace(remedy, how=f"{remedy.how[:start]}{int(there * 2)}{remedy.how[end:]}")
