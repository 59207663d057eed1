"""Text through a tokenizer, once: small files into memory, large ones into a cache that all processes share.

The cache is `$DRUMLINE_CACHE`, or `~/.cache/drumline`. What is in it depends on the files (name, size, time of their
last change, a sample of their contents), the separator and the tokenizer. One process writes at a time and the others
wait for it.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np

from drumline.core.errors import RunError
from drumline.train.data.items.documents import Documents, MappedNumbers
from drumline.train.data.items.fingerprint import digest
from drumline.train.data.items.order import Indices
from drumline.train.models.built import Tokenizer

IN_MEMORY = 64 << 20  # bytes of text
_LONGEST_WAIT = 4 * 3600.0


def encoded(
    texts: Callable[[], Iterator[Iterable[str]]], files: Sequence[Path], separator: str, tokenizer: Tokenizer
) -> Documents:
    """Return the documents of texts by a tokenizer; each text comes in pieces."""
    if sum(file.stat().st_size for file in files) <= IN_MEMORY:
        documents = [np.fromiter(tokens_of(text, tokenizer), dtype=np.int32) for text in texts()]
        bounds = np.cumsum([0, *map(len, documents)], dtype=np.int64)
        return Documents.spans((np.concatenate(documents),), [bounds], end=tokenizer.end)
    folder = _cache() / _key(files, separator, tokenizer)
    done = folder / "bounds.npy"
    with _locked(folder):
        if not done.is_file():
            _write(folder, texts(), tokenizer)
    return Documents.spans((MappedNumbers(str(folder / "tokens.bin"), "int32"),), [np.load(done)], end=tokenizer.end)


def tokens_of(pieces: Iterable[str], tokenizer: Tokenizer) -> Iterator[int]:
    """Yield the tokens of a text that comes in pieces, so that a long one does not take the memory of all.

    >>> from drumline.train.models.tokenizers import ByteTokenizer
    >>> list(tokens_of(["a", "b"], ByteTokenizer()))
    [97, 98]
    """
    go_on = getattr(tokenizer, "encode_next", tokenizer.encode)
    for at, piece in enumerate(pieces):
        yield from (go_on if at else tokenizer.encode)(piece)


def _write(folder: Path, texts: Iterator[Iterable[str]], tokenizer: Tokenizer) -> None:
    bounds = [0]
    with (folder / "tokens.bin").open("wb") as file:
        for text in texts:
            bounds.append(bounds[-1] + _append(file, text, tokenizer))
    _save(folder, np.array(bounds, dtype=np.int64))


def _append(file: BinaryIO, text: Iterable[str], tokenizer: Tokenizer) -> int:
    tokens = np.fromiter(tokens_of(text, tokenizer), dtype=np.int32)
    file.write(tokens.tobytes())
    return len(tokens)


def _save(folder: Path, bounds: Indices) -> None:
    """Write the bounds last and whole: they say that the tokens are complete."""
    part = folder / "part.npy"
    np.save(part, bounds)
    os.replace(part, folder / "bounds.npy")


def _cache() -> Path:
    named = os.environ.get("DRUMLINE_CACHE")
    return (Path(named) if named else Path.home() / ".cache" / "drumline") / "tokens"


def _key(files: Sequence[Path], separator: str, tokenizer: Tokenizer) -> str:
    about = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns, _sampled(file)) for file in files]
    backend = getattr(getattr(tokenizer, "inner", None), "backend_tokenizer", None)
    name = backend.to_str() if backend is not None else f"{type(tokenizer).__name__} {getattr(tokenizer, 'folder', '')}"
    return blake2b(json.dumps([about, separator, name]).encode(), digest_size=16).hexdigest()


def _sampled(path: Path) -> str:
    """Return a digest of blocks of a file: copies with other contents may have the size and time of the first."""
    return digest(np.memmap(path, dtype=np.uint8, mode="r"), most=256) if path.stat().st_size else ""


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes out until the end, of this block or of this process."""
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with (folder / "lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - begun > _LONGEST_WAIT:
                    raise RunError(
                        f"another process has been writing tokens to {folder} for {_LONGEST_WAIT / 3600:.0f} hours",
                        fix="end it, or name another folder in DRUMLINE_CACHE",
                    ) from None
                time.sleep(0.2)
        yield
