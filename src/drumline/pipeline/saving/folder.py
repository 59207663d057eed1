"""A folder of checkpoints: what lies where, how one appears all at once, and which are whole.

    FOLDER/step-00000100/                      appears by one rename, once every process has written its files
        model-00001-of-00002.safetensors       parameters and buffers of process 1, by the unsplit model's names
        model.safetensors.index.json           which file holds which of them, as Hugging Face's libraries read it
        training-00001-of-00002.safetensors    optimizer state, float32 copies, random generators
        manifest.json                          every file's size, every tensor's checksum, settings, the user's `extra`
    FOLDER/.step-00000150.5f3a.part/           being written, or left by a run that died: never read

Nothing here is unpickled: tensors are raw bytes, everything else is JSON.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drumline.core.errors import RecordError
from drumline.core.files import MIB, Kind, is_there, read_object

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
VERSION = 1
_FORMAT = "drumline-checkpoint"
_NAME = re.compile(r"step-(\d{8,})")
_PART = re.compile(r"\.step-\d{8,}\.\w+\.(part|old)")
_KIND = Kind("checkpoint's manifest", RecordError, "a manifest.json that Drumline wrote", 512 * MIB)


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint.

    >>> name_of(100)
    'step-00000100'
    """
    return f"step-{step:08d}"


def part_of(folder: Path, step: int, token: str) -> Path:
    """Return where a checkpoint is written before it appears.

    >>> part_of(Path("run"), 100, "5f3a").name
    '.step-00000100.5f3a.part'
    """
    return folder / f".{name_of(step)}.{token}.part"


def file_of(what: str, process: int, num_processes: int) -> str:
    """Return the name of a process's file.

    >>> file_of("model", 0, 2)
    'model-00001-of-00002.safetensors'
    """
    return f"{what}-{process + 1:05d}-of-{num_processes:05d}.safetensors"


def checkpoints(folder: str | Path) -> list[Path]:
    """Return the checkpoints of a folder, newest first; the folder may be one of them itself.

    >>> checkpoints("no-such-folder")
    []
    """
    path = Path(folder)
    if (path / MANIFEST).is_file():
        return [path]
    if not path.is_dir():
        return []
    found = [(int(match[1]), one) for one in path.iterdir() if (match := _NAME.fullmatch(one.name)) and one.is_dir()]
    return [one for _, one in sorted(found, reverse=True)]


def publish(part: Path, folder: Path, step: int, *, keep: int | None) -> Path:
    """Let a checkpoint appear under its name, in place of an earlier one of the same step, and remove the oldest.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for step in (1, 2, 3):
    ...     part = part_of(folder, step, "aa"); part.mkdir(); _ = publish(part, folder, step, keep=2)
    >>> sorted(one.name for one in folder.iterdir())
    ['step-00000002', 'step-00000003']
    """
    final = folder / name_of(step)
    sync_folder(part)
    if final.exists():
        _remove(final)
    os.rename(part, final)
    sync_folder(folder)
    for one in checkpoints(folder)[keep or None :] if keep else ():
        _remove(one)
    return final


def clear_parts(folder: Path) -> None:
    """Remove what runs that died left behind."""
    for one in folder.iterdir():
        if _PART.fullmatch(one.name) and one.is_dir():
            shutil.rmtree(one, ignore_errors=True)


def _remove(checkpoint: Path) -> None:
    # Renamed first: a checkpoint that is half gone must not look like one.
    away = checkpoint.with_name(f".{checkpoint.name}.gone.old")
    shutil.rmtree(away, ignore_errors=True)
    os.rename(checkpoint, away)
    shutil.rmtree(away, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Make sure that the names in a folder outlive a power failure."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_json(path: Path, value: Mapping[str, Any]) -> int:
    """Write JSON so that it outlives a power failure; returns its bytes."""
    text = json.dumps(value).encode()
    with path.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return len(text)


def write_manifest(part: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest, the last file of a checkpoint, with a checksum of its own."""
    text = json.dumps(content, sort_keys=True)
    write_json(
        part / MANIFEST,
        {"format": _FORMAT, "version": VERSION, "crc32": zlib.crc32(text.encode()), "content": json.loads(text)},
    )


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint holds; raises RecordError if the manifest or a file is missing or damaged.

    Files are held against their sizes here, tensors against their checksums when they are read.
    """
    given = read_object(checkpoint / MANIFEST, _KIND)
    if given.get("format") != _FORMAT or not isinstance(given.get("content"), dict):
        raise _KIND.refuse(f"{checkpoint / MANIFEST} is no manifest of a checkpoint")
    if given.get("version") != VERSION:
        raise RecordError(
            f"{checkpoint} has version {given.get('version')!r}",
            expected=f"version {VERSION}",
            fix="read it with the version of Drumline that wrote it",
        )
    content: dict[str, Any] = given["content"]
    if zlib.crc32(json.dumps(content, sort_keys=True).encode()) != given.get("crc32"):
        raise RecordError(f"{checkpoint / MANIFEST} is damaged: its checksum differs")
    for name, size in content["files"].items():
        file = checkpoint / name
        if not is_there(file, _KIND):
            raise RecordError(f"{file} is missing")
        if file.stat().st_size != size:
            raise RecordError(f"{file} has {file.stat().st_size} bytes", expected=f"{size}, as it was written")
    return content
