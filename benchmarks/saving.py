"""What checkpoints cost a run: as a share of its time, and how long training stands still for one.

    python benchmarks/saving.py [--pairs 6] [--steps 50] [--rows 8] [--folder DIR] [--json FILE]

A byte-level GPT of about 10 million parameters with AdamW on two ranks, one thread each. Blocks of `--steps` steps take
turns: one ends with `pipe.save`, the next does not; the writing falls into the steps after it, so each block of a pair
ends with a wait for the checkpoint, inside of the time taken. Both the clock and the processor seconds of the process
are compared, pair by pair. Beside them, on each rank and in the same run:

    blocked        seconds for which `pipe.save` kept training from going on
    copy           a bare copy of the rank's state to memory that is there already
    synchronous    the same state written by safetensors' layout, with checksums and fsync, while training waits

The bars: under 2% of the time, blocked at most 3 x copy and at most a quarter of synchronous.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

WIDTH, LAYERS, LENGTH = 384, 6, 128


def gpt() -> Any:
    """Return a decoder of about 10 million parameters."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            rows, length, width = x.shape
            q, k, v = (
                value.view(rows, length, 6, width // 6).transpose(1, 2)
                for value in self.qkv(self.first(x)).chunk(3, -1)
            )
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
            made: Tensor = x + self.down(functional.gelu(self.up(self.second(x))))
            return made

    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(256, WIDTH), *(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 256))


def measure(folder: str, pairs: int, steps: int, rows: int) -> dict[str, Any]:
    """Run the pairs on this rank."""
    import torch
    from torch.nn import functional

    import drumline as dl
    from drumline.checkpoint.staging import StagedFile

    def loss(output: Any, wanted: Any) -> Any:
        return functional.cross_entropy(output.flatten(0, 1), wanted.flatten())

    pipe = dl.Pipeline(gpt(), loss_fn=loss, num_microbatches=4, schedule="1f1b", balance="even")
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (rows, LENGTH + 1), generator=generator)

    def block(save: bool) -> tuple[float, float, float]:
        torch.distributed.barrier()
        began, worked, blocked = time.perf_counter(), time.process_time(), 0.0
        saving = None
        for at in range(steps):
            pipe.step(tokens[:, :-1], target=tokens[:, 1:])
            optimizer.step()
            optimizer.zero_grad()
            if save and at == 0:
                saving = pipe.save(folder, keep=2)
                blocked = saving.seconds_blocked
        if saving is not None:
            saving.wait()
        return time.perf_counter() - began, time.process_time() - worked, blocked

    block(True)
    found = []
    for at in range(pairs):
        order = (True, False) if at % 2 else (False, True)
        found.append({save: block(save) for save in order})
    tensors = pipe._run.holdings.state_dict() | {
        f"{name}/{key}": item for name, each in optimizer.state_dict()["state"].items() for key, item in each.items()
    }
    staged, copies = StagedFile(), {name: torch.empty_like(tensor).zero_() for name, tensor in tensors.items()}
    copied, written = [], []
    for _ in range(7):
        began = time.perf_counter()
        torch._foreach_copy_(list(copies.values()), list(tensors.values()))
        copied.append(time.perf_counter() - began)
    for _ in range(3):
        torch.distributed.barrier()
        began = time.perf_counter()
        staged.take(tensors)
        staged.write(Path(folder) / f"synchronous-{pipe.rank}.safetensors")
        written.append(time.perf_counter() - began)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    parameters = sum(param.numel() for param in pipe.parameters())
    pipe.close()
    return {"pairs": found, "copy": copied, "synchronous": written, "bytes": size, "parameters": parameters}


def main() -> None:
    """Run and print."""
    import drumline as dl

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--folder", help="where checkpoints go (default: a temporary folder)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        ranks = dl.launch(measure, folder, args.pairs, args.steps, args.rows, num_ranks=2)
    print(
        f"{sum(item['parameters'] for item in ranks) / 1e6:.1f} million parameters, a checkpoint per {args.steps} steps"
    )
    for rank, entry in enumerate(ranks):
        clock, processor = (sorted(pair[True][at] / pair[False][at] - 1 for pair in entry["pairs"]) for at in (0, 1))
        blocked = statistics.median(pair[True][2] for pair in entry["pairs"])
        copy, synchronous = (statistics.median(entry[name]) for name in ("copy", "synchronous"))
        step = statistics.median(pair[False][0] for pair in entry["pairs"]) / args.steps
        print(
            f"rank {rank}: a step {step * 1e3:.0f} ms, {entry['bytes'] / 2**20:.0f} MiB of state\n"
            f"  by the clock    {statistics.median(clock):+.2%} ({clock[0]:+.2%} to {clock[-1]:+.2%})\n"
            f"  by processor    {statistics.median(processor):+.2%} ({processor[0]:+.2%} to {processor[-1]:+.2%})\n"
            f"  blocked         {blocked * 1e3:.1f} ms, {blocked / copy:.2f} x a copy of {copy * 1e3:.1f} ms,"
            f" {blocked / synchronous:.3f} x a synchronous save of {synchronous * 1e3:.0f} ms"
        )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(ranks, default=str, indent=1))


if __name__ == "__main__":
    main()
