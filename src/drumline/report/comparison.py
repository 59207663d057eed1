"""What to run, said in a sentence or two, from a comparison; and the comparison as a page."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.report.compare import Comparison, Row
from drumline.schedules import DEFAULT


def advise(rows: Sequence[Row]) -> str:
    """Return what a comparison comes to; schedules that train on stale weights are not recommended over exact ones.

    What the comparison left out is named: it may be better than what is recommended.

    >>> from drumline.report.compare import compare
    >>> print(advise(compare(4, num_microbatches=8)))
    Run zb-v: 5.9% bubble, at most 4 activations on a rank; 1f1b takes 29% longer. Where memory is short, v-half ...
    """
    said = _advice(rows) if rows else "No schedule admits these counts."
    left_out = rows.left_out if isinstance(rows, Comparison) else ()
    return f"{said} Not compared: {', '.join(one.name for one in left_out)}." if left_out else said


def _advice(rows: Sequence[Row]) -> str:
    exact = [row for row in rows if row.timeline.program.num_updates == 0 and row.fits]
    if not exact:
        least = min(rows, key=lambda row: row.peak_share)
        return f"Nothing fits the limit: the least that any schedule holds is {_peak(least)}, with {least.name}."
    best = _best(exact)
    said = f"Run {best.name}: {best.timeline.bubble:.1%} bubble, at most {_peak(best)} on a rank"
    if best.timeline.program.placement.mirrored:
        said += ", and two copies of the weights"
    plain = next((row for row in rows if row.name == DEFAULT), None)
    if plain is not None and (more := _slower(plain, best)) >= 0.005:
        said += f"; {DEFAULT} takes {more:.0%} longer"
    said += "."
    smaller = [row for row in exact if row.peak_share <= 0.8 * best.peak_share and _slower(row, best) <= 0.25]
    if smaller:
        frugal = min(smaller, key=lambda row: (_slower(row, best), row.peak_share))
        more = _slower(frugal, best)
        said += f" Where memory is short, {frugal.name} holds {frugal.peak_share:.3g} for {more:.0%} more time."
    return said


def _best(exact: Sequence[Row]) -> Row:
    """Return the fastest; of those within a thousandth the one with the smaller span bubble, then the smaller peak."""
    fastest = exact[0].seconds_per_microbatch
    near = [row for row in exact if row.seconds_per_microbatch <= fastest * 1.001]
    return min(near, key=lambda row: (round(row.timeline.span_bubble, 4), row.peak_share))


def _slower(row: Row, best: Row) -> float:
    return row.seconds_per_microbatch / best.seconds_per_microbatch - 1


def _peak(row: Row) -> str:
    return f"{row.peak_share:.3g} activation{'' if row.peak_share == 1 else 's'}"


def compare_page(rows: Sequence[Row], *, num_ranks: int, num_microbatches: int) -> str:
    """Return a comparison as one page: all schedules on one time axis, bubble against peak memory, and what to run.

    >>> from drumline.report.compare import compare
    >>> text = compare_page(compare(2, num_microbatches=2), num_ranks=2, num_microbatches=2)
    >>> "<title>2 ranks, 2 microbatches: 17 schedules</title>" in text
    True
    """
    from drumline.report.draw.html import page

    title = f"{num_ranks} ranks, {num_microbatches} microbatches: {len(rows)} schedules"
    points = [{"name": row.name, **row.summary()} for row in rows]
    return page([row.timeline for row in rows], title=title, rows=points, advice=advise(rows))
