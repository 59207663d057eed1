"""Estimate a transformer layout on a cluster: seconds of a step and bytes of a device.

Every rank processes a microbatch through its stages at its own pace. The schedule turns this into a step: all
microbatches at the pace of the busiest rank, plus a bubble, by formula or by the simulator. Then ranks exchange the
gradients that were not exchanged earlier, and the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.kernels import Ops, memory_seconds
from drumline.plan.cluster.layout import Layout, check
from drumline.plan.cluster.loads import Load, Volumes, device_volumes, hop_seconds, loads_of, stage_ops, tied_exchange
from drumline.plan.cluster.memory import Bytes, device_bytes, sharded
from drumline.plan.cluster.stages import simulated, simulated_few
from drumline.plan.cluster.transformer import Transformer, model_flops
from drumline.schedules import find
from drumline.schedules.formulas import Paces


@dataclass(frozen=True, slots=True)
class Seconds:
    """A step's seconds on the busiest rank, each second in one item; `exposed` is what compute does not hide.

    `bubble` is how long this rank waits; the bubble of all ranks is that of `Estimate`.
    """

    compute: float
    recompute: float
    tensor: float
    context: float
    expert: float
    pipeline: float
    data_exposed: float
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        """Return the seconds of the step."""
        computing = self.compute + self.recompute + self.bubble + self.optimizer
        return computing + self.tensor + self.context + self.expert + self.pipeline + self.data_exposed


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is known about a layout before it runs.

    `flops_per_device` are the model's own, without recomputation; `bubble` is the idle share of all ranks while the
    pipeline runs.
    """

    seconds: Seconds
    bytes: Bytes
    volumes: Volumes
    flops_per_device: float
    bubble: float

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, including sums.

        >>> zeros = Estimate(Seconds(*[1.0] * 9), Bytes(*[2.0] * 5), Volumes(*[0.0] * 5), 18.0, 0.1)
        >>> zeros.to_json()["seconds"]["total"], zeros.to_json()["flops_per_second"]
        (9.0, 2.0)
        """
        return {
            "seconds": {**asdict(self.seconds), "total": self.seconds.total},
            "bytes": {**asdict(self.bytes), "total": self.bytes.total},
            "volumes": asdict(self.volumes),
            "bubble": self.bubble,
            "flops_per_device": self.flops_per_device,
            "flops_per_second": self.flops_per_second,
        }

    @property
    def flops_per_second(self) -> float:
        """Return the rate at which a device runs the model's own operations."""
        return self.flops_per_device / self.seconds.total


STEP_BYTES = 42  # per parameter: the norm, the scale, Adam in 32 bits, and the new weight


def estimate(
    transformer: Transformer, cluster: Cluster, layout: Layout, *, exact: bool = False, rough: bool = False
) -> Estimate:
    """Estimate the layout; `exact` simulates every microbatch instead of using a formula, `rough` simulates none.

    Without either, formulas serve where they are within 2% of the simulator.

    >>> from drumline.plan.cluster.hardware import cluster
    >>> from drumline.plan.cluster.models import model
    >>> layout = Layout(batch=1536, tensor=8, pipeline=8, data=24, recompute="selective", sequence_parallel=True)
    >>> found = estimate(model("gpt-175b"), cluster("a100-80", 1536), layout)
    >>> found.bytes.total < 80 * 2**30
    True
    """
    check(transformer, cluster, layout)
    times = layout.num_microbatches
    hop, waiting = hop_seconds(transformer, cluster, layout)
    loads = loads_of(transformer, cluster, layout, waiting)
    paces = [load.pace for load in loads]
    pace, busiest = max(zip(paces, loads, strict=True), key=lambda pair: pair[0].total)
    taken = _taken(transformer, cluster, layout, loads, hop, exact=exact, rough=rough)
    work, again, exchange = busiest.ops.total, busiest.ops.again, busiest.exchange
    tied = tied_exchange(transformer, cluster, layout)
    once = max(load.exchange.once for load in loads) + tied.once
    sent = max(load.exchange.bytes for load in loads) + tied.bytes
    stepped = max(sharded(layout, load.parameters) if layout.zero else sum(load.parameters) for load in loads)
    busy = times * sum(one.count * one.total for one in paces) / layout.pipeline
    return Estimate(
        Seconds(
            compute=times * (work.compute - again.compute),
            recompute=times * again.total,
            tensor=times * (work.tensor - again.tensor),
            context=times * (work.context - again.context),
            expert=times * (work.expert - again.expert),
            pipeline=times * busiest.waiting,
            data_exposed=times * (exchange.forward + exchange.backward) + once,
            bubble=_beyond(taken, times * pace.total),
            optimizer=memory_seconds(cluster.device, STEP_BYTES * stepped),
        ),
        max((device_bytes(transformer, layout, load.alike) for load in loads), key=lambda one: one.total),
        device_volumes(transformer, layout, busiest.alike, sent),
        model_flops(transformer, layout.batch) / layout.num_devices,
        1.0 - busy / max(taken, busy),
    )


EVEN = 0.02  # share by which stages may differ for a formula that takes them as equal


def _taken(
    transformer: Transformer,
    cluster: Cluster,
    layout: Layout,
    loads: Sequence[Load],
    hop: float,
    *,
    exact: bool,
    rough: bool,
) -> float:
    """Return the seconds of the pipeline: by formula where that is as good as simulating, or by simulating it."""
    times, formula = layout.num_microbatches, find(layout.schedule).makespan
    if formula is not None and not exact and (rough or layout.pipeline == 1):
        return formula(Paces([load.pace for load in loads], times, layout.stages_per_rank, hop))
    stages = stage_ops(transformer, cluster, layout, loads)
    if formula is not None and not exact and formula_holds(layout, stages):
        return formula(Paces([load.pace for load in loads], times, layout.stages_per_rank, hop))
    if exact:
        return simulated(layout.schedule, stages, layout.pipeline, times, hop_seconds=hop).makespan
    return simulated_few(layout.schedule, stages, layout.pipeline, times, hop_seconds=hop)


def formula_holds(layout: Layout, stages: Sequence[Ops]) -> bool:
    """Whether the formula of the layout's schedule is within 2% of the simulator: the counts suit, stages are equal."""
    holds = find(layout.schedule).makespan_holds
    if holds is not None and not holds(layout.pipeline, layout.num_microbatches, layout.stages_per_rank):
        return False
    totals = [stage.total.total for stage in stages]
    return max(totals) <= (1 + EVEN) * min(totals)


def _beyond(taken: float, work: float) -> float:
    """Return the seconds that a pipeline takes beyond its work; what is left of rounding is none.

    >>> _beyond(2.5, 2.0), _beyond(1.0 + 1e-15, 1.0)
    (0.5, 0.0)
    """
    return taken - work if taken > work * (1 + 1e-12) else 0.0
