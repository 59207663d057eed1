"""Hold the exported stages against PyTorch: whole batches, and each row alone, since a service batches as it likes.

    rows x length    as timed; one more row; one row, the longest; many rows, the shortest; each size 1

Inputs are varied from row to row (`variations`), and at the most rows they are all equal once. Long inputs are reached
by doubling, as long as that stays within stated seconds and bytes; what was not run stands in the manifest.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from drumline.core.errors import ModelError
from drumline.serve.export.decisions import deciding_session
from drumline.serve.export.guards import LENGTH, MOST_ROWS
from drumline.serve.export.onnx_chain import Example
from drumline.serve.export.variations import Inputs, alike, variations
from drumline.serve.export.whole import OrderedModel, model_failed
from drumline.serve.session import open_session
from drumline.serve.wire.manifest import BATCH, Dimensions, ManifestStage, Sizes
from drumline.serve.wire.tensors import Array, Arrays

TOLERANCE = 1e-5
SECONDS, BYTES = 30.0, 2 * 2**30  # that the longest inputs may take
_GROWTH = 4  # of attention with twice the length


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
    decided: float = 0.0  # the same of what classes and bools are decided by, relative to its largest value
    worst: tuple[int, int] = (0, 0)  # the size with the largest difference
    not_run: tuple[tuple[int, int], ...] = ()  # admitted sizes that would have taken too long, or too much memory

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
                f"the exported stages differ from PyTorch by {self.relative:.3g} of the largest output"
                f" at {self.worst[0]} rows of length {self.worst[1]}",
                expected=f"{TOLERANCE:g} or less",
                fix="look for branches on sizes or random numbers in forward, or for sums that float32 cannot hold; "
                "nothing was written",
            )
        if (alone := max(self._relative(self.rows_alone), self.decided)) > TOLERANCE:
            raise ModelError(
                f"a row alone gives other outputs than in a batch, by {alone:.3g} of the largest output",
                expected="outputs of a row that depend on that row alone: a service computes rows of several requests "
                "together",
                fix="leave out what mixes rows, such as a mean or a maximum over the batch; nothing was written",
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
            "not_run": [list(size) for size in self.not_run],
            "seconds": SECONDS,
            "bytes": BYTES,
        }


def check_sizes(rows: int, length: int, dimensions: Dimensions) -> list[tuple[int, int]]:
    """Return rows and lengths to compare: as timed, and many rows and short ones; the longest come after these.

    >>> check_sizes(4, 32, {"batch": Sizes(), "length": Sizes(8, 256, 8)})
    [(4, 32), (5, 16), (1, 32), (1, 8), (64, 8)]
    """
    sizes = dimensions.get(LENGTH, Sizes(length, length))
    least = sizes.least
    most_rows = dimensions[BATCH].most or MOST_ROWS
    half = least + (length - least) // 2 // sizes.step * sizes.step
    wanted = [(rows, length), (min(rows + 1, most_rows), half), (1, length), (1, least), (most_rows, least)]
    return list(dict.fromkeys(wanted))


class StageCheck:
    """Compares stages with PyTorch, size after size."""

    def __init__(self, subject: Subject, folder: Path, stages: Sequence[ManifestStage], whole: Path) -> None:
        self._subject, self._stages = subject, stages
        self._deciding = deciding_session(whole)
        self._sessions = [open_session(folder / stage.file) for stage in stages]
        self.difference = self.value = self.alone = self.decided = 0.0
        self.sizes: list[tuple[int, int]] = []
        self.worst = 0, 0

    def compare(self, rows: int, length: int) -> None:
        """Compare all rows together, and each alone, at one size."""
        self.sizes.append((rows, length))
        inputs, wanted = plain_variation(self._subject, rows, length, seed=len(self.sizes))
        arrays: Arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
        if (difference := largest_difference(self._computed(arrays), wanted)) > self.difference:
            self.difference, self.worst = difference, (rows, length)
        largest = (float(np.abs(array[np.isfinite(array)].astype(np.float64)).max(initial=0.0)) for array in wanted)
        self.value = max(self.value, *largest)
        together = self._decided(arrays)
        for row in range(rows) if rows > 1 else ():
            part = {name: array[row : row + 1] for name, array in arrays.items()}
            self.alone = max(
                self.alone, largest_difference(self._computed(part), [array[row : row + 1] for array in wanted])
            )

            self._compare_decided(self._decided(part), together, rows, slice(row, row + 1))

    def compare_alike(self, rows: int, length: int) -> None:
        """Compare equal rows together with one of them alone: a model may leave out some of many."""
        inputs = alike(self._subject.example(rows, length))
        try:
            wanted = plain_outputs(self._subject.model, inputs)
        except Exception:  # numbers that this model does not take
            return
        if not all(np.isfinite(array).all() for array in wanted):
            return
        arrays: Arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
        single = {name: array[:1] for name, array in arrays.items()}
        self.difference = max(self.difference, largest_difference(self._computed(arrays), wanted))
        self.alone = max(self.alone, largest_difference(_repeated(self._computed(single), rows), wanted))
        self._compare_decided(self._decided(single), self._decided(arrays), rows, slice(rows))

    def _compare_decided(self, single: Sequence[Array], together: Sequence[Array], rows: int, at: slice) -> None:
        """Compare what discrete outputs of a row alone are decided by with some of the rows of a batch."""
        for mine, theirs in zip(single, together, strict=True):
            if mine.shape[:1] == (1,) and theirs.shape[:1] == (rows,):
                largest_value = np.abs(theirs[np.isfinite(theirs)]).max(initial=0.0) or 1.0
                some = theirs[at]
                self.decided = max(
                    self.decided, largest_difference(_repeated([mine], len(some)), [some]) / largest_value
                )

    def _decided(self, arrays: Arrays) -> list[Array]:
        """Return what discrete outputs are decided by."""
        if self._deciding is None:
            return []
        return list(
            self._deciding.run(None, {tensor.name: arrays[tensor.name] for tensor in self._deciding.get_inputs()})
        )

    def compare_long(self, start: int, sizes: Sizes) -> tuple[tuple[int, int], ...]:
        """Compare one row at ever longer lengths up to the longest; returns what would take too much."""
        length, longest = start, sizes.most or start
        while length < longest:
            began, memory = time.perf_counter(), _peak_bytes()
            length = min(longest, sizes.least + (2 * length - sizes.least) // sizes.step * sizes.step)
            self.compare(1, length)
            seconds, grown = time.perf_counter() - began, _peak_bytes() - memory
            if length < longest and (_GROWTH * seconds > SECONDS or _GROWTH * grown > BYTES):
                return ((1, longest),)
        return ()

    def _computed(self, arrays: Arrays) -> list[Array]:
        """Return what the stages compute, one after the other."""
        for stage, session in zip(self._stages, self._sessions, strict=True):
            names = [output.name for output in stage.outputs]
            used = {tensor.name: arrays[tensor.name] for tensor in stage.inputs}
            arrays = dict(zip(names, session.run(names, used), strict=True))
        return list(arrays.values())


def _repeated(arrays: Sequence[Array], rows: int) -> list[Array]:
    """Return the outputs of one row as those of so many equal ones."""
    return [np.repeat(array, rows, axis=0) for array in arrays]


def _peak_bytes() -> int:
    """Return the most memory that this process has used."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def check_stages(
    subject: Subject,
    folder: Path,
    stages: Sequence[ManifestStage],
    whole: Path,
    size: tuple[int, int],
    dimensions: Dimensions,
) -> ExportCheck:
    """Return how far the stages, one after the other, are from the whole model in PyTorch, at several sizes."""
    check = StageCheck(subject, folder, stages, whole)
    sizes = check_sizes(*size, dimensions)
    for rows, length in sizes:
        check.compare(rows, length)
    check.compare_alike(*max(sizes))
    not_run = check.compare_long(size[1], dimensions[LENGTH]) if LENGTH in dimensions else ()
    if not np.isfinite(check.difference):
        raise ModelError(
            "the exported stages return values that are not finite",
            expected="finite outputs, or infinite ones where PyTorch has the same",
            fix="choose an example with finite outputs",
        )
    return ExportCheck(
        tuple(check.sizes), check.difference, check.value, check.alone, check.decided, check.worst, not_run
    )


def plain_variation(subject: Subject, rows: int, length: int, *, seed: int) -> tuple[Inputs, list[Array]]:
    """Return inputs of a size, as different from row to row as the model takes them, and what PyTorch computes."""
    *varied, plain = variations(subject.example(rows, length), seed)
    for inputs in varied:
        try:
            outputs = plain_outputs(subject.model, inputs)
        except Exception:  # numbers that this model does not take; the example's own are left
            continue
        if all(np.isfinite(array).all() for array in outputs):
            return inputs, outputs
    try:
        return plain, plain_outputs(subject.model, plain)
    except Exception as error:  # whatever the model raises for this size
        raise model_failed(plain, error) from error


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
