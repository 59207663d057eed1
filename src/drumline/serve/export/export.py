"""Export a model: cut it, write every stage, hold the chain against PyTorch, and write the manifest last."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from drumline.core.errors import ModelError, UsageError, counted, nearest
from drumline.core.version import __version__
from drumline.plan.cut.cuts import Counts, ends_of
from drumline.serve.export.balance import GAIN, best_cut, largest, rescaled
from drumline.serve.export.check import TOLERANCE, Subject, check_stages, largest_difference, plain_variation
from drumline.serve.export.guards import LENGTH, Admission, Assumption, assumptions_of
from drumline.serve.export.lookups import bounds_of
from drumline.serve.export.onnx_chain import Example, GraphChain, chain_of
from drumline.serve.export.whole import Changing, block_names, traced, write_whole
from drumline.serve.session import is_of_runtime, open_session
from drumline.serve.wire.files import digest_of
from drumline.serve.wire.manifest import BATCH, Dimensions, Manifest, ManifestStage, Sizes

_ROUNDS = 2  # cuts that are tried after the first
_PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "transformers")


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
    if rows < 1 or length < 1:
        raise UsageError(f"{rows} rows of length {length}", expected="1 or more of each")
    check_new(out)
    _check_cut(block_names(subject.model), num_stages, cuts)
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".part-", dir=out) as work:
            return _export(subject, out, Path(work), num_stages, rows, length, cuts, tell)
    except BaseException as error:
        for path in out.iterdir():
            shutil.rmtree(path, ignore_errors=True)
        if is_new:
            out.rmdir()
        if is_of_runtime(error):
            raise _not_computed(error) from error
        raise


def check_new(out: Path) -> None:
    """Refuse a folder that has something in it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is not empty", expected="a new folder", fix="choose another --out")


def _check_cut(names: Sequence[str], num_stages: int, cuts: Sequence[str] | None) -> None:
    """Refuse early what no graph of the model can be cut into; not every block need have operations."""
    best_cut([1.0] * max(len(names), 1), num_stages)
    for cut in cuts or ():
        if cut not in names:
            raise UsageError(f"--cuts names block {cut!r}", fix=nearest(cut, names))


def _export(
    subject: Subject,
    out: Path,
    work: Path,
    num_stages: int,
    rows: int,
    length: int,
    cuts: Sequence[str] | None,
    tell: Callable[[str], None],
) -> Manifest:
    rows, length = max(rows, 2), max(min(length, subject.most.get(LENGTH, length)), 2)
    tell("writing the whole model as ONNX")
    subject.model.eval()
    changing = _changing(subject.example, [(rows, length), (rows + 1, length), (rows, other_length(length))])
    program = traced(subject.model, subject.example(rows, length), changing, subject.most)
    example = subject.example(rows, length)
    write_whole(subject.model, program, example, work / "whole.onnx")
    tell("finding the sizes that it takes")
    dimensions = _admitted(subject, program, changing, work / "whole.onnx", rows, length)
    tell("finding the blocks")
    sizes = _example_sizes(rows, length, dimensions)
    bounds = bounds_of(program, list(example))
    chain = chain_of(work / "whole.onnx", block_names(subject.model), subject.example, sizes, bounds)
    _check_rows(chain)
    stages, seconds = _cut(chain, work, num_stages, cuts, tell)
    tell("comparing the stages with PyTorch")
    checked = check_stages(subject, work, stages, work / "whole.onnx", (rows, length), dimensions)
    checked.refuse_wrong()
    manifest = Manifest(
        model=subject.name,
        inputs=stages[0].inputs,
        outputs=stages[-1].outputs,
        dimensions=_dimensions(chain, dimensions),
        stages=tuple(_moved(stage, work, out) for stage in stages),
        check=checked.to_json(),
        measured={"rows": rows, "length": length, "threads": 1, "block_seconds": seconds},
        versions=_versions(),
    )
    manifest.save(out)
    return manifest


