"""Why one layout loses against another: the items of its seconds, in a sentence."""

from __future__ import annotations

from dataclasses import fields

from drumline.plan.cluster.estimate import Seconds
from drumline.plan.layouts.survey import Candidate

_GIB = 2**30
_EVEN = 5e-4  # of a step; less than that is no difference
_MORE = {
    "compute": "its busiest rank computes {} more",
    "recompute": "it recomputes {} more",
    "tensor": "TP exposes {} more",
    "context": "CP exposes {} more",
    "expert": "EP exposes {} more",
    "pipeline": "PP exposes {} more",
    "data_exposed": "DP exposes {} more",
    "bubble": "{} more bubble",
    "optimizer": "its optimizer takes {} more",
}
_LESS = {
    "compute": "{} less computing",
    "recompute": "{} less recomputing",
    "tensor": "{} less of TP",
    "context": "{} less of CP",
    "expert": "{} less of EP",
    "pipeline": "{} less of PP",
    "data_exposed": "{} less of DP",
    "bubble": "{} less bubble",
    "optimizer": "{} less of the optimizer",
}


def why(chosen: Candidate, other: Candidate, limit_bytes: float) -> str:
    """Return what speaks against `other`: that it does not fit, or which seconds it loses and which it saves."""
    if other.bytes > limit_bytes:
        over = (other.bytes - limit_bytes) / _GIB
        gain = 1 - other.seconds / chosen.seconds
        note = f"; it would be {gain:.1%} faster" if gain > _EVEN else ""
        return f"does not fit: {over:.1f} GiB too much{note}"
    slower = other.seconds / chosen.seconds - 1
    lost, saved = _differences(chosen.estimate.seconds, other.estimate.seconds, _EVEN * chosen.seconds)
    if abs(slower) <= _EVEN:
        return _as_fast(chosen, other)
    reasons = [_MORE[item].format(_seconds(by)) for item, by in lost[:2]]
    if saved and saved[0][1] > 0.1 * lost[0][1]:
        item, by = saved[0]
        reasons.append("in spite of " + _LESS[item].format(_seconds(by)))
    return f"{slower:.1%} slower: {', '.join(reasons)}"


def settings(one: Candidate, than: Candidate | None = None) -> str:
    """Return a layout in words, of its settings only those that differ from another's."""
    layout, known = one.layout, None if than is None else than.layout
    parts = [str(one.mesh)]
    if layout.pipeline > 1 and (
        known is None or (layout.schedule, layout.stages_per_rank) != (known.schedule, known.stages_per_rank)
    ):
        stages = f" with {layout.stages_per_rank} stages per rank" if layout.stages_per_rank > 1 else ""
        parts.append(layout.schedule + stages)
    if known is None or layout.microbatch != known.microbatch:
        parts.append(f"microbatches of {layout.microbatch}")
    if known is None or layout.zero != known.zero:
        parts.append(f"ZeRO {layout.zero}")
    if known is None or layout.recompute != known.recompute:
        parts.append("no recomputation" if layout.recompute == "none" else f"{layout.recompute} recomputation")
    return ", ".join(parts)


def _differences(
    chosen: Seconds, other: Seconds, least: float
) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
    """Return what `other` loses and what it saves, item by item, the largest first."""
    by = {item.name: getattr(other, item.name) - getattr(chosen, item.name) for item in fields(Seconds)}
    lost = sorted(((item, delta) for item, delta in by.items() if delta > least), key=lambda one: -one[1])
    saved = sorted(((item, -delta) for item, delta in by.items() if delta < -least), key=lambda one: -one[1])
    return lost or [max(by.items(), key=lambda one: one[1])], saved


def _as_fast(chosen: Candidate, other: Candidate) -> str:
    more = (other.bytes - chosen.bytes) / _GIB
    if more >= 0.05:
        return f"as fast, but holds {more:.1f} GiB more"
    if more <= -0.05:
        return f"{max(other.seconds / chosen.seconds - 1, 0):.2%} slower, and holds {-more:.1f} GiB less"
    return "as fast, in as much memory"


def _seconds(value: float) -> str:
    """Return seconds as a sentence has them.

    >>> _seconds(2.13), _seconds(0.0412)
    ('2.1 s', '41 ms')
    """
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.0f} ms" if value >= 1e-3 else f"{value * 1e3:.2g} ms"
