"""Proves that a program computes everything once, in an order that cannot hang, within its memory.

The proof holds for a given channel (see `channel`). There, a send completes only after its receive is posted, and
nothing is buffered in between. Messages move in posting order per directed edge, per pair of ranks, or per rank.
Compute continues while a send is pending. With one queue per edge, a rank stops for one reason only: its next action
needs something that another rank has not sent yet. If no rank can continue and work is left, following "who waits for
whom" leads round a cycle, which is the deadlock. With fewer queues, messages also wait for each other: see `queues.py`.

The validator returns all violations, not only the first, but not those that merely follow from another. Most programs
have none, and the kernel proves them on arrays (see `arrays.py`). Without a kernel, programs of plain computing are
compiled to a graph. If all of its nodes end, that is the proof. The checks that name what is wrong look at every action
by itself, which takes a hundred times as long.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core import rules
from drumline.core.action import COMPUTE_OPS, TIMED_OPS, Action, Op, in_units
from drumline.core.channel import Queues
from drumline.core.clock.assemble import compile_program
from drumline.core.clock.evaluate import order_of
from drumline.core.costs import Costs
from drumline.core.graph import Messages, NotCompilable
from drumline.core.kernel.library import kernel
from drumline.core.memory import holdings
from drumline.core.placement import Placement
from drumline.core.program import Program, once_per_program
from drumline.core.prove import exchanges, messages, queues, slices
from drumline.core.prove.arrays import surely_legal
from drumline.core.prove.index import Index, RowPosition
from drumline.core.prove.violation import Violation
from drumline.core.rules import Backward
from drumline.core.timeline.idle import Limit
from drumline.core.units import number


def validate(
    program: Program,
    *,
    placement: Placement | None = None,
    limit: Limit | None = None,
    costs: Costs | None = None,
    channel: str = Queues.EDGE,
) -> list[Violation]:
    r"""Return every violation in `program`; an empty list proves that it can run.

    `placement` says where stages belong (default: where most of their work is). `limit` is what a rank may hold, in
    pairs or in the bytes of `costs`. `channel` is what messages travel on: "edge" as in Drumline's own runs, "pair" or
    "rank" as in PyTorch's over NCCL. It matters only for programs that contain sends and receives; for others, `lower`
    finds a safe order for any of the three.

    >>> validate(Program.parse("0F0,0B0\n1F0,1B0"))
    []
    >>> for violation in validate(Program.parse("0B0,0F0\n1F0,1B0")):
    ...     print(violation)
    rank 0, position 0: 0B0 runs before 0F0
    >>> early = Program.parse("0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0")
    >>> len(validate(early)), len(validate(early, channel="rank"))
    (0, 1)
    """
    kind = Queues.of(channel)
    if surely_runs(program, placement, kind):
        return list(_stash_violations(program, limit, costs or Costs())) if limit else []
    if gaps := list(_gaps(program)):
        return gaps
    index = Index(program, placement or program.placement)
    violations = [*_shape(index), *_placed(index), *_complete(index), *_ordered(index), *slices.out_of_order(index)]
    broken = [*messages.check(index), *messages.check_waits(index)]
    violations += [*broken, *exchanges.check(index)]
    matters = kind is not Queues.EDGE and not broken
    violations += queues.check(index, _remote_inputs(index), kind if matters else None)
    if limit:
        violations += _stash_violations(program, limit, costs or Costs())
    return sorted(violations, key=_by_place)


def surely_runs(program: Program, placement: Placement | None = None, channel: Queues = Queues.EDGE) -> bool:
    r"""Whether arrays alone prove a program; otherwise it may run or not.

    >>> surely_runs(Program.parse("0F0,0B0\n1F0,1B0")), surely_runs(Program.parse("0B0,0F0\n1F0,1B0"))
    (True, False)
    """
    if kernel() is not None:
        return surely_legal(program, placement, channel) and slices.in_order(program)
    return _compiles(program) and placement in (None, program.placement) and slices.in_order(program)


@once_per_program
def _compiles(program: Program) -> bool:
    """Whether a program of plain computing runs to its end; of others, nothing is said."""
    if program.timed_columns is not program.columns or program.agreed_placement is None:
        return False
    try:
        graph = compile_program(program, Messages.LATENCY)
        if graph.plain:
            order_of(graph)
        return graph.plain
    except NotCompilable:
        return False


@once_per_program
def misplaced_or_misused(program: Program) -> bool:
    """Whether a program that compiles still breaks a rule of placement, slices, parameter state, exchange or update.

    >>> misplaced_or_misused(Program.parse("0F0,0B0,0UPDATE0,0REDUCE_GRAD"))
    True
    """
    if program.agreed_placement is None:
        return True
    if surely_runs(program):
        return False
    index = Index(program, program.placement)
    checks = (exchanges.check, messages.check_waits, slices.out_of_order)
    return any(True for check in checks for _ in check(index))


def _by_place(violation: Violation) -> tuple[int, int]:
    rank = -1 if violation.rank is None else violation.rank
    return rank, -1 if violation.index is None else violation.index


def _gaps(program: Program) -> Iterator[Violation]:
    """Find numbers of stages, microbatches or slices that no row uses; with gaps, nothing else can be counted."""
    computes = [part for part in program.work() if part.op in COMPUTE_OPS]
    whole, num_slices = ("microbatch", "microbatches"), program.num_slices
    for (what, name), count, numbers, computed in (
        (
            ("stage", "stages"),
            program.num_stages,
            {part.stage for part in program.work()},
            {part.stage for part in computes},
        ),
        (
            whole if num_slices == 1 else ("slice", "slices"),
            program.num_units,
            {part.microbatch for part in program.work() if part.microbatch is not None},
            {part.microbatch for part in computes},
        ),
    ):
        if not numbers:
            yield Violation(None, None, None, f"the program names no {what}")
        elif count > len(numbers):
            missing = next(number for number in range(count) if number not in numbers)
            (there,) = in_units([missing], num_slices if what == "slice" else 1)
            though = f"though the program has a {what} {max(numbers)}: {len(numbers)} of {count} {name} appear"
            yield Violation(None, None, None, f"no rank runs {what} {there}, {though}")
        elif idle := numbers - computed:
            yield Violation(None, None, None, f"no rank runs {what} {min(idle)}, which actions without computing name")


def _shape(index: Index) -> Iterator[Violation]:
    """Check that pairs are a forward and a backward, and that nothing is done twice."""
    for rank, row in enumerate(index.program.rows):
        for at, action in enumerate(row):
            if action.parts and {part.op for part in action.parts} != set(rules.OVERLAPPED):
                yield Violation(rank, at, action, "must overlap one forward and one whole backward")
    for action, (place, *others) in index.places.items():
        for again in others:
            yield Violation(*again, action, f"runs again; it first ran on rank {place.rank} at position {place.at}")
        if action.op in _HALVES and (whole := action._replace(op=Op.BACKWARD)) in index.places:
            yield Violation(*place, action, f"runs although {whole} does the whole backward")


_HALVES = {op for way in rules.WAYS[Backward.WHOLE] if Op.BACKWARD not in way for op in way} - {Op.FORWARD}


def _placed(index: Index) -> Iterator[Violation]:
    """Check that every action is on its stage's rank."""
    if index.placement.num_ranks != index.program.num_ranks:
        expected = f"but the placement has {index.placement.num_ranks}"
        yield Violation(None, None, None, f"the program has {index.program.num_ranks} ranks, {expected}")
        return
    for action, places in index.places.items():
        home = index.home(action)
        for place in places:
            if place.rank != home:
                lives = "is not in the placement" if home is None else f"belongs to rank {home}"
                which = f" for microbatch {action.microbatch}" if index.placement.mirrored else ""
                yield Violation(*place, action, f"is on the wrong rank: stage {action.stage}{which} {lives}")


