"""Estimate a layout whose microbatches run in slices: its program, what it costs, and the seconds and bytes of a step.

A slice runs through the stages like a microbatch, so the plain estimate answers most questions for as many more
microbatches of shorter sequences: messages, exchanges, buffers. What is different is simulated, action by action:

    seconds    every slice of every stage has its own (`layout_times`)
    bytes      a rank holds slices, and the gradients of their keys and values; beside checkpoints also those

Joining keys and values needs room for those of a layer's whole sequences, and for their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np

from drumline.core.action import Op
from drumline.core.costs import Costs
from drumline.core.graph import CODE, Floats
from drumline.core.program import Program
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.plan.cluster.device_memory import Bytes, device_bytes, stage_activations
from drumline.plan.cluster.estimate import Estimate, Seconds, estimate
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.layers import ring_bytes
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.loads import (
    ExchangeCost,
    Load,
    device_volumes,
    hop_seconds,
    loads_of,
    tied_exchange,
    work_of,
)
from drumline.plan.cluster.stages import counts_of, num_sides, slices_of, stages_of
from drumline.plan.cluster.transformer import Transformer, model_flops
from drumline.plan.slices.layout_times import AGAIN, BY_INPUT, BY_WEIGHT, FORWARD, stage_seconds, unit_of
from drumline.schedules import find


@lru_cache(maxsize=128)
def program_of(schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int, slices: int) -> Program:
    """Return a schedule's program in slices."""
    return find(schedule).build(num_ranks, num_microbatches, stages_per_rank, slices=slices)


