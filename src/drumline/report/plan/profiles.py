"""Profiles as tables for the terminal, and a picture of where a model's seconds go."""

from __future__ import annotations

from drumline.core.action import Op
from drumline.core.files import MIB
from drumline.plan.device.blocks import OpTimes, Profile
from drumline.plan.device.model_profile import ModelProfile
from drumline.report.draw.chart import Bar, bars
from drumline.report.draw.html import picture_page
from drumline.report.draw.palette import SHADES
from drumline.report.draw.table import table

_TIMES = ("forward", "backward", "backward_input", "backward_weight")
_PARTS = {
    "forward": ("F", Op.FORWARD),
    "backward_input": ("I", Op.BACKWARD_INPUT),
    "backward_weight": ("W", Op.BACKWARD_WEIGHT),
}


def profile_text(profile: ModelProfile, *, width: int = 120) -> str:
    """Return the whole profile for the terminal: the blocks at the largest size, the sizes, links and overheads."""
    rows, largest = profile.sizes[-1]
    counts = f"{len(profile.layers)} blocks, {profile.model.num_parameters:,} parameters"
    ranks = f"{profile.num_ranks} rank{'s' if profile.num_ranks > 1 else ''} at once"
    lines = [
        f"{profile.model.name}: {counts}",
        f"{profile.device}; {ranks}, {profile.num_threads} thread{'s' if profile.num_threads > 1 else ''} each; medians"
        f" of {largest.num_runs} runs, half of which are within {largest.noise:.1%} of a block's time"
        + (": the machine was busy" if largest.disturbed else ""),
        "",
        f"microbatches of {rows}:",
        _blocks(largest, width),
        "",
        _sizes(profile, width),
    ]
    if profile.links:
        lines += ["", _links(profile, width)]
    overheads = profile.overheads
    lines += [
        "",
        f"each action adds {overheads.action * 1e6:.0f} us in a pipeline, where blocks take"
        f" {' '.join(f'{pace:.2f}' for pace in profile.paces) or '1.00'} times as long (by rows)",
        f"a step begins with {overheads.begin * 1e6:.0f} us, and ends with {overheads.end.seconds * 1e6:.0f} us plus"
        f" {overheads.end.seconds_per_byte * MIB * 1e6:.0f} us per MiB of gradients",
    ]
    return "\n".join(lines)


def _blocks(profile: Profile, width: int) -> str:
    header = ["block", "F ms", "B ms", "I ms", "W ms", "held MiB", "until W", "recomputed", "weights", "output"]
    rows = []
    for at, layer in enumerate(profile.layers):
        received = profile.layers[at - 1].output_bytes if at else 0
        held_bytes = (
            layer.activation_bytes + layer.start_bytes,
            layer.held_until_weight_bytes,
            received + layer.checkpoint_bytes,
        )
        sizes = (f"{size / MIB:.2f}" for size in (*held_bytes, layer.weight_bytes, layer.output_bytes))
        rows.append([layer.name, *(f"{getattr(layer.times, name) * 1e3:.2f}" for name in _TIMES), *sizes])
    return table(header, rows, width=width)


def _sizes(profile: ModelProfile, width: int) -> str:
    header = ["rows", "F ms", "B ms", "I + W ms", "ms per row", "held MiB", "until W MiB", "largest message MiB"]
    lines = []
    for rows, other in profile.sizes:
        total = OpTimes(*(sum(getattr(each.times, name) for each in other.layers) for name in _TIMES))
        held_bytes = sum(each.activation_bytes for each in other.layers)
        until = sum(each.held_until_weight_bytes for each in other.layers)
        message = max((each.output_bytes for each in other.layers[:-1]), default=0)
        split = total.backward_input + total.backward_weight
        seconds = (total.forward, total.backward, split, total.total(split=False) / rows)
        sizes = (f"{size / MIB:.2f}" for size in (held_bytes, until, message))
        lines.append([str(rows), *(f"{1e3 * each:.1f}" for each in seconds), *sizes])
    return table(header, lines, width=width, left=0)


def _links(profile: ModelProfile, width: int) -> str:
    header = ["link", "latency us", "GB/s", *(f"{size / 1024:.0f} KiB us" for size, _ in profile.links[0].points)]
    rows = []
    for link in profile.links:
        speed = link.line.bytes_per_second / 1e9
        points = (f"{seconds * 1e6:.0f}" for _, seconds in link.points)
        rows.append([f"{link.source} -> {link.target}", f"{link.line.seconds * 1e6:.0f}", f"{speed:.2f}", *points])
    return table(header, rows, width=width)


def profile_svg(profile: ModelProfile) -> str:
    """Return an SVG document: every block's seconds as a bar of F, I and W, at the largest microbatch size."""
    rows, largest = profile.sizes[-1]
    parts = ({letter: 1e3 * getattr(p.times, name) for name, (letter, _) in _PARTS.items()} for p in largest.layers)
    return bars(
        [Bar(part.name, times) for part, times in zip(largest.layers, parts, strict=True)],
        {letter: SHADES[op].edge for letter, op in _PARTS.values()},
        title=f"{profile.model.name}: microbatch of {rows}, milliseconds per block",
        x_label=f"{profile.device}, {profile.num_ranks} ranks at once",
        width=760,
        row=20,
        right=24,
        unit=" ms",
    )


def profile_page(profile: ModelProfile) -> str:
    """Return the picture and all tables as an HTML page that opens from disk."""
    return picture_page(f"{profile.model.name}: profile", profile_svg(profile), profile_text(profile))
