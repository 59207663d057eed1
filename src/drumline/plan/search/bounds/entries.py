"""One entry per action number: seconds, what each action waits for, the link that it uses, and what it adds.

    4 * (stage * M + microbatch) + op        op: 0 F, 1 I, 2 W, 3 B

Entries are arrays of the shape (stages, microbatches, ops), made at once: programs have tens of thousands of actions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drumline.core import rules
from drumline.core.action import Action, Op
from drumline.core.clock.assemble import compile_program
from drumline.core.costs import Costs
from drumline.core.graph import CODE, OPS, Columns, Floats, Ints, Messages
from drumline.core.memory import Sizes
from drumline.core.placement import Placement
from drumline.core.program import Program
from drumline.core.simulate.durations import message_bytes, work_seconds

F, I, W, B = range(4)  # noqa: E741 - the letters the papers use
SEARCHED = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.BACKWARD)
CODES = np.array([CODE[op] for op in SEARCHED])
# By an op's index in `OPS`: its number here, or -1.
NUMBER = np.array([SEARCHED.index(op) if op in SEARCHED else -1 for op in OPS])


EXCHANGE = CODE[Op.REDUCE_GRAD]


def homes(placement: Placement, num_microbatches: int) -> Ints:
    """Return the rank of every pair, (stages, microbatches).

    >>> homes(Placement.bidirectional(2, mirrored=[1]), 2).tolist()
    [[0, 1], [1, 0]]
    """
    down = np.array(placement.homes)[:, None]
    goes_up = np.array([m in placement.mirrored for m in range(num_microbatches)])
    ranks: Ints = np.where(goes_up, placement.num_ranks - 1 - down, down)
    return ranks


def one_by_one(placement: Placement, ranks: Ints, backward: Sequence[int]) -> Program:
    r"""Return the program that runs one microbatch after another; the last stage's backward comes first.

    >>> one_by_one(Placement.linear(2), homes(Placement.linear(2), 1), (I, W)).format()
    '0F0,0I0,0W0\n1F0,1I0,1W0'
    """
    num_stages, num_microbatches = ranks.shape
    stages = np.arange(num_stages)
    stage = np.concatenate((stages, np.repeat(stages[::-1], len(backward))))
    op = np.concatenate((np.full(num_stages, F), np.tile(backward, num_stages)))
    pairs = stage * num_microbatches + np.arange(num_microbatches)[:, None]
    return program_of(placement, ranks, (4 * pairs + op).ravel(), ranks[stage].T.ravel())


def program_of(placement: Placement, ranks: Ints, numbers: Ints, rank: Ints, name: str = "searched") -> Program:
    """Return the program of actions with these numbers and ranks; copies of a stage exchange gradients at the end."""
    num_microbatches = ranks.shape[1]
    pair, op = numbers // 4, numbers % 4
    stage, code, microbatch = pair // num_microbatches, CODES[op], pair % num_microbatches
    if placement.mirrored:
        at, of = np.divmod(np.unique(rank * len(ranks) + stage), len(ranks))
        rank, stage = np.append(rank, at), np.append(stage, of)
        code = np.append(code, np.full(len(at), EXCHANGE))
        microbatch = np.append(microbatch, np.full(len(at), -1))
    order = np.argsort(rank, kind="stable")
    lengths = np.bincount(rank, minlength=placement.num_ranks).tolist()
    return Program.of_columns(Columns.plain(lengths, stage[order], code[order], microbatch[order]), name)


def seconds(costs: Costs, programs: Sequence[Program], shape: tuple[int, int, int]) -> Floats:
    """Return every action's seconds, from graphs of programs that run all of them."""
    entries = np.zeros(shape)
    for program in programs:
        graph = compile_program(program, Messages.LATENCY)
        work = graph.work
        entries[work.stage, work.microbatch, NUMBER[work.code]] = work_seconds(graph, [costs])[:, 0]
    return entries


def inputs(num_stages: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Return what every (stage, op) waits for, by `rules`: the last of its inputs, which never arrives earlier."""
    inputs_of = {}
    for stage in range(num_stages):
        for number, op in enumerate(SEARCHED):
            for alternatives in rules.needs(Action(stage, op, 0), num_stages):
                # B uses the entry of I for its gradient.
                inputs_of[stage, number] = min((action.stage, SEARCHED.index(action.op)) for action in alternatives)
    return inputs_of


def needs(num_stages: int, num_microbatches: int) -> Ints:
    """Return the number that every action waits for on another stage; -1 if nothing."""
    entries = np.full((num_stages, num_microbatches, 4), -1)
    for (stage, op), (needed_stage, needed_op) in inputs(num_stages).items():
        if op != W:  # W only needs its own I, and can run any time after it
            entries[stage, :, op] = 4 * (needed_stage * num_microbatches + np.arange(num_microbatches)) + needed_op
    return entries


def links(need: Ints, ranks: Ints, num_ranks: int) -> Ints:
    """Return the link that every action's output uses, as source * P + target; -1 if it stays on its rank."""
    entries, rank = np.full(need.size, -1), ranks.ravel()
    takers = np.flatnonzero((need.ravel() >= 0) & (np.arange(need.size) % 4 != B))
    makers = need.ravel()[takers]
    source, target = rank[makers // 4], rank[takers // 4]
    entries[makers] = np.where(source == target, -1, source * num_ranks + target)
    entries[B::4] = entries[I::4]
    return entries.reshape(need.shape)


def moving(costs: Costs, programs: Sequence[Program], link: Ints, num_ranks: int) -> Floats:
    """Return how long every action's output occupies its link."""
    entries = np.zeros(link.shape)
    for program in programs if costs.has_finite_links else ():
        graph = compile_program(program, Messages.LATENCY)
        work, made_by = graph.work, graph.crossings.producer
        at = work.stage[made_by], work.microbatch[made_by], NUMBER[work.code[made_by]]
        speed = _of_links(costs, link[at], num_ranks, "bytes_per_second")
        entries[at] = message_bytes(graph, costs) / speed
    return entries


def latency(costs: Costs, link: Ints, num_ranks: int) -> Floats:
    """Return the latency of every action's output; 0 if it stays on its rank."""
    return _of_links(costs, link, num_ranks, "latency")


def _of_links(costs: Costs, link: Ints, num_ranks: int, name: str) -> Floats:
    known, which = np.unique(link, return_inverse=True)
    each = [getattr(costs.edge(*divmod(code, num_ranks)), name) if code >= 0 else 0.0 for code in known.tolist()]
    entries: Floats = np.array(each)[which].reshape(link.shape)
    return entries


def bytes_held(costs: Costs, sizes: Sizes, shape: tuple[int, int, int]) -> tuple[Floats, Floats]:
    """Return the bytes that every action adds while it runs, and permanently."""
    table = np.array([[sizes.change[op, stage] for op in SEARCHED] for stage in range(shape[0])])
    factors = np.array(costs.factors(shape[1]))[:, None]
    more, less = table[:, None, :, 0], table[:, None, :, 1]
    return more * factors, (more + less) * factors
