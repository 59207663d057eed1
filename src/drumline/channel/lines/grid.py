"""A mesh as a grid of ranks: the names and sizes of its axes, and where each rank stands.

    mesh={"pp": 2, "dp": 2}           dp 0      dp 1
                               pp 0   rank 0    rank 1     one column is a line: its own pipeline
                               pp 1   rank 2    rank 3     one row holds the same stages

    pp   stages            the ranks of a line pass microbatches on
    dp   batches           lines get different rows, and sum their gradients
    cp   sequences         lines get different parts of the same rows, and sum their gradients
    ep   experts           lines get different rows; each holds some of the experts
    tp   matrices          lines get the same rows; each holds a part of every matrix

Without a mesh, all ranks form one line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from drumline.channel.rank_names import RankNames
from drumline.core.errors import UsageError, nearest

AXES = ("pp", "dp", "cp", "ep", "tp")  # from the outermost to the innermost, unless a mesh says otherwise
DATA = ("dp", "cp", "ep")  # lines along these axes see different tokens, so their gradients are summed
ROWS = ("dp", "ep")  # lines along these axes get different rows of the batch
_EXPECTED = 'a dict such as {"pp": 2, "dp": 2}, or a DeviceMesh whose dimensions have such names'


class Grid:
    """The ranks of all processes by their places along the axes, and the place of one of them.

    >>> grid = Grid(np.arange(4), ("pp",), 1)
    >>> grid.line, grid.place("pp"), grid.size("dp"), grid.rows
    ([0, 1, 2, 3], 1, 1, (0, 1))
    """

    def __init__(self, ranks: np.ndarray[Any, Any], names: Sequence[str], rank: int) -> None:
        self.names, self.rank = tuple(names), rank
        self._ranks = ranks
        self._at = dict(zip(names, (int(array[0]) for array in np.nonzero(ranks == rank)), strict=True))
        self._sizes = dict(zip(names, ranks.shape, strict=True))

    @cached_property
    def is_mesh(self) -> bool:
        """Whether there are several lines."""
        return self.num_lines > 1

    @property
    def num_lines(self) -> int:
        """The number of lines, each its own pipeline."""
        return self._ranks.size // self.size("pp")

    def size(self, *names: str) -> int:
        """Return the size of an axis, 1 if the mesh lacks it; of several, their product."""
        return math.prod(self._sizes.get(name, 1) for name in names)

    def place(self, *names: str) -> int:
        """Return this process's place along an axis; along several, its number among their combinations.

        >>> grid = Grid(np.arange(8).reshape(2, 2, 2), ("pp", "dp", "tp"), 7)
        >>> grid.place("dp"), grid.place("dp", "tp"), grid.line
        (1, 3, [3, 7])
        """
        at = 0
        for name in names:
            at = at * self.size(name) + self._at.get(name, 0)
        return at

    @cached_property
    def rows(self) -> tuple[int, int]:
        """Which part of the batch's rows this line gets: its number, and how many parts there are."""
        return self.place(*ROWS), self.size(*ROWS)

    @cached_property
    def tokens(self) -> int:
        """The number of this line among those that see other tokens: other rows, or other parts of sequences."""
        return self.rows[0] + self.place("cp") * self.rows[1]

    @property
    def line(self) -> list[int]:
        """The ranks of this process's line, by their place in the pipeline."""
        return self._members({"pp"})

    @property
    def lines(self) -> list[list[int]]:
        """The ranks of every line, in order."""
        moved = np.moveaxis(self._ranks, self.names.index("pp"), -1)
        return [[int(rank) for rank in line] for line in moved.reshape(-1, self.size("pp"))]

    @property
    def number(self) -> int:
        """The number of this process's line; line 0 writes what one of them must write."""
        return self.place(*(name for name in self.names if name != "pp"))

    def members(self, *names: str) -> list[int]:
        """Return the ranks that differ from this one only along these axes, this one included."""
        return self._members(set(names))

    def _members(self, free: set[str]) -> list[int]:
        ranks = self._ranks[tuple(slice(None) if name in free else self._at[name] for name in self.names)]
        return [int(rank) for rank in ranks.reshape(-1)]

    def described(self) -> str:
        """Return this process's place in words.

        >>> Grid(np.arange(4).reshape(2, 2), ("pp", "dp"), 3).described()
        'rank 3 (pp 1, dp 1)'
        """
        return self.named(self.rank)

    def named(self, rank: int) -> str:
        """Return what messages call a rank of the mesh: its number and its place; its number alone without a mesh.

        >>> Grid(np.arange(4).reshape(2, 2), ("pp", "dp"), 3).named(1)
        'rank 1 (pp 0, dp 1)'
        """
        return f"rank {rank} ({self._placed(rank)})" if self.is_mesh else f"rank {rank}"

    def _placed(self, rank: int) -> str:
        places = (int(array[0]) for array in np.nonzero(self._ranks == rank))
        pairs = zip(self.names, places, strict=True)
        return ", ".join(f"{name} {at}" for name, at in pairs if name == "pp" or self._sizes[name] > 1)

    @cached_property
    def naming(self) -> RankNames:
        """What messages call the ranks of this process's line."""
        if not self.is_mesh:
            return RankNames()
        return RankNames(tuple(self.line), tuple(map(self._placed, self.line)))


def described(mesh: Any) -> tuple[dict[str, int], list[int] | None]:
    """Return the sizes of a mesh by axis, and its ranks if it lists them.

    >>> described({"pp": 2, "dp": 4})
    ({'pp': 2, 'dp': 4}, None)
    >>> described({"pp": 2, "data": 4})
    Traceback (most recent call last):
    drumline.core.errors.UsageError: the mesh has an axis 'data'; expected pp, dp, cp, ep or tp; ...
    """
    ranks: list[int] | None = None
    if isinstance(mesh, Mapping):
        axes = list(mesh.items())
    elif isinstance(getattr(mesh, "mesh", None), Tensor):
        if mesh.mesh_dim_names is None:
            raise UsageError("the DeviceMesh has no mesh_dim_names", expected="names among pp, dp, cp, ep and tp")
        axes = list(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))
        ranks = [int(rank) for rank in mesh.mesh.reshape(-1).tolist()]
    else:
        raise UsageError(f"mesh is {mesh!r:.60}", expected=_EXPECTED)
    sizes: dict[str, int] = {}
    for name, size in axes:
        if name not in AXES:
            fix = nearest(str(name), AXES)
            raise UsageError(f"the mesh has an axis {name!r}", expected="pp, dp, cp, ep or tp", fix=fix)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise UsageError(f"the mesh's axis {name} is {size!r}", expected="an integer of at least 1")
        sizes[name] = size
    if "pp" not in sizes:
        sizes = {"pp": 1, **sizes}
    if ranks is None:
        sizes = {name: sizes[name] for name in AXES if name in sizes}
    return sizes, ranks
