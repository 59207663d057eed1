"""Profiles to look at: tables for the terminal, and a picture of where a model's seconds are."""

from __future__ import annotations

from html import escape

from drumline.core.action import Op
from drumline.plan.device.blocks import Layer, Profile, Times
from drumline.plan.device.model_profile import ModelProfile
from drumline.report.draw.palette import INK, MUTED, PAPER, RULE, SHADES
from drumline.report.draw.scene import ticks
from drumline.report.draw.svg import FONT
from drumline.report.table import table

_MIB = 2**20
_NOISY = 0.05  # a spread above which a profile says more of the machine than of the model
_PARTS = (
    ("forward", "F", Op.FORWARD),
    ("backward_input", "I", Op.BACKWARD_INPUT),
    ("backward_weight", "W", Op.BACKWARD_WEIGHT),
)
_LEFT, _RIGHT, _TOP, _ROW = 190, 24, 64, 20


def layers_table(profile: Profile, *, width: int = 120) -> str:
    """Return a table of one size of microbatch: microseconds and KiB per block."""
    header = ["block", "F us", "B us", "I us", "W us", "held KiB", "until W KiB", "weights KiB", "output KiB"]
    rows = [[one.name, *_micro(one.times), *_kibi(one)] for one in profile.layers]
    return table(header, [*rows, ["(any stage)", *_micro(profile.overhead), "", "", "", ""]], width=width)


def profile_text(profile: ModelProfile, *, width: int = 120) -> str:
    """Return all of a profile for the terminal: the blocks at the largest size, the sizes, links and handling."""
    rows, largest = profile.sizes[-1]
    counts = f"{len(profile.layers)} blocks, {profile.model.num_parameters:,} parameters"
    ranks = f"{profile.num_ranks} rank{'s' if profile.num_ranks > 1 else ''} at once"
    spread = _spread(largest)
    lines = [
        f"{profile.model.name}: {counts}",
        f"{profile.device}; {ranks}, {profile.num_threads} thread{'s' if profile.num_threads > 1 else ''} each; medians"
        f" of {largest.num_runs} runs, half of which are within {spread:.1%} of a block's time"
        + (": the machine was not quiet" if spread > _NOISY else ""),
        "",
        f"microbatches of {rows}:",
        _blocks(largest, width),
        "",
        _sizes(profile, width),
    ]
    if profile.links:
        lines += ["", _links(profile, width)]
    own = profile.overheads
    lines += [
        "",
        f"an action adds {own.action * 1e6:.0f} us in a pipeline, where blocks take"
        f" {' '.join(f'{one:.2f}' for one in profile.paces) or '1.00'} times as long (by rows)",
        f"a step begins with {own.begin * 1e6:.0f} us, and ends with {own.end.seconds * 1e6:.0f} us and"
        f" {own.end.seconds_per_byte * _MIB * 1e6:.0f} us for each MiB of gradients",
    ]
    return "\n".join(lines)


def _blocks(profile: Profile, width: int) -> str:
    header = ["block", "F ms", "B ms", "I ms", "W ms", "held MiB", "until W", "recomputed", "weights", "output"]
    rows = []
    for at, one in enumerate(profile.layers):
        received = profile.layers[at - 1].output_bytes if at else 0
        sizes = (
            one.activation_bytes + one.start_bytes,
            one.held_until_weight_bytes,
            received + one.checkpoint_bytes,
            one.weight_bytes,
            one.output_bytes,
        )
        times = (f"{getattr(one.times, name) * 1e3:.2f}" for name in _TIMES)
        rows.append([one.name, *times, *(f"{size / _MIB:.2f}" for size in sizes)])
    return table(header, rows, width=width)


def _sizes(profile: ModelProfile, width: int) -> str:
    header = ["rows", "F ms", "B ms", "I + W ms", "ms a row", "held MiB", "until W MiB", "largest message MiB"]
    lines = []
    for rows, one in profile.sizes:
        total = Times(*(sum(getattr(each.times, name) for each in one.layers) for name in _TIMES))
        held = sum(each.activation_bytes for each in one.layers)
        until = sum(each.held_until_weight_bytes for each in one.layers)
        message = max((each.output_bytes for each in one.layers[:-1]), default=0)
        seconds = (total.forward, total.backward, total.backward_input + total.backward_weight)
        lines.append(
            [
                str(rows),
                *(f"{1e3 * each:.1f}" for each in seconds),
                f"{1e3 * total.total(split=False) / rows:.1f}",
                *(f"{size / _MIB:.2f}" for size in (held, until, message)),
            ]
        )
    return table(header, lines, width=width, left=0)


