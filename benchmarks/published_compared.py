"""Published runs beside their estimates, and beside what a single number would have said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from drumline.plan.cluster.estimate import Estimate
from published_runs import PRACTICES, Run, held_out, run_flops, sc21


@dataclass(frozen=True, slots=True)
class Row:
    """A run, its estimate, and the seconds that each constant rate would give."""

    run: Run
    estimate: Estimate
    by_constant: tuple[float, ...] = ()

    @property
    def error(self) -> float:
        """Return by which part the estimate is too long."""
        return self.estimate.seconds.total / self.run.seconds - 1

    @property
    def constant_errors(self) -> tuple[float, ...]:
        """Return the same of the constants."""
        return tuple(seconds / self.run.seconds - 1 for seconds in self.by_constant)

    def to_json(self) -> dict[str, Any]:
        """Return an object for JSON."""
        return {
            "source": self.run.source,
            "name": self.run.name,
            "devices": self.run.layout.num_devices,
            "published": self.run.seconds,
            "error": self.error,
            "constant_errors": list(self.constant_errors),
            **self.estimate.to_json(),
        }


def rate_of(run: Run) -> float:
    """Return the operations a second that a device ran, those included that are computed again."""
    return run_flops(run.transformer, run.layout) / run.layout.num_devices / run.seconds


def best_constant(runs: Sequence[Run]) -> float:
    """Return the one rate for all devices with the least mean error in seconds; it is the rate of one of the runs.

    >>> round(best_constant(sc21()) / 1e12)
    142
    """
    rates = [rate_of(run) for run in runs]
    return min(rates, key=lambda constant: fmean(abs(rate / constant - 1) for rate in rates))


def compared(runs: Sequence[Run], constants: Sequence[float] = (), *, exact: bool = False) -> tuple[Row, ...]:
    """Return every run with its estimate and with what each constant gives."""
    return tuple(
        Row(run, run.estimate(exact=exact), tuple(run.seconds * rate_of(run) / constant for constant in constants))
        for run in runs
    )


def errors_of(rows: Sequence[Row], constant: int | None = None) -> tuple[float, float]:
    """Return the mean and the largest error, of the estimates or of one of the constants."""
    errors = [abs(row.error if constant is None else row.constant_errors[constant]) for row in rows]
    return fmean(errors), max(errors)


def table(runs: Sequence[Run], *, exact: bool = False) -> str:
    """Return the runs as a table: seconds published and estimated, their difference, and that of two constants.

    One constant is the best for the SC'21 rows, as the estimate's are. The other is the best that there is for the
    table's own rows, which no one could have known before.
    """
    constants = (best_constant(sc21()), best_constant(runs))
    rows = compared(runs, constants, exact=exact)
    heads = [f"{constant / 1e12:.0f} TFLOP/s" for constant in constants]
    lines = [f"{'':10} {'':19} {'devices':>7} {'published':>9} {'estimated':>9} {'':>7} {heads[0]:>11} {heads[1]:>11}"]
    for row in rows:
        run, errors = row.run, [f"{error:+.1%}" for error in row.constant_errors]
        lines.append(
            f"{run.source:10} {run.name:19} {run.layout.num_devices:7} {run.seconds:7.2f} s"
            f" {row.estimate.seconds.total:7.2f} s {row.error:+7.1%} {errors[0]:>11} {errors[1]:>11}"
        )
    found = [errors_of(rows), errors_of(rows, 0), errors_of(rows, 1)]
    for name, at in (("mean error", 0), ("worst", 1)):
        each = [f"{pair[at]:.1%}" for pair in found]
        lines.append(f"{name:58} {each[0]:>7} {each[1]:>11} {each[2]:>11}")
    return "\n".join(line.rstrip() for line in lines)


def practices_table(runs: Sequence[Run], *, exact: bool = False) -> str:
    """Return the errors of the runs under one practice for all of them, and under the one chosen for each paper."""
    lines = [f"{'one practice for all rows':28} {'mean error':>10} {'worst':>7}"]
    for name, (mean, worst) in practice_errors(runs, exact=exact).items():
        lines.append(f"{name:28} {mean:10.1%} {worst:7.1%}")
    mean, worst = errors_of(compared(runs, exact=exact))
    return "\n".join([*lines, f"{'chosen for each paper':28} {mean:10.1%} {worst:7.1%}"])


def practice_errors(runs: Sequence[Run], *, exact: bool = False) -> dict[str, tuple[float, float]]:
    """Return the mean and the largest error for each practice that is known, taken for all runs."""
    return {
        name: errors_of(compared([run.under(practice) for run in runs], exact=exact))
        for name, practice in PRACTICES.items()
    }


def all_held_out() -> tuple[Row, ...]:
    """Return the comparison that the constants are judged by."""
    runs = held_out()
    return compared(runs, (best_constant(sc21()), best_constant(runs)))
