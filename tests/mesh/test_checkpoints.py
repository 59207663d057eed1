"""A checkpoint holds whole tensors by their names, so that any other mesh goes on from it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

import drumline as dl
from matrices import ALL, long
from mesh.plain import chain, loss_fn, trained, words
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.matrix]

SAVED, MORE = 2, 2
DP = {"pp": 2, "dp": 2}
KINDS = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}  # the second one looks at whole matrices
# Who saves, and who goes on from it: the mesh, zero, and the schedule.
SAVERS: dict[str, dict[str, Any]] = {
    "plain": {"mesh": DP},
    "zero 1": {"mesh": DP, "zero": 1},
    "zero 3": {"mesh": DP, "zero": 3, "schedule": "zb-v"},
}
GOING_ON: dict[str, dict[str, Any]] = {
    "the same": {},
    "pp4": {"mesh": {"pp": 4}, "zero": 0, "schedule": "1f1b"},
    "dp4": {"mesh": {"dp": 4}, "zero": 1, "schedule": "1f1b"},
    "zero 3": {"mesh": DP, "zero": 3, "schedule": "1f1b"},
}


if not ALL:  # `make matrices` tries all of them
    del SAVERS["plain"], GOING_ON["the same"], GOING_ON["zero 3"]


def _sums(pipe: dl.Pipeline) -> dict[str, str]:
    return {name: hashlib.sha256(entry.numpy().tobytes()).hexdigest() for name, entry in pipe.state_dict().items()}


def _run(options: dict[str, Any], kind: str, folder: Path, *, start: int, steps: int, save: bool) -> dict[str, Any]:
    count = options.get("mesh", {}).get("dp", 1)
    given = {"schedule": "1f1b", **options, "num_microbatches": 8 // count, "timeout": 120.0}
    with dl.Pipeline(chain(), loss_fn=loss_fn, **given) as pipe:
        optimizer = pipe.optimizer(KINDS[kind], lr=0.01)
        loaded = _sums(pipe) if not start else {}
        if start:
            found = pipe.load(folder)
            loaded = _sums(pipe)
            assert found.step == start
        losses = []
        for step in range(start, start + steps):
            number, parts = pipe.axes.rows
            x, y = (word.chunk(parts)[number] for word in words(step))
            losses.append(pipe.step(x, target=y).loss.item())  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        if save:
            pipe.save(folder, wait=True)
        return {"losses": losses, "loaded": loaded, "ended": _sums(pipe)}


def _others(kind: str) -> dict[str, dict[str, Any]]:
    """Return who can go on; nobody divides matrices that the optimizer needs whole."""
    return {name: entry for name, entry in GOING_ON.items() if kind == "adamw" or entry.get("zero") != 3}


def _all(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, saver in SAVERS.items():
        kind = "adafactor" if name == "zero 1" else "adamw"
        here = folder / name
        found[name] = _run(saver, kind, here, start=0, steps=SAVED, save=True)
        for other, options in _others(kind).items():
            found[f"{name} to {other}"] = _run({**saver, **options}, kind, here, start=SAVED, steps=MORE, save=False)
    return found


@long
def test_any_mesh_goes_on_from_a_checkpoint_of_another(tmp_path: Path) -> None:
    ranks = dl.launch(_all, tmp_path, num_ranks=4)
    for name in some(SAVERS):
        kind = "adafactor" if name == "zero 1" else "adamw"
        saved = {key: value for rank in ranks for key, value in rank[name]["ended"].items()}
        plain = trained(chain(), KINDS[kind], steps=SAVED + MORE, clip=False)[SAVED:]
        alone = _run({}, kind, tmp_path / name, start=SAVED, steps=MORE, save=False)
        assert alone["loaded"] == saved
        for other in some(_others(kind)):
            merged = {key: value for rank in ranks for key, value in rank[f"{name} to {other}"]["loaded"].items()}
            assert merged == saved
            losses = ranks[0][f"{name} to {other}"]["losses"]
            assert losses == pytest.approx([loss for loss, _ in plain], rel=1e-5)
            assert losses == pytest.approx(alone["losses"], rel=1e-6)
