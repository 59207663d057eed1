"""Every possible layout of a transformer on a cluster, within what the user has fixed (`Pins`).

Unless a pin says otherwise, this enumerates:

    tensor      degrees within a node that divide heads, key/value heads and the feed-forward width
    context     1, and degrees that leave a device at least 4,096 tokens, in two equal pieces
    pipeline    any number of ranks up to the number of layers, with stages as even as possible (`cut`)
    data        the remaining devices; it divides the batch
    expert      degrees that divide data x context and the experts
    microbatch  1, 2, 4, 8 or 16 sequences
    schedule    those to try; interleaved ones if ranks divide microbatches, with 2 to 8 stages per rank and all that
                make stages equal, embedding and head as layers or as stages of their own
    ZeRO        1 to 3: stage 0 returns 32-bit gradients where stage 1 returns 16-bit weights, and holds more;
                in a pipeline 1 and 3: stage 2 keeps whole gradients there, and is stage 1
    sequence    parallel whenever there is tensor parallelism: the same bytes sent, fewer kept
    recompute   nothing, norms, the activation function, both (selective), everything; everything of as few layers of
                every stage as fit; with latent attention also the projections up to its heads, alone or with both

Degrees of parallelism come first; if pinned degrees contradict each other, the error says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from math import prod

from drumline.core.errors import PlanError, counted
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.layout import Layout, check_recomputation
from drumline.plan.cluster.practice import Practice
from drumline.plan.cluster.stages import layer_counts
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.layouts.pins import Degrees, Pins, tried_schedules
from drumline.schedules import DEFAULT, find
from drumline.schedules.registry import MAX_PAIRS

SHORTEST = 4096  # the fewest tokens on a context-parallel rank


def meshes(transformer: Transformer, cluster: Cluster, batch: int, pins: Pins) -> list[Degrees]:
    """Return every mesh that uses all devices and supports the batch, or raise an error that names the contradiction.

    >>> from drumline.plan.cluster.hardware import Cluster, Device, DeviceLink
    >>> link = DeviceLink(1e-5, 1e11)
    >>> cluster = Cluster(Device("fast", 1e15, 2**36, 1e12), 4, 4, link, link)
    >>> gpt = Transformer("tiny", 2, 64, 4, vocabulary=1000, sequence=128)
    >>> print(", ".join(map(str, meshes(gpt, cluster, 4, Pins()))))
    TP1 PP1 DP4, TP1 PP2 DP2, TP2 PP1 DP2, TP2 PP2 DP1, TP4 PP1 DP1
    """
    check_recomputation(transformer, pins.recompute or "")
    degrees = list(_meshes(transformer, cluster, batch, pins))
    if not degrees:
        raise _contradiction(transformer, cluster, batch, pins)
    return degrees


def _meshes(transformer: Transformer, cluster: Cluster, batch: int, pins: Pins) -> Iterator[Degrees]:
    for tensor in _tensor(transformer, cluster, pins):
        for context in _context(transformer, cluster, tensor, pins):
            rest, odd = divmod(cluster.num_devices, tensor * context)
            if odd or not _suits(transformer, pins, tensor, context):
                continue
            for pipeline in divisors(rest) if pins.pipeline is None else (pins.pipeline,):
                data, odd = divmod(rest, pipeline)
                if odd or pipeline > transformer.num_layers or pins.data not in (None, data) or batch % data:
                    continue
                for expert in _expert(transformer, data, context, pins):
                    mesh = Degrees(tensor, pipeline, data, context, expert)
                    if pins.zero_stages(mesh) and _casts(transformer, pins, mesh):
                        yield mesh


def _suits(transformer: Transformer, pins: Pins, tensor: int, context: int) -> bool:
    """Whether the framework takes sequences of this length, divided so."""
    parallel = pins.sequence_parallel is not False or not pins.runs.divided_by_experts or transformer.experts is None
    return tensor == context == 1 or (
        pins.runs.divides(transformer, tensor=tensor, context=context) and (parallel or tensor == 1)
    )


def _casts(transformer: Transformer, pins: Pins, mesh: Degrees) -> bool:
    """Whether the framework runs experts in FP8 there."""
    staged = mesh.pipeline > 1 or mesh.context > 1
    return not (pins.is_fp8 and transformer.experts is not None and staged) or pins.runs.fp8_experts_staged


def _tensor(transformer: Transformer, cluster: Cluster, pins: Pins) -> list[int]:
    if pins.tensor is not None:
        if (refused := _unfit(transformer, pins.tensor)) is not None:
            fix = _instead(transformer, cluster.num_devices, 0, {"TP": pins.tensor}, is_whole=False)
            raise PlanError(refused, expected="a degree that divides it", fix=fix)
        return [pins.tensor]
    inside = min(cluster.devices_per_node, cluster.num_devices)
    return [degree for degree in divisors(inside) if _unfit(transformer, degree) is None]


def _unfit(transformer: Transformer, tensor: int) -> str | None:
    """Return why the model cannot be divided this way, or None."""
    parts = [
        ("number of attention heads", transformer.num_heads),
        ("number of key/value heads", transformer.num_key_value_heads),
        ("feed-forward width", transformer.feedforward),
    ]
    if transformer.experts is not None:
        parts.append(("expert width", transformer.experts.feedforward))
    for what, number in parts:
        if number % tensor:
            return f"TP {tensor} does not divide the {what} of {transformer.name}, {number}"
    return None


def _context(transformer: Transformer, cluster: Cluster, tensor: int, pins: Pins) -> list[int]:
    if pins.context is not None:
        if pins.context > 1 and transformer.sequence % (2 * pins.context):
            raise PlanError(
                f"CP {pins.context} cannot share sequences of {transformer.sequence} tokens",
                expected=f"a multiple of {2 * pins.context} tokens, because every rank takes two equal pieces",
            )
        return [pins.context]
    longest = transformer.sequence // SHORTEST
    return [
        degree
        for degree in divisors(cluster.num_devices // tensor)
        if degree == 1 or (degree <= longest and transformer.sequence % (2 * degree) == 0)
    ]


def _expert(transformer: Transformer, data: int, context: int, pins: Pins) -> list[int]:
    if transformer.experts is None:
        if pins.expert not in (None, 1):
            raise PlanError(f"EP is {pins.expert}, but {transformer.name} has no experts", fix="omit EP")
        return [1]
    ranks = data if pins.runs.shares_along_data else data * context
    degrees = [degree for degree in divisors(ranks) if transformer.experts.num_experts % degree == 0]
    if pins.runs.experts_span_context:
        degrees = [degree for degree in degrees if degree == 1 or degree % context == 0]
    return degrees if pins.expert is None else [degree for degree in degrees if degree == pins.expert]


def _contradiction(transformer: Transformer, cluster: Cluster, batch: int, pins: Pins) -> PlanError:
    """Return which pins contradict each other, and what would work."""
    devices = cluster.num_devices
    named = {"TP": pins.tensor, "PP": pins.pipeline, "DP": pins.data, "CP": pins.context}
    degrees = {name: degree for name, degree in named.items() if degree is not None}
    written = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
    product = prod(degrees.values())
    is_whole = {"TP", "PP", "DP"} <= degrees.keys()
    if devices % product or (is_whole and product != devices):
        reason = (
            f"{written} {'does not divide' if len(degrees) == 1 else f'= {product} does not divide'} {devices} devices"
        )
        if product > devices:
            reason = f"{written} needs {counted(product, 'device')}, but the cluster has {devices}"
        elif devices % product == 0:
            reason = f"{written} uses {counted(product, 'device')}, but the cluster has {devices}"
        return PlanError(
            reason,
            expected=f"degrees whose product {'is' if is_whole else 'divides'} the number of devices",
            fix=_instead(transformer, devices, batch, degrees, is_whole=is_whole),
        )
    if pins.pipeline is not None and pins.pipeline > transformer.num_layers:
        return PlanError(
            f"PP is {pins.pipeline}, but {transformer.name} has only {counted(transformer.num_layers, 'layer')}",
            expected="at least one layer per stage",
        )
    if pins.expert is not None and transformer.experts is not None:
        return PlanError(
            f"EP {pins.expert} cannot share {counted(transformer.experts.num_experts, 'expert')} on {devices} devices",
            expected="a degree that divides both the experts and DP x CP",
        )
    if pins.data is not None and batch % pins.data:
        return PlanError(
            f"DP {pins.data} does not divide a batch of {batch} sequences",
            expected="a batch that is a multiple of DP",
            fix=f"use a batch of {-(-batch // pins.data) * pins.data}",
        )
    return PlanError(
        f"no layout{f' with {written}' if written else ''} uses {counted(devices, 'device')} for a batch of {batch}",
        expected="TP x PP x DP = devices, with DP a divisor of the batch",
        fix="change the batch or the number of devices",
    )


def _instead(transformer: Transformer, devices: int, batch: int, degrees: dict[str, int], *, is_whole: bool) -> str:
    """Return which degree to change, the last that will do, and to what: the nearest below and above."""
    for name in sorted(degrees, key=lambda text: (text == "DP", list(degrees).index(text)), reverse=True):
        rest, odd = divmod(devices, prod(degree for text, degree in degrees.items() if text != name))
        fits: dict[str, Callable[[int], bool]] = {
            "TP": lambda degree: _unfit(transformer, degree) is None,
            "PP": lambda degree: degree <= transformer.num_layers,
            "DP": lambda degree: batch % degree == 0,
            "CP": lambda degree: degree == 1 or transformer.sequence % (2 * degree) == 0,
        }
        if odd or not rest:
            continue
        good = [degree for degree in ((rest,) if is_whole else divisors(rest)) if fits[name](degree)]
        near = [
            *[index for index in good if index < degrees[name]][-1:],
            *[at for at in good if at > degrees[name]][:1],
        ]
        if near:
            return f"use {name} {' or '.join(map(str, near))}"
    return ""


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, smallest first.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [index for index in range(1, int(number**0.5) + 1) if number % index == 0]
    return tuple(dict.fromkeys([*small, *(number // index for index in reversed(small))]))


def schedules_of(transformer: Transformer, mesh: Degrees, num_microbatches: int, pins: Pins) -> list[tuple[str, int]]:
    """Return the schedules that support the counts, each with its stages per rank; one rank needs no schedule.

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
        if pins.runs.schedule(name)
        for stages in (
            stages_to_try(name, mesh.pipeline, transformer.num_layers)
            if pins.stages_per_rank is None
            else (pins.stages_per_rank,)
        )
        if _admits(name, stages, mesh.pipeline, num_microbatches, transformer.num_layers)
    ]


