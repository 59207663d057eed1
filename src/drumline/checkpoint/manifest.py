"""The manifest of a checkpoint: what it holds, checked part by part before anything is taken from it.

    {"format": "drumline-checkpoint", "version": 1, "crc32": ..., "content": {
        "step": 100, "number": 100, "num_trained": 100, "schedule": "1f1b", "token": "5f3a9c01",
        "line": [["5f3a9c01", 60], ["77ab0c12", null]],            which checkpoints came before: see line.py
        "num_processes": 2,
        "files": {"model-00001-of-00002.safetensors": 1234, ...},   bytes of each
        "tensors": {"model-00001-of-00002.safetensors": {"a.weight": 3012345678, ...}, ...},
        "optimizers": [{"kind": "AdamW", "groups": [...], "numbers": {...}}],
        "generators": [...], "scaler": null, "stream": null, "due": [], "extra": ...}}

Numbers of `extra` and of optimizers may be infinite, NaN or of any length: the user's own data come back as they were.
Checkpoints of earlier versions have no `line`.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drumline.core.errors import RecordError
from drumline.core.files import MIB, FileKind, is_there, read_text
from drumline.core.parsed import Parsed

MANIFEST = "manifest.json"
VERSION = 1
_FORMAT = "drumline-checkpoint"
_KIND = FileKind("checkpoint's manifest", RecordError, "a manifest.json that Drumline wrote", 512 * MIB)
_FILE = re.compile(r"[\w+=@-][\w.+=@-]*")  # no way out of the checkpoint's folder
_MOST_CRC = 2**32 - 1


class OtherVersion(RecordError):
    """A checkpoint of another version of Drumline: not damaged, and not to be read here."""


def write_json(path: Path, value: Mapping[str, Any]) -> int:
    """Write JSON so that it outlives a power failure; returns its bytes."""
    return write_bytes(path, json.dumps(value).encode())


def write_bytes(path: Path, content: bytes) -> int:
    """Write a file so that it outlives a power failure; returns its bytes."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return len(content)


