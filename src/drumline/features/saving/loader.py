"""What ranks agree on before they read a checkpoint: each reads its own tensors, whatever ranks and cut wrote them.

All processes look whether what they need is whole before any takes it in. Where one finds damage, all turn to the
checkpoint before, and rank 0 says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from drumline.core.errors import DrumlineError, MismatchError


def damage(error: BaseException) -> str:
    """Return what is wrong with a checkpoint; raise what is no damage."""
    if not isinstance(error, DrumlineError | OSError):
        raise error
    return str(error)


def agreed_paths(told: Sequence[Sequence[Sequence[str]]]) -> tuple[list[Path], list[Path]]:
    """Return what process 0 has chosen among its checkpoints, and left; all others must see the same ones.

    Each process tells which it sees; the first also which to load, in order, and which were left.

    >>> agreed_paths([[["run/2", "run/1"], ["run/1"], ["run/2"]], [["run/2", "run/1"], [], []]])
    ([PosixPath('run/1')], [PosixPath('run/2')])
    """
    seen, chosen, left = told[0]
    for rank, (its, _, _) in enumerate(told):
        if list(its) != list(seen):
            raise MismatchError(
                f"rank {rank} finds {len(its)} checkpoints and rank 0 {len(seen)}",
                expected="a folder that all hosts share",
            )
    return [Path(one) for one in chosen], [Path(one) for one in left]
