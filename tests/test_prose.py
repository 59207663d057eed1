"""No sentence that a user reads is longer than 30 words: pages, help, errors, docstrings and comments.

`sentences.py` says what a sentence is, how lists count, and what is left out.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drumline.cli.main import VERBS
from sentences import comments, docstrings, longer, page, sentences, texts, words
from some import some

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MOST_WORDS = 30


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_sentences_of_a_page_are_short(path: Path) -> None:
    paragraphs = list(page(path.read_text(encoding="utf-8")))
    assert paragraphs
    assert longer(paragraphs, MOST_WORDS) == []


def long_comments(source: str) -> Iterator[tuple[int, str]]:
    return comments(source, above=MOST_WORDS)


@pytest.mark.parametrize("kind", [docstrings, long_comments, texts], ids=lambda kind: kind.__name__)
def test_sentences_of_the_source_are_short(kind: Callable[[str], Iterator[tuple[int, str]]]) -> None:
    long = {
        path.relative_to(ROOT).as_posix(): found
        for path in some(SOURCES)
        if (found := longer(kind(path.read_text(encoding="utf-8")), MOST_WORDS))
    }
    assert long == {}


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_sentences_of_help_are_short(verb: str) -> None:
    """Also where a text is put together from several."""
    parser = argparse.ArgumentParser(add_help=False)
    importlib.import_module(f"drumline.cli.{verb}").add_arguments(parser)
    told = [(0, text) for action in parser._actions if (text := action.help)]
    assert longer(told, MOST_WORDS) == []


def long_sentence(count: int) -> str:
    return " ".join(["word"] * count) + "."


def test_a_long_sentence_is_found_wherever_it_is() -> None:
    long = long_sentence(31)
    for text in (long, f"- {long}", f"> {long}", f"# {long}", f"Short. {long} Short.", f"| a | {long} |", f"1. {long}"):
        assert len(longer(page(text), MOST_WORDS)) == 1, text
    quoted = f'"""{long}"""\n\n\ndef f():\n    """{long}"""\n    return x("{long}")  # {long}\n'
    assert [len(longer(kind(quoted), MOST_WORDS)) for kind in (docstrings, comments, texts)] == [2, 1, 1]


def test_thirty_words_are_not_too_many() -> None:
    text = long_sentence(30)
    assert longer(page(f"{text}\n{text} {text}\n\n- {text}\n- {text}"), MOST_WORDS) == []


def test_a_sentence_goes_on_over_lines_and_ends_at_an_empty_one() -> None:
    half = long_sentence(16)[:-1]
    assert len(longer(page(f"{half}\n{half}."), MOST_WORDS)) == 1
    assert longer(page(f"{half}\n\n{half}."), MOST_WORDS) == []


def test_each_cell_of_a_table_counts_on_its_own() -> None:
    half = long_sentence(16)[:-1]
    assert longer(page(f"| {half} | {half} |"), MOST_WORDS) == []
    assert [text for _, text in page("| `a | b` | c \\| d |")] == ["`a | b`", "c | d"]


def test_code_is_left_out() -> None:
    long = long_sentence(31)
    assert longer(page(f"```text\n{long}\n```\n"), MOST_WORDS) == []
    assert words(f"Run `{long}` twice.") == 3
    assert longer(docstrings(f'"""Short.\n\n    {long}\n\n>>> {long}\n{long}\n"""'), MOST_WORDS) == []
    assert len(longer(docstrings(f'"""Short.\n\n    code\n\n{long}"""'), MOST_WORDS)) == 1


def test_a_list_in_a_sentence_counts_by_its_items() -> None:
    """Two semicolons make a list; one does not, and a long item stays long."""
    ten = long_sentence(11)[:-1]
    assert words(f"{ten}; {ten}; {ten}.") == 11
    assert words(f"{ten}; {ten}.") == 22
    assert words(f"{ten}; {long_sentence(31)[:-1]}; {ten}.") == 31


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two.", 2),
        ("It takes 0.5 s. Then it ends.", 2),
        ("Call `a. b`. Then end.", 2),
        ("Is it done? Yes! **It is.** Good.", 4),
        ("See e.g. the docs.", 1),
        ("It is in [a page. Really](docs/index.md).", 2),
        ("Versions 2.11 and file.py stay whole", 1),
    ],
)
def test_where_sentences_end(text: str, count: int) -> None:
    assert len(sentences(text)) == count


def test_texts_join_what_the_parser_joins() -> None:
    half = long_sentence(16)[:-1]
    assert len(longer(texts(f'f(\n    "{half} "\n    "{half}"\n)'), MOST_WORDS)) == 1
    assert len(longer(texts(f'f(\n    f"{half} {{x}} "\n    "{half}"\n)'), MOST_WORDS)) == 1
