"""What the comparisons between ranks cost per step, the check of the first step once, and sentinels in a long run.

    python benchmarks/checks.py [--rounds 100] [--sizes 256x64 ...] [--schedules 1f1b ...] [--json FILE]
    python benchmarks/checks.py --first [--model transformer] [--microbatches 2]  # the check of the first step alone
    python benchmarks/checks.py --sentinels [--model chain]                       # later checks alone
    python benchmarks/checks.py --loss [--sizes 1024x64 ...]                      # comparing the loss alone

Two ranks, one thread each; 8 blocks of Linear(D, D) + GELU with a path around each, so that the model is followed; 8
microbatches. Or 6 layers of nn.TransformerEncoderLayer(D, 4) on sequences of 64.
Timed inside of real steps, on each rank: looking at the model before a step ("watch"), at the batch
("batch": sampled, put into what is told anyway, and taken out of it), and comparing what all ranks told ("agree"). The
share is the median of all three as a part of the quickest tenth of the steps, from a barrier to the end of `settle`,
which other work on the machine disturbs least; that of the rank with the larger one is shown. The bar is 1% at D = 256.
The check of the first step is what a first step takes with it less what it takes without, from a barrier to the end of
`settle`, each of a pipeline that is made anew; beside it stands one microbatch's forward and backward of the plain
model in the same process. The three take turns, and the medians are compared, on two processes and in one with both
ranks: by the clock, and by what the slower process's processor worked, which other work on the machine disturbs less.
All are warm: the first call of a kernel in a process, which any first microbatch pays, is in none of them. The bar is
2.5 microbatches at D = 1024, since two are compared.
A sentinel is what a step takes that is checked less what the step after it takes, of one pipeline that checks every
second step. Its part of a run of 10,000 steps, in which 13 are checked, has a bar of 0.1% on 2 ranks with 8
microbatches, and of 0.2% on 4 ranks with 4.
With --loss: what it takes to compare a loss function with itself on fewer rows, beside a forward and backward of the
last block, Linear(D, D) + GELU, on the same rows, in turns in one process with one thread, by processor time. The
bar is 0.5 at D = 1024.
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

BLOCKS = 8
PARTS = ("watch", "batch", "agree")
LONG = ((2, 8), (4, 4))  # ranks and microbatches of the long runs
NUM_STEPS = 10_000
FIRST = ("microbatch", "unchecked", "checked")


def timed(seconds: list[float], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which adds to what it took in the step at hand."""

    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[-1] += time.perf_counter() - start

    return run


def watched() -> dict[str, list[float]]:
    """Have the comparisons of all pipelines timed, from here on."""
    from drumline.engine.model.model_watch import WatchedModel
    from drumline.engine.ranks import agreement, tally
    from drumline.engine.ranks.agreement import TracedKinds
    from drumline.pipeline.steps import step

    seconds: dict[str, list[float]] = {part: [0.0] for part in PARTS}
    begun = agreement.begun

    def sampled(batch: Any, target: Any) -> Callable[[], Any]:
        later = timed(seconds["batch"], begun)(batch, target)

        def given() -> Any:
            found = timed(seconds["batch"], later)()
            timed(seconds["batch"], lambda: pickle.loads(pickle.dumps(found)))()  # as part of what is told
            return found

        return given

    places: Any = (WatchedModel, step, tally, TracedKinds)
    kind, steps, tallies, followed = places
    kind.look = timed(seconds["watch"], kind.look)
    followed.fresh = timed(seconds["watch"], followed.fresh)
    steps.begun = sampled
    for name in ("agree_on_batch", "agree_on_mode", "agree_on_followed"):
        setattr(tallies, name, timed(seconds["agree"], getattr(tallies, name)))
    return seconds


def models() -> dict[str, tuple[Callable[[int], Any], tuple[int, ...]]]:
    """Return what makes each model of a width, and the inner shape of its rows."""
    from torch import Tensor, nn

    class Around(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(BLOCKS)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x

    class Transformer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            layers = (nn.TransformerEncoderLayer(width, 4, batch_first=True) for _ in range(6))
            self.blocks = nn.ModuleList(layers)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    def chain(width: int) -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(BLOCKS)))

    return {"mlp": (Around, ()), "transformer": (Transformer, (64,)), "chain": (chain, ())}


