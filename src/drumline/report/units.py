"""Numbers for people: seconds, bytes, shares, counts."""

from __future__ import annotations

from drumline.core.errors import counted
from drumline.core.program import Program


def duration(seconds: float) -> str:
    """Format seconds for people.

    >>> duration(0.00123), duration(2.5), duration(4.2e-5)
    ('1.23 ms', '2.5 s', '42 us')
    """
    if seconds == 0:
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def ms(seconds: float) -> str:
    """Format seconds as milliseconds, whatever their size, for numbers that are compared.

    >>> ms(2.5)
    '2.5e+03 ms'
    """
    return f"{seconds * 1e3:.3g} ms"


def size_text(num_bytes: float) -> str:
    """Format a size for people.

    >>> size_text(512), size_text(3.25 * 2**30)
    ('512 B', '3.25 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def percent(share: float) -> str:
    """Format a share with one decimal, never minus zero.

    >>> percent(0.1234), percent(-0.0001)
    ('12.3%', '0.0%')
    """
    return f"{round(share, 3) + 0.0:.1%}"


def counts(program: Program) -> str:
    """Return the size of a program in words.

    >>> counts(Program.parse("0F0,0B0"))
    '1 rank, 1 stage, 1 microbatch'
    """
    numbers = ((program.num_ranks, "rank"), (program.num_stages, "stage"), (program.num_microbatches, "microbatch"))
    return ", ".join(counted(number, word) for number, word in numbers)
