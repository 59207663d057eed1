"""Every way to run a profiled model on given ranks, each combination with its best cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from drumline.core.errors import PlanError, ScheduleError, nearest
from drumline.core.program import MAX_ACTIONS, Program
from drumline.core.prove.whole import join
from drumline.plan.device.blocks import Profile
from drumline.plan.device.candidate import Candidate
from drumline.plan.device.model_profile import ModelProfile
from drumline.plan.device.ranks import Ranks
from drumline.plan.device.stages import Stages
from drumline.schedules import Schedule, find, schedules

OPTIMIZERS = {"adam": 2, "momentum": 1, "sgd": 0}  # tensors of the weights' size that each optimizer keeps
CHECKPOINTING = ("none", "full")
_MOST_MICROBATCHES = 128
_EVERY_STAGE = 4  # up to this many stages, every choice of stages to recompute is tried
_EVERY_RANK = 4
_LITTLE = 0.25  # of F; if W takes less, whole backwards are tried in schedules that split them
_FORWARD, _WEIGHT = "forward", "backward_weight"


@dataclass(frozen=True)
class Question:
    """One question: a profile, ranks and a batch."""

    profile: ModelProfile
    ranks: Ranks
    batch: int
    optimizer: str
    schedules: tuple[str, ...]
    checkpoint: tuple[str, ...]
    seconds: float
    progress: Callable[[str], None] | None = None
    stages_per_rank: int | None = None
    only: tuple[int, ...] = ()  # microbatch sizes to try (default: all in the profile)

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise PlanError(f"unknown optimizer {self.optimizer!r}", fix=nearest(self.optimizer, OPTIMIZERS))
        for name in self.checkpoint:
            if name not in CHECKPOINTING:
                raise PlanError(f"unknown checkpointing {name!r}", fix=nearest(name, CHECKPOINTING))
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or self.batch < 1:
            raise PlanError(f"the batch has {self.batch!r} rows", expected="a whole number of 1 or more")
        if self.ranks.num_ranks > len(self.profile.layers):
            raise PlanError(
                f"the model has {len(self.profile.layers)} blocks for {self.ranks.num_ranks} ranks",
                expected="at least one block per rank",
                fix=f"use {len(self.profile.layers)} ranks or fewer",
            )

    def combinations(self) -> Iterator[Candidate]:
        """Yield each combination with its best cut: the shortest step that fits, or the one with the least excess."""
        sizes = self.sizes()
        for number, rows in enumerate(sizes):
            self.say(f"microbatches of {rows} rows ({number + 1} of {len(sizes)} sizes) ...")
            for program in self._with_whole(self._programs(self.batch // rows), self.profile.at(rows)):
                for order in self.ranks.orders():
                    yield from self._checkpointed(reordered(program, order), rows)

    def _checkpointed(self, program: Program, rows: int) -> Iterator[Candidate]:
        """Yield a program without checkpointing, and also with it if the best cut does not fit without."""
        if "none" in self.checkpoint:
            stages = self.stages(program, rows, (False,) * program.num_stages)
            best, free = stages.best()
            yield Candidate(stages, best, rows, self.batch)
            if free.excess == 0:
                return  # recomputation could only make the step longer
        if "full" in self.checkpoint:
            for again in _recomputed(program, partly="none" in self.checkpoint):
                stages = self.stages(program, rows, again)
                yield Candidate(stages, stages.best()[0], rows, self.batch)

    def stages(self, program: Program, rows: int, recompute: tuple[bool, ...]) -> Stages:
        """Return the cuts of one program, for microbatches of this many rows."""
        return Stages(
            self.profile.at(rows), program, self.ranks, self.profile.overheads, recompute, OPTIMIZERS[self.optimizer]
        )

    def sizes(self) -> list[int]:
        """Return the microbatch sizes to try: those that divide the batch and are within the measured range."""
        if self.only:
            return list(self.only)
        low, high = self.profile.rows[0], self.profile.rows[-1]
        sizes = [
            rows
            for rows in range(low, min(high, self.batch) + 1)
            if self.batch % rows == 0 and self.batch // rows <= _MOST_MICROBATCHES
        ]
        if not sizes:
            few = "no measured microbatch size divides it"
            raise PlanError(
                f"cannot split a batch of {self.batch} rows: {'any microbatch is larger' if self.batch < low else few}",
                expected=f"a multiple of a size from {low} to {high}, in at most {_MOST_MICROBATCHES} microbatches",
                fix="profile other sizes with --microbatch-sizes, or plan for another batch",
            )
        return sizes

    def _programs(self, num_microbatches: int) -> Iterator[Program]:
        """Yield the program of every schedule that supports the counts."""
        for program in programs_of(self.schedules, self.ranks.num_ranks, num_microbatches, len(self.profile.layers)):
            if self.stages_per_rank in (None, program.num_stages // program.num_ranks):
                yield program

    def _with_whole(self, programs: Iterable[Program], profile: Profile) -> Iterator[Program]:
        """Yield the programs; if little trains, those that split backwards also with whole ones.

        What they take was measured, so the shorter step decides.
        """
        weight, forward = (sum(layer.times.of(op, split=0) for layer in profile.layers) for op in (_WEIGHT, _FORWARD))
        known = set[Program]()
        for program in programs:
            yield program
            if weight <= _LITTLE * forward:
                known.add(program)
                whole = join(program, [True] * program.num_stages)
                if whole not in known:
                    known.add(whole)
                    yield whole

    def say(self, what: str) -> None:
        """Report progress."""
        if self.progress is not None:
            self.progress(what)


def is_suited(schedule: Schedule) -> bool:
    """Whether a profile covers all that it does: no updates of its own, no exchange between copies, and a backward."""
    return schedule.flushed and schedule.trains and not schedule.two_directions


def suited() -> tuple[str, ...]:
    """Return the names of the schedules that can be planned, without those for comparison alone."""
    return tuple(name for name, schedule in schedules().items() if is_suited(schedule) and not schedule.baseline)


def programs_of(
    names: Iterable[str], num_ranks: int, num_microbatches: int, num_blocks: int, *, most_actions: int = MAX_ACTIONS
) -> Iterator[Program]:
    """Yield the program of every schedule that supports the counts, with two to four stages per rank if it admits them.

    >>> [(each.name, each.num_stages) for each in programs_of(["1f1b", "interleaved-1f1b"], 2, 4, 7)]
    [('1f1b', 2), ('interleaved-1f1b', 4), ('interleaved-1f1b', 6)]
    """
    for name in names:
        recipe = find(name)
        finer = [2, 3, 4] if recipe.stage_counts != "fixed" and recipe.stages_per_rank > 1 else []
        for stages_per_rank in dict.fromkeys([recipe.stages_per_rank, *finer]):
            num_stages = stages_per_rank * num_ranks
            if num_stages > num_blocks or 2 * num_stages * num_microbatches > most_actions:
                continue
            try:
                program = recipe.build(num_ranks, num_microbatches, stages_per_rank)
            except ScheduleError:
                continue
            if not program.placement.mirrored and program.has_backward and not program.num_updates:
                yield program


def reordered(program: Program, order: Sequence[int]) -> Program:
    r"""Return the program with rank `order[r]` instead of rank r.

    >>> print(reordered(Program.parse("0F0,0B0\n1F0,1B0"), [1, 0]))
    1F0,1B0
    0F0,0B0
    """
    if list(order) == sorted(order):
        return program
    rows = dict(zip(order, program.rows, strict=True))
    return program.rearranged(rows[rank] for rank in range(program.num_ranks))


def _recomputed(program: Program, *, partly: bool) -> Iterator[tuple[bool, ...]]:
    """Yield which stages to recompute: those of the first rank on the way, of more, ..., of all; or only all.

    With up to four stages every choice is tried; with up to four ranks every number of them; with more ranks the first,
    a quarter, half and all.
    """
    homes = program.placement.homes
    if partly and len(homes) <= _EVERY_STAGE:
        yield from (again for again in product((False, True), repeat=len(homes)) if any(again))
        return
    ranks = list(dict.fromkeys(homes))
    some = range(1, len(ranks)) if len(ranks) <= _EVERY_RANK else [1, len(ranks) // 4, len(ranks) // 2]
    for number in dict.fromkeys([*(some if partly else []), len(ranks)]):
        yield tuple(home in ranks[:number] for home in homes)
