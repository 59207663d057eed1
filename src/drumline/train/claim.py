"""Who trains in a run folder: one run at a time, and a folder that holds a run is only continued on purpose.

    FOLDER/run.lock     locked (flock) by whoever started the run, and by every rank; says who that is

The kernel lets go of a lock when its process ends, however it ends. So a folder stays taken until the last rank is
gone, and no longer. On a file system without locks, run.lock decides. If it names a process on this host, Drumline
checks whether that still runs. It cannot check another host, so the error then names the file to remove.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from drumline.core.errors import UsageError

LOCK = "run.lock"
_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL}
_FIRST = " (first)"  # after a job's name that does not count yet
_SECONDS_A_LOOK = 0.1
_SECONDS_TO_END = 20.0  # for ranks whose starter is gone


class FolderInUse(UsageError):
    """Another run has the folder."""


@dataclass(eq=False)
class Claim:
    """A folder that is taken; closing it, or the end of the process, lets go."""

    folder: Path
    before: Mapping[str, Any]  # who had it last, empty if nobody
    _file: int
    _is_signed: bool = False

    def __post_init__(self) -> None:
        # A forked worker must not keep the folder taken when this process is gone.
        os.register_at_fork(after_in_child=self._let_go)

    def keep(self, job: str = "") -> None:
        """Write down who has it; ranks of the same run may take it as well from here on."""
        try:
            _write(self._file, _me(job))
        except OSError as error:
            raise _unwritable(self.folder, error) from None
        self._is_signed = True
        if _flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB) is False:
            raise _folder_in_use(self.folder)  # another came in between

    def close(self) -> None:
        """Let go."""
        if self._file >= 0 and self._is_signed:
            with suppress(OSError, ValueError):
                _write(self._file, {**_read(self.folder), "released": True})
        self._let_go()

    def _let_go(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def claim(folder: str | Path, *, job: str = "") -> Claim:
    """Take a folder for a run, or raise who has it; waits a while for ranks whose starter is gone.

    `job` names what starts the same run again after a failure. See `same_job`.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with claim(folder) as mine:
    ...     mine.keep()
    ...     claim(folder)
    Traceback (most recent call last):
    drumline.train.claim.FolderInUse: run.out: a run in ... is under way: process ... since ...
    >>> claim(folder).close()
    """
    path = Path(folder)
    limit = time.monotonic() + _SECONDS_TO_END
    file = _opened(path)
    try:
        while not _is_ours(file, path, job):
            owner = _read(path)
            is_ending = bool(job and owner.get("job") == job) or not _seems_alive(owner)
            if not is_ending or time.monotonic() >= limit:
                raise _folder_in_use(path)
            time.sleep(_SECONDS_A_LOOK)
    except BaseException:
        os.close(file)
        raise
    return Claim(path, _read(path), file)


def take_part(folder: str | Path) -> None:
    """Keep a folder taken until this process ends, as one rank of a run whose starter has claimed it."""
    path = Path(folder)
    file = _opened(path)
    if _flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB) is False:
        os.close(file)
        raise _folder_in_use(path)
    Claim(path, {}, file)  # closed at a fork; otherwise nobody closes it


def same_job(claimed: Claim, job: str) -> bool:
    """Whether what starts this run has started the last one in the folder."""
    return bool(job) and not job.endswith(_FIRST) and job == _plain(claimed.before)


def job_here() -> str:
    """Return the name that torchrun gives a job in all of its restarts; an empty text elsewhere.

    Without its own name, a job has only its address, which the next job may have too. So that counts in a restart.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if name != "none":
        return name
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return place if again else f"{place}{_FIRST}"


def job_of(folder: Path) -> str:
    """Return the job of the last run in a folder."""
    return _plain(_read(folder))


def _plain(owner: Mapping[str, Any]) -> str:
    return str(owner.get("job", "")).removesuffix(_FIRST)


def last_of(folder: Path) -> str:
    """Return who had a folder last, for people."""
    return _who(_read(folder))


def _opened(path: Path) -> int:
    try:
        if path.exists() and not path.is_dir():
            raise UsageError(f"run.out: {path} is a file", expected="a folder without a run, or none yet")
        path.mkdir(parents=True, exist_ok=True)
        return os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"run.out: cannot write to {path}: {error.strerror}",
        expected="a folder that can be written",
        fix="name another folder: --out FOLDER",
    )


def _flock(file: int, how: int) -> bool | None:
    """Lock a file; return False if another has it, None where the file system has no locks."""
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _is_ours(file: int, path: Path, job: str) -> bool:
    got = _flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if got is not None:
        return got
    owner = _read(path)
    return not owner or bool(job and owner.get("job") == job) or not _seems_alive(owner)


def _seems_alive(owner: Mapping[str, Any]) -> bool:
    if owner.get("released"):
        return False
    if owner.get("boot") != _boot():
        return True  # on another host, or before this one was started: nobody here can tell
    pid = owner.get("pid", 0)
    if owner.get("started") is not None:
        return bool(_started(pid) == owner["started"])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _me(job: str) -> dict[str, Any]:
    pid = os.getpid()
    since = datetime.now(UTC).isoformat(timespec="seconds")
    host = socket.gethostname()
    return {"pid": pid, "host": host, "since": since, "job": job, "boot": _boot(), "started": _started(pid)}


def _boot() -> str:
    """Return what tells apart hosts, their boots, and containers that number their processes by themselves."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


def _started(pid: int) -> int | None:
    """Return when a process was started, in the kernel's ticks; None if there is none, or nobody tells."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _write(file: int, owner: Mapping[str, Any]) -> None:
    text = (json.dumps(owner) + "\n").encode()
    os.pwrite(file, text, 0)
    os.ftruncate(file, len(text))


def _read(path: Path) -> dict[str, Any]:
    try:
        with (path / LOCK).open("rb") as file:
            content = json.loads(file.read(65536))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _who(owner: Mapping[str, Any]) -> str:
    if not owner:
        return "a process that left no name"
    return f"process {owner.get('pid')} on {owner.get('host')} since {owner.get('since')}"


def _folder_in_use(path: Path) -> FolderInUse:
    owner = _read(path)
    text, fix = f"run.out: a run in {path} is under way: {_who(owner)}", "name another folder, --out FOLDER"
    if not _seems_alive(owner):
        text += " has ended, and some of its ranks have not"
    elif owner.get("boot") != _boot():
        fix += f"; if that process has ended, remove {path / LOCK}"
    return FolderInUse(text, expected="a folder without a run, or none yet", fix=fix)
