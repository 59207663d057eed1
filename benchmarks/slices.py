"""Slices of sequences against 1f1b: the rate at few microbatches, the bytes that ranks hold, and one GPU.

    python benchmarks/slices.py [speed] [stash] [--rounds 7] [--tokens 2048] [--slices 8] [--width 1024] [--json FILE]
    python benchmarks/slices.py gpu [--tokens 131072] [--slices 8] [--rounds 3] [--json FILE]

`speed`: two ranks on two cores, one thread each; a Llama-shaped model; 1f1b with whole sequences and with slices take
turns in one run, for M = 1 and 2. Printed beside the ratio: the ceiling, simulated from what the slices of the run took
(median of each (stage, op, slice)), and how far the measured step is from the simulated one.

`stash`: bytes that the ranks of 2 hold for backwards, weighed, with those that `peak_bytes` counts from the rows.

`gpu`: four ranks take turns on one GPU. The loss is computed in chunks on both sides, and nothing is recomputed. First
the gradients of short sequences are compared; then steps take turns, and the peak is that of the allocator, without
what is allocated between two steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from measure import Stolen, machine

VOCABULARY = 2048
BARS = {1: 1.45, 2: 1.15}


def llama(width: int, layers: int, heads: int, groups: int) -> Any:
    """Return a Llama-shaped model that takes positions and returns what its loss makes logits of."""
    import torch
    from torch import nn
    from torch.nn import functional

    size = width // heads

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
            self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
            self.k, self.v = (nn.Linear(width, groups * size, bias=False) for _ in range(2))
            hidden = int(width * 8 / 3) // 64 * 64
            self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
            self.down = nn.Linear(hidden, width, bias=False)

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            def turned(value: Any) -> Any:
                first, second = value.chunk(2, -1)
                return value * cos + torch.cat((-second, first), -1) * sin

            h = self.before(x)
            q, k, v = (part(h).unflatten(-1, (-1, size)).transpose(1, 2) for part in (self.q, self.k, self.v))
            attended = functional.scaled_dot_product_attention(
                turned(q), turned(k), v, is_causal=True, enable_gqa=groups != heads
            )
            x = x + self.out(attended.transpose(1, 2).flatten(2))
            h = self.between(x)
            return x + self.down(functional.silu(self.gate(h)) * self.up(h))

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, width)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.norm = nn.RMSNorm(width)
            self.register_buffer("speeds", 1e4 ** -(torch.arange(0, size, 2).float() / size), persistent=False)

        def forward(self, tokens: Any, positions: Any) -> Any:
            x = self.embedding(tokens)
            angles = positions[:, None, :, None].float() * self.speeds
            angles = torch.cat((angles, angles), -1)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            for layer in self.layers:
                x = layer(x, cos, sin)
            return self.norm(x)

    torch.manual_seed(0)
    return Llama()


def chunked_loss(width: int, chunk: int) -> Any:
    """Return a loss with the head in it, which makes logits of so many tokens at a time and keeps none."""
    import torch
    from torch import nn
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(width, VOCABULARY, bias=False)

        def part(self, h: Any, target: Any) -> Any:
            return functional.cross_entropy(self.head(h).float(), target, reduction="sum")

        def forward(self, h: Any, target: Any) -> Any:
            pairs = zip(h.flatten(0, 1).split(chunk), target.flatten().split(chunk), strict=True)
            total = sum(checkpoint(self.part, *pair, use_reentrant=False) for pair in pairs)
            return total / target.numel()

    torch.manual_seed(1)
    return Loss()


def text(rows: int, tokens: int, device: str = "cpu") -> tuple[dict[str, Any], Any]:
    """Return a batch and the tokens after each."""
    import torch

    ids = torch.randint(VOCABULARY, (rows, tokens + 1), generator=torch.Generator().manual_seed(2)).to(device)
    positions = torch.arange(tokens, device=device).expand(rows, -1)
    return {"tokens": ids[:, :-1].contiguous(), "positions": positions}, ids[:, 1:].contiguous()


def pipeline(arguments: Any, slices: int, count: int, tokens: int, **settings: Any) -> Any:
    """Return a pipeline of the model; without slices, the same whole."""
    import torch

    import drumline as dl

    model = llama(arguments.width, arguments.layers, arguments.heads, arguments.groups)
    loss = chunked_loss(arguments.width, arguments.chunk)
    example, _ = text(count, min(tokens, 256))
    ranks = settings.get("num_ranks", 2)
    each = arguments.layers // ranks
    cut = [each + (rank == 0) + (rank == ranks - 1) for rank in range(ranks)]  # with the embedding, and the last norm
    kind = torch.bfloat16 if arguments.part == ["gpu"] else torch.float32
    if settings.get("device") == "cuda":
        model, loss, example = model.cuda(), loss.cuda(), {name: value.cuda() for name, value in example.items()}
    return dl.Pipeline(
        model.to(kind), loss_fn=loss.to(kind), loss_weight=lambda target: target.numel(), schedule="1f1b",
        num_microbatches=count, slices=slices, example=example, balance=cut, check_model=False, **settings,
    )  # fmt: skip


def measured_costs(pipe: Any, slices: int, count: int) -> Any:
    """Return the seconds of every action of the last step."""
    return {
        (span.action.stage, str(span.action.op), span.action.microbatch): span.end - span.start
        for span in pipe.timeline().spans()
        if span.action.is_compute
    }


def simulated(program: Any, seconds: dict[Any, float], slices: int) -> float:
    """Return the step of a program in which each (stage, op, slice) takes what it took, and messages nothing."""
    from drumline.core.costs import Costs
    from drumline.core.simulate.simulate import simulate

    by_slice: dict[Any, list[float]] = {}
    for (stage, op, unit), taken in seconds.items():
        by_slice.setdefault((stage, op, unit % slices), []).append(taken)
    import numpy as np

    actions = [part for row in program.compute_only().rows for action in row for part in action.work]
    each = [statistics.median(by_slice[part.stage, str(part.op), part.microbatch % slices]) for part in actions]
    unit = Costs(forward=1.0, backward=1.0, slice_factor=1.0)
    return float(simulate(program.compute_only(), unit, factors=np.array(each)).makespan)


def on_ranks(arguments: Any) -> list[dict[str, Any]]:
    """Run steps of both kinds in turn on this rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    found = []
    for count in (1, 2):
        batch, target = text(count, arguments.tokens)
        pipes = {each: pipeline(arguments, each, count, arguments.tokens) for each in (1, arguments.slices)}
        seconds: dict[int, list[float]] = {each: [] for each in pipes}
        actions: dict[int, dict[Any, list[float]]] = {each: {} for each in pipes}
        for turn in range(arguments.rounds + 2):
            for each, pipe in pipes.items():
                if dist.is_initialized():
                    dist.barrier()
                start = time.perf_counter()
                pipe.step(**batch, target=target).loss.item()
                took = time.perf_counter() - start
                pipe.zero_grad()
                if turn > 1:
                    seconds[each].append(took)
                    for key, value in measured_costs(pipe, each, count).items():
                        actions[each].setdefault(key, []).append(value)
        row: dict[str, Any] = {"microbatches": count}
        for name, each in (("whole", 1), ("sliced", arguments.slices)):
            typical = {key: statistics.median(values) for key, values in actions[each].items()}
            row[name] = statistics.median(seconds[each])
            row[f"{name}_simulated"] = simulated(pipes[each].program, typical, each)
        ratios = sorted(a / b for a, b in zip(seconds[1], seconds[arguments.slices], strict=True))
        row |= {"ratio": statistics.median(ratios), "ratios": ratios}
        row["ceiling"] = row["whole_simulated"] / row["sliced_simulated"]
        found.append(row)
        for pipe in pipes.values():
            pipe.close()
    return found


