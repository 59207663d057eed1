"""Compiled stages against plain ones on CPU ranks of one machine, and what torch's own schedules make of them.

    python benchmarks/compile.py [--rounds 15] [--sizes 64x64 ...] [--json FILE]

Two ranks, one thread each, 8 blocks with a layer norm, a gated linear layer and a residual, M = 8. The contenders take
turns, step by step, in one run; a step is timed from a barrier to the end of the last rank. Printed: medians, and the
ratio of compiled to plain of the same round with its quartiles; the same for the processor seconds of rank 0, which
other work on the machine disturbs less; how long the first, compiling step took; and how far the gradients of compiled
and plain lie apart. Below that, torch.distributed.pipelining with the same blocks compiled: what came of it.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

SCHEDULES = ("1f1b", "zb-h1")
SIZES = ("64x64", "256x64")
BLOCKS = 8
MICROBATCHES = 8


def blocks(width: int) -> Any:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.into = nn.LayerNorm(width), nn.Linear(width, 2 * width)
            self.out = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            value, gate = self.into(self.norm(x)).chunk(2, -1)
            made: Tensor = x + self.out(value * functional.silu(gate))
            return made

    torch.manual_seed(0)
    return nn.Sequential(*(Gated() for _ in range(BLOCKS)))


def measure(width: int, rows: int, rounds: int) -> list[dict[str, Any]]:
    """Run our contenders on this rank."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    import drumline as dl

    model = blocks(width)
    x, y = torch.randn(MICROBATCHES * rows, width), torch.randn(MICROBATCHES * rows, width)
    contenders: dict[tuple[str, str], Any] = {}
    for name in SCHEDULES:
        for how, choice in (("plain", False), ("compiled", True)):
            contenders[name, how] = dl.Pipeline(
                copy.deepcopy(model),
                loss_fn=functional.mse_loss,
                schedule=name,
                num_microbatches=MICROBATCHES,
                compile=choice,
                timeout=1800,
            )
    seconds: dict[tuple[str, str], list[float]] = {contender: [] for contender in contenders}
    processor: dict[tuple[str, str], list[float]] = {contender: [] for contender in contenders}
    gradients: dict[tuple[str, str], dict[str, Any]] = {}
    first: dict[tuple[str, str], float] = {}
    for turn in range(rounds + 2):
        for pair, pipe in contenders.items():
            dist.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            pipe.step(x, target=y)
            pipe.settle()
            took_cpu = time.process_time() - start_cpu
            dist.barrier()
            took = time.perf_counter() - start
            if turn == 0:
                first[pair] = took
                gradients[pair] = {name: parameter.grad for name, parameter in pipe.named_parameters()}
            if turn >= 2:
                seconds[pair].append(took)
                processor[pair].append(took_cpu)
            pipe.zero_grad()
    found = []
    for name in SCHEDULES:
        expected = gradients[name, "plain"]
        found.append(
            {
                "schedule": name,
                "wall": summary(seconds[name, "plain"], seconds[name, "compiled"]),
                "processor": summary(processor[name, "plain"], processor[name, "compiled"]),
                "first_step_s": first[name, "compiled"],
                "gradients_within": max(
                    float((gradient - expected[key]).norm() / expected[key].norm())
                    for key, gradient in gradients[name, "compiled"].items()
                ),
            }
        )
    return found


def summary(plain: list[float], compiled: list[float]) -> dict[str, float]:
    """Return medians, and the ratio of the same round with its quartiles."""
    ratios = sorted(mine / other for mine, other in zip(compiled, plain, strict=True))
    return {
        "plain_ms": statistics.median(plain) * 1e3,
        "compiled_ms": statistics.median(compiled) * 1e3,
        "ratio": statistics.median(ratios),
        "low": ratios[len(ratios) // 4],
        "high": ratios[3 * len(ratios) // 4],
    }


def torch_step(kind: str, width: int, rows: int, port: int) -> str:
    """Run one step of torch's with compiled stages, all on one rank; return what came of it, in words."""
    import logging

    import torch
    import torch.distributed as distributed
    from torch import nn
    from torch._functorch import config
    from torch.distributed.pipelining import PipelineStage, schedules
    from torch.nn import functional

    import drumline as dl

    dist: Any = distributed
    logging.disable()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    config.donated_buffer = "donated" not in kind
    model, plain = blocks(width), blocks(width)
    halves = [nn.Sequential(*model[: BLOCKS // 2]), nn.Sequential(*model[BLOCKS // 2 :])]
    program = dl.generate("interleaved-zb", num_ranks=1, num_microbatches=MICROBATCHES, stages_per_rank=2)
    x = torch.randn(MICROBATCHES * rows, width)
    try:
        compiled: list[Any] = [torch.compile(half) for half in halves]
        stages = [PipelineStage(value, at, 2, torch.device("cpu")) for at, value in enumerate(compiled)]
        runtime: Any = schedules
        if kind == "its own class":
            runtime = runtime.ScheduleInterleavedZeroBubble(stages, MICROBATCHES, loss_fn=functional.mse_loss)
        else:
            runtime = runtime._PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=functional.mse_loss)
            with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
                file.write(dl.for_torch(program))
                file.flush()
                runtime._load_csv(file.name, format="compute_only")
        runtime.step(x, target=torch.zeros_like(x))
    except Exception as error:
        while isinstance(error.__cause__, Exception):
            error = error.__cause__
        return f"{type(error).__name__}: {' '.join(str(error).split()):.100}"
    finally:
        dist.destroy_process_group()
        logging.disable(logging.NOTSET)
    for part in x.chunk(MICROBATCHES):
        torch.autograd.backward(functional.mse_loss(plain(part), torch.zeros_like(part)) / MICROBATCHES)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    off = max(float((value.grad - other.grad).norm() / other.grad.norm()) for value, other in pairs)
    return f"runs; gradients within {off:.1e}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", nargs="*", default=SIZES)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import drumline as dl

    print(f"two ranks, one thread each, M = {MICROBATCHES}; ms a step")
    print("D/rows   schedule                plain  compiled        ratio (quartiles)   first step   gradients within")
    found = []
    for size in args.sizes:
        width, depth = map(int, size.split("x"))
        for row in dl.launch(measure, width, depth, args.rounds, num_ranks=2)[0]:
            found.append({"size": size, **row})
            for kind in ("wall", "processor"):
                value = row[kind]
                title = f"{width:4d}/{depth:<4d}{row['schedule']:9s}" if kind == "wall" else ""
                more = f"   {row['first_step_s']:8.1f} s   {row['gradients_within']:.1e}" if title else ""
                print(
                    f"{title:18s}{kind:11s} {value['plain_ms']:7.2f}   {value['compiled_ms']:7.2f}"
                    f"        {value['ratio']:.2f} ({value['low']:.2f} to {value['high']:.2f}){more}"
                )
    print("torch.distributed.pipelining, a zero-bubble program with compiled stages")
    theirs = {}
    for number, kind in enumerate(("its own class", "from our CSV", "from our CSV, donated buffers off")):
        theirs[kind] = torch_step(kind, 64, 64, port=29650 + number)
        print(f"   {kind:34s} {theirs[kind]}")
    if args.json:
        args.json.write_text(json.dumps({"rows": found, "torch": theirs}, indent=2))


if __name__ == "__main__":
    main()
