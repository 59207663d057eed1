"""Each source left out: its rows, with the rate of large products taken from all other sources of that generation.

Before Hopper and on it, that rate is the constant that matters most, and the only one that is fitted here: by least
squares of logarithms, where every source counts the same. All others stay as they are, presets too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from drumline.plan.cluster.estimate import estimate
from drumline.plan.cluster.hardware import MACHINES
from published_rows import NETWORKS, Found, found
from published_runs import Run, fp8, held_out, llama3, sc21, sc21_scaling

Row = Run | Found


def every() -> list[Row]:
    """Return all rows but those of ZeRO 3 of 2021 and those with experts.

    >>> len(every()) > 200
    True
    """
    own = [*sc21(), *held_out(), *sc21_scaling(), *llama3(), *fp8()[:-1]]
    return [*own, *found("fit"), *found("held")]


def is_hopper(row: Row) -> bool:
    """Whether a row ran on Hopper."""
    return row.hardware.startswith("h")


def missed(row: Row, factor: float) -> float:
    """Return the logarithm of estimated over published seconds, if large products run `factor` times as fast."""
    machine = NETWORKS.get(row.hardware) or MACHINES[row.hardware]
    reach = replace(machine.device.reach, product=min(machine.device.reach.product * factor, 1.0))
    cluster = replace(machine, device=replace(machine.device, reach=reach)).cluster(row.layout.num_devices)
    return math.log(estimate(row.transformer, cluster, row.layout, rough=True).seconds.total / row.seconds)


def left_out(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return the errors of every source's rows, with the factor from the others; a source may have both generations."""
    errors: dict[str, list[float]] = {}
    for hopper in (False, True):
        own = [row for row in rows if is_hopper(row) == hopper]
        factors = (0.96, 1.0, 1.04)
        known = {factor: [missed(row, factor) for row in own] for factor in factors}
        for source in dict.fromkeys(row.source for row in own):
            best = _least(own, known, source)
            for at, row in enumerate(own):
                if row.source == source:
                    low, high = known[factors[0]][at], known[factors[2]][at]
                    slope = (high - low) / math.log(factors[2] / factors[0])
                    errors.setdefault(source, []).append(math.expm1(known[1.0][at] + slope * math.log(best)))
    return errors


def _least(rows: Sequence[Row], known: dict[float, list[float]], without: str) -> float:
    """Return the factor with the least squares over the other sources; errors are straight lines in its logarithm."""
    counts = {row.source: sum(other.source == row.source for other in rows) for row in rows}
    low, middle, high = known.values()
    spread = math.log(max(known) / min(known))
    above = below = 0.0
    for at, row in enumerate(rows):
        if row.source != without:
            slope = (high[at] - low[at]) / spread
            above += slope * middle[at] / counts[row.source]
            below += slope * slope / counts[row.source]
    return math.exp(-above / below)


def table() -> str:
    """Return a line for every source: how many rows, the mean error and the worst."""
    errors = left_out(every())
    lines = [f"{'left out':12} {'rows':>5} {'mean error':>11} {'worst':>7}"]
    together = [error for each in errors.values() for error in each]
    for source, own in (*errors.items(), ("all rows", together)):
        worst = max(own, key=abs)
        lines.append(f"{source:12} {len(own):5} {fmean(map(abs, own)):11.1%} {worst:+7.1%}")
    return "\n".join(lines)
