"""Layouts that experts ran beside the planner's own, both by our estimate of today's software.

    python benchmarks/expert_layouts.py

`pinned` is what the planner makes of the expert's own degrees, schedule and recomputation: the same layout, or the same
with sequence parallelism and better cuts. So the expert's layout is among those that the planner compares.

An expert's layout may not fit by our count: experts keep gradients or activations otherwise, or leave less headroom.
Then two more lines compare like with like: the expert's layout with as much recomputation as makes it fit (`fitting`),
and the plan for devices with as much memory as the expert's layout takes (`as roomy`). What the expert's software does
beyond what plans assume (FP8, messages that hide) holds for the plan too.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from drumline.plan.cluster.estimate import estimate
from drumline.plan.cluster.hardware import Cluster, cluster
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.models import model
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.layouts.choice import Choice
from drumline.plan.layouts.pins import Degrees, Pins
from drumline.plan.layouts.planner import HEADROOM, limit_of, plan
from drumline.plan.layouts.software import PRESETS
from published_runs import fp8

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
    ("deepseek-v3", "h800", replace(fp8()[-1].layout, counts=(3, *(4,) * 14, 2))),
)


def planned(item: Transformer, machines: Cluster, layout: Layout, limit: float, pins: Pins | None = None) -> Choice:
    """Return the plan for devices that may hold so many bytes."""
    roomier = replace(machines.device, memory_bytes=limit / (1 - HEADROOM))
    assumed = next(name for name, preset in PRESETS.items() if preset.practice == layout.practice)
    pins = replace(pins or Pins(), software=assumed, precision="fp8" if layout.practice.fp8 else "bf16")
    return plan(item, replace(machines, device=roomier), batch=layout.batch, pins=pins, top=1).chosen


def pinned(transformer: Transformer, machines: Cluster, layout: Layout) -> Choice:
    """Return the plan with all that the expert decided, but for cuts and sequence parallelism, in any memory."""
    fixed = {name: getattr(layout, name) for name in (*Degrees._fields, "microbatch", "stages_per_rank", "zero")}
    pins = Pins(**fixed, recompute=layout.recompute, schedules=(layout.schedule,))
    return planned(transformer, machines, layout, 1e15, pins)


def fitting(transformer: Transformer, machines: Cluster, layout: Layout, limit: float) -> tuple[float, float, str]:
    """Return the fastest that an expert's layout takes with more recomputation, within so many bytes."""
    some = (f"full:{count}" for count in range(1, max(layout.counts)))
    tried = [replace(layout, recompute=how) for how in (*Pins().recomputations(transformer)[1:], *some)]
    found = [(estimate(transformer, machines, other, exact=True), other) for other in tried]
    within = [(took.seconds.total, took.bytes.total, other) for took, other in found if took.bytes.total <= limit]
    seconds, held, other = min(within, key=lambda row: row[0])
    return seconds, held, other.recomputation


def compared(name: str, hardware: str, layout: Layout) -> dict[str, Any]:
    """Return the seconds and bytes of an expert's layout, of the plan, and of the plan with as much memory."""
    transformer, machines = model(name), cluster(hardware, layout.num_devices)
    theirs, limit = estimate(transformer, machines, layout, exact=True), limit_of(machines, HEADROOM)
    rows = {"expert": (theirs.seconds.total, theirs.bytes.total, "")}
    same = pinned(transformer, machines, layout)
    rows["pinned"] = (same.seconds, same.bytes, "the same" if same.layout == layout else "")
    limits = {"plan": limit}
    if theirs.bytes.total > limit:
        rows["fitting"] = fitting(transformer, machines, layout, limit)
        limits["as roomy"] = theirs.bytes.total
    for what, bound in limits.items():
        found = planned(transformer, machines, layout, bound)
        rows[what] = (found.seconds, found.bytes, f"{found.mesh}, {', '.join(found.layout.settings.values())}")
    return {"model": name, "devices": layout.num_devices, "limit_bytes": limit, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object per layout")
    options = parser.parse_args()
    for expert in EXPERTS:
        found = compared(*expert)
        if options.json:
            print(json.dumps(found), flush=True)
            continue
        print(f"{found['model']} on {found['devices']}, {found['limit_bytes'] / 2**30:.0f} GiB of a device")
        for what, (seconds, size, words) in found["rows"].items():
            print(f"  {what:8}  {seconds:6.2f} s, {size / 2**30:5.1f} GiB  {words}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
