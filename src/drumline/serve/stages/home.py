"""The private folder of a service: its copy of the export, the sockets and the ledgers of its stages.

    drumline-xxxx/          only this user may enter it
      lock                  held as long as the front runs
      export/               what is served, whatever becomes of the folder that it was copied from
      0, 1, ...             sockets
      ledger0, ledger1, ... what stages do now

If the front is killed, its stages remove the folder as they end. If all are killed at once, the next front removes it:
the lock of such a folder is free.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from drumline.core.errors import UsageError
from drumline.serve.wire.files import LOCK, hold, remove_home
from drumline.serve.wire.manifest import Manifest

_PREFIX, _EXPORT = "drumline-", "export"


class ModelHome:
    """A folder that is there until `remove`, or until nobody is left who needs it.

    >>> home = ModelHome(); home.path.name.startswith("drumline-")
    True
    >>> home.remove(); home.path.exists()
    False
    """

    def __init__(self) -> None:
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            _remove_left(self.path)
            fresh = self.path / f".{LOCK}"
            self._lock = os.open(fresh, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fresh.rename(self.path / LOCK)  # others see it only once it is held
        except OSError as error:
            what = f"cannot make a folder for sockets and the export: {error.strerror or error}"
            raise UsageError(what, fix="set TMPDIR to a folder with room for the export") from None

    @property
    def export(self) -> Path:
        """Where the copy of the export is."""
        return self.path / _EXPORT

    def hold(self, folder: Path, manifest: Manifest) -> Path:
        """Copy an export into this folder; returns the copy."""
        return hold(folder, manifest, self.export)

    def remove(self) -> None:
        """Remove the folder."""
        remove_home(self.path)
        with suppress(OSError):
            os.close(self._lock)


def _remove_left(mine: Path) -> None:
    """Remove folders of services that were killed together with all their stages."""
    for path in mine.parent.glob(f"{_PREFIX}*/{LOCK}"):
        with suppress(OSError):
            if path.parent != mine and path.stat().st_uid == os.getuid():
                with path.open("r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_home(path.parent)
