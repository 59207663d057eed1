"""What `adapt` loses and gains on a simulated clock, with the project's own decider: regret in every cell.

    python benchmarks/adapt_regret.py [--quick] [--json FILE] [--picture FILE]
    python benchmarks/adapt_regret.py --read FILE ...      the table of earlier runs, joined

400 steps, 8 seeds, 16 equal layers a rank. Lognormal noise per rank and step of 0 to 40%; one rank is slow by 1.25, 1.5
or 3 times to the end, for 40 steps, or with a period of 8, 16 or 40 steps, or gets 1% slower a step. P = 2, 4 and 8,
with 1f1b and zb-v. A move pauses for 5% of a step.

nothing    the same steps at the first cut
oracle     knows mean speeds and how long they last, pays for pauses, and learns of changes 3 steps late

The clock is the simulator's: one call times a step of all runs of a cell's noise. The decider sees each step through
the call that the pipeline makes, `Decider.see`, and hears of each change through `Decider.took`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from drumline.adapt.decide import Decider
from drumline.adapt.proposal import Arrangement
from drumline.adapt.settings import Adapt
from drumline.core.graph import Floats
from drumline.report.draw.palette import MUTED
from drumline.report.draw.sheet import rect, sheet, text
from regret_world import SINCE, Kind, World, kinds, noise

STEPS, SEEDS = 400, 8
NOISES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
RANKS, SCHEDULES = (2, 4, 8), ("1f1b", "zb-v")


@dataclass
class Run:
    """One decider, and what came of its decisions; it stands for all kinds of slowness that were the same so far."""

    kinds: list[Kind]
    seed: int
    decider: Decider
    seconds: float = 0.0
    moves: list[int] = field(default_factory=list)  # the first step after each

    def parted(self, world: World, slowness: Mapping[Kind, float]) -> list[Run]:
        """Return a run for each slowness of the next step: this one, and copies of it."""
        alike: dict[float, list[Kind]] = {}
        for kind in self.kinds:
            alike.setdefault(slowness[kind], []).append(kind)
        self.kinds, *others = alike.values()
        shared = {id(each): each for each in (world, world.program, world.layers, self.decider.settings)}
        return [self, *(replace(deepcopy(self, dict(shared)), kinds=kinds) for kinds in others)]

    def see(self, world: World, step: int, makespan: float, stages: list[float]) -> None:
        """Count a step, and change what the decider wants."""
        self.seconds += makespan
        before = self.decider.now.counts
        proposal = self.decider.see(world.seen(step, makespan, stages))  # type: ignore[arg-type]
        if proposal is None:
            return
        self.seconds += world.pause
        self.moves.append(step + 1)
        moved = world.layers.moved_bytes(before, proposal.after.counts)
        self.decider.took(proposal, proposal.after, seconds=world.pause, num_bytes=moved)


@dataclass(frozen=True)
class Cell:
    """The figures of one cell, over all seeds; regrets are shares of the time of nothing, and of the oracle."""

    schedule: str
    ranks: int
    noise: float
    kind: Kind
    over_nothing: list[float]
    over_oracle: list[float]
    moves: list[int]
    answered: list[int | None]  # the steps between the first slow step and the first move after it

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**self.__dict__, "kind": self.kind.name}

    @staticmethod
    def from_json(entry: dict[str, Any]) -> Cell:
        """Return the cell of plain data."""
        return Cell(**{**entry, "kind": next(kind for kind in kinds() if kind.name == entry["kind"])})


def cells(job: tuple[str, int, float, Sequence[Kind], int, int]) -> tuple[list[Cell], float, float]:
    """Run all kinds of slowness and seeds at one noise; return their cells, seconds of deciding, and of the rest."""
    schedule, num_ranks, sigma, which, seeds, steps = job
    begun, deciding = time.process_time(), 0.0
    world = world_of(schedule, num_ranks)
    seeds = seeds if sigma else 1
    draws = [noise(seed, steps, num_ranks, sigma) for seed in range(seeds)]
    settings, levels = Adapt(program=False), {kind: kind.at(steps) for kind in which}
    runs = [
        Run(list(which), seed, Decider(settings, Arrangement(world.program, world.home), layers=world.layers))
        for seed in range(seeds)
    ]
    for step in range(steps):
        slowness = {kind: float(level[step]) for kind, level in levels.items()}
        runs = [part for run in runs for part in run.parted(world, slowness)]
        slow = np.array([draws[run.seed][step] for run in runs])
        slow[:, world.slow_rank] *= [slowness[run.kinds[0]] for run in runs]
        counts = np.array([run.decider.now.counts for run in runs])
        stages = world.stage_seconds(counts, slow)
        taken = world.seconds(counts, slow).tolist()
        at = time.process_time()
        for run, makespan, each in zip(runs, taken, stages.tolist(), strict=True):
            run.see(world, step, makespan, each)
        deciding += time.process_time() - at
    of = {(kind, run.seed): run for run in runs for kind in run.kinds}
    speeds = np.array([world.slowness(kind, steps) * draws[seed] for kind, seed in product(which, range(seeds))])
    nothing = totals(world, [[world.home] * steps] * len(speeds), speeds).reshape(len(which), seeds)
    paths = {kind: world.oracle(kind, steps) for kind in which}
    best = totals(world, [paths[kind][0] for kind in which for _ in range(seeds)], speeds).reshape(len(which), seeds)
    rows = []
    for kind, beside_nothing, beside_best in zip(which, nothing, best, strict=True):
        mine = [of[kind, seed] for seed in range(seeds)]
        own = np.array([run.seconds for run in mine])
        answers = [next((move - SINCE for move in run.moves if move > SINCE), None) for run in mine]
        moves = [len(run.moves) for run in mine]
        best_seconds = beside_best + paths[kind][1] * world.pause
        over_nothing, over_oracle = ((own / other - 1.0).tolist() for other in (beside_nothing, best_seconds))
        rows.append(Cell(schedule, num_ranks, sigma, kind, over_nothing, over_oracle, moves, answers))
    return rows, deciding, time.process_time() - begun - deciding


@cache
def world_of(schedule: str, num_ranks: int) -> World:
    """Return the world of a schedule and ranks: its oracle's cuts are the same at every noise."""
    return World(schedule, num_ranks)


