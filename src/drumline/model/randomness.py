"""Random numbers that depend on what is computed, not on where.

Before a block runs, the generators are seeded from (seed, step, microbatch, block name). So a block draws the same
numbers on any rank and in any order, and again when it is recomputed. In a mesh, microbatches are numbered over all
lines. Blocks that draw nothing are not seeded. These are blocks of layers known not to draw, and blocks that have not
drawn so far, as long as a run leaves the generators unchanged.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drumline.model.numpys_words import numpys_words, put_numpys_words
from drumline.model.patches import put_in
from drumline.model.pythons_words import put_pythons_state, pythons_state

# Layers of torch.nn that may draw random numbers; all others of torch.nn draw none.
_DRAWING = (
    nn.modules.dropout._DropoutNd, nn.RReLU, nn.RNNBase, nn.MultiheadAttention, nn.Transformer,
    nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d,
)  # fmt: skip

# Kinds of generators that data or modules may hold as their own.
OWN_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)


def may_draw(block: nn.Module) -> bool:
    """Whether the block may draw random numbers; anything but a plain layer of torch.nn may.

    >>> may_draw(nn.Sequential(nn.Linear(2, 2), nn.GELU())), may_draw(nn.Dropout())
    (False, True)
    """
    return any(
        isinstance(module, _DRAWING)
        or not type(module).__module__.startswith("torch.nn.modules")
        or module._forward_hooks
        or module._forward_pre_hooks
        for module in block.modules()
    )


def draws(block: nn.Module) -> bool:
    """Whether the block has a dropout that draws in training; other blocks may draw as well.

    >>> draws(nn.Dropout(0.1)), draws(nn.Dropout(0.0))
    (True, False)
    """
    return any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in block.modules())


_seedings: Counter[int] = Counter()  # how often each thread has set torch's generators, which all threads share


def seedings_elsewhere() -> int:
    """Return how often other threads have set torch's generators so far.

    >>> before = seedings_elsewhere()
    >>> Randomness(0, torch.device("cpu")).apply(0, "a")
    >>> seedings_elsewhere() == before
    True
    """
    own_thread = threading.get_ident()
    return sum(count for thread, count in list(_seedings.items()) if thread != own_thread)


class HostChance:
    """The random state of Python and NumPy: blocks may use these too, and nothing seeds them.

    A recomputed block must draw the same numbers again.

    >>> before = HostChance(); drawn = random.random(); moved = before.has_moved()
    >>> with before.again():
    ...     same = random.random() == drawn
    >>> moved, same
    (True, True)
    """

    __slots__ = ("_numpy", "_python", "_words", "moved")

    def __init__(self, since: HostChance | None = None) -> None:
        """Take the state; `since` an earlier one, after which nobody has set NumPy's state, it takes less time."""
        self._python = pythons_state()
        self._words = numpys_words()
        self._numpy: Any
        if since is not None and self._words is not None and since._words == self._words and not since._numpy[3]:
            self._numpy = since._numpy
        else:  # the first, a new one, or one with a second normal number in store, which the words do not show
            self._numpy = np.random.get_state()
        self.moved = False  # whether anything was drawn while it was kept

    def has_moved(self) -> bool:
        """Whether anything was drawn since."""
        return self.differs_from(HostChance(since=self))

    def differs_from(self, now: HostChance) -> bool:
        """Whether anything was drawn between two states."""
        same = now._numpy is self._numpy or (
            now._numpy[2:] == self._numpy[2:] and np.array_equal(now._numpy[1], self._numpy[1])
        )
        return not same or now._python != self._python

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw from this state inside, and restore the current state afterwards."""
        with HostChance().keeping_state():
            self.restore()
            yield

    @contextmanager
    def keeping_state(self) -> Iterator[None]:
        """Restore this state afterwards, whatever is drawn inside."""
        try:
            yield
        finally:
            self.moved = self.has_moved()
            if self.moved:
                self.restore()

    def restore(self) -> None:
        """Draw from this state again from now on."""
        put_pythons_state(self._python)
        if self._words is None or self._numpy[3] or not put_numpys_words(self._words):
            np.random.set_state(self._numpy)


class Randomness:
    """Seeds a device's generators for one block of one microbatch."""

    def __init__(self, seed: int, device: torch.device, *, first: int = 0) -> None:
        self.seed = seed
        self.first = first  # microbatches of the lines before this one
        self.alike = 1  # so many microbatches in a row draw the same numbers: parts of one
        self.step = 0
        self._silent = False
        self._standing: list[Tensor] = []
        self._drawing: list[str] | None = None  # the blocks that drew, while something listens
        self._seeded: tuple[str, list[Tensor]] | None = None
        self._generators = _generators(device)

    def seed_for(self, microbatch: int, block: str) -> int:
        """Return the seed of a block for a microbatch of this step.

        >>> draws = Randomness(0, torch.device("cpu"))
        >>> draws.seed_for(0, "layers") == draws.seed_for(0, "layers"), draws.seed_for(0, "a") == draws.seed_for(1, "a")
        (True, False)
        """
        # The 0 keeps the numbers of earlier versions, so that runs can continue from their checkpoints bit for bit.
        key = f"{self.seed}/{self.step}/{(self.first + microbatch) // self.alike}/0/{block}".encode()
        return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1

    def apply(self, microbatch: int, block: str) -> None:
        """Seed the generators for what `block` is about to draw."""
        if not self._silent:
            self._standing = []
            self._listen()
            _seedings[threading.get_ident()] += 1
            self.seed_all(self.seed_for(microbatch, block))
            if self._drawing is not None:
                self._seeded = block, self.states()

    def seed_all(self, seed: int) -> None:
        """Seed the generators."""
        for generator in self._generators:
            generator.manual_seed(seed)

    def watch(self) -> None:
        """Store the generators' states, unless they are known from the last check."""
        if not self._silent and not self._standing:
            self._standing = self.states()

    def drew(self) -> bool:
        """Whether anything was drawn since the last check."""
        if self._silent:
            return False
        before, self._standing = self._standing, self.states()
        return _differ(before, self._standing)

    def states(self) -> list[Tensor]:
        """Return the generators' states."""
        return [generator.get_state() for generator in self._generators]

    def has_moved(self, before: list[Tensor]) -> bool:
        """Whether torch's generators are in other states than before."""
        return _differ(before, self.states())

    def go_on(self, states: Sequence[Tensor]) -> None:
        """Set the generators to another rank's states."""
        _seedings[threading.get_ident()] += 1
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _listen(self) -> None:
        """Record whether the block that was seeded last has drawn."""
        if self._drawing is not None and self._seeded is not None:
            block, before = self._seeded
            self._seeded = None
            if block not in self._drawing and _differ(before, self.states()):
                self._drawing.append(block)

    @contextmanager
    def listening(self) -> Iterator[list[str]]:
        """Collect the names of the blocks that draw; the list is complete afterwards."""
        drawing: list[str] = []
        self._drawing = drawing
        try:
            yield drawing
            self._listen()
        finally:
            self._drawing = self._seeded = None

    def silenced(self) -> AbstractContextManager[None]:
        """Do not seed, for blocks that are known to draw nothing."""
        return put_in([(vars(self), "_silent", True)])

    @contextmanager
    def kept_aside(self) -> Iterator[None]:
        """Restore the user's own random state afterwards, as if nothing had been drawn."""
        self._standing = []
        states = self.states()
        try:
            yield
        finally:
            if self.has_moved(states):  # else another thread may be using them
                self.go_on(states)


def _generators(device: torch.device) -> list[torch.Generator]:
    """Return the generators that a block on a device draws from."""
    if device.type == "cpu":
        return [torch.default_generator]
    module = torch.get_device_module(device)
    if hasattr(module, "init"):
        module.init()
    number = module.current_device() if device.index is None else device.index
    return [torch.default_generator, module.default_generators[number]]


def state_of_own(generator: Any) -> Any:
    """Return the state of a generator that somebody holds, of torch's, numpy's or Python's.

    >>> mine = random.Random(0); before = state_of_own(mine); drawn = mine.random()
    >>> set_own(mine, before); mine.random() == drawn
    True
    """
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return _bits(generator).state


def set_own(generator: Any, state: Any) -> None:
    """Let a generator that somebody holds continue from an earlier state."""
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        _bits(generator).state = state


def _bits(generator: Any) -> Any:
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


def _differ(before: list[Tensor], after: list[Tensor]) -> bool:
    return any(not torch.equal(tensor, other) for tensor, other in zip(before, after, strict=True))
