"""How long the sentences of a page are: prose only, without code, tables, headings and drawings.

    python tests/readability.py docs/*.md      figures for each page, the longest sentence of each

A word is what stands between spaces; code between backticks is one word, however long. A list item is a sentence of its own.
"""

import pathlib
import re
import sys

LONGEST = 25
"""Words that a sentence of a user's page may have."""


def sentences(text: str) -> list[str]:
    """The sentences of a Markdown page."""
    text = re.sub(r"^( *)```.*?^\1```\s*?$", "\n\n", text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->|<svg.*?</svg>", "", text, flags=re.S)
    text = re.sub(r"^\s*(\||#|!!!|\?\?\?|:::|<|!\[|---|===).*$", "", text, flags=re.M)
    text = re.sub(r"^    ", "", text, flags=re.M)
    found = []
    for block in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", text, flags=re.M):
        line = re.sub(r"\s+", " ", block).strip()
        line = re.sub(r"`[^`]*`", "code", line)
        line = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line)
        line = re.sub(r"\b(e\.g|i\.e|vs|approx)\.", r"\1", line)
        found += [
            part.strip() for part in re.split(r"(?<=[.!?:;])[)\"*]*\s+(?=[A-Z\"(*`]|code)|;\s", line) if part.strip()
        ]
    return found


def words(sentence: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def main(names):
    total = long = 0
    for name in names:
        counted = sorted((words(one), one) for one in sentences(pathlib.Path(name).read_text()))
        over = [one for one in counted if one[0] > LONGEST]
        mean = sum(number for number, _ in counted) / max(1, len(counted))
        total, long = total + len(counted), long + len(over)
        print(f"{name}: {len(counted)} sentences, {mean:.1f} words on average, {len(over)} above {LONGEST}")
        for number, sentence in over[-3:]:
            print(f"   {number}: {sentence[:160]}")
    print(f"all: {total} sentences, {long} above {LONGEST}")


if __name__ == "__main__":
    main(sys.argv[1:])
