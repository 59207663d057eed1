"""The manifest of an exported model: what `drumline export` writes and everything that `drumline serve` knows.

    DIR/manifest.json
    DIR/stage0/model.onnx  DIR/stage0/model.onnx.data     weights beside the graph where they are large
    DIR/stage1/model.onnx  ...

docs/manifest.md describes every field. A manifest is read strictly, and the files of a stage are held against their
sizes and checksums before they are loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from drumline.core.errors import RecordError
from drumline.core.files import FileKind, named, read_object
from drumline.core.parsed import MOST, Parsed

FORMAT, VERSION = "drumline-serving", 1
NAME = "manifest.json"
BATCH = "batch"
KIND = FileKind("manifest", RecordError, "the manifest.json that `drumline export` wrote")
_MOST_STAGES = 1000
NAMES_OF_TYPES = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64",
)  # fmt: skip


class Sizes(NamedTuple):
    """The sizes that a dimension may have: from the least to the most, in steps.

    >>> [Sizes(8, 64, 8).admits(size) for size in (8, 12, 64, 72)]
    [True, False, True, False]
    """

    least: int = 1
    most: int | None = None
    step: int = 1

    def admits(self, size: int) -> bool:
        """Whether the dimension may have a size."""
        return size >= self.least and (self.most is None or size <= self.most) and not (size - self.least) % self.step

    def __str__(self) -> str:
        """Say it for a reader.

        >>> print(Sizes(8, 64, 8), Sizes(1, 9), Sizes(), sep="; ")
        8 to 64 in steps of 8; 1 to 9; 1 or more
        """
        ends = f"{self.least} or more" if self.most is None else f"{self.least} to {self.most}"
        return ends if self.step == 1 else f"{ends} in steps of {self.step}"

    def to_json(self) -> dict[str, Any]:
        """Return the sizes as an object."""
        fields: dict[str, Any] = {"least": self.least, "most": self.most}
        return fields if self.step == 1 else {**fields, "step": self.step}


Dimensions = Mapping[str, Sizes]  # of each dimension that may change
ANY_SIZE = Sizes()


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output: its name, KServe's datatype, and its shape, with names for dimensions that may change.

    The whole numbers of an input that looks up embeddings are `least` or more and below `below`.
    """

    name: str
    datatype: str
    shape: tuple[int | str, ...]
    below: int | None = None
    least: int = 0

    def open_shape(self) -> list[int]:
        """Return the shape as KServe's metadata has it.

        >>> Tensor("x", "FP32", ("batch", 4)).open_shape()
        [-1, 4]
        """
        return [number if isinstance(number, int) else -1 for number in self.shape]

    def to_json(self) -> dict[str, Any]:
        """Return the tensor as an object."""
        fields: dict[str, Any] = {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}
        if self.below is not None:
            fields |= {"below": self.below, **({"least": self.least} if self.least else {})}
        return fields


