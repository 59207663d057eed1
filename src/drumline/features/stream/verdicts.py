"""Which updates are left out, because a loss or gradient is NaN or infinite on some rank; all ranks come to know it.

    2BW, rank 0    F4 B3 │ tell │ F5 B4 ┊ hear │ UPDATE 3
         rank 1    F4 B4 F5 B5          ┊ hear │ UPDATE 3        B3 was in its step before, and it told then

Where all ranks make an update at the same place in their rows, they hear each other before it, and leave it out
together. In 2BW nobody waits for that: the forwards before the update need what rank 0 did after it had told.

In PipeDream without vertical sync a rank updates before lower ranks have their gradients. There each rank leaves out
its own updates alone, and the others hear of that a few steps later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from drumline.channel.channel import Channel, Wait
from drumline.core.action import Action, Op

Place = tuple[int, int]  # of an update: the position of its step in the stream, and its last microbatch


class Optimizers(Protocol):
    """What a stream asks its optimizers for."""

    max_norm: float | None  # largest norm of all ranks' gradients in an update

    def norms(self, rank: int) -> dict[str, float]:
        """Return the norms of the gradients that a rank's own parameters have now, by name."""

    def total(self, norms: list[dict[str, float]]) -> Tensor:
        """Return the norm of all gradients, given those of every rank's own."""

    def clip(self, norm: Tensor, parameters: list[nn.Parameter]) -> None:
        """Scale the gradients of these parameters, given the norm of all ranks' gradients."""

    def settings(self) -> Any:
        """Return the optimizers' settings now, such as learning rates: those of the step that begins."""

    def update(self, parameters: list[nn.Parameter], settings: Any, move: Callable[[list[nn.Parameter]], None]) -> None:
        """Update these parameters, which have gradients, by such settings; first `move` them to new memory."""


class UpdateVerdict(NamedTuple):
    """What all ranks told about an update: those that must not make it, and the norm of all gradients if it counts."""

    bad: tuple[int, ...]
    norm: Tensor | None


class Verdicts:
    """What this rank tells and hears about updates; `together` says that all ranks make one at the same place."""

    def __init__(
        self,
        channel: Channel,
        rank: int,
        ends: frozenset[int],
        norms: Optimizers,
        *,
        check_finite: bool,
        together: bool,
    ) -> None:
        self._channel, self._rank, self._norms = channel, rank, norms
        self._check_finite, self.together = check_finite, together
        self._ends = sorted(ends) if together else [max(ends)]
        self._num_begun = 0
        self._skipped_updates: list[tuple[int, tuple[int, ...]]] = []
        self.begin()

    def begin(self, position: int = 0) -> None:
        """Begin with the updates of the step at a position, when nothing is in flight."""
        self._num_begun += 1
        self.decided = position  # of the first step about which not everything is known
        self._numbers: dict[int, int] = {}
        self._wrong: set[int] = set()  # positions of steps with a NaN here
        self._judged: dict[Place, UpdateVerdict] = {}

    @property
    def is_on(self) -> bool:
        """Whether ranks tell each other anything."""
        return self._check_finite or self._norms.max_norm is not None

    def number(self, position: int, step: int) -> None:
        """Remember the number of the step at a position."""
        if self.is_on:
            self._numbers[position] = step

    def tell(self, place: Place, *, is_finite: bool) -> None:
        """Tell all ranks about this one's gradients, which the parameters have now."""
        position, microbatch = place
        if not is_finite:
            self._wrong.add(position)
        if self.is_on and microbatch in self._ends:
            norms = None if self._norms.max_norm is None else self._norms.norms(self._rank)
            is_finite = is_finite if self.together else position not in self._wrong
            self._channel.tell(self._topic(place), (is_finite, norms))

    def hear(self, place: Place, stage: int) -> Generator[Wait, None, UpdateVerdict]:
        """Wait for what all ranks tell about an update, once."""
        action = Action(stage, Op.UPDATE, place[1])
        hear_now = self._channel.hear_now(self._topic(place))
        while hear_now is None:
            yield Wait(self._rank, action, action, (self._rank + 1) % self._channel.num_ranks)
            hear_now = self._channel.hear_now(self._topic(place))
        judged = self._judge(hear_now)
        if place[0] >= self.decided:
            self._judged[place] = judged
        return judged

    def _judge(self, parts: list[Any]) -> UpdateVerdict:
        bad = tuple(rank for rank, (is_finite, _) in enumerate(parts) if not is_finite)
        if self._norms.max_norm is None:
            return UpdateVerdict(bad, None)
        norm = self._norms.total([norms for _, norms in parts])
        if self._check_finite and not bad and not math.isfinite(float(norm)):
            bad = tuple(range(len(parts)))  # too large to be added up
        return UpdateVerdict(bad, norm)

    def decide(self, until: int, stage: int) -> Generator[Wait, None, None]:
        """Learn the outcome of all steps before a position; all ranks do so at the same place."""
        while self.is_on and self.decided < until:
            position, bad = self.decided, set[int]()
            for end in self._ends:
                judged = self._judged.pop((position, end), None)
                if judged is None:
                    judged = yield from self.hear((position, end), stage)
                    del self._judged[position, end]
                bad.update(judged.bad)
            self.decided += 1
            self._wrong.discard(position)
            number = self._numbers.pop(position)
            if bad:
                self._skipped_updates.append((number, tuple(sorted(bad))))

    def skipped_updates(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the steps, by number, of which an update was left out, and on which ranks; each once."""
        skipped, self._skipped_updates = self._skipped_updates, []
        yield from skipped

    def _topic(self, place: Place) -> str:
        return f"gradients/{self._num_begun}/{place[0]}/{place[1]}"
