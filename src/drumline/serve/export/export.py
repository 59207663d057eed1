"""Export a model: cut it, write every stage, hold the chain against PyTorch, and write the manifest last."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from drumline.core.errors import ModelError, UsageError
from drumline.plan.cut.cuts import Counts, ends_of
from drumline.runtime.blocks.cut import counts_of
from drumline.serve.export.balance import GAIN, best_cut, block_seconds, largest, rescaled
from drumline.serve.export.chain import LENGTH, Chain, Example, chain_of, output_tensors
from drumline.serve.export.onnx import run_onnx, seconds_of, write_onnx
from drumline.serve.wire.manifest import BATCH, Dimensions, Manifest, Stage, digest_of
from drumline.serve.wire.tensors import Array

TOLERANCE = 1e-5
_ROUNDS = 2  # cuts that are tried after the first
_PACKAGES = ("drumline", "torch", "onnx", "onnxscript", "onnxruntime", "transformers")


@dataclass(frozen=True, slots=True)
class Subject:
    """What is exported: a model in eval mode on the CPU, examples of its inputs, and how long they may be."""

    name: str
    model: nn.Module
    example: Example
    most: Mapping[str, int]  # the largest size of dimensions that have one


@dataclass(frozen=True, slots=True)
class Checked:
    """How far the chain of graphs is from PyTorch, over several sizes."""

    sizes: tuple[tuple[int, int], ...]
    largest_difference: float
    largest_value: float

    @property
    def relative(self) -> float:
        """The largest difference over the largest value."""
        return self.largest_difference / self.largest_value if self.largest_value else self.largest_difference

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as an object."""
        return {
            "sizes": [list(one) for one in self.sizes],
            "largest_difference": self.largest_difference,
            "largest_value": self.largest_value,
            "relative": self.relative,
            "tolerance": TOLERANCE,
        }


