"""Weights on disk: list their tensors, and read any of them alone, directly to its destination.

Files are read, not mapped: mapped pages count as this process's memory as soon as they are touched. A tensor for the
host goes from the file into its own memory; one for another device or dtype passes through a small buffer.

    folder/model.safetensors.index.json    which tensor is in which file
    folder/model-00001-of-00002.safetensors
    │ 8 bytes: n │ n bytes of JSON: name → dtype, shape, from, to │ the tensors' bytes │
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from drumline.core.errors import ModelError, nearest
from drumline.core.files import MIB, FileKind, opened, parse_object, read_object
from drumline.core.parsed import Parsed

_BUFFER_BYTES = 16 * 2**20
_MAX_HEADER_BYTES = 100_000_000  # what the format allows
_SIZE = struct.Struct("<Q")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_INDEX = FileKind("index", ModelError, 'JSON with a "weight_map"', 64 * MIB)
_WEIGHTS = FileKind("weights file", ModelError, "a complete weights file")
_TORCH_ENDINGS = (".bin", ".pt", ".pth")
TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file: `start` is the offset of its first element; `stride` is None if contiguous."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stride: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.name!r} of {self.file}"

    def read(self) -> Tensor:
        """Return the tensor on the host."""
        if self.stride is None:
            tensor = torch.empty(self.shape, dtype=self.dtype, device="cpu")
            self.into(tensor)
            return tensor
        reach = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        flat = torch.empty(reach if math.prod(self.shape) else 0, dtype=self.dtype, device="cpu")
        with self.file.open("rb", buffering=0) as source:
            self._fill(source, flat, 0)
        return flat.as_strided(self.shape, self.stride)

    def into(self, target: Tensor) -> None:
        """Read the tensor into a target of the same shape, on any device and of any dtype."""
        if self.stride is not None or not target.is_contiguous():
            target.copy_(self.read())
            return
        flat = target.reshape(-1)
        with self.file.open("rb", buffering=0) as source:
            if target.device.type == "cpu" and target.dtype == self.dtype:
                self._fill(source, flat, 0)
                return
            room = min(max(1, _BUFFER_BYTES // self.dtype.itemsize), flat.numel())
            buffer = torch.empty(room, dtype=self.dtype, device="cpu")
            for at in range(0, flat.numel(), max(1, room)):
                part = buffer[: flat.numel() - at]
                self._fill(source, part, at)
                flat[at : at + part.numel()].copy_(part)

    def _fill(self, source: BinaryIO, flat: Tensor, at: int) -> None:
        """Read elements from number `at` on, as many as fit."""
        if not flat.numel():
            return
        rest = memoryview(flat.view(torch.uint8).numpy().data)
        source.seek(self.start + at * self.dtype.itemsize)
        while rest.nbytes:
            number = source.readinto(rest)  # type: ignore[attr-defined]
            if not number:
                raise ModelError(
                    f"{self.file} ends within the tensor {self.name!r}", expected="a complete file", fix="copy it again"
                )
            rest = rest[number:]


class Weights:
    """The tensors of a folder of weights, or of one file: `.safetensors`, or torch's `.bin`, `.pt`, `.pth`.

    Extra tensors in the files are an error, unless their names match a shell pattern in `ignore`, such as `head.*`.
    Missing tensors are an error, unless they match a pattern in `fresh`: these are initialised.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> torch.save({"weight": torch.eye(2)}, folder / "pytorch_model.bin")
    >>> Weights(folder).tensors["weight"].read()
    tensor([[1., 0.],
            [0., 1.]])
    """

    def __init__(self, path: str | Path, *, ignore: Sequence[str] = (), fresh: Sequence[str] = ()) -> None:
        self.path = Path(path)
        self.ignore = _patterns(ignore, "ignore")
        self.fresh = _patterns(fresh, "fresh")
        self.tensors: dict[str, StoredTensor] = {}
        for tensor in _stored_tensors(self.path):
            first = self.tensors.setdefault(tensor.name, tensor)
            if first is not tensor:
                raise ModelError(f"{first} is in {tensor.file} too", expected="each tensor in only one file")

    def ignores(self, name: str) -> bool:
        """Whether to ignore a tensor that the model has no place for."""
        return any(fnmatchcase(name, pattern) for pattern in self.ignore)

    def leaves_fresh(self, name: str) -> bool:
        """Whether to initialise a tensor that is not in the files."""
        return any(fnmatchcase(name, pattern) for pattern in self.fresh)

    def described(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Return what must be the same on all ranks."""
        return [(name, tensor.shape, str(tensor.dtype)) for name, tensor in sorted(self.tensors.items())]


def _patterns(patterns: Sequence[str], what: str) -> tuple[str, ...]:
    if isinstance(patterns, str):
        raise ModelError(f"{what} is {patterns!r}", expected="a list of names or patterns", fix=f"write [{patterns!r}]")
    return tuple(patterns)