def _complete(index: Index) -> Iterator[Violation]:
    """Check that no work is missing; a frozen stage must leave out the same work for all microbatches."""
    kinds = index.program.backwards
    for stage in index.stages:
        ways = rules.WAYS[kinds[stage]]
        for microbatch in index.microbatches:
            there = {op for op in rules.NEEDS if Action(stage, op, microbatch) in index.places}
            if not any(way <= there for way in ways):
                yield from _missing(index, stage, microbatch, there)


def _missing(index: Index, stage: int, microbatch: int, there: set[Op]) -> Iterator[Violation]:
    """Name the missing work of a stage on a microbatch, for the kind of backward that is most complete."""
    kind = index.program.backwards[stage]
    nearest = max(rules.WAYS[kind], key=lambda way: len(way & there))
    halves = " and ".join(str(Action(stage, op, microbatch)) for op in rules.NEEDS if op in _HALVES)
    for op in rules.NEEDS:
        if op in nearest - there:
            why = "is missing"
            if op is not Op.FORWARD and kind is Backward.INPUT:
                why += f", though stage {stage} has it for other microbatches"
            elif op in _HALVES:
                other = next(half for half in _HALVES if half is not op)
                why += f", though {Action(stage, other, microbatch)} is there"
            elif op is not Op.FORWARD:
                why += f", and so are {halves}"
            action = Action(stage, op, microbatch)
            yield Violation(index.home(action), None, action, why)


