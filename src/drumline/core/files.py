"""One reader for every file that a user hands over: strict, and bounded in time and memory.

    opened      a regular file, for reading piece by piece; a pipe or device, which may never end, is refused at once
    read_text   all of it as UTF-8, no larger than its kind may be
    parse_json  every name once, numbers that are finite and fit 64 bits, text that can be written again, 100 levels

Whatever is wrong is raised as the error of the file's kind, with the path.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from drumline.core.errors import DrumlineError

MIB = 2**20
MAX_DEPTH = 100
_WHOLE = range(-(2**63), 2**64)
_NEVER_WAITING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOCTTY", 0)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file: its name, the error that refuses one, what was expected, and the most bytes that one has."""

    name: str
    error: type[DrumlineError]
    expected: str
    max_bytes: int = 16 * MIB

    def refuse(self, text: str, *, fix: str = "") -> DrumlineError:
        """Return the error to raise."""
        return self.error(text, expected=self.expected, fix=fix)


@contextmanager
def opened(path: str | Path, kind: Kind) -> Iterator[BinaryIO]:
    """Open a regular file for reading, without ever waiting for one that is something else.

    >>> with opened("no-such-file.json", Kind("costs", DrumlineError, "a JSON file of costs")):
    ...     pass
    Traceback (most recent call last):
    drumline.core.errors.DrumlineError: no-such-file.json cannot be read: No such file or directory; expected ...
    """
    try:
        number = os.open(path, _NEVER_WAITING)
        mode = os.fstat(number).st_mode
        if not stat.S_ISREG(mode):
            os.close(number)
            raise kind.refuse(f"{path}: not a regular file but {_called(mode)}")
        with os.fdopen(number, "rb") as file:
            yield file
    except OSError as error:
        if type(error).__module__ != "builtins":  # such as gzip's, which says of the contents what it has to say
            raise
        raise kind.refuse(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        if "null byte" not in str(error):
            raise
        raise kind.refuse(f"{str(path)!r} cannot be read: no file has such a name") from None


def is_there(path: str | Path, kind: Kind) -> bool:
    """Whether there is anything at a path; refuse one at which that cannot be known.

    >>> is_there("no-such-file.json", Kind("costs", DrumlineError, "a JSON file of costs"))
    False
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise kind.refuse(f"{path} cannot be read: {reason}") from None
    return True


def is_regular(path: str | Path) -> bool:
    """Whether there is a regular file at a path, as far as can be known.

    >>> is_regular("no-such-file.json"), is_regular("x" * 5000)
    (False, False)
    """
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_bytes(path: str | Path, kind: Kind) -> bytes:
    """Return all of a file, which is no larger than its kind may be."""
    with opened(path, kind) as file:
        if os.fstat(file.fileno()).st_size <= kind.max_bytes:
            data = file.read(kind.max_bytes + 1) or b""
            if len(data) <= kind.max_bytes:
                return data
    raise kind.refuse(f"{path}: larger than {kind.max_bytes // MIB} MiB")


def read_text(path: str | Path, kind: Kind) -> str:
    """Return all of a file as text; a byte-order mark is left out."""
    data = read_bytes(path, kind)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise kind.refuse(
            f"{path}: byte 0x{byte:02x} at offset {error.start} is not UTF-8 text", fix="save it as UTF-8"
        ) from None


def read_object(path: str | Path, kind: Kind) -> dict[str, Any]:
    """Return the object that a JSON file holds."""
    text = read_text(path, kind)
    with named(path, kind):
        return parse_object(text, kind)


@contextmanager
def named(path: str | Path, kind: Kind) -> Iterator[None]:
    """Put the path in front of what a parser refuses."""
    try:
        yield
    except kind.error as error:
        raise kind.error(f"{path}: {error.error}", expected=error.expected, fix=error.fix) from None


def parse_object(text: str | bytes, kind: Kind) -> dict[str, Any]:
    """Return the object that a JSON text spells."""
    found = parse_json(text, kind)
    if not isinstance(found, dict):
        raise kind.refuse(f"JSON of a {type(found).__name__}, no object")
    return found


def parse_json(text: str | bytes, kind: Kind) -> Any:
    """Return the value that a JSON text spells.

    >>> kind = Kind("costs", DrumlineError, "JSON")
    >>> parse_json('{"comm": 1e999}', kind)
    Traceback (most recent call last):
    drumline.core.errors.DrumlineError: comm is inf; expected a finite number
    >>> parse_json('{"comm": 1, "comm": 2}', kind)
    Traceback (most recent call last):
    drumline.core.errors.DrumlineError: 'comm' stands there twice; expected every name once
    """
    try:
        found = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=float)
        _check_inside(found)
    except RecursionError:
        raise kind.refuse(f"not JSON as it is read here: nested deeper than {MAX_DEPTH} levels") from None
    except _Refused as refused:
        raise kind.error(refused.error, expected=refused.expected) from None
    except json.JSONDecodeError as error:
        raise kind.refuse(f"not JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise kind.refuse(f"not JSON: the byte at offset {error.start} is not UTF-8 text") from None
    except ValueError:  # Python refuses to read numbers of more than 4300 digits
        raise kind.error("a number of thousands of digits stands there", expected="64 bits or fewer") from None
    return found


class _Refused(DrumlineError):
    """What is wrong with a value, wherever it stands."""


def _called(mode: int) -> str:
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _Refused(f"{name[:60]!r} stands there twice", expected="every name once")
            seen.add(name)
    return table


def _check_inside(value: Any) -> None:
    """Refuse numbers and texts in a value that nothing else can handle; raise RecursionError if it nests too deeply."""
    level = _inner([value], "a number")
    for _ in range(MAX_DEPTH):
        deeper: list[tuple[Any, str]] = []
        for one, name in level:
            if isinstance(one, dict):
                _inner(list(one), name)
                for key, inside in one.items():
                    deeper += _inner([inside], key)
            else:
                deeper += _inner(one, name)
        level = deeper
    if level:
        raise RecursionError


def _inner(values: list[Any], name: str) -> list[tuple[Any, str]]:
    """Return the lists and objects among values; refuse odd numbers and texts, by the name that they have there."""
    kinds = set(map(type, values))
    if int in kinds:
        whole = [one for one in values if type(one) is int] if len(kinds) > 1 else values
        if min(whole) not in _WHOLE or max(whole) not in _WHOLE:
            raise _Refused(f"{name[:60]} is a whole number of more than 64 bits", expected="64 bits or fewer")
    if float in kinds:
        for one in values:
            if type(one) is float and not math.isfinite(one):
                raise _Refused(f"{name[:60]} is {one}", expected="a finite number")
    if str in kinds:
        for one in values:
            if type(one) is str and not one.isascii():
                _check_text(one)
    return [(one, name) for one in values if isinstance(one, dict | list)] if kinds & {dict, list} else []


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _Refused(f"{text[:60]!r} holds half of a character", expected="text in UTF-8") from None
