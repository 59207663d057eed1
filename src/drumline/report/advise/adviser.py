"""What to change about a step, in one sentence with a predicted gain, and all else that would help.

                  cut, link, microbatches, time outside    schedule    stages, lost time
run of ours       from its records                         yes         (the cut and the link say it better)
foreign trace     not known                                yes         from its idle time by cause

A comparison of schedules (`report/compare.py`) is no step; what it comes to is said in the same form.
"""

from __future__ import annotations

from drumline.plan.advice import Advice
from drumline.report.advise.cut import equal_stages, recut
from drumline.report.advise.evidence import Evidence
from drumline.report.advise.program import other_counts, other_schedule
from drumline.report.advise.waits import lost_time, slow_link, time_outside

_REMEDIES = (recut, equal_stages, other_counts, slow_link, other_schedule, lost_time, time_outside)


def advise(seen: Evidence) -> Advice:
    """Return what is predicted to make a step shorter; changes that rest on assumptions count half."""
    found = [remedy for remedies in _REMEDIES for remedy in remedies(seen)]
    ordered = tuple(sorted(found, key=lambda one: -one.weight))
    if seen.plan is not None:
        return Advice(ordered)
    return Advice(
        ordered,
        least=0.03,
        nothing="Nothing stands out: no single change that the traces show would save 3% of the pipeline's time.",
    )