@dataclass(frozen=True)
class SlicedLayout:
    """A layout in slices on a cluster: `unit` and `units` see a slice as a sequence, and slices as microbatches."""

    transformer: Transformer
    cluster: Cluster
    layout: Layout

    @cached_property
    def unit(self) -> Transformer:
        """The transformer with sequences as long as a slice."""
        return unit_of(self.transformer, self.layout.slices)

    @cached_property
    def units(self) -> Layout:
        """The layout with slices as microbatches of their own."""
        return replace(self.layout, batch=self.layout.batch * self.layout.slices, slices=1)

    @cached_property
    def loads(self) -> list[Load]:
        """The ranks, what they wait for with each slice, and what they exchange after the last."""
        work = work_of(self.unit, self.cluster, self.units)
        # A table of learned positions is as long as the whole sequence.
        whole = work_of(self.transformer, self.cluster, self.units)
        pairs = zip(work.ranks, whole.ranks, strict=True)
        ranks = [rank._replace(parameters=other.parameters) for rank, other in pairs]
        return loads_of(self.unit, self.cluster, self.units, work._replace(ranks=tuple(ranks)))

    @cached_property
    def hops(self) -> tuple[float, float]:
        """How late a slice's message arrives, and how long a stage waits for it on each side."""
        return hop_seconds(self.unit, self.cluster, self.units)

    @cached_property
    def work(self) -> Floats:
        """The seconds of every stage's own work: (stages, passes, slices)."""
        layout, nodes = self.layout, self.cluster.nodes
        parts = slices_of(self.transformer, counts_of(self.transformer, layout))
        return np.array([stage_seconds(self.transformer, nodes, layout.share, layout.slices, part) for part in parts])

    @cached_property
    def table(self) -> Floats:
        """The seconds of every stage, with all that delays its rank: (stages, passes, slices)."""
        layout, (_, waiting), table = self.layout, self.hops, self.work.copy()
        for load in self.loads:
            forward, backward = (each / layout.stages_per_rank for each in load.exchange[:2])
            for rank in load.alike.ranks:
                for stage in self._stages(rank):
                    sides = num_sides(layout.schedule, stage, layout.pipeline, layout.num_stages)
                    wait = waiting * sides / 2
                    table[stage] += np.array([wait + forward, 0.0, wait, backward])[:, None]
        return table

    def _stages(self, rank: int) -> list[int]:
        layout = self.layout
        return [stage for stage, _ in stages_of(layout.schedule, rank, layout.pipeline, layout.stages_per_rank)]

    @cached_property
    def costs(self) -> Costs:
        """The costs of whole microbatches; a rank's state and buffers count with its first stage."""
        layout = self.layout
        parts = slices_of(self.transformer, counts_of(self.transformer, layout))
        forward, again, by_input, by_weight = self.table.sum(axis=2).T
        keys = ring_bytes(self.transformer, layout.share)
        beside = [keys * part.num_layers for part in parts]
        sizes = [stage_activations(self.transformer, layout, part) for part in parts]
        if layout.recompute.startswith("full"):  # later slices need keys and values
            sizes = [size + more for size, more in zip(sizes, beside, strict=True)]
        state = [0.0] * layout.num_stages
        for rank, standing in enumerate(self.standing):
            state[min(self._stages(rank))] = standing.total
        return Costs(
            forward=forward.tolist(),
            backward_input=(again + by_input).tolist(),
            backward_weight=by_weight.tolist(),
            slice_factor=(1.0 / layout.slices,) * layout.slices,
            comm=self.hops[0],
            activation_bytes=sizes,
            key_value_bytes=beside,
            weight_bytes=state,
        )

    @property
    def standing_bytes(self) -> float:
        """What the fullest device holds beside activations, and one microbatch."""
        assert isinstance(self.costs.activation_bytes, Sequence), "costs say it of every stage"
        return max(each.total for each in self.standing) + max(self.costs.activation_bytes)

    @cached_property
    def standing(self) -> list[Bytes]:
        """What the device of every rank holds all the time: state, gradients and buffers."""
        more = 2 * ring_bytes(self.transformer, self.layout.share)
        every: dict[int, Bytes] = {}
        for load in self.loads:
            state = device_bytes(self.transformer, self.units, load.alike)
            buffers = device_bytes(self.unit, self.units, load.alike).buffers + more
            every |= dict.fromkeys(load.alike.ranks, replace(state, activations=0.0, buffers=buffers))
        return [every[rank] for rank in range(self.layout.pipeline)]

    @cached_property
    def timeline(self) -> Simulation:
        """The simulated step."""
        return self.of_microbatches(self.layout.num_microbatches)

    def of_microbatches(self, number: int) -> Simulation:
        """Return a step with another number of microbatches."""
        layout = self.layout
        return self.simulated(
            program_of(layout.schedule, layout.pipeline, number, layout.stages_per_rank, layout.slices)
        )

    def simulated(self, program: Program) -> Simulation:
        """Simulate a program of these stages and slices, with the seconds of every slice of every stage."""
        columns, plain = program.timed_columns, self.table.mean(axis=2)
        number = columns.microbatch % self.layout.slices
        rows = {
            Op.FORWARD: [FORWARD],
            Op.BACKWARD: [AGAIN, BY_INPUT, BY_WEIGHT],
            Op.BACKWARD_INPUT: [AGAIN, BY_INPUT],
            Op.BACKWARD_WEIGHT: [BY_WEIGHT],
        }
        factors = np.ones(len(columns.code))
        for op, passes in rows.items():
            at = columns.code == CODE[op]
            stage = columns.stage[at]
            wanted = self.table[:, passes].sum(axis=1)[stage, number[at]]
            mean = plain[:, passes].sum(axis=1)[stage]
            factors[at] = np.divide(wanted, mean, out=np.ones_like(wanted), where=mean > 0)
        return simulate(program, self.costs, factors=factors)

    @cached_property
    def seconds_of_ranks(self) -> list[float]:
        """The seconds of every rank's work in a step."""
        each = self.layout.num_microbatches * self.table.sum(axis=(1, 2))
        return [float(sum(each[stage] for stage in self._stages(rank))) for rank in range(self.layout.pipeline)]

    @cached_property
    def tied(self) -> ExchangeCost:
        """The exchange of a tied embedding."""
        return tied_exchange(self.transformer, self.cluster, self.layout)

    @cached_property
    def after(self) -> float:
        """The seconds after a pipeline: exchanges that nothing hides, and the optimizer."""
        return max(load.exchange.once for load in self.loads) + self.tied.once + self._optimizer

    @cached_property
    def _optimizer(self) -> float:
        return estimate(self.transformer, self.cluster, self.units, rough=True).seconds.optimizer

    @cached_property
    def least(self) -> float:
        """What a pipeline takes at least, in whatever order it runs slices; `plan.slices.bound` has the proof.

        A rank begins with a slice 0 that has come down to it, and ends with one that goes back up. In a line of single
        stages, the last rank also waits for the longest slice to pass all others. Exchanges count as nothing.
        """
        layout, (hop, _) = self.layout, self.hops
        splits = find(layout.schedule).splits_backward
        forward, backward = self.work[:, FORWARD], self.work[:, AGAIN:].sum(axis=1)
        own_work = (layout.num_microbatches * (forward + backward).sum(axis=1)).tolist()
        down = list(accumulate((forward[:, 0] + hop).tolist(), initial=0.0))
        up = [0.0] * len(down) if splits else list(accumulate((backward[:, 0] + hop).tolist(), initial=0.0))
        least = 0.0
        for stages in map(self._stages, range(layout.pipeline)):
            first = min(stages)
            least = max(least, down[first] + up[first] + sum(own_work[stage] for stage in stages))
        if layout.stages_per_rank == 1:
            least = max(least, self._passing(forward, backward, splits=splits))
        return least

    def _passing(self, forward: Floats, backward: Floats, *, splits: bool) -> float:
        """Return the least seconds of a line of stages, all of which take what each takes at least."""
        layout, (hop, _), again = self.layout, self.hops, self.work[:, AGAIN:BY_WEIGHT].sum(axis=1)
        there, back, early = (each.min(axis=0) for each in (forward, backward, again))
        all_of = layout.num_microbatches * (there.sum() + back.sum())
        down, up = ((layout.pipeline - 1) * (each.max() + hop) for each in (there, early if splits else back))
        if not splits:
            return float(all_of + down + up)
        return float(max(all_of + down, layout.num_microbatches * (there.sum() + early.sum()) + down + up))

    @property
    def seconds(self) -> float:
        """What a step takes."""
        return max(self.timeline.makespan, *self.seconds_of_ranks) + self.after

    @cached_property
    def bytes(self) -> Bytes:
        """What the fullest device holds at its peak."""
        peaks = [holding.peak_bytes or 0.0 for holding in self.timeline.memory]
        fullest = max(range(len(peaks)), key=peaks.__getitem__)
        standing = self.standing[fullest]
        return replace(standing, activations=peaks[fullest] - standing.total)

    def estimate(self) -> Estimate:
        """Return the estimate of the layout, from the simulated step."""
        layout, taken = self.layout, self.timeline.makespan
        rank = max(range(layout.pipeline), key=self.seconds_of_ranks.__getitem__)
        load = next(load for load in self.loads if rank in load.alike.ranks)
        times, exchange = layout.num_microbatches, load.exchange
        spent = times * self.work[self._stages(rank)].sum(axis=(0, 2))
        busy = sum(self.seconds_of_ranks) / layout.pipeline
        seconds = Seconds(
            compute=float(spent[FORWARD] + spent[BY_INPUT] + spent[BY_WEIGHT]),
            recompute=float(spent[AGAIN]),
            tensor=0.0,
            context=0.0,
            expert=0.0,
            pipeline=times * layout.slices * load.waiting,
            data_exposed=times * layout.slices * (exchange.forward + exchange.backward) + self.after - self._optimizer,
            bubble=max(taken - self.seconds_of_ranks[rank], 0.0),
            optimizer=self._optimizer,
        )
        sent = max(load.exchange.bytes for load in self.loads) + self.tied.bytes
        return Estimate(
            seconds,
            self.bytes,
            device_volumes(self.transformer, replace(layout, slices=1), load.alike, sent),
            model_flops(self.transformer, layout.batch, causal=True) / layout.num_devices,
            1.0 - busy / max(taken, busy),
        )
