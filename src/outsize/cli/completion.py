"""`outsize completion bash`: lines that teach a shell the verbs, their options and the names of cards.

The lines are made from the parsers themselves, so that they never miss an option. They call nothing when a key is pressed.
"""

from __future__ import annotations

import argparse
import sys

from outsize import report

_SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SHELLS, help="which shell")


def run(args: argparse.Namespace) -> int:
    options = find_options()
    if args.json:
        report.show(options, as_json=True)
    else:
        sys.stdout.write({"bash": write_bash, "zsh": write_zsh, "fish": write_fish}[args.shell](options))
    return 0


def find_options() -> dict[str, dict[str, str]]:
    """Verb -> its options with their help."""
    from outsize.cli import VERBS, build_parser

    found: dict[str, dict[str, str]] = {}
    for verb in VERBS:
        for action in build_parser(verb)._actions:
            if isinstance(action, argparse._SubParsersAction):
                inner = action.choices[verb]._actions
                found[verb] = {
                    option: (each.help or "").replace("%%", "%") for each in inner for option in each.option_strings
                }
    return found


def write_bash(options: dict[str, dict[str, str]]) -> str:
    """A function for bash's `complete`."""
    cases = "\n".join(f'        {verb}) words="{" ".join(names)}" ;;' for verb, names in options.items())
    return f"""_outsize() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words="" cards="{" ".join(_card_names())}"
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{" ".join(options)} --help --version" -- "$word"))
        return
    fi
    if [ "${{COMP_WORDS[COMP_CWORD-1]}}" = "--card" ]; then
        COMPREPLY=($(compgen -W "$cards" -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    case "$word" in
        -*) COMPREPLY=($(compgen -W "$words" -- "$word")) ;;
        *) COMPREPLY=($(compgen -f -- "$word")) ;;
    esac
}}
complete -o filenames -F _outsize outsize
"""


def write_zsh(options: dict[str, dict[str, str]]) -> str:
    """A function for zsh's `compdef`."""
    from outsize.cli import VERBS

    verbs = "\n".join(f"        '{verb}:{_quiet(line)}'" for verb, line in VERBS.items())
    cases = "\n".join(f"        {verb}) known=({' '.join(names)}) ;;" for verb, names in options.items())
    return f"""_outsize() {{
    local -a verbs known cards
    verbs=(
{verbs}
    )
    cards=({" ".join(_card_names())})
    if (( CURRENT == 2 )); then
        _describe 'verb' verbs
        return
    fi
    if [[ "${{words[CURRENT-1]}}" == "--card" ]]; then
        compadd -a cards
        return
    fi
    case "${{words[2]}}" in
{cases}
    esac
    if [[ "$PREFIX" == -* ]]; then compadd -a known; else _files; fi
}}
compdef _outsize outsize
"""


def write_fish(options: dict[str, dict[str, str]]) -> str:
    """Lines for fish's `complete`."""
    from outsize.cli import VERBS

    lines = [f"complete -c outsize -n __fish_use_subcommand -a {verb} -d '{_quiet(VERBS[verb])}'" for verb in options]
    for verb, names in options.items():
        for name, line in names.items():
            kind = f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
            more = f" -x -a '{' '.join(_card_names())}'" if name == "--card" else ""
            lines.append(
                f"complete -c outsize -n '__fish_seen_subcommand_from {verb}' {kind}{more} -d '{_quiet(line)}'"
            )
    return "\n".join(lines) + "\n"


def _card_names() -> list[str]:
    """Cards as they are typed: without spaces."""
    from outsize.core.cards import CARDS

    return [card.name.lower().replace(" ", "") for card in CARDS]


def _quiet(line: str) -> str:
    return line.replace("'", "").replace(":", ",").replace("\\", "")
