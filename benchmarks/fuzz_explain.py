"""A million mutated messages through `outsize.explain`: no exception, no hang, no absurd number accepted silently.

    python benchmarks/fuzz_explain.py [count] [seed]

Mutations cut, repeat, splice, swap and re-wrap our own messages of every format, put in digits, units, brackets,
control characters and prefixes, and repeat pieces until a regular expression with a weak spot would stand still.
Prints the counts, the slowest text, and the first findings; exits 1 if there is one.
"""

from __future__ import annotations

import pathlib
import random
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))

from failure_messages import LOOKALIKES, MESSAGES

from outsize.core.failure import Diagnosis
from outsize.failure.explain import explain_text

HANG = 0.050
"""Seconds that one message may take."""
JUNK = [
    *(
        "0",
        "9" * 30,
        "18446744073709551615",
        "17179869184.00 GiB",
        "1e999",
        "-1",
        ".",
        ",",
        " ",
        "\n",
        "\r\n",
        "\t",
        "\x00",
    ),
    *(
        "\x1b[31m",
        "=\n",
        "=3D",
        "&gt;",
        "\\n",
        "\\\\n",
        "\\u0041",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "GiB",
        "MiB",
        "bytes",
        "B",
        "K",
    ),
    *(
        "# ",
        "> ",
        "[rank0]: ",
        "│ ",
        "…",
        "Tried to allocate",
        "total capacity",
        "Killed",
        "137",
        "OOM",
        "shape[",
        "memory",
    ),
    *("\u202e", "é", "𝟘", "'", '"', "`"),
]
FIELDS = ("requested_bytes", "total_bytes", "free_bytes", "allocated_bytes", "reserved_bytes", "limit_bytes")
SEEDS = [row[1] for row in MESSAGES] + LOOKALIKES


def mutate(text: str, dice: random.Random) -> str:
    for _ in range(dice.randint(1, 6)):
        start = dice.randint(0, len(text))
        end = min(len(text), start + dice.choice((0, 1, 3, 12, 60)))
        move = dice.randrange(8)
        if move == 0:
            text = text[:start] + text[end:]
        elif move in (1, 2):
            text = text[:start] + dice.choice(JUNK) + text[end:]
        elif move == 3:
            text = text[:start] + text[start:end] * dice.randint(2, 40) + text[end:]
        elif move == 4:
            text = text[:start] + dice.choice(SEEDS)[: dice.randint(0, 200)] + text[end:]
        elif move == 5:
            width = dice.randint(5, 120)
            text = "\n".join(text[place : place + width] for place in range(0, len(text), width))
        elif move == 6:
            text = text[:start] + dice.choice(JUNK) * dice.choice((2, 2, 2, 5, 5, 50, 50, 2000, 8000)) + text[end:]
        else:
            prefix = dice.choice(JUNK)
            text = "\n".join(prefix + line for line in text.split("\n"))
        text = text[:30_000]
    return text


def check(text: str) -> tuple[float, str | None]:
    """(processor seconds, what is wrong with the answer or None). Processor time, for a busy machine is no hang."""
    began = time.process_time()
    try:
        diagnosis = explain_text(text)
    except Exception as error:
        return 0.0, f"raised {error!r}"
    seconds = time.process_time() - began
    return seconds, f"took {seconds * 1e3:.0f} ms" if seconds > HANG else find_absurd(diagnosis)


def find_absurd(diagnosis: Diagnosis) -> str | None:
    """A number no machine can have that the answer does not name as such."""
    failure = diagnosis.failure
    if failure is None:
        return None
    named = {*failure.extra.get("wrapped", ()), *failure.extra.get("impossible", ())}
    for name in FIELDS:
        value = getattr(failure, name)
        if value is not None and (value < 0 or (value > 2**57 and name not in named)):
            return f"{name} is {value} and nothing is said of it"
    return None


def main(count: int, seed: int) -> int:
    dice = random.Random(seed)
    findings: list[tuple[str, str]] = []
    began, slowest = time.time(), (0.0, "")
    for number in range(count):
        text = mutate(dice.choice(SEEDS), dice)
        spent, wrong = check(text)
        if spent > slowest[0]:
            slowest = (spent, text)
        if wrong is not None:
            findings.append((wrong, text))
        if number % 50_000 == 49_999:
            print(
                f"{number + 1:,} in {time.time() - began:.0f} s, {len(findings)} findings, slowest "
                f"{slowest[0] * 1e3:.1f} ms",
                flush=True,
            )
    print(
        f"{time.strftime('%Y-%m-%d')}: {count:,} mutated messages, seed {seed}: {len(findings)} findings, "
        f"slowest {slowest[0] * 1e3:.1f} ms, mean {(time.time() - began) / count * 1e3:.2f} ms"
    )
    print(f"  slowest: {slowest[1][:300]!r}")
    for wrong, text in findings[:10]:
        print(f"  {wrong}: {text[:300]!r}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000, int(sys.argv[2]) if len(sys.argv) > 2 else 1))
