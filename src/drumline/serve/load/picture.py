"""What a load measured, as a table and a plot."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.core.errors import RunError
from drumline.report.draw.chart import Graph, Series
from drumline.report.draw.table import table
from drumline.serve.load.generator import PERCENTILES, Result

_INSIDE = ("queue", "compute")  # of what the terminal shows the medians
HEADER = ("load", "requests", "failed", "rows/s", *(f"p{number} ms" for number in PERCENTILES))


def load_text(results: Sequence[Result], *, width: int = 120) -> str:
    """Return a table, a row for each load, and the errors below it.

    >>> result = Result(2, seconds=1.0, rows=4, latencies=[0.01, 0.02])
    >>> result.codes.update({"OK": 2, "UNAVAILABLE": 1})
    >>> print(load_text([result]).splitlines()[-1])
    2 at a time: 1 UNAVAILABLE
    """
    rows, notes = [], []
    for result in results:
        figures = result.to_json()
        rows.append([*cells(result), *(milliseconds(figures[f"{name}_seconds"]["p50"]) for name in _INSIDE)])
        if figures["errors"]:
            listed = ", ".join(f"{count} {code}" for code, count in sorted(figures["errors"].items()))
            notes.append(f"{name_of(result)}: {listed}")
            notes += [f"  the first {code}: {why}" for code, why in sorted(result.whys.items()) if why]
    header = (*HEADER, *(f"{name} p50 ms" for name in _INSIDE))
    return "\n".join([table(header, rows, width=width), *notes])


def cells(result: Result) -> list[str]:
    """Return the row of a load: its name, requests, rows a second, percentiles."""
    figures = result.to_json()
    moments = [milliseconds(figures["latency_seconds"][f"p{each}"]) for each in PERCENTILES]
    failed = str(sum(figures["errors"].values()))
    return [name_of(result), str(figures["requests"]), failed, short(figures["rows_per_second"]), *moments]


def name_of(result: Result) -> str:
    """Return what a load is called.

    >>> name_of(Result(4)), name_of(Result(rate=12.5))
    ('4 at a time', '12.5/s')
    """
    return f"{result.concurrency} at a time" if result.concurrency else f"{result.rate:g}/s"


def load_graph(results: Sequence[Result]) -> Graph:
    """Return latency over throughput, a curve for each percentile."""
    figures = sorted((r.to_json() for r in results if r.latencies), key=lambda entry: float(entry["rows_per_second"]))
    if not figures:
        first = {code: why for result in reversed(results) for code, why in result.whys.items()}
        whys = "; ".join(f"{code}: {why}" for code, why in sorted(first.items()))
        raise RunError(f"no request was answered, so there is nothing to plot: {whys}")
    series = [
        Series(
            f"p{each}", [(entry["rows_per_second"], entry["latency_seconds"][f"p{each}"] * 1e3) for entry in figures]
        )
        for each in PERCENTILES
    ]
    return Graph(series, "Latency over throughput", "rows a second", "milliseconds")


def load_svg(results: Sequence[Result]) -> str:
    """Return a plot of latency over throughput."""
    return load_graph(results).svg()


def milliseconds(seconds: float | None) -> str:
    """Return seconds as milliseconds.

    >>> milliseconds(0.0123), milliseconds(None)
    ('12.3', '-')
    """
    return "-" if seconds is None else short(seconds * 1e3)


def short(value: float) -> str:
    """Return a number with three digits or more, and no exponent.

    >>> short(0.1234), short(12.345), short(1234.5)
    ('0.123', '12.3', '1,234')
    """
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
