"""Commands in README and docs: they run in a test, or a comment above their block says why not.

A block of commands in the language `sh` runs here, in a folder with stand-ins for a reader's files, unless a comment on
the line above it has a reason from `REASONS`: `<!-- not run: minutes -->`. What does not run is read all the same:
commands and flags must exist, and `drumline train` has to take its values. CONTRIBUTING.md lists these blocks;
`python tests/test_commands.py --update` rewrites the list. `console` blocks run in tests/test_docs.py.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from drumline.cli.main import VERBS, _check_flags, main, parser_of
from figures import PAGES, ROOT
from some import some
from test_docs import blocks

REASONS = {
    "minutes": "trains or computes for longer than a test should",
    "GPUs": "needs a GPU",
    "several hosts": "needs more hosts than one, or what starts ranks there",
    "the reader's files": "reads a model, data or a run of yours",
    "until stopped": "goes on until you stop it, or asks such a one",
    "installs": "installs packages, or builds an image",
}
ELSEWHERE = {"README.md"}  # tests/test_front_door.py runs its commands of ours
PROGRAMS = {"drumline", "source", "make", "pip", "python", "torchrun", "timeout", "podman", "kubectl", "sbatch"}
LIST = re.compile(r"(<!-- commands that do not run -->\n\n).*?(\n\n<!-- end of commands -->)", re.DOTALL)
LLAMA = (
    '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 4,'
    ' "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 300}'
)
CHAT = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
STAND_INS = {
    "notes.txt": "a line of text\n" * 1000,
    "notes.toml": "[run]\nsteps = 5\n",
    "chats.jsonl": CHAT * 50,
    "mine.py": "def build_model(): ...\ndef build_data(): ...\n",
    "settings.py": "def long_run():\n    return {'run': {'steps': 9000}}\n",
    "path/to/llama/config.json": LLAMA,
    "plan.toml": "[run]\nsteps = 5\n",
    "ours.toml": "[run]\nsteps = 5\n",
    "exported/config.json": LLAMA,
}


@dataclass(frozen=True)
class Commands:
    """A block of commands: its page, its first line, why it does not run, and the words of each command."""

    page: str
    line: int
    reason: str | None
    commands: tuple[tuple[str, ...], ...]


def words(lines: list[str]) -> Iterator[tuple[str, ...]]:
    r"""Yield the words of every command, comments left out.

    >>> list(words(["HEAD=node1", "drumline train \\", "  --steps 5   # a few", "make test"]))
    [('HEAD=node1',), ('drumline', 'train', '--steps', '5'), ('make', 'test')]
    """
    text = "\n".join(lines).replace("\\\n", " ")
    for line in text.split("\n"):
        if found := tuple(shlex.split(line, comments=True)):
            yield found


def sh_blocks(page: str, name: str) -> Iterator[Commands]:
    lines = page.split("\n")
    for block in blocks(lines):
        if block.kind == "sh":
            above = re.fullmatch(r"<!-- not run: (.*) -->", lines[block.first - 2])
            yield Commands(name, block.first, above[1] if above else None, tuple(words(block.lines)))


@cache
def every_block() -> tuple[Commands, ...]:
    return tuple(
        block
        for path in PAGES
        for block in sh_blocks(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    )


def verb_and_flags(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words behind `drumline`, wherever it stands in a command; none if it does not.

    >>> verb_and_flags(("torchrun", "--nproc-per-node", "2", "-m", "drumline", "train", "a.toml", ">", "out.txt"))
    ('train', 'a.toml')
    """
    starts = [at for at, word in enumerate(command[:-1]) if word == "drumline" and command[at + 1] in VERBS]
    behind = command[starts[0] + 1 :] if starts else ()
    end = next((at for at, word in enumerate(behind) if word in (">", "|", "&&", ";")), len(behind))
    return behind[:end]


def program(command: tuple[str, ...]) -> str:
    return next((word for word in command if not re.match(r"[A-Z_]+=", word)), "")


@contextlib.contextmanager
def stand_ins(folder: Path) -> Iterator[None]:
    for name, text in STAND_INS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    with contextlib.chdir(folder):
        yield