def speed(arguments: Any) -> list[dict[str, Any]]:
    """Print and return what slices gain on two ranks."""
    import drumline as dl

    stolen = Stolen()
    rows: list[dict[str, Any]] = dl.launch(on_ranks, arguments, num_ranks=2)[0]
    print(f"{machine(2)}; {stolen.share:.0%} of the cores' time went to other machines")
    print(f"{arguments.layers} layers, width {arguments.width}, {arguments.tokens} tokens, {arguments.slices} slices")
    for row in rows:
        bar = BARS[row["microbatches"]]
        gap = row["sliced"] / row["sliced_simulated"] - 1
        print(
            f"M = {row['microbatches']}: {row['whole']:.3f} s whole, {row['sliced']:.3f} s in slices,"
            f" x{row['ratio']:.2f} ({row['ratios'][0]:.2f} to {row['ratios'][-1]:.2f}), bar {bar};"
            f" ceiling x{row['ceiling']:.2f}; {gap:+.1%} of the simulated step"
        )
    return rows


def stash(arguments: Any) -> list[dict[str, Any]]:
    """Print and return the bytes that both ranks hold, weighed and counted."""
    from drumline.core.slices.row_bytes import peak_bytes

    rows = []
    for count in (1, 2, 4):
        tokens = arguments.tokens // 4
        batch, target = text(count, tokens)
        peaks, programs = {}, {}
        for each in (1, arguments.slices):
            pipe = pipeline(
                arguments, each, count, tokens, num_ranks=2, transport="in-process", record=True, weigh=True
            )
            for _ in range(2):
                pipe.step(**batch, target=target).loss.item()
                pipe.zero_grad()
            peaks[each] = [max(held) for held in pipe.timeline().stash]
            programs[each] = pipe.program
        owed = 2 * tokens * arguments.width * arguments.groups // arguments.heads * 4 * arguments.layers // 2
        for rank in range(2):
            # What one whole microbatch holds on this rank, from the run without slices.
            held = sum(action.op.value == "F" for action in programs[1].rows[rank][: 2 - rank]) if count > 1 else 1
            unit = peaks[1][rank] / held / arguments.slices
            row = programs[arguments.slices].compute_only().rows[rank]
            counted = peak_bytes(row, arguments.slices, unit, owed)
            ratio, gap = peaks[arguments.slices][rank] / peaks[1][rank], peaks[arguments.slices][rank] / counted - 1
            rows.append({"microbatches": count, "rank": rank, "ratio": ratio, "gap": gap, "bytes": peaks})
            print(f"M = {count}, rank {rank}: {ratio:.3f} of 1f1b's bytes, {gap:+.2%} of what the row says")
    return rows


