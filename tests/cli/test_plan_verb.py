"""`drumline plan PROFILE.json` and `drumline profile`: what they print, draw and refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.cli.main import main
from drumline.core.costs import Edge
from drumline.core.errors import PlanError
from drumline.plan.device.blocks import OpTimes
from drumline.plan.device.model_profile import ModelProfile
from drumline.plan.device.plan import Plan
from drumline.report.plan.profiles import profile_text
from profiles import SOME, model_profile
from some import some

FEW = ("--schedules", "1f1b,zb-h1", "--seconds", "0")


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    model_profile([0.001, 0.004, 0.004, 0.006], overheads=SOME, held=2**20, weights=2**20).save(path)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def test_plan_shows_what_it_chose_from_and_why(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out_file = tmp_path / "plan.json"
    code, out, err = run(capsys, "plan", profile, "--ranks", "2", "--batch", "8", *FEW, "--out", str(out_file))
    assert (code, err) == (0, "")
    assert "made up on 2 ranks, a batch of 8 rows: 6 combinations fit, 0 do not" in out
    assert out.count("chosen") == 1
    assert "bubble" in out
    assert Plan.load(out_file).schedule == "zb-h1"


@pytest.mark.slow
@pytest.mark.parametrize("columns", [90, 60])
def test_a_narrow_terminal_still_says_why_not(
    profile: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = run(capsys, "plan", profile, "--ranks", "2", "--batch", "8", "--seconds", "0", "--memory", "14MiB")
    rows = [line for line in out.splitlines() if " longer" in line or " too much on rank " in line]
    assert len(rows) >= 5
    assert max(map(len, out.splitlines())) <= columns


def test_a_profile_of_a_busy_machine_is_told_with_its_plan(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ModelProfile.load(profile)
    rows, largest = found.sizes[-1]
    spreads = [OpTimes(0.1 * layer.times.forward, 0.1 * layer.times.backward, 0.0, 0.0) for layer in largest.layers]
    layers = tuple(replace(layer, spreads=spread) for layer, spread in zip(largest.layers, spreads, strict=True))
    noisy = replace(found, sizes=(*found.sizes[:-1], (rows, replace(largest, layers=layers))))
    noisy.save(tmp_path / "noisy.json")
    _, out, _ = run(capsys, "plan", str(tmp_path / "noisy.json"), "--ranks", "2", "--batch", "8", *FEW)
    assert "This machine was busy: half of the runs differ by 10% or more from a block's time." in " ".join(out.split())
    assert "the machine was busy" in profile_text(noisy)
    assert "the machine was busy" not in profile_text(found)


def test_plan_as_json_has_all_of_it(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "plan", profile, "--ranks", "2", "--batch", "8", *FEW, "--memory", "20MiB", "--headroom", "0", "--json"
    )
    found = json.loads(out)
    assert code == 0
    assert set(found) == {"best", "candidates", "rejected", "busy_machine"}
    assert found["busy_machine"] == ""
    best = found["best"]
    assert best["step_seconds"] == pytest.approx(sum(best["seconds"].values()))
    assert max(value["total"] for value in best["rank_bytes"]) <= 20 * 2**20
    assert found["candidates"][0]["step_seconds"] == best["step_seconds"]
    assert all(some("why_not" in candidate for candidate in [*found["candidates"][1:], *found["rejected"]]))
    assert all(not value["fits"] and value["why_not"].endswith(" MiB over") for value in found["rejected"])
    assert found["rejected"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--ranks", "0", "--batch", "8"), "--ranks is 0"),
        (("--ranks", "2", "--batch", "0"), "--batch is 0"),
        (("--ranks", "2"), "--batch is missing"),
        (("--batch", "8"), "--ranks is missing"),
        (("--ranks", "2", "--batch", "8", "--headroom", "1.5"), "headroom is 1.5"),
        (("--ranks", "2", "--batch", "8", "--memory", "0"), "is not more than 0"),
        pytest.param(("--ranks", "2", "--batch", "8", "--memory", "1KiB"), "nothing fits", marks=pytest.mark.slow),
        (("--ranks", "2", "--batch", "8", "--rank-speed", "1"), "1 speeds"),
        (("--ranks", "2", "--batch", "8", "--link", "0-1"), "is not a link like"),
        (("--ranks", "2", "--batch", "8", "--out", "plan.docx"), "--out is plan.docx"),
        (("--ranks", "2", "--batch", "8", "--schedules", "1f1v"), "unknown schedule"),
    ],
)
def test_bad_input_is_refused(
    words: tuple[str, ...], reason: str, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "plan", profile, "--seconds", "0", *words)
    assert (code, out) == (2, "")
    assert reason in err


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", str(tmp_path / "none.json"), "--ranks", "2", "--batch", "8")
    assert code == 2
    assert "none.json" in err
    old = tmp_path / "old.json"
    old.write_text(json.dumps({"format": "drumline profile", "version": 0}))
    code, _, err = run(capsys, "plan", str(old), "--ranks", "2", "--batch", "8")
    assert code == 2
    assert "the profile has version 0" in err
    old.write_text('{"format": "drumline profile", ')
    code, out, _ = run(capsys, "plan", str(old), "--ranks", "2", "--batch", "8", "--json")
    assert code == 2
    assert "old.json: not JSON" in json.loads(out)["error"]


def test_a_profile_is_shown_and_drawn_again(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, page = tmp_path / "profile.svg", tmp_path / "profile.html"
    code, out, _ = run(capsys, "profile", profile, "--out", str(picture), "--out", str(page))
    assert code == 0
    assert "microbatches of 4:" in out
    assert "<svg" in picture.read_text()
    assert "<svg" in page.read_text()
    code, out, _ = run(capsys, "profile", profile, "--json")
    assert json.loads(out)["model"]["name"] == "made up"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--microbatch-sizes", "0,1"), "contains a size below 1"),
        (("--microbatch-sizes", "a"), "is not a whole number"),
        (("--out", "profile.docx"), "--out is profile.docx"),
    ],
)
def test_a_profile_of_nonsense_is_refused(
    words: tuple[str, ...], reason: str, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "profile", profile, *words)
    assert code == 2
    assert reason in err


def test_a_plan_is_drawn(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, begin in (("plan.html", "<!doctype html>"), ("plan.svg", "<svg")):
        code, _, _ = run(capsys, "plan", profile, "--ranks", "2", "--batch", "8", *FEW, "--out", str(tmp_path / name))
        assert code == 0
        assert (tmp_path / name).read_text().startswith(begin)


def test_flags_for_clusters_are_refused(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", profile, "--ranks", "2", "--batch", "8", "--gpus", "8")
    assert code == 2
    assert "--gpus is for a model on a cluster" in err


def test_a_link_is_one_in_both_directions(
    profile: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []

    def plan(*_: object, **given: Any) -> Any:
        told.append(given)
        raise PlanError("enough")

    monkeypatch.setattr("drumline.plan.device.planner.plan", plan)
    monkeypatch.setattr("drumline.cli.plan_profile.plan", plan, raising=False)
    words = ("--ranks", "3", "--batch", "8", "--link", "0-1:1e-5:1e9", "--link", "2-1:2e-5:2e9")
    assert run(capsys, "plan", profile, *words)[0] == 2
    slow, fast = Edge(1e-5, 1e9), Edge(2e-5, 2e9)
    assert told[0]["links"] == {(0, 1): slow, (1, 0): slow, (1, 2): fast, (2, 1): fast}
