"""The programs that a pipeline runs: one for all steps unless others are named, and which of them a step takes.

    Pipeline(..., num_microbatches=8, programs={"long": 2})        the same schedule with 2 microbatches
    pipe.step(x, target=y)                                         by the first
    pipe.step(x, target=y, program="long")                         by the other

All of them have the same stages in the same places, so that nothing moves when a step takes another one. Ranks agree on
named programs when the pipeline is made. A byte in every message says which program sent it, and every rank's word at
the end of a step has the whole digest. So ranks that run different programs find out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.core.errors import ProgramError, UsageError, nearest
from drumline.core.program import Program, once_per_program
from drumline.engine.program.find import edges_of, program_for

Given = Program | Path | str | int


@once_per_program
def digest_of(program: Program) -> str:
    r"""Return what tells a program from others, whatever it is called.

    >>> digest_of(Program.parse("0F0,0B0", "a")) == digest_of(Program.parse("0F0,0B0", "b"))
    True
    """
    return hashlib.blake2b(program.format().encode(), digest_size=8).hexdigest()


def check(programs: Any) -> None:
    """Refuse what does not name programs.

    >>> check({"long": 0})
    Traceback (most recent call last):
    drumline.core.errors.UsageError: programs has 0 as 'long'; expected a Program, a CSV file, or a number ...
    """
    if programs is None:
        return
    if not isinstance(programs, Mapping):
        raise UsageError(f"programs is {programs!r:.60}", expected='a dict of programs by name: {"long": 2}')
    for name, program in programs.items():
        if not isinstance(name, str) or not name:
            raise UsageError(f"programs has the name {name!r:.60}", expected="text")
        is_count = isinstance(program, int) and not isinstance(program, bool) and program >= 1
        if not is_count and not isinstance(program, Program | Path | str):
            raise UsageError(
                f"programs has {program!r:.60} as {name!r}",
                expected="a Program, a CSV file, or a number of microbatches for the pipeline's schedule",
            )


def named_programs(
    programs: Mapping[str, Given] | None, first: Program, schedule: Any, stages_per_rank: int | None
) -> dict[str, Program]:
    """Return the programs that a user named, each for the stages and ranks of the first.

    >>> from drumline.schedules import generate
    >>> first = generate("1f1b", num_ranks=2, num_microbatches=8)
    >>> named_programs({"long": 2}, first, "1f1b", None)["long"].num_microbatches
    2
    """
    by_name = {}
    for name, given_program in (programs or {}).items():
        if isinstance(given_program, int):
            if isinstance(schedule, Program | Path) or schedule.endswith(".csv"):
                raise ProgramError(
                    f"programs has {given_program} microbatches as {name!r}, and the schedule is a program already",
                    expected="the name of a schedule, to be generated for another number",
                )
            program = program_for(
                schedule, num_ranks=first.num_ranks, num_microbatches=given_program, stages_per_rank=stages_per_rank
            )
        else:
            if isinstance(given_program, str) and not given_program.endswith(".csv"):
                raise ProgramError(f"programs has {given_program!r} as {name!r}", expected="a Program or a CSV file")
            program = program_for(given_program, num_ranks=first.num_ranks, num_microbatches=None)
        check_fits(program, first, name)
        by_name[name] = replace(program, name=name)
    return by_name


def check_fits(program: Program, first: Program, name: str) -> None:
    r"""Refuse a program whose stages are not where those of the first are.

    >>> check_fits(Program.parse("0F0,0B0"), Program.parse("0F0,0B0\n1F0,1B0"), "short")
    Traceback (most recent call last):
    drumline.core.errors.ProgramError: the program 'short' has its stages on other ranks than 'custom'; expected ...
    """
    here, there = program.placement, first.placement
    same = here.num_ranks == there.num_ranks and here.homes == there.homes
    if not same or bool(here.mirrored) != bool(there.mirrored):
        raise ProgramError(
            f"the program {name!r} has its stages on other ranks than {first.name!r}",
            expected="the same stages in the same places, so that nothing moves between two steps",
            fix="make another pipeline for it, or choose a schedule with the same placement",
        )


class Programs:
    """The programs as they run, by number and name: number 0 is the one that the pipeline was made with.

    `prune` takes out of a program what the pipeline does not need of it.
    """

    def __init__(
        self, first: Program, named: Mapping[str, Program], prune: Callable[[Program], Program] = lambda plan: plan
    ) -> None:
        programs = [first, *named.values()]
        self._prune = prune
        self._listed = list(map(prune, programs))
        self._numbers = {name: number for number, name in enumerate(named, start=1)}
        # By id; they are kept, so that no others get theirs.
        self._known = {id(program): (number, program) for number, program in enumerate(programs)}
        self._edges = set(edges_of(first)).union(*map(edges_of, named.values()))
        self.own_number = 0  # the number of the program of steps that name none
        self.divides = {first.num_slices}  # in how many slices microbatches can run here

    def __iter__(self) -> Iterator[Program]:
        return iter(self._listed)

    def __getitem__(self, number: int) -> Program:
        return self._listed[number]

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Every directed pair of ranks between which one of them moves anything."""
        return sorted(self._edges)

    @property
    def named(self) -> dict[str, Program]:
        """Those that have names."""
        return {name: self._listed[number] for name, number in self._numbers.items()}

    def renew(self) -> None:
        """Prune all of them again, because stages have other blocks now."""
        programs = dict(reversed(self._known.values()))  # the first of each number
        self._listed = [self._prune(programs[number]) for number in range(len(self._listed))]

    def number_of(self, choice: str | Program | None) -> int:
        """Return the number of the program that a step names, or brings."""
        if choice is None:
            return self.own_number
        if isinstance(choice, str):
            if choice not in self._numbers:
                fix = (
                    nearest(choice, self._numbers) if self._numbers else "name programs: Pipeline(..., programs={...})"
                )
                raise UsageError(f"there is no program {choice!r}", fix=fix)
            return self._numbers[choice]
        if not isinstance(choice, Program):
            raise UsageError(f"program is {choice!r:.60}", expected="a name out of programs=, or a Program")
        if id(choice) not in self._known:
            self._known[id(choice)] = self._added(choice), choice
        return self._known[id(choice)][0]

    def added(self, program: Program) -> int:
        """Return the number of what a step of a schedule without a flush runs, which is no whole program."""
        if id(program) not in self._known:
            self._listed.append(program)
            self._known[id(program)] = len(self._listed) - 1, program
        return self._known[id(program)][0]

    def _added(self, program: Program) -> int:
        """Take in a program that a step brings; one with the same rows is the same."""
        first = self._listed[0]
        slices = program.num_slices if program.num_slices in self.divides else first.num_slices
        program_for(program, num_ranks=first.num_ranks, num_microbatches=None, slices=slices)
        check_fits(program, first, program.name)
        if not set(edges_of(program)) <= self._edges:
            raise ProgramError(
                f"the program {program.name!r} sends between ranks that are not connected",
                expected="messages between the same ranks",
                fix="name it when the pipeline is made: Pipeline(..., programs={...})",
            )
        pruned = self._prune(program)
        for number, known in enumerate(self._listed):
            if digest_of(known) == digest_of(pruned):
                return number
        self._listed.append(pruned)
        return len(self._listed) - 1
