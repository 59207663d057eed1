"""What a rank needs to load its stages, under a limit that the whole model breaks.

    python benchmarks/loading.py [--models chain llama] [--blocks 72] [--width 2048] [--schedule 1f1b] [--json FILE]

The models are built on the meta device: a chain of Linear(2048, 2048) + Tanh in fp32, 1.2 GB, and an unmodified Llama
of transformers of about the same size. Values come from a folder of safetensors, written here tensor by tensor, or from
the modules' initialisers. Each rank lowers its own limit on private memory (RLIMIT_DATA) to what it uses after its
imports and a share of the whole model's bytes, then makes the pipeline and takes a step. One process with the same
limit is the counter-proof. Growth is that of the peak resident set (VmHWM, reset before) over the resident set before.
Linux only.
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


def build(kind: str, blocks: int, width: int) -> Any:
    """Return a model without memory."""
    import torch
    from torch import nn

    with torch.device("meta"):
        if kind == "chain":
            return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks)))
        import transformers as hf

        transformers: Any = hf
        model, config = transformers.LlamaForCausalLM, transformers.LlamaConfig
        half = width // 2
        sizes = {"hidden_size": half, "intermediate_size": 8 * half // 3 // 64 * 64, "num_attention_heads": half // 32}
        return model(config(**sizes, num_hidden_layers=blocks // 3, vocab_size=1000))  # a layer is three blocks


def write(folder: Path, model: Any) -> None:
    """Write values for all of the model's tensors, holding one of them at a time."""
    import torch

    state = model.state_dict()
    names = list(state)
    where = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        mine = names[len(names) * shard // SHARDS : len(names) * (shard + 1) // SHARDS]
        header, end = {}, 0
        for name in mine:
            start, end = end, end + state[name].nbytes
            header[name] = {"dtype": "F32", "shape": list(state[name].shape), "data_offsets": [start, end]}
            where[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as target:
            target.write(struct.pack("<Q", len(text)) + text)
            for name in mine:
                target.write((torch.randn(state[name].shape) / state[name].shape[-1] ** 0.5).numpy().data)
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


def pipelined(kind: str, model: Any, width: int, schedule: str, **settings: Any) -> tuple[Any, Any]:
    """Return a pipeline, and a function that has its `step` or `eval_step` called with what the model takes."""
    import torch

    import drumline as dl

    settings |= {"schedule": schedule, "num_microbatches": 4}
    if kind == "chain":
        x = torch.zeros(8, width)
        pipe = dl.Pipeline(model, loss_fn=torch.nn.functional.mse_loss, balance="even", **settings)
        return pipe, lambda step: step(x, target=x)
    ids = torch.zeros(8, 16, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    return dl.Pipeline(model, example=batch, **settings), lambda step: step(**batch)


def measure(
    kind: str, blocks: int, width: int, folder: Path | None, limit: int, *, train: bool, schedule: str
) -> dict[str, Any]:
    """Make the pipeline and take a step on this rank; `limit` is in bytes beyond what is used before."""
    # What is imported and set up once (tracing, the library of matrix products) is not counted.
    small, take = pipelined(kind, build(kind, 24, 64), 64, schedule, transport="in-process", num_ranks=2)
    take(small.step)
    model = build(kind, blocks, width)
    ballast = limited(limit)
    Path("/proc/self/clear_refs").write_text("5")
    before, begin = used("VmRSS"), time.perf_counter()
    found: dict[str, Any] = {"whole": sum(param.nbytes for param in model.parameters()), "failed": ""}
    try:
        pipe, take = pipelined(kind, model, width, schedule, weights=folder)
        found["seconds"] = time.perf_counter() - begin
        found["own"] = sum(param.nbytes for param in pipe.parameters())
        found["made"] = used("VmHWM") - before
        assert take(pipe.step if train else pipe.eval_step).loss is not None
        found["stepped"] = used("VmHWM") - before
        pipe.close()
    except (RuntimeError, MemoryError) as error:
        found["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
    del ballast
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["chain", "llama"])
    parser.add_argument("--blocks", type=int, default=72)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for kind in args.models:
        model = build(kind, args.blocks, args.width)
        whole = sum(param.nbytes for param in model.parameters())
        print(f"{kind}, {whole / MIB:.0f} MiB of weights, {args.schedule}; MiB a rank")
        print("values from   step   ranks  limit  own weights  peak growth: made  with a step  seconds to make")
        with tempfile.TemporaryDirectory() as made:
            write(Path(made), model)
            for folder in (Path(made), None):
                rows += [show(case) for case in cases(kind, args, folder, whole)]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


def cases(kind: str, args: argparse.Namespace, folder: Path | None, whole: int) -> Any:
    """Yield the figures of some ranks and of one process under the same limit, one pair after the other."""
    import drumline as dl

    for num_ranks, train, share in ((2, False, 0.7), (4, True, 0.8)):
        for number in (num_ranks, 1):
            given = (kind, args.blocks, args.width, folder, int(share * whole))
            settings = {"train": train, "schedule": args.schedule}
            ranks = dl.launch(measure, *given, num_ranks=number, kwargs=settings, timeout=900)
            yield {
                "model": kind,
                "ranks": number,
                "train": train,
                "limit": given[-1],
                "files": folder is not None,
                "each": ranks,
            }


def show(row: dict[str, Any]) -> dict[str, Any]:
    """Print one case, one line a rank."""
    for each in row["each"]:
        start = f"{'files' if row['files'] else 'initialisers':12s}  {'train' if row['train'] else 'eval':5s}"
        start += f"  {row['ranks']:5d}  {row['limit'] / MIB:5.0f}"
        if each["failed"]:
            print(f"{start}  fails: {each['failed'][:70]}")
        else:
            own, made, stepped = (each[name] / MIB for name in ("own", "made", "stepped"))
            print(f"{start}  {own:11.0f}  {made:17.0f}  {stepped:11.0f}  {each['seconds']:15.1f}")
    return row


if __name__ == "__main__":
    main()
