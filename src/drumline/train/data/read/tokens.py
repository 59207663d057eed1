"""Files of token numbers: `.npy`, or bare numbers in any other file. Both are mapped, whatever their size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drumline.core.errors import UsageError, nearest
from drumline.train.config.files.data_files import existing_files
from drumline.train.data.items.documents import Documents, MappedNumbers
from drumline.train.data.items.order import Indices

TYPES = ("uint8", "uint16", "uint32", "int32", "int64")
_CHUNK = 1 << 24


def token_documents(
    names: Sequence[str], kind: str, end: int | None, vocabulary: int | None, *, key: str = "data.files"
) -> Documents:
    """Return the documents of token files: each ends with the token `end`, or is a whole file where there is none."""
    if not names:
        raise UsageError(f"{key} names no file", expected='files of tokens where data.kind is "tokens"')
    if kind not in TYPES:
        raise UsageError(f"data.token_type is {kind!r:.60}", fix=nearest(kind, TYPES))
    files = existing_files(names, key=key)
    parts = [_mapped(path, kind) for path in files]
    bounds = [_checked(path, part.numbers, end, vocabulary) for path, part in zip(files, parts, strict=True)]
    return Documents.spans(parts, bounds)


def _mapped(path: Path, kind: str) -> MappedNumbers:
    if path.suffix != ".npy":
        width = np.dtype(kind).itemsize
        if path.stat().st_size % width:
            raise UsageError(
                f"{path} has {path.stat().st_size} bytes, which is no multiple of {width}",
                expected=f"numbers of the type {kind}, as data.token_type says",
            )
        return MappedNumbers(str(path), np.dtype(kind).newbyteorder("<").str)
    try:
        numbers: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise UsageError(f"{path} is no .npy file that can be read: {error}"[:200]) from None
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not len(numbers):
        raise UsageError(
            f"{path} holds {numbers.dtype} of the shape {numbers.shape}", expected="whole numbers in one dimension"
        )
    return MappedNumbers(str(path), numbers.dtype.str, numbers.offset)


def _checked(path: Path, numbers: NDArray[Any], end: int | None, vocabulary: int | None) -> Indices:
    """Return where documents begin and the last one ends; every number must be a token of the model."""
    bounds = [np.zeros(1, dtype=np.int64)]
    most = int(np.iinfo(numbers.dtype).max) if vocabulary is None else vocabulary - 1
    for start in range(0, len(numbers), _CHUNK):
        chunk = np.asarray(numbers[start : start + _CHUNK])
        low, high = int(chunk.min()), int(chunk.max())
        if low < 0 or high > most:
            wrong = low if low < 0 else high
            at = start + int(np.flatnonzero(chunk == wrong)[0])
            raise UsageError(
                f"{path} has the token {wrong} at place {at}",
                expected=f"tokens of 0 to {most}, the model's",
                fix="check data.token_type and model.vocabulary",
            )
        if end is not None:
            bounds.append(start + 1 + np.flatnonzero(chunk == end).astype(np.int64))
    found_bounds = np.concatenate(bounds)
    return found_bounds if found_bounds[-1] == len(numbers) else np.append(found_bounds, len(numbers))
