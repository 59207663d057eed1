"""A layout with what it costs, and how two of them compare."""

from __future__ import annotations

from dataclasses import dataclass

from drumline.core.program import Program
from drumline.plan.cluster.estimate import Estimate
from drumline.plan.cluster.layout import Layout, recomputed_ops
from drumline.plan.layouts.pins import Degrees
from drumline.schedules import schedules

SEARCHED = "searched"  # in the place of a schedule's name


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout and its costs; `is_exact` if its pipeline was simulated action by action.

    With a `program`, which was searched, its ranks run that instead of the layout's schedule.
    """

    layout: Layout
    estimate: Estimate
    is_exact: bool = False
    program: Program | None = None

    @property
    def mesh(self) -> Degrees:
        """Return its degrees of parallelism."""
        return Degrees.of(self.layout)

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return self.estimate.seconds.total

    @property
    def bytes(self) -> float:
        """Return the bytes of the fullest device."""
        return self.estimate.bytes.total

    @property
    def rank(self) -> tuple[object, ...]:
        """Return the sort key: seconds, then bytes, then simplicity."""
        return (self.seconds, self.bytes, *self.plainness)

    @property
    def plainness(self) -> tuple[object, ...]:
        """Return the sort key from the plainest layout to the most involved, the faster first of equally plain ones."""
        plan = self.layout
        again = (plan.recompute.startswith("full"), len(recomputed_ops(plan)))
        plain = (plan.stages_per_rank, list(schedules()).index(plan.schedule), plan.zero, again)
        return (self.program is not None, *plain, plan.microbatch, self.mesh, self.seconds, plan.recompute, plan.counts)

    @property
    def schedule(self) -> str:
        """Return the name of what its ranks run."""
        return self.layout.schedule if self.program is None else SEARCHED

    @property
    def settings(self) -> dict[str, str]:
        """Return all settings except the degrees of parallelism, in words."""
        settings = self.layout.settings
        if self.program is not None:
            settings["schedule"] = f"a searched program on the stages of {settings['schedule']}"
        return settings

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that a device sends in a step, for whatever purpose."""
        sent = self.estimate.volumes
        return sent.tensor + sent.context + sent.expert + sent.pipeline + sent.data
