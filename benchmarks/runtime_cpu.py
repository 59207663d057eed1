"""The executor against torch.distributed.pipelining on CPU ranks of one machine.

    python benchmarks/runtime_cpu.py [--rounds 15] [--sizes 256x16 ...] [--schedules 1f1b ...] [--json FILE]

Two ranks, one thread each, 8 blocks of Linear(D, D) + GELU. Torch runs the very same program from our CSV and, where it
has one, its own class; the faster of the two counts. All contenders take turns, step by step, in one run; a step is
timed from a barrier to the end of the last rank. Printed: medians; the ratio to torch of the same round with its
quartiles; the floor, the ratio of an executor that adds nothing to the computing itself (what the simulator says is
possible with the action times just measured, over torch's step); how much of the possible ours reaches; and what each
adds to every action beyond that, in microseconds.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

SIZES = ((256, 16), (512, 64), (1024, 128))
MICROBATCHES = (8, 16)
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v")
THEIR_CLASS = {
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
AIMS = {"1f1b": (0.6, 0.8, 0.95)}
OTHER_AIM = (0.4, 0.75, 0.95)
BLOCKS = 8


def torch_steps(program: Any, model: Any, x: Any, y: Any, folder: Path) -> dict[str, Any]:
    """Return torch's contenders on this rank: a step by our CSV, and by its own class."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, schedules
    from torch.nn import functional

    import drumline as dl

    mine = program.placement.stages_of(dist.get_rank())
    each = BLOCKS // program.num_stages
    steps = {}
    for how in ("csv", "class"):
        if how == "class" and program.name not in THEIR_CLASS:
            continue
        own = copy.deepcopy(model)
        modules = [nn.Sequential(*list(own)[at * each : (at + 1) * each]) for at in mine]
        stages = [
            PipelineStage(module, at, program.num_stages, torch.device("cpu"))
            for at, module in zip(mine, modules, strict=True)
        ]
        if how == "csv":
            path = folder / f"{program.name}.{dist.get_rank()}.csv"
            path.write_text(dl.for_torch(program))
            kind: Any = schedules._PipelineScheduleRuntime
            runtime = kind(stages, program.num_microbatches, loss_fn=functional.mse_loss)
            runtime._load_csv(str(path), format="compute_only")
        else:
            given: Any = stages[0] if len(stages) == 1 else stages
            kind = getattr(schedules, THEIR_CLASS[program.name])
            runtime = kind(given, program.num_microbatches, loss_fn=functional.mse_loss)

        def step(runtime: Any = runtime, own: Any = own) -> None:
            target = {"target": y} if program.num_stages - 1 in mine else {}
            runtime.step(*((x,) if 0 in mine else ()), **target)
            own.zero_grad()

        steps[how] = step
    return steps


def measure(sizes: Any, microbatches: Any, names: Any, rounds: int) -> list[dict[str, Any]]:
    """Run every case on this rank."""
    import warnings

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional

    import drumline as dl

    warnings.simplefilter("ignore")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for width, depth in sizes:
            for count in microbatches:
                for name in names:
                    program = dl.generate(name, num_ranks=2, num_microbatches=count)
                    torch.manual_seed(0)
                    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(BLOCKS)))
                    x, y = torch.randn(count * depth, width), torch.randn(count * depth, width)
                    pipe = dl.Pipeline(copy.deepcopy(model), loss_fn=functional.mse_loss, schedule=program)
                    steps = torch_steps(program, model, x, y, Path(folder))

                    def ours(pipe: Any = pipe, x: Any = x, y: Any = y) -> None:
                        pipe.step(x, target=y)
                        pipe.settle()
                        pipe.zero_grad()

                    contenders = {"ours": ours, **steps}
                    seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
                    costs = []
                    for turn in range(rounds + 2):
                        for key, step in contenders.items():
                            dist.barrier()
                            start = time.perf_counter()
                            step()
                            dist.barrier()
                            if turn >= 2:
                                seconds[key].append(time.perf_counter() - start)
                                if key == "ours":
                                    costs.append((pipe.timeline().measured_costs(), pipe.timeline().makespan))
                    rows.append(summary(program, (width, depth), seconds, costs))
                    pipe.close()
    return rows


def summary(program: Any, size: Any, seconds: dict[str, list[float]], costs: Any) -> dict[str, Any]:
    """Return one case's figures."""
    import drumline as dl

    theirs = min((name for name in seconds if name != "ours"), key=lambda name: statistics.median(seconds[name]))
    ratios = sorted(mine / other for mine, other in zip(seconds["ours"], seconds[theirs], strict=True))
    possible = [dl.simulate(program, cost).makespan for cost, _ in costs]
    reached = [ideal / makespan for ideal, (_, makespan) in zip(possible, costs, strict=True)]
    actions = max(len(row) for row in program.rows)
    ideal = statistics.median(possible)

    def extra(name: str) -> float:
        return (statistics.median(seconds[name]) - ideal) / actions * 1e6

    return {
        "schedule": program.name,
        "width": size[0],
        "rows": size[1],
        "microbatches": program.num_microbatches,
        "ours_ms": statistics.median(seconds["ours"]) * 1e3,
        "torch_ms": statistics.median(seconds[theirs]) * 1e3,
        "torch": theirs,
        "ratio": statistics.median(ratios),
        "low": ratios[len(ratios) // 4],
        "high": ratios[3 * len(ratios) // 4],
        "possible_ms": ideal * 1e3,
        "floor": ideal / statistics.median(seconds[theirs]),
        "reached": statistics.median(reached),
        "extra_us": extra("ours"),
        "torch_extra_us": extra(theirs),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", nargs="*", default=[f"{width}x{rows}" for width, rows in SIZES])
    parser.add_argument("--microbatches", nargs="*", type=int, default=MICROBATCHES)
    parser.add_argument("--schedules", nargs="*", default=SCHEDULES)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import drumline as dl

    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes]
    rows = dl.launch(measure, sizes, list(args.microbatches), list(args.schedules), args.rounds, num_ranks=2)[0]
    print(
        "D/rows     M  schedule           ours ms  torch ms        ratio (quartiles)   aim  floor  reached  "
        "us/action  torch's"
    )
    for row in rows:
        place = next((at for at, size in enumerate(SIZES) if size == (row["width"], row["rows"])), None)
        aim = AIMS.get(row["schedule"], OTHER_AIM)[place] if place is not None else float("nan")
        print(
            f"{row['width']:4d}/{row['rows']:<4d} {row['microbatches']:3d}  {row['schedule']:17s} {row['ours_ms']:8.2f}"
            f"  {row['torch_ms']:8.2f} {row['torch']:5s}  {row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
            f"  {aim:.2f}   {row['floor']:.2f}  {row['reached']:7.1%}  {row['extra_us']:9.0f}"
            f"  {row['torch_extra_us']:7.0f}"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