def totals(world: World, cuts: Sequence[Sequence[tuple[int, ...]]], speeds: Floats) -> Floats:
    """Return the seconds of every run, with a cut and the ranks' slowness for every step; what is alike runs once."""
    rows = np.concatenate([np.array(cuts, dtype=np.float64), speeds], axis=2)
    stages = rows.shape[2] - speeds.shape[2]
    keys = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[2]))).ravel()
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    alike = rows.reshape(-1, rows.shape[2])[first]
    total: Floats = world.seconds(alike[:, :stages], alike[:, stages:])[which].reshape(speeds.shape[:2]).sum(axis=1)
    return total


# ---- what must hold ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A bound on some cells: the figure of each, and what it may be at most."""

    name: str
    most: float
    of: Callable[[Cell], bool]
    figure: Callable[[Cell], float]

    def worst(self, all_cells: Sequence[Cell]) -> tuple[float, Cell] | None:
        """Return the largest figure and its cell."""
        return max(((self.figure(cell), cell) for cell in all_cells if self.of(cell)), key=lambda pair: pair[0],
                   default=None)  # fmt: skip


def mean_over_nothing(cell: Cell) -> float:
    return float(np.mean(cell.over_nothing))


def slowest_answer(cell: Cell) -> float:
    return max(STEPS if value is None else value for value in cell.answered)


