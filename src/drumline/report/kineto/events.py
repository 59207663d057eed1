"""Read a profiler's trace as a stream of events: JSON, gzipped or not, piece by piece.

    {"schemaVersion": 1, "distributedInfo": {...}, "traceEvents": [{...}, {...}, ...], "traceName": "..."}
     └─ everything else is kept ────────────────┘                 └─ yielded one by one

A trace of several hundred megabytes is never in memory as a whole: only the current piece, and what its reader keeps.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from drumline.core.errors import DrumlineError, TraceError
from drumline.core.files import MIB, FileKind, opened

Event = dict[str, Any]

_AGAIN = "record or copy the trace again"
_PIECE = 1 << 20
_LARGEST_VALUE = 64 << 20  # characters of one event; anything larger is not an event
_EXPECTED = "a trace as torch.profiler's export_chrome_trace writes it, .json or .json.gz"
_KIND = FileKind("trace", TraceError, _EXPECTED, 2**14 * MIB)
# Traces compress to between a tenth and a thirtieth; one that expands beyond this is built to exhaust memory and time.
_MOST_GROWTH, _GROWTH_FROM = 200, 64 * MIB
_MOST_NAMES = 1000  # besides the events
_LARGEST_KEPT = MIB  # characters of a value besides the events
_SPACE = re.compile(r"\s*")
_WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
_LONGEST_ESCAPE = len(r"\ud83d\ude00")
_DECODER = json.JSONDecoder()


def events(path: Path, header: Event) -> Generator[Event, None, None]:
    """Yield the events of a trace; everything else in the file goes into `header`.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "rank0.json")
    ...     _ = path.write_text('{"schemaVersion": 1, "traceEvents": [{"ph": "X"}, {"ph": "i"}], "traceName": "a"}')
    ...     header = {}
    ...     print([event["ph"] for event in events(path, header)], header)
    ['X', 'i'] {'schemaVersion': 1, 'traceName': 'a'}
    """
    try:
        with _opened(path) as text:
            yield from _events(text, header)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _KIND.refuse(f"{path}: the gzip data is damaged or cut off: {error}", fix=_AGAIN) from None


@contextmanager
def _opened(path: Path) -> Iterator[_Text]:
    with opened(path, _KIND) as file, ExitStack() as stack:
        if os.fstat(file.fileno()).st_size > _KIND.max_bytes:
            raise _KIND.refuse(f"{path} is larger than {_KIND.max_bytes // MIB} MiB")
        zipped = cast(io.BufferedReader, file).peek(2)[:2] == b"\x1f\x8b"
        plain: Any = stack.enter_context(gzip.GzipFile(fileobj=file)) if zipped else file

        def most() -> int:
            return min(_GROWTH_FROM + _MOST_GROWTH * file.tell(), _KIND.max_bytes) if zipped else _KIND.max_bytes

        # Kernels can have any name: a byte that is not text must not end the reading.
        yield _Text(path, stack.enter_context(io.TextIOWrapper(plain, encoding="utf-8-sig", errors="replace")), most)


class _Text:
    """The text of a file, through a moving window."""

    def __init__(self, path: Path, file: io.TextIOWrapper, most: Callable[[], int]) -> None:
        self.path = path
        self.file = file
        self.most = most  # characters that the file may have, by what was read of it
        self.num_read = 0
        self.text = ""
        self.at = 0

    def more(self) -> bool:
        """Drop what was read, and load at least as much as is left; False at the end."""
        left = self.text[self.at :]
        if len(left) > _LARGEST_VALUE:
            raise self.refused(f"a value is larger than {_LARGEST_VALUE >> 20} MiB")
        piece = self.file.read(max(_PIECE, len(left)))
        self.num_read += len(piece)
        if self.num_read > self.most():
            grown = f"it expands to more than {self.num_read // MIB - 1} MiB"
            raise self.refused(f"{grown}, over {_MOST_GROWTH} times its size")
        self.text, self.at = left + piece, 0
        return bool(piece)

    def peek(self) -> str:
        """Return the next character that is not a space, or nothing at the end."""
        while True:
            self.at = cast(re.Match[str], _SPACE.match(self.text, self.at)).end()
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def take(self, character: str) -> bool:
        """Skip the next character if it is this one."""
        if self.peek() != character:
            return False
        self.at += 1
        return True

    def take_comma(self, otherwise: str) -> None:
        """Skip a comma; raise an error if it is missing, unless the enclosing value ends here."""
        if not self.take(",") and self.peek() != otherwise:
            raise self.not_json("a comma is missing") if self.peek() else self.cut_off()

    def refused(self, fault: str, *, fix: str = "") -> DrumlineError:
        """Return the error for the file."""
        return _KIND.refuse(f"{self.path}: {fault}", fix=fix)

    def not_json(self, fault: str, near: str | None = None) -> DrumlineError:
        """Return the error for the text that comes next."""
        return self.refused(f"not JSON: {fault}, at {self.text[self.at : self.at + 20] if near is None else near!r}")

    def cut_off(self) -> DrumlineError:
        return self.refused("the trace is cut off", fix=_AGAIN)

    def value(self) -> Any:
        """Return the next JSON value."""
        if not self.peek():
            raise self.cut_off()
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                fault, at = error.msg, error.pos
            except RecursionError:
                raise self.refused("the JSON is nested too deeply") from None
            except ValueError:  # Python refuses to parse numbers with more than 4300 digits
                raise self.refused("it contains a number with thousands of digits") from None
            else:
                length = end - self.at
                # A number at the very end of the window may continue after it: 1, 1.5, 1e-5.
                if len(self.text) - end > _LONGEST_ESCAPE or not self.more():
                    self.at += length
                    return value
                continue
            # A value that merely continues after the window fails at its very end, or inside a string or a word.
            rest, open_string = self.text[at : at + 20], "Unterminated" in fault or "escape" in fault
            cut = open_string or any(word.startswith(rest.strip()) for word in _WORDS)
            near_the_end = len(self.text) - at <= _LONGEST_ESCAPE
            if not (cut or near_the_end) or not self.more():
                raise self.cut_off() if cut else self.not_json(fault, rest)


def _events(text: _Text, header: Event) -> Iterator[Event]:
    if text.take("["):
        yield from _listed(text)
        return
    if not text.take("{"):
        raise text.not_json("it begins with neither { nor [")
    has_events, names = False, 0
    while not text.take("}"):
        key = text.value()
        if not isinstance(key, str) or not text.take(":"):
            raise text.not_json("a name is missing")
        if key == "traceEvents" and text.take("["):
            has_events = True
            yield from _listed(text)
        else:
            before = text.num_read - len(text.text) + text.at
            value = text.value()
            if text.num_read - len(text.text) + text.at - before <= _LARGEST_KEPT:
                header[key] = value
            names += 1
            if names > _MOST_NAMES:
                raise text.refused(f"it has more than {_MOST_NAMES} names besides its events")
        text.take_comma("}")
    if not has_events:
        there = ", ".join(key[:40] for key in list(header)[:10])
        raise text.refused(f"it has no traceEvents, only {there or 'nothing'}")


def _listed(text: _Text) -> Iterator[Event]:
    """Yield the objects of an array whose opening bracket has been read."""
    while not text.take("]"):
        event = text.value()
        if isinstance(event, dict):
            yield event
        text.take_comma("]")
