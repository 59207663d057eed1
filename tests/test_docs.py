"""README and documentation say what the tool prints: every example is run and held against its page.

    ```console   `$ drumline ...` is run at 100 columns, and what it prints (stdout, then stderr) must stand below it;
                 a last line `...` means "and more". `$ cat > FILE <<'END'` makes a file, `$ cat FILE` prints one,
                 `$ echo $?` prints the last exit code.
    ```python    is executed, or run as a doctest where it has prompts.
    ```sh        is not run; every `make TARGET` in it must exist.
    ```py        is not run either, because it needs PyTorch and ranks; it must be Python.

The blocks of a page run in order, in one temporary folder and one namespace; the recorded traces of `docs/traces` are
there as `traces`, and the profiles of `docs/profiles` as `profiles`. After a wanted change of the output,
`python tests/test_docs.py --update` rewrites what commands and prompts show. Blocks that train need PyTorch: the quick
half leaves them out and runs the rest of their page.
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
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from drumline.cli.main import VERBS, main
from drumline.schedules import registry, schedules, unregister

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
KINDS = {"console", "python", "py", "sh", "text"}
BUILT_IN = frozenset(schedules())
NEEDS_TORCH = re.compile(
    r"import torch|\btorch\.|\bstash\(|\btrain\(|read_run\(|\bpipe\.|Pipeline\(|launch\("
    r"|drumline verify|verify\(|balance\(|\bfound\.|runs/first"
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


class Replay:
    """Runs the blocks of one page in the current folder."""

    def __init__(self, path: Path, *, torch: bool) -> None:
        self.path = path
        self.torch = torch
        self.namespace: dict[str, object] = {"__name__": "__docs__"}
        self.exit_code = 0

    def page(self) -> str:
        """Return the page's text with the outputs that its commands have now."""
        lines = self.path.read_text(encoding="utf-8").split("\n")
        replayed, done = [], 0
        for block in blocks(lines):
            replayed += lines[done : block.first]
            run = {"console": self.console, "python": self.python}.get(block.kind)
            replayed += run(block) if run and (self.torch or not block.needs_torch) else block.lines
            done = block.first + len(block.lines)
        return "\n".join(replayed + lines[done:])

    def console(self, block: Block) -> list[str]:
        shown: list[str] = []
        rest = list(block.lines)
        while rest:
            line = rest.pop(0)
            assert line.startswith("$ "), f"{self.path.name}: {line!r} stands before any command"
            shown.append(line)
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
            return Path(words[1]).read_text(encoding="utf-8").splitlines()
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
        return [text.rstrip() for text in (out.getvalue() + err.getvalue()).splitlines()]

    def python(self, block: Block) -> list[str]:
        source = "\n".join(block.lines) + "\n"
        if not any(line.startswith(">>> ") for line in block.lines):
            exec(compile("\n" * block.first + source, str(self.path), "exec"), self.namespace)
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
    surroundings = mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"})
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
    return pytest.param(path, marks=[pytest.mark.slow] * (len(COMPUTES.findall(path.read_text(encoding="utf-8"))) > 3))


def trains(path: Path) -> bool:
    return any(block.needs_torch for block in blocks(path.read_text(encoding="utf-8").split("\n")))


@pytest.mark.parametrize("path", [marked(path) for path in PAGES], ids=lambda path: path.name)
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


def missing(path: Path, *, pictures: bool) -> list[str]:
    """Return the links to files that are not there, to drawn pictures or to others."""
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    return [link for link in links if link.startswith("pictures/") == pictures and not (path.parent / link).exists()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(path: Path) -> None:
    assert missing(path, pictures=False) == []


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pictures_are_drawn_when_the_docs_are_built(path: Path) -> None:
    assert missing(path, pictures=True) == []


def test_a_drifted_output_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ drumline --version\ndrumline 0.0.0\n```\n", encoding="utf-8")
    assert replay(page) != page.read_text(encoding="utf-8")


def test_readme_opens_with_the_two_commands() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").split("\n")[:40])
    assert "make demo" in first_screen
    assert "make test" in first_screen


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_schedule_is_described(name: str) -> None:
    assert f"| `{name}` |" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"\n### {name}\n" in (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_and_flag_is_described(verb: str) -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert f"\n## drumline {verb}\n" in page
    parser = argparse.ArgumentParser(add_help=False)
    importlib.import_module(f"drumline.cli.{verb}").add_arguments(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert {flag for flag in flags if f"`{flag}" not in page} == set()


def update() -> None:
    """Rewrite every page's outputs in place."""
    for path in PAGES:
        before = path.read_text(encoding="utf-8")
        after = replay(path)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"rewrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Check that the documentation's examples still hold.")
    parser.add_argument("--update", action="store_true", required=True, help="rewrite the outputs in place")
    parser.parse_args()
    update()