def _links(profile: ModelProfile, width: int) -> str:
    header = ["link", "latency us", "GB/s", *(f"{size / 1024:.0f} KiB us" for size, _ in profile.links[0].points)]
    rows = []
    for one in profile.links:
        speed = one.line.bytes_per_second / 1e9
        points = (f"{seconds * 1e6:.0f}" for _, seconds in one.points)
        rows.append([f"{one.source} -> {one.target}", f"{one.line.seconds * 1e6:.0f}", f"{speed:.2f}", *points])
    return table(header, rows, width=width)


def _spread(profile: Profile) -> float:
    """Return the median over blocks of how far the quartiles of F and B are from the middle, as a share."""
    shares = sorted(
        (one.spreads.forward + one.spreads.backward) / (one.times.forward + one.times.backward)
        for one in profile.layers
        if one.spreads is not None and one.times.forward + one.times.backward > 0
    )
    return shares[len(shares) // 2] if shares else 0.0


def profile_svg(profile: ModelProfile, *, width: int = 760) -> str:
    """Return an SVG document: every block's seconds as a bar of F, I and W, at the largest size of microbatch."""
    rows, largest = profile.sizes[-1]
    most = max(one.times.total(split=True) for one in largest.layers) or 1.0
    height = _TOP + _ROW * len(largest.layers) + 60
    scale = (width - _LEFT - _RIGHT) / most
    title = f"{profile.model.name}: a microbatch of {rows}, milliseconds per block"
    bottom = _TOP + _ROW * len(largest.layers)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{_safe(title)}" font-family="{_safe(FONT)}" font-size="11" fill="{INK}">',
        f'<rect width="100%" height="100%" rx="6" fill="{PAPER}"/>',
        f'<text x="16" y="26" font-size="15" font-weight="600">{_safe(title)}</text>',
        f'<text x="16" y="44" fill="{MUTED}">{_safe(profile.device)}, {profile.num_ranks} ranks at once</text>',
    ]
    for mark in ticks(most * 1e3, most=8):
        x = _LEFT + mark * scale / 1e3
        lines.append(f'<path d="M{x:.1f} {_TOP - 4}V{bottom + 4}" stroke="{RULE}"/>')
        lines.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="{MUTED}">{mark:g}</text>')
    for at, one in enumerate(largest.layers):
        y, x = _TOP + _ROW * at, float(_LEFT)
        label = one.name if len(one.name) <= 28 else f"...{one.name[-25:]}"
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{_safe(label)}</text>')
        for name, letter, op in _PARTS:
            seconds = getattr(one.times, name)
            said = f"<title>{_safe(one.name)}: {letter} {seconds * 1e3:.3g} ms</title>"
            bar = f'x="{x:.1f}" y="{y + 3}" width="{seconds * scale:.1f}" height="{_ROW - 6}"'
            lines.append(f'<rect {bar} fill="{SHADES[op].even}">{said}</rect>')
            x += seconds * scale
    for at, (_, letter, op) in enumerate(_PARTS):
        x = _LEFT + 60 * at
        lines.append(f'<rect x="{x}" y="{bottom + 34}" width="12" height="12" fill="{SHADES[op].even}"/>')
        lines.append(f'<text x="{x + 18}" y="{bottom + 44}">{letter}</text>')
    return "\n".join([*lines, "</svg>", ""])


def profile_page(profile: ModelProfile) -> str:
    """Return the picture and all tables as one HTML page that opens from disk."""
    title = f"{profile.model.name}: profile"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'">',
            f"<title>{_safe(title)}</title>\n</head>\n<body>",
            profile_svg(profile),
            f"<pre>{_safe(profile_text(profile))}</pre>",
            "</body>\n</html>",
        ]
    )


_TIMES = ("forward", "backward", "backward_input", "backward_weight")


def _safe(text: str) -> str:
    return escape(text.encode("utf-8", "replace").decode())


def _micro(times: Times) -> list[str]:
    return [f"{getattr(times, name) * 1e6:.0f}" for name in _TIMES]


def _kibi(layer: Layer) -> list[str]:
    sizes = (layer.activation_bytes, layer.held_until_weight_bytes, layer.weight_bytes, layer.output_bytes)
    return [f"{one / 1024:.1f}" for one in sizes]
