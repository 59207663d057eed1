"""Attributes of torch that are replaced while something is watched, and are what they were as soon as nothing is.

Pipelines of several threads may watch at once, one inside of another too, and a user may have replaced the same
attribute before, or do so meanwhile. So it is replaced once for all of them, each call goes to the innermost watcher of
its own thread and then to what stood there before, and that is put back when the last one is done:

    thread 0   by(a) ──────────────────────► done          what was found is kept with the replacement
    thread 1            by(b) ──────────────────────► done  here it is put back, unless somebody else replaced it by now
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()


def _space(owner: Any) -> Any:
    return owner if isinstance(owner, dict) else vars(owner)


class Replaced:
    """What stands in a place for a while, and what was found there: raw, as the owner has it, or what it inherits."""

    __slots__ = ("_of_thread", "count", "found", "is_own", "stand_in")

    def __init__(self, owner: Any, name: Any) -> None:
        self.is_own = name in _space(owner)
        self.found = _space(owner)[name] if self.is_own else getattr(owner, name)
        self.stand_in: Any = None
        self.count = 0  # of those that watch
        self._of_thread = threading.local()

    @property
    def watchers(self) -> list[Any]:
        """Those of this thread, the innermost last; in another thread, and later, there are none."""
        try:
            return self._of_thread.watchers  # type: ignore[no-any-return]
        except AttributeError:
            none: list[Any] = []
            self._of_thread.watchers = none
            return none

    @property
    def watcher(self) -> Any:
        """The innermost watcher of this thread, None if there is none."""
        watchers = self.watchers
        return watchers[-1] if watchers else None


class Patch:
    """An attribute, or an entry of a dict, that `make(replaced)` stands in for while anybody watches.

    >>> class Engine:
    ...     def run(self): return 1
    >>> def louder(replaced):
    ...     return lambda self: replaced.found(self) + (replaced.watcher or 0)
    >>> patch = Patch(Engine, "run", louder)
    >>> with patch.by(10):
    ...     inside = Engine().run()
    >>> inside, Engine().run()
    (11, 1)
    """

    def __init__(self, owner: Any, name: Any, make: Callable[[Replaced], Any]) -> None:
        self.owner = owner
        self.name = name
        self._make = make
        self._now: Replaced | None = None

    @property
    def watcher(self) -> Any:
        """The innermost watcher of this thread, None if there is none."""
        return None if self._now is None else self._now.watcher

    def enter(self, watcher: Any) -> None:
        """Let calls of this thread come by a watcher, until `leave`."""
        with _lock:
            now = self._now
            if now is None:
                now = self._now = Replaced(self.owner, self.name)
                now.stand_in = self._make(now)
                self._put(now.stand_in)
            now.count += 1
        now.watchers.append(watcher)

    def leave(self) -> None:
        """Let the innermost watcher of this thread go."""
        now = self._now
        assert now is not None, f"nobody watches {self.name}"
        now.watchers.pop()
        with _lock:
            now.count -= 1
            if now.count:
                return
            self._now = None
            # What somebody put over ours meanwhile stays; below it ours has no watcher left, and only hands on.
            if _space(self.owner).get(self.name) is now.stand_in:
                if now.is_own:
                    self._put(now.found)
                else:
                    delattr(self.owner, self.name)

    def _put(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)

    @contextmanager
    def by(self, watcher: Any) -> Iterator[None]:
        """Let calls of this thread come by a watcher inside."""
        self.enter(watcher)
        try:
            yield
        finally:
            self.leave()
