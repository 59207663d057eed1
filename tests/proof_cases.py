"""Compares the proof on arrays with the checks that name every violation, which share no code with it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from drumline.core.action import COMPUTE_OPS, Action
from drumline.core.channel import Queues
from drumline.core.errors import ProgramError
from drumline.core.kernel.library import Kernel
from drumline.core.lower.lower import lower
from drumline.core.lower.torch_text import NEWER, for_torch
from drumline.core.program import Program
from drumline.core.prove.arrays import surely_legal
from drumline.core.prove.frozen import prune
from drumline.core.prove.validate import validate
from drumline.core.state_actions import with_state
from kernel_cases import using

Row = list[Action]


def variants(program: Program, rng: random.Random) -> Iterator[Program]:
    """Yield the program, with messages, with WAITs, with parameter state, and with frozen stages."""
    yield program
    yield lower(program)
    yield lower(program, channel=Queues.RANK)
    if program.num_updates:
        return
    yield with_state(program)
    if program.has_backward:
        pruned = prune(program, [rng.random() < 0.5 for _ in range(program.num_stages)])
        yield pruned
        yield lower(pruned)
        try:
            yield Program.parse(for_torch(program, communication=True, version=NEWER))
        except ProgramError:  # PyTorch has no two copies of a stage
            return


def _swap(row: Row, at: int, other: int, rng: random.Random) -> None:
    row[at], row[other] = row[other], row[at]


def _move(row: Row, at: int, other: int, rng: random.Random) -> None:
    row.insert(other, row.pop(at))


def _drop(row: Row, at: int, other: int, rng: random.Random) -> None:
    row.pop(at)


def _double(row: Row, at: int, other: int, rng: random.Random) -> None:
    row.insert(other, row[at])


def _change(row: Row, at: int, other: int, rng: random.Random) -> None:
    """Change the op, or take the stage or the microbatch of another action."""
    action, neighbour = row[at], row[other]
    if action.parts:
        row[at] = action._replace(parts=(action.parts[0], rng.choice(neighbour.work)))
    elif action.microbatch is not None:
        number = action.microbatch if neighbour.microbatch is None else neighbour.microbatch
        changed = action._replace(stage=neighbour.stage), action._replace(microbatch=number)
        row[at] = rng.choice((*changed, *(action._replace(op=op) for op in COMPUTE_OPS)))


DAMAGES: tuple[Callable[[Row, int, int, random.Random], None], ...] = (_swap, _move, _drop, _double, _change)


def damaged(program: Program, rng: random.Random) -> Program:
    """Return a program with one or two changes that mostly break a rule."""
    rows = [list(row) for row in program.rows]
    for _ in range(rng.randint(1, 2)):
        row = rng.choice(rows)
        if row:
            rng.choice(DAMAGES)(row, rng.randrange(len(row)), rng.randrange(len(row)), rng)
    return Program.of(rows) if all(rows) else program


def compare_proofs(kernel: Kernel, program: Program) -> bool:
    """Compare on every channel; return whether it is legal on the strictest."""
    legal = []
    for channel in Queues:
        with using(None):
            legal.append(not validate(Program(program.rows), channel=channel))
        with using(kernel):
            assert surely_legal(Program(program.rows), None, channel) == legal[-1], (channel, program.format())
    return legal[-1]