def export(
    subject: Subject,
    out: Path,
    *,
    num_stages: int,
    rows: int = 4,
    length: int = 32,
    cuts: Sequence[str] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Manifest:
    """Export a model into a folder that must be new or empty; returns the manifest, which is written last.

    `rows` and `length` are the size at which blocks and stages are timed. `cuts` names the first block of every stage
    but the first, instead of a cut by measured times.
    """
    if num_stages < 1:
        raise UsageError(f"--stages is {num_stages}", expected="1 or more")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is not empty", expected="a new folder", fix="choose another --out")
    length = min(length, subject.most.get(LENGTH, length))
    shorter = max(1, length // 2) if length > 1 else length
    tell("tracing the model")
    chain = chain_of(subject.model, subject.example, [(rows, length), (rows + 1, length), (rows, shorter)])
    dimensions = _dimensions(chain, subject.most)
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".part-", dir=out))
    try:
        with torch.no_grad():
            counts, seconds, blocks = _cut(chain, work, dimensions, num_stages, cuts, tell)
            tell("comparing the graphs with PyTorch")
            checked = check_chain(subject, chain, work / _named(counts), counts, [(1, length), (rows + 1, shorter)])
        stages = _moved(chain, counts, seconds, work / _named(counts), out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    made = Manifest(
        model=subject.name,
        inputs=chain.boundaries[0].tensors,
        outputs=chain.boundaries[-1].tensors,
        dimensions=dimensions,
        stages=tuple(stages),
        check=checked.to_json(),
        measured={"rows": rows, "length": length, "threads": 1, "block_seconds": blocks},
        versions=_versions(),
    )
    if checked.relative > TOLERANCE:
        shutil.rmtree(out)
        raise ModelError(
            f"the exported stages differ from PyTorch by {checked.relative:.3g} of the largest output",
            expected=f"{TOLERANCE:g} or less",
            fix="export in float32 and in eval mode, or report the model: nothing was written",
        )
    made.save(out)
    return made


def _dimensions(chain: Chain, most: Mapping[str, int]) -> dict[str, tuple[int, int | None]]:
    names = {one for tensor in chain.boundaries[0].tensors for one in tensor.shape if isinstance(one, str)}
    odd = [one for tensor in chain.boundaries[-1].tensors for one in tensor.shape[:1] if one != BATCH]
    if odd or not all(tensor.shape and tensor.shape[0] == BATCH for tensor in chain.boundaries[0].tensors):
        raise ModelError(
            "rows are not the first dimension of every input and output",
            expected="a model whose outputs have a row for each row of its inputs",
        )
    return {name: (1, most.get(name)) for name in sorted(names)}


def _named(counts: Counts) -> str:
    return "-".join(map(str, counts))


def _cut(
    chain: Chain,
    work: Path,
    dimensions: Dimensions,
    num_stages: int,
    cuts: Sequence[str] | None,
    tell: Callable[[str], None],
) -> tuple[Counts, list[float], list[float]]:
    """Return the blocks of each stage, the stages' seconds and the blocks'; the stages' graphs are written."""
    if cuts is not None or num_stages == 1:
        counts = tuple(counts_of(chain.blocks, num_stages, cuts)) if cuts is not None else (len(chain.blocks),)
        return counts, _written(chain, counts, work, dimensions, tell), []
    best_cut([1.0] * len(chain.blocks), num_stages)  # raises before anything is timed
    blocks = block_seconds(chain, work, dimensions, tell)
    counts = best_cut(blocks, num_stages)
    tried = {counts: _written(chain, counts, work, dimensions, tell)}
    for _ in range(_ROUNDS):
        best = min(tried, key=lambda one: max(tried[one]))
        scaled = rescaled(blocks, best, tried[best])
        better = best_cut(scaled, num_stages)
        if better in tried or largest(scaled, better) > max(tried[best]) * (1 - GAIN):
            break
        tried[better] = _written(chain, better, work, dimensions, tell)
    best = min(tried, key=lambda one: max(tried[one]))
    return best, tried[best], blocks


def _written(
    chain: Chain, counts: Counts, work: Path, dimensions: Dimensions, tell: Callable[[str], None]
) -> list[float]:
    """Write the stages of a cut, and return their seconds."""
    found = []
    for number, (first, end) in enumerate(pairwise(ends_of(counts))):
        tell(f"writing stage {number} of cut {_named(counts)}")
        path = work / _named(counts) / f"stage{number}" / "model.onnx"
        before, behind = chain.boundaries[first], chain.boundaries[end]
        write_onnx(chain.stage(first, end), before, behind, path, dimensions)
        found.append(seconds_of(path, before))
    return found


def check_chain(
    subject: Subject, chain: Chain, folder: Path, counts: Counts, sizes: Sequence[tuple[int, int]]
) -> Checked:
    """Return how far the graphs, one after the other, are from the whole model in PyTorch, at several sizes."""
    difference = value = 0.0
    for size in sizes:
        inputs = subject.example(*size)
        wanted = plain_outputs(subject.model, inputs)
        given: list[Array] = [one.numpy() for one in inputs.values()]
        for number, first in enumerate(ends_of(counts)[:-1]):
            names = [one.name for one in chain.boundaries[first].tensors]
            given = run_onnx(folder / f"stage{number}" / "model.onnx", given, names)
        for made, right in zip(given, wanted, strict=True):
            if made.shape != right.shape:
                raise ModelError(f"the graphs return the shape {made.shape} and PyTorch {right.shape}")
            if right.dtype.kind == "f" and right.size:
                difference = max(difference, float(np.abs(made - right).max()))
                value = max(value, float(np.abs(right).max()))
    if not np.isfinite(difference):
        raise ModelError("the exported stages return values that are not finite", expected="finite outputs")
    return Checked(tuple(sizes), difference, value)


def plain_outputs(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> list[Array]:
    """Return what PyTorch computes."""
    with torch.no_grad():
        chain = isinstance(model, nn.Sequential)
        made = model.eval()(*inputs.values()) if chain else model.eval()(**inputs)
    return [one.numpy() for one in output_tensors(made)]


def _moved(chain: Chain, counts: Counts, seconds: Sequence[float], source: Path, out: Path) -> list[Stage]:
    """Move the graphs of the chosen cut to their place, and describe them."""
    found = []
    for number, (first, end) in enumerate(pairwise(ends_of(counts))):
        place = out / f"stage{number}"
        (source / place.name).rename(place)
        files = {f"{place.name}/{one.name}": digest_of(one) for one in sorted(place.iterdir())}
        found.append(
            Stage(
                f"{place.name}/model.onnx",
                files,
                chain.boundaries[first].tensors,
                chain.boundaries[end].tensors,
                tuple(block.name for block in chain.blocks[first:end]),
                seconds[number],
            )
        )
    return found


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


