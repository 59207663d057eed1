"""Reading a checkpoint back: each process reads its own tensors, whatever ranks and cut wrote them.

All processes look whether what they need is whole before any takes it in. Where one finds damage, all turn to the
checkpoint before, and rank 0 says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from drumline.core.errors import DrumlineError, MismatchError, RecordError
from drumline.features.saving.manifest import read_manifest
from drumline.features.saving.staged import checksum
from drumline.model.weights.files import Stored, Weights


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded: the step that training goes on with, the user's `extra`, and what was passed over as damaged."""

    path: Path
    step: int
    extra: Any = None
    skipped: tuple[str, ...] = field(default=())


class Tensors(Mapping[str, Tensor]):
    """The tensors of one kind of a checkpoint's files; reading one compares it with its checksum."""

    def __init__(self, checkpoint: Path, content: Mapping[str, Any], kind: str) -> None:
        self._checksums: dict[str, int] = {}
        self._stored: dict[str, Stored] = {}
        for file, checksums in content["tensors"].items():
            if file.startswith(f"{kind}-"):
                inside = Weights(checkpoint / file).tensors if checksums else {}
                for name, one in checksums.items():
                    if name not in inside:
                        raise RecordError(f"{checkpoint / file} lacks {name!r}, which the manifest names")
                    self._stored[name], self._checksums[name] = inside[name], one

    def __getitem__(self, name: str) -> Tensor:
        read = self._stored[name].read()
        if checksum(read) != self._checksums[name]:
            raise RecordError(f"{self._stored[name]} is damaged: its checksum differs", fix="use another checkpoint")
        return read

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, name: object) -> bool:
        return name in self._stored


class Checkpoint:
    """A checkpoint on disk, opened; damage raises RecordError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = read_manifest(path)

    @cached_property
    def model(self) -> Tensors:
        """Parameters and buffers."""
        return Tensors(self.path, self.content, "model")

    @cached_property
    def training(self) -> Tensors:
        """Optimizer state, masters and generators."""
        return Tensors(self.path, self.content, "training")


def is_intact(path: Path) -> bool:
    """Whether every tensor of a checkpoint has its checksum; reads all of it."""
    try:
        checkpoint = Checkpoint(path)
        return all(kind[name] is not None for kind in (checkpoint.model, checkpoint.training) for name in kind)
    except (DrumlineError, OSError):
        return False


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
