"""Texts of unequal length: padded to the longest, by microbatch, by bucket, or packed; real tokens a second.

    python benchmarks/lengths.py [--rounds 5] [--seeds 3] [--steps 4] [--width 128] [--json FILE]
    python benchmarks/lengths.py --simulated        what orders and programs save, without running anything

Lengths are log-normal (median 128, sigma 0.8, at most 1,024). A small transformer on two ranks, one thread each, by
1f1b, trains on the same window of texts in every way; all ways take turns, window by window, in one run:

    longest      16 texts a step, all padded to the longest of them, cut into 8 microbatches of 2
    windows      the window sorted by length, 2 texts a microbatch padded to the longer, dealt to the steps as they come
    arranged     the same, each step's microbatches in the order that the simulator prefers: arrange=True
    packed       texts one behind the other in rows of at most 1,024 places, attention within each text alone
    buckets      as `drumline train` lays out an epoch of 3,000 texts: steps of one length, a program for each number of
                 microbatches; timed are steps from the shortest to the longest, padding is that of the whole epoch

A window is timed from a barrier to the end of the last rank. Printed: real tokens a second (targets that count), the
share of places that are padding, the speed-up over `longest` beside padded/real places of that, which it could be, and
the same as the simulator has it: with what microbatches of each size were measured to cost, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

MEDIAN, SIGMA, LONGEST = 128, 0.8, 1024
ROWS, MICROBATCHES = 2, 8
IGNORED, VOCABULARY = -100, 256
WAYS = ("longest", "windows", "arranged", "packed", "buckets")
EPOCH = 3000  # texts of which buckets are made
BAR = 0.8  # of padded over real places


def texts_of(seed: int, count: int) -> list[Any]:
    """Return texts of log-normal lengths."""
    import torch

    torch.manual_seed(seed)
    lengths = torch.empty(count).log_normal_(math.log(MEDIAN), SIGMA).round().clamp(2, LONGEST).long().tolist()
    return [torch.randint(VOCABULARY, (length,)) for length in lengths]


def padded(texts: list[Any], length: int) -> dict[str, Any]:
    """Return rows of one length: inputs, and targets that are not counted where there is none."""
    import torch

    ids = torch.zeros(len(texts), length, dtype=torch.long)
    target = torch.full((len(texts), length), IGNORED)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
        target[row, : len(text) - 1] = text[1:]
    return {"ids": ids, "bounds": torch.zeros(0, dtype=torch.long), "target": target}


def packed(texts: list[Any]) -> dict[str, Any]:
    """Return one row of texts behind each other, and where each begins."""
    import torch

    targets = [torch.cat([text[1:], torch.tensor([IGNORED])]) for text in texts]
    lengths = torch.tensor([0, *(len(text) for text in texts)])
    return {"ids": torch.cat(texts)[None], "bounds": lengths.cumsum(0), "target": torch.cat(targets)[None]}


def steps_of(way: str, texts: list[Any]) -> list[list[dict[str, Any]]]:
    """Return the window's microbatches, step by step."""
    each = ROWS * MICROBATCHES
    if way == "longest":
        steps = [texts[at : at + each] for at in range(0, len(texts), each)]
        sizes = [max(map(len, step)) for step in steps]
        return [
            [padded(step[at : at + ROWS], size) for at in range(0, len(step), ROWS)]
            for step, size in zip(steps, sizes, strict=True)
        ]
    if way == "packed":
        rows: list[list[Any]] = []
        for text in sorted(texts, key=len, reverse=True):
            fits = next((row for row in rows if sum(map(len, row)) + len(text) <= LONGEST), None)
            if fits is None:
                rows.append([text])
            else:
                fits.append(text)
        made = [packed(row) for row in rows]
        return [made[at : at + MICROBATCHES] for at in range(0, len(made), MICROBATCHES)]
    ordered = sorted(texts, key=len)
    made = [padded(ordered[at : at + ROWS], len(ordered[at + ROWS - 1])) for at in range(0, len(ordered), ROWS)]
    count = len(made) // MICROBATCHES
    return [made[at::count] for at in range(count)]


