"""Who takes from an iterator: a stand-in for it notes it, because an iterator does not say how far it has come.

::

    self.words = iter(words)      a block's attribute
    next(self.words)              in its forward: a second run gets the next word, not the same
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from drumline.model.kept_state.contents import GivenBack, are_same, with_items
from drumline.model.kept_state.snapshot import Snapshot, replaced
from drumline.model.kept_state.spaces import Held

_READS = frozenset({"send", "throw", "close", "read", "readline", "readlines", "readinto", "seek"})


class Spy:
    """Stands for an iterator, a file or a source of chance, and notes whether anything takes from it.

    >>> spy = Spy(iter([1, 2]))
    >>> spy.is_used, next(spy), spy.is_used
    (False, 1, True)
    """

    __slots__ = ("is_used", "items", "watched")

    def __init__(self, watched: Any) -> None:
        self.watched = watched
        self.is_used = False
        self.items: list[Any] = []

    def __iter__(self) -> Spy:
        return self

    def __next__(self) -> Any:
        self.is_used = True
        self.items.append(next(self.watched))
        return self.items[-1]

    def __len__(self) -> int:
        return len(self.watched)

    def __deepcopy__(self, memo: Any) -> Spy:
        return self  # what a copy takes is given back, too

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in Spy.__slots__:
            raise AttributeError(name)
        self.is_used = self.is_used or name in _READS or isinstance(self.watched, random.SystemRandom)
        return getattr(self.watched, name)


class Repeats(Spy):
    """The same that takes no more than one item, for runs whose numbers do not matter.

    >>> words = iter("ab")
    >>> repeats = Repeats(words)
    >>> next(repeats), next(repeats), next(words)
    ('a', 'a', 'b')
    """

    __slots__ = ()
    gives_the_same = True

    def __next__(self) -> Any:
        return self.items[0] if self.items else super().__next__()


class Spies:
    """Stand-ins for all iterators that a snapshot has found, in the places where it has found them."""

    def __init__(self, snapshot: Snapshot, spaces: Sequence[Held], kind: type[Spy] = Spy) -> None:
        self._spies = {number: kind(value) for number, (value, _) in snapshot.iterators.items()}
        self._objects = [(value, kind) for value, kind, _ in snapshot.objects.values() if kind.holds_objects]
        self._spaces = spaces
        self.enter()

    def enter(self) -> None:
        """Put them where the iterators are."""
        self._replace(lambda value: self._spies.get(id(value), value))

    def leave(self) -> None:
        """Put the iterators back, wherever they are by now."""
        self._replace(lambda value: value.watched if isinstance(value, Spy) else value)

    def used(self) -> list[Any]:
        """Return the iterators from which somebody took."""
        return [spy.watched for spy in self._spies.values() if spy.is_used]

    def give_back(self) -> None:
        """Let what was taken from iterators come again, in the places where they were found."""
        given_back: dict[int, Any] = {}
        for number, spy in self._spies.items():
            if isinstance(spy.watched, GivenBack):
                spy.watched.items.extendleft(reversed(spy.items))
            elif spy.items:
                given_back[number] = GivenBack(spy.watched, spy.items)
        if given_back:
            self._replace(lambda value: given_back.get(id(value), value))

    def _replace(self, by: Callable[[Any], Any]) -> None:
        for value, kind in self._objects:
            state = kind.take(value)
            items = with_items(state, lambda item: replaced(item, by))
            if not are_same(state, items):
                kind.put(value, items)
        for space in self._spaces:
            for name, value in space.items():
                space[name] = replaced(value, by)


def original_of(value: Any) -> Any:
    """Return what stand-ins stand for.

    >>> words = iter("ab")
    >>> original_of(Spy(Spy(words))) is words, original_of(words) is words
    (True, True)
    """
    while isinstance(value, Spy):
        value = value.watched
    return value


def kind_of_iterator(value: Any) -> str:
    """Return what to call it in an error.

    >>> kind_of_iterator(x for x in ()), kind_of_iterator(iter([])), kind_of_iterator(random.SystemRandom())
    ('a generator', 'a list_iterator', 'a SystemRandom')
    """
    name = type(value.source if isinstance(value, GivenBack) else value).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"
