"""What a case of the mesh fuzzer came to: its ranks' numbers beside plain torch's, and their errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from mesh_cases import Case
from mesh_plain import Bounds, Results, wanted

Verdict = tuple[str, str]  # what a case came to, and how
Ranks = Sequence[dict[str, Any]]


def judged(case: Case, ranks: Ranks) -> Verdict:
    """Return what a case came to, from what its ranks tell."""
    errors = [rank["error"] for rank in ranks if "error" in rank]
    for kind in ("hang", "traceback", "WaitTimeout"):
        for name, text in errors:
            if name == kind:
                return "traceback" if kind == "traceback" else "died", text
    if errors:
        text = next((text for name, text in errors if name != "RankFailed"), errors[0][1])
        is_early = not any(rank["losses"] for rank in ranks) and len(errors) == len(ranks)
        if any(refusal in text for refusal in case.refusals) and is_early:
            return "refused", text
        return "wrong", f"refused: {text}"
    if case.refusal:
        return "wrong", f"not refused, expected {case.refusal!r}"
    off = difference(case, ranks, *wanted(case))
    return ("wrong", off) if off else ("equal", "")


def difference(case: Case, ranks: Ranks, known: Results, bounds: Bounds) -> str:
    """Return the first thing in which a case differs from plain torch, empty if there is none."""
    every = chain(
        *(_in_losses(step, ranks, known, bounds) for step in range(2)),
        *(_in_gradients(step, ranks, known, bounds) for step in range(2)),
        _in_the_end(case, ranks, known, bounds),
    )
    return next(every, "")


def _in_losses(step: int, ranks: Ranks, known: Results, bounds: Bounds) -> Iterator[str]:
    for at, rank in enumerate(ranks):
        loss, other = rank["losses"][step], known.losses[step]
        if not abs(loss - other) <= bounds.losses[step]:
            yield f"step {step}: the loss on rank {at} is {loss!r}, and {other!r} in plain torch" + _allowed(
                bounds.losses[step]
            )
        if loss != ranks[0]["losses"][step]:
            yield f"step {step}: ranks 0 and {at} have different losses"


def _in_gradients(step: int, ranks: Ranks, known: Results, bounds: Bounds) -> Iterator[str]:
    own = known.gradients[step]
    for at, rank in enumerate(ranks):
        for name, gradient in rank["gradients"][step].items():
            if name not in own:
                yield f"step {step}: {name} has a gradient on rank {at}, and none in plain torch"
            elif not (off := float((gradient - own[name]).norm())) <= bounds.gradients[step]:
                allowed = _allowed(bounds.gradients[step])
                yield f"step {step}: the gradient of {name} on rank {at} is off by {off:.3g}{allowed}"
    if missing := own.keys() - {name for rank in ranks for name in rank["gradients"][step]}:
        yield f"step {step}: no gradient of {', '.join(sorted(missing))}"


def _in_the_end(case: Case, ranks: Ranks, known: Results, bounds: Bounds) -> Iterator[str]:
    for at, rank in enumerate(ranks):
        for what in ("norm", "evaluated") if case.evaluates else ("norm",):
            value, allowed = getattr(known, what), getattr(bounds, what)
            if not abs(rank[what] - value) <= allowed:
                yield f"{what} on rank {at} is {rank[what]!r}, and {value!r} in plain torch{_allowed(allowed)}"
    state = {name: entry for rank in ranks for name, entry in rank["state"].items()}
    if state.keys() != known.state.keys():
        yield f"the state differs in {', '.join(sorted(state.keys() ^ known.state.keys()))}"
    for name, entry in state.items():
        other = known.state.get(name, entry)
        if not (off := float((entry.double() - other.double()).norm())) <= bounds.state:
            yield f"the state's {name} is off by {off:.3g}{_allowed(bounds.state)}"


def _allowed(bound: float) -> str:
    return f"; at most {bound:.3g} is right"
