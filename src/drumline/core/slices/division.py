"""How sequences are divided into slices: into equal ones, or into slices of these lengths.

::

    units    0 1 2 3   4 5 6 7      unit u is slice u % 4 of microbatch u // 4
    slices   0 1 2 3   0 1 2 3
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from drumline.core.errors import BatchError, UsageError


@dataclass(frozen=True, slots=True)
class SliceLengths:
    """So many slices of every sequence: all of one length, unless `lengths` says the length of each.

    >>> SliceLengths.of(4).parts(12), SliceLengths.of([5, 4, 3]).parts(12)
    ((3, 3, 3, 3), (5, 4, 3))
    """

    num_slices: int
    lengths: tuple[int, ...] = ()

    @staticmethod
    def of(slices: int | list[int] | tuple[int, ...]) -> SliceLengths:
        """Return what the option `slices` says.

        >>> SliceLengths.of([5, 0])
        Traceback (most recent call last):
        drumline.core.errors.UsageError: slices is [5, 0]; expected a number of slices, or the tokens of each: ...
        """
        counts = [slices] if isinstance(slices, int) else list(slices)
        least = 1 if isinstance(slices, int) else 2
        if not counts or any(
            isinstance(count, bool) or not isinstance(count, int) or count < least for count in counts
        ):
            raise UsageError(
                f"slices is {slices!r:.80}", expected="a number of slices, or the tokens of each: 2 at least"
            )
        return SliceLengths(counts[0]) if isinstance(slices, int) else SliceLengths(len(counts), tuple(counts))

    def parts(self, length: int) -> tuple[int, ...]:
        """Return the tokens of each slice of a sequence; refuse a length that cannot be divided like this.

        >>> SliceLengths.of(4).parts(10)
        Traceback (most recent call last):
        drumline.core.errors.BatchError: a sequence has 10 tokens for 4 slices; expected a multiple of it, ...
        """
        if self.lengths and sum(self.lengths) == length:
            return self.lengths
        if self.lengths:
            raise BatchError(
                f"a sequence has {length} tokens, and slices of {', '.join(map(str, self.lengths))} have"
                f" {sum(self.lengths)}",
                expected=f"sequences of {sum(self.lengths)} tokens",
                fix="pass slices= as a number if lengths of sequences differ",
            )
        if length % self.num_slices or length < 2 * self.num_slices:
            raise BatchError(
                f"a sequence has {length} tokens for {self.num_slices} slices",
                expected="a multiple of it, and 2 tokens or more in each slice",
                fix="pad the sequences, or choose another number of slices",
            )
        return (length // self.num_slices,) * self.num_slices

    def place(self, unit: int) -> tuple[int, int]:
        """Return the microbatch and the slice of a unit.

        >>> SliceLengths.of(4).place(6)
        (1, 2)
        """
        return divmod(unit, self.num_slices)

    def bounds(self, tokens: int, number: int) -> tuple[int, int, int]:
        """Return where a slice of so many tokens begins and ends, and the length of its sequence.

        >>> SliceLengths.of(4).bounds(3, 2), SliceLengths.of([5, 4, 3]).bounds(4, 1)
        ((6, 9, 12), (5, 9, 12))
        """
        if self.lengths:
            end = list(accumulate(self.lengths))[number]
            return end - tokens, end, sum(self.lengths)
        return number * tokens, (number + 1) * tokens, self.num_slices * tokens
