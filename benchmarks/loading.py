"""What a rank needs to load its stages, under a limit that the whole model breaks.

    python benchmarks/loading.py [--blocks 72] [--width 2048] [--schedule 1f1b] [--json FILE]

The model is a chain of Linear(2048, 2048) + Tanh in fp32, 1.2 GB, built on the meta device. Its values come from a
folder of safetensors, written here tensor by tensor, or from its modules' initialisers. Each rank lowers its own limit
on private memory (RLIMIT_DATA) to what it uses after its imports and a share of the whole model's bytes, then makes the
pipeline and takes a step. One process with the same limit is the counter-proof. Growth is that of the peak resident set
(VmHWM, reset before) over the resident set before. Linux only.
"""

from __future__ import annotations

import argparse
import json
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

SHARDS = 4
MIB = 2**20


def write(folder: Path, blocks: int, width: int) -> None:
    """Write the model's weights, holding one tensor at a time."""
    import torch

    names = [f"{block}.0.{kind}" for block in range(blocks) for kind in ("weight", "bias")]
    shapes = {name: [width, width] if name.endswith("weight") else [width] for name in names}
    where = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        mine = names[len(names) * shard // SHARDS : len(names) * (shard + 1) // SHARDS]
        header, end = {}, 0
        for name in mine:
            start, end = end, end + 4 * width * (width if len(shapes[name]) == 2 else 1)
            header[name] = {"dtype": "F32", "shape": shapes[name], "data_offsets": [start, end]}
            where[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as target:
            target.write(struct.pack("<Q", len(text)) + text)
            for name in mine:
                target.write((torch.randn(shapes[name]) / width**0.5).numpy().data)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def used(what: str) -> int:
    """Return one of this process's counts of memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


def limited(num_bytes: int) -> Any:
    """Let this process use that many bytes of private memory more; keep what is returned.

    An allocator may have reserved memory ahead: that is taken first, and never touched.
    """
    import resource

    import torch

    ballast = []
    resource.setrlimit(resource.RLIMIT_DATA, (used("VmData"), resource.RLIM_INFINITY))
    for size in (2**26, 2**24, 2**22, 2**20):
        try:
            while True:
                ballast.append(torch.empty(size, dtype=torch.uint8))
        except RuntimeError:
            continue
    resource.setrlimit(resource.RLIMIT_DATA, (used("VmData") + num_bytes, resource.RLIM_INFINITY))
    return ballast


def measure(blocks: int, width: int, folder: Path | None, limit: int, *, train: bool, schedule: str) -> dict[str, Any]:
    """Make the pipeline and take a step on this rank; `limit` is in bytes beyond what is used before."""
    import torch
    from torch import nn

    import drumline as dl

    # What is imported and set up once (the pipeline, the library of matrix products) is not counted.
    mse = nn.functional.mse_loss
    small = dl.Pipeline([nn.Linear(64, 64)], loss_fn=mse, num_microbatches=1, transport="in-process")
    small.step(torch.randn(2, 64), target=torch.randn(2, 64))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks)))
    x = torch.randn(8, width)
    ballast = limited(limit)
    Path("/proc/self/clear_refs").write_text("5")
    before, begin = used("VmRSS"), time.perf_counter()
    found: dict[str, Any] = {"whole": sum(one.nbytes for one in model.parameters()), "failed": ""}
    try:
        pipe = dl.Pipeline(model, loss_fn=mse, schedule=schedule, num_microbatches=4, weights=folder)
        found["seconds"] = time.perf_counter() - begin
        found["own"] = sum(one.nbytes for one in pipe.parameters())
        found["made"] = used("VmHWM") - before
        run = pipe.step if train else pipe.eval_step
        assert run(x, target=x).loss is not None
        found["stepped"] = used("VmHWM") - before
        pipe.close()
    except (RuntimeError, MemoryError) as error:
        found["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
    del ballast
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=72)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import drumline as dl

    whole = 4 * args.blocks * (args.width**2 + args.width)
    rows = []
    print(f"{whole / MIB:.0f} MiB of weights, {args.schedule}; MiB a rank")
    print("values from   step   ranks  limit  own weights  peak growth: made  with a step  seconds to make")
    with tempfile.TemporaryDirectory() as made:
        write(Path(made), args.blocks, args.width)
        cases = [(2, False, 0.7), (1, False, 0.7), (4, True, 0.7), (1, True, 0.7), (2, True, 1.5), (1, True, 1.5)]
        for folder in (Path(made), None):
            for num_ranks, train, share in cases:
                limit = int(share * whole)
                settings = {"train": train, "schedule": args.schedule}
                ranks = dl.launch(
                    measure, args.blocks, args.width, folder, limit, num_ranks=num_ranks, kwargs=settings, timeout=600
                )
                rows.append(
                    {"ranks": num_ranks, "train": train, "limit": limit, "files": folder is not None, "each": ranks}
                )
                show(rows[-1])
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


def show(row: dict[str, Any]) -> None:
    """Print one case, one line a rank."""
    for each in row["each"]:
        start = f"{'files' if row['files'] else 'initialisers':12s}  {'train' if row['train'] else 'eval':5s}"
        start += f"  {row['ranks']:5d}  {row['limit'] / MIB:5.0f}"
        if each["failed"]:
            print(f"{start}  fails: {each['failed'][:70]}")
        else:
            own, made, stepped = (each[one] / MIB for one in ("own", "made", "stepped"))
            print(f"{start}  {own:11.0f}  {made:17.0f}  {stepped:11.0f}  {each['seconds']:15.1f}")


if __name__ == "__main__":
    main()
