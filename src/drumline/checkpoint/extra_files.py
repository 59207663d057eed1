"""Files that stand in a checkpoint beside the state: a model's configuration, its tokenizer, whatever the user adds.

They are written before the checkpoint appears, so every checkpoint has them. Nothing here reads them back, so that
they may be changed afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from drumline.checkpoint.folder import INDEX, sync_folder
from drumline.checkpoint.manifest import MANIFEST, write_bytes
from drumline.core.errors import UsageError

# Writes a file (second) of a checkpoint from the tensors in it, whose folder (first) all processes have written to.
Maker = Callable[[Path, Path], None]
# By name, with "/" for folders inside: contents, where the file lies, or what makes it.
Files = Mapping[str, bytes | Path | Maker]
_TENSORS = r"(model|training)-\d+-of-\d+\.safetensors"
_OURS = re.compile(rf"{re.escape(MANIFEST)}|{re.escape(INDEX)}|{_TENSORS}|(process|failed)-.*")


def checked_files(files: Any) -> Files:
    """Return further files of a checkpoint, contents as bytes; refuse names that lead out of it, or that it has itself.

    >>> checked_files({"notes.txt": "mine"})
    {'notes.txt': b'mine'}
    >>> checked_files({"manifest.json": "mine"})
    Traceback (most recent call last):
    drumline.core.errors.UsageError: files has 'manifest.json', which every checkpoint writes itself; ...
    """
    if files is None:
        return {}
    if not isinstance(files, Mapping):
        raise UsageError(f"files is {files!r:.80}", expected="contents or paths by name, like {'config.json': path}")
    contents: dict[str, bytes | Path | Maker] = {}
    for name, content in files.items():
        parts = PurePosixPath(str(name)).parts
        if not isinstance(name, str) or not parts or name.startswith("/") or "\0" in name or ".." in parts:
            raise UsageError(f"files has {name!r:.80}", expected="a name inside of the checkpoint, like config.json")
        if _OURS.fullmatch(parts[0]):
            raise UsageError(
                f"files has {name!r}, which every checkpoint writes itself", expected="another name for it"
            )
        if not isinstance(content, str | bytes | Path) and not callable(content):
            raise UsageError(f"files has {name!r} as {content!r:.60}", expected="text, bytes, or a Path to copy")
        contents["/".join(parts)] = content.encode() if isinstance(content, str) else content
    return contents


def write_files(part: Path, files: Files) -> None:
    """Write the files into a checkpoint that is being written."""
    for name, content in files.items():
        path = part / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(part, path)
        else:
            write_bytes(path, content if isinstance(content, bytes) else content.read_bytes())
        if path.parent != part:
            sync_folder(path.parent)