def write_manifest(part: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest, the last file of a checkpoint, with its own checksum."""
    text = json.dumps(content, sort_keys=True)
    write_json(
        part / MANIFEST,
        {"format": _FORMAT, "version": VERSION, "crc32": zlib.crc32(text.encode()), "content": json.loads(text)},
    )


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint holds; raises RecordError if the manifest or a file is missing or damaged.

    Files are held against their sizes here, tensors against their checksums when they are read.
    """
    content = read_content(checkpoint)
    if problem := problem_of_files(checkpoint, content["files"]):
        raise RecordError(problem)
    return content


def read_content(checkpoint: Path) -> dict[str, Any]:
    """Return what a manifest says, whether or not the files are there."""
    path = checkpoint / MANIFEST
    entries = _object(path)
    if entries.get("format") != _FORMAT or not isinstance(entries.get("content"), dict):
        raise _KIND.refuse(f"{path} is no manifest of a checkpoint")
    if entries.get("version") != VERSION:
        raise OtherVersion(
            f"{checkpoint} has version {entries.get('version')!r:.60}",
            expected=f"version {VERSION}",
            fix="read it with the version of Drumline that wrote it",
        )
    content: dict[str, Any] = entries["content"]
    if zlib.crc32(json.dumps(content, sort_keys=True).encode()) != entries.get("crc32"):
        raise RecordError(f"{path} is damaged: its checksum differs")
    try:
        _check(Parsed(content, _KIND))
    except RecordError as error:
        raise RecordError(f"{path}: {error.error}", expected=error.expected, fix="use another checkpoint") from None
    return content


def problem_of_files(checkpoint: Path, files: Mapping[str, int]) -> str:
    """Return which file is missing or has another size than it was written with; an empty text if none."""
    for name, size in files.items():
        file = checkpoint / name
        if not is_there(file, _KIND):
            return f"{file} is missing"
        if (st_size := file.stat().st_size) != size:
            return f"{file} has {st_size} bytes; expected {size}, as it was written"
    return ""


def _object(path: Path) -> dict[str, Any]:
    text = read_text(path, _KIND)
    try:
        content = json.loads(text)
    except RecursionError:
        raise _KIND.refuse(f"{path}: the JSON is nested too deeply") from None
    except ValueError as error:
        raise _KIND.refuse(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise _KIND.refuse(f"{path}: the JSON holds a {type(content).__name__}, not an object")
    return content


def _check(content: Parsed) -> None:
    """Raise if a part is missing, or is not what loading takes it for."""
    for name in ("step", "number", "num_trained"):
        content[name].whole()
    content["token"].text()
    num_processes = content["num_processes"].whole(1)
    files = _each(content["files"], lambda size: size.whole())
    if odd := [name for name in files if not _FILE.fullmatch(name)]:
        raise content.kind.refuse(f"a damaged {content.kind.name}: files has {odd[0][:60]!r}, which is no file's name")
    tensors = _each(content["tensors"], _check_checksums)
    if absent := [name for name in tensors if name not in files]:
        raise content.kind.refuse(f"a damaged {content.kind.name}: tensors has {absent[0][:60]!r}, and files has not")
    for entry in content["optimizers"].each():
        _check_optimizer(entry)
    generators = content["generators"].each()
    if len(generators) != num_processes:
        raise content["generators"].refuse(f"a list of {num_processes}, one of each process")
    for generator in generators:
        _sized(generator["python"], 2)
        _sized(generator["numpy"], 4)
    content["extra"]
    if (only := content.get("only")) is not None and only.value is not True:
        raise only.refuse("true, or nothing")
    if (scaler := content.get("scaler")) is not None and scaler.value is not None:
        _each(scaler, lambda number: number.number())
    if (stream := content.get("stream")) is not None and stream.value is not None:
        _check_stream(stream, content["due"])
    if (line := content.get("line")) is not None:
        _check_line(line)


def _check_optimizer(entry: Parsed) -> None:
    entry["kind"].text()
    _each(entry["numbers"], lambda numbers: _each(numbers, lambda _: None))
    for group in entry["groups"].each():
        for name in group["params"].each():
            name.text()


def _check_checksums(tensors: Parsed) -> None:
    if not isinstance(tensors.value, dict):
        raise tensors.refuse("an object")
    for name, crc in tensors.value.items():  # there may be a hundred thousand
        if type(crc) is not int or not 0 <= crc <= _MOST_CRC:
            tensors[name].whole(0, _MOST_CRC)


def _check_stream(stream: Parsed, due: Parsed) -> None:
    """Raise if updates that are due cannot be taken up."""
    stream["schedule"].text()
    for name in ("num_ranks", "num_microbatches"):
        stream[name].whole(1)
    stream["position"].whole()
    for entry in due.each():
        entry["rank"].whole()
        entry["versions"].each()
        for group in entry["groups"].each():
            _sized(group["at"], 2)
            group["settings"].each()


def _check_line(line: Parsed) -> None:
    parts = line.each()
    if not parts:
        raise line.refuse("at least the checkpoint's own line")
    for at, part in enumerate(parts):
        name, until = _sized(part, 2)
        name.text()
        is_own = at == len(parts) - 1
        if (until.value is None) != is_own:
            raise until.refuse("null" if is_own else "the step at which the line was left")
        if not is_own:
            until.whole(-1)


def _each(table: Parsed, check: Callable[[Parsed], object]) -> Mapping[str, Any]:
    """Check every value of an object, and return it."""
    if not isinstance(table.value, dict):
        raise table.refuse("an object")
    for name in table.value:
        check(table[name])
    content: Mapping[str, Any] = table.value
    return content


def _sized(content: Parsed, size: int) -> list[Parsed]:
    items = content.each()
    if len(items) != size:
        raise content.refuse(f"a list of {size}")
    return items