BARS = [
    Bar("nothing slow for 40 steps, noise to 10%: mean beside nothing", 0.005,
        lambda cell: not cell.kind.is_long and cell.noise <= 0.1, mean_over_nothing),
    Bar("the same: worst seed", 0.01,
        lambda cell: not cell.kind.is_long and cell.noise <= 0.1, lambda cell: max(cell.over_nothing)),
    Bar("the same, noise 20 and 40%: mean", 0.01,
        lambda cell: not cell.kind.is_long and cell.noise > 0.1, mean_over_nothing),
    Bar("slow for 40 steps or more, any noise: mean beside nothing", 0.01,
        lambda cell: cell.kind.is_long, mean_over_nothing),
    Bar("slow to x2 for 40 steps or more, noise to 5%: mean beside the oracle", 0.02,
        lambda cell: cell.kind.is_long and cell.kind.times <= 2 and cell.noise <= 0.05,
        lambda cell: float(np.mean(cell.over_oracle))),
    Bar("sudden x1.5, noise to 2%: steps to the answer", 3,
        lambda cell: cell.kind.times == 1.5 and not cell.kind.period and cell.noise <= 0.02, slowest_answer),
    Bar("sudden x1.5, noise 5%: steps to the answer", 8,
        lambda cell: cell.kind.times == 1.5 and not cell.kind.period and cell.noise == 0.05, slowest_answer),
]  # fmt: skip


def report(all_cells: Sequence[Cell]) -> Iterator[str]:
    """Yield the table: a row for every kind and noise, over all counts of ranks and schedules; then the bars."""
    yield f"{'slow':24} {'noise':>5}   {'beside nothing':^23} {'beside the oracle':^23} {'moves':>6}"
    yield f"{'':24} {'':>5}   {'mean':>7} {'worst':>7} {'seed':>7} {'mean':>7} {'worst':>7} {'seed':>7}"
    for name, sigma in dict.fromkeys((cell.kind.name, cell.noise) for cell in all_cells):
        each = [cell for cell in all_cells if (cell.kind.name, cell.noise) == (name, sigma)]
        figures = []
        for regrets in ([cell.over_nothing for cell in each], [cell.over_oracle for cell in each]):
            means = [float(np.mean(values)) for values in regrets]
            figures += [float(np.mean(means)), max(means), max(map(max, regrets))]
        moves = np.mean([move for cell in each for move in cell.moves])
        yield f"{name:24} {sigma:5.0%}   {' '.join(f'{value:+7.1%}' for value in figures)} {moves:6.1f}"
    yield ""
    yield f"{'':6} {'bar':70} {'at most':>8} {'worst':>8}  {'cells over':>10}"
    for bar in BARS:
        if (found := bar.worst(all_cells)) is None:
            continue
        value, cell = found
        those = [bar.figure(other) > bar.most + 1e-12 for other in all_cells if bar.of(other)]
        written = [f"{number:8.2%}" if bar.most < 1 else f"{number:8.0f}" for number in (bar.most, value)]
        where = f"{cell.schedule} P={cell.ranks} noise {cell.noise:.0%}, {cell.kind.name}"
        name = f"{'BREAKS' if any(those) else 'holds':6} {bar.name:70}"
        yield f"{name} {' '.join(written)}  {sum(those):4} of {len(those):<4} {where}"


# ---- the picture -------------------------------------------------------------------------------------------------

_SIDE, _ROW, _NAMES, _TOP = 46, 17, 170, 96
_STEPS = ((-1.0, "#0072b2"), (-0.05, "#8cc4e4"), (-0.005, "#f2f2ef"), (0.005, "#fae0cd"), (0.02, "#f0ab7c"))
_WORST = "#d55e00"