@dataclass(frozen=True, slots=True)
class ManifestStage:
    """A stage: its graph, all its files with bytes and SHA-256, its tensors, blocks, and measured seconds."""

    file: str
    files: Mapping[str, tuple[int, str]]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    blocks: tuple[str, ...] = ()
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the stage as an object."""
        return {
            "file": self.file,
            "files": {name: {"bytes": size, "sha256": digest} for name, (size, digest) in self.files.items()},
            "inputs": [tensor.to_json() for tensor in self.inputs],
            "outputs": [output.to_json() for output in self.outputs],
            "blocks": list(self.blocks),
            "seconds": self.seconds,
        }


@dataclass(frozen=True, slots=True)
class Manifest:
    """An exported model."""

    model: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    dimensions: Dimensions
    stages: tuple[ManifestStage, ...]
    check: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as an object."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "inputs": [tensor.to_json() for tensor in self.inputs],
            "outputs": [output.to_json() for output in self.outputs],
            "dimensions": {name: sizes.to_json() for name, sizes in self.dimensions.items()},
            "stages": [stage.to_json() for stage in self.stages],
            "check": dict(self.check),
            "measured": dict(self.measured),
            "versions": dict(self.versions),
        }

    @property
    def digest(self) -> str:
        """The SHA-256 of the whole manifest, and so of all graphs and weights, whose checksums it has."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def identity(self, stage: int) -> str:
        """Return what tells a stage from others, and from those of another export, for a reader."""
        return f"stage {stage} of {len(self.stages)} of {self.model}, {self.digest[:12]}"

    def handshake(self, stage: int) -> str:
        """Return what a stage and whoever calls it must agree on before anything is computed."""
        return f"{self.digest} {stage}"

    def save(self, folder: Path) -> None:
        """Write the manifest, whole or not at all."""
        part = folder / f".{NAME}.part"
        part.write_text(json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        part.replace(folder / NAME)


def read_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of an exported model.

    >>> read_manifest("no-such-folder")
    Traceback (most recent call last):
    drumline.core.errors.RecordError: cannot read no-such-folder/manifest.json: No such file or directory; expected ...
    """
    path = Path(folder) / NAME
    content = read_object(path, KIND)
    with named(path, KIND):
        return _manifest(Parsed(content, KIND))


def _manifest(content: Parsed) -> Manifest:
    if content["format"].value != FORMAT:
        raise content["format"].refuse(f'"{FORMAT}"')
    if content["version"].value != VERSION:
        raise content["version"].refuse(f"{VERSION}, the version that this Drumline reads")
    stages = content["stages"].each(most=_MOST_STAGES)
    if not stages:
        raise content["stages"].refuse("at least one stage")
    manifest = Manifest(
        model=content["model"].text(),
        inputs=_tensors(content["inputs"]),
        outputs=_tensors(content["outputs"]),
        dimensions=_dimensions(content["dimensions"]),
        stages=tuple(_stage(stage) for stage in stages),
        **{name: _table(content, name) for name in ("check", "measured", "versions")},
    )
    _check_chain(manifest, content)
    return manifest


def _table(content: Parsed, name: str) -> dict[str, Any]:
    table = content.get(name)
    if table is None:
        return {}
    if not isinstance(table.value, dict):
        raise table.refuse("an object")
    return table.value


def _dimensions(content: Parsed) -> dict[str, Sizes]:
    if not isinstance(content.value, dict):
        raise content.refuse("an object")
    dimensions: dict[str, Sizes] = {}
    for name in content.value:
        entry = content[name].only(("least", "most", "step"))
        least, step = entry["least"].whole(0), entry.get("step")
        most = None if entry["most"].value is None else entry["most"].whole(max(least, 1))
        dimensions[name] = Sizes(least, most, 1 if step is None else step.whole(1))
    return dimensions


def _tensors(content: Parsed) -> tuple[Tensor, ...]:
    tensors = tuple(_tensor(entry) for entry in content.each(most=10_000))
    if not tensors or len({tensor.name for tensor in tensors}) != len(tensors):
        raise content.refuse("at least one tensor, each with its own name")
    return tensors


def _tensor(content: Parsed) -> Tensor:
    content.only(("name", "datatype", "shape", "below", "least"))
    datatype = content["datatype"].text()
    if datatype not in NAMES_OF_TYPES:
        raise content["datatype"].refuse(", ".join(NAMES_OF_TYPES))
    shape = tuple(
        item.text() if isinstance(item.value, str) else item.whole(0, 2**40) for item in content["shape"].each(most=64)
    )
    below, least = content.get("below"), content.get("least")
    lowest = 0 if least is None else least.whole(-MOST)
    highest = None if below is None else below.whole(lowest + 1)
    return Tensor(content["name"].text(), datatype, shape, highest, lowest)


def _stage(content: Parsed) -> ManifestStage:
    files = content["files"]
    if not isinstance(files.value, dict) or not files.value:
        raise files.refuse("an object with the stage's files")
    for name in files.value:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
            raise files.refuse("files inside the folder")
    if content["file"].text() not in files.value:
        raise content["file"].refuse("one of the stage's files")
    return ManifestStage(
        file=content["file"].text(),
        files={name: (files[name]["bytes"].whole(), files[name]["sha256"].text()) for name in files.value},
        inputs=_tensors(content["inputs"]),
        outputs=_tensors(content["outputs"]),
        blocks=tuple(entry.text() for entry in content["blocks"].each()),
        seconds=content["seconds"].number(),
    )


def _check_chain(manifest: Manifest, content: Parsed) -> None:
    """Refuse a manifest whose stages do not fit each other, or whose rows are not along the first dimension."""
    ends = [manifest.inputs, *(stage.outputs for stage in manifest.stages)]
    begins = [*(stage.inputs for stage in manifest.stages), manifest.outputs]
    for number, (tensors, taken) in enumerate(zip(ends, begins, strict=True)):
        if tensors != taken:
            what = f"the inputs of stage {number}" if number < len(manifest.stages) else "the outputs"
            raise KIND.refuse(f"a damaged manifest: {what} are not what comes before them")
    for which in ("inputs", "outputs"):
        for tensor in getattr(manifest, which):
            if not tensor.shape or tensor.shape[0] != BATCH:
                raise content[which].refuse(f"{BATCH!r} as the first dimension of each")
