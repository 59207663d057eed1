"""The text form of rows as arrays, read and written by the kernel.

It reads texts that are wholly regular, and says nothing of others: the Python form reads these, or names what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from drumline.core.kernel.library import Kernel, kernel

_Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class OpNames:
    """How ops are written, in the order of their codes; and which take no microbatch, compute, or make a pair."""

    names: tuple[str, ...]
    without_microbatch: frozenset[str]
    computing: frozenset[str]
    pair: str

    @cached_property
    def encoded(self) -> npt.NDArray[np.uint8]:
        """The names, each ended by a zero."""
        return np.frombuffer(b"".join(name.encode() + b"\0" for name in self.names), dtype=np.uint8)

    @cached_property
    def kinds(self) -> npt.NDArray[np.uint8]:
        """Three flags per op: takes a microbatch, computes, makes a pair."""
        flags = [(n not in self.without_microbatch, n in self.computing, n == self.pair) for n in self.names]
        return np.array(flags, dtype=np.uint8)


class TextArrays(NamedTuple):
    """Plain actions row by row, the halves of a pair side by side; `numbers` are stages, codes and microbatches.

    With slices, microbatches are units: the slices of all microbatches, counted through.
    """

    lengths: list[int]
    numbers: _Int32s
    cell: _Int32s
    paired: npt.NDArray[np.bool_]
    num_slices: int


def read(text: str, spelling: OpNames, most: int) -> TextArrays | int | None:
    r"""Return the actions of a regular text; None for any other.

    Of a text with more than so many actions, return the number of the row that has too many, counted from 1.

    >>> spelling = OpNames(("F", "UNSHARD"), frozenset({"UNSHARD"}), frozenset({"F"}), "")
    >>> cells = read("0UNSHARD, 0F7\n1F7", spelling, 9)
    >>> kernel() is None or (cells.lengths, cells.numbers.tolist())
    ([2, 1], [[0, 0, 1], [1, 0, 0], [-1, 7, 7]])
    """
    library = kernel()
    if library is None or not text.isascii():
        return None
    data = np.frombuffer(text.encode("ascii"), dtype=np.uint8)
    sizes = np.zeros(3, dtype=np.int64)
    names = spelling.encoded, spelling.kinds, len(spelling.names)
    source = data, len(data), *names, most
    count = library.read_rows(*source, sizes, *[None] * 6)
    num_rows = int(sizes[0])
    if count <= 0:
        return num_rows if count == Kernel.TOO_MANY else None
    lengths, numbers, paired = np.empty(num_rows, np.int64), np.empty((4, count), np.int32), np.empty(count, np.uint8)
    if library.read_rows(*source, sizes, lengths, *numbers, paired) < 0:
        return None
    return TextArrays(lengths.tolist(), numbers[:3], numbers[3], paired.view(np.bool_), int(sizes[2]))


def written(
    lengths: Sequence[int],
    numbers: Sequence[_Int32s],
    paired: npt.NDArray[np.bool_],
    spelling: OpNames,
    num_slices: int = 1,
) -> str:
    """Return the text of rows from their stages, codes and microbatches; it must not be called without a kernel.

    With slices, microbatches are units.

    >>> spelling = OpNames(("F", "B"), frozenset(), frozenset({"F", "B"}), "")
    >>> columns = np.array([[0, 0], [0, 1], [7, 7]], dtype=np.int32)
    >>> kernel() is None or written([2], columns, np.zeros(2, dtype=bool), spelling)
    '0F7,0B7'
    """
    library = kernel()
    assert library is not None
    stage, code, microbatch = numbers
    longest = sum(len(str(int(column.max(initial=0)))) for column in (stage, microbatch))
    longest += len(f".{num_slices}") if num_slices > 1 else 0
    letters = max(map(len, spelling.names)) + longest + 3 + (len(spelling.pair) if paired.any() else 0)
    text = np.empty(len(stage) * letters + 1, dtype=np.uint8)
    sizes, flags = np.array(lengths, dtype=np.int64), paired.astype(np.uint8)
    pair = spelling.names.index(spelling.pair) if spelling.pair else 0
    names = spelling.encoded, len(spelling.names)
    size = library.write_rows(len(sizes), sizes, stage, code, microbatch, flags, *names, pair, num_slices, text)
    return text[:size].tobytes().decode("ascii")