def told(argv: tuple[str, ...]) -> tuple[int, str, str]:
    """Run a command of ours in this process; return its exit code and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(argv))
    return code, out.getvalue(), err.getvalue()


def flags(text: str) -> list[str]:
    return re.findall(r"(?<!\S)--[\w-]+", text)


def unknown(code: str) -> list[str]:
    """Return what is wrong about a command in running text: its verb, its flags, its script, its extras.

    >>> unknown("drumline train --step 5"), unknown("drumline run"), unknown("python benchmarks/serve.py --no")
    (['--step'], ['run'], ['--no'])
    >>> unknown("pip install '.[tuning]'"), unknown("drumline train --steps=5 ..."), unknown("make")
    (['tuning'], [], [])
    """
    if match := re.search(r"\b((?:benchmarks|tests|scripts)/\S+\.py)\b(.*)", code):
        source = ROOT / match[1]
        text = source.read_text(encoding="utf-8") if source.exists() else ""
        text += (ROOT / "benchmarks" / "measure.py").read_text(encoding="utf-8")
        return [flag for flag in flags(match[2]) if f'"{flag}"' not in text] if source.exists() else [match[1]]
    if code.startswith("pip install"):
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "optional-dependencies"
        ]
        named = [name for inner in re.findall(r"\[([\w,]+)\]", code) for name in inner.split(",")]
        return [name for name in named if name not in extras]
    match = re.search(r"(?:^|\s)drumline ([a-z]+)(.*)", code, re.DOTALL)
    if match is None or code.startswith("import"):
        return []
    if match[1] not in VERBS:
        return [match[1]]
    known = parser_of(match[1])._option_string_actions
    return [flag for flag in flags(match[2]) if flag not in known]


def test_every_block_runs_or_says_why_not() -> None:
    reasons = {block.reason for block in every_block()} - {None}
    assert reasons <= REASONS.keys()
    assert REASONS.keys() <= reasons


@pytest.mark.parametrize("page", sorted({block.page for block in every_block()}))
def test_every_command_is_one_that_exists(page: str) -> None:
    for block in some([block for block in every_block() if block.page == page]):
        for command in some(block.commands):
            where = f"{page}:{block.line}: {shlex.join(command)}"
            assert program(command) in PROGRAMS | {""}, where
            assert [word for word in command if word.startswith("deploy/") and not (ROOT / word).exists()] == [], where
            assert unknown(shlex.join(command)) == [], where
            if argv := verb_and_flags(command):
                parser = parser_of(argv[0])
                _check_flags(parser, argv[1:])
                parser.parse_args(argv[1:])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_command_in_running_text_exists(path: Path) -> None:
    page = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    spans = [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", page)]
    assert {span: unknown(span) for span in spans if unknown(span)} == {}


def trainings() -> list[tuple[str, ...]]:
    found = [verb_and_flags(command) for block in every_block() for command in block.commands]
    return sorted({argv for argv in found if argv[:1] == ("train",)})


@pytest.mark.slow
def test_drumline_train_takes_every_value_that_pages_give_it(tmp_path: Path) -> None:
    with stand_ins(tmp_path):
        for argv in some(trainings()):
            argv = tuple(word.removeprefix("/runs/") for word in argv)
            code, printed, error = told((*argv, "--print-config"))
            assert (code, error) == (0, ""), argv
            assert "[run]" in printed


def test_blocks_without_a_reason_run(tmp_path: Path) -> None:
    with stand_ins(tmp_path):
        for block in some([block for block in every_block() if block.reason is None]):
            for command in some(block.commands):
                assert command[0] == "drumline", f"{block.page}:{block.line}: a comment above has to say why not"
                code, printed, error = told(verb_and_flags(command))
                assert (code, error) == (0, ""), f"{block.page}:{block.line}"
                if command[-2] == ">":
                    Path(command[-1]).write_text(printed, encoding="utf-8")


def listed() -> str:
    """Return the list of blocks that do not run, by reason and page."""
    by_reason: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for block in every_block():
        for command in block.commands if block.reason else ():
            argv = verb_and_flags(command)
            name = f"drumline {argv[0]}" if argv else " ".join([program(command), *command[1:2]])
            if argv and block.page in ELSEWHERE:
                continue
            if program(command) and name not in by_reason[block.reason or ""][block.page]:
                by_reason[block.reason or ""][block.page].append(name)
    rows = ["| reason | page | commands |", "|---|---|---|"]
    for reason, meaning in REASONS.items():
        for at, (page, names) in enumerate(by_reason[reason].items()):
            commands = ", ".join(f"`{name}`" for name in names)
            rows.append(f"| {f'{reason}: {meaning}' if not at else ''} | [{page}]({page}) | {commands} |")
    return "\n".join(rows)


def test_contributing_lists_what_does_not_run() -> None:
    found = LIST.search((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert found
    assert found[0] == f"{found[1]}{listed()}{found[2]}", "python tests/test_commands.py --update rewrites the list"


BROKEN = {
    "a flag that is none": "drumline train --step 5",
    "a command that is none": "drumline tarin",
    "a missing script": "python benchmarks/none.py",
    "a script's flag that is none": "python benchmarks/planner.py --nothing",
    "an extra that is none": 'pip install "drumline[tuning]"',
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_command_is_found(name: str) -> None:
    assert unknown(BROKEN[name]) != []


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Check the commands of README and docs that tests do not run.")
    parser.add_argument("--update", action="store_true", required=True, help="rewrite their list in CONTRIBUTING.md")
    parser.parse_args()
    path = ROOT / "CONTRIBUTING.md"
    path.write_text(
        LIST.sub(lambda found: f"{found[1]}{listed()}{found[2]}", path.read_text(encoding="utf-8")), encoding="utf-8"
    )
