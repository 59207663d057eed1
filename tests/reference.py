"""Independent and slow: what the simulator and the channel rules are held against."""

from __future__ import annotations

from collections import deque

from drumline.core.action import Action, Op
from drumline.core.costs import Costs
from drumline.core.program import Program


def reference_times(program: Program, costs: Costs) -> dict[Action, tuple[float, float]]:
    """Return (start, end) of every compute action, written straight from the definitions.

    Compute-only programs; transfers occupy their directed link in the sender's order and, with overlap off, both ranks:
    then a receiver takes all that was sent before what it needs, in the order in which it was sent.
    """
    stages = program.num_stages
    seconds = {
        Op.FORWARD: costs.per_stage("forward", stages),
        Op.BACKWARD: costs.per_stage("backward", stages),
        Op.BACKWARD_INPUT: costs.per_stage("backward_input", stages),
        Op.BACKWARD_WEIGHT: costs.per_stage("backward_weight", stages),
    }
    factors = costs.factors(program.num_microbatches)
    sizes = costs.per_stage("message_bytes", stages)
    home = {part: rank for rank, row in enumerate(program.rows) for action in row for part in action.work}
    queues = [deque(row) for row in program.rows]
    free = [0.0] * program.num_ranks
    link_free: dict[tuple[int, int], float] = {}
    arrived: dict[Action, float] = {}
    under_way: dict[tuple[int, int], deque[tuple[Action, float, float]]] = {}
    received: set[Action] = set()
    times: dict[Action, tuple[float, float]] = {}

    def inputs(part: Action) -> list[tuple[Action, ...]]:
        s, m = part.stage, part.microbatch
        if part.op is Op.FORWARD:
            return [(Action(s - 1, Op.FORWARD, m),)] if s > 0 else []
        if part.op is Op.BACKWARD_WEIGHT:
            return [(Action(s, Op.BACKWARD_INPUT, m),)]
        after: list[tuple[Action, ...]] = [(Action(s, Op.FORWARD, m),)]
        if s < stages - 1:
            after.append((Action(s + 1, Op.BACKWARD, m), Action(s + 1, Op.BACKWARD_INPUT, m)))
        return after

    progress = True
    while progress:
        progress = False
        for rank, queue in enumerate(queues):
            while queue:
                action = queue[0]
                if not action.is_compute:
                    queue.popleft()
                    continue
                found = [
                    (p, next((other for other in any_of if other in times), None))
                    for p in action.work
                    for any_of in inputs(p)
                ]
                if any(other is None for _, other in found):
                    break
                start = free[rank]
                for other in sorted({other for _, other in found if other is not None}, key=lambda item: home[item]):
                    if home[other] == rank:
                        continue
                    if costs.overlap or not costs.has_finite_links:
                        start = max(start, arrived[other])
                    while not costs.overlap and costs.has_finite_links and other not in received:
                        sent, begun, moving = under_way[home[other], rank].popleft()
                        start = max(start, begun + costs.edge(home[other], rank).latency) + moving
                        received.add(sent)
                duration = sum(seconds[p.op][p.stage] * factors[p.microbatch or 0] for p in action.work)
                if action.parts and costs.overlapped is not None:
                    factor = sum(factors[p.microbatch or 0] for p in action.work) / 2
                    duration = costs.per_stage("overlapped", stages)[action.parts[0].stage] * factor
                end = start + duration
                free[rank] = end
                for part in action.work:
                    times[part] = (start, end)
                for part in sorted(action.work, key=lambda p: p.op is not Op.FORWARD):
                    step = {Op.FORWARD: 1, Op.BACKWARD: -1, Op.BACKWARD_INPUT: -1}.get(part.op, 0)
                    target = part.stage + step
                    if not step or not 0 <= target < stages:
                        continue
                    takers = [a for a in home if a.stage == target and a.microbatch == part.microbatch]
                    taker = next(
                        (
                            home[a]
                            for a in takers
                            if (a.op is Op.FORWARD) == (step == 1) and a.op is not Op.BACKWARD_WEIGHT
                        ),
                        rank,  # nobody: a frozen stage has no backward
                    )
                    if taker == rank:
                        continue
                    edge = costs.edge(rank, taker)
                    moving = sizes[min(part.stage, target)] * factors[part.microbatch or 0] / edge.bytes_per_second
                    if costs.overlap or not costs.has_finite_links:
                        begin = max(end, link_free.get((rank, taker), 0.0))
                        link_free[rank, taker] = begin + moving
                    else:
                        begin = free[rank]
                        free[rank] = begin + moving
                        under_way.setdefault((rank, taker), deque()).append((part, begin, moving))
                    arrived[part] = begin + moving + edge.latency
                queue.popleft()
                progress = True
    assert not any(queues), "the reference is stuck"
    return times


