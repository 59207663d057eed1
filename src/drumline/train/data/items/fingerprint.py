"""Whether data are the same as before, without reading all of them: sizes, and blocks here and there.

    ├█──────█──────█──────█──────█┤     4,096 blocks of 4 KiB over all files, the first and the last of each among them

Data of at most 16 MiB are read whole, larger ones on request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 4096
_MOST = 4096  # blocks
_CHUNK = 1 << 22  # bytes that are read at once
_NAMED = 100  # files that are told apart


@dataclass(frozen=True, slots=True)
class Part:
    """Numbers that are trained on, and what to call them."""

    name: str
    numbers: NDArray[Any]


def blocks(size: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield where the blocks of so many bytes begin and end: at most so many, over all of them.

    >>> list(blocks(10_000, 4)), list(blocks(100_000, 3))
    ([(0, 10000)], [(0, 4096), (47952, 52048), (95904, 100000)])
    """
    if size <= most * _BLOCK:
        yield from ((start, min(start + _CHUNK, size)) for start in range(0, size, _CHUNK))
        return
    for at in range(most):
        start = (size - _BLOCK) * at // max(most - 1, 1)
        yield start, start + _BLOCK


def digest(numbers: NDArray[Any], *, most: int = _MOST) -> str:
    """Return a digest of the kind and number of numbers, and of at most so many blocks of them.

    >>> value = np.arange(50_000)
    >>> digest(value) == digest(value.copy()), digest(value) == digest(value + 1)
    (True, False)
    """
    flat = numbers.reshape(-1)
    checksum = blake2b(f"{numbers.dtype.str} {numbers.shape}".encode(), digest_size=16)
    width = max(flat.itemsize, 1)
    for start, stop in blocks(flat.size * width, most):
        checksum.update(np.ascontiguousarray(flat[start // width : -(-stop // width)]).tobytes())
    return checksum.hexdigest()


def fingerprint(parts: Sequence[Part], how: str = "sampled") -> dict[str, Any]:
    """Return what tells these data from others: one digest of all, and of a hundred files each its own.

    >>> found_fingerprint = fingerprint([Part("a.txt", np.zeros(9, dtype=np.uint8))])
    >>> found_fingerprint["how"], found_fingerprint["size"], found_fingerprint["files"][0][:2]
    ('sampled', 9, ['a.txt', 9])
    """
    total = sum(part.numbers.nbytes for part in parts)
    each = []
    for part in parts:
        share = _MOST * part.numbers.nbytes // max(total, 1)
        whole = how == "whole" or total <= _MOST * _BLOCK
        each.append(digest(part.numbers, most=part.numbers.nbytes // _BLOCK + 1 if whole else max(2, share)))
    text = blake2b("".join(each).encode(), digest_size=16).hexdigest()
    files = [[part.name, len(part.numbers), mine] for part, mine in zip(parts, each, strict=True)]
    return {"how": how, "size": total, "digest": text, "files": files[:_NAMED]}


def changed(then: dict[str, Any], now: dict[str, Any], parts: Sequence[Part]) -> str:
    """Return what has changed between two fingerprints, the second one of these parts; empty if nothing has.

    >>> value, other = (Part("a.txt", np.full(9, value)) for value in (0, 1))
    >>> changed(fingerprint([value]), fingerprint([value]), [value])
    ''
    >>> changed(fingerprint([value]), fingerprint([other], "whole"), [other])
    'a.txt has other contents'
    """
    if then.get("how") != now["how"]:
        now = fingerprint(parts, then.get("how", "sampled"))
    if now["digest"] == then.get("digest") and now["size"] == then.get("size"):
        return ""
    before, after = then.get("files", []), now["files"]
    if len(before) != len(after):
        return f"there are {len(after)} files, and there were {len(before)}"
    for (_, size, mine), (name, its_size, its) in zip(before, after, strict=True):
        if size != its_size:
            return f"{name} has another size: {its_size:,}, not {size:,}"
        if mine != its:
            return f"{name} has other contents"
    return "a file has other contents"
