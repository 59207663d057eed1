"""What the executor costs on one GPU: several stages on one rank against plain gradient accumulation.

    python benchmarks/runtime_gpu.py [--steps 30] [--part all|one-rank|two-ranks] [--json FILE]

Four transformers in bf16. Every round runs one step of each contender in turn (plain accumulation, our schedules,
torch's own), so that all see the same machine; medians of ratios to the plain step of the same round, with their
quartiles. Captured steps are compared with a captured plain step only. Gradients are checked first, in bf16 and fp32.

Then two ranks that take turns in this process: what each computes between two messages captured as a CUDA graph,
against the same program action by action, again in turn within every round.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl

# width, heads, layers, tokens, rows of a microbatch, microbatches, stages
CONFIGURATIONS = (
    (256, 4, 8, 128, 2, 16, 2),
    (1024, 16, 16, 1024, 2, 8, 2),
    (1024, 16, 16, 1024, 2, 8, 4),
    (2048, 16, 16, 2048, 2, 8, 4),
)
OURS = ("looped-bfs", "interleaved-1f1b", "interleaved-zb", "zb-v")
THEIRS = {
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
}


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then transform."""
        rows, tokens, width = x.shape
        shaped = self.qkv(self.norm1(x)).view(rows, tokens, 3, self.heads, width // self.heads)
        q, k, v = shaped.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, tokens, width))
        made: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return made


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output.float(), target.float())


def plain_step(net: nn.Module, x: Tensor, y: Tensor, microbatches: int) -> None:
    for a, b in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        torch.autograd.backward(loss_fn(net(a), b) / microbatches)


def clear(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.grad = None


def build(size: tuple[int, ...], dtype: torch.dtype) -> tuple[nn.Sequential, Tensor, Tensor]:
    width, heads, layers, tokens, rows, microbatches, _ = size
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(width, heads) for _ in range(layers))).to("cuda", dtype)
    x = torch.randn(microbatches * rows, tokens, width, device="cuda", dtype=dtype)
    return net, x, torch.randn_like(x)


def ours(net: nn.Sequential, name: str, size: tuple[int, ...], **settings: Any) -> dl.Pipeline:
    *_, microbatches, stages = size
    return dl.Pipeline(
        net,
        loss_fn=loss_fn,
        schedule=name,
        num_microbatches=microbatches,
        stages_per_rank=stages,
        num_ranks=1,
        **settings,
    )


def names_for(stages: int) -> list[str]:
    return [name for name in OURS if name != "zb-v" or stages == 2]


def difference(net: nn.Module, expected: dict[str, Tensor]) -> float:
    worst = 0.0
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        gap = (parameter.grad.float() - expected[name].float()).norm() / expected[name].float().norm()
        worst = max(worst, float(gap))
    return worst


def check(size: tuple[int, ...]) -> dict[str, float]:
    """Return the largest relative gradient difference from the plain step, per dtype and schedule."""
    small = (*size[:2], 4, min(size[3], 256), *size[4:])
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        net, x, y = build(small, dtype)
        plain_step(net, x, y, size[5])
        expected = {name: param.grad.clone() for name, param in net.named_parameters() if param.grad is not None}
        for name in names_for(size[6]):
            for capture in (False, True):
                clear(net)
                pipe = ours(net, name, small, capture=capture)
                for _ in range(3 if capture else 1):
                    clear(net)
                    pipe.step(x, target=y)
                pipe.settle()
                what = f"{name}{' captured' if capture else ''}, {str(dtype).removeprefix('torch.')}"
                found[what] = difference(net, expected)
    limit = {"float32": 1e-5, "bfloat16": 2e-2}
    for what, gap in found.items():
        assert gap <= limit[what.split(", ")[1]], (what, gap)
    return found


def timed(step: Callable[[], None], net: nn.Module) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    clear(net)
    return seconds


def captured_plain(net: nn.Sequential, x: Tensor, y: Tensor, microbatches: int) -> Callable[[], None]:
    gradients = [torch.zeros_like(param) for param in net.parameters()]

    def attach() -> None:
        torch._foreach_zero_(gradients)
        for param, gradient in zip(net.parameters(), gradients, strict=True):
            param.grad = gradient

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            attach()
            plain_step(net, x, y, microbatches)
    torch.cuda.current_stream().wait_stream(side)
    attach()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plain_step(net, x, y, microbatches)

    def step() -> None:
        attach()
        graph.replay()

    return step


def theirs(net: nn.Sequential, name: str, size: tuple[int, ...], x: Tensor, y: Tensor) -> Callable[[], None]:
    from torch.distributed import pipelining

    *_, microbatches, stages = size
    each = len(net) // stages
    parts = [
        pipelining.PipelineStage(nn.Sequential(*list(net)[i * each : (i + 1) * each]), i, stages, torch.device("cuda"))
        for i in range(stages)
    ]
    schedule = getattr(pipelining.schedules, THEIRS[name])(parts, microbatches, loss_fn=loss_fn)

    def step() -> None:
        schedule.step(x, target=y, losses=[])

    return step


def stepping(pipe: dl.Pipeline, x: Tensor, y: Tensor) -> Callable[[], None]:
    def step() -> None:
        pipe.step(x, target=y)
        pipe.settle()

    return step