def measure(sizes: Any, microbatches: int, names: Any, rounds: int, model: str, first: bool) -> list[dict[str, Any]]:
    """Run every case on this rank."""
    import torch
    from torch import Tensor
    from torch.nn import functional

    import drumline as dl

    kind, inner = models()[model]
    seconds = watched()
    rows = []
    for width, depth in sizes:
        for name in names:
            torch.manual_seed(1)
            x, y = (torch.randn(microbatches * depth, *inner, width) for _ in range(2))

            def made(width: int = width, name: str = name, x: Tensor = x, **settings: Any) -> Any:
                torch.manual_seed(0)
                return dl.Pipeline(
                    kind(width),
                    loss_fn=functional.mse_loss,
                    num_microbatches=microbatches,
                    schedule=name,
                    example=x,
                    balance="even",
                    num_ranks=2,
                    **settings,
                )

            row: dict[str, Any] = {"schedule": name, "width": width, "rows": depth}
            if torch.distributed.is_initialized() and not first:
                row |= steps(made, seconds, x, y, rounds)
            row |= first_steps(made, partial(kind, width), x, y, microbatches, rounds=max(rounds // 5, 5))
            rows.append(row)
    return rows


def steps(
    made: Callable[[], Any], seconds: dict[str, list[float]], x: Any, y: Any, rounds: int
) -> dict[str, list[float]]:
    """Return what the parts and the whole of each step took."""
    import torch.distributed as dist

    found: dict[str, list[float]] = {part: [] for part in ("step", *PARTS)}
    with made() as pipe:
        for turn in range(rounds + 5):
            for part in PARTS:
                seconds[part][:] = [0.0]
            dist.barrier()
            start = time.perf_counter()
            pipe.step(x, target=y)
            pipe.settle()
            whole = time.perf_counter() - start
            pipe.zero_grad()
            if turn >= 5:
                found["step"].append(whole)
                for part in PARTS:
                    found[part].append(seconds[part][-1])
    return found


def first_steps(
    made: Callable[..., Any], model: Callable[[], Any], x: Any, y: Any, microbatches: int, *, rounds: int
) -> dict[str, list[float]]:
    """Return what first steps took with the check and without, and one microbatch of the plain model, in turns."""
    import torch
    from torch.nn import functional

    found: dict[str, list[float]] = {f"{what}{part}": [] for what in FIRST for part in ("", " processor")}
    value, wanted = x.tensor_split(microbatches)[0], y.tensor_split(microbatches)[0]

    def plain(fresh: Any) -> None:
        torch.autograd.backward(functional.mse_loss(fresh(value), wanted))

    for turn in range(rounds + 2):
        order = FIRST if turn % 2 else FIRST[::-1]
        for what in order:
            if what == "microbatch":
                fresh = model()  # as the pipelines' models are: weights cold, no memory for gradients yet
                gc.collect()
                gc.freeze()
                taken = together(partial(plain, fresh))
            else:
                with made(check_model=what == "checked") as pipe:
                    gc.collect()  # what earlier pipelines left would be looked through in the middle
                    gc.freeze()
                    taken = together(partial(settled, pipe, x, y))
            if turn >= 2:
                for part, seconds in zip(("", " processor"), taken, strict=True):
                    found[what + part].append(seconds)
    return found


def long_run(sizes: Any, microbatches: int, rounds: int, model: str) -> list[dict[str, Any]]:
    """Return what steps of 1f1b on this rank take that are checked, and those after them that are not."""
    import torch
    from torch.nn import functional

    import drumline as dl

    rows, (kind, inner) = [], models()[model]
    for width, depth in sizes:
        torch.manual_seed(0)
        made = kind(width)
        x, y = (torch.randn(microbatches * depth, *inner, width) for _ in range(2))
        found: dict[str, Any] = {"checked": [], "step": [], "width": width, "rows": depth}
        with dl.Pipeline(
            made, loss_fn=functional.mse_loss, num_microbatches=microbatches, example=x, balance="even", check_model=2
        ) as pipe:
            for turn in range(2 * (rounds + 3)):
                taken, _ = together(partial(settled, pipe, x, y))
                pipe.zero_grad()
                if turn >= 6:
                    found["step" if turn % 2 else "checked"].append(taken)
        rows.append(found)
    return rows


def sentinels(args: argparse.Namespace, sizes: Any) -> list[Any]:
    """Measure and print what sentinels add to a long run."""
    import drumline as dl
    from drumline.features.check.sentinels import Sentinels

    found = []
    every = Sentinels(True)
    number = sum(every.takes(step) for step in range(1, NUM_STEPS + 1))
    print(f"\n{number} sentinels in {NUM_STEPS} steps of 1f1b, {args.model}")
    print("D/rows     P  M          step ms (quartiles)      a sentinel adds ms  of a step  of the run")
    for ranks, microbatches in LONG:
        each = dl.launch(long_run, sizes, microbatches, max(args.rounds // 2, 5), args.model, num_ranks=ranks)
        found.append(each)
        for told in zip(*each, strict=True):
            row = max(told, key=lambda value: statistics.median(value["step"]))
            added = [value - other for value, other in zip(row["checked"], row["step"], strict=True)]
            part = statistics.median(added) / statistics.median(row["step"])
            case = f"{row['width']:4d}/{row['rows']:<4d} {ranks:3d} {microbatches:2d}"
            print(f"{case} {spread(row['step'], 1e3):>28s} {spread(added, 1e3):>23s} {part:10.1%} "
                  f"{number * part / NUM_STEPS:10.3%}")  # fmt: skip
    return found


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda o, t: (o - t).square().mean(),
    "sum / len": lambda o, t: (o - t).pow(2).sum() / len(t),
    "mean + sum": lambda o, t: (o - t).pow(2).mean() + 1e-3 * o.abs().sum(),
}


def losses(width: int, depth: int, rounds: int) -> None:
    """Print what comparing takes beside the last block."""
    import torch
    from torch import nn

    from drumline.engine.loss.fn_loss import FnWeight

    torch.set_num_threads(1)
    block = nn.Sequential(nn.Linear(width, width), nn.GELU())
    x, wanted = torch.randn(depth, width, requires_grad=True), torch.randn(depth, width)
    targets = [torch.randn(depth, width) for _ in range(8)]
    for name, loss_fn in LOSSES.items():
        seconds: dict[str, list[float]] = {"block": [], "compare": []}
        for turn in range(rounds + 2):
            fresh = FnWeight(loss_fn, torch.device("cpu"))
            output = block(x)
            start = time.process_time()
            found = fresh.resolve(output, 0, targets, [depth] * 8, None)
            with fresh.multiplying(output, targets[0], found.factors.get(0, ())):
                pass
            middle = time.process_time()
            torch.autograd.backward(block(x), wanted)
            end = time.process_time()
            if turn >= 2:
                seconds["compare"].append(middle - start)
                seconds["block"].append(end - middle)
        times = statistics.median(seconds["compare"]) / statistics.median(seconds["block"])
        case = f"{width:4d}/{depth:<4d} {name:12s}"
        print(f"{case} {spread(seconds['compare'], 1e3):>26s} {spread(seconds['block'], 1e3):>26s} {times:6.2f}")


def settled(pipe: Any, x: Any, y: Any) -> None:
    """Run a step to its end."""
    pipe.step(x, target=y)
    pipe.settle()


def together(run: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds that something took from when all ranks are ready, and those that the processor worked."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
    start, worked = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - worked


def first_row(row: dict[str, Any], part: str) -> str:
    """Return what the check adds to a first step, by pairs, beside one microbatch."""
    added = [value - other for value, other in zip(row["checked" + part], row["unchecked" + part], strict=True)]
    times = statistics.median(added) / statistics.median(row["microbatch" + part])
    return f"{spread(added, 1e3):>26s} {spread(row['microbatch' + part], 1e3):>26s} {times:6.2f}"


def spread(values: list[float], unit: float) -> str:
    """Return a median with its quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle * unit:.4g} ({low * unit:.3g} to {high * unit:.3g})"


def share(row: dict[str, Any]) -> float:
    """Return what part of a step is comparing."""
    both = zip(*(row[part] for part in PARTS), strict=True)
    return float(statistics.median(sum(parts) for parts in both) / quickest(row["step"]))


def quickest(values: list[float]) -> float:
    """Return the mean of the quickest tenth."""
    return statistics.mean(sorted(values)[: max(len(values) // 10, 1)])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--sizes", nargs="*", default=["256x64"])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedules", nargs="*", default=["1f1b", "zb-h1", "zb-v"])
    parser.add_argument("--model", choices=["mlp", "transformer", "chain"], default="mlp")
    parser.add_argument("--first", action="store_true", help="only the check of the first step")
    parser.add_argument("--sentinels", action="store_true", help="only the checks of later steps")
    parser.add_argument("--loss", action="store_true", help="only the comparison of the loss")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import drumline as dl

    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes]
    if args.sentinels:
        found = sentinels(args, sizes)
        if args.json:
            args.json.write_text(json.dumps(found, indent=2))
        return
    if args.loss:
        print("D/rows    loss                     comparing it ms              the last block ms  times")
        for width, depth in sizes:
            losses(width, depth, args.rounds)
        return
    given = sizes, args.microbatches, list(args.schedules), args.rounds, args.model, args.first
    ranks, alone = (dl.launch(measure, *given, num_ranks=number) for number in (2, 1))
    if not args.first:
        print(
            "D/rows    schedule   step ms (quartiles)  quickest"
            "             watch us             batch us             agree us   share"
        )
    for each in [] if args.first else zip(*ranks, strict=True):
        row = max(each, key=share)
        case = f"{row['width']:4d}/{row['rows']:<4d} {row['schedule']:8s} {spread(row['step'], 1e3):>22s}"
        case += f"{quickest(row['step']) * 1e3:10.4g}"
        print(f"{case}{''.join(f'{spread(row[part], 1e6):>21s}' for part in PARTS)}  {share(row):6.2%}")
    print("\nD/rows    schedule processes seconds        the check adds to the step ms    one microbatch ms  times")
    for each in [*zip(*ranks, strict=True), *zip(*alone, strict=True)]:
        for part in ("", " processor"):
            row = max(each, key=lambda value: statistics.median(value["checked" + part]))
            case = f"{row['width']:4d}/{row['rows']:<4d} {row['schedule']:8s} {len(each):9d}"
            print(f"{case} {part.strip() or 'wall':9s} {first_row(row, part)}")
    later = [] if args.first else sentinels(args, sizes)
    if args.json:
        args.json.write_text(json.dumps([ranks, alone, later], indent=2))


if __name__ == "__main__":
    main()
