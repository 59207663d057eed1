"""The registry of schedules: register a recipe, look it up by name, build a program from it.

A recipe is a function of the counts that yields one row of actions per rank, rank 0 first. A schedule only has to
register it: proof, timing, comparison, search, planning, execution and export then work by name. Drumline reads the
placement and the kind of training from the rows; anything else is passed as a fact next to the recipe.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby, islice
from typing import Any

from drumline.core.action import Action, Op
from drumline.core.errors import DrumlineError, ScheduleError, counted, nearest
from drumline.core.kernel.library import kernel
from drumline.core.placement import Placement
from drumline.core.program import MAX_ACTIONS, MAX_IN_ARRAYS, Program
from drumline.schedules.cells import Cells, InTurn, Turns, alternated, joined, written
from drumline.schedules.formulas import Counts, IdleShare, Makespan, PeakPairs
from drumline.schedules.slices import number_of, sliced

Rows = Iterable[Iterable[Action]]
Recipe = Callable[..., Rows]

# A recipe makes two or three actions per stage and microbatch. Who builds many programs, or looks at actions one by
# one, keeps to MAX_PAIRS; a single program may have more, if the kernel writes and times it.
MAX_PAIRS = MAX_ACTIONS // 3
MAX_PAIRS_IN_ARRAYS = MAX_IN_ARRAYS // 2
DEFAULT = "1f1b"  # used if no schedule is named; others are compared with it

# Above this, building every schedule for a comparison takes longer than it is worth; larger steps repeat themselves.
_MOST_ACTIONS = 50_000
# Ranks and microbatches of an example program; the later pairs are for recipes that reject the first.
_EXAMPLES = ((4, 8), (2, 4), (3, 6), (1, 1))


@dataclass(frozen=True)
class Schedule:
    """A named recipe, the counts it supports, and what is known about it.

    `stages_per_rank` is the default; `stage_counts` says which others work: none ("fixed"), "any", or "even".

    Optional formulas: `peak_pairs` and `makespan` as in `formulas`, and `bubble`, its lower bound. `makespan_holds`
    says for which counts that formula is within 2% of the simulator if stages are equal (None: all). `planned_with`
    lists the stages per rank that the cluster planner tries (none: never), if the counts `suit`. `titan` is its
    torchtitan name; `in_megatron` says whether Megatron-LM has it. A `baseline` exists only for comparison.
    `formula_in_slices` says whether `makespan` also holds for slices, as many short microbatches; plans try these.
    """

    name: str
    recipe: Recipe
    summary: str
    stages_per_rank: int = 1
    stage_counts: str = "fixed"
    even_ranks: bool = False
    peak_pairs: PeakPairs | None = None
    makespan: Makespan | None = None
    makespan_holds: Counts | None = None
    bubble: IdleShare | None = None
    planned_with: tuple[int, ...] = ()
    suits: Counts | None = None
    titan: str = ""
    in_megatron: bool = False
    baseline: bool = False
    formula_in_slices: bool = False
    _layouts: dict[tuple[int, int], Placement] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def example(self) -> Program | None:
        """A small program of this schedule, with the default stages per rank; None if it makes none."""
        for num_ranks, num_microbatches in _EXAMPLES:
            try:
                return self.build(num_ranks, num_microbatches)
            except ScheduleError:
                continue
        return None

    @property
    def placement(self) -> str:
        """The name of the placement of its stages."""
        return self.example.placement.name if self.example else "custom"

    @property
    def two_directions(self) -> bool:
        """Whether microbatches enter at both ends, so that every stage has two copies."""
        return self.example is not None and bool(self.example.placement.mirrored)

    @property
    def flushed(self) -> bool:
        """Whether a step ends before the next one begins, with the optimizer in between."""
        return self.example is None or not self.example.num_updates

    @property
    def trains(self) -> bool:
        """Whether it has backwards."""
        return self.example is None or self.example.has_backward

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backwards are split in two halves."""
        return self.example is not None and Op.BACKWARD_INPUT in self.example.columns.ops

    @property
    def options(self) -> Mapping[str, inspect.Parameter]:
        """What its recipe takes, the counts too.

        >>> "num_steps" in find("1f1b").options
        False
        """
        return inspect.signature(self.recipe).parameters

    def layout(self, num_ranks: int, stages_per_rank: int) -> Placement:
        """Return the placement of the stages; with two directions, the second of two microbatches goes up.

        >>> find("zb-v").layout(3, 2).homes
        (0, 1, 2, 2, 1, 0)
        """
        counts = num_ranks, stages_per_rank
        if counts not in self._layouts:
            match self.placement:
                case "linear" | "loop":
                    placement = Placement.loop(num_ranks, stages_per_rank=stages_per_rank)
                case "v":
                    placement = Placement.v(num_ranks, stages_per_rank=stages_per_rank)
                case "bidirectional":
                    placement = Placement.bidirectional(num_ranks, mirrored=[1])
                case _:
                    placement = self.build(num_ranks, num_ranks, stages_per_rank).placement
            self._layouts[counts] = placement
        return self._layouts[counts]

    def admits_stages(self, stages_per_rank: int) -> bool:
        """Whether a rank may hold this many stages."""
        match self.stage_counts:
            case "fixed":
                return stages_per_rank == self.stages_per_rank
            case "even":
                return stages_per_rank % 2 == 0
        return True

    def refusal(self, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> ScheduleError | None:
        """Return an error that says why these counts do not work and suggests others, or None if they work."""
        counts = {"ranks": num_ranks, "microbatches": num_microbatches, "stages per rank": stages_per_rank}
        for name, value in counts.items():
            if not isinstance(value, int) or value < 1:
                return ScheduleError(f"the number of {name} is {value!r}", expected="a whole number of 1 or more")
        if self.even_ranks and num_ranks % 2:
            return ScheduleError(
                f"{self.name} cannot use {counted(num_ranks, 'rank')}: its two directions meet in the middle",
                expected="an even number of ranks",
                fix=_near(num_ranks),
            )
        if self.stage_counts == "fixed" and not self.admits_stages(stages_per_rank):
            return ScheduleError(
                f"{self.name} cannot use {counted(stages_per_rank, 'stage')} per rank",
                expected=f"exactly {self.stages_per_rank} per rank",
                fix=f"leave out the number of stages per rank, or make it {self.stages_per_rank}",
            )
        if not self.admits_stages(stages_per_rank):
            return ScheduleError(
                f"{self.name} cannot use {counted(stages_per_rank, 'stage')} per rank: waves pass every rank twice",
                expected="an even number of stages per rank",
                fix=_near(stages_per_rank),
            )
        most = MAX_PAIRS if kernel() is None else MAX_PAIRS_IN_ARRAYS
        return too_large(num_ranks, num_microbatches, stages_per_rank, most)

    def build(
        self,
        num_ranks: int,
        num_microbatches: int,
        stages_per_rank: int | None = None,
        *,
        slices: int | Sequence[int] = 1,
        **options: Any,
    ) -> Program:
        """Return the program for these counts, or raise ScheduleError; `slices` is their number, or their lengths."""
        stages = self.stages_per_rank if stages_per_rank is None else stages_per_rank
        if (refused := self.refusal(num_ranks, num_microbatches, stages)) is not None:
            raise refused
        if (num_slices := number_of(slices)) > 1:
            if self.not_in_slices:
                raise ScheduleError(
                    f"{self.name} cannot run microbatches in {num_slices} slices: {self.not_in_slices}",
                    expected="a flushed schedule in one direction, with F, B, I and W alone",
                    fix="use 1f1b, gpipe, interleaved-1f1b or zb-h1",
                )
            return sliced(self.build(num_ranks, num_microbatches * num_slices, stages, **options), num_slices)
        accepted = self.options
        for option in options:
            if option not in accepted:
                raise ScheduleError(f"{self.name} has no option {option!r}", fix=nearest(option, accepted))
        if "stages_per_rank" in accepted:
            options["stages_per_rank"] = stages
        try:
            rows = self.recipe(num_ranks, num_microbatches=num_microbatches, **options)
            return _program(_checked(rows, self.name), self.name)
        except DrumlineError:
            raise
        except Exception as error:
            reason = f"the recipe of {self.name} failed with {type(error).__name__}: {error}"
            raise ScheduleError(reason, expected="rows of actions, one per rank") from error

    @property
    def not_in_slices(self) -> str:
        """Why it has no order for slices of sequences; empty if it has one."""
        if self.two_directions:
            return "those of one microbatch would be on different ranks"
        if not self.flushed:
            return "its updates come between backwards of one microbatch"
        if self.example is not None and self.example.columns.paired.any():
            return "its fused pairs have one order"
        return ""


def too_large(
    num_ranks: int, num_microbatches: int, stages_per_rank: int, most_pairs: int | None = None
) -> ScheduleError | None:
    """Return an error if these counts make too many pairs of a stage and a microbatch; the default is MAX_PAIRS."""
    most = MAX_PAIRS if most_pairs is None else most_pairs
    if num_ranks * num_microbatches * stages_per_rank <= most:
        return None
    return ScheduleError(
        f"{num_ranks} ranks x {stages_per_rank} stages x {num_microbatches} microbatches is too large",
        expected=f"at most {most} (stage, microbatch) pairs",
        fix="use fewer microbatches: a step repeats itself, so the result looks the same",
    )


def _near(odd: int) -> str:
    """Suggest the nearest even counts to an odd one."""
    return f"use {' or '.join(str(count) for count in (odd - 1, odd + 1) if count)}"


_Row = Cells | Turns | InTurn | tuple[Action, ...]
_ARRAYS = (Cells, Turns, InTurn)
# How rows of a kind that follow each other become one part of a program.
_MADE: dict[type, Callable[[Iterable[Any]], Cells | tuple[tuple[Action, ...], ...]]] = {
    Cells: joined,
    Turns: written,
    InTurn: alternated,
    tuple: tuple,
}


def _program(rows: Iterable[_Row], name: str) -> Program:
    """Return the program of rows: of arrays, or of objects if a recipe made actions of some."""
    parts, arrays = [], []
    for kind, group in groupby(rows, type):
        lengths: list[int] = []
        part = _MADE[kind](_measured(group, lengths))
        parts.append((part, lengths))
        if isinstance(part, Cells):
            arrays.append(part)
    if arrays and len(arrays) == len(parts):
        return Program.of_columns(joined(arrays).columns([length for _, each in parts for length in each]), name)
    listed = (part.columns(lengths).rows() if isinstance(part, Cells) else part for part, lengths in parts)
    return Program(tuple(chain.from_iterable(listed)), name)


def _measured(rows: Iterable[_Row], lengths: list[int]) -> Iterator[_Row]:
    """Yield rows and note their lengths."""
    for row in rows:
        lengths.append(len(row))
        yield row


def _checked(rows: Rows, name: str) -> Iterator[_Row]:
    """Yield a recipe's rows; raise an error if it yields something else or never ends."""
    most, count = MAX_ACTIONS if kernel() is None else MAX_IN_ARRAYS, 0
    for row in rows:
        if isinstance(row, _ARRAYS):
            actions: _Row = row
        else:
            most = MAX_ACTIONS  # one row of objects makes all rows objects
            actions = tuple(islice(row, max(most - count, 0) + 1))
        count += max(len(actions), 1)
        if count > most:
            raise ScheduleError(
                f"the recipe of {name} yields more than {most} actions",
                fix="make sure it ends, or use fewer microbatches",
            )
        if isinstance(actions, _ARRAYS):
            yield actions
            continue
        for kind in set(map(type, actions)):
            if not issubclass(kind, Action):
                wrong = next(action for action in actions if type(action) is kind)
                raise ScheduleError(f"the recipe of {name} yields {wrong!r:.40}", expected="actions like F(0, 0)")
        yield actions


_REGISTRY: dict[str, Schedule] = {}


def schedule(name: str, *, summary: str = "", **facts: Any) -> Callable[[Recipe], Recipe]:
    """Register a recipe under `name`; `facts` are fields of `Schedule`.

    >>> from drumline.core.action import B, F
    >>> @schedule("two-at-a-time", summary="two forwards, two backwards, and so on")
    ... def two_at_a_time(num_ranks, *, num_microbatches):
    ...     for rank in range(num_ranks):
    ...         pairs = [range(m, min(m + 2, num_microbatches)) for m in range(0, num_microbatches, 2)]
    ...         yield [op(rank, m) for pair in pairs for op in (F, B) for m in pair]
    >>> print(generate("two-at-a-time", num_ranks=2, num_microbatches=2))
    0F0,0F1,0B0,0B1
    1F0,1F1,1B0,1B1
    >>> unregister("two-at-a-time")
    """

    def register(recipe: Recipe) -> Recipe:
        if name in _REGISTRY:
            raise ScheduleError(f"a schedule named {name!r} is already registered", fix="choose another name")
        first_line = (recipe.__doc__ or "").strip().partition("\n")[0]
        new_schedule = Schedule(name, recipe, summary or first_line, **facts)
        if new_schedule.stage_counts not in ("fixed", "any", "even"):
            raise ScheduleError(f"stage_counts is {new_schedule.stage_counts!r}", expected="'fixed', 'any' or 'even'")
        _REGISTRY[name] = new_schedule
        return recipe

    return register


def unregister(name: str) -> None:
    """Remove a schedule, so that a notebook cell can register it again."""
    _REGISTRY.pop(name, None)


def schedules() -> dict[str, Schedule]:
    """Return all registered schedules by name, in registration order.

    >>> "1f1b" in schedules()
    True
    """
    return dict(_REGISTRY)


def own_schedules() -> dict[str, Schedule]:
    """Return the schedules that the user registered; other processes do not have these by themselves.

    >>> own_schedules()
    {}
    """
    ours = __name__.rpartition(".")[0] + "."
    return {name: replace(r) for name, r in _REGISTRY.items() if not r.recipe.__module__.startswith(ours)}


def adopt(recipes: Mapping[str, Schedule]) -> None:
    """Register schedules from another process, unless importing their recipes already did."""
    for name, recipe in recipes.items():
        _REGISTRY.setdefault(name, recipe)


def find(name: str) -> Schedule:
    """Return the schedule with this name, or raise an error that suggests a similar one.

    >>> find("1f1v")
    Traceback (most recent call last):
    drumline.core.errors.ScheduleError: unknown schedule '1f1v'; did you mean 1f1b?
    """
    found_schedule = _REGISTRY.get(name)
    if found_schedule is None:
        shown = name if len(name) <= 60 else name[:57] + "..."
        raise ScheduleError(f"unknown schedule {shown!r}", fix=nearest(name[:60], _REGISTRY))
    return found_schedule


def generate(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    slices: int | Sequence[int] = 1,
    **options: Any,
) -> Program:
    """Return the program that the schedule `name` makes for these counts.

    `slices` runs the sequences of every microbatch in so many slices, or in as many as it lists lengths.

    >>> print(generate("1f1b", num_ranks=2, num_microbatches=3))
    0F0,0F1,0B0,0F2,0B1,0B2
    1F0,1B0,1F1,1B1,1F2,1B2
    >>> print(generate("1f1b", num_ranks=2, num_microbatches=1, slices=3))
    0F0.0,0F0.1,0F0.2,0B0.2,0B0.1,0B0.0
    1F0.0,1F0.1,1F0.2,1B0.2,1B0.1,1B0.0
    """
    return find(name).build(num_ranks, num_microbatches, stages_per_rank, slices=slices, **options)


def made_by(name: str, program: Program, num_microbatches: int | None = None) -> Program | None:
    """Build a schedule for the counts of a program, or others; None if the schedule does not support them."""
    stages_per_rank, rest = divmod(program.num_stages, max(program.num_ranks, 1))
    count = program.num_microbatches if num_microbatches is None else num_microbatches
    if rest or not count or program.num_actions * count > _MOST_ACTIONS * program.num_microbatches:
        return None
    try:
        found_schedule = find(name)
        if (found_schedule.stages_per_rank > 1) != (stages_per_rank > 1):
            return None  # with one stage per rank, a recipe for several is a different schedule
        return found_schedule.build(program.num_ranks, count, stages_per_rank, slices=program.num_slices)
    except DrumlineError:
        return None


def recipe_of(program: Program) -> Program:
    r"""Return the program under the name of the schedule that builds the same rows; unchanged if none does.

    >>> recipe_of(Program.parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")).name
    '1f1b'
    """
    for name in schedules():
        new_program = made_by(name, program)
        if new_program is not None and new_program == program:
            return replace(program, name=new_program.name)
    return program
