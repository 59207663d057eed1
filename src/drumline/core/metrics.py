"""The figures of one step, under the names that torchtitan uses where it has one; ours begin with pp/.

pp/bubble                            idle share of the makespan over all ranks
pp/stage{i}/busy_seconds             what the stage computed, on all ranks that have it
pp/rank{r}/{part}_seconds            the rank's step by what it did: busy, transfer, wait, overhead, unexplained
pp/edge{a}-{b}/peak_queue            the most messages that were made and not yet taken up
pp/rank{r}/peak_pairs, peak_stash_bytes     what the rank held; bytes where they were weighed
"""

from __future__ import annotations

from collections import defaultdict

from drumline.core.measured import Measured


def step_metrics(timeline: Measured) -> dict[str, float]:
    """Return what a measured step says by itself."""
    found: dict[str, float] = {
        "pp/bubble": timeline.bubble,
        "pp/span_bubble": timeline.span_bubble,
        "pp/makespan_seconds": timeline.makespan,
    }
    stages: defaultdict[int, float] = defaultdict(float)
    for track in timeline.tracks:
        for action, start, end in zip(track.actions, track.starts, track.ends, strict=True):
            stages[action.stage] += end - start
    for stage, seconds in sorted(stages.items()):
        found[f"pp/stage{stage}/busy_seconds"] = seconds
    for rank, parts in enumerate(timeline.parts):
        for name in ("busy", "transfer", "wait", "overhead", "unexplained"):
            found[f"pp/rank{rank}/{name}_seconds"] = getattr(parts, name)
        found[f"pp/rank{rank}/peak_pairs"] = max(timeline.held[rank], default=0)
        if timeline.peak_stash is not None:
            found[f"pp/rank{rank}/peak_stash_bytes"] = timeline.peak_stash[rank]
    for (source, target), curve in timeline.queue_depths.items():
        found[f"pp/edge{source}-{target}/peak_queue"] = max(depth for _, depth in curve)
    return found
