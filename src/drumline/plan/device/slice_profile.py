"""What slices of a sequence take on a device: seconds by where they begin and end, and the curve that fits them.

::

    1 |---------------------------|      measured: F and B of all of these, one microbatch: the whole model, its blocks
    2 |-------------|-------------|      fitted:   fixed + tokens x per_token + pairs x per_pair
    4 |------|------|------|------|

Blocks differ: an embedding and a head grow with tokens alone, attention with all keys before a slice. So a stage has
the curve of its blocks. Blocks of one kind, such as the layers of a model, share a curve. Profiles without blocks, as
older ones, say the same of all stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from drumline.core.errors import PlanError
from drumline.core.parsed import Parsed
from drumline.core.slices.curve import SliceCurve, fitted_curve

FIELDS = ("start", "end", "forward", "backward")


@dataclass(frozen=True, slots=True)
class TimedSlice:
    """A slice of one microbatch: where it begins and ends, and the seconds of its F and B in all blocks."""

    start: int
    end: int
    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        """Of both."""
        return self.forward + self.backward


@dataclass(frozen=True)
class SliceProfile:
    """Slices of sequences of `tokens`, in microbatches of `rows`; the keys and values of one microbatch take bytes.

    >>> timed = [TimedSlice(0, 8, 4.0, 8.0), TimedSlice(0, 4, 1.5, 3.0), TimedSlice(4, 8, 2.5, 5.0)]
    >>> profile = SliceProfile(1, 8, tuple(timed), 64.0)
    >>> round(profile.attention, 3), [round(part, 3) for part in profile.factors((4, 4))]
    (0.5, [0.375, 0.625])
    """

    rows: int
    tokens: int
    slices: tuple[TimedSlice, ...]
    key_value_bytes: float = 0.0
    blocks: tuple[int, ...] = ()  # the kind of each block
    kinds: tuple[tuple[TimedSlice, ...], ...] = ()  # what slices of a block of each kind take, as a stage of its own

    @cached_property
    def curve(self) -> SliceCurve:
        """The seconds of F and B of a slice, in all blocks."""
        return _fitted(self.slices)

    @cached_property
    def _curves(self) -> list[SliceCurve]:
        """The curve of each block, as a stage of its own."""
        each = list(map(_fitted, self.kinds))
        return [each[kind] for kind in self.blocks]

    @cached_property
    def _call(self) -> float:
        """What calling a stage takes in a slice: one stage of all blocks pays it once, as do stages of one block."""
        more = sum(curve.fixed for curve in self._curves) - self.curve.fixed
        return max(more / max(len(self.blocks) - 1, 1), 0.0)

    def knows_blocks(self, counts: Sequence[int]) -> bool:
        """Whether all blocks of these stages were measured by slice length."""
        return len(self.blocks) == sum(counts)

    def stage_curves(self, counts: Sequence[int]) -> list[SliceCurve]:
        """Return the seconds of F and B of a slice in stages of so many blocks, which were measured.

        >>> kinds = (TimedSlice(0, 8, 1.0, 2.0), TimedSlice(0, 4, 0.5, 1.0)), (TimedSlice(0, 8, 3.0, 6.0),)
        >>> profile = SliceProfile(1, 8, (TimedSlice(0, 8, 4.0, 8.0), TimedSlice(0, 4, 2.0, 4.0)), 0.0, (0, 1), kinds)
        >>> [round(curve.at(0, 8), 6) for curve in profile.stage_curves((1, 1))]
        [3.0, 9.0]
        """
        ends = [0, *accumulate(counts)]
        curves = []
        for first, end in pairwise(ends):
            curve = sum(self._curves[first:end], SliceCurve())
            fixed = max(curve.fixed - (end - first - 1) * self._call, 0.0)
            curves.append(SliceCurve(fixed, curve.per_token, curve.per_pair))
        return curves

    @property
    def attention(self) -> float:
        """The part of a whole sequence's seconds that grows with pairs of queries and keys."""
        whole = self.curve.at(0, self.tokens)
        return self.curve.per_pair * self.tokens**2 / 2 / whole if whole else 0.0

    @property
    def shortest(self) -> int:
        """The shortest slice that was measured: of shorter ones nothing is known."""
        return min(each.end - each.start for each in self.slices)

    def factors(
        self, lengths: Sequence[int], *, more: float = 0.0, curve: SliceCurve | None = None
    ) -> tuple[float, ...]:
        """Return what slices take, as parts of the whole sequence; `more` seconds are of each action, however short.

        `curve` is that of a stage (default: of the whole model).
        """
        ends, known = [0, *accumulate(lengths)], curve or self.curve
        whole = known.at(0, self.tokens) + more
        return tuple((known.at(start, end) + more) / whole for start, end in pairwise(ends))

    def to_json(self) -> dict[str, Any]:
        """Return the object of a profile's file."""
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "key_value_bytes": self.key_value_bytes,
            "slices": [asdict(each) for each in self.slices],
            **({"blocks": list(self.blocks)} if self.blocks else {}),
            **({"kinds": [[asdict(each) for each in kind] for kind in self.kinds]} if self.blocks else {}),
        }

    @staticmethod
    def from_json(table: Parsed) -> SliceProfile:
        """Read the object that `to_json` returned.

        >>> from drumline.core.files import FileKind
        >>> profile = SliceProfile(1, 8, (TimedSlice(0, 8, 1.0, 2.0),))
        >>> SliceProfile.from_json(Parsed(profile.to_json(), FileKind("profile", PlanError, "a profile"))) == profile
        True
        """
        table.only(("rows", "tokens", "key_value_bytes", "slices", "blocks", "kinds"))
        tokens = table["tokens"].whole(1)
        blocks, listed = table.get("blocks"), table.get("kinds")
        kinds = () if listed is None else tuple(_timed_from(kind, tokens) for kind in listed.each())
        numbers = () if blocks is None else tuple(entry.whole() for entry in blocks.each())
        if any(number >= len(kinds) for number in numbers):
            raise PlanError(
                f"a block of kind {max(numbers)}", expected=f"one of {len(kinds)} kinds", fix="measure it again"
            )
        bytes_of_one = float(table["key_value_bytes"].number())
        return SliceProfile(
            table["rows"].whole(1), tokens, _timed_from(table["slices"], tokens), bytes_of_one, numbers, kinds
        )


def _fitted(slices: Sequence[TimedSlice]) -> SliceCurve:
    return fitted_curve([(each.start, each.end, each.seconds) for each in slices])


def _timed_from(table: Parsed, tokens: int) -> tuple[TimedSlice, ...]:
    timed = []
    for entry in table.each():
        entry.only(FIELDS)
        start, end = entry["start"].whole(), entry["end"].whole(1)
        if not start < end <= tokens:
            raise PlanError(
                f"a slice from {start} to {end} of {tokens} tokens",
                expected="an end after its start, in the sequence",
            )
        timed.append(TimedSlice(start, end, entry["forward"].number(), entry["backward"].number()))
    if not timed:
        raise PlanError("the profile has no slices", expected="one or more", fix="measure it again")
    return tuple(timed)
