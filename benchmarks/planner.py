"""A plan made from a profile, against every other choice that was measured: step, choice and memory.

    python benchmarks/planner.py [--rounds 9] [--seconds 5] [--hidden 192] [--layers 8] [--length 16] [--batch 16]
        [--repeats 3] [--json FILE]

Two ranks, one thread each, a Llama of Hugging Face's from its configuration, with random weights. A repeat does three
things, one after the other, and each only knows of what came before it:

1. Profile: `drumline profile`, in fresh processes.
2. Plan: `drumline plan` from that profile alone. Predicted are the step and every rank's peak of the plan, and of other
   configurations: other schedules, numbers of microbatches, cuts, with and without recomputation.
3. Run: a pipeline for each configuration; all take turns, step by step, in one run. A step is from behind a barrier to
   when every rank has heard that all ranks are through with it, on the slowest rank.

Then each configuration takes two steps more with its activations weighed. A rank's peak is what the executor weighs at
the peak (every storage that autograd or a tape keeps, counted once), plus its weights, gradients and the optimizer's
state as tensors; what was received is left out on both sides. It is not the process's resident memory, in which
temporaries of a kernel and what an allocator keeps stand beside it, and which does not fall when something is freed:
the headroom of a plan is for those.

Printed: predicted and measured step and their difference, for every configuration; how much longer the plan's steps are
than those of the configuration that turned out best, round by round; the largest difference of any rank's peak.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from drumline.plan.cut.cuts import Counts
from drumline.plan.device.candidate import Candidate
from drumline.plan.device.combinations import OPTIMIZERS
from drumline.plan.device.model_profile import ModelProfile
from drumline.plan.device.planner import Planned
from drumline.plan.device.ranks import Ranks
from drumline.plan.device.stages import Stages
from drumline.schedules import generate

RANKS = 2


class Llama:
    """Makes the model and its batch, the same in every process."""

    def __init__(self, hidden: int, layers: int, length: int, rows: int) -> None:
        self.hidden, self.layers, self.length, self.rows = hidden, layers, length, rows

    def __call__(self) -> tuple[Any, None, dict[str, Any], None]:
        """Return (model, loss_fn, batch, target); the model takes its loss itself."""
        import torch
        import transformers

        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=1024,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=self.length,
        )
        ids = torch.randint(config.vocab_size, (self.rows, self.length))
        kind: Any = transformers.LlamaForCausalLM
        return kind(config).train(), None, {"input_ids": ids, "labels": ids}, None


def predicted(profile: ModelProfile, name: str, microbatches: int, batch: int, **choice: Any) -> Candidate:
    """Return a configuration with its prediction; without `counts` the planner's own cut for it."""
    program = generate(name, num_ranks=RANKS, num_microbatches=microbatches)
    rows = batch // microbatches
    again = choice.get("again", (False,) * program.num_stages)
    stages = Stages(profile.at(rows), program, Ranks.of(RANKS), profile.overheads, again, OPTIMIZERS["adam"])
    cut = stages.best()[0]
    if "counts" in choice:
        cut = stages.cuts.timed([choice["counts"]])[0]
    if "shifted" in choice:
        cut = stages.cuts.timed([_shifted(cut.counts, choice["shifted"])])[0]
    return Candidate(stages, cut, rows, batch)


def _shifted(counts: Counts, by: int) -> Counts:
    """Return a cut with its first boundary moved."""
    return counts[0] + by, counts[1] - by, *counts[2:]


