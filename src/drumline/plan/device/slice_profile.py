"""What slices of a sequence take on a device: seconds by where they begin and end, and the curve that fits them.

::

    1 |---------------------------|      measured: F and B of all of these, whole model, one microbatch
    2 |-------------|-------------|      fitted:   fixed + tokens x per_token + pairs x per_pair
    4 |------|------|------|------|
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

    @cached_property
    def curve(self) -> SliceCurve:
        """The seconds of F and B of a slice, in all blocks."""
        return fitted_curve([(each.start, each.end, each.seconds) for each in self.slices])

    @property
    def attention(self) -> float:
        """The part of a whole sequence's seconds that grows with pairs of queries and keys."""
        whole = self.curve.at(0, self.tokens)
        return self.curve.per_pair * self.tokens**2 / 2 / whole if whole else 0.0

    @property
    def shortest(self) -> int:
        """The shortest slice that was measured: of shorter ones nothing is known."""
        return min(each.end - each.start for each in self.slices)

    def factors(self, lengths: Sequence[int], *, more: float = 0.0) -> tuple[float, ...]:
        """Return what slices take, as parts of the whole sequence; `more` seconds are of each action, however short."""
        ends = [0, *accumulate(lengths)]
        whole = self.curve.at(0, self.tokens) + more
        return tuple((self.curve.at(start, end) + more) / whole for start, end in pairwise(ends))

    def to_json(self) -> dict[str, Any]:
        """Return the object of a profile's file."""
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "key_value_bytes": self.key_value_bytes,
            "slices": [asdict(each) for each in self.slices],
        }

    @staticmethod
    def from_json(table: Parsed) -> SliceProfile:
        """Read the object that `to_json` returned.

        >>> from drumline.core.files import FileKind
        >>> profile = SliceProfile(1, 8, (TimedSlice(0, 8, 1.0, 2.0),))
        >>> SliceProfile.from_json(Parsed(profile.to_json(), FileKind("profile", PlanError, "a profile"))) == profile
        True
        """
        table.only(("rows", "tokens", "key_value_bytes", "slices"))
        timed = []
        tokens = table["tokens"].whole(1)
        for entry in table["slices"].each():
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
        return SliceProfile(table["rows"].whole(1), tokens, tuple(timed), float(table["key_value_bytes"].number()))
