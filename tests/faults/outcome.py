"""What a run came to, read from its folder without Drumline: losses of its steps, and every tensor at its end."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

TOLERANCE = 1e-6


@dataclass(frozen=True)
class Outcome:
    """Losses by step, counted from 1; the last checkpoint's tensors as hashes of their bytes; and its other state."""

    losses: dict[int, float]
    tensors: dict[str, str]
    state: dict[str, Any]

    @property
    def first(self) -> int:
        """The first step that it made."""
        return min(self.losses)


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted((folder / "checkpoints").glob("step-*"))


def step_of(checkpoint: Path) -> int:
    """Return the step after which it was saved."""
    return int(checkpoint.name.removeprefix("step-"))


def losses_of(folder: Path) -> dict[int, float]:
    """Return the loss of every step that the folder knows of; what a run that was killed left half is passed over."""
    found = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            read = json.loads(line)
        except ValueError:
            continue
        if "train/step" in read:
            loss = read.get("train/loss")
            found[int(read["train/step"])] = float("nan") if loss is None else float(loss)
    return found


def outcome_of(folder: Path) -> Outcome:
    """Return what the run in a folder came to."""
    last = checkpoints(folder)[-1]
    tensors = {}
    for file in sorted(last.glob("*.safetensors")):
        with safe_open(file, framework="pt") as inside:
            for name in inside.keys():  # noqa: SIM118 - it is no mapping
                value = inside.get_tensor(name).contiguous()
                raw = value.flatten().view(torch.uint8).numpy().tobytes()
                key = f"{file.name.partition('-')[0]}: {name}"
                assert key not in tensors, f"{last} holds {key} twice"
                tensors[key] = sha256(f"{value.dtype}{tuple(value.shape)}".encode() + raw).hexdigest()
    content = json.loads((last / "manifest.json").read_text())["content"]
    state = {name: content[name] for name in ("step", "extra", "generators", "optimizers") if name in content}
    return Outcome(losses_of(folder), tensors, state)


def same(found: Outcome, expected: Outcome) -> None:
    """Demand equality to the last bit: every loss that was found, every tensor at the end, every other state."""
    assert found.losses, "the run told no loss"
    for step, loss in found.losses.items():
        without = expected.losses[step]
        assert repr(loss) == repr(without), f"step {step}: loss {loss!r}, and {without!r} without fault"  # NaN too
    assert max(found.losses) == max(expected.losses), f"ended after step {max(found.losses)}"
    names = found.tensors.keys() ^ expected.tensors.keys()
    assert not names, f"tensors that only one run has: {sorted(names)[:3]}"
    other = [name for name, value in expected.tensors.items() if found.tensors[name] != value]
    assert not other, f"{len(other)} of {len(expected.tensors)} tensors differ, such as {other[0]}"
    assert any(name.startswith("training: ") for name in found.tensors), "no state of an optimizer was saved"
    assert found.state == expected.state, "step, data position, optimizer settings or generators differ"


def near(found: dict[int, float], expected: dict[int, float] | Sequence[float]) -> float:
    """Demand losses within 1e-6 relative of those expected, NaN where NaN is expected; returns the largest distance."""
    by_step = expected if isinstance(expected, dict) else dict(enumerate(expected, 1))
    assert found, "the run told no loss"
    worst = 0.0
    for step, loss in found.items():
        if math.isnan(by_step[step]):
            assert math.isnan(loss), f"step {step}: loss {loss!r}, expected NaN"
            continue
        distance = abs(loss - by_step[step]) / abs(by_step[step])
        assert distance <= TOLERANCE, f"step {step}: loss {loss!r}, expected {by_step[step]!r} within {TOLERANCE:g}"
        worst = max(worst, distance)
    return worst