def configurations(profile: ModelProfile, planned: Planned, batch: int) -> dict[str, Candidate]:
    """Return what is measured, by name: the plan, its nearest rivals, and others of every kind."""
    found = {_name(candidate): candidate for candidate in planned.candidates[:5]}
    half, most = max(batch // 4, 2), batch // profile.rows[0]
    others = [
        predicted(profile, name, count, batch)
        for name, count in (
            ("1f1b", half), ("1f1b", batch // 2), ("1f1b", most), ("gpipe", batch // 2), ("zb-h1", half),
            ("zb-h1", batch // 2), ("zb-v", batch // 2), ("interleaved-1f1b", batch // 2), ("interleaved-1f1b", most),
        )
    ]  # fmt: skip
    others += [predicted(profile, "1f1b", batch // 2, batch, shifted=by) for by in (-1, 1)]
    others += [predicted(profile, "1f1b", batch // 2, batch, again=again) for again in ((True, False), (True, True))]
    others += [predicted(profile, "zb-h1", batch // 2, batch, again=(True, True))]
    return found | {_name(other): other for other in others}


def _name(rival: Candidate) -> str:
    again = "".join("R" if each else "-" for each in rival.stages.recompute) if any(rival.stages.recompute) else ""
    cut = "+".join(map(str, rival.cut.counts))
    return f"{rival.program.name} M{rival.program.num_microbatches} {cut} {again}".rstrip()


def measure(make: Any, plans: dict[str, str], rounds: int) -> dict[str, Any]:
    """Run every configuration on this rank, in turns."""
    import time

    import torch
    import torch.distributed as dist

    import drumline as dl

    def pipe_of(text: str, **settings: Any) -> Any:
        model, _, batch, _ = make()
        return dl.Pipeline(model, plan=dl.Plan.from_json(text), example=batch, **settings)

    _, _, batch, _ = make()
    pipes = {name: pipe_of(text) for name, text in plans.items()}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for turn in range(rounds + 2):
        for name, pipe in pipes.items():
            dist.barrier()
            begun = time.perf_counter()
            pipe.step(**batch)
            pipe.settle()
            taken = time.perf_counter() - begun
            pipe.zero_grad()
            if turn >= 2:
                seconds[name].append(taken)
    for pipe in pipes.values():
        pipe.close()
    del pipes
    held = {}
    for name, text in plans.items():
        with pipe_of(text, weigh=True) as pipe:
            optimizer = pipe.optimizer(torch.optim.Adam, lr=1e-4)
            for _ in range(2):
                pipe.step(**batch)
                optimizer.step()
                gradients = sum(param.grad.nbytes for param in pipe.parameters() if param.grad is not None)
                stash = pipe.timeline().peak_stash[pipe.rank]
                pipe.zero_grad()
            state = [t for each in optimizer.state.values() for t in each.values() if isinstance(t, torch.Tensor)]
            stages = [stage for executor in pipe._engine.executors for stage in executor.stages.values()]
            tensors = {id(param): param for stage in stages for block in stage.blocks
                       for param in (*block.module.parameters(), *block.module.buffers())}  # fmt: skip
            weights = sum(tensor.nbytes for tensor in tensors.values())
            optimizing = sum(tensor.nbytes for tensor in state if tensor.dim() > 0)
            held[name] = {"weights": weights, "gradients": gradients, "optimizer": optimizing, "activations": stash}
    return {"seconds": seconds, "held": held}


def repeat(make: Llama, batch: int, rounds: int, search: float) -> dict[str, Any]:
    """Profile, plan, run, and return all figures."""
    import drumline as dl
    from drumline.pipeline.profiling import profile_model

    sizes = [rows for rows in (1, 2, 4, 8) if batch % rows == 0 and rows <= batch // 2]
    profile = profile_model(make, microbatch_sizes=sizes, num_ranks=RANKS)
    planned = dl.plan(profile, num_ranks=RANKS, batch=batch, seconds=search)
    candidates = configurations(profile, planned, batch)
    plans = {name: candidate.plan(profile, "adam").to_json() for name, candidate in candidates.items()}
    ranks = dl.launch(measure, make, plans, rounds, num_ranks=RANKS)
    seconds = {
        name: [max(each) for each in zip(*(rank["seconds"][name] for rank in ranks), strict=True)] for name in plans
    }
    rows = []
    for name, candidate in candidates.items():
        told = [_total(vars_of(each)) for each in candidate.rank_bytes]
        real = [_total(each["held"][name]) for each in ranks]
        low, middle, high = statistics.quantiles(seconds[name], n=4)
        rows.append(
            {
                "name": name,
                "chosen": candidate is planned.chosen,
                "predicted": candidate.step_seconds,
                "measured": middle,
                "spread": (high - low) / 2 / middle,
                "error": candidate.step_seconds / middle - 1,
                "predicted_bytes": told,
                "measured_bytes": real,
                "bytes_error": max((a / b - 1 for a, b in zip(told, real, strict=True)), key=abs),
                "held": [each["held"][name] for each in ranks],
                "items": [vars_of(each) for each in candidate.rank_bytes],
            }
        )
    best = min(rows, key=lambda row: row["measured"])["name"]
    chosen = next(row["name"] for row in rows if row["chosen"])
    ratios = sorted(mine / other - 1 for mine, other in zip(seconds[chosen], seconds[best], strict=True))
    return {"rows": rows, "best": best, "chosen": chosen, "beyond_best": statistics.quantiles(ratios, n=4)}


def vars_of(value: Any) -> dict[str, float]:
    """Return a rank's bytes by item."""
    from dataclasses import asdict

    return asdict(value)


def _total(items: dict[str, float]) -> float:
    """Return a rank's peak without what it received."""
    return sum(size for name, size in items.items() if name != "received")


def show(found: dict[str, Any]) -> None:
    """Print one repeat."""
    print(f"{'':2s}{'configuration':44s} predicted ms  measured ms   error  spread   peak MiB  measured   error")
    for row in sorted(found["rows"], key=lambda row: float(row["measured"])):
        mark = "> " if row["chosen"] else "  "
        told, real = (max(row[key]) / 2**20 for key in ("predicted_bytes", "measured_bytes"))
        print(
            f"{mark}{row['name']:44s} {row['predicted'] * 1e3:12.1f}  {row['measured'] * 1e3:11.1f}"
            f"  {row['error']:+6.1%}  {row['spread']:6.1%}  {told:9.1f}  {real:8.1f}  {row['bytes_error']:+6.1%}"
        )
    low, middle, high = found["beyond_best"]
    chosen = next(row for row in found["rows"] if row["chosen"])
    errors = [abs(row["error"]) for row in found["rows"]]
    print(f"  the plan's step: {chosen['error']:+.1%} of the measured one (aim: within 10%)")
    print(f"  the plan against the best measured: {middle:+.1%} ({low:+.1%} to {high:+.1%}) (aim: within 5%)")
    print(f"  steps of all {len(errors)}: mean error {statistics.mean(errors):.1%}, worst {max(errors):.1%}")
    print(f"  peaks of all: worst {max((row['bytes_error'] for row in found['rows']), key=abs):+.1%} (aim: within 10%)")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of searching programs")
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    make = Llama(args.hidden, args.layers, args.length, args.batch)
    found = []
    for number in range(args.repeats):
        found.append(repeat(make, args.batch, args.rounds, args.seconds))
        print(f"repeat {number + 1} of {args.repeats}")
        show(found[-1])
    middle = statistics.median(entry["beyond_best"][1] for entry in found)
    off = statistics.median(row["error"] for entry in found for row in entry["rows"] if row["chosen"])
    print(f"over all repeats: the plan's step {off:+.1%}, against the best {middle:+.1%} (medians)")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
