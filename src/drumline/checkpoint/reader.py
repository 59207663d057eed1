"""A checkpoint that is read: its manifest at once, its tensors one by one, each compared with its checksum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from drumline.checkpoint.manifest import read_manifest
from drumline.checkpoint.staging import checksum
from drumline.core.errors import DrumlineError, RecordError
from drumline.model.weights.files import StoredTensor, Weights


class Tensors(Mapping[str, Tensor]):
    """The tensors of one kind of a checkpoint's files; reading one compares it with its checksum."""

    def __init__(self, checkpoint: Path, content: Mapping[str, Any], kind: str) -> None:
        self._checksums: dict[str, int] = {}
        self._stored: dict[str, StoredTensor] = {}
        for file, checksums in content["tensors"].items():
            if file.startswith(f"{kind}-"):
                inside = Weights(checkpoint / file).tensors if checksums else {}
                for name, digest in checksums.items():
                    if name not in inside:
                        raise RecordError(f"{checkpoint / file} lacks {name!r}, which the manifest names")
                    self._stored[name], self._checksums[name] = inside[name], digest

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
