"""The panel at the top of the demo's report: GPipe against 1F1B with few and with more microbatches.

It answers five questions with measurements: how long messages queue; how large the bubble is; how much is stashed; how
much recomputing saves; and why ranks compute for less of the time than the schedule allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drumline.core.units import percent, size_text
from drumline.report.draw.chart import Series, chart
from drumline.report.draw.markup import BarPart, bar_row, bar_rows, card, legend_html, table_html
from drumline.train.demo import COMPARED, Outcome

_MOST = 16  # most microbatches on the curve of the bubble
_HEADER = ("schedule", "loss by epoch", "bubble", "least bubble", "longest queue", "stash, rank 0 + 1", "weights")
_PARTS = {
    "busy": "computing",
    "overhead": "messages and overhead",
    "imbalance": "unequal ops",
    "drain": "fill and drain",
}
_SAME_BUBBLE = (
    "Both schedules have the same bubble: it depends on the number of microbatches M alone. GPipe runs all forwards"
    " first, so it stashes the whole batch. 1F1B starts each backward as soon as it can, so rank 0 stashes two"
    " microbatches at most. Bubbles are medians over all steps after the first epoch; the timelines below show one step"
    " of each run."
)
_BOUND = (
    "The bound assumes equal stages and free messages. Ops of unequal length, messages, and the executor between"
    " two actions take the rest."
)
_RECOMPUTED = (
    "On the fuller rank. Recomputing keeps the inputs of stages, and the activations of the one microbatch whose"
    " backward runs. It costs a second forward."
)


def opening(outcomes: Sequence[Outcome]) -> str:
    """Return the panel's markup; the rest of the report shows trials of other schedules."""
    reported_outcomes = [outcome for outcome in outcomes if outcome.trial.schedule in COMPARED]
    plain = sorted((outcome for outcome in reported_outcomes if outcome.trial.checkpoint == "none"), key=_order)
    again = {_order(outcome): outcome for outcome in reported_outcomes if outcome.trial.checkpoint != "none"}
    parts = [
        card("Bubble over microbatches", _bubbles(plain)),
        card("Why utilisation stays below its bound", _losses(plain)),
        card("Stash before and after recomputing", _stashes(plain, again)),
    ]
    measured = card("Measurements", f"<p>{_SAME_BUBBLE}</p>{_table(plain)}", wide=True)
    beside = f'<div class="pair">{"".join(parts)}</div>'
    return f'<section class="report"><h2>GPipe against 1F1B</h2>{measured}{beside}</section>'


def _order(outcome: Outcome) -> tuple[int, int]:
    return outcome.trial.num_microbatches, list(COMPARED).index(outcome.trial.schedule)


def _name(outcome: Outcome) -> str:
    return f"{COMPARED[outcome.trial.schedule]}, M = {outcome.trial.num_microbatches}"


def _table(plain: Sequence[Outcome]) -> str:
    rows = [
        [
            _name(outcome),
            f"{outcome.losses[0]:.3f} → {outcome.losses[-1]:.3f}",
            percent(1 - outcome.utilisation),
            percent(1 - outcome.bound),
            f"{outcome.summary()['peak_queue']:g}",
            " + ".join(map(size_text, outcome.peak_stash)),
            "same bits as one process" if outcome.difference == 0 else f"off by {outcome.difference:.2g}",
        ]
        for outcome in plain
    ]
    return table_html(_HEADER, rows, words=(0, 6))


def _bubbles(plain: Sequence[Outcome]) -> str:
    """Return the least bubble of a flushed schedule, as a curve over M, with the measurements."""
    ranks = plain[0].run.program.num_ranks
    bound = [(float(count), (ranks - 1) / (count + ranks - 1)) for count in range(1, _MOST + 1)]
    series = [Series("least bubble: (P - 1) / (M + P - 1)", bound)]
    for schedule, name in COMPARED.items():
        mine = [outcome for outcome in plain if outcome.trial.schedule == schedule]
        points = [(float(outcome.trial.num_microbatches), 1 - outcome.utilisation) for outcome in mine]
        series.append(Series(f"{name}, measured", points, marks=True))
    return chart(
        series,
        title="Bubble over M",
        x_label="microbatches M",
        y_label="idle share of the ranks",
        width=440,
        height=280,
    )


def _losses(plain: Sequence[Outcome]) -> str:
    """Return, for each trial, how the ranks spent their time."""
    bars = []
    for outcome in plain:
        possible = min(outcome.bound, outcome.simulated_utilisation)
        shares = (
            outcome.utilisation,
            max(0.0, possible - outcome.utilisation),
            outcome.bound - possible,
            1 - outcome.bound,
        )
        parts = [
            BarPart(kind, share, f"{name} {percent(share)}")
            for (kind, name), share in zip(_PARTS.items(), shares, strict=True)
        ]
        bars.append(bar_row(_name(outcome), parts, 1.0, percent(outcome.utilisation), kind="named"))
    return f'{bar_rows(bars)}{legend_html(_PARTS.items())}<p class="note">{_BOUND}</p>'


def _stashes(plain: Sequence[Outcome], again: Mapping[tuple[int, int], Outcome]) -> str:
    most = max(max(result.peak_stash) for result in plain)
    bars = []
    for result in plain:
        for outcome, name, kind in (
            (result, _name(result), "named"),
            (again.get(_order(result)), "recomputed", "named thin"),
        ):
            if outcome is not None:
                size = max(outcome.peak_stash)
                about = _name(result) if outcome is result else f"{_name(result)}, {name}"
                parts = [BarPart("stash", size, size_text(size))]
                bars.append(bar_row(name, parts, most, size_text(size), about=about, kind=kind))
    return f'{bar_rows(bars)}<p class="note">{_RECOMPUTED}</p>'
