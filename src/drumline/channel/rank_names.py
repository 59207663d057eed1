"""How messages call the ranks of a pipeline: by number, and on a mesh also by their place in it; and a mesh itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankNames:
    """The numbers of a pipeline's ranks among all processes, and their places; without any, ranks go by number.

    A pipeline counts its own ranks. On a mesh, its rank 1 may be process 3 of 4:

    >>> line = RankNames((1, 3), ("pp 0, dp 1", "pp 1, dp 1"))
    >>> line.rank(1), line.number(1), line.several(0, 1)
    ('rank 3 (pp 1, dp 1)', 3, 'rank 1 (pp 0, dp 1) and rank 3 (pp 1, dp 1)')
    >>> RankNames().rank(1), RankNames().several(0, 1), RankNames().several(2)
    ('rank 1', 'ranks 0 and 1', 'rank 2')
    """

    ranks: tuple[int, ...] = ()
    places: tuple[str, ...] = ()

    def number(self, at: int) -> int:
        """Return the number, among all processes, of the rank at this place of the pipeline."""
        return self.ranks[at] if self.ranks else at

    def rank(self, at: int) -> str:
        """Return what a rank of the pipeline is called."""
        return f"rank {self.ranks[at]} ({self.places[at]})" if self.ranks else f"rank {at}"

    def several(self, *ats: int) -> str:
        """Return what ranks of the pipeline are called together."""
        if len(ats) == 1:
            return self.rank(ats[0])
        words = [self.rank(at) for at in ats] if self.ranks else [str(at) for at in ats]
        listed = f"{', '.join(words[:-1])} and {words[-1]}"
        return listed if self.ranks else f"ranks {listed}"

    def listed(self, ats: Sequence[int]) -> str:
        """Return the same as it stands behind a preposition: "rank 0, 2".

        >>> RankNames().listed([0, 2])
        'rank 0, 2'
        """
        return ", ".join(self.rank(at) for at in ats) if self.ranks else f"rank {', '.join(map(str, ats))}"


BY_NUMBER = RankNames()


def mesh_shown(sizes: Mapping[str, int]) -> str:
    """Return a mesh as people write it.

    >>> mesh_shown({"pp": 2, "dp": 4})
    'pp2 x dp4'
    """
    return " x ".join(f"{name}{size}" for name, size in sizes.items())
