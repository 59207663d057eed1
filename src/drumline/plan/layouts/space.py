"""Every layout that a transformer admits on a cluster, and what may be decided beforehand.

What is enumerated, unless a pin says otherwise:

    tensor      degrees within a node that divide heads, key/value heads and the feed-forward width
    context     1, and degrees that leave a device at least 8,192 tokens, in two equal pieces
    pipeline    any number of ranks up to the layers, stages as even as they go (`cut`)
    data        what is left of the devices; it divides the batch
    expert      degrees that divide data x context and the experts
    microbatch  1, 2, 4, 8 or 16 sequences
    schedule    those to be tried; interleaved ones with 2 to 8 stages per rank where ranks divide microbatches
    ZeRO        1 to 3: stage 0 sends gradients back in 32 bits where stage 1 sends weights in 16, and holds more
    sequence    parallel wherever there is tensor parallelism: the same bytes sent, fewer kept
    recompute   none, selective, full
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.layout import RECOMPUTE, Layout
from drumline.plan.cluster.stages import layer_counts
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.layouts.degrees import ZERO, Degrees, Pins, meshes, tried_schedules
from drumline.schedules import DEFAULT, find
from drumline.schedules.registry import MAX_PAIRS

MICROBATCHES = (1, 2, 4, 8, 16)


def microbatch_sizes(batch: int, mesh: Degrees, pins: Pins) -> list[int]:
    """Return the sizes of a microbatch that divide what a data-parallel rank gets.

    >>> microbatch_sizes(24, Degrees(data=2), Pins())
    [1, 2, 4]
    """
    local = batch // mesh.data
    sizes = MICROBATCHES if pins.microbatch is None else (pins.microbatch,)
    return [size for size in sizes if local % size == 0]


def schedules_of(transformer: Transformer, mesh: Degrees, num_microbatches: int, pins: Pins) -> list[tuple[str, int]]:
    """Return the schedules that admit the counts, each with its stages per rank; a pipeline of one rank needs none.

    >>> gpt = Transformer("small", 8, 64, 4, vocabulary=1000, sequence=128)
    >>> schedules_of(gpt, Degrees(pipeline=4), 4, Pins())
    [('1f1b', 1), ('interleaved-1f1b', 2), ('zb-h1', 1), ('zb-v', 2), ('v-half', 2)]
    """
    if mesh.pipeline == 1:
        wanted = (not pins.schedules or DEFAULT in pins.schedules) and pins.stages_per_rank in (None, 1)
        return [(DEFAULT, 1)] if wanted and num_microbatches <= MAX_PAIRS else []
    tried = tried_schedules()
    return [
        (name, stages)
        for name in pins.schedules or tried
        for stages in (tried[name] if pins.stages_per_rank is None else (pins.stages_per_rank,))
        if _admits(name, stages, mesh.pipeline, num_microbatches, transformer.num_layers)
    ]


def _admits(name: str, stages: int, pipeline: int, num_microbatches: int, num_layers: int) -> bool:
    if pipeline * stages > num_layers or pipeline * stages * num_microbatches > MAX_PAIRS:
        return False
    schedule = find(name)
    suits = schedule.suits is None or schedule.suits(pipeline, num_microbatches, stages)
    return suits and schedule.admits_stages(stages)


def zero_stages(mesh: Degrees, pins: Pins) -> tuple[int, ...]:
    """Return the ZeRO stages worth a look: with nobody to share with, only none."""
    if pins.zero is not None:
        return (pins.zero,)
    return ZERO[1:] if mesh.data * mesh.context > 1 else (0,)


def recomputations(pins: Pins) -> tuple[str, ...]:
    """Return what may be computed again, from the fastest to the smallest."""
    return RECOMPUTE if pins.recompute is None else (pins.recompute,)


def sequence_parallel(transformer: Transformer, mesh: Degrees, pins: Pins) -> bool:
    """Whether activations between the tensor-parallel parts are shared out over the sequence as well."""
    if mesh.tensor == 1 or pins.sequence_parallel is False:
        return False
    return transformer.sequence // mesh.context % mesh.tensor == 0


def layouts(transformer: Transformer, cluster: Cluster, batch: int, pins: Pins) -> Iterator[Layout]:
    """Yield every layout, one by one: what a search without any pruning would go through."""
    for mesh in meshes(transformer, cluster, batch, pins):
        for size in microbatch_sizes(batch, mesh, pins):
            for name, stages in schedules_of(transformer, mesh, batch // (mesh.data * size), pins):
                for zero in zero_stages(mesh, pins):
                    for recompute in recomputations(pins):
                        yield layout_of(transformer, batch, pins, mesh, size, (name, stages), zero, recompute)


def layout_of(
    transformer: Transformer,
    batch: int,
    pins: Pins,
    mesh: Degrees,
    microbatch: int,
    schedule: tuple[str, int],
    zero: int,
    recompute: str,
) -> Layout:
    """Return one layout, its layers cut."""
    name, stages = schedule
    shared = sequence_parallel(transformer, mesh, pins)
    counts = layer_counts(transformer, mesh.pipeline, name, stages)
    return Layout(batch, microbatch, *mesh, stages, name, zero, shared, recompute, counts)
