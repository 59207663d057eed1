"""Text files: bytes are mapped and never copied, other tokenizers encode them once.

A file is one document, or several that a separator divides. The end of a line in a separator matches that of files from
Windows too, and the other way round. A line of a `.jsonl` file is a document: its "text".
"""

from __future__ import annotations

import codecs
import mmap
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from drumline.core.errors import UsageError
from drumline.train.config.files.data_files import check_utf8, existing_files, records_of
from drumline.train.data.items.documents import Documents, MappedNumbers
from drumline.train.data.items.order import Indices
from drumline.train.data.read.encoding import encoded
from drumline.train.models.built import Tokenizer
from drumline.train.models.tokenizers import ByteTokenizer

SHIPPED = Path(__file__).parents[1] / "shipped" / "genesis.txt"
SHIPPED_SEPARATOR = "\n\n"  # between chapters
_PIECE = 1 << 20  # bytes that a tokenizer gets at once


def text_documents(names: Sequence[str], separator: str, tokenizer: Tokenizer, *, key: str = "data.files") -> Documents:
    r"""Return the documents of text files; of the text that is shipped with the package if none is named.

    >>> len(text_documents([], "", ByteTokenizer())), len(text_documents([], "\n", ByteTokenizer()))
    (50, 1533)
    """
    files = existing_files(names, key=key) if names else [SHIPPED]
    separator = separator if names or separator else SHIPPED_SEPARATOR
    records = [file for file in files if file.suffix in (".jsonl", ".ndjson")]
    if type(tokenizer) is ByteTokenizer and not records:
        return _mapped(files, separator, tokenizer)
    for path in files:
        if path not in records:
            check_utf8(path)
    documents = encoded(lambda: _texts(files, separator), files, separator, tokenizer)
    return _some(documents, files)


def _mapped(files: Sequence[Path], separator: str, tokenizer: Tokenizer) -> Documents:
    starts = [check_utf8(path) for path in files]
    parts = [MappedNumbers(str(path), "uint8") for path in files]
    bounds = [_bounds(path, separator, start) for path, start in zip(files, starts, strict=True)]
    documents = Documents.between(parts, bounds, end=tokenizer.end)
    return _some(documents, files)


def _some(documents: Documents, files: Sequence[Path]) -> Documents:
    if not len(documents):
        raise UsageError(f"{', '.join(map(str, files))[:200]} has no text", expected="documents to train on")
    return documents


def _bounds(path: Path, separator: str, start: int) -> tuple[Indices, Indices]:
    """Return where the documents of a file begin and end."""
    starts, stops = [start], []
    if separator:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for first, last in _separators(content, separator.replace("\r\n", "\n").encode(), start):
                stops.append(first)
                starts.append(last)
    return np.array(starts, dtype=np.int64), np.array([*stops, path.stat().st_size], dtype=np.int64)


def _separators(content: mmap.mmap, sought: bytes, start: int) -> Iterator[tuple[int, int]]:
    """Yield where each separator begins and ends."""
    if b"\n" in sought and content.find(b"\r\n") >= 0:
        either = re.compile(rb"\r?\n".join(map(re.escape, sought.split(b"\n"))))
        yield from (hit.span() for hit in either.finditer(content, start))
        return
    while (at := content.find(sought, start)) >= 0:
        start = at + len(sought)
        yield at, start


def _texts(files: Sequence[Path], separator: str) -> Iterator[Iterable[str]]:
    """Yield the pieces of every document."""
    for path in files:
        if path.suffix in (".jsonl", ".ndjson"):
            for place, record in records_of(path):
                text = record.get("text")
                if not isinstance(text, str):
                    raise UsageError(f'{place}: no "text"', expected='{"text": "..."}')
                yield [text]
            continue
        starts, stops = _bounds(path, separator, check_utf8(path))
        with path.open("rb") as file:
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                yield _pieces(file, start, stop)


def _pieces(file: BinaryIO, start: int, stop: int) -> Iterator[str]:
    """Yield the text between two places of a file, a few lines at a time."""
    decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""
    file.seek(start)
    while start < stop:
        chunk = file.read(min(_PIECE, stop - start))
        start += len(chunk)
        text = rest + decoder.decode(chunk)
        cut = text.rfind("\n") + 1 if start < stop else 0
        yield text[: cut or len(text)]
        rest = text[cut or len(text) :]
