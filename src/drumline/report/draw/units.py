"""Numbers for people: seconds, bytes, shares, and how large a program is."""

from __future__ import annotations

from drumline.core.errors import counted
from drumline.core.measured.endless import num_begun
from drumline.core.program import Program
from drumline.core.units import duration, ms, number, percent, size_text

__all__ = ["counts", "duration", "ms", "number", "percent", "size_text"]


def counts(program: Program) -> str:
    """Return the size of a program in words.

    >>> counts(Program.parse("0F0,0B0"))
    '1 rank, 1 stage, 1 microbatch'
    """
    numbers = ((program.num_ranks, "rank"), (program.num_stages, "stage"), (num_begun(program), "microbatch"))
    return ", ".join(counted(count, word) for count, word in numbers)
