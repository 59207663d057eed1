"""DualPipe's eight steps, for either of its two forms.

A rank works on two flows. Flow 0 enters at the near end of its half, flow 1 comes back from the far end; in
DualPipe they are two directions, in DualPipeV the two legs of one V. `distance` is how far the rank is from the end
where flow 0 enters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from drumline.core.action import Action, B, F, I, W, overlap

Place = Callable[[int, int], tuple[int, int]]


@dataclass
class EightSteps:
    """One rank's row: counts what each flow has done, and queues the weight halves that are owed.

    `place` turns (flow, number in it) into (stage, microbatch); `num_each` is how many microbatches each flow carries.
    """

    half: int
    distance: int
    num_each: int
    place: Place
    forwards: list[int] = field(default_factory=lambda: [0, 0])
    backwards: list[int] = field(default_factory=lambda: [0, 0])
    owed: list[Action] = field(default_factory=list)

    def forward(self, flow: int) -> Action:
        """Return the flow's next forward."""
        self.forwards[flow] += 1
        return F(*self.place(flow, self.forwards[flow] - 1))

    def backward(self, flow: int, *, split: bool = False) -> Action:
        """Return the flow's next backward, whole or its input half."""
        self.backwards[flow] += 1
        where = self.place(flow, self.backwards[flow] - 1)
        if split:
            self.owed.append(W(*where))
        return I(*where) if split else B(*where)

    def weights(self) -> list[Action]:
        """Return the oldest weight half that is owed, if there is one."""
        return [self.owed.pop(0)] if self.owed else []

    def row(self) -> Iterator[Action]:
        """Yield the rank's actions; `num_each` must be at least twice the half."""
        to_middle = self.half - self.distance - 1
        # 1. Forwards of the near flow fill the pipe.
        for _ in range(2 * to_middle):
            yield self.forward(0)
        # 2. Both flows' forwards, until the first backward is there.
        for _ in range(self.distance + 1):
            yield self.forward(0)
            yield self.forward(1)
        # 3. The far flow's backwards, split, with its forwards between.
        for _ in range(to_middle):
            yield self.backward(1, split=True)
            yield from self.weights()
            yield self.forward(1)
        # 4. The main part: each flow's forward overlaps the other's backward.
        for turn in range(self.num_each - 2 * self.half + self.distance + 1):
            if turn == 0 and to_middle == 0:
                # Apart, so that the neighbours get the forward sooner.
                yield self.forward(0)
                yield self.backward(1)
            else:
                yield overlap(self.forward(0), self.backward(1))
            yield overlap(self.forward(1), self.backward(0))
        # 5. The near flow's forwards are done.
        for _ in range(to_middle):
            yield self.backward(1)
            yield overlap(self.forward(1), self.backward(0))
        # 6. Only backwards are left; the later half of them is split.
        split = False
        for turn in range(self.distance + 1):
            split |= turn == (self.distance + 1) // 2 and self.distance % 2 == 1
            yield self.backward(1, split=split)
            split |= turn == (self.distance + 1) // 2 and self.distance % 2 == 0
            yield self.backward(0, split=split)
        # 7. The near flow's last input halves, with owed weight halves between.
        for _ in range(to_middle):
            yield from self.weights()
            yield self.backward(0, split=True)
        # 8. What weight halves are left.
        while self.owed:
            yield from self.weights()
