"""Strong and weak scaling: the same question on fewer and on more devices, planned anew each time."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from drumline.plan.layouts.margins import planned
from drumline.plan.layouts.planner import ClusterPlan
from drumline.plan.layouts.survey import Candidate

TIMES = (Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(2), Fraction(4))


@dataclass(frozen=True, slots=True)
class Point:
    """The best plan on so many devices; None where nothing fits."""

    devices: int
    batch: int
    best: Candidate | None

    def tokens_per_second(self, sequence: int) -> float | None:
        """Return the throughput of the whole cluster."""
        return None if self.best is None else self.batch * sequence / self.best.seconds


def strong(plan: ClusterPlan) -> list[Point]:
    """Return the plans of the same batch on other numbers of devices."""
    return [_point(plan, times, plan.batch) for times in TIMES if _whole(plan.cluster.num_devices * times)]


def weak(plan: ClusterPlan) -> list[Point]:
    """Return the plans where the batch grows with the devices."""
    return [
        _point(plan, times, int(plan.batch * times))
        for times in TIMES
        if _whole(plan.cluster.num_devices * times) and _whole(plan.batch * times)
    ]


def _point(plan: ClusterPlan, times: Fraction, batch: int) -> Point:
    devices = int(plan.cluster.num_devices * times)
    best = plan.chosen if times == 1 else planned(plan, devices, batch)
    return Point(devices, batch, best)


def _whole(number: Fraction) -> bool:
    return number.denominator == 1


def efficiency(points: list[Point]) -> list[float | None]:
    """Return what each point reaches of the throughput per device of the smallest that fits."""
    rates = [None if one.best is None else one.batch / one.best.seconds / one.devices for one in points]
    first = next((rate for rate in rates if rate is not None), None)
    return [None if rate is None or first is None else rate / first for rate in rates]
