"""The panel at the top of the demo's report: GPipe against 1F1B with few and with more microbatches.

It answers five questions with measurements: how long messages queue; how large the bubble is; how much is stashed; how
much recomputing saves; and why ranks compute for less of the time than the schedule allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from drumline.core.units import number, percent, size_text
from drumline.report.draw.chart import Graph, Series
from drumline.report.draw.markup import BarPart, bar_row, bar_rows, card, legend_html, run_sign, safe, table_html
from drumline.report.draw.palette import run_class
from drumline.report.draw.plot import plot
from drumline.report.run.report import short_names
from drumline.train.demo import COMPARED, Outcome

_MOST = 16  # most microbatches on the curve of the bubble
_HEADER = (
    "run",
    "loss by epoch",
    "bubble in theory",
    "median bubble, measured",
    "median of the longest queue",
    "stash, rank 0 + 1",
    "weights",
)
_PARTS = {
    "busy": "computing",
    "overhead": "messages and overhead",
    "imbalance": "unequal ops",
    "drain": "fill and drain",
}
_THEORY = (
    "In theory, both schedules have the same bubble. With P ranks, stages of equal length and free messages, each rank"
    " idles for (P - 1) / (M + P - 1) of a step"
)
_DIFFERENCE = (
    "Ops of unequal length, messages, and the executor's own time between two actions add to the bubble. Other programs"
    " on the machine delay single ops. GPipe and 1F1B wait for each other's ranks at different moments, so the same"
    " delay may stop one of them and not the other."
)
_STASH = (
    "The schedules differ in memory. GPipe runs all forwards first, so it stashes the whole batch. 1F1B starts each"
    " backward as soon as it can, so rank 0 stashes two microbatches at most."
)
_AVERAGED = "Medians in this section are over {}. The timelines and the table of runs below show one step of each run."
_BOUND = (
    "The bound assumes equal stages and free messages. Ops of unequal length, messages, and the executor between"
    " two actions take the rest."
)
_RECOMPUTED = (
    "On the fuller rank. Recomputing keeps the inputs of stages, and the activations of the one microbatch whose"
    " backward runs. It costs a second forward."
)


class _Shown(NamedTuple):
    """A trial with its place among all runs of the report, which determines its colour."""

    outcome: Outcome
    order: int
    run: str

    @property
    def name(self) -> str:
        """The schedule by its common name, and M."""
        return f"{COMPARED[self.outcome.trial.schedule]}, M = {self.outcome.trial.num_microbatches}"

    @property
    def key(self) -> tuple[int, int]:
        """Where it stands in tables and charts: sorted by M."""
        return self.outcome.trial.num_microbatches, list(COMPARED).index(self.outcome.trial.schedule)

    @property
    def sign(self) -> str:
        """The square of its colour."""
        return run_sign(self.order, self.run)

    @property
    def bubble(self) -> float:
        """The median of the measured bubbles."""
        return 1 - self.outcome.utilisation


def opening(outcomes: Sequence[Outcome], *, busy: str = "") -> str:
    """Return the panel's markup; the rest of the report shows trials of other schedules.

    `busy` is what a report said of a machine that did other work.
    """
    names = short_names([outcome.run.path for outcome in outcomes])
    everything = [_Shown(outcome, at, name) for at, (outcome, name) in enumerate(zip(outcomes, names, strict=True))]
    shown = [entry for entry in everything if entry.outcome.trial.schedule in COMPARED]
    plain = sorted((entry for entry in shown if entry.outcome.trial.checkpoint == "none"), key=lambda entry: entry.key)
    again = {entry.key: entry for entry in shown if entry.outcome.trial.checkpoint != "none"}
    parts = [
        card("Bubble over microbatches", _bubbles(plain)),
        card("Why utilisation stays below its bound", _losses(plain)),
        card("Stash before and after recomputing", _stashes(plain, again)),
    ]
    words = "".join(f"<p>{safe(sentence)}</p>" for sentence in _words(plain, busy))
    steps = "all steps after the first epoch" if outcomes[0].build.num_epochs > 1 else "the second half of all steps"
    averaged = f'<p class="note">{_AVERAGED.format(steps)}</p>'
    measured = card("Theory and measurement", f"{words}{_table(plain)}{averaged}", wide=True)
    beside = f'<div class="pair">{"".join(parts)}</div>'
    return f'<section class="report opening"><h2>GPipe against 1F1B</h2>{measured}{beside}</section>'


def _words(plain: Sequence[_Shown], busy: str) -> list[str]:
    """Return what theory says, what was measured, why they differ, and what the schedules are for."""
    theory, measured = [], []
    for count in dict.fromkeys(entry.outcome.trial.num_microbatches for entry in plain):
        same = [entry for entry in plain if entry.outcome.trial.num_microbatches == count]
        theory.append(f"{percent(1 - same[0].outcome.bound)} for M = {count}")
        bubbles = (f"{COMPARED[entry.outcome.trial.schedule]} {percent(entry.bubble)}" for entry in same)
        measured.append(f"for M = {count}, {' and '.join(bubbles)}")
    figures = f"Measured, as medians: {'; '.join(measured)}."
    return [f"{_THEORY}: {', '.join(theory)}.", " ".join(filter(None, (figures, _DIFFERENCE, busy))), _STASH]


def _table(plain: Sequence[_Shown]) -> str:
    rows = [
        [
            entry.name,
            f"{entry.outcome.losses[0]:.3f} → {entry.outcome.losses[-1]:.3f}",
            percent(1 - entry.outcome.bound),
            percent(entry.bubble),
            f"{entry.outcome.summary()['peak_queue']:g}",
            " + ".join(map(size_text, entry.outcome.peak_stash)),
            "same bits as one process" if entry.outcome.difference == 0 else f"off by {entry.outcome.difference:.2g}",
        ]
        for entry in plain
    ]
    return table_html(_HEADER, rows, words=(0, 6), signs=[entry.sign for entry in plain])


def _bubbles(plain: Sequence[_Shown]) -> str:
    """Return the bubble of a flushed schedule in theory, as a curve over M, with the measurements."""
    ranks = plain[0].outcome.run.program.num_ranks
    bound = [(float(count), (ranks - 1) / (count + ranks - 1)) for count in range(1, _MOST + 1)]
    series = [Series("theory: (P - 1) / (M + P - 1)", bound, kind="bound")]
    for entry in plain:
        point = [(float(entry.outcome.trial.num_microbatches), entry.bubble)]
        series.append(Series(f"{entry.name}, measured", point, marks=True, kind=run_class(entry.order), run=entry.run))
    return plot(Graph(series, "Bubble over microbatches", "microbatches M", "bubble"), written=_share)


def _share(value: float) -> str:
    return f"{number(100 * value, 3)}%"


def _losses(plain: Sequence[_Shown]) -> str:
    """Return, for each trial, how the ranks spent their time."""
    bars = []
    for entry in plain:
        outcome = entry.outcome
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
        bars.append(bar_row(entry.name, parts, 1.0, percent(outcome.utilisation), kind="named", sign=entry.sign))
    return f'{bar_rows(bars)}{legend_html(_PARTS.items())}<p class="note">{_BOUND}</p>'


def _stashes(plain: Sequence[_Shown], again: Mapping[tuple[int, int], _Shown]) -> str:
    most = max(max(entry.outcome.peak_stash) for entry in plain)
    bars = []
    for first in plain:
        for entry, name, kind in ((first, first.name, "named"), (again.get(first.key), "recomputed", "named thin")):
            if entry is not None:
                size = max(entry.outcome.peak_stash)
                about = first.name if entry is first else f"{first.name}, {name}"
                parts = [BarPart("stash", size, size_text(size))]
                bars.append(bar_row(name, parts, most, size_text(size), about=about, kind=kind, sign=entry.sign))
    return f'{bar_rows(bars)}<p class="note">{_RECOMPUTED}</p>'