def measure(size: tuple[int, ...], steps: int) -> list[dict[str, Any]]:
    net, x, y = build(size, torch.bfloat16)
    microbatches, stages = size[5:]
    contenders: dict[tuple[str, str], Callable[[], None]] = {
        ("plain", "eager"): lambda: plain_step(net, x, y, microbatches),
        ("plain", "captured"): captured_plain(net, x, y, microbatches),
    }
    clear(net)
    for name in names_for(stages):
        contenders[name, "eager"] = stepping(ours(net, name, size), x, y)
        contenders[name, "captured"] = stepping(ours(net, name, size, capture=True), x, y)
        contenders[name, "torch"] = theirs(net, name, size, x, y)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in contenders}
    peaks: dict[tuple[str, str], float] = {}
    for key in list(contenders):
        try:
            for _ in range(3):
                torch.cuda.reset_peak_memory_stats()
                timed(contenders[key], net)
                peaks[key] = torch.cuda.max_memory_allocated() / 2**30
        except Exception as error:
            if key[1] != "torch":
                raise
            print(f"   torch's {key[0]} fails: {str(error)[:160]}")
            del contenders[key], seconds[key]
    for _ in range(steps):
        for key, step in contenders.items():
            seconds[key].append(timed(step, net))
    rows = []
    for (name, how), each in seconds.items():
        base = seconds["plain", "captured" if how == "captured" else "eager"]
        ratios = sorted(mine / plain for mine, plain in zip(each, base, strict=True))
        rows.append(
            {
                "schedule": name,
                "how": how,
                "milliseconds": statistics.median(each) * 1e3,
                "ratio": statistics.median(ratios),
                "low": ratios[len(ratios) // 4],
                "high": ratios[(3 * len(ratios)) // 4],
                "peak_gib": peaks[name, how],
            }
        )
    return rows


def print_one_rank(gradients: dict[str, float], rows: list[dict[str, Any]]) -> None:
    for dtype in ("float32", "bfloat16"):
        gap = max(gap for what, gap in gradients.items() if what.endswith(dtype))
        print(f"   gradients against plain, {dtype}: within {gap:.1e}")
    for row in rows:
        print(
            f"   {row['schedule']:17s} {row['how']:9s} {row['milliseconds']:9.2f} ms  x{row['ratio']:.3f}"
            f"  ({row['low']:.3f} to {row['high']:.3f})  peak {row['peak_gib']:.2f} GiB",
            flush=True,
        )


def two_ranks(size: tuple[int, ...], steps: int) -> list[dict[str, Any]]:
    """Return what captured stretches take of the same program's time action by action, on two ranks."""
    net, x, y = build(size, torch.bfloat16)
    *_, microbatches, stages = size
    rows = []
    for name, each in (("1f1b", 1), ("zb-h1", 1), ("interleaved-1f1b", stages // 2), ("zb-v", 2)):
        if name == "interleaved-1f1b" and each < 2:
            continue
        settings: dict[str, Any] = {"schedule": name, "num_microbatches": microbatches, "stages_per_rank": each}
        pipes = {
            how: dl.Pipeline(net, loss_fn=loss_fn, num_ranks=2, capture=how == "captured", **settings)
            for how in ("eager", "captured")
        }
        stepped = {how: stepping(pipe, x, y) for how, pipe in pipes.items()}
        stepped["eager"]()
        expected = {key: param.grad.clone() for key, param in net.named_parameters() if param.grad is not None}
        clear(net)
        peaks = {}
        for how, step in stepped.items():
            for _ in range(3):
                torch.cuda.reset_peak_memory_stats()
                timed(step, net)
            peaks[how] = torch.cuda.max_memory_allocated() / 2**30
        stepped["captured"]()
        gap = difference(net, expected)
        assert gap <= 2e-2, (name, gap)
        clear(net)
        seconds: dict[str, list[float]] = {how: [] for how in stepped}
        for _ in range(steps):
            for how, step in stepped.items():
                seconds[how].append(timed(step, net))
        ratios = sorted(mine / plain for mine, plain in zip(seconds["captured"], seconds["eager"], strict=True))
        rows.append(
            {
                "schedule": name,
                "how": "two ranks",
                "eager_milliseconds": statistics.median(seconds["eager"]) * 1e3,
                "captured_milliseconds": statistics.median(seconds["captured"]) * 1e3,
                "ratio": statistics.median(ratios),
                "low": ratios[len(ratios) // 4],
                "high": ratios[(3 * len(ratios)) // 4],
                "gradients": gap,
                "peak_gib": peaks,
            }
        )
        del pipes, stepped
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def print_two_ranks(rows: list[dict[str, Any]]) -> None:
    print("   two ranks taking turns: captured stretches against the same program action by action")
    for row in rows:
        print(
            f"   {row['schedule']:17s} eager {row['eager_milliseconds']:8.2f} ms  "
            f"captured {row['captured_milliseconds']:8.2f} ms  x{row['ratio']:.3f}"
            f"  ({row['low']:.3f} to {row['high']:.3f})  gradients within {row['gradients']:.1e}"
            f"  peak {row['peak_gib']['eager']:.2f} and {row['peak_gib']['captured']:.2f} GiB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", type=int, nargs="*", default=range(len(CONFIGURATIONS)))
    parser.add_argument("--part", choices=("all", "one-rank", "two-ranks"), default="all")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("nccl", rank=0, world_size=1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    written = []
    for number in args.only:
        size = CONFIGURATIONS[number]
        print(f"d={size[0]} L={size[2]} T={size[3]} rows={size[4]} M={size[5]} stages={size[6]}")
        found: dict[str, Any] = {"size": size}
        if args.part != "two-ranks":
            found |= {"gradients": check(size), "rows": measure(size, args.steps)}
            print_one_rank(found["gradients"], found["rows"])
            gc.collect()
            torch.cuda.empty_cache()
        if args.part != "one-rank":
            found["two_ranks"] = two_ranks(size, args.steps)
            print_two_ranks(found["two_ranks"])
            gc.collect()
            torch.cuda.empty_cache()
        written.append(found)
    if args.json:
        args.json.write_text(json.dumps(written, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
