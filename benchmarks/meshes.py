"""Two pipelines of two ranks that sum their gradients: with and without overlap, and beside torch's own composition.

    python benchmarks/meshes.py [--rounds 15] [--width 1024] [--rows 32] [--schedules 1f1b zb-v] [--json FILE]
                                [--timelines FILE] [--without-torch]

Four ranks of one thread, mesh pp2 x dp2, 8 blocks of Linear(D, D) + GELU. Contenders take turns, step by step:

    overlap    each stage's gradients are summed as soon as its last backward is done (what a mesh runs by itself)
    at end     the same exchanges at the end of every row: nothing hides them
    zero 3     parameters, gradients and optimizer state divided between the two lines
    torch      torch.distributed.pipelining with `fully_shard` on every stage, the same schedule; not those in a V, as
               torch 2.11 sends between stages of one rank, which gloo refuses

A step is timed from a barrier to the end of the last rank. "exposed" is what a rank spends in exchanges after its last
compute and that of the same rank in the other line, the mean over ranks: waiting for a line that computes longer is no
exchange. "simulated" uses what was measured in the steps of "at end": actions, exchanges,
handling of messages, and the executor's own work for each action; "bare" leaves out the last two. Every contender's
gradients are compared with one process. With --timelines, the quickest step of each contender is written too, as
the two ranks of the first line measured it: the docs draw it.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

BLOCKS = 8
MESH = {"pp": 2, "dp": 2}
THEIR_CLASS = {
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
}


def at_end(program: Any) -> Any:
    """Return the program with its exchanges at the end of every row."""
    from drumline import Program
    from drumline.core.action import Action, Op

    rows = []
    for row in program.rows:
        plain = [action for action in row if action.op is not Op.REDUCE_GRAD]
        stages = dict.fromkeys(part.stage for action in plain if action.is_compute for part in action.work)
        rows.append((*plain, *(Action(stage, Op.REDUCE_GRAD) for stage in stages)))
    return Program(tuple(rows), f"{program.name}, exchanges at the end")


def torch_step(program: Any, model: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Return torch's contender on this rank: its step, and a function that returns its gradients."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, schedules
    from torch.nn import functional

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    mine = program.placement.stages_of(mesh.get_local_rank("pp"))
    each = BLOCKS // program.num_stages
    modules = [copy.deepcopy(nn.Sequential(*list(model)[at * each : (at + 1) * each])) for at in mine]
    for module in modules:
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
    stages = [
        PipelineStage(module, at, program.num_stages, torch.device("cpu"), group=mesh.get_group("pp"))
        for at, module in zip(mine, modules, strict=True)
    ]
    given: Any = stages[0] if len(stages) == 1 else stages
    kind: Any = getattr(schedules, THEIR_CLASS[program.name])
    runtime = kind(given, program.num_microbatches, loss_fn=functional.mse_loss)

    def step() -> None:
        for module in modules:
            module.zero_grad()
        target = {"target": y} if program.num_stages - 1 in mine else {}
        runtime.step(*((x,) if 0 in mine else ()), **target)

    def gradients() -> dict[str, Any]:
        parameters: dict[str, Any] = {
            f"{stage * each + at}.{name}": param
            for stage, module in zip(mine, modules, strict=True)
            for at, block in enumerate(module)
            for name, param in block.named_parameters()
        }
        return {name: param.grad.full_tensor() for name, param in parameters.items()}

    return step, gradients


def gradients_of(pipe: Any) -> dict[str, Any]:
    """Return a pipeline's gradients, whole."""
    from drumline.channel.lines.slices import put_together, slice_of

    return {
        name: put_together(param.grad.view(-1) if slice_of(param) else param.grad, slice_of(param), pipe.axes)
        for name, param in pipe.named_parameters()
    }


def exposed(timeline: Any) -> float:
    """Return the mean over ranks of what exchanges take after the last compute."""
    return float(statistics.mean(end - last for last, end in closing(timeline)))


