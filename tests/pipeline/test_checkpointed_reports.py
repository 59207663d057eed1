"""A report of a checkpointed run has one number for what a rank held at most, and it is the bytes that were there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import drumline as dl
from drumline.cli.main import main
from drumline.core.simulate.simulate import simulate
from drumline.core.units import size_text
from drumline.pipeline.pipeline import Pipeline
from drumline.report.draw.scene import document
from drumline.report.run.page import run_page
from drumline.report.run.report import report_of
from drumline.report.run.text import ranks_table
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.features("record")]
WIDTH, ROWS, NUM_MICROBATCHES = 16, 4, 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


def saved_bytes(stage: nn.Module, value: Tensor) -> int:
    """Return what torch itself keeps of one forward: every storage once, without parameters and the input."""
    sizes: dict[int, int] = {}

    def seen(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        kept = stage(value.requires_grad_())
    for own in (value, *stage.parameters()):
        sizes.pop(own.untyped_storage().data_ptr(), None)
    assert kept.grad_fn is not None
    return sum(sizes.values())


def record(folder: Path, schedule: str, checkpoint: str) -> None:
    settings: dict[str, Any] = {"schedule": schedule, "num_microbatches": NUM_MICROBATCHES, "num_ranks": 2}
    with Pipeline(
        model(), loss_fn=nn.functional.mse_loss, checkpoint=checkpoint, record=folder, balance="even", **settings
    ) as pipe:
        for _ in range(3):
            batch = torch.randn(ROWS * NUM_MICROBATCHES, WIDTH)
            pipe.step(batch, target=batch.flip(1))


def expected_peaks(schedule: str, checkpoint: str) -> list[int]:
    """Return the bytes that each rank must hold at most, from what torch saves of each half of the model."""
    halves = model()[:2], model()[2:]
    whole = [saved_bytes(half, torch.randn(ROWS, WIDTH)) for half in halves]
    output = ROWS * WIDTH * 4  # of every microbatch, which the loss keeps on the last rank; recomputing makes another
    held = {"gpipe": [NUM_MICROBATCHES, NUM_MICROBATCHES], "1f1b": [2, 1]}[schedule]
    if checkpoint == "none":
        return [number * size for number, size in zip(held, whole, strict=True)]
    return [whole[0], whole[1] + held[1] * output]


@pytest.mark.parametrize("checkpoint", ["full", "none"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_all_places_of_a_report_name_the_bytes_that_were_held(
    tmp_path: Path, schedule: str, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    record(folder, schedule, checkpoint)
    expected = expected_peaks(schedule, checkpoint)
    assert min(expected) > 0
    run = dl.read_run(folder)
    for step in some(run.steps):
        report = report_of(run, step=step)
        found = report.to_json()
        assert [value["peak_stash_bytes"] for value in found["per_rank"]] == expected
        for which in ("measured", "simulated"):
            assert found[which]["peak_stash_bytes"] == found[which]["peak_bytes"] == expected
            timeline = getattr(report.step, which)
            assert [row["peak_bytes"] for row in document([timeline])["timelines"][0]["rows"]] == expected
        table = ranks_table(report).splitlines()
        assert [line.rstrip().endswith(size_text(size)) for line, size in zip(table[-2:], expected, strict=True)] == [
            True,
            True,
        ]
        page = run_page([report])
        assert page.count(size_text(max(expected))) >= 2  # the card and the panel
    first = run.metrics()[0]
    assert [first[f"pp/rank{rank}/peak_stash_bytes"] for rank in range(2)] == expected
    assert main(["report", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    told = told["runs"][0] if "runs" in told else told
    assert told["measured"]["peak_stash_bytes"] == told["simulated"]["peak_stash_bytes"] == expected


def test_bytes_of_a_checkpointed_run_predict_those_of_another_number_of_microbatches(tmp_path: Path) -> None:
    record(tmp_path / "run", "1f1b", "full")
    costs = dl.read_run(tmp_path / "run").timeline(0).measured_costs()
    assert costs.recomputes(2) == (True, True)
    other = simulate(dl.generate("gpipe", num_ranks=2, num_microbatches=NUM_MICROBATCHES), costs)
    assert [holding.peak_stash_bytes for holding in other.memory] == expected_peaks("gpipe", "full")
    measured = dl.read_run(tmp_path / "run").timeline(0)
    seconds = measured.median_seconds()
    # A backward that runs its forward again cannot take less than that; on a busy machine a median may say so.
    seconds["backward_input"] = [*map(max, seconds["backward_input"], seconds["forward"])]
    again = simulate(measured.program, costs)
    assert again.busy == pytest.approx(simulate(measured.program, dl.Costs(**seconds)).busy)


def test_a_record_without_bytes_within_actions_is_not_weighed(tmp_path: Path) -> None:
    record(tmp_path / "run", "1f1b", "full")
    for rank in range(2):
        path = tmp_path / "run" / f"rank{rank}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line.pop("peaks", None)
        path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    report = report_of(dl.read_run(tmp_path / "run"))
    assert [entry["peak_stash_bytes"] for entry in report.ranks] == [None, None]
    assert report.step.measured.peak_bytes is None
    assert report.step.simulated.peak_bytes is None
