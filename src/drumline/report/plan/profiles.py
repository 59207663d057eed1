"""Profiles as tables for the terminal, and a picture of where a model's seconds go."""

from __future__ import annotations

from drumline.core.action import Op
from drumline.core.files import MIB
from drumline.core.units import duration
from drumline.plan.device.blocks import OpTimes, Profile
from drumline.plan.device.model_profile import ModelProfile
from drumline.report.draw.chart import Bar, bars
from drumline.report.draw.html import plain_page
from drumline.report.draw.markup import BarPart, bar_row, bar_rows, card, legend_html, safe, table_html
from drumline.report.draw.palette import SHADES
from drumline.report.draw.table import table

_Table = tuple[list[str], list[list[str]]]
_TIMES = ("forward", "backward", "backward_input", "backward_weight")
_PARTS = {
    "forward": ("F", Op.FORWARD),
    "backward_input": ("I", Op.BACKWARD_INPUT),
    "backward_weight": ("W", Op.BACKWARD_WEIGHT),
}
# On a page: their classes and their names.
_KINDS = {"forward": "forward", "backward_input": "input-gradient", "backward_weight": "weight-gradient"}
_WORDS = {"forward": "forward (F)", "backward_input": "input gradient (I)", "backward_weight": "weight gradient (W)"}


def profile_text(profile: ModelProfile, *, width: int = 120) -> str:
    """Return the whole profile for the terminal: the blocks at the largest size, the sizes, links and overheads."""
    rows, largest = profile.sizes[-1]
    lines = [
        f"{profile.model.name}: {_counts(profile)}",
        _how(profile),
        "",
        f"microbatches of {rows}:",
        table(*_blocks(largest), width=width),
        "",
        table(*_sizes(profile), width=width, left=0),
    ]
    if profile.links:
        lines += ["", table(*_links(profile), width=width)]
    return "\n".join([*lines, "", *_added(profile)])


def _counts(profile: ModelProfile) -> str:
    return f"{len(profile.layers)} blocks, {profile.model.num_parameters:,} parameters"


def _how(profile: ModelProfile) -> str:
    """Return where and how the profile was measured."""
    largest = profile.sizes[-1][1]
    ranks = f"{profile.num_ranks} rank{'s' if profile.num_ranks > 1 else ''} at once"
    return (
        f"{profile.device}; {ranks}, {profile.num_threads} thread{'s' if profile.num_threads > 1 else ''} each; medians"
        f" of {largest.num_runs} runs, half of which are within {largest.noise:.1%} of a block's time"
        + (": the machine was busy" if largest.disturbed else "")
    )


def _added(profile: ModelProfile) -> list[str]:
    """Return what a pipeline adds to the blocks."""
    overheads = profile.overheads
    return [
        f"each action adds {overheads.action * 1e6:.0f} us in a pipeline, where blocks take"
        f" {' '.join(f'{pace:.2f}' for pace in profile.paces) or '1.00'} times as long (by rows)",
        f"a step begins with {overheads.begin * 1e6:.0f} us, and ends with {overheads.end.seconds * 1e6:.0f} us plus"
        f" {overheads.end.seconds_per_byte * MIB * 1e6:.0f} us per MiB of gradients",
    ]


def _blocks(profile: Profile) -> _Table:
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
    return header, rows


def _sizes(profile: ModelProfile) -> _Table:
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
    return header, lines


def _links(profile: ModelProfile) -> _Table:
    header = ["link", "latency us", "GB/s", *(f"{size / 1024:.0f} KiB us" for size, _ in profile.links[0].points)]
    rows = []
    for link in profile.links:
        speed = link.line.bytes_per_second / 1e9
        points = (f"{seconds * 1e6:.0f}" for _, seconds in link.points)
        rows.append([f"{link.source} -> {link.target}", f"{link.line.seconds * 1e6:.0f}", f"{speed:.2f}", *points])
    return header, rows


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
    """Return bars of every block's seconds and all tables as an HTML page that opens from disk."""
    rows, largest = profile.sizes[-1]
    longest = max((sum(getattr(layer.times, name) for name in _PARTS) for layer in largest.layers), default=0.0)
    bars = []
    for layer in largest.layers:
        seconds = {name: getattr(layer.times, name) for name in _PARTS}
        parts = [BarPart(_KINDS[name], took, f"{_WORDS[name]} {_time(took)}") for name, took in seconds.items()]
        bars.append(bar_row(layer.name, parts, longest, _time(sum(seconds.values())), kind="named"))
    pipeline = "".join(f"<p>{safe(line[:1].upper() + line[1:])}.</p>" for line in _added(profile))
    shown = bar_rows(bars) + legend_html((_KINDS[name], _WORDS[name]) for name in _PARTS)
    cards = [
        card(f"Seconds of each block, microbatches of {rows}", shown, wide=True),
        card(f"Blocks, microbatches of {rows}, sizes in MiB", table_html(*_blocks(largest)), wide=True),
        card("Sizes of microbatches", table_html(*_sizes(profile)), wide=True),
        *([card("Links", table_html(*_links(profile)), wide=True)] if profile.links else []),
        card("In a pipeline", pipeline, wide=True),
    ]
    lead = f"{_counts(profile)}. Measured on {_how(profile)}."
    return plain_page(f"Profile of {profile.model.name}", "".join(cards), lead=lead)


def _time(seconds: float) -> str:
    return duration(seconds, micro="µs")
