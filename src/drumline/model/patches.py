"""Replace attributes of torch while something is watched, and restore them as soon as nothing is.

Pipelines in several threads may watch at once, also nested, and a user may have replaced the same attribute before, or
may do so meanwhile. So it is replaced once for all of them. Each call goes to the innermost watcher of its own thread,
then to the original. The original is restored when the last watcher is done:

    thread 0   by(a) ──────────────────────► done          the original is kept with the replacement
    thread 1            by(b) ──────────────────────► done  now it is restored, unless other code replaced it meanwhile
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import setitem
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

_lock = threading.Lock()
_INHERITED: Any = object()


class Replacement:
    """A temporary replacement, and what it replaced: raw, as the owner has it, or what it inherits."""

    __slots__ = ("count", "of_thread", "original", "raw", "stand_in")

    def __init__(self, owner: Any, name: Any, raw: Any) -> None:
        self.raw = raw
        self.original = getattr(owner, name) if raw is _INHERITED else raw
        self.stand_in: Any = None
        self.count = 0  # number of watchers
        self.of_thread = threading.local()  # watchers of each thread, the innermost last

    @property
    def watcher(self) -> Any:
        """The innermost watcher of this thread, None if there is none."""
        watchers = getattr(self.of_thread, "watchers", None)
        return watchers[-1] if watchers else None


class Patch:
    """An attribute, or an entry of a dict, that `make(replaced)` replaces while anything watches.

    >>> class Engine:
    ...     def run(self): return 1
    >>> def louder(replaced):
    ...     return lambda self: replaced.original(self) + (replaced.watcher or 0)
    >>> patch = Patch(Engine, "run", louder)
    >>> with patch.by(10):
    ...     inside = Engine().run()
    >>> inside, Engine().run()
    (11, 1)
    """

    def __init__(self, owner: Any, name: Any, make: Callable[[Replacement], Any]) -> None:
        self.owner = owner
        self.name = name
        self._make = make
        self._space: Any = owner if isinstance(owner, dict) else vars(owner)
        self._put = partial(setitem if isinstance(owner, dict) else setattr, owner, name)
        self._now: Replacement | None = None
        self._last: Replacement | None = None  # reused while the original is the same

    @property
    def watcher(self) -> Any:
        """The innermost watcher of this thread, None if there is none."""
        return None if self._now is None else self._now.watcher

    def enter(self, watcher: Any) -> None:
        """Send calls of this thread through a watcher, until `leave`."""
        with _lock:
            now = self._now
            if now is None:
                raw, now = self._space.get(self.name, _INHERITED), self._last
                if now is None or now.raw is not raw:
                    now = self._last = Replacement(self.owner, self.name, raw)
                    now.stand_in = self._make(now)
                self._put(now.stand_in)
                self._now = now
            now.count += 1
        try:
            now.of_thread.watchers.append(watcher)
        except AttributeError:
            now.of_thread.watchers = [watcher]

    def leave(self) -> None:
        """Remove the innermost watcher of this thread."""
        now = self._now
        assert now is not None, f"nobody watches {self.name}"
        now.of_thread.watchers.pop()
        with _lock:
            now.count -= 1
            if not now.count:
                self._now = None
                # A later replacement by other code stays; below it, ours has no watcher left and only passes calls on.
                if self._space.get(self.name) is not now.stand_in:
                    self._last = None
                elif now.raw is _INHERITED:
                    delattr(self.owner, self.name)
                else:
                    self._put(now.raw)

    @contextmanager
    def by(self, watcher: Any) -> Iterator[None]:
        """Send calls of this thread through a watcher inside."""
        self.enter(watcher)
        try:
            yield
        finally:
            self.leave()


@contextmanager
def having_gradients(
    parameters: Iterable[nn.Parameter], gradients: Mapping[nn.Parameter, Tensor] = MappingProxyType({})
) -> Iterator[list[nn.Parameter]]:
    """Let parameters have these gradients inside, and no others; yield all of them."""
    before = {param: param.grad for param in parameters}
    for param in before:
        param.grad = gradients.get(param)
    try:
        yield list(before)
    finally:
        for param, gradient in before.items():
            param.grad = gradient


@contextmanager
def put_in(entries: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Replace entries of dicts inside; afterwards restore what was there, or nothing.

    >>> table = {"a": 1}
    >>> with put_in([(table, "a", 2), (table, "b", 3)]):
    ...     inside = dict(table)
    >>> inside, table
    ({'a': 2, 'b': 3}, {'a': 1})
    """
    changes = [(table, key, value, table.get(key, _INHERITED)) for table, key, value in entries]
    for table, key, value, _ in changes:
        table[key] = value
    try:
        yield
    finally:
        for table, key, _, before in changes:
            if before is _INHERITED:
                del table[key]
            else:
                table[key] = before
