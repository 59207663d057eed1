"""Every schedule by name, written out so that none goes missing unnoticed, and at every count that it admits."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core.program import Program
from drumline.schedules import schedules

NAMES = [
    "naive",
    "gpipe",
    "1f1b",
    "interleaved-1f1b",
    "looped-bfs",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "v-half",
    "v-min",
    "interleaved-zb",
    "dualpipe",
    "dualpipe-v",
    "chimera",
    "hanayo",
    "pipedream",
    "pipedream-2bw",
    "forward-only",
]


def admissible(name: str, max_ranks: int, max_microbatches: int, max_stages: int) -> Iterator[tuple[int, int, int]]:
    """Yield every (ranks, microbatches, stages per rank) that the schedule admits."""
    schedule = schedules()[name]
    for ranks in range(1, max_ranks + 1):
        for microbatches in range(1, max_microbatches + 1):
            for stages in range(1, max_stages + 1):
                if schedule.refusal(ranks, microbatches, stages) is None and not (
                    name == "pipedream-2bw" and microbatches < ranks
                ):
                    yield ranks, microbatches, stages


def build(name: str, ranks: int, microbatches: int, stages: int | None = None) -> Program:
    return schedules()[name].build(ranks, microbatches, stages)
