"""A comparison as one page: all schedules on one time axis, bubble against peak memory, and what to run."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.report.advise.comparison import advise
from drumline.report.compare import Row
from drumline.report.draw.html import page


def compare_page(rows: Sequence[Row], *, num_ranks: int, num_microbatches: int) -> str:
    """Return the page of a comparison.

    >>> from drumline.report.compare import compare
    >>> text = compare_page(compare(2, num_microbatches=2), num_ranks=2, num_microbatches=2)
    >>> "<title>2 ranks, 2 microbatches: 17 schedules</title>" in text
    True
    """
    title = f"{num_ranks} ranks, {num_microbatches} microbatches: {len(rows)} schedules"
    points = [{"name": row.name, **row.summary()} for row in rows]
    return page([row.timeline for row in rows], title=title, rows=points, advice=advise(rows))