def _changing(example: Example, sizes: Sequence[tuple[int, int]]) -> dict[str, dict[int, str]]:
    """Return which dimensions of the inputs change with the rows, and which with the length."""
    base, wide, long = ({name: tensor.shape for name, tensor in example(*size).items()} for size in sizes)
    return {
        name: {at: BATCH if wide[name][at] != size else LENGTH for at, size in enumerate(shape)
               if wide[name][at] != size or long[name][at] != size}
        for name, shape in base.items()
    }  # fmt: skip


def _check_rows(chain: GraphChain) -> None:
    graph = chain.graph
    for boundary_value in [*chain.boundary(0, 0), *chain.boundary(len(chain.blocks), 1)]:
        shape = chain.described([boundary_value])[boundary_value.name].shape
        if not shape or shape[0] != BATCH:
            what = "input" if boundary_value.value in graph.inputs else "output"
            raise ModelError(
                f"{what} {boundary_value.value!r} has shape {list(shape)}: its first dimension is not that of the rows",
                expected="a model whose outputs have a row for each row of its inputs",
            )


def _dimensions(chain: GraphChain, admitted: Dimensions) -> dict[str, Sizes]:
    tensors = chain.described(chain.boundary(0, 0)).values()
    names = {name for tensor in tensors for name in tensor.shape if isinstance(name, str)}
    return {name: admitted[name] for name in sorted(names)}


def _admitted(
    subject: Subject, program: Any, changing: Changing, whole: Path, rows: int, length: int
) -> dict[str, Sizes]:
    """Return the sizes for which the graph is the model, from what the exporter assumed."""
    session = _session(whole)
    names = [tensor.name for tensor in session.get_inputs()]

    def tries(tried_rows: int, tried_length: int) -> bool:
        try:
            inputs, wanted = plain_variation(subject, tried_rows, tried_length, seed=tried_rows)
            outputs = session.run(None, {name: inputs[name].numpy() for name in names})
            largest = max(float(np.abs(array).max(initial=0.0)) for array in wanted)
            return largest_difference(outputs, wanted) <= TOLERANCE * largest
        except Exception:  # a size for which either fails is not admitted
            return False

    has_length = any(LENGTH in dimensions.values() for dimensions in changing.values())
    admission = Admission(assumptions_of(program, changing), most=subject.most, has_length=has_length, tries=tries)
    if has_length:
        admission.with_one_row = _assumed(subject, changing, LENGTH, 1, length)
        admission.with_length_one = _assumed(subject, changing, BATCH, rows, 1)
    return admission.dimensions(length)


def _session(whole: Path) -> Any:
    """Return a session of the whole graph; ModelError if ONNX Runtime cannot compute it."""
    try:
        return open_session(whole)
    except Exception as error:  # ONNX Runtime has a class for each of its codes, without one for all
        raise _not_computed(error) from None


def _not_computed(error: BaseException) -> ModelError:
    why = (str(error).splitlines() or ["?"])[0].rpartition(" : ")[2][:300]
    return ModelError(
        f"ONNX Runtime does not compute the exported graph: {why}",
        expected="operations, types and sizes that it has",
        fix="convert inputs to int64 or float32 before they are used, and reshape by known dimensions",
    )


def _assumed(subject: Subject, changing: Changing, name: str, rows: int, length: int) -> list[Assumption]:
    """Return what a trace assumes of one dimension while the other is 1; nothing if PyTorch cannot trace that."""
    only = {key: {at: kind for at, kind in dims.items() if kind == name} for key, dims in changing.items()}
    try:
        return assumptions_of(traced(subject.model, subject.example(rows, length), only, subject.most), only)
    except ModelError:
        return []


def other_length(length: int) -> int:
    """Return a length beside another, shorter if there is one."""
    return length - 1 if length > 2 else length + 1


