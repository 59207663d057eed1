"""The reader for every file that a user passes in. It is strict, and bounded in time and memory.

    opened      a regular file, to read piece by piece; rejects a pipe or device at once, since it may never end
    read_text   the whole file as UTF-8, up to the size limit of its kind
    parse_json  unique names, finite numbers of at most 64 bits, valid Unicode, at most 100 levels

Every problem raises the error class of the file's kind, with the path.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from drumline.core.errors import DrumlineError

MIB = 2**20
MAX_DEPTH = 100
_WHOLE = range(-(2**63), 2**64)
_NEVER_WAITING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOCTTY", 0)


class FileKind(NamedTuple):
    """A kind of file: its name, its error class, what was expected, and its size limit in bytes."""

    name: str
    error: type[DrumlineError]
    expected: str
    max_bytes: int = 16 * MIB

    def refuse(self, text: str, *, fix: str = "") -> DrumlineError:
        """Return the error to raise."""
        return self.error(text, expected=self.expected, fix=fix)


@contextmanager
def opened(path: str | Path, kind: FileKind) -> Iterator[BinaryIO]:
    """Open a regular file for reading. Never blocks on a pipe or device.

    >>> with opened("no-such-file.json", FileKind("costs", DrumlineError, "a JSON file of costs")):
    ...     pass
    Traceback (most recent call last):
    drumline.core.errors.DrumlineError: cannot read no-such-file.json: No such file or directory; expected ...
    """
    try:
        number = os.open(path, _NEVER_WAITING)
        mode = os.fstat(number).st_mode
        if not stat.S_ISREG(mode):
            os.close(number)
            raise kind.refuse(f"{path} is {_kind_of_file(mode)}, not a regular file")
        with os.fdopen(number, "rb") as file:
            yield file
    except OSError as error:
        if type(error).__module__ != "builtins":  # for example gzip's, whose own message describes the contents
            raise
        raise kind.refuse(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        if "null byte" not in str(error):
            raise
        raise kind.refuse(f"cannot read {str(path)!r}: file names cannot contain a null byte") from None


def is_there(path: str | Path, kind: FileKind) -> bool:
    """Whether anything exists at a path; raise an error if that cannot be determined.

    >>> is_there("no-such-file.json", FileKind("costs", DrumlineError, "a JSON file of costs"))
    False
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise kind.refuse(f"cannot read {path}: {reason}") from None
    return True


def is_regular(path: str | Path) -> bool:
    """Whether a regular file exists at a path, as far as can be determined.

    >>> is_regular("no-such-file.json"), is_regular("x" * 5000)
    (False, False)
    """
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def unreadable(path: str | Path) -> str:
    """Return why no regular file can be read at a path; an empty text if one can.

    >>> unreadable("no-such-file.json"), unreadable("/dev/null"), unreadable("/")
    ('no such file', 'is a device, not a regular file', 'is a folder, not a regular file')
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "is a link to a file that is not there" if os.path.islink(path) else "no such file"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except ValueError:
        return "cannot be read: file names cannot contain a null byte"
    if not stat.S_ISREG(mode):
        return f"is {_kind_of_file(mode)}, not a regular file"
    return "" if os.access(path, os.R_OK) else "cannot be read: Permission denied"


def read_bytes(path: str | Path, kind: FileKind) -> bytes:
    """Return the contents of a file, up to the size limit of its kind."""
    with opened(path, kind) as file:
        if os.fstat(file.fileno()).st_size <= kind.max_bytes:
            data = file.read(kind.max_bytes + 1) or b""
            if len(data) <= kind.max_bytes:
                return data
    raise kind.refuse(f"{path} is larger than {kind.max_bytes // MIB} MiB")


def read_text(path: str | Path, kind: FileKind) -> str:
    """Return the contents of a file as text, without a byte-order mark."""
    data = read_bytes(path, kind)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise kind.refuse(
            f"{path}: byte 0x{byte:02x} at offset {error.start} is not UTF-8 text", fix="save the file as UTF-8"
        ) from None


def read_object(path: str | Path, kind: FileKind) -> dict[str, Any]:
    """Return the object in a JSON file."""
    text = read_text(path, kind)
    with named(path, kind):
        return parse_object(text, kind)


@contextmanager
def named(path: str | Path, kind: FileKind) -> Iterator[None]:
    """Prefix a parser's errors with the path."""
    try:
        yield
    except kind.error as error:
        raise kind.error(f"{path}: {error.error}", expected=error.expected, fix=error.fix) from None


