"""What was changed during a run: each decision with what was predicted, what moved, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drumline.core.parsed import LARGEST
from drumline.core.units import duration, size_text

Line = Mapping[str, Any]


def changes_of(decisions: Sequence[Line]) -> list[dict[str, Any]]:
    """Return the changes of a run from the lines of `decisions.jsonl`, in order.

    `step` is the first step after a change. A move by hand has no reason and no prediction.

    >>> decided = {"step": 7, "kind": "cut", "why": "rank 1 is slow", "seconds": 2.0, "predicted": 1.5}
    >>> moved = {"step": 8, "kind": "move", "balance_before": [4, 4], "balance_after": [5, 3], "bytes_moved": 64,
    ...          "seconds": {"send": 0.25, "rebuild": 0.5}}
    >>> came = {"step": 12, "kind": "cut", "of": 7, "predicted": 1.5, "real": 1.6, "without": 2.0, "kept": True}
    >>> (change,) = changes_of([decided, moved, came])
    >>> change["step"], change["after"], change["pause"], change["real"], change["kept"]
    (8, '5 | 3 blocks', 0.75, 1.6, True)
    """
    change: list[dict[str, Any]] = []
    for line in decisions:
        if "of" in line:
            for entry in change:
                if entry["decided"] == line["of"] and entry["kind"] == line["kind"]:
                    entry |= {"real": _number(line, "real"), "without": _number(line, "without")}
                    entry["kept"] = line.get("kept") is not False
        elif line.get("kind") == "move":
            before, after = (_blocks(line.get(f"balance_{when}")) for when in ("before", "after"))
            seconds = line.get("seconds")
            parts = seconds if isinstance(seconds, Mapping) else {}
            pause = sum(_number(parts, part) or 0.0 for part in parts)
            moved = {"before": before, "after": after, "pause": pause, "bytes": _number(line, "bytes_moved")}
            if change and change[-1]["kind"] == "cut" and change[-1]["step"] == line["step"]:
                change[-1] |= moved
            else:
                change.append(_change({**line, "step": line["step"] - 1, "kind": "cut", "seconds": None}) | moved)
        else:
            change.append(_change(line))
    return change


def _change(line: Line) -> dict[str, Any]:
    decided = line["step"]
    texts = {name: str(line.get(name) or "") for name in ("kind", "why", "before", "after")}
    numbers = {name: _number(line, name) for name in ("seconds", "predicted")}
    flags = {name: line.get(name) is True for name in ("back", "trial")}
    empty: dict[str, Any] = dict.fromkeys(("real", "without", "kept", "pause", "bytes"))
    return {"step": decided + 1, "decided": decided, **texts, **numbers, **flags, **empty}


def _number(line: Line, name: str) -> float | None:
    """Return a number of 0 or more, None for anything else."""
    value = line.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST
    return value if is_number else None


def _blocks(counts: Any) -> str:
    return f"{' | '.join(map(str, counts))} blocks" if isinstance(counts, list | tuple) else ""


HEADER = (
    "before step",
    "what",
    "from",
    "to",
    "why",
    "step before",
    "predicted",
    "real",
    "without it",
    "pause",
    "moved",
)


def cells(change: Line) -> list[str]:
    """Return a change as cells below `HEADER`.

    >>> cells(changes_of([{"step": 7, "kind": "program", "seconds": 2.0, "predicted": 1.5}])[0])[5:8]
    ['2 s', '1.5 s', '']
    """
    what = f"{change['kind']}, taken back" if change["kept"] is False else str(change["kind"])
    what = f"{what} (back)" if change["back"] else f"{what} (a try)" if change["trial"] else what
    times = [_time(change[name]) for name in ("seconds", "predicted", "real", "without", "pause")]
    texts = [change[name] for name in ("before", "after", "why")]
    moved = "" if not change["bytes"] else size_text(change["bytes"])
    return [str(change["step"]), what, *texts, *times, moved]


def _time(seconds: Any) -> str:
    return duration(seconds) if isinstance(seconds, int | float) else ""
