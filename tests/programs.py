"""Programs for tests: every schedule at every admissible count, and strategies that draw from them."""

from __future__ import annotations

from hypothesis import strategies as st

from drumline.core.costs import Costs, Edge
from drumline.core.program import Program
from names import NAMES, admissible, build

__all__ = ["NAMES", "admissible", "build", "costs_for", "programs"]


@st.composite
def programs(
    draw: st.DrawFn, names: tuple[str, ...] = tuple(NAMES), max_ranks: int = 5, max_microbatches: int = 7
) -> Program:
    name = draw(st.sampled_from(names))
    counts = list(admissible(name, max_ranks, max_microbatches, 4))
    return build(name, *draw(st.sampled_from(counts)))


@st.composite
def costs_for(draw: st.DrawFn, program: Program, *, links: bool = True) -> Costs:
    """Unequal costs in quarters, so that floating-point sums are exact."""
    quarters = st.integers(0, 12).map(lambda n: n / 4)
    positive = st.integers(1, 12).map(lambda n: n / 4)

    def per_stage(values: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(values, min_size=program.num_stages, max_size=program.num_stages))

    finite = links and draw(st.booleans())
    pairs = [(a, b) for a in range(program.num_ranks) for b in range(program.num_ranks) if a != b]
    edges: dict[tuple[int, int], Edge] = {}
    has_odd_edge = draw(st.booleans())
    if pairs and has_odd_edge:
        speed = draw(st.sampled_from([1.0, 2.0, 4.0])) if finite else float("inf")
        edges[draw(st.sampled_from(pairs))] = Edge(draw(quarters), speed)
    return Costs(
        forward=per_stage(positive),
        backward_input=per_stage(positive),
        backward_weight=per_stage(quarters),
        microbatch_factor=draw(
            st.lists(
                st.sampled_from([0.5, 1.0, 2.0]), min_size=program.num_microbatches, max_size=program.num_microbatches
            )
        ),
        overlapped=draw(st.none() | positive),
        comm=draw(quarters),
        bytes_per_second=draw(st.sampled_from([1.0, 2.0, 8.0])) if finite else float("inf"),
        message_bytes=per_stage(quarters),
        edges=edges,
        overlap=draw(st.booleans()),
    )