def gpu(arguments: Any) -> list[dict[str, Any]]:
    """Print and return peaks and times of four ranks that take turns on one GPU."""
    import torch

    def both(tokens: int) -> dict[int, Any]:
        how = {"num_ranks": 4, "transport": "in-process", "device": "cuda", "record": False}
        return {
            each: pipeline(arguments, each, arguments.microbatches, tokens, **how) for each in (1, arguments.slices)
        }

    batch, target = text(arguments.microbatches, 2048, "cuda")
    gradients = {}
    for each, pipe in both(2048).items():
        loss = pipe.step(**batch, target=target).loss.item()
        gradients[each] = {
            name: param.grad.float() for name, param in pipe.named_parameters() if param.grad is not None
        }
        print(f"{each} slices of 2048 tokens: loss {loss:.6f}")
        pipe.close()
    apart = max(
        float((gradients[arguments.slices][name] - wanted).norm() / wanted.norm())
        for name, wanted in gradients[1].items()
    )
    print(f"largest difference of a gradient in bf16: {apart:.2e} of its norm")
    assert apart < 5e-2, "slices have other gradients"
    del gradients
    batch, target = text(arguments.microbatches, arguments.tokens, "cuda")
    pipes = both(arguments.tokens)
    seconds: dict[int, list[float]] = {each: [] for each in pipes}
    peaks: dict[int, int] = {}
    for turn in range(arguments.rounds + 1):
        for each, pipe in pipes.items():
            pipe.zero_grad()
            if turn == 0:  # gradients exist before anything is measured
                pipe.step(**batch, target=target).loss.item()
                continue
            pipe.step(**{key: value[:, :4096] for key, value in batch.items()}, target=target[:, :4096]).loss.item()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            pipe.step(**batch, target=target).loss.item()
            torch.cuda.synchronize()
            seconds[each].append(time.perf_counter() - start)
            peaks[each] = torch.cuda.max_memory_allocated() - before
    ratios = sorted(b / a for a, b in zip(seconds[1], seconds[arguments.slices], strict=True))
    less = 1 - peaks[arguments.slices] / peaks[1]
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: M = {arguments.microbatches},"
        f" {arguments.tokens} tokens, {arguments.slices} slices, 4 ranks, width {arguments.width},"
        f" {arguments.layers} layers"
    )
    print(
        f"peak {peaks[1] / 2**30:.2f} GiB whole, {peaks[arguments.slices] / 2**30:.2f} GiB in slices: {less:.1%} less"
    )
    print(
        f"step {statistics.median(seconds[1]):.3f} s whole, {statistics.median(seconds[arguments.slices]):.3f} s in"
        f" slices: x{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
    )
    return [{"peaks": peaks, "seconds": seconds, "less": less, "ratio": statistics.median(ratios), "apart": apart}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", choices=["speed", "stash", "gpu", []], default=["speed", "stash"])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--slices", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=4, help="on a GPU")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--groups", type=int, default=8, help="heads of keys and values")
    parser.add_argument("--chunk", type=int, default=256, help="tokens whose logits exist at once")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    on_gpu = arguments.part == ["gpu"]
    arguments.rounds = arguments.rounds or (3 if on_gpu else 7)
    arguments.tokens = arguments.tokens or (131_072 if on_gpu else 2048)
    if on_gpu:
        arguments.chunk, arguments.groups = max(arguments.chunk, 4096), min(arguments.groups, 2)
    found = {part: {"speed": speed, "stash": stash, "gpu": gpu}[part](arguments) for part in arguments.part}
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