def parse_object(text: str | bytes, kind: FileKind) -> dict[str, Any]:
    """Parse a JSON text that must be an object."""
    content = parse_json(text, kind)
    if not isinstance(content, dict):
        raise kind.refuse(f"the JSON holds a {type(content).__name__}, not an object")
    return content


def parse_json(text: str | bytes, kind: FileKind) -> Any:
    """Parse a JSON text.

    >>> kind = FileKind("costs", DrumlineError, "JSON")
    >>> parse_json('{"comm": 1e999}', kind)
    Traceback (most recent call last):
    drumline.core.errors.DrumlineError: comm is inf; expected a finite number
    >>> parse_json('{"comm": 1, "comm": 2}', kind)
    Traceback (most recent call last):
    drumline.core.errors.DrumlineError: the name 'comm' appears twice; expected unique names
    """
    try:
        content = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=float)
        _check_inside(content)
    except RecursionError:
        raise kind.refuse(f"the JSON is nested deeper than {MAX_DEPTH} levels") from None
    except _Refused as refused:
        raise kind.error(refused.error, expected=refused.expected) from None
    except json.JSONDecodeError as error:
        raise kind.refuse(f"not JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise kind.refuse(f"not JSON: the byte at offset {error.start} is not UTF-8 text") from None
    except ValueError:  # Python refuses to parse numbers with more than 4300 digits
        raise kind.error("the JSON contains a number with thousands of digits", expected="64 bits or fewer") from None
    return content


class _Refused(DrumlineError):
    """A value in the JSON is wrong."""


def _kind_of_file(mode: int) -> str:
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen_names: set[str] = set()
        for name, _ in pairs:
            if name in seen_names:
                raise _Refused(f"the name {name[:60]!r} appears twice", expected="unique names")
            seen_names.add(name)
    return table


def _check_inside(value: Any) -> None:
    """Reject numbers and texts that no other code can handle; raise RecursionError if the value nests too deeply."""
    level = _inner([value], "a number")
    for _ in range(MAX_DEPTH):
        deeper: list[tuple[Any, str]] = []
        for entry, name in level:
            if isinstance(entry, dict):
                _inner(list(entry), name)
                for key, inside in entry.items():
                    deeper += _inner([inside], key)
            else:
                deeper += _inner(entry, name)
        level = deeper
    if level:
        raise RecursionError


def _inner(values: list[Any], name: str) -> list[tuple[Any, str]]:
    """Return the lists and objects among values; reject bad numbers and texts, using their names."""
    kinds = set(map(type, values))
    if int in kinds:
        whole = [value for value in values if type(value) is int] if len(kinds) > 1 else values
        if min(whole) not in _WHOLE or max(whole) not in _WHOLE:
            raise _Refused(f"{name[:60]} is an integer with more than 64 bits", expected="64 bits or fewer")
    if float in kinds:
        for value in values:
            if type(value) is float and not math.isfinite(value):
                raise _Refused(f"{name[:60]} is {value}", expected="a finite number")
    if str in kinds:
        for value in values:
            if type(value) is str and not value.isascii():
                _check_text(value)
    return [(value, name) for value in values if isinstance(value, dict | list)] if kinds & {dict, list} else []


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _Refused(f"{text[:60]!r} contains half of a character", expected="text in UTF-8") from None