def _example_sizes(rows: int, length: int, dimensions: Dimensions) -> list[tuple[int, int]]:
    """Return the timed size, one with other rows, and one with another length where there is one."""
    admits = dimensions.get(LENGTH, Sizes(1, None)).admits
    step = dimensions.get(LENGTH, Sizes()).step
    other = next((size for size in (length - step, length + step) if size > 1 and admits(size)), length)
    return [(rows, length), (rows + 1 if dimensions[BATCH].admits(rows + 1) else rows - 1, length), (rows, other)]


def _cut(
    chain: GraphChain, work: Path, num_stages: int, cuts: Sequence[str] | None, tell: Callable[[str], None]
) -> tuple[list[ManifestStage], list[float]]:
    """Return the stages, whose graphs are written, and the blocks' seconds."""
    if cuts is not None:
        counts = _named_cut(chain.blocks, num_stages, cuts)
        return _written(chain, counts, work), []
    best_cut([1.0] * len(chain.blocks), num_stages)  # raises before anything is timed
    if num_stages == 1:
        return _written(chain, (len(chain.blocks),), work), []
    blocks = []
    for at, name in enumerate(chain.blocks):
        tell(f"timing block {name}")
        path = work / f"block{at}" / "model.onnx"
        chain.write(at, at + 1, 0, path)
        blocks.append(chain.seconds(at, 0, path))
        shutil.rmtree(path.parent)
    counts = best_cut(blocks, num_stages)
    tried = {counts: _written(chain, counts, work)}
    for _ in range(_ROUNDS):
        best = min(tried, key=lambda entry: _largest(tried[entry]))
        scaled = rescaled(blocks, best, [stage.seconds for stage in tried[best]])
        better = best_cut(scaled, num_stages)
        if better in tried or largest(scaled, better) > _largest(tried[best]) * (1 - GAIN):
            break
        tell(f"timing cut {_named(better)}")
        tried[better] = _written(chain, better, work)
    return min(tried.values(), key=_largest), blocks


def _largest(stages: Sequence[ManifestStage]) -> float:
    return max(stage.seconds for stage in stages)


def _named(counts: Counts) -> str:
    return "-".join(map(str, counts))


def _named_cut(blocks: Sequence[str], num_stages: int, cuts: Sequence[str]) -> Counts:
    """Return the blocks of each stage where the first block of every stage but the first is named."""
    for cut in cuts:
        if cut not in blocks[1:]:
            raise UsageError(f"--cuts names block {cut!r}", fix=nearest(cut, blocks[1:]))
    starts = [blocks.index(cut) for cut in cuts]
    if len(starts) != num_stages - 1 or starts != sorted(set(starts)):
        names = counted(num_stages - 1, "block")
        raise UsageError(
            f"--cuts is {','.join(cuts)}", expected=f"{names} in the model's order, for {num_stages} stages"
        )
    return tuple(end - first for first, end in pairwise([0, *starts, len(blocks)]))


def _written(chain: GraphChain, counts: Counts, work: Path) -> list[ManifestStage]:
    """Write the stages of a cut and time them; files are relative to the folder of work, without checksums yet."""
    stages = []
    for number, (first, end) in enumerate(pairwise(ends_of(counts))):
        path = work / _named(counts) / f"stage{number}" / "model.onnx"
        inputs, outputs = chain.write(first, end, number, path)
        seconds = chain.seconds(first, number, path)
        place = path.relative_to(work).as_posix()
        stages.append(ManifestStage(place, {}, tuple(inputs), tuple(outputs), chain.blocks[first:end], seconds))
    return stages


def _moved(stage: ManifestStage, work: Path, out: Path) -> ManifestStage:
    """Move a stage's files to their place, and describe them."""
    source = (work / stage.file).parent
    place = out / source.name
    source.rename(place)
    files = {f"{place.name}/{path.name}": digest_of(path) for path in sorted(place.iterdir())}
    return replace(stage, file=f"{place.name}/model.onnx", files=files)


def _versions() -> dict[str, str]:
    versions = {"drumline": __version__}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
