"""DualPipe's eight steps, for either of its two forms.

A rank works on two flows. Flow 0 enters at the near end of its half, flow 1 comes back from the far end; in
DualPipe they are two directions, in DualPipeV the two legs of one V. `distance` is how far the rank is from the end
where flow 0 enters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from drumline.core.action import Action, overlap
from drumline.schedules.formulas import Pace
from drumline.schedules.orders import Flow


def idle(pace: Pace, num_ranks: int) -> float:
    """Return (P/2-1)(F&B+B-3W), where an F&B takes as long as both; no W shortens it below 2F."""
    each = pace.forward + 2 * pace.backward_input - pace.backward_weight
    return (num_ranks / 2 - 1) * max(each, 2 * pace.forward)


@dataclass
class EightSteps:
    """One rank's row; queues the weight halves that are owed."""

    half: int
    distance: int
    flows: tuple[Flow, Flow]
    owed: deque[Action] = field(default_factory=deque)

    def input_half(self, flow: Flow) -> Action:
        """Return the flow's next input half; its weight half is owed from now on."""
        first, second = flow.split()
        self.owed.append(second)
        return first

    def weights(self) -> list[Action]:
        """Return the oldest weight half that is owed, if there is one."""
        return [self.owed.popleft()] if self.owed else []

    def row(self) -> Iterator[Action]:
        """Yield the rank's actions; the flows must carry equally many microbatches, at least twice the half."""
        near, far = self.flows
        to_middle = self.half - self.distance - 1
        # 1. Forwards of the near flow fill the pipe.
        for _ in range(2 * to_middle):
            yield near.forward()
        # 2. Both flows' forwards, until the first backward is there.
        for _ in range(self.distance + 1):
            yield near.forward()
            yield far.forward()
        # 3. The far flow's backwards, split, with its forwards between.
        for _ in range(to_middle):
            yield self.input_half(far)
            yield from self.weights()
            yield far.forward()
        # 4. The main part: each flow's forward overlaps the other's backward.
        for turn in range(near.num_microbatches - 2 * self.half + self.distance + 1):
            if turn == 0 and to_middle == 0:
                # Apart, so that the neighbours get the forward sooner.
                yield near.forward()
                yield far.backward()
            else:
                yield overlap(near.forward(), far.backward())
            yield overlap(far.forward(), near.backward())
        # 5. The near flow's forwards are done.
        for _ in range(to_middle):
            yield far.backward()
            yield overlap(far.forward(), near.backward())
        # 6. Only backwards are left; the later half of them is split.
        split = False
        for turn in range(self.distance + 1):
            split |= turn == (self.distance + 1) // 2 and self.distance % 2 == 1
            yield self.input_half(far) if split else far.backward()
            split |= turn == (self.distance + 1) // 2 and self.distance % 2 == 0
            yield self.input_half(near) if split else near.backward()
        # 7. The near flow's last input halves, with owed weight halves between.
        for _ in range(to_middle):
            yield from self.weights()
            yield self.input_half(near)
        # 8. What weight halves are left.
        while self.owed:
            yield from self.weights()
