"""README and documentation say what the tool prints: every example is run and held against its page.

    ```console   `$ drumline ...` is run at 90 columns, and the page must show what it prints (stdout, then stderr).
                 Longer lines are folded, as a terminal folds them. A command may go on after a backslash.
                 A last line `...` means "and more". `$ cat > FILE <<'END'` makes a file, `$ cat FILE` prints one,
                 `$ echo $?` prints the last exit code.
    ```python    is executed, or run as a doctest where it has prompts.
    ```output    is what the `python` block before it printed.
    ```sh        is not run; every `make TARGET` in it must exist.
    ```py        is not run either, because it needs PyTorch and ranks; it must be Python.

The blocks of a page run in order, in one temporary folder and one namespace; the recorded traces of `docs/traces` are
there as `traces`, and the profiles of `docs/profiles` as `profiles`. After a wanted change of the output,
`python tests/test_docs.py --update [PAGE ...]` rewrites what commands and prompts show. Blocks that train need PyTorch:
the quick half leaves them out and runs the rest of their page.
"""

from __future__ import annotations

import argparse
import contextlib
import doctest
import importlib
import io
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import drumline
from drumline.cli.main import VERBS, main
from drumline.schedules import registry, schedules, unregister
from matrices import FEW
from some import some

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
KINDS = {"console", "python", "output", "py", "sh", "text"}
COLUMNS = 90
BUILT_IN = frozenset(schedules())
NEEDS_TORCH = re.compile(
    r"import torch|\btorch\.|\bstash\(|\btrain\(|read_run\(|\bpipe\.|Pipeline\(|launch\("
    r"|drumline\.train\b|\bbuilt\.|batch\.inputs|drumline verify|verify\(|balance\(|\bfound\.|runs/first"
    r"|drumline (?:export|serve|load)"
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its kind, the number of its first line (counted from 0), and its lines."""

    kind: str
    first: int
    lines: list[str]

    @property
    def needs_torch(self) -> bool:
        return self.kind in ("console", "python") and bool(NEEDS_TORCH.search("\n".join(self.lines)))


def blocks(lines: list[str]) -> Iterator[Block]:
    """Yield every fenced block.

    >>> list(blocks(["text", "```sh", "make test", "```"]))
    [Block(kind='sh', first=2, lines=['make test'])]
    """
    opened: int | None = None
    for at, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = at
        else:
            yield Block(lines[opened][3:].strip(), opened + 1, lines[opened + 1 : at])
            opened = None
    assert opened is None, f"the block that line {opened} opens is never closed"


def folded(line: str) -> list[str]:
    """Return what a command printed as lines that fit the page: folded behind spaces and commas, and set in.

    >>> folded("short"), folded("")
    (['short'], [''])
    >>> folded("word " * 20)
    ['word word word word word word word word word word word word word word word word word word', '    word word']
    >>> [len(part) for part in folded("0SEND_F0," * 20)]
    [90, 85, 13]
    """
    parts = []
    while len(line) > COLUMNS:
        at = max(line.rfind(" ", 5, COLUMNS + 1), line.rfind(",", 5, COLUMNS) + 1)
        if at <= 5:
            break
        parts.append(line[:at].rstrip())
        line = "    " + line[at:].strip()
    return [*parts, line.rstrip()]


class Replay:
    """Runs the blocks of one page in the current folder."""

    def __init__(self, path: Path, *, torch: bool) -> None:
        self.path = path
        self.torch = torch
        self.namespace: dict[str, object] = {"__name__": "__docs__"}
        self.exit_code = 0
        self.printed: list[str] | None = None

    def page(self) -> str:
        """Return the page's text with the outputs that its commands have now."""
        lines = self.path.read_text(encoding="utf-8").split("\n")
        replayed, done = [], 0
        for block in blocks(lines):
            replayed += lines[done : block.first]
            run = {"console": self.console, "python": self.python, "output": self.output}.get(block.kind)
            if run and (self.torch or not block.needs_torch):
                replayed += run(block)
            else:
                replayed += block.lines
                self.printed = None
            done = block.first + len(block.lines)
        return "\n".join(replayed + lines[done:])

    def console(self, block: Block) -> list[str]:
        shown: list[str] = []
        rest = list(block.lines)
        while rest:
            line = rest.pop(0)
            assert line.startswith("$ "), f"{self.path.name}: {line!r} stands before any command"
            shown.append(line)
            while line.endswith("\\"):
                shown.append(rest.pop(0))
                line = line[:-1] + shown[-1].strip()
            if match := re.fullmatch(r"\$ cat > (\S+) <<'END'", line):
                end = rest.index("END")
                Path(match[1]).write_text("".join(text + "\n" for text in rest[:end]), encoding="utf-8")
                shown += rest[: end + 1]
                rest = rest[end + 1 :]
                continue
            expected = []
            while rest and not rest[0].startswith("$ "):
                expected.append(rest.pop(0))
            printed = self.command(line[2:])
            if expected and expected[-1] == "..." and len(printed) >= len(expected):
                printed = [*printed[: len(expected) - 1], "..."]
            shown += printed
        return shown

    def command(self, line: str) -> list[str]:
        if line == "echo $?":
            return [str(self.exit_code)]
        words = shlex.split(line)
        if words[0] == "cat" and len(words) == 2:
            text = Path(words[1]).read_text(encoding="utf-8")
            return [part for word in text.splitlines() for part in folded(word)]
        assert words[0] == "drumline", f"{self.path.name}: cannot run {line!r}"
        out, err = io.StringIO(), io.StringIO()
        # What a python block has registered is unknown to a command of its own process.
        with (
            mock.patch.dict(registry._REGISTRY),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            for name in set(registry._REGISTRY) - BUILT_IN:
                unregister(name)
            self.exit_code = main(words[1:])
        printed = [text.rstrip() for text in (out.getvalue() + err.getvalue()).splitlines()]
        return [part for text in printed for part in folded(text)]

    def python(self, block: Block) -> list[str]:
        source = "\n".join(block.lines) + "\n"
        if not any(line.startswith(">>> ") for line in block.lines):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("\n" * block.first + source, str(self.path), "exec"), self.namespace)
            self.printed = out.getvalue().splitlines()
            return block.lines
        test = doctest.DocTestParser().get_doctest(
            source, self.namespace, self.path.name, str(self.path), lineno=block.first
        )
        runner = Prompts()
        runner.run(test, clear_globs=False)
        self.namespace.update(test.globs)
        shown = list(block.lines)
        for example, got in reversed(runner.drifted):
            at = example.lineno + example.source.count("\n")
            shown[at : at + example.want.count("\n")] = [line or "<BLANKLINE>" for line in got.splitlines()]
        return shown

    def output(self, block: Block) -> list[str]:
        """Return what the block before printed; as the page has it where that block was left out."""
        return block.lines if self.printed is None else self.printed


class Prompts(doctest.DocTestRunner):
    """Runs examples with prompts and collects those that print something else than their page shows."""

    def __init__(self) -> None:
        super().__init__(verbose=False, optionflags=doctest.ELLIPSIS)
        self.drifted: list[tuple[doctest.Example, str]] = []

    def report_failure(self, out: object, test: doctest.DocTest, example: doctest.Example, got: str) -> None:
        assert example.exc_msg is None, f"{test.name}: {example.source}raises\n{got}"
        self.drifted.append((example, got))

    def report_unexpected_exception(
        self, out: object, test: doctest.DocTest, example: doctest.Example, exc_info: Any
    ) -> None:
        raise AssertionError(f"{test.name}: {example.source}raises {exc_info[1]!r}")


def replay(path: Path, *, torch: bool = True) -> str:
    """Return the page as it ought to be, its examples run in a folder of their own; without torch, those without it."""
    surroundings = mock.patch.dict(os.environ, {"COLUMNS": str(COLUMNS), "NO_COLOR": "1"})
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), surroundings:
        for name in ("traces", "profiles"):
            Path(name).symlink_to(ROOT / "docs" / name)
        mine = set(schedules())
        try:
            return Replay(path, torch=torch).page()
        finally:
            for name in set(schedules()) - mine:
                unregister(name)