def stages_to_try(name: str, pipeline: int, num_layers: int) -> tuple[int, ...]:
    """Return the numbers of stages per rank with which to try a schedule.

    If it takes any, all that make stages equal are among them, also if the embedding and the head count as layers.

    >>> stages_to_try("interleaved-1f1b", 4, 80), stages_to_try("zb-v", 4, 8)
    ((2, 3, 4, 5, 6, 8, 10, 20), (2,))
    """
    stages = set(tried_schedules()[name])
    if find(name).stage_counts == "any":
        for count in (num_layers, num_layers + 2):
            stages |= set(divisors(count // pipeline)[1:]) if count % pipeline == 0 else set()
    return tuple(sorted(stages))


def _admits(name: str, stages: int, pipeline: int, num_microbatches: int, num_layers: int) -> bool:
    if (
        pipeline * stages > num_layers and pipeline * stages != num_layers + 2
    ) or pipeline * stages * num_microbatches > MAX_PAIRS:
        return False
    schedule = find(name)
    suits = schedule.suits is None or schedule.suits(pipeline, num_microbatches, stages)
    return suits and schedule.admits_stages(stages)


def sequence_parallel(transformer: Transformer, mesh: Degrees, pins: Pins) -> bool:
    """Whether activations between the tensor-parallel parts are also divided over the sequence."""
    if mesh.tensor == 1 or pins.sequence_parallel is False:
        return False
    return transformer.sequence // mesh.context % mesh.tensor == 0


def layouts(transformer: Transformer, cluster: Cluster, batch: int, pins: Pins) -> Iterator[Layout]:
    """Yield every layout one by one, as a search without pruning would."""
    for mesh in meshes(transformer, cluster, batch, pins):
        for size in pins.microbatch_sizes(batch, mesh):
            for name, stages in schedules_of(transformer, mesh, batch // (mesh.data * size), pins):
                for zero in pins.zero_stages(mesh):
                    for recompute in pins.recomputations(transformer):
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
    practice: Practice | None = None,
) -> Layout:
    """Return one layout, with its layers cut into stages; `practice` is that of the pins, for whom has it already."""
    name, stages = schedule
    shared = sequence_parallel(transformer, mesh, pins)
    counts = layer_counts(transformer, mesh.pipeline, name, stages)
    return Layout(batch, microbatch, *mesh, stages, name, zero, shared, recompute, counts, practice or pins.practice)