def _stored_tensors(path: Path) -> Iterator[StoredTensor]:
    """Yield every tensor of a file or a folder."""
    if path.is_dir():
        yield from _in_folder(path)
    elif path.is_file():
        yield from _in_file(path)
    else:
        beside = sorted(file.name for file in path.parent.iterdir()) if path.parent.is_dir() else []
        raise ModelError(
            f"no weights found at {path}",
            expected="a folder or a file on this machine",
            fix=nearest(path.name, beside) if 0 < len(beside) <= 20 else "",
        )


def _in_folder(folder: Path) -> Iterator[StoredTensor]:
    for index, single in zip(_INDEXES, _SINGLE, strict=True):
        if (folder / index).is_file():
            yield from _indexed(folder / index)
            return
        if (folder / single).is_file():
            yield from _in_file(folder / single)
            return
    endings: Iterable[tuple[str, ...]] = ((".safetensors",), _TORCH_ENDINGS)
    for files in (sorted(path for path in folder.iterdir() if path.suffix in ending) for ending in endings):
        for file in files:
            yield from _in_file(file)
        if files:
            return
    raise ModelError(
        f"the folder {folder} contains no weights",
        expected=f"one of {', '.join((*_INDEXES, *_SINGLE))}, or files ending in .safetensors, .bin, .pt or .pth",
    )


def _indexed(index: Path) -> Iterator[StoredTensor]:
    """Yield the tensors of the files that an index names, each from the file that it says."""
    try:
        table = Parsed(read_object(index, _INDEX), _INDEX)["weight_map"]
        where = {name: table[name].text() for name in table.only(table.value).value}
    except ModelError as error:
        raise ModelError(f"{index} is not a weights index: {error.error}", expected=error.expected) from None
    files = sorted(set(where.values()))
    for file in files:
        if not (index.parent / file).is_file():
            raise ModelError(f"{index} names {file}, which does not exist", fix="fetch the missing file")
        inside = {tensor.name: tensor for tensor in _in_file(index.parent / file)}
        for name in (name for name, place in where.items() if place == file):
            if name not in inside:
                raise ModelError(
                    f"{index} says that {name!r} is in {file}, but it is not", fix="fetch the file or the index again"
                )
            yield inside[name]


def _in_file(file: Path) -> Iterator[StoredTensor]:
    if file.suffix == ".safetensors":
        return _in_safetensors(file)
    if file.suffix in _TORCH_ENDINGS:
        return _in_torch(file)
    raise ModelError(f"{file} does not have the name of a weights file", expected=".safetensors, .bin, .pt or .pth")


def _in_safetensors(file: Path) -> Iterator[StoredTensor]:
    with opened(file, _WEIGHTS) as source:
        size = os.fstat(source.fileno()).st_size
        head = source.read(_SIZE.size)
        (length,) = _SIZE.unpack(head) if len(head) == _SIZE.size else (size + 1,)
        if length > min(size - _SIZE.size, _MAX_HEADER_BYTES):
            raise ModelError(f"{file} is not a complete safetensors file", fix="copy it again")
        header = source.read(length)
    not_this = f"{file} does not have the header of a safetensors file"
    try:
        entries = parse_object(header, _WEIGHTS)
    except ModelError as error:
        raise ModelError(f"{not_this}: {error.error}", fix="copy it again") from None
    try:
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            begin, end = (_SIZE.size + length + int(at) for at in entry["data_offsets"])
            shape = tuple(map(int, entry["shape"]))
            if entry["dtype"] not in TYPES:
                raise ModelError(f"{name!r} of {file} has the dtype {entry['dtype']}", expected=", ".join(TYPES))
            value = StoredTensor(file, name, TYPES[entry["dtype"]], shape, begin)
            fits = _SIZE.size + length <= begin <= end <= size and min(shape, default=0) >= 0
            if not fits or end - begin != math.prod(shape) * value.dtype.itemsize:
                raise ModelError(f"{value} does not fit into the file", expected="a complete file", fix="copy it again")
            yield value
    except ModelError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ModelError(not_this, fix="copy it again") from error


def _in_torch(file: Path) -> Iterator[StoredTensor]:
    with opened(file, _WEIGHTS):
        pass  # torch would wait for a pipe
    try:
        # On the meta device, torch reads only the names, and records where in the file each storage begins.
        content = torch.load(file, map_location="meta", weights_only=True, mmap=True)
    except Exception as error:
        raise ModelError(
            f"torch cannot read {file}: {str(error).splitlines()[0]}",
            expected="a dict of tensors written by torch.save in its current format",
            fix="save it again: torch.save(model.state_dict(), file)",
        ) from error
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        what = (
            f"a dict with {', '.join(map(str, content))}"[:200]
            if isinstance(content, Mapping)
            else type(content).__name__
        )
        raise ModelError(
            f"{file} holds {what}",
            expected="a dict from names to tensors",
            fix="save model.state_dict() and nothing else",
        )
    for name, value in content.items():
        start = value.untyped_storage()._checkpoint_offset
        assert start is not None, "torch notes where storages begin"
        yield StoredTensor(
            file,
            name,
            value.dtype,
            tuple(value.shape),
            start + value.storage_offset() * value.element_size(),
            None if value.is_contiguous() else tuple(value.stride()),
        )