# Commands that compute for a while; pages full of them wait for `make test`.
COMPUTES = re.compile(r"^\$ drumline (?:search|plan|compare) ", re.MULTILINE)


def marked(path: Path) -> Any:
    is_long = path.name == "published.md" or len(COMPUTES.findall(path.read_text(encoding="utf-8"))) > 2
    return pytest.param(path, marks=[pytest.mark.slow] * is_long)


def trains(path: Path) -> bool:
    return any(block.needs_torch for block in blocks(path.read_text(encoding="utf-8").split("\n")))


# A page that trains is replayed as a whole where torch is there; the quick half runs what does without.
WITHOUT_TORCH = [path for path in PAGES if FEW or not (find_spec("torch") and trains(path))]


@pytest.mark.parametrize("path", [marked(path) for path in WITHOUT_TORCH], ids=lambda path: path.name)
def test_examples_print_what_their_page_shows(path: Path) -> None:
    shown = path.read_text(encoding="utf-8").split("\n")
    assert replay(path, torch=False).split("\n") == shown, "python tests/test_docs.py --update rewrites the outputs"


@pytest.mark.torch
@pytest.mark.parametrize("path", [path for path in PAGES if trains(path)], ids=lambda path: path.name)
def test_examples_that_train_print_what_their_page_shows(path: Path) -> None:
    shown = path.read_text(encoding="utf-8").split("\n")
    assert replay(path).split("\n") == shown, "python tests/test_docs.py --update rewrites the outputs"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_block_says_what_it_is(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").split("\n")
    assert [line for line in lines if re.match(r"\s+```", line)] == [], "an indented block would not be run"
    kinds = {block.kind for block in blocks(lines)}
    assert {kind for kind in kinds if not kind.startswith("{")} <= KINDS


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_make_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = path.read_text(encoding="utf-8")
    shell = "\n".join(line for block in blocks(text.split("\n")) if block.kind == "sh" for line in block.lines)
    named = re.findall(r"^make ([a-z]+)", shell, re.MULTILINE) + re.findall(r"`make ([a-z]+)`", text)
    assert set(named) <= targets


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_python_that_is_not_run_is_python(path: Path) -> None:
    for block in blocks(path.read_text(encoding="utf-8").split("\n")):
        if block.kind == "py":
            compile("\n".join(block.lines), str(path), "exec")


def missing(path: Path) -> list[str]:
    """Return the links to files that are not there, but for pictures that `make docs` draws and then asks for."""
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    return [link for link in links if not link.startswith("pictures/") and not (path.parent / link).exists()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(path: Path) -> None:
    assert missing(path) == []


def anchors(path: Path) -> set[str]:
    """Return what a link to one of the page's headings may name, as GitHub and MyST spell it."""
    lines, inside = path.read_text(encoding="utf-8").split("\n"), False
    found = set()
    for line in lines:
        inside ^= line.startswith("```")
        if not inside and (heading := re.match(r"#+ (.*)", line)):
            found.add(re.sub(r"[^\w\- ]", "", heading[1].lower()).replace(" ", "-"))
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_to_headings_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]*)#([^)]+)\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if link[1] not in anchors(path.parent / link[0] if link[0] else path)] == []


