"""A run that continues in its folder, after a failure or by another number of ranks.

    FOLDER/metrics.jsonl      continues: lines of steps that will run again are cut off, so each step stands there once
    FOLDER/rank0.jsonl ...    start again: timelines belong to one program and one set of processes
    FOLDER/earlier/01/        what the first processes recorded, lost steps included: its own run folder

The run keeps its name, which stands in every line.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from drumline.core.errors import RecordError, UsageError
from drumline.core.files import FileKind, read_object
from drumline.core.measured.run import CONFIG, DECISIONS, ENDED, ENVIRONMENT, METRICS, OPENING, PLAN

EARLIER = "earlier"
_MOVED = re.compile(r"rank\d+\.jsonl|program-\d+\.csv")
_COPIED = re.compile("|".join(map(re.escape, (CONFIG, PLAN, ENVIRONMENT, METRICS, DECISIONS))) + r"|program\.csv")
_CONFIG = FileKind("run", RecordError, "the file as the run wrote it")


def set_aside(path: Path) -> str:
    """Make room in a folder for processes that continue its run, and return the run's name; a new one without a run.

    What describes the run is copied, and replaced later: at no time is the folder without it.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / CONFIG).write_text('{"run": "5f3a"}')
    >>> _ = (folder / METRICS).write_text('{"run":"5f3a","step":0,"loss":1.0}')
    >>> _ = (folder / "rank0.jsonl").write_text("")
    >>> set_aside(folder), sorted(path.name for path in folder.iterdir())
    ('5f3a', ['config.json', 'earlier', 'metrics.jsonl'])
    >>> sorted(path.name for path in (folder / "earlier" / "01").iterdir())
    ['config.json', 'metrics.jsonl', 'rank0.jsonl']
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        there = [file.name for file in path.iterdir() if file.is_file()]
        moved, copied = ([text for text in there if kind.fullmatch(text)] for kind in (_MOVED, _COPIED))
        if moved:
            away = _next(path / EARLIER)
            for name in copied:
                shutil.copy2(path / name, away / name)
            for name in moved:
                os.replace(path / name, away / name)
        (path / ENDED).unlink(missing_ok=True)
        return _name_in(path) or secrets.token_hex(6)
    except OSError as error:
        raise UsageError(
            f"cannot continue the run in {path}: {error.strerror}", expected="a folder that can be written"
        ) from None


def _next(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    number = 1 + max((int(path.name) for path in folder.iterdir() if path.name.isdecimal()), default=0)
    path = folder / f"{number:02d}"
    path.mkdir()
    return path


def _name_in(path: Path) -> str:
    """Return the name of the run in a folder; without its config that of its lines, without them none."""
    if (path / CONFIG).exists():
        return str(read_object(path / CONFIG, _CONFIG).get("run", ""))
    if not (path / METRICS).exists():
        return ""
    with (path / METRICS).open("rb") as file:
        openings = map(OPENING.match, file)
        return next((opening[1].decode() for opening in openings if opening is not None), "")
