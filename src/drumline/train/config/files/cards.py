"""The memory of a card: one with a name, or of a size that is written out."""

from __future__ import annotations

import re

from drumline.core.errors import UsageError, nearest
from drumline.core.units import size_text
from drumline.plan.cluster.hardware import MACHINES

_LEAST = 10**6  # bytes: a bare number such as 3090 is no size
_UNITS = {"": 1, "GB": 10**9, "MB": 10**6, "GIB": 2**30, "MIB": 2**20}
_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-zA-Z]*)")


def card_named(name: str) -> tuple[str, float]:
    """Return what a card is called, and its memory in bytes.

    >>> card_named("rtx-4090"), card_named("16GiB")
    (('RTX 4090', 25769803776.0), ('a card of 16 GiB', 17179869184.0))
    >>> card_named("rtx-4091")
    Traceback (most recent call last):
    drumline.core.errors.UsageError: memory.card is 'rtx-4091'; expected ...; did you mean rtx-4090?
    """
    machine = MACHINES.get(name.lower())
    if machine is not None:
        return machine.device.name, float(machine.device.memory_bytes)
    size = _SIZE.fullmatch(name.strip())
    num_bytes = float(size[1]) * _UNITS.get(size[2].upper(), 0) if size is not None else 0.0
    if num_bytes >= _LEAST:
        return f"a card of {size_text(round(num_bytes))}", num_bytes
    raise UsageError(
        f"memory.card is {name[:60]!r}",
        expected=f"{', '.join(MACHINES)}, or a size like 24GiB",
        fix=nearest(name[:60], MACHINES),
    )