def test_a_drifted_output_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ drumline --version\ndrumline 0.0.0\n```\n", encoding="utf-8")
    assert replay(page) != page.read_text(encoding="utf-8")


def prose(lines: list[str]) -> Iterator[str]:
    """Yield the paragraphs and list items outside of blocks, headings, pictures and tables.

    >>> list(prose(["# Title", "One", "two.", "", "- three", "- four", "```sh", "make", "```", "| a | b |"]))
    ['One two.', '- three', '- four']
    """
    inside, paragraph = False, ""
    for line in [*lines, ""]:
        fence = line.startswith("```")
        inside ^= fence
        ends = inside or fence or not line or line.startswith(("#", "|", "!", "<", "- "))
        if ends and paragraph:
            yield paragraph
            paragraph = ""
        if not inside and not fence and line and not line.startswith(("#", "|", "!", "<")):
            paragraph = f"{paragraph} {line.strip()}".strip()


def sentences(paragraph: str) -> list[str]:
    """Split a paragraph; a link counts by its text, code and numbers do not end a sentence.

    >>> sentences("See [the docs](docs/index.md). Run `a.b` in 0.5 s: done!")
    ['See the docs.', 'Run `a.b` in 0.5 s: done!']
    """
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    return [name for name in re.split(r"(?<=[.?!])\s+", text) if name]