def draw(all_cells: Sequence[Cell]) -> str:
    """Return a map: a row for every kind of slowness, a column for every noise; blue gains, orange loses.

    Each square is the mean over counts of ranks, schedules and seeds, beside nothing on the left and beside the oracle
    on the right.
    """
    noises = sorted({cell.noise for cell in all_cells})
    names = list(dict.fromkeys(cell.kind.name for cell in all_cells))
    lines = []
    for side, (title, field_name) in enumerate(
        (("beside nothing", "over_nothing"), ("beside the oracle", "over_oracle"))
    ):
        left = _NAMES + side * (_SIDE * len(noises) + 28)
        lines.append(text(left, _TOP - 28, title))
        lines += [text(left + _SIDE * (at + 0.5), _TOP - 8, f"{sigma:.0%}", anchor="middle", fill=MUTED)
                  for at, sigma in enumerate(noises)]  # fmt: skip
        for row, name in enumerate(names):
            for at, sigma in enumerate(noises):
                those = (cell for cell in all_cells if (cell.kind.name, cell.noise) == (name, sigma))
                each = [getattr(cell, field_name) for cell in those]
                value = float(np.mean([np.mean(values) for values in each]))
                x, y = left + _SIDE * at, _TOP + _ROW * row
                note = f"{name}, noise {sigma:.0%}: {value:+.1%} {title}"
                lines.append(rect(x, y, _SIDE - 1, _ROW - 1, hue(value), note=note))
                share = round(100 * value, 1) + 0.0  # never -0.0
                lines.append(text(x + _SIDE / 2, y + 12, f"{share:+.1f}", anchor="middle", fill=ink(value)))
    lines += [text(_NAMES - 10, _TOP + _ROW * row + 12, name, anchor="end") for row, name in enumerate(names)]
    width = _NAMES + 2 * _SIDE * len(noises) + 28 + 16
    title = "What adapting loses (+) and gains (-), % of all steps, by noise"
    about = "a row for each way in which one rank is slow; blue gains 0.5% or more, orange loses as much"
    return sheet(lines, width=width, height=_TOP + _ROW * len(names) + 14, title=title, about=about)


def hue(value: float) -> str:
    if value >= 0.05:
        return _WORST
    return next((colour for least, colour in reversed(_STEPS) if value >= least), _STEPS[0][1])


def ink(value: float) -> str:
    return "#ffffff" if value < -0.05 or value >= 0.05 else "#17212b"


def run(args: argparse.Namespace) -> tuple[list[Cell], str]:
    """Run the cells; return them, and how long that took."""
    # The longest first, so that two processes end together.
    jobs = [
        (schedule, ranks, sigma, kinds(), args.seeds, STEPS)
        for ranks, schedule, sigma in product(sorted(args.ranks, reverse=True), reversed(args.schedules), args.noises)
    ]
    begun = time.perf_counter()
    if args.jobs == 1:
        done = [cells(job) for job in jobs]
    else:
        with ProcessPoolExecutor(args.jobs) as pool:
            done = list(pool.map(cells, jobs))
    all_cells = [cell for found, _, _ in done for cell in found]
    deciding, rest = sum(each for _, each, _ in done), sum(each for _, _, each in done)
    steps = STEPS * sum(len(cell.moves) for cell in all_cells)
    return all_cells, (
        f"{steps} steps in {time.perf_counter() - begun:.0f} s; processor time: {deciding:.0f} s of deciding,"
        f" {deciding / steps * 1e6:.0f} us a step, and {rest:.0f} s of simulation"
    )


def joined(many: Iterable[Cell]) -> list[Cell]:
    """Return every cell once: of several runs, the one with the most seeds."""
    best: dict[tuple[str, int, float, Kind], Cell] = {}
    for cell in many:
        key = cell.schedule, cell.ranks, cell.noise, cell.kind
        if key not in best or len(best[key].moves) < len(cell.moves):
            best[key] = cell
    return list(best.values())


def main() -> None:
    """Run the cells, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two ranks, two seeds, noise 0 and 10%%")
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--schedules", nargs="*", default=SCHEDULES)
    parser.add_argument("--noises", type=float, nargs="*", default=NOISES)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--read", type=Path, nargs="*", help="JSON of earlier runs, instead of a run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.noises, args.seeds, args.jobs = (2,), (0.0, 0.1), 2, 1
    if args.read:
        all_cells = joined(Cell.from_json(entry) for path in args.read for entry in json.loads(path.read_text()))
        footer = f"{len(all_cells)} cells"
    else:
        all_cells, footer = run(args)
    order = {kind.name: at for at, kind in enumerate(kinds())}
    all_cells.sort(key=lambda cell: (order[cell.kind.name], cell.noise, cell.ranks, cell.schedule))
    print(*report(all_cells), footer, sep="\n")
    if args.json:
        args.json.write_text(json.dumps([cell.to_json() for cell in all_cells]))
    if args.picture:
        args.picture.write_text(draw(all_cells), encoding="utf-8")


if __name__ == "__main__":
    main()
