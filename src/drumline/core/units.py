"""Numbers as a person writes them: plain digits, a unit that suits, and nothing for what is only rounding.

Every text and page takes them from here, the command line's, the plans' and the errors' alike.
"""

from __future__ import annotations

import math

_NOISE = 1e-12  # below this, a number that stands for something is the rest of a subtraction
_PLAIN = 1e-6  # below this, zeros behind the point are harder to count than an exponent is to read
_GROUPED = 10_000  # from here on digits come in groups


def number(value: float, digits: int = 6) -> str:
    """Return a number with so many significant digits, without an exponent; the whole part keeps all of its digits.

    >>> number(33.0), number(0.00052), number(2500), number(16777216), number(1 / 3, 4), number(2.8e-17)
    ('33', '0.00052', '2500', '16,777,216', '0.3333', '0')
    """
    if not math.isfinite(value):
        return f"{value}"
    if abs(value) < _NOISE:
        return "0"
    if abs(value) < _PLAIN:
        mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
    places = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    rounded = round(value, places)
    text = f"{rounded:,.{places}f}" if abs(rounded) >= _GROUPED else f"{rounded:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def duration(seconds: float, digits: int = 3, *, micro: str = "us") -> str:
    """Return seconds with the unit that suits; less than half a nanosecond is nothing.

    >>> duration(0.00123), duration(2.5), duration(4.2e-5), duration(0.9999), duration(5.6e-17)
    ('1.23 ms', '2.5 s', '42 us', '1000 ms', '0 s')
    >>> duration(4.2e-5, micro="µs"), duration(4e-7), duration(0.0412, 2)
    ('42 µs', '400 ns', '41 ms')
    """
    if abs(seconds) < 5e-10:
        return "0 s"
    units = (("s", 1.0), ("ms", 1e-3), (micro, 1e-6), ("ns", 1e-9))
    unit, size = next((pair for pair in units if abs(seconds) >= pair[1]), units[-1])
    return f"{number(seconds / size, digits)} {unit}"


def ms(seconds: float) -> str:
    """Return seconds as milliseconds, whatever their size: several of them stand beside each other.

    >>> ms(2.5), ms(0.00123)
    ('2500 ms', '1.23 ms')
    """
    return f"{number(seconds * 1e3, 3)} ms"


def size_text(num_bytes: float) -> str:
    """Return bytes with the unit that suits.

    >>> size_text(512), size_text(3.25 * 2**30), size_text(1023.7 * 2**20)
    ('512 B', '3.25 GiB', '1024 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{number(num_bytes, 3)} {unit}"
        num_bytes /= 1024
    return f"{number(num_bytes, 4)} TiB"


def percent(share: float) -> str:
    """Return a share with one decimal, never minus zero.

    >>> percent(0.1234), percent(-0.0001)
    ('12.3%', '0.0%')
    """
    return f"{round(share, 3) + 0.0:.1%}"