def test_the_first_page_shows_1f1b_before_zb_v_and_explains_letters_before_use() -> None:
    text = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    assert text.index("1f1b.svg") < text.index("zb-v.svg")
    # The letters F, B, I and W are explained before the first picture of a split backward.
    assert all(text.index(f"**{letter}**") < text.index("zb-v.svg") for letter in "FBIW")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_blocks_fit_the_page(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").split("\n")
    wide = [
        f"{path.name}:{block.first + at + 1} has {len(line)} columns"
        for block in blocks(lines)
        for at, line in enumerate(block.lines)
        if len(line) > COLUMNS
    ]
    assert wide == []


# Pages that Sphinx makes itself; a page of ours with the same name would be overwritten.
MADE_BY_SPHINX = {"genindex", "modindex", "py-modindex", "search", "searchindex", "objects", "_static", "_sources"}


def test_no_page_is_overwritten_by_the_builder() -> None:
    names = {path.stem.lower() for path in PAGES}
    assert names & MADE_BY_SPHINX == set()
    assert {name for name in names if name.startswith("_")} == set()


DOORS = ["learn", "training", "coming", "planning", "reference"]


def contents(page: str) -> list[str]:
    """Return the pages that a page's tables of contents name."""
    lines = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").split("\n")
    trees = [block for block in blocks(lines) if block.kind == "{toctree}"]
    return [line for block in trees for line in block.lines if line and not line.startswith(":")]


def rows(page: str) -> list[list[str]]:
    """Return the pages that each row of a page's tables links to, row by row."""
    lines = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").split("\n")
    return [found for line in lines if line.startswith("| ") and (found := re.findall(r"\]\(([\w-]+)\.md\)", line))]


def test_the_index_has_five_doors() -> None:
    assert contents("index") == DOORS
    assert [row[0] for row in rows("index")] == DOORS


def test_every_page_is_behind_one_door() -> None:
    listed = [page for door in DOORS for page in contents(door)]
    pages = [path.stem for path in PAGES if path.name not in ("README.md", "index.md")]
    assert sorted(listed + DOORS) == sorted(pages)


@pytest.mark.parametrize("door", DOORS)
def test_a_door_says_what_each_page_behind_it_is_for(door: str) -> None:
    """One row for each page, in the order of the contents."""
    assert rows(door) == [[page] for page in some(contents(door))]


def test_the_api_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    targets = re.findall(r"^\.\. auto\w+:: drumline\.([\w.]+)$", page, re.MULTILINE)
    assert sorted(target.rpartition(".")[2] for target in targets) == sorted(dir(drumline))
    for target in targets:  # `plan` is a package that can be called; its page needs the function itself
        module, _, name = target.rpartition(".")
        assert not module or hasattr(importlib.import_module(f"drumline.{module}"), name)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_schedule_is_described(name: str) -> None:
    gallery = [path for path in PAGES if path.stem.startswith("schedules")]
    described = [path for path in gallery if f"\n## {name}\n" in path.read_text(encoding="utf-8")]
    assert len(described) == 1
    assert f"| [`{name}`]({described[0].name}#{name}) |" in (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_and_flag_is_described(verb: str) -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert f"\n## drumline {verb}\n" in page
    parser = argparse.ArgumentParser(add_help=False)
    importlib.import_module(f"drumline.cli.{verb}").add_arguments(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert {flag for flag in flags if f"`{flag}" not in page} == set()


def test_no_page_shows_what_a_search_finds_in_some_seconds() -> None:
    """A faster machine would find something else."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in PAGES).replace("\\\n", " ")
    for command in some(re.findall(r"^\$ drumline (search .*)$", text, re.MULTILINE)):
        words = set(shlex.split(command))
        assert "--tries" in words, command
        assert "--seconds" not in words, command


def update(names: list[str]) -> None:
    """Rewrite the outputs of these pages in place, of all without a name."""
    for path in (path for path in PAGES if not names or path.name in names):
        before = path.read_text(encoding="utf-8")
        after = replay(path)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"rewrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Check that the documentation's examples still hold.")
    parser.add_argument("--update", action="store_true", required=True, help="rewrite the outputs in place")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="only these, such as README.md (default: all)")
    update(parser.parse_args().pages)