class Texts:
    """Texts by their numbers, as layouts want them."""

    def __init__(self, texts: list[Any]) -> None:
        self.texts, self.num = texts, len(texts)

    def lengths(self, indices: Any) -> Any:
        """Return the lengths of some."""
        import numpy as np

        return np.array([len(self.texts[at]) for at in indices], dtype=np.int64)


def bucketed(seed: int, count: int) -> tuple[list[list[dict[str, Any]]], float]:
    """Return so many steps of an epoch of buckets, from the shortest to the longest, and the epoch's padding."""
    import numpy as np

    from drumline.train.data.buckets import Buckets
    from drumline.train.data.layouts import StepShape

    texts = Texts(texts_of(seed, EPOCH))
    layout = Buckets(texts, StepShape(ROWS, MICROBATCHES, counts=tuple(range(1, 2 * MICROBATCHES + 1))), LONGEST)
    units, _ = layout.units(np.random.default_rng(seed).permutation(EPOCH), last=True)
    real = sum(len(texts.texts[number]) for unit in units for row in unit.rows for number in row)
    places = sum(len(unit.rows) * unit.width for unit in units)
    ordered = sorted(units, key=lambda item: item.width)
    steps = []
    for unit in (ordered[(2 * at + 1) * len(units) // (2 * count)] for at in range(count)):
        step = [[texts.texts[number] for row in part[0].rows for number in row] for part in layout.share([unit], 0)]
        steps.append([padded(rows, unit.width) for rows in step])
    return steps, 1 - real / places


def transformer(width: int) -> Any:
    """Return a chain of blocks that pass on values and where texts begin."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(VOCABULARY, width)

        def forward(self, given: Any) -> Any:
            return self.table(given["ids"]), given["bounds"]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def attend(self, qkv: Any) -> Any:
            rows, length, _ = qkv.shape
            q, k, v = qkv.view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
            made = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return made.transpose(1, 2).reshape(rows, length, width)

        def forward(self, given: Any) -> Any:
            x, bounds = given
            qkv = self.qkv(self.before(x))
            if len(bounds):  # texts behind each other: each attends to itself
                parts = qkv.split(bounds.diff().tolist(), dim=1)
                made = torch.cat([self.attend(part) for part in parts], dim=1)
            else:
                made = self.attend(qkv)
            x = x + self.out(made)
            return x + self.down(functional.gelu(self.up(self.between(x)))), bounds

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(width, VOCABULARY)

        def forward(self, given: Any) -> Any:
            return self.linear(given[0])

    torch.manual_seed(0)
    return nn.Sequential(Embed(), *(Block() for _ in range(4)), Head())


def measure(seeds: int, rounds: int, steps: int, width: int) -> list[dict[str, Any]]:
    """Run every window in every way on this rank."""
    import torch.distributed as dist
    from torch.nn import functional

    import drumline as dl
    from drumline.engine.stages.sizes import fitted

    def loss_fn(output: Any, target: Any) -> Any:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)

    def pipeline(*, arrange: bool) -> dl.Pipeline:
        return dl.Pipeline(
            transformer(width), loss_fn=loss_fn, num_microbatches=MICROBATCHES, balance=[3, 3], arrange=arrange
        )

    pipes = {way: pipeline(arrange=way == "arranged") for way in WAYS}
    counts = range(1, 2 * MICROBATCHES + 1)
    programs = {count: dl.generate("1f1b", num_ranks=2, num_microbatches=count) for count in counts}
    found = []
    for seed in range(seeds):
        texts = texts_of(seed, steps * ROWS * MICROBATCHES)
        windows = {way: steps_of(way, texts) for way in WAYS[:-1]}
        windows["buckets"], padding = bucketed(seed, 2 * steps)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        losses: dict[str, float] = {}
        seen: dict[str, list[Any]] = {way: [] for way in WAYS}
        for turn in range(rounds + 1):
            for way, pipe in pipes.items():
                total = 0.0
                dist.barrier()
                start = time.perf_counter()
                for step in windows[way]:
                    made = {name: dl.Microbatches(entry[name] for entry in step) for name in step[0]}
                    target = made.pop("target")
                    result = pipe.step(made, target=target, program=programs[len(step)])
                    total += float(result.loss or 0.0) * sum(int((value != IGNORED).sum()) for value in target)
                    order = getattr(pipe._run.intake, "order_of", None)  # where microbatches are arranged
                    seen[way].append((pipe.timeline(), _sizes(made["ids"], order)))
                    pipe.zero_grad()
                dist.barrier()
                if turn:
                    seconds[way].append(time.perf_counter() - start)
                losses[way] = total
        real = {way: sum(int((e["target"] != IGNORED).sum()) for s in each for e in s) for way, each in windows.items()}
        places = {way: sum(entry["ids"].numel() for step in steps for entry in step) for way, steps in windows.items()}
        simulated = {}
        for way, timelines in seen.items():
            costs = fitted(timelines[len(windows[way]) :], 2)
            each = timelines[-len(windows[way]) :]
            simulated[way] = sum(dl.simulate(item.program, costs.of(sizes)).makespan for item, sizes in each)
        found.append(
            {
                "seed": seed,
                "real": real,
                "places": places,
                "seconds": seconds,
                "losses": losses,
                "simulated": simulated,
                "padding": padding,
            }
        )
    for pipe in pipes.values():
        pipe.close()
    return found


def _counted(step: list[dict[str, Any]]) -> int:
    return sum(int((entry["target"] != IGNORED).sum()) for entry in step)


def _sizes(ids: Any, order_of: Any) -> list[Any]:
    from drumline.engine.stages.sizes import sizes_of

    sizes = sizes_of(ids)
    return [sizes[at] for at in (range(len(sizes)) if order_of is None else order_of(sizes))]


def summary(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of one seed, way by way."""
    base = entry["real"]["longest"] / statistics.median(entry["seconds"]["longest"])
    possible = entry["places"]["longest"] / entry["places"]["packed"]
    rows = []
    for way in WAYS:
        real, more = entry["real"][way], entry["real"][way] / entry["real"]["longest"]  # buckets have other texts
        ratios = sorted(more * a / b for a, b in zip(entry["seconds"]["longest"], entry["seconds"][way], strict=True))
        speed = real / statistics.median(entry["seconds"][way])
        padding = entry["padding"] if way == "buckets" else 1 - entry["places"]["packed"] / entry["places"][way]
        rows.append(
            {
                "seed": entry["seed"],
                "way": way,
                "tokens_per_second": speed,
                "padding": padding,
                "speedup": speed / base,
                "low": ratios[len(ratios) // 4],
                "high": ratios[(3 * len(ratios)) // 4],
                "possible": possible,
                "bar": BAR * possible,
                "simulated": more * entry["simulated"]["longest"] / entry["simulated"][way],
                "loss": entry["losses"][way] / real,
            }
        )
    return rows


def simulated(draws: int = 6) -> None:
    """Print what orders save by schedule, 4 ranks and 16 microbatches of 8 texts, and what a search finds beyond."""
    import random

    import drumline as dl
    from drumline.engine.stages.sizes import Size, SizeCosts
    from drumline.features.lengths.arrange import arranged, orders

    def sizes_of_draw(seed: int, count: int) -> list[Size]:
        draw = random.Random(seed)
        lengths = sorted(min(LONGEST, draw.lognormvariate(math.log(MEDIAN), SIGMA)) for _ in range(8 * count))
        made = [Size(8, round(lengths[at + 7])) for at in range(0, len(lengths), 8)]
        draw.shuffle(made)
        return made

    def costs_for(program: Any) -> SizeCosts:
        ops = (dl.Op.FORWARD, dl.Op.BACKWARD_INPUT, dl.Op.BACKWARD_WEIGHT)
        terms = {(stage, op): (20.0, 1.0, 1 / 2048) for stage in range(program.num_stages) for op in ops}
        return SizeCosts(program.num_stages, terms)

    print("step over its work per rank, simulated: 4 ranks, 16 microbatches, mean of", draws, "draws")
    for name in ("1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "interleaved-zb", "hanayo", "dualpipe-v", "dualpipe"):
        program = dl.generate(name, num_ranks=4, num_microbatches=16)
        each: dict[str, list[float]] = {}
        for seed in range(draws):
            sizes, costs = sizes_of_draw(seed, 16), costs_for(program)
            work = 3 * 16 * program.num_stages / 4
            for way, order in orders(costs.weights(sizes)).items():
                made = dl.simulate(program, costs.of([sizes[at] for at in order]))
                unit = costs.of(sizes).per_stage("forward", program.num_stages)[0]
                each.setdefault(way, []).append(made.makespan / unit / work)
        print(f"{name:<17}", "  ".join(f"{way} {statistics.mean(row):.2f}" for way, row in each.items()))
    print("searched for 2 s in the memory of 1f1b, in the order that is best by 1f1b")
    for ranks, count in ((2, 8), (4, 16)):
        for seed in range(2):
            plain, split = (dl.generate(text, num_ranks=ranks, num_microbatches=count) for text in ("1f1b", "zb-h1"))
            sizes, costs = sizes_of_draw(seed, count), costs_for(plain)
            best = costs.of([sizes[at] for at in arranged(plain, costs, sizes).order])
            work = 3 * count * best.per_stage("forward", ranks)[0]
            limit = dl.Limit(max_activations=ranks)
            found = dl.search(best, plain.placement, num_microbatches=count, limit=limit, seconds=2.0)
            times = [dl.simulate(candidate, best).makespan / work for candidate in (plain, split)]
            print(f"{ranks} ranks: 1f1b {times[0]:.2f}  zb-h1 {times[1]:.2f}  searched {found.value / work:.2f}")
    print("the same for steps of buckets, whose microbatches are alike; the last stage costs 15% more by place")
    for ranks, length, rows, count in (
        (2, 32, 20, 8),
        (2, 1024, 1, 5),
        (4, 32, 20, 16),
        (4, 256, 2, 20),
        (4, 1024, 1, 10),
    ):
        plain, split = (dl.generate(text, num_ranks=ranks, num_microbatches=count) for text in ("1f1b", "zb-h1"))
        terms = {
            key: (a, b * (1.15 if key[0] == ranks - 1 else 1.0), c) for key, (a, b, c) in costs_for(plain).terms.items()
        }
        alike = SizeCosts(ranks, terms).of([Size(rows, length)] * count)
        limit = dl.Limit(max_activations=ranks)
        found = dl.search(alike, plain.placement, num_microbatches=count, limit=limit, seconds=2.0)
        times = [dl.simulate(candidate, alike).makespan / found.value for candidate in (plain, split)]
        print(f"{ranks} ranks, {count} of {rows} x {length}: over searched, 1f1b {times[0]:.2f}  zb-h1 {times[1]:.2f}")


def main() -> None:
    """Print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rounds", 5), ("seeds", 3), ("steps", 4), ("width", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--simulated", action="store_true")
    args = parser.parse_args()
    if args.simulated:
        simulated()
        return
    import drumline as dl

    found = dl.launch(measure, args.seeds, args.rounds, args.steps, args.width, num_ranks=2, threads=1)[0]
    rows = [row for entry in found for row in summary(entry)]
    print("seed  way       tokens/s  padding  speed-up (quartiles)  padded/real   bar  simulated  loss/token")
    for row in rows:
        print(
            f"{row['seed']:4}  {row['way']:<9} {row['tokens_per_second']:8,.0f}  {row['padding']:7.1%}"
            f"  {row['speedup']:8.2f} ({row['low']:.2f}-{row['high']:.2f})  {row['possible']:11.2f}  {row['bar']:4.2f}"
            f"  {row['simulated']:9.2f}  {row['loss']:10.5f}"
        )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
