"""What a load measured, as a page: plot, tables, where requests spend their time, and what failed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from drumline.core.errors import counted
from drumline.report.draw.html import asset, page_with
from drumline.report.draw.markup import card, cards, table_html
from drumline.report.draw.plot import plot
from drumline.report.draw.scene import document
from drumline.serve.load.generator import Result
from drumline.serve.load.picture import HEADER, cells, load_graph, milliseconds, name_of, short

_SHARES = (("p50", "half"), ("p99", "99%"))
# The page has no timelines, and none of what serves them.
_STYLE = """.toolbar, #overview, .legend, footer { display: none; }
.load .words { text-align: left; } .load td.words:first-child { white-space: nowrap; }
.load td.words:last-child { white-space: normal; min-width: 190px; } .load .card.wide { grid-column: 1 / -1; }
"""


def load_page(results: Sequence[Result], *, service: str = "a service") -> str:
    """Return plot, tables and failures as a page that opens from disk.

    >>> text = load_page([Result(2, seconds=1.0, rows=4, latencies=[0.01, 0.02])], service="127.0.0.1:8001")
    >>> "<title>Load test of 127.0.0.1:8001</title>" in text, text.count("<table>")
    (True, 2)
    """
    answered = [result for result in results if result.latencies]
    parts = [_latencies(results), _inside(answered), _failures(results)]
    if answered:
        graph = load_graph(results)
        parts.insert(0, card(graph.title, plot(graph)))
    data = document([], title=f"Load test of {service}", advice=_sentence(results))
    panel = f'<section class="report">{_figures(answered)}</section>' if answered else ""
    below = f'<section class="report load"><div class="pair">{"".join(parts)}</div></section>'
    extra = {"loads": [result.to_json() for result in results]}
    return page_with(data, panel=panel, below=below, style=asset("report.css") + _STYLE, extra=extra)


def _sentence(results: Sequence[Result]) -> str:
    """Return what the page says first.

    >>> _sentence([Result(2, seconds=1.0, rows=4, latencies=[0.01])])
    'Most rows a second: 4, with 2 requests at a time, of which half took 10 ms or less. None failed.'
    """
    failed = sum(result.codes.total() - result.codes["OK"] for result in results)
    many = (
        f"{counted(failed, 'request')} of {sum(result.codes.total() for result in results)} failed."
        if failed
        else "None failed."
    )
    if not any(result.latencies for result in results):
        return "No request was answered."
    best = max((result for result in results if result.latencies), key=_rows_per_second)
    half = milliseconds(_latency(best, "p50"))
    how = f"{best.concurrency} requests at a time" if best.concurrency else f"{best.rate:g} requests a second"
    most = f"Most rows a second: {short(_rows_per_second(best))}, with {how}"
    return f"{most}, of which half took {half} ms or less. {many}"


def _rows_per_second(result: Result) -> float:
    return float(result.to_json()["rows_per_second"])


def _figures(answered: Sequence[Result]) -> str:
    """Return figures of the load with most rows a second, and of another one if that has the shortest latency."""
    best, soonest = max(answered, key=_rows_per_second), min(answered, key=partial(_latency, which="p50"))
    figures = [
        ("throughput", f"{short(_rows_per_second(best))} rows/s", name_of(best)),
        *((f"{words} within", f"{milliseconds(_latency(best, which))} ms", name_of(best)) for which, words in _SHARES),
    ]
    if soonest is not best:
        figures.append(("half within", f"{milliseconds(_latency(soonest, 'p50'))} ms", name_of(soonest)))
    return cards(figures)


def _latency(result: Result, which: str) -> float:
    return float(result.to_json()["latency_seconds"][which])


def _latencies(results: Sequence[Result]) -> str:
    return card("Latency", table_html(HEADER, map(cells, results), words=[0]))


def _inside(answered: Sequence[Result]) -> str:
    """Return where requests spent their time: in the front's queue, in the pipe, and there being computed."""
    if not answered:
        return ""
    parts = {"latency": "in all", "queue": "queue of the front", "pipe": "pipe", "compute": "computing"}
    rows = []
    for result in answered:
        figures = result.to_json()
        rows.append([name_of(result), *(milliseconds(figures[f"{part}_seconds"]["p50"]) for part in parts)])
    header = ["load", *(f"{name}, ms" for name in parts.values())]
    note = "<p>Medians, each of its own part: they need not add up. The pipe contains computing.</p>"
    return card("Where requests spend their time", note + table_html(header, rows, words=[0]))


def _failures(results: Sequence[Result]) -> str:
    rows = [
        [name_of(result), code, str(count), result.whys.get(code, "")]
        for result in results
        for code, count in sorted(result.codes.items())
        if code != "OK"
    ]
    if not rows:
        return ""
    header = ("load", "status", "requests", "what the first one said")
    return card("Failures", table_html(header, rows, words=[0, 1, 3]), wide=True)