def closing(timeline: Any) -> list[tuple[float, float]]:
    """Return, per rank, when its last compute and its last exchange end."""
    last = {rank: max(track.ends) for rank, track in enumerate(timeline.tracks)}
    ends = {rank: [exchange.end for exchange in timeline.exchanges if exchange.rank == rank] for rank in last}
    return [(last[rank], max([last[rank], *ends[rank]])) for rank in last]


def exposed_in_lines(steps: list[Any]) -> list[float]:
    """Return the exposed seconds of every measured step, from the later line's last compute on; all ranks call it."""
    import torch.distributed as dist

    own = []
    for step in steps:
        begins = [record.begin_ns * 1e-9 for record in step.records]
        since = [step.seconds(rank, record.begin_ns) for rank, record in enumerate(step.records)]
        own.append([
            (last + begin - zero, end + begin - zero)
            for (last, end), begin, zero in zip(closing(step), begins, since, strict=True)
        ])  # fmt: skip
    lines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lines, own)
    found = []
    for of_lines in zip(*lines, strict=True):
        latest = [max(line[rank][0] for line in of_lines) for rank in range(len(of_lines[0]))]
        found.append(statistics.mean(line[rank][1] - latest[rank] for line in of_lines for rank in range(len(line))))
    return found


def exchange_seconds_of_lines(steps: list[Any]) -> list[float]:
    """Return the median seconds of each stage's exchange, by the line that came last; all ranks call it."""
    import torch.distributed as dist

    from drumline.core.measured.costs import exchange_seconds

    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, [exchange_seconds([step], step.program.num_stages)["reduce"] for step in steps])
    least = [[min(each) for each in zip(*of_lines, strict=True)] for of_lines in zip(*told, strict=True)]
    return [statistics.median(each) for each in zip(*least, strict=True)]


def furthest(gradients: dict[str, Any], model: Any) -> float:
    """Return the largest relative distance between gradients and those of the model."""
    wanted = {key: param.grad for key, param in model.named_parameters()}
    return max(float((gradient - wanted[key]).norm() / wanted[key].norm()) for key, gradient in gradients.items())


