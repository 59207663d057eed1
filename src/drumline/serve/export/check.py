"""Hold the exported stages against PyTorch: whole batches, and each row alone, since a service batches as it likes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from drumline.core.errors import ModelError
from drumline.serve.export.onnx_chain import Example
from drumline.serve.export.whole import OrderedModel
from drumline.serve.session import open_session
from drumline.serve.wire.manifest import ManifestStage
from drumline.serve.wire.tensors import Array, Arrays

TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Subject:
    """What is exported: a model in eval mode on the CPU, examples of its inputs, and how long they may be."""

    name: str
    model: nn.Module
    example: Example
    most: Mapping[str, int]  # the largest size of dimensions that have one


@dataclass(frozen=True, slots=True)
class ExportCheck:
    """How far the chain of graphs is from PyTorch, over several sizes: whole batches, and each row alone."""

    sizes: tuple[tuple[int, int], ...]
    largest_difference: float
    largest_value: float
    rows_alone: float  # the largest difference if each row is computed alone

    @property
    def relative(self) -> float:
        """The largest difference over the largest value."""
        return self._relative(self.largest_difference)

    def _relative(self, difference: float) -> float:
        return difference / self.largest_value if self.largest_value else difference

    def refuse_wrong(self) -> None:
        """Raise ModelError if the stages compute something else than PyTorch.

        >>> ExportCheck(((2, 1),), 0.0, 1.0, 0.5).refuse_wrong()
        Traceback (most recent call last):
        drumline.core.errors.ModelError: a row alone gives other outputs than in a batch, by 0.5 of the largest ...
        """
        if self.relative > TOLERANCE:
            raise ModelError(
                f"the exported stages differ from PyTorch by {self.relative:.3g} of the largest output",
                expected=f"{TOLERANCE:g} or less",
                fix="look for random numbers in forward, or for sums that float32 cannot hold; nothing was written",
            )
        if (alone := self._relative(self.rows_alone)) > TOLERANCE:
            raise ModelError(
                f"a row alone gives other outputs than in a batch, by {alone:.3g} of the largest output",
                expected="outputs of a row that depend on that row alone: a service computes rows of several requests "
                "together",
                fix="leave out what mixes rows, such as a mean over the batch; nothing was written",
            )

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as an object."""
        return {
            "sizes": [list(size) for size in self.sizes],
            "largest_difference": self.largest_difference,
            "largest_value": self.largest_value,
            "relative": self.relative,
            "rows_alone": self.rows_alone,
            "tolerance": TOLERANCE,
        }


def check_stages(
    subject: Subject, folder: Path, stages: Sequence[ManifestStage], sizes: Sequence[tuple[int, int]]
) -> ExportCheck:
    """Return how far the stages, one after the other, are from the whole model in PyTorch, at several sizes."""
    difference = value = alone = 0.0
    sessions = [open_session(folder / stage.file) for stage in stages]
    for size in sizes:
        inputs = subject.example(*size)
        wanted = plain_outputs(subject.model, inputs)
        arrays: Arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
        difference = max(difference, largest_difference(_computed(stages, sessions, arrays), wanted))
        value = max(
            value, *(float(np.abs(array[np.isfinite(array)].astype(np.float64)).max(initial=0.0)) for array in wanted)
        )
        for row in range(size[0]):
            part = {name: array[row : row + 1] for name, array in arrays.items()}
            right = [array[row : row + 1] for array in wanted]
            alone = max(alone, largest_difference(_computed(stages, sessions, part), right))
    if not np.isfinite(difference):
        raise ModelError(
            "the exported stages return values that are not finite",
            expected="finite outputs, or infinite ones where PyTorch has the same",
            fix="choose an example with finite outputs",
        )
    return ExportCheck(tuple(sizes), difference, value, alone)


def _computed(stages: Sequence[ManifestStage], sessions: Sequence[Any], arrays: Arrays) -> list[Array]:
    """Return what the stages compute, one after the other."""
    for stage, session in zip(stages, sessions, strict=True):
        names = [output.name for output in stage.outputs]
        used = {tensor.name: arrays[tensor.name] for tensor in stage.inputs}
        arrays = dict(zip(names, session.run(names, used), strict=True))
    return list(arrays.values())


def largest_difference(actual: Sequence[Array], wanted: Sequence[Array]) -> float:
    """Return by how much arrays differ at most: equal infinite values by nothing, a NaN by infinity.

    >>> largest_difference([np.array([1.0, -np.inf])], [np.array([1.5, -np.inf])])
    0.5
    >>> largest_difference([np.array([np.nan])], [np.array([np.nan])])
    inf
    """
    largest = 0.0
    for actual_array, right in zip(actual, wanted, strict=True):
        if actual_array.shape != right.shape:
            raise ModelError(
                f"the stages return the shape {list(actual_array.shape)}, and PyTorch {list(right.shape)}",
                expected="the same shapes",
            )
        with np.errstate(invalid="ignore"):  # infinite ones may be equal
            off = np.where(
                actual_array == right, 0.0, np.abs(actual_array.astype(np.float64) - right.astype(np.float64))
            )
        largest = max(largest, float(np.nan_to_num(off, nan=np.inf).max(initial=0.0)))
    return largest


def plain_outputs(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> list[Array]:
    """Return what PyTorch computes."""
    with torch.no_grad():
        return [tensor.numpy() for tensor in OrderedModel(model, list(inputs)).eval()(*inputs.values())]
