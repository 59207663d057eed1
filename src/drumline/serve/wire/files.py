"""The files of an exported model: held against their checksums, and copied so that nobody changes what is served.

A folder that is replaced while it is served would give a restarted stage another model than its neighbours. A file that
is overwritten in its place would even change weights that a running stage has mapped. So what is served is a copy.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from drumline.core.errors import RecordError, UsageError, counted
from drumline.core.files import FileKind, opened
from drumline.serve.wire.graph_files import external_files
from drumline.serve.wire.manifest import Manifest

LOCK = "lock"  # in the private folder of a service, held as long as its front runs
_FILE = FileKind("file of a stage", RecordError, "every file that manifest.json names")


def digest_of(path: Path) -> tuple[int, str]:
    """Return the bytes and the SHA-256 of a file."""
    digest, size = hashlib.sha256(), 0
    with opened(path, _FILE) as file:
        while piece := file.read(2**20):
            digest.update(piece)
            size += len(piece)
    return size, digest.hexdigest()


def check_files(folder: Path, manifest: Manifest, stage: int) -> Path:
    """Return the graph of a stage, after holding all its files against the manifest."""
    if not 0 <= stage < len(manifest.stages):
        has = counted(len(manifest.stages), "stage")
        raise RecordError(f"there is no stage {stage}", expected=f"a number below {len(manifest.stages)}: {has}")
    files, graph = manifest.stages[stage].files, manifest.stages[stage].file
    for name, expected in files.items():
        digest = digest_of(folder / name)
        if digest != expected:
            raise RecordError(
                f"{folder / name} is damaged: it has {digest[0]} bytes and SHA-256 {digest[1][:12]}...",
                expected=f"{expected[0]} bytes and {expected[1][:12]}..., as it was written",
                fix="export the model again",
            )
    for name in external_files(folder, graph):
        if name not in files:
            raise RecordError(
                f"{folder / graph} reads weights from {name[:200]!r}, which the manifest does not list",
                expected="files with checksums in manifest.json",
                fix="export the model again",
            )
    return folder / graph


def hold(folder: Path, manifest: Manifest, copy: Path) -> Path:
    """Copy what a manifest names into a new folder, with the manifest itself; returns that folder."""
    names = dict.fromkeys(name for stage in manifest.stages for name in stage.files)
    with _written(folder, copy):
        copy.mkdir()
        manifest.save(copy)
        for name in names:  # first, so that a folder that is removed meanwhile stays away
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        with opened(folder / name, _FILE) as source, _written(folder, copy), (copy / name).open("wb") as target:
            shutil.copyfileobj(source, target, 2**20)
    return copy


def remove_home(home: Path) -> None:
    """Remove the private folder of a service, its lock last: the next front finds what is left if this is cut short."""
    with suppress(OSError):
        for path in home.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink(missing_ok=True)
    shutil.rmtree(home, ignore_errors=True)


@contextmanager
def _written(folder: Path, copy: Path) -> Iterator[None]:
    """Turn what the disk refuses into an error for the user."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot hold a copy of {folder} in {copy.parent}: {error.strerror or error}",
            fix="set TMPDIR to a folder with room for it",
        ) from None
