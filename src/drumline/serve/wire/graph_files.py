"""Which files a graph reads its weights from, without the package `onnx`: serving does not need that.

    ModelProto ─ graph ─ initializer ─ external_data: key "location", value "model.onnx.data"
                       └ node ─ attribute ─ t, g, tensors, graphs ...

The table says by which fields of ONNX's messages a tensor is reached. All other fields are skipped, unread.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from posixpath import normpath

from drumline.core.errors import RecordError

_TENSOR, _ENTRY, _GRAPH, _NODE, _ATTRIBUTE = "TensorProto", "StringStringEntryProto", "GraphProto", "NodeProto", "Attr"
_SPARSE, _FUNCTION, _TRAINING = "SparseTensorProto", "FunctionProto", "TrainingInfoProto"
# Message: fields by number, and what they hold.
_FIELDS: Mapping[str, Mapping[int, str]] = {
    "ModelProto": {7: _GRAPH, 20: _TRAINING, 25: _FUNCTION},
    _TRAINING: {1: _GRAPH, 2: _GRAPH},
    _FUNCTION: {7: _NODE, 11: _ATTRIBUTE},
    _GRAPH: {1: _NODE, 5: _TENSOR, 15: _SPARSE},
    _NODE: {5: _ATTRIBUTE},
    _ATTRIBUTE: {5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH, 22: _SPARSE, 23: _SPARSE},
    _SPARSE: {1: _TENSOR, 2: _TENSOR},
    _TENSOR: {13: _ENTRY},
}
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5  # how a field is written
_KEY, _VALUE = 1, 2
_LOCATION = b"location"
_DEEPEST = 100


def external_files(folder: Path, graph: str) -> list[str]:
    """Return the files that a graph of a folder reads its weights from, relative to that folder.

    >>> external_files(Path("no-such-folder"), "stage0/model.onnx")
    Traceback (most recent call last):
    drumline.core.errors.RecordError: cannot read no-such-folder/stage0/model.onnx: No such file or directory; ...
    """
    path = folder / graph
    try:
        with path.open("rb") as file:
            if not file.read(1):
                raise RecordError(f"{path} is empty", expected="a graph of ONNX")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
                locations = list(dict.fromkeys(_locations(memory, 0, len(memory), "ModelProto", 0)))
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}", expected="a graph of ONNX") from None
    except ValueError as error:
        raise RecordError(f"{path} is damaged: {error}", expected="a graph of ONNX") from None
    home = PurePosixPath(graph).parent
    return [normpath(home / location.decode(errors="backslashreplace")) for location in locations]


def _locations(memory: mmap.mmap, at: int, end: int, message: str, depth: int) -> Iterator[bytes]:
    """Yield the locations inside a message that stands between two places."""
    if depth > _DEEPEST:
        raise ValueError(f"its messages are nested more than {_DEEPEST} deep")
    inside = _FIELDS[message]
    while at < end:
        tag, at = _number(memory, at, end)
        field, kind = tag >> 3, tag & 7
        if kind == _BYTES:
            size, at = _number(memory, at, end)
            if at + size > end:
                raise ValueError("a field is longer than its message")
            if inside.get(field) == _ENTRY:
                yield from _location(memory, at, at + size)
            elif field in inside:
                yield from _locations(memory, at, at + size, inside[field], depth + 1)
            at += size
        elif kind == _VARINT:
            _, at = _number(memory, at, end)
        elif kind in (_EIGHT, _FOUR):
            at += 8 if kind == _EIGHT else 4
        else:
            raise ValueError(f"a field is written in the unknown way {kind}")


def _location(memory: mmap.mmap, at: int, end: int) -> Iterator[bytes]:
    """Yield the value of an entry whose key is the location."""
    texts = {_KEY: b"", _VALUE: b""}
    while at < end:
        tag, at = _number(memory, at, end)
        if tag & 7 != _BYTES:
            raise ValueError("an entry of external data is no text")
        size, at = _number(memory, at, end)
        texts[tag >> 3] = memory[at : min(at + size, end)]
        at += size
    if texts[_KEY] == _LOCATION:
        yield texts[_VALUE]


def _number(memory: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    """Return a number of variable length, and where it ends."""
    value = shift = 0
    while at < end and shift < 70:
        byte = memory[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("a number does not end")
