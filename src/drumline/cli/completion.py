"""`drumline completion SHELL`: a script that completes commands, flags, and their values.

The script is generated from the parsers of all commands and contains every word, so that completion does not start
Python. If it knows no word, the shell completes file names.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

EXAMPLE = "drumline completion bash > ~/.drumline-completion.bash"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "shell",
        metavar="SHELL",
        choices=tuple(_SCRIPTS),
        help='bash, zsh or fish. Put `eval "$(drumline completion bash)"` in the start-up file of your shell, the '
        "same with zsh, or `drumline completion fish | source`",
    )


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    print(_SCRIPTS[args.shell](list(_verbs())))
    return 0


class _Verb:
    """A command with its summary, its flags as argparse knows them, and the words it takes without a flag."""

    def __init__(self, name: str, summary: str, parser: argparse.ArgumentParser, known: dict[str, list[str]]) -> None:
        self.name, self.summary, self._known = name, summary, known
        self.flags = [action for action in parser._actions if action.option_strings]
        self.words = [word for action in parser._actions if action not in self.flags for word in self.words_of(action)]

    def words_of(self, action: argparse.Action) -> list[str]:
        """Return the words that an argument may be."""
        return self._known.get(action.dest, [str(choice) for choice in action.choices or ()])


def _verbs() -> Iterator[_Verb]:
    from drumline.cli.main import VERBS, parser_of
    from drumline.plan.cluster.hardware import MACHINES
    from drumline.plan.cluster.models import MODELS
    from drumline.schedules import schedules

    known = {"schedule": list(schedules()), "subject": list(MODELS), "hardware": list(MACHINES)}
    for name, summary in VERBS.items():
        yield _Verb(name, summary, parser_of(name), known)


def _cases(verbs: list[_Verb]) -> Iterator[tuple[str, str]]:
    """Yield patterns of `COMMAND PREVIOUS-WORD` with the words to offer, flags that take a value first."""
    for verb in verbs:
        for flag in verb.flags:
            if flag.nargs != 0:
                yield "|".join(f'"{verb.name} {name}"' for name in flag.option_strings), " ".join(verb.words_of(flag))
    for verb in verbs:
        flags = [name for flag in verb.flags for name in flag.option_strings]
        yield f'"{verb.name} "*', " ".join([*verb.words, *flags])


def _bash(verbs: list[_Verb]) -> str:
    cases = "\n".join(f'        {pattern}) words="{words}" ;;' for pattern, words in _cases(verbs))
    return f"""_drumline() {{
    local words="" current="${{COMP_WORDS[COMP_CWORD]}}"
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{" ".join(verb.name for verb in verbs)} --help --version"
    else
        case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD-1]}}" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _drumline drumline"""


def _zsh(verbs: list[_Verb]) -> str:
    cases = "\n".join(f"        {pattern}) known=({words}) ;;" for pattern, words in _cases(verbs))
    return f"""#compdef drumline
_drumline() {{
    local -a known
    if (( CURRENT == 2 )); then
        known=({" ".join(verb.name for verb in verbs)} --help --version)
    else
        case "${{words[2]}} ${{words[CURRENT-1]}}" in
{cases}
        esac
    fi
    compadd -- $known || _files
}}
compdef _drumline drumline"""


def _fish(verbs: list[_Verb]) -> str:
    lines = [
        f"complete -c drumline -f -n __fish_use_subcommand -a {verb.name} -d {_quoted(verb.summary)}" for verb in verbs
    ]
    for verb in verbs:
        begin = f"complete -c drumline -n '__fish_seen_subcommand_from {verb.name}'"
        if verb.words:
            lines.append(f"{begin} -a {_quoted(' '.join(verb.words))}")
        for flag in verb.flags:
            options = flag.option_strings
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in options)
            words = verb.words_of(flag)
            takes = f" -x -a {_quoted(' '.join(words))}" if words else " -r" if flag.nargs != 0 else ""
            meaning = (flag.help or "").partition(". ")[0]
            lines.append(f"{begin} {names}{takes} -d {_quoted(meaning)}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


_SCRIPTS: dict[str, Callable[[list[_Verb]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
