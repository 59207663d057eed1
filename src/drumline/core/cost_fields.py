"""What each field of `Costs` accepts: one number, or a list with one number per stage, microbatch or slice.

    one number           comm, bytes_per_second; overlap is true or false; edges lists links
    one per stage        seconds and bytes of stages, message_bytes of the boundary after each, recompute as flags
    one per microbatch   microbatch_factor
    one per slice        slice_lengths, slice_factor; the latter also as one list per stage

Any other list raises an error, because it would be read as something its author did not mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from drumline.core.errors import CostsError
from drumline.core.parsed import LARGEST


class FieldShape(NamedTuple):
    """What a field accepts; `each` is "stage", "microbatch" or "slice" if it also accepts a list with one value each.

    `parted` marks fields that are divided when a stage is cut into equal parts: each part gets its share. A `staged`
    field also accepts one such list per stage.
    """

    each: str = ""
    parted: bool = False
    optional: bool = False
    infinite: bool = False
    flag: bool = False
    staged: bool = False

    @property
    def expected(self) -> str:
        """What the field accepts, in words."""
        name = "true or false" if self.flag else "a number"
        return f"{name}, or one per {self.each}{' of each stage' * self.staged}" if self.each else name


# Metadata shared by fields of `Costs` that accept the same values.
STAGE, OPTIONAL, WHOLE = (
    {"shape": FieldShape("stage", parted=parted, optional=optional)}
    for parted, optional in ((True, False), (True, True), (False, False))
)


def is_list(value: object) -> bool:
    """Whether a value is a list of values; text and bytes are not."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def check_field(name: str, value: Any, shape: FieldShape) -> None:
    """Raise an error if the value does not have the shape that the field accepts.

    >>> check_field("comm", [0, 0.5], FieldShape())
    Traceback (most recent call last):
    drumline.core.errors.CostsError: comm is a list; expected a number; use edges to set individual links
    """
    if value is None and shape.optional:
        return
    if not is_list(value):
        _check_value(name, value, shape)
        return
    if not shape.each:
        links = name in ("comm", "bytes_per_second")
        raise CostsError(
            f"{name} is a list", expected=shape.expected, fix="use edges to set individual links" if links else ""
        )
    if not value:
        raise CostsError(f"{name} is an empty list", expected=shape.expected)
    if shape.staged and is_list(value[0]):
        if not all(is_list(item) and len(item) == len(value[0]) for item in value):
            raise CostsError(f"{name} has lists of several lengths", expected=shape.expected)
        for item in value:
            check_field(name, item, shape._replace(staged=False))
        return
    for item in value:
        _check_value(name, item, shape)


def _check_value(name: str, value: Any, shape: FieldShape) -> None:
    if shape.flag:
        if not isinstance(value, bool):
            raise CostsError(f"{name} is {_shown(value)}", expected=shape.expected)
    else:
        check_number(name, value, shape.expected, infinite=shape.infinite)


def check_number(name: str, value: Any, expected: str = "a number", *, infinite: bool = False) -> None:
    """Raise an error unless the value is a non-negative, finite number that is not too large.

    >>> check_number("latency", float("nan"))
    Traceback (most recent call last):
    drumline.core.errors.CostsError: latency is nan; expected a number from 0 to 1e+100
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CostsError(f"{name} is {_shown(value)}", expected=expected)
    if not 0 <= value <= LARGEST and not (infinite and value == math.inf):
        raise CostsError(f"{name} is {_shown(value)}", expected=f"a number from 0 to {LARGEST:g}")


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) > LARGEST:  # Python refuses to print very long integers
        return "an integer with more than 100 digits"
    return f"{value:g}" if isinstance(value, float) else f"{value!r:.60}"


def check_edges(edges: Any, kind: type) -> None:
    """Raise an error unless edges maps pairs of different ranks to links of `kind`.

    >>> check_edges({(0, 0): None}, type(None))
    Traceback (most recent call last):
    drumline.core.errors.CostsError: edges has a link 0->0; expected two different ranks
    """
    if not isinstance(edges, Mapping):
        raise CostsError(f"edges is {edges!r:.60}", expected="a dict from (source rank, target rank) to a link")
    for ends, edge in edges.items():
        pair = ends if isinstance(ends, tuple) and len(ends) == 2 else ()
        if not pair or not all(isinstance(end, int) and not isinstance(end, bool) and end >= 0 for end in pair):
            raise CostsError(f"edges has the key {ends!r:.60}", expected="a pair of ranks, counted from 0")
        if not isinstance(edge, kind):
            raise CostsError(f"edges has the value {edge!r:.60}", expected=f"an {kind.__name__} for each pair of ranks")
        if pair[0] == pair[1]:
            raise CostsError(f"edges has a link {pair[0]}->{pair[1]}", expected="two different ranks")
