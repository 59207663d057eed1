"""Exchange gradients with other lines of a mesh too, before copies of stages in this one meet."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from drumline.channel.channel import Wait
from drumline.core.action import Action
from drumline.runtime.draft import POST, Clock, Draft
from drumline.runtime.gradients.exchange import Exchanged, GradientExchange
from drumline.runtime.gradients.lines import Shards, Summing, Sums
from drumline.runtime.stage import Stage


class SummedExchange(GradientExchange):
    """One rank's part in the exchanges of a step whose gradients are summed over lines; some may be `shards`."""

    is_summed = True

    def __init__(self, reducer: Sums, shards: Shards | None, *exchanged: *Exchanged) -> None:
        super().__init__(*exchanged)
        self.reducer, self.shards = reducer, shards
        self._reduced: list[tuple[Action, Sequence[Summing], Sequence[Any], int]] = []

    def begin(self) -> None:
        """Start a step."""
        super().begin()
        self._reduced.clear()

    def offer(self, action: Action, stage: Stage, other: int, clock: Clock) -> None:
        """Offer a stage's gradients to other lines; its copy in this one, if there is one, gets their sum."""
        now = clock.now()
        divided = {} if self.shards is None else self.shards.pieces
        buckets = self.reducer.start([param for param in stage.parameters if param not in divided], clock.now)
        sums: Sequence[Any] = [] if self.shards is None else self.shards.start(stage.index)
        self._reduced.append((action, buckets, sums, now))
        if other >= 0:
            self._offered.append((action, stage, other, now))

    def _finish(self, clock: Clock, draft: Draft) -> Generator[Wait, None, None]:
        """Wait for the sums over lines; only then are the gradients ready for other ranks of this one."""
        for action, buckets, sums, since in self._reduced:
            asked = clock.now()
            what = f"{action}, the sum of stage {action.stage}'s gradients"
            self.reducer.finish(buckets, what)
            if self.shards is not None:
                self.shards.finish(sums, what)
            # Sums that were there before they were asked for ended then; copying them back is the rank's own time.
            ended = [asked + 1 if sums or not buckets else 0, *(bucket.ended or asked + 1 for bucket in buckets)]
            took = clock.now()
            draft.exchanges.extend((action.stage, since, max(ended) if max(ended) < asked else took))
            if max(ended) < asked:
                draft.spent(POST, asked, took)
        for action, stage, other, _ in self._offered:
            self._send(action, other, self._own_parameters(stage))
        yield from super()._finish(clock, draft)
