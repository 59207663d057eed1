"""What to change about a step, in one sentence with a predicted gain, and what else would help.

                      cut, placement, link, microbatches, time outside    schedule    stages, lost time
    run of ours       from its records                                    yes         (covered by the cut and the link)
    foreign trace     unknown                                             yes         from its idle time by cause

A comparison of schedules (`report/compare.py`) is not a step, but returns its advice in the same form.
"""

from __future__ import annotations

from drumline.plan.device.advice import Advice
from drumline.report.advise.cut import equal_stages, recut
from drumline.report.advise.evidence import Evidence
from drumline.report.advise.placement import other_placement
from drumline.report.advise.program import other_counts, other_schedule
from drumline.report.advise.waits import lost_time, slow_link, time_outside

_REMEDIES = (
    recut,
    equal_stages,
    other_counts,
    other_placement,
    slow_link,
    other_schedule,
    lost_time,
    time_outside,
)


def advise(evidence: Evidence) -> Advice:
    """Return the changes that are predicted to shorten a step; those that rely on assumptions count half."""
    remedies = [remedy for remedies in _REMEDIES for remedy in remedies(evidence)]
    ordered = tuple(sorted(remedies, key=lambda remedy: -remedy.weight))
    if evidence.plan is not None:
        return Advice(ordered)
    return Advice(
        ordered,
        least=0.03,
        nothing="No single change that the traces show would save 3% or more of the pipeline's time.",
    )
