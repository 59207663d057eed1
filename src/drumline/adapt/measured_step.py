"""What a decision reads from a measured step: series to watch, and every rank's work."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

from drumline.core.measured.measured import Measured


@dataclass(frozen=True)
class MeasuredStep:
    """One measured step."""

    step: int
    measured: Measured

    @property
    def seconds(self) -> float:
        """From the first action's start to the last one's end."""
        return self.measured.makespan

    @cached_property
    def loads(self) -> list[float]:
        """Seconds of compute on every rank."""
        return list(self.measured.busy)

    @cached_property
    def stage_seconds(self) -> list[float]:
        """Seconds of a microbatch in every stage, forward and backward; overlapped pairs count half for each."""
        program = self.measured.program
        found = [0.0] * program.num_stages
        for span in self.measured.spans():
            if span.action.is_compute:
                for part in span.action.work:
                    found[part.stage] += (span.end - span.start) / len(span.action.work)
        return [value / program.num_microbatches for value in found]

    @cached_property
    def series(self) -> dict[str, float]:
        """What is watched, by name: seconds of every stage's ops, of messages on every link, and queues.

        A message counts with a typical action, and a queue with one message: what is small beside those is noise.
        """
        each = self.measured.action_seconds()
        found = {f"{op.value} of stage {stage}": median(values) for (stage, op), values in sorted(each.items())}
        typical = fmean([value for values in each.values() for value in values]) if each else 0.0
        flights, waits = defaultdict[tuple[int, int], list[float]](list), defaultdict[tuple[int, int], float](float)
        for transfer in self.measured.transfers:
            edge = transfer.source, transfer.target
            flights[edge].append(max(transfer.end - transfer.made, 0.0))
            waits[edge] += max(transfer.consumed - transfer.end, 0.0)
        for edge, seconds in sorted(flights.items()):
            found[f"{NAMED_LINK}{edge[0]}-{edge[1]}"] = typical + min(seconds)
            found[f"{NAMED_QUEUE}{edge[0]}-{edge[1]}"] = 1.0 + waits[edge] / max(self.seconds, 1e-12)
        return found


NAMED_LINK = "a message on link "
NAMED_QUEUE = "the queue of link "
