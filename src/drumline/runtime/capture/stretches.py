"""A row cut into stretches: what a rank computes between two messages, so that it can be launched as one.

    row          0RECV_B0  0F0  0SEND_F0   0I0  0RECV_B1  0W0  0F1            0SEND_F1
    stretches    0RECV_B0 [0F0] 0SEND_F0  [0I0            0W0  0F1] 0RECV_B1  0SEND_F1

A stretch begins where a message must have arrived and ends where one is sent or gradients are exchanged. Posting a
receive neither waits nor computes, so one that stands amid a stretch is done right behind it: the channel is told the
same things in the same order, and no message is waited for any earlier than the row says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from drumline.core.action import RECV_OPS
from drumline.runtime.channel.channel import Delivery
from drumline.runtime.executor import Job, Step


@dataclass(slots=True)
class Stretch(Job):
    """Computations that follow each other without a message between them; it needs what the first of them needs."""

    jobs: list[Job] = field(default_factory=list)
    replay: Callable[[], None] | None = None  # launches it, once it is captured
    inputs: list[Delivery] = field(default_factory=list)  # where it reads the messages that it needs

    def __str__(self) -> str:
        return f"[{' '.join(str(job.action) for job in self.jobs)}]"


def stretches(row: Sequence[Job], run: Callable[[Any, Step], None]) -> list[Job]:
    """Return the row with its computations joined to stretches, each of which is run by `run`.

    >>> from drumline.core.action import Action
    >>> row = [Job(Action.parse(one), print, timed=one[1] in "FBIW") for one in "0F0 0SEND_F0 0F1 0RECV_B0 0F2".split()]
    >>> print(*(one if isinstance(one, Stretch) else one.action for one in stretches(row, print)))
    [0F0] 0SEND_F0 [0F1 0F2] 0RECV_B0
    """
    found: list[Job] = []
    stretch: Stretch | None = None
    for job in row:
        if not job.timed:
            found.append(job)
            if job.action.op not in RECV_OPS:
                stretch = None
            continue
        if stretch is None or job.needs:
            stretch = Stretch(job.action, run, needs=job.needs)
            found.append(stretch)
        stretch.jobs.append(job)
    return found
