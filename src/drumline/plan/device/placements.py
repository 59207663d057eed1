"""Which schedule, how many stages per rank and which cut take least, for blocks that were timed at one size.

    1f1b               19 | 5               502 ms
    zb-h1              19 | 5               695 ms     I and W of these blocks take longer than B
    interleaved-1f1b   14 | 5 | 3 | 2       449 ms     two stages per rank: smaller pieces divide more evenly

A running pipeline keeps its stages where they are, so these choices are for its set-up.
"""

from __future__ import annotations

from collections.abc import Sequence

from drumline.plan.device.blocks import Profile
from drumline.plan.device.candidate import EQUAL, Candidate
from drumline.plan.device.combinations import programs_of, suited
from drumline.plan.device.overheads import Overheads
from drumline.plan.device.ranks import Ranks
from drumline.plan.device.stages import Stages

_MOST_ACTIONS = 4_000  # of a program: cutting a larger one takes seconds


def arrangements(
    profile: Profile,
    ranks: Ranks,
    num_microbatches: int,
    *,
    names: Sequence[str] | None = None,
    overheads: Overheads | None = None,
) -> list[Candidate]:
    """Return every schedule and number of stages per rank with its best cut, the shortest step first.

    Programs of more than a few thousand actions are left out. `names` are the schedules to try (default: all that can
    be planned). Nothing is recomputed.

    >>> from drumline.plan.device.blocks import OpTimes, ProfiledBlock
    >>> blocks = [ProfiledBlock(str(at), OpTimes(1, 2, 2, 2), 0, 0, 0, 0, 8, 0) for at in range(8)]
    >>> profile = Profile(tuple(blocks), OpTimes(0, 0, 0, 0), "cpu", 1)
    >>> best = arrangements(profile, Ranks.of(2), 4, names=["1f1b", "interleaved-1f1b", "zb-h1"])[0]
    >>> best.program.name, best.cut.counts
    ('interleaved-1f1b', (1, 1, 1, 1, 1, 1, 1, 1))
    """
    known = overheads or Overheads()
    candidates = []
    for program in programs_of(
        suited() if names is None else names,
        ranks.num_ranks,
        num_microbatches,
        len(profile.layers),
        most_actions=_MOST_ACTIONS,
    ):
        stages = Stages(profile, program, ranks, known, (False,) * program.num_stages)
        candidates.append(Candidate(stages, stages.best()[0], 1, num_microbatches))
    return sorted(candidates, key=lambda candidate: candidate.step_seconds)


def chosen(candidates: Sequence[Candidate], most_bytes: float) -> Candidate | None:
    """Return the one with the shortest step whose ranks stay within `most_bytes`; of equal ones the fewest stages.

    Steps within 1% are equal. Then the one that holds the least counts.
    """
    fitting = [candidate for candidate in candidates if candidate.peak <= most_bytes]
    if not fitting:
        return None
    shortest = min(candidate.step_seconds for candidate in fitting)
    near = [candidate for candidate in fitting if candidate.step_seconds <= shortest * (1 + EQUAL)]
    return min(near, key=lambda candidate: (candidate.program.num_stages, candidate.peak, candidate.step_seconds))
