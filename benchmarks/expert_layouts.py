"""Layouts that experts ran beside the planner's own, both by our estimate of today's software.

    python benchmarks/expert_layouts.py

An expert's layout may not fit by our count: experts keep gradients or activations otherwise, or leave less headroom.
"""

from __future__ import annotations

from drumline.plan.cluster.estimate import estimate
from drumline.plan.cluster.hardware import cluster
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.models import model
from drumline.plan.layouts.planner import plan

_LLAMA = {"tensor": 8, "pipeline": 16, "stages_per_rank": 8, "zero": 1, "sequence_parallel": True}
_ENDS = (0, *(1,) * 126, 0)  # the embedding and the head are stages of their own
INTERLEAVED = "interleaved-1f1b"
# Model, hardware, and the layout: arXiv 2407.21783 twice, the SC'21 paper, BLOOM, arXiv 2201.11990, arXiv 2412.19437.
EXPERTS = (
    ("llama-3-405b", "h100", Layout(2048, data=64, schedule=INTERLEAVED, counts=_ENDS, **_LLAMA)),  # type: ignore[arg-type]
    ("llama-3-405b", "h100", Layout(2048, data=128, schedule=INTERLEAVED, counts=_ENDS, **_LLAMA)),  # type: ignore[arg-type]
    ("gpt-175b", "a100-80", Layout(1536, 1, 8, 8, 16, 1, 1, 2, INTERLEAVED, zero=1, recompute="full")),
    ("bloom-176b", "jean-zay", Layout(2048, 2, 4, 12, 8, zero=1, recompute="full")),
    ("mt-nlg-530b", "a100-80", Layout(1920, 1, 8, 35, 8, recompute="full")),
    ("deepseek-v3", "h800", Layout(15360, 1, 1, 16, 128, 1, 64, 1, "dualpipe", zero=1, counts=(3, *(4,) * 14, 2))),
)


def main() -> None:
    for name, hardware, layout in EXPERTS:
        one, machines = model(name), cluster(hardware, layout.num_devices)
        theirs = estimate(one, machines, layout)
        found = plan(one, machines, batch=layout.batch, top=1)
        ours = found.chosen
        fits = "" if theirs.bytes.total <= found.limit_bytes else ", which does not fit by our count"
        print(f"{name} on {layout.num_devices}")
        print(f"  expert  {theirs.seconds.total:6.2f} s, {theirs.bytes.total / 2**30:5.1f} GiB{fits}")
        settings = ", ".join(ours.layout.settings.values())
        print(f"  plan    {ours.seconds:6.2f} s, {ours.bytes / 2**30:5.1f} GiB: {ours.mesh}, {settings}", flush=True)


if __name__ == "__main__":
    main()