def run_on_edge_channel(program: Program) -> int:
    """Run a program with its communication spelled out; return the most receives that were open on one edge.

    A send completes only once its receive is posted, messages of an edge travel in posting order, nothing is buffered
    between; compute goes on while a send is pending. Raises AssertionError where the program would hang.
    """
    home = {
        part: rank
        for rank, row in enumerate(program.rows)
        for action in row
        for part in action.work
        if action.is_compute
    }
    sent: dict[tuple[int, int], deque[Action]] = {}
    posted: dict[tuple[int, int], deque[Action]] = {}
    received: set[Action] = set()
    done: set[Action] = set()
    at = [0] * program.num_ranks
    most_open, opened = (
        0,
        dict.fromkeys(((a, b) for a in range(program.num_ranks) for b in range(program.num_ranks)), 0),
    )

    def deliver(edge: tuple[int, int]) -> None:
        out, waiting = sent.get(edge, deque()), posted.get(edge, deque())
        while out and waiting:
            assert out[0] == waiting[0], f"edge {edge}: {out[0]} is sent, {waiting[0]} is received"
            out.popleft()
            received.add(waiting.popleft())

    def can_run(rank: int, part: Action) -> bool:
        s, m = part.stage, part.microbatch
        if part.op is Op.FORWARD:
            before = Action(s - 1, Op.FORWARD, m)
            return s == 0 or (before in done if home[before] == rank else Action(s, Op.RECV_F, m) in received)
        if part.op is Op.BACKWARD_WEIGHT:
            return Action(s, Op.BACKWARD_INPUT, m) in done
        if Action(s, Op.FORWARD, m) not in done:
            return False
        if s == program.num_stages - 1:
            return True
        behind = [a for a in (Action(s + 1, Op.BACKWARD, m), Action(s + 1, Op.BACKWARD_INPUT, m)) if a in home]
        return behind[0] in done if home[behind[0]] == rank else Action(s, Op.RECV_B, m) in received

    def rank_of(stage: int, microbatch: int | None) -> int:
        return home[Action(stage, Op.FORWARD, microbatch)]

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(program.rows):
            while at[rank] < len(row):
                action = row[at[rank]]
                s, m = action.stage, action.microbatch
                if action.op in (Op.SEND_F, Op.SEND_B):
                    step = 1 if action.op is Op.SEND_F else -1
                    edge = (rank, rank_of(s + step, m))
                    recv = Action(s + step, Op.RECV_F if step == 1 else Op.RECV_B, m)
                    sent.setdefault(edge, deque()).append(recv)
                    deliver(edge)
                elif action.op in (Op.RECV_F, Op.RECV_B):
                    step = -1 if action.op is Op.RECV_F else 1
                    edge = (rank_of(s + step, m), rank)
                    posted.setdefault(edge, deque()).append(action)
                    opened[edge] += 1
                    most_open = max(most_open, opened[edge])
                    deliver(edge)
                elif action.is_compute:
                    if not all(can_run(rank, part) for part in action.work):
                        break
                    for part in action.work:
                        done.add(part)
                        forward = Action(part.stage, Op.RECV_F, part.microbatch)
                        backward = Action(part.stage, Op.RECV_B, part.microbatch)
                        if part.op is Op.FORWARD and forward in received:
                            opened[rank_of(part.stage - 1, part.microbatch), rank] -= 1
                        elif part.op in (Op.BACKWARD, Op.BACKWARD_INPUT) and backward in received:
                            opened[rank_of(part.stage + 1, part.microbatch), rank] -= 1
                at[rank] += 1
                moved = True
    stuck = [(rank, row[at[rank]]) for rank, row in enumerate(program.rows) if at[rank] < len(row)]
    assert not stuck, f"hangs at {stuck}"
    assert not any(sent.values()), "a send never completes"
    assert not any(posted.values()), "a receive never completes"
    return most_open