def measure(names: list[str], width: int, depth: int, count: int, rounds: int, beside: bool) -> list[dict[str, Any]]:
    """Run every schedule on this rank."""
    import warnings
    from dataclasses import replace

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional

    import drumline as dl
    from drumline.core.action import Op
    from drumline.core.measured.costs import Handling, costs_of
    from drumline.core.state_actions import with_state
    from handling import with_handling

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = []
    for name in names:
        plain = dl.generate(name, num_ranks=2, num_microbatches=count)
        overlapping = with_state(plain, frozenset({Op.REDUCE_GRAD}))
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(BLOCKS)))
        batch = [torch.randn(2 * count * depth, width) for _ in range(2)]
        options: dict[str, Any] = {"loss_fn": functional.mse_loss, "mesh": MESH}
        programs = {"overlap": overlapping, "at end": at_end(plain), "zero 3": overlapping}
        pipes = {
            key: dl.Pipeline(copy.deepcopy(model), schedule=program, zero=3 if key == "zero 3" else 0, **options)
            for key, program in programs.items()
        }
        number, parts = pipes["overlap"].axes.rows
        x, y = (tensor.chunk(parts)[number] for tensor in batch)
        their_gradients: Any = None

        def ours(pipe: Any, x: Any = x, y: Any = y) -> None:
            pipe.zero_grad()
            pipe.step(x, target=y)
            pipe.settle()

        contenders: dict[str, Any] = {key: lambda pipe=pipe, run=ours: run(pipe) for key, pipe in pipes.items()}
        if beside and name in THEIR_CLASS:
            contenders["torch"], their_gradients = torch_step(plain, model, x, y)
        seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
        steps: dict[str, list[Any]] = {text: [] for text in pipes}
        for turn in range(rounds + 2):
            for key, step in contenders.items():
                dist.barrier()
                start = time.perf_counter()
                step()
                dist.barrier()
                if turn >= 2:
                    seconds[key].append(time.perf_counter() - start)
                    if key in pipes:
                        steps[key].append(pipes[key].timeline())
        functional.mse_loss(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
        every = {key: gradients_of(pipe) for key, pipe in pipes.items()}
        if their_gradients is not None:
            every["torch"] = their_gradients()
        off = {key: furthest(each, model) for key, each in every.items()}
        costs = replace(costs_of(steps["at end"]), reduce=exchange_seconds_of_lines(steps["at end"]))
        measured_exposed = {text: statistics.median(exposed_in_lines(steps[text])) for text in pipes}
        handled = with_handling(costs, Handling.measured(steps["at end"]), plain)
        simulated, bare = (
            {text: dl.simulate(programs[text], each) for text in ("overlap", "at end")} for each in (handled, costs)
        )
        found.append({
            "schedule": name,
            "line": number,
            "ms": {key: statistics.median(each) * 1e3 for key, each in seconds.items()},
            "ratios": {text: _ratios(seconds[text], seconds.get("torch")) for text in pipes},
            "makespan_ms": {text: statistics.median(t.makespan for t in steps[text]) * 1e3 for text in pipes},
            "exposed_ms": {key: seconds * 1e3 for key, seconds in measured_exposed.items()},
            "simulated_ms": {key: t.makespan * 1e3 for key, t in simulated.items()},
            "simulated_exposed_ms": {key: exposed(t) * 1e3 for key, t in simulated.items()},
            "without_handling_ms": {key: t.makespan * 1e3 for key, t in bare.items()},
            "reduce_ms": [value * 1e3 for value in costs.per_stage("reduce", plain.num_stages)],
            "off": off,
            "steps": {key: written(min(each, key=lambda step: step.makespan)) for key, each in steps.items()},
        })  # fmt: skip
        for pipe in pipes.values():
            pipe.close()
    return found


def written(step: Any) -> dict[str, Any]:
    """Return a measured step as JSON: its program, and what each rank recorded."""
    records = [record.to_json() for record in step.records]
    return {"name": step.program.name, "program": step.program.format(), "records": records}


def _ratios(ours: list[float], theirs: list[float] | None) -> list[float]:
    return [] if theirs is None else sorted(a / b for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=32, help="rows of a microbatch")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedules", nargs="*", default=["1f1b", "interleaved-1f1b", "zb-v", "dualpipe-v"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--without-torch", action="store_true", help="leave out torch's own composition")
    parser.add_argument("--timelines", type=Path, help="a file for the quickest steps")
    args = parser.parse_args()
    import drumline as dl

    given = (list(args.schedules), args.width, args.rows, args.microbatches, args.rounds, not args.without_torch)
    ranks = dl.launch(measure, *given, num_ranks=4)
    for at, row in enumerate(ranks[0]):
        print(f"\n{row['schedule']}: D = {args.width}, {args.microbatches} microbatches of {args.rows} rows, pp2 x dp2")
        print(
            "              step ms  makespan  simulated     bare  exposed  simulated  to torch (quartiles)  gradients"
        )
        for name, ms in row["ms"].items():
            ratios = row["ratios"].get(name)
            quarter = "" if not ratios else _quartiles(ratios)
            off = max(rank[at]["off"][name] for rank in ranks)
            cells = [
                f"{row[kind][name]:9.2f}" if name in row.get(kind, {}) else " " * 9
                for kind in (
                    "makespan_ms",
                    "simulated_ms",
                    "without_handling_ms",
                    "exposed_ms",
                    "simulated_exposed_ms",
                )
            ]
            print(f"  {name:10s} {ms:8.2f} {' '.join(cells)}  {quarter:22s}  {off:.1e}")
    timelines = {row["schedule"]: row.pop("steps") for rank in reversed(ranks) for row in rank}
    if args.timelines:
        args.timelines.write_text(json.dumps(timelines) + "\n")
    if args.json:
        args.json.write_text(json.dumps(ranks, indent=2))


def _quartiles(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({ratios[len(ratios) // 4]:.2f} to {ratios[3 * len(ratios) // 4]:.2f})"


if __name__ == "__main__":
    main()
