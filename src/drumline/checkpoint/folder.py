"""A folder of checkpoints: what lies where, and how one appears all at once.

    FOLDER/step-00000100/                      appears by one rename, once every process has written its files
        model-00001-of-00002.safetensors       parameters and buffers of process 1, by the unsplit model's names
        model.safetensors.index.json           which file holds which of them, as Hugging Face's libraries read it
        training-00001-of-00002.safetensors    optimizer state, float32 copies, random generators
        manifest.json                          every file's size, every tensor's checksum, settings, the user's `extra`
    FOLDER/.step-00000150.5f3a.part/           being written, or left by a run that died: never read
    FOLDER/.step-00000100.5f3a.replaced/       stands in for step 100 while another takes its place
    FOLDER/.step-00000050.gone.old/            being removed

Nothing here is unpickled: tensors are raw bytes, everything else is JSON.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from drumline.checkpoint.manifest import MANIFEST

INDEX = "model.safetensors.index.json"
_NAME = re.compile(r"step-(\d{8,})")
_REPLACED = re.compile(r"\.step-(\d{8,})\.\w+\.replaced")
_PART = re.compile(r"\.step-\d{8,}\.\w+\.(part|old|replaced)")


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint.

    >>> name_of(100)
    'step-00000100'
    """
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step that a checkpoint's name says; -1 if it has another name.

    >>> step_of(Path("run/step-00000100")), step_of(Path("run/.step-00000100.5f3a.replaced")), step_of(Path("best"))
    (100, 100, -1)
    """
    match = _NAME.fullmatch(checkpoint.name) or _REPLACED.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


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
    """Return the checkpoints of a folder, the largest step first; the folder may be one of them itself.

    They may be damaged, and of several lines: see shelf.py.

    >>> checkpoints("no-such-folder")
    []
    """
    path = Path(folder)
    if (path / MANIFEST).is_file():
        return [path]
    if not path.is_dir():
        return []
    there = [file for file in path.iterdir() if step_of(file) >= 0 and file.is_dir()]
    # One that is being replaced counts until the other has appeared.
    by_step = {step_of(file): file for file in sorted(there, key=lambda file: not file.name.startswith("."))}
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def publish(part: Path, folder: Path, step: int, token: str) -> Path:
    """Let a checkpoint appear under its name, instead of an earlier one of the same step.

    At every moment one of the two is there to be found.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for token in ("aa", "bb"):
    ...     part = part_of(folder, 1, token); part.mkdir(); (part / token).touch(); _ = publish(part, folder, 1, token)
    >>> [path.name for path in folder.iterdir()], [path.name for path in (folder / "step-00000001").iterdir()]
    (['step-00000001'], ['bb'])
    """
    final, aside = folder / name_of(step), folder / f".{name_of(step)}.{token}.replaced"
    sync_folder(part)
    if final.exists():
        os.rename(final, aside)
    try:
        os.rename(part, final)
    except OSError:
        if aside.exists():
            os.rename(aside, final)
        raise
    sync_folder(folder)
    with suppress(OSError):  # the checkpoint is there: what is left behind is cleared before the next
        remove(aside)
    return final


def clear_parts(folder: Path) -> None:
    """Remove what runs that died left behind; a checkpoint that was to be replaced, and was not, comes back."""
    for path in list(folder.iterdir()):
        if _PART.fullmatch(path.name) and path.is_dir():
            final = folder / name_of(max(step_of(path), 0))
            with suppress(OSError):
                if _REPLACED.fullmatch(path.name) and not final.exists():
                    os.rename(path, final)
                else:
                    remove(path)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint, if it is there."""
    if not checkpoint.exists():
        return
    # Renamed first: a checkpoint that is half gone must not look like one.
    away = checkpoint.with_name(f".{checkpoint.name.lstrip('.').partition('.')[0]}.gone.old")
    if away != checkpoint:
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
