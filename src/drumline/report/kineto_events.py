"""A profiler's trace as a stream of events: JSON, gzipped or not, read piece by piece.

    {"schemaVersion": 1, "distributedInfo": {...}, "traceEvents": [{...}, {...}, ...], "traceName": "..."}
     └─ what is no event is kept ───────────────┘                 └─ yielded one by one

A trace of several hundred megabytes is never in memory as a whole: only the piece at hand, and what its reader keeps.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from drumline.core.errors import TraceError

Event = dict[str, Any]

_EXPECTED = "a trace as torch.profiler's export_chrome_trace writes it, .json or .json.gz"
_AGAIN = "record or copy the trace again"
_PIECE = 1 << 20
_LARGEST_VALUE = 64 << 20  # characters of one event; what is larger is no event
_WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
_LONGEST_ESCAPE = len(r"\ud83d\ude00")
_DECODER = json.JSONDecoder()


def events(path: Path, header: Event) -> Generator[Event, None, None]:
    """Yield the events of a trace; what else the file says is put into `header`.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "rank0.json")
    ...     _ = path.write_text('{"schemaVersion": 1, "traceEvents": [{"ph": "X"}, {"ph": "i"}], "traceName": "a"}')
    ...     header = {}
    ...     print([event["ph"] for event in events(path, header)], header)
    ['X', 'i'] {'schemaVersion': 1, 'traceName': 'a'}
    """
    try:
        with _opened(path) as file:
            yield from _events(_Text(file), header)
    except TraceError as error:
        raise TraceError(f"{path}: {error.error}", expected=error.expected, fix=error.fix) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            f"{path}: the gzip data is damaged or cut off: {error}", expected=_EXPECTED, fix=_AGAIN
        ) from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}", expected=_EXPECTED) from None


@contextmanager
def _opened(path: Path) -> Iterator[io.TextIOWrapper]:
    if path.exists() and not path.is_file():
        raise TraceError("not a regular file", expected=_EXPECTED)
    with path.open("rb") as file, ExitStack() as stack:
        zipped = file.peek(2)[:2] == b"\x1f\x8b"
        plain: Any = stack.enter_context(gzip.GzipFile(fileobj=file)) if zipped else file
        # Names of kernels are whatever somebody called them: a byte that is no text must not end the reading.
        yield stack.enter_context(io.TextIOWrapper(plain, encoding="utf-8", errors="replace"))


class _Text:
    """The text of a file, through a window that moves on."""

    def __init__(self, file: io.TextIOWrapper) -> None:
        self.file = file
        self.text = ""
        self.at = 0

    def more(self) -> bool:
        """Let go of what was read, and take in at least as much again as is left; False at the end."""
        left = self.text[self.at :]
        if len(left) > _LARGEST_VALUE:
            raise TraceError(f"one value is larger than {_LARGEST_VALUE >> 20} MiB", expected=_EXPECTED)
        piece = self.file.read(max(_PIECE, len(left)))
        self.text, self.at = left + piece, 0
        return bool(piece)

    def peek(self) -> str:
        """Return the next character that is no space, or nothing at the end."""
        while True:
            while self.at < len(self.text):
                if not self.text[self.at].isspace():
                    return self.text[self.at]
                self.at += 1
            if not self.more():
                return ""

    def take(self, character: str) -> bool:
        """Go past the next character if it is this one."""
        if self.peek() != character:
            return False
        self.at += 1
        return True

    def value(self) -> Any:
        """Return the next JSON value."""
        if not self.peek():
            raise _cut_off()
        while True:
            try:
                found, end = _DECODER.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                fault, at = error.msg, error.pos
            except RecursionError:
                raise TraceError("the JSON is nested too deeply", expected=_EXPECTED) from None
            else:
                length = end - self.at
                # A number at the very end of the window may go on behind it: 1, 1.5, 1e-5.
                if len(self.text) - end > _LONGEST_ESCAPE or not self.more():
                    self.at += length
                    return found
                continue
            # What merely goes on behind the window fails at its very end, or within a string or a word.
            rest, open_string = self.text[at : at + 20], "Unterminated" in fault or "escape" in fault
            cut = open_string or any(word.startswith(rest.strip()) for word in _WORDS)
            near_the_end = len(self.text) - at <= _LONGEST_ESCAPE
            if not (cut or near_the_end) or not self.more():
                raise _cut_off() if cut else _not_json(fault, rest)


def _events(text: _Text, header: Event) -> Iterator[Event]:
    if text.take("["):
        yield from _listed(text)
        return
    if not text.take("{"):
        raise _not_json("it begins with neither { nor [", text.text[text.at : text.at + 20])
    found = False
    while not text.take("}"):
        key = text.value()
        if not isinstance(key, str) or not text.take(":"):
            raise _not_json("a name is missing", text.text[text.at : text.at + 20])
        if key == "traceEvents" and text.take("["):
            found = True
            yield from _listed(text)
        else:
            header[key] = text.value()
        if not text.take(",") and text.peek() != "}":
            raise _cut_off() if not text.peek() else _not_json("a comma is missing", text.text[text.at : text.at + 20])
    if not found:
        raise TraceError(f"no traceEvents in it, only {', '.join(header) or 'nothing'}", expected=_EXPECTED)


def _listed(text: _Text) -> Iterator[Event]:
    """Yield the objects of an array whose bracket has been taken."""
    while not text.take("]"):
        event = text.value()
        if isinstance(event, dict):
            yield event
        if not text.take(",") and text.peek() != "]":
            raise _cut_off() if not text.peek() else _not_json("a comma is missing", text.text[text.at : text.at + 20])


def _cut_off() -> TraceError:
    return TraceError("the trace is cut off", expected=_EXPECTED, fix=_AGAIN)


def _not_json(fault: str, near: str) -> TraceError:
    return TraceError(f"not JSON: {fault}, at {near!r}", expected=_EXPECTED)