def _ordered(index: Index) -> Iterator[Violation]:
    """Check that an action's inputs from its own rank come before it."""
    for action, inputs in index.inputs.items():
        place = index.places[action][0]
        for needed, at in inputs:
            if at.rank == place.rank and at.at >= place.at:
                how = "in one overlapped pair with" if at.at == place.at else "before"
                yield Violation(*place, action, f"runs {how} {needed}")


def _remote_inputs(index: Index) -> dict[RowPosition, list[RowPosition]]:
    """Return, per position, the positions on other ranks that must be passed first.

    Leaves out actions that are in the wrong order on their own rank: they are already reported, and hide the rest.
    """
    positions: dict[RowPosition, list[RowPosition]] = {}
    spelled = bool(index.transfers)
    for action, inputs in index.inputs.items():
        place = index.places[action][0]
        if any(at.rank == place.rank and at.at >= place.at for _, at in inputs):
            continue
        remote = [(needed, at) for needed, at in inputs if at.rank != place.rank]
        if remote:
            sent = [messages.sent_at(index, *pair) for pair in remote] if spelled else [at for _, at in remote]
            positions.setdefault(place, []).extend(sent)
    return positions | exchanges.waits_for_exchange(index) | messages.waits(index)


def _stash_violations(program: Program, limit: Limit, costs: Costs) -> Iterator[Violation]:
    """Check every rank's stash against the limit; name the first action that exceeds it."""
    limit.check(costs)
    for rank, holding in enumerate(holdings(program, costs)):
        if limit.admits_pairs(holding.peak_pairs) and limit.admits_bytes(holding.peak_bytes or 0.0):
            continue
        timed = [at for at, action in enumerate(program.rows[rank]) if action.op in TIMED_OPS]
        for held_amounts, most, admits, unit in (
            (holding.pairs, limit.max_activations, limit.admits_pairs, "pairs"),
            (holding.bytes or (), limit.max_bytes, limit.admits_bytes, "bytes"),
        ):
            over = next((at for at, (during, _) in enumerate(held_amounts) if not admits(during)), None)
            if over is not None and most is not None:
                where = timed[over]
                reason = f"makes the rank hold {number(held_amounts[over][0])} {unit}, over the limit of {number(most)}"
                yield Violation(rank, where, program.rows[rank][where], reason)
