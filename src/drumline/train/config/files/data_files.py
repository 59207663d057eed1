"""The files that a config names: found, not empty, and read as text with the line where that fails."""

from __future__ import annotations

import codecs
import glob
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from drumline.core.errors import UsageError
from drumline.core.files import is_regular, unreadable
from drumline.train.config.problems import Problem

_CHUNK = 1 << 22
_BOM = b"\xef\xbb\xbf"


def existing_files(names: Sequence[str], *, key: str = "data.files") -> list[Path]:
    """Return the files of these names or patterns, each of which must be there and hold something.

    >>> existing_files(["nowhere.txt"])
    Traceback (most recent call last):
    drumline.core.errors.UsageError: data.files: nowhere.txt: no such file; expected a file to read
    """
    files = [path for name in names for path in matched(name)]
    for wrong in filter(None, (wrong_file(path, key) for path in files)):
        raise UsageError(wrong.headline, expected=wrong.expected, fix=wrong.fix)
    return files


def wrong_file(path: Path, key: str) -> Problem | None:
    """Return why a file that a key names cannot be trained on; None if it can."""
    if os.path.isdir(path):
        fix = f'name what is in it: "{path}/*"'
        return Problem("", key, f"{path}: is no file but a folder", "a file to read", fix)
    if why := unreadable(path):
        return Problem("", key, f"{path}: {why}", "a file to read")
    return None if os.path.getsize(path) else Problem("", key, f"{path}: is empty", "something to train on")


def matched(name: str) -> list[Path]:
    """Return the files that a name or pattern means; what matches nothing means itself.

    >>> matched("no*where.txt")
    [PosixPath('no*where.txt')]
    """
    if not os.path.lexists(name):
        try:
            several = sorted(glob.glob(name, recursive=True))
        except (OSError, ValueError):
            several = []
        if several:
            return [Path(text) for text in several]
    return [Path(name)]


def check_utf8(path: Path, *, most: int | None = None) -> int:
    """Refuse a file that is not UTF-8, naming the line; return how many bytes before the text to skip.

    With `most`, only so many bytes are looked at.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines, start = 1, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK if most is None else min(_CHUNK, max(most - file.tell(), 0))):
            start = len(_BOM) if file.tell() == len(chunk) and chunk.startswith(_BOM) else start
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError as error:
                raise _not_text(path, lines + bytes(error.object[: error.start]).count(b"\n")) from None
            lines += chunk.count(b"\n")
    if most is None and decoder.getstate()[0]:
        raise _not_text(path, lines)
    return start


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of every line that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise _not_text(path, number) from None
            if text.strip():
                yield number, text


def records_of(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and contents of every line of a JSONL file: one object a line."""
    empty = True
    for number, line in lines_of(path):
        empty = False
        place = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
            raise UsageError(f"{place}: not JSON ({reason})", expected="one object a line") from None
        if not isinstance(record, dict):
            raise UsageError(f"{place}: a {type(record).__name__}", expected="an object: {...}")
        yield place, record
    if empty:
        raise UsageError(f"{path} has only blank lines", expected="one object a line")


def hold_chats(names: Sequence[str]) -> bool:
    """Whether all of these are files of chats: JSONL whose first line has messages, or a prompt and its response.

    >>> hold_chats(["nowhere.jsonl"])
    False
    """
    files = [path for name in names for path in matched(name)]
    return bool(files) and all(_holds_chats(path) for path in files)


def _holds_chats(path: Path) -> bool:
    if path.suffix not in (".jsonl", ".ndjson") or not is_regular(path):
        return False
    try:
        _, record = next(records_of(path))
    except (UsageError, OSError, StopIteration):
        return False  # whoever reads it says what is wrong
    return "text" not in record and ("messages" in record or {"prompt", "response"} <= record.keys())


def _not_text(path: Path, line: int) -> UsageError:
    return UsageError(
        f"{path}, line {line}: not UTF-8",
        expected="text in UTF-8",
        fix='convert the file, or pass token numbers: data.kind = "tokens"',
    )
