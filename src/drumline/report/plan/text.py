"""A cluster plan in the terminal: the choice, its seconds and bytes, why the others lose, what more would buy.

All of it is made from the figures that --json prints.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drumline.core.errors import counted
from drumline.report.table import table
from drumline.report.units import duration, size_text

Figures = Mapping[str, Any]

SECONDS = {
    "compute": "computing",
    "recompute": "computing again",
    "tensor": "tensor parallelism, exposed",
    "context": "context parallelism, exposed",
    "expert": "expert parallelism, exposed",
    "pipeline": "pipeline transfers, exposed",
    "data_exposed": "gradient exchange, exposed",
    "bubble": "bubble",
    "optimizer": "optimizer",
}
BYTES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "buffers": "buffers",
}
_PLAIN_HEADS = ("Latent attention is planned as plain heads with as many parameters.",)
SCALING = ("scaling", "GPUs", "sequences", "mesh", "a step", "tokens/s", "efficiency")
VOLUMES = ("tensor", "context", "expert", "pipeline", "data")


def plan_text(figures: Figures, *, width: int = 100, framework: str = "drumline") -> str:
    """Return a plan as text; what was not worked out (`--brief`) is left out."""
    parts = [_wrapped(headline(figures), width), _items(figures, width), _best(figures, width)]
    if "more" in figures:
        parts += [
            _wrapped(["What more would buy:", *(f"- {one['sentence']}" for one in figures["more"])], width),
            table(SCALING, scaling_rows(figures), width=width),
            table(
                ["bytes sent a step", "mesh", *VOLUMES, "a step", "fits"], traffic_rows(figures), width=width, left=2
            ),
        ]
    if "launch" in figures:
        parts.append(_launch(figures["launch"][framework], width))
    return "\n\n".join(parts)


def headline(figures: Figures) -> list[str]:
    """Return the choice in a few lines."""
    cluster, chosen = figures["cluster"], figures["chosen"]
    model = figures["model"]
    nodes = figures["ranks"]["nodes"]
    return [
        f"{model['name']} on {cluster['num_devices']} x {cluster['device']['name']} in {counted(nodes, 'node')}, "
        f"{figures['batch']} sequences of {model['sequence']} tokens a step",
        f"Run {chosen['mesh']}: {settings_text(chosen)}",
        f"{duration(chosen['step_seconds'])} a step, {chosen['tokens_per_second']:,.0f} tokens/s, "
        f"{chosen['flops_per_second_per_device'] / 1e12:.0f} TFLOP/s a GPU ({chosen['utilisation']:.1%} of its peak), "
        f"bubble {chosen['bubble']:.1%}; {size_text(chosen['peak_bytes'])} of {size_text(figures['limit_bytes'])} "
        f"({figures['headroom']:.0%} headroom)",
        *(_PLAIN_HEADS if model["details"]["latent"] else ()),
    ]


def settings_text(one: Figures) -> str:
    """Return what a layout is besides its mesh."""
    layout = one["layout"]
    again = "no recomputation" if layout["recompute"] == "none" else f"{layout['recompute']} recomputation"
    parts = [f"{counted(one['microbatches'], 'microbatch')} of {layout['microbatch']}", f"ZeRO {layout['zero']}", again]
    if layout["pipeline"] > 1:
        stages = layout["stages_per_rank"]
        parts.insert(0, layout["schedule"] + (f" with {stages} stages per rank" if stages > 1 else ""))
    if layout["sequence_parallel"]:
        parts.append("sequence parallelism")
    return ", ".join(parts)


def _items(figures: Figures, width: int) -> str:
    """Return seconds and bytes, item by item, those that are nothing left out."""
    chosen = figures["chosen"]
    rows = [
        [name, duration(chosen["seconds"][item]), f"{chosen['seconds'][item] / chosen['step_seconds']:.1%}"]
        for item, name in SECONDS.items()
        if chosen["seconds"][item] > 0
    ]
    rows.append(["a step", duration(chosen["step_seconds"]), ""])
    held = [
        [name, size_text(chosen["bytes"][item]), f"{chosen['bytes'][item] / chosen['peak_bytes']:.1%}"]
        for item, name in BYTES.items()
        if chosen["bytes"][item] > 0
    ]
    held.append(["a device", size_text(chosen["peak_bytes"]), ""])
    return (
        table(["time", "takes", "share"], rows, width=width)
        + "\n\n"
        + table(["memory", "holds", "share"], held, width=width)
    )


def _best(figures: Figures, width: int) -> str:
    header = ["", "mesh", "schedule", "microbatch", "ZeRO", "recompute", "a step", "bubble", "a device"]
    rows = []
    for number, one in enumerate(figures["best"], 1):
        layout = one["layout"]
        stages = f" x{layout['stages_per_rank']}" if layout["stages_per_rank"] > 1 else ""
        rows.append(
            [
                str(number),
                one["mesh"],
                layout["schedule"] + stages if layout["pipeline"] > 1 else "-",
                str(layout["microbatch"]),
                str(layout["zero"]),
                layout["recompute"],
                duration(one["step_seconds"]),
                f"{one['bubble']:.1%}",
                size_text(one["peak_bytes"]),
            ]
        )
    reasons = [f"{number}. {one['why']}" for number, one in enumerate(figures["best"], 1) if one["why"]]
    count = f"The best layout of each mesh, out of {counted(figures['num_layouts'], 'layout')}:"
    shown = [count, "", table(header, rows, width=width, left=3)]
    if reasons:
        shown += ["", _wrapped(["Why the others lose:", *reasons], width)]
    return "\n".join(shown)


def scaling_rows(figures: Figures) -> list[list[str]]:
    """Return strong and weak scaling as rows of text."""
    rows = []
    for name, points in figures["scaling"].items():
        for one in points:
            best = one["best"]
            cells = ["does not fit", "", "", ""]
            if best is not None:
                rate = f"{one['tokens_per_second']:,.0f}"
                cells = [best["mesh"], duration(best["step_seconds"]), rate, f"{one['efficiency']:.1%}"]
            rows.append([name, str(one["devices"]), str(one["batch"]), *cells])
    return rows


def traffic_rows(figures: Figures) -> list[list[str]]:
    """Return what a device sends, as rows of text."""
    return [
        [
            one["name"],
            one["mesh"],
            *(size_text(one["volumes"][name]) for name in VOLUMES),
            duration(one["step_seconds"]),
            "yes" if one["fits"] else "no",
        ]
        for one in figures["traffic"]
    ]


def _launch(config: Figures, width: int) -> str:
    lines = [f"On every node: {config['command']}"] if config["starts"] else list(not_started(config))
    if config["missing"]:
        lines += ["It cannot be told:", *(f"- {one}" for one in config["missing"])]
    return _wrapped(lines, width)


def not_started(config: Figures) -> Iterator[str]:
    """Yield what there is to say where Drumline is to run the plan, which no verb does yet."""
    yield "No verb of Drumline starts this plan yet. --launch torchtitan and --launch megatron print commands that do."
    if config["command"]:
        yield f"Its schedule: {config['command']}"


def _wrapped(lines: Sequence[str], width: int) -> str:
    return "\n".join(
        textwrap.fill(line, max(width, 10), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in lines
    )
