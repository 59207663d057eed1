"""Runs of 2023 and later, from `data/published_rows.csv`: all rows of a few public tables, by a rule set in advance.

The column `set` says what a row is for. From rows of `fit`, constants were taken, or presets made with them in sight.
No constant comes from rows of `held`: presets were committed before any of them was compared. Rows of `experts` have
experts; they were set apart before comparing, too.

- llm-foundry (`scripts/train/benchmarking/README.md`, commit 4952183): models of 1 to 70 billion parameters, 1,024 to
  8,192 tokens, all but FP8. Those on at least 128 H100 are for fitting. Every microbatch reduces its gradients.
- fms-fsdp (README, commit 5a296af): 400 Gb/s a node of A100, 800 of H100. HFU over MFU says how many layers are
  recomputed.
- torchtitan (`benchmarks`, commit b5bcd76): all rows of December 2024, and those of H200 in June 2025. A pipeline runs
  as many microbatches as it has ranks, the default then.
- InternEvo (`doc/en/train_performance.md`, commit c628a8c): the tables of FLOPS. Packed samples do not see each other.
- NeMo 25.11 and 26.02 (Megatron Bridge, `docs/performance-summary-archive.md`, commit 067f987): H100. What these tables
  recompute is not said; nothing is assumed. Two rows with experts over tensor-parallel ranks are left out.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from drumline.plan.cluster.estimate import Estimate, estimate
from drumline.plan.cluster.hardware import MACHINES, Cluster
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.models import model
from drumline.plan.cluster.practice import Practice
from drumline.plan.cluster.transformer import ExpertShape, Transformer
from drumline.plan.layouts.software import software

DATA = Path(__file__).parent / "data" / "published_rows.csv"
_H100, _A100 = MACHINES["h100"], MACHINES["a100-80"]
# What tables say of their networks, bytes per second of a device.
NETWORKS = {
    "a100-roce": replace(_A100, network_bytes_per_second=6.25e9),
    "h100-800g": replace(_H100, network_bytes_per_second=12.5e9),
}
_mpt = partial(Transformer, vocabulary=50368, sequence=2048, dropout=False)
_llama2 = partial(
    Transformer,
    vocabulary=32000,
    sequence=4096,
    gated=True,
    tied=False,
    learned_positions=False,
    biased=False,
    dropout=False,
)
_qwen3 = partial(_llama2, vocabulary=151936, head_width=128, num_key_value_heads=4)
MODELS = {
    transformer.name: transformer
    for transformer in (
        _mpt("mpt-1b", 24, 2048, 16),
        _mpt("mpt-3b", 32, 2560, 20),
        _mpt("mpt-7b", 32, 4096, 32),
        _mpt("mpt-13b", 40, 5120, 40),
        _mpt("mpt-30b", 48, 7168, 56),
        _mpt("mpt-70b", 80, 8192, 64),
        _llama2("llama-2-7b", 32, 4096, 32, feedforward=11008),
        _llama2("llama-2-13b", 40, 5120, 40, feedforward=13824),
        _llama2("llama-2-34b", 48, 8192, 64, num_key_value_heads=8, feedforward=22016),
        _llama2("llama-2-70b", 80, 8192, 64, num_key_value_heads=8, feedforward=28672),
        _llama2("internlm-7b", 32, 4096, 32, vocabulary=103168, feedforward=11008),
        _qwen3("qwen3-30b-a3b", 48, 2048, 32, experts=ExpertShape(128, 8, 768)),
        _qwen3("qwen3-235b-a22b", 94, 4096, 64, experts=ExpertShape(128, 8, 1536)),
        _llama2(
            "gpt-oss-120b",
            36,
            2880,
            64,
            vocabulary=201088,
            head_width=64,
            num_key_value_heads=8,
            experts=ExpertShape(128, 4, 2880),
        ),
        *(model(f"llama-3-{size}") for size in ("8b", "70b", "405b")),
    )
}


@dataclass(frozen=True, slots=True)
class Found:
    """A row: for what it is, where it is from, what ran, and the seconds of its step; GiB that were reserved, or 0."""

    use: str
    source: str
    software: str
    hardware: str
    transformer: Transformer
    layout: Layout
    seconds: float
    memory: float

    @property
    def name(self) -> str:
        """Return the model, its devices and what tells the row from others."""
        layout, transformer = self.layout, self.transformer
        again = {"none": "", "ops": " ops"}.get(layout.recompute, " again")
        mesh = f" TP{layout.tensor} PP{layout.pipeline} CP{layout.context}"
        return f"{transformer.name} {transformer.sequence}{mesh} x{layout.microbatch}{again}"

    @property
    def cluster(self) -> Cluster:
        """Return its machines."""
        machine = NETWORKS.get(self.hardware) or MACHINES[self.hardware]
        return machine.cluster(self.layout.num_devices)

    @property
    def preset(self) -> str:
        """Return the name of its software."""
        return self.software

    def under(self, practice: Practice) -> Found:
        """Return the same run as if its software had done as `practice` says."""
        return replace(self, layout=replace(self.layout, practice=practice))

    def estimate(self, *, exact: bool = False) -> Estimate:
        """Return what the layout is estimated to take."""
        return estimate(self.transformer, self.cluster, self.layout, exact=exact)

    @property
    def error(self) -> float:
        """Return by which part the estimate is too long."""
        return self.estimate().seconds.total / self.seconds - 1


def found(use: str, path: Path = DATA) -> tuple[Found, ...]:
    """Return the rows that are for one use: fit, held or experts.

    >>> len({run.source for run in found("held")}), found("fit")[0].layout.zero
    (5, 3)
    """
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(_found(row) for row in csv.DictReader(file) if row["set"] == use)


def _found(row: dict[str, str]) -> Found:
    transformer = replace(MODELS[row["model"]], sequence=int(row["sequence"]))
    numbers = {name: int(row[name]) for name in ("batch", "microbatch", "tensor", "pipeline", "context", "expert")}
    options = dict(item.split("=") for item in row["options"].split())
    given: dict[str, Any] = {
        name: int(value) if name == "gradient_bytes" else value == "1" for name, value in options.items()
    }
    practice = replace(software(row["software"]).practice, **given)
    copy = numbers["tensor"] * numbers["pipeline"] * numbers["context"]
    layout = Layout(
        batch=numbers["batch"],
        microbatch=numbers["microbatch"],
        tensor=numbers["tensor"],
        pipeline=numbers["pipeline"],
        context=numbers["context"],
        expert=numbers["expert"],
        data=int(row["devices"]) // copy,
        stages_per_rank=int(row["virtual"]),
        schedule=row["schedule"],
        zero=int(row["zero"]),
        sequence_parallel=row["sequence_parallel"] == "1",
        recompute=row["recompute"],
        practice=practice,
    )
    seconds = layout.batch * transformer.sequence / float(row["tokens_per_second"]) / layout.num_devices
    return Found(
        row["set"],
        row["source"],
        row["software"],
        row["hardware"],
        transformer,
        layout,
        seconds,
        float(row["memory_gib"] or 0),
    )


def found_table(use: str = "held") -> str:
    """Return a line for every source, preset and kind of device: how many rows, the mean error and the worst."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in found(use):
        groups.setdefault((row.source, row.software, row.hardware), []).append(row.error)
    lines = [f"{'':12} {'':17} {'':9} {'rows':>5} {'mean error':>11} {'worst':>7}"]
    together = [error for errors in groups.values() for error in errors]
    for names, errors in (*groups.items(), (("all", "", ""), together)):
        worst = max(errors, key=abs)
        name = f"{names[0]:12} {names[1]:17} {names[2]:9}"
        lines.append(f"{name} {len(errors):5} {fmean(map(abs, errors)):11.1%} {worst:+7.1%}")
    return "\n".join(lines)


def reserved_table() -> str:
    """Return the memory that torchtitan's runs reserved, beside what their layouts are counted to hold, in GiB."""
    lines = [f"{'':42} {'devices':>7} {'reserved':>9} {'ours':>6}"]
    errors = []
    for row in (row for use in ("fit", "held") for row in found(use) if row.memory):
        ours = row.estimate().bytes.total / 2**30
        errors.append(ours / row.memory - 1)
        lines.append(f"{row.name:42} {row.layout.num_devices:7} {row.memory:9.1f} {ours:6.1f} {errors[-1]:+7.1%}")
    lines.append(f"{'mean error':67} {fmean(map(abs, errors)):7.1%}")
    return "\n".join(lines)
