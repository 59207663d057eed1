"""The position in the data as a checkpoint keeps it: one for all data-parallel ranks, or one of each.

Streams of Drumline's own have the same position everywhere. What a user's function gives may draw or count differently
on every data-parallel rank.
"""

from __future__ import annotations

from typing import Any

from drumline.checkpoint.plain_json import packed, unpacked
from drumline.core.errors import UsageError, counted
from drumline.pipeline.pipeline import Pipeline
from drumline.train.data.items.batch import BatchStream

_PARTS = "of_every_part"


def position_of(stream: BatchStream, pipe: Pipeline) -> dict[str, Any]:
    """Return the position of a stream on all data-parallel ranks; every rank calls it."""
    own_entries, (number, count) = stream.state_dict(), pipe.axes.rows
    if count == 1 or getattr(stream, "is_alike", False):
        return own_entries
    positions = dict(pipe.gather((number, packed(own_entries, "state"))))
    parts = [positions[at] for at in range(count)]
    return own_entries if all(part == parts[0] for part in parts) else {_PARTS: [unpacked(part) for part in parts]}


def own_position(saved: dict[str, Any], number: int, count: int) -> dict[str, Any]:
    """Return the part of a position that belongs to data-parallel rank `number` of `count`.

    >>> own_position({"epoch": 1}, 1, 2), own_position({"of_every_part": [{"epoch": 1}, {"epoch": 2}]}, 1, 2)
    ({'epoch': 1}, {'epoch': 2})
    >>> own_position({"of_every_part": [{"epoch": 1}, {"epoch": 2}]}, 0, 4)
    Traceback (most recent call last):
    drumline.core.errors.UsageError: the position in the data is that of 2 data-parallel ranks, and there are 4; ...
    """
    parts = saved.get(_PARTS)
    if parts is None:
        return saved
    if len(parts) != count:
        raise UsageError(
            f"the position in the data is that of {counted(len(parts), 'data-parallel rank')}, and there are {count}",
            expected="as many as before: each has its own data from data.function",
            fix=f"set mesh.data = {len(parts)}",
        )
    part: dict[str, Any] = parts[number]
    return part
