"""Errors that know which key of a config they are about, and where that key stands.

What is found while a model or data are built is raised without its place: only who read the config knows files and
lines. So an error carries its key, or begins with it, and is given its place in the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from drumline.core.errors import DrumlineError
from drumline.train.config.keys import keys
from drumline.train.config.problems import Problem
from drumline.train.config.tables import TableSource
from drumline.train.config.toml_lines import path_of

_KEY = re.compile(r"([a-z_]+)\.([a-z_]+)(?:\[(\d+)\]|\.(\d+))?")
_CUTS = "cuts "  # with which the pipeline begins what it says of pipeline.cuts


@contextmanager
def concerning(key: str) -> Iterator[None]:
    """Let errors that are raised inside know the key that they are about, unless they do already.

    >>> try:
    ...     with concerning("data.files"):
    ...         raise DrumlineError("a.txt, line 3: not UTF-8")
    ... except DrumlineError as error:
    ...     print(error.key)
    data.files
    """
    try:
        yield
    except DrumlineError as error:
        error.key = error.key or key_in(error.error) or key
        raise


def key_in(text: str) -> str:
    """Return the key that a text begins with; empty if it begins with none.

    >>> key_in("batch.sequence is 512, and so on"), key_in("optimizer.groups[1] has no names"), key_in("a.txt is empty")
    ('batch.sequence', 'optimizer.groups.1', '')
    """
    if text.startswith(_CUTS):
        return "pipeline.cuts"
    match = _KEY.match(text)
    if match is None or match[2] not in keys().get(match[1], {}):
        return ""
    number = match[3] or match[4]
    return f"{match[1]}.{match[2]}" + ("" if number is None else f".{number}")


def problem_of(error: DrumlineError, source: TableSource, key: str = "") -> Problem:
    """Return an error as a problem of the key that it is about, with its place: of a list, of the item it names.

    >>> source = TableSource({"data": {"files": ["a.txt", "b.txt"]}}, lambda path: f"run.toml, line {3 + len(path)}")
    >>> error = DrumlineError("b.txt, line 7: not UTF-8")
    >>> print(problem_of(error, source, "data.files"))
    run.toml, line 6: data.files: b.txt, line 7: not UTF-8
    """
    key = error.key or key_in(error.error) or key
    path = path_of(key)
    table, _, name = key.partition(".")
    values = source.tables.get(table, {})
    items = values.get(name) if isinstance(values, dict) else None
    if isinstance(items, list | tuple):
        named = [at for at, item in enumerate(items) if isinstance(item, str) and item and item in error.error]
        path = (*path, named[0]) if named else path
    if key.startswith("optimizer.groups."):
        path = (*path, "names")  # which decide what a group is for
    began = _KEY.match(error.error)
    text = error.error[began.end() :].lstrip(": ") if began and key_in(error.error) == key else error.error
    return Problem(source.where(path), key, text, error.expected, error.fix)


def placed(error: DrumlineError, source: TableSource) -> DrumlineError:
    """Return an error with the place of its key, if it has one that was given and does not say it yet."""
    key = error.key or key_in(error.error)
    parts = key.split(".")
    if not key or not source.has(".".join(parts[:2])):
        return error
    problem = problem_of(error, source)
    if not problem.where or error.error.startswith(problem.where):
        return error
    DrumlineError.__init__(error, problem.headline, expected=error.expected, fix=error.fix)
    return error
