"""Points for an MLP, each of a class: from files, or drawn and labelled by a small random network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from drumline.core.errors import UsageError
from drumline.train.config.files.data_files import existing_files
from drumline.train.config.placed import concerning
from drumline.train.data.items.batch import Batch
from drumline.train.data.items.fingerprint import Part
from drumline.train.data.items.order import Indices
from drumline.train.data.layouts import Unit
from drumline.train.models.built import IGNORED


class Points:
    """Points and their classes.

    >>> value = Points.drawn(8, inputs=3, classes=2, seed=0)
    >>> value.num, value.x.shape
    (8, torch.Size([8, 3]))
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.num = x, y, len(x)

    @classmethod
    def drawn(cls, num: int, *, inputs: int, classes: int, seed: int) -> Points:
        """Return random points; the network that labels them is the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        first = torch.randn(inputs, 32, generator=generator) / inputs**0.5
        second = torch.randn(32, classes, generator=generator)
        x = torch.randn(num, inputs, generator=generator)
        return cls(x, (torch.tanh(2 * x @ first) @ second).argmax(1))

    @classmethod
    def of_files(cls, names: Sequence[str], *, inputs: int, classes: int, key: str = "data.files") -> Points:
        """Return the points of `.npy` or `.csv` files: a row has the inputs, and last the class."""
        with concerning(key):
            return cls._of(existing_files(names, key=key), inputs, classes)

    @classmethod
    def _of(cls, paths: Sequence[Path], inputs: int, classes: int) -> Points:
        tables = []
        for path in paths:
            try:
                table = (
                    np.load(path, allow_pickle=False)
                    if path.suffix == ".npy"
                    else np.loadtxt(path, delimiter=",", ndmin=2)
                )
            except (ValueError, OSError, EOFError) as error:
                raise UsageError(f"{path}: {error}"[:200], expected="numbers in rows, as .npy or .csv") from None
            if table.ndim != 2 or table.shape[1] != inputs + 1 or not np.isfinite(table).all():
                raise UsageError(
                    f"{path} holds numbers of the shape {table.shape}",
                    expected=f"finite ones in {inputs + 1} columns: model.inputs, and the class",
                )
            labels = table[:, -1]
            if (labels != np.floor(labels)).any() or labels.min() < 0 or labels.max() >= classes:
                expected = f"whole numbers from 0 to {classes - 1} (model.outputs)"
                raise UsageError(f"{path} has classes from {labels.min():g} to {labels.max():g}", expected=expected)
            tables.append(table)
        table = np.concatenate(tables)
        return cls(torch.tensor(table[:, :-1], dtype=torch.float32), torch.tensor(table[:, -1], dtype=torch.long))

    @property
    def contents(self) -> list[Part]:
        """What tells these points from others."""
        return [Part("the points", self.x.numpy()), Part("the classes", self.y.numpy())]

    def lengths(self, indices: Indices) -> Indices:
        """Return 1 for each."""
        return np.ones(len(indices), dtype=np.int64)

    def split(self, share: float) -> tuple[Points, Points]:
        """Return the points to train on, and the last `share` of them, held out."""
        last = self.num - int(self.num * share)
        return Points(self.x[:last], self.y[:last]), Points(self.x[last:], self.y[last:])

    def batch(self, inputs: str, microbatches: Sequence[Sequence[Unit]]) -> Batch:
        """Return the batch of a rank's microbatches; rows without a point count nothing."""
        rows = [row for microbatch in microbatches for unit in microbatch for row in unit.rows]
        at = torch.tensor([row[0] if row else 0 for row in rows])
        there = torch.tensor([bool(row) for row in rows])
        target = torch.where(there, self.y[at], IGNORED)
        return Batch({inputs: self.x[at]}, target, int(there.sum()), len(rows))
