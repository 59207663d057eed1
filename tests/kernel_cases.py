"""Compares the kernel with the Python form; as a program, for a kernel whose path it is given.

python tests/kernel_cases.py PATH              prints how many cases it compared
python tests/kernel_cases.py PATH "too short"  then lets the kernel write past the end of an array
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

import drumline as dl
from drumline.core import memory
from drumline.core import program as rows_and_text
from drumline.core.clock import evaluate as clock
from drumline.core.clock import producers
from drumline.core.costs import Costs, Edge
from drumline.core.kernel import library, text
from drumline.core.kernel.library import Kernel
from drumline.core.lower.lower import lower
from drumline.core.program import Program
from drumline.core.prove import arrays, validate
from drumline.core.simulate import durations, many, walks
from drumline.core.simulate.durations import lags, node_seconds, work_seconds
from drumline.core.simulate.simulate import compiled, makespans, simulate
from drumline.core.timeline import causes
from drumline.core.timeline.idle import Limit
from drumline.plan.search import construct, local, row_times
from drumline.plan.search.bounds.instance import Instance
from drumline.plan.search.local import Annealer
from drumline.plan.search.objective import Objective
from drumline.plan.search.search import placement_named
from drumline.plan.search.starts import split
from drumline.plan.search.styles import FIRST, WOVEN, Styles
from drumline.schedules import building_block, cells, hanayo

ASKING = (
    arrays,
    building_block,
    causes,
    cells,
    clock,
    construct,
    durations,
    hanayo,
    local,
    many,
    memory,
    producers,
    row_times,
    rows_and_text,
    text,
    validate,
    walks,
)
NAMES = ("1f1b", "zb-h1", "zb-v", "chimera", "dualpipe", "pipedream")
WRITTEN = (
    "v-half",
    "v-min",
    "hanayo",
    "zb-v",
    "zb-h1",
    "pipedream",
    "interleaved-zb",
)  # recipes whose rows the kernel writes
COSTS = (
    Costs(),
    Costs(comm=0.3),
    Costs(edges={(1, 0): Edge(0.7)}, reduce=2.0, pack=0.5),
    Costs(bytes_per_second=3.0, message_bytes=2.0),
    Costs(bytes_per_second=3.0, message_bytes=2.0, overlap=False, comm=0.1),
)


@contextmanager
def using(kernel: Kernel | None) -> Iterator[None]:
    """Let everything that asks for the kernel get this one."""

    def asked() -> Kernel | None:
        return kernel

    for module in ASKING:
        setattr(module, "kernel", asked)  # noqa: B010 - they import it, and do not define it
    try:
        yield
    finally:
        for module in ASKING:
            setattr(module, "kernel", library.kernel)  # noqa: B010


def compare(kernel: Kernel, program: Program, costs: Costs, seed: int, spelled: bool) -> None:
    """Compare graphs, times and memory of a program under jitter, bit by bit."""
    rows = (lower(program) if spelled else program).rows
    costs = replace(costs, activation_bytes=0.3, held_until_weight_bytes=0.1, weight_bytes=0.7)
    results: list[list[Any]] = []
    for use in (kernel, None):
        rng = np.random.default_rng(seed)
        with using(use):
            results.append(list(computed(Program(rows), costs, rng)))
    for found, expected in zip(*results, strict=True):
        assert found.tobytes() == expected.tobytes()


def compare_rows(kernel: Kernel, name: str, **counts: int) -> None:
    """Compare the rows that a recipe makes with the kernel and without."""
    programs = []
    for use in (kernel, None):
        with using(use):
            programs.append(dl.generate(name, **counts))
    assert programs[0] == programs[1]
    assert programs[0].rows == programs[1].rows


def computed(program: Program, costs: Costs, rng: np.random.Generator) -> Iterator[Any]:
    """Yield arrays that the kernel or the Python form computes."""
    graph = compiled(program, costs)
    yield from (graph.need, graph.crossing, graph.before, *graph.crossings)
    yield makespans([program, program], costs)
    factors = rng.lognormal(0.0, 0.3, len(graph.node))
    work = work_seconds(graph, [costs])[:, 0] * rng.lognormal(0.0, 0.3, len(graph.node))
    seconds = node_seconds(graph, costs, work)
    late = lags(graph, [costs], seconds[:, None])
    lag = None if late is None else late[:, 0]
    samples = int(rng.integers(1, 20))
    sampled = seconds[:, None] * rng.lognormal(0.0, 0.3, (1, samples))
    ends = clock.evaluate(graph, seconds, lag)
    yield ends
    yield clock.starts_of(graph, ends, lag)
    yield np.array(durations.sums(ends, [len(ends)]))
    yield clock.starts_of(graph, ends, lag, np.arange(0, graph.num_nodes, 3))
    order, mixed = clock.order_of(graph), rng.permutation(graph.num_nodes)
    yield clock.latest_ends(order, sampled, lag=late)
    yield clock.latest_ends(order, sampled, mixed, None if late is None else late * np.ones(samples))
    yield clock.latest_ends(order, sampled[:, :1], lag=late)
    if (nodes := walks.critical_nodes(graph, clock.starts_of(graph, ends, lag), ends)) is not None:
        yield nodes
    timeline = simulate(program, costs, factors=factors)
    if isinstance(timeline.causes, causes.Causes):
        columns = {name: value for name, value in vars(timeline.causes).items() if name != "work"}
        yield from columns.values()
    for holding in memory.holdings(program, costs):
        yield from (holding.byte_counts, holding.pair_counts)


def searched_instance(seed: int) -> Instance:
    """Return an instance of a search, perhaps with links, unequal microbatches and whole backwards."""
    rng = random.Random(seed)
    name = ("linear", "v", "loop", "bidirectional")[seed % 4]
    placement, few = placement_named(name, rng.choice([2, 4]), 6), rng.randint(4, 6)
    stages, per_rank = placement.num_stages, 1 if name in ("linear", "bidirectional") else 2
    more: dict[str, Any] = {}
    if seed % 3 == 1:
        more = {"message_bytes": 2.0, "bytes_per_second": 3.0}
    if seed % 5 == 1:
        more["microbatch_factor"] = [rng.choice([1.0, 1.5, 2.0]) for _ in range(few)]
    if seed % 2:
        more["backward"] = [rng.uniform(0.8, 2.0) for _ in range(stages)]
    each: dict[str, Any] = {
        name: [rng.uniform(0.3, 1.7) for _ in range(stages)] for name in ("forward", "backward_input")
    }
    costs = Costs(**each, backward_weight=0.7, comm=rng.choice([0.0, 0.3]), **more)
    if name == "bidirectional":
        placement = placement_named(name, placement.num_ranks, few)
    limit = Limit(max_activations=per_rank * rng.randint(2, 4))
    if seed % 3 == 2:
        costs = replace(costs, activation_bytes=2.0, held_until_weight_bytes=0.9, weight_bytes=0.3)
        limit = Limit(max_bytes=per_rank * 2.3 * rng.randint(2, 4))
    return Instance(costs, placement, few, limit)


def compare_searched(kernel: Kernel, seed: int, num_steps: int = 150) -> None:
    """Compare programs that a search builds, times and moves."""
    results: list[list[Any]] = []
    for use in (kernel, None):
        instance = searched_instance(seed)
        with using(use):
            results.append(list(searched(instance, seed, num_steps)))
    assert len(results[0]) > len(FIRST)
    assert results[0] == results[1]


def searched(instance: Instance, seed: int, num_steps: int) -> Iterator[Any]:
    """Yield what the kernel or the Python form builds and moves."""
    styles, rng = Styles(instance, may_join=seed % 2 == 1), random.Random(seed)
    built = [styles.build(style) for style in (*FIRST, *(styles.drawn(rng) for _ in range(5)))]
    yield from built
    rows = next((each.rows for each in built if each is not None), instance.rows_of(instance.plain) or [])
    yield from (styles.build(style, split(rows)) for style in WOVEN)
    yield from (styles.build(style, rows) for style in WOVEN[:2])
    for name in ("makespan", "span", "steady"):
        objective = Objective(instance, name)
        measured = objective.measure(rows)
        assert measured is not None
        yield measured
        yield Annealer(objective, random.Random(seed), may_join=seed % 2 == 1).run(rows, num_steps=num_steps, heat=0.03)


def main() -> None:
    """Compare all cases with the kernel at the path."""
    kernel = Kernel(ctypes.CDLL(sys.argv[1]))
    cases = [(name, costs) for name in NAMES for costs in COSTS]
    for seed, (name, costs) in enumerate(cases):
        program = dl.generate(name, num_ranks=4, num_microbatches=6)
        compare(kernel, program, costs, seed, spelled=seed % 2 == 0 and name != "pipedream")
    for name in WRITTEN:
        for num_ranks, num_microbatches in ((1, 1), (2, 5), (5, 3), (6, 17)):
            compare_rows(kernel, name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    import proof_cases  # these import this file
    import text_cases

    mixed = random.Random(0)
    for name in ("1f1b", "chimera", "zb-v"):
        for variant in proof_cases.variants(dl.generate(name, num_ranks=2, num_microbatches=2), mixed):
            proof_cases.compare_proofs(kernel, variant)
            proof_cases.compare_proofs(kernel, proof_cases.damaged(variant, mixed))
            written = text_cases.compare_writers(kernel, variant)
            for _ in range(10):
                text_cases.compare_texts(kernel, text_cases.edited(written, mixed))
    for seed in range(12):
        compare_searched(kernel, seed, num_steps=40)
    print(f"compared {len(cases)} programs and 12 searches", flush=True)
    if sys.argv[2:]:
        print("an array is too short", flush=True)
        short, index = np.empty(100), np.full(40_000, -1, dtype=np.int32)
        kernel.starts(1, np.array([[0, len(index)]]), index, None, np.empty(len(index) + 1), short)


if __name__ == "__main__":
    main()
