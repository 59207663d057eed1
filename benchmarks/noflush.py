"""Two ranks without a flush: how much faster PipeDream-2BW trains than flushed 1F1B, and what stands in its way.

    python benchmarks/noflush.py [--rounds 12] [--steps 20] [--width 1024] [--rows 128] [--json FILE]

Two ranks of one thread, 2 microbatches a step, 8 blocks of Linear(D, D) + GELU, SGD. Blocks of `--steps` steps take
turns; each is timed from a barrier to the end of the last rank, and pairs of them give the ratio and its spread.

    s           seconds of a forward and backward while both ranks compute, over those while the other one waits
    bound       1/s + 0.5, the most that leaving out the flush can gain with equal stages and free messages: a flushed
                step takes 3 turns, 2 of them with one rank alone, and a step without a flush 2 with both
    simulated   the simulator's time of a step without a flush, from the action times of the same blocks

The bars: a ratio of 1.25, and at least 95% of the simulated speed. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANKS = MICROBATCHES = 2
BLOCKS = 8


def model(width: int) -> Any:
    """Return the blocks."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(BLOCKS)))


def slowdown(width: int, rows: int, rounds: int) -> list[float]:
    """Return s, round by round: this rank's own work beside the other rank's, over the same work alone."""
    import torch
    from torch import distributed

    rank, stage = distributed.get_rank(), model(width)[: BLOCKS // RANKS]
    x = torch.randn(rows // MICROBATCHES, width, requires_grad=True)

    def work() -> float:
        began = time.perf_counter()
        for _ in range(6):
            stage(x).sum().backward()
        return time.perf_counter() - began

    work()
    found = []
    for _ in range(rounds):
        alone = 0.0
        for number in range(RANKS):
            distributed.barrier()
            if number == rank:
                alone = work()
        distributed.barrier()
        found.append(work() / alone)
    return found


def measure(rounds: int, steps: int, width: int, rows: int) -> dict[str, Any]:
    """Run all contenders on this rank."""
    import torch
    from torch import distributed
    from torch.nn import functional

    import drumline as dl

    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(rows, width, generator=generator) for _ in range(2))
    shared: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": MICROBATCHES, "balance": "even"}
    pipes = {name: dl.Pipeline(model(width), schedule=name, **shared) for name in ("1f1b", "pipedream-2bw")}
    optimizers = {name: pipe.optimizer(torch.optim.SGD, lr=1e-3) for name, pipe in pipes.items()}
    spans: dict[str, list[tuple[str, float]]] = {name: [] for name in pipes}

    def flushed() -> None:
        pipes["1f1b"].step(x, target=y)
        optimizers["1f1b"].step()
        optimizers["1f1b"].zero_grad()

    contenders: dict[str, Callable[[], object]] = {
        "1f1b": flushed,
        "pipedream-2bw": lambda: pipes["pipedream-2bw"].step(x, target=y),
    }
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for at in range(rounds + 1):  # the first warms up
        order = list(contenders) if at % 2 else list(reversed(contenders))
        for name in order:
            distributed.barrier()
            began = time.perf_counter()
            for _ in range(steps):
                contenders[name]()
            distributed.barrier()
            if at:
                found[name].append((time.perf_counter() - began) / steps)
                spans[name] += actions(pipes[name].timeline())
    ratios = slowdown(width, rows, rounds)
    seconds = {name: medians(each) for name, each in spans.items()}
    for pipe in pipes.values():
        pipe.drain()
        pipe.close()
    return {"seconds": found, "s": ratios, "actions": seconds}


def actions(timeline: Any) -> list[tuple[str, float]]:
    """Return the seconds of all actions of a step, by stage and op."""
    return [(f"{span.action.stage} {span.action.op.name}", span.end - span.start) for span in timeline.spans()]


def medians(spans: list[tuple[str, float]]) -> dict[str, float]:
    """Return the median of every kind of action."""
    kinds = sorted({kind for kind, _ in spans})
    return {kind: statistics.median(seconds for name, seconds in spans if name == kind) for kind in kinds}


def simulated(name: str, seconds: dict[str, float]) -> float:
    """Return the simulator's seconds of a step in the middle of a long run, from the times of actions."""
    from drumline.core.costs import Costs
    from drumline.core.simulate.simulate import simulate
    from drumline.schedules import generate

    given: dict[str, Any] = {
        field: [seconds.get(f"{stage} {op}", 0.0) for stage in range(RANKS)]
        for field, op in (("forward", "FORWARD"), ("backward", "BACKWARD"), ("update", "UPDATE"))
    }
    costs = Costs(**given)
    if name == "1f1b":
        return float(simulate(generate(name, num_ranks=RANKS, num_microbatches=MICROBATCHES), costs).makespan)
    counts = {"num_ranks": RANKS, "num_microbatches": MICROBATCHES}
    short, long = (simulate(generate(name, **counts, num_steps=steps), costs).makespan for steps in (10, 30))
    return float(long - short) / 20


def main() -> None:
    """Run and print."""
    import drumline as dl

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    ranks = dl.launch(measure, given.rounds, given.steps, given.width, given.rows, num_ranks=RANKS)
    seconds = {name: [max(each) for each in zip(*(rank["seconds"][name] for rank in ranks), strict=True)]
               for name in ranks[0]["seconds"]}  # fmt: skip
    ratios = sorted(a / b for a, b in zip(seconds["1f1b"], seconds["pipedream-2bw"], strict=True))
    s = statistics.median(value for rank in ranks for value in rank["s"])
    actions_of = {name: ranks[0]["actions"][name] for name in seconds}
    theirs = {name: simulated(name, each) for name, each in actions_of.items()}
    print(f"D = {given.width}, {given.rows} rows, M = P = 2, {given.rounds} pairs of {given.steps} steps")
    for name, each in seconds.items():
        middle, least, most = (pick(each) * 1e3 for pick in (statistics.median, min, max))
        print(f"{name:14} {middle:8.2f} ms a step, {least:.2f} to {most:.2f}; simulated {theirs[name] * 1e3:.2f} ms")
    ratio = statistics.median(ratios)
    speed = theirs["pipedream-2bw"] / statistics.median(seconds["pipedream-2bw"])
    print(f"ratio          {ratio:8.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f}   (bar: 1.25)")
    print(f"s              {s:8.3f}, bound 1/s + 0.5 = {1 / s + 0.5:.3f}")
    print(f"of simulated   {speed:8.1%}   (bar: 95%)")
    if given.json:
        found = {"ratio": ratio, "ratios": ratios, "s": s, "bound": 1 / s + 0.5, "of_simulated": speed}
        given.json.write_text(json.dumps({**found, "seconds": seconds, "simulated": theirs, "actions": actions_of}))


if __name__ == "__main__":
    main()
