"""Threads that wait for transfers whose end can only be learnt by waiting, and a descriptor that signals it.

    rank's own thread                         one thread per source
    watch(source, work, note) ──────────────► work.wait(), in the order of the transfers
    poll wakes up, calls `finished` ◄─────── a byte into a pipe
      note(error or None) for each

A wait for gloo cannot be interrupted: a rank that waited itself would not learn that another one failed. The thread
only waits, without the interpreter's lock. If its transfer never ends, the thread lives until the process ends.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue

from torch.distributed.distributed_c10d import Work

# The wait for the message has its own deadline; this one only replaces the backend's, which would break the group.
_FOR_EVER = timedelta(days=7)

Note = Callable[[RuntimeError | None], None]


class Waiter:
    """Waits for transfers in threads; `fd` becomes readable when some have ended."""

    def __init__(self) -> None:
        self.fd, self._bell = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._bell, False)
        self._lock = threading.Lock()
        self._is_closed = False
        self._finished: deque[tuple[Note, RuntimeError | None]] = deque()
        self._queues: dict[int, SimpleQueue[tuple[Work, Note] | None]] = {}

    def watch(self, source: int, work: Work, note: Note) -> None:
        """Let `finished` call `note` after the transfer has ended; transfers of one source end in order."""
        queue = self._queues.get(source)
        if queue is None:
            queue = self._queues[source] = SimpleQueue()
            threading.Thread(target=self._wait, args=(queue,), name=f"drumline-wait-{source}", daemon=True).start()
        queue.put((work, note))

    def finished(self) -> None:
        """Call the notes of all transfers that have ended."""
        with suppress(BlockingIOError):
            os.read(self.fd, 4096)
        while self._finished:
            note, error = self._finished.popleft()
            note(error)

    def close(self) -> None:
        """Release the descriptors, and let the threads end."""
        for queue in self._queues.values():
            queue.put(None)
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.fd)
                os.close(self._bell)

    def _wait(self, queue: SimpleQueue[tuple[Work, Note] | None]) -> None:
        while (pair := queue.get()) is not None:
            work, note = pair
            error = None
            try:
                work.wait(_FOR_EVER)
            except RuntimeError as raised:
                error = raised
            self._finished.append((note, error))
            del pair, work, note
            with self._lock, suppress(BlockingIOError):
                if not self._is_closed:
                    os.write(self._bell, b"\0")
