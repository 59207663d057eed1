"""`drumline calibrate` and `drumline plan MODEL --hardware CALIBRATION.json`: what they print, write and refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from calibrations import calibration
from drumline.cli.main import main
from drumline.plan.calibrated.calibration import Calibration
from drumline.profile.calibrate.works import ACCELERATOR
from profiles import SOME, model_profile

SAVED = Path(__file__).parents[2] / "docs/profiles/calibration.json"
MODEL = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 2000,
    "max_position_embeddings": 128,
}


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(MODEL))
    return path


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibrated") / "mine.json"
    calibration(dtypes=("bf16", "fp32"), sizes=replace(ACCELERATOR, tokens=(512, 8192), lengths=(512, 8192))).save(path)
    return path


def test_a_saved_calibration_is_shown_and_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy.json"
    code, out, err = run(capsys, "calibrate", SAVED, "--out", copy)
    assert (code, err) == (0, "")
    assert "x86 processor (cpu)" in out
    assert Calibration.load(copy) == Calibration.load(SAVED)
    told = json.loads(run(capsys, "calibrate", SAVED, "--json")[1])
    assert told == json.loads(SAVED.read_text())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--seconds", "0"), "--seconds is 0"),
        (("--dtypes", "bf16,fp16"), "--dtypes names 'fp16'"),
        (("--devices", "0"), "--devices is 0"),
        (("no.json",), "cannot read no.json"),
    ],
)
def test_a_calibration_of_nonsense_is_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "calibrate", *words)
    assert (code, said in err) == (2, True), err


@pytest.mark.torch
def test_a_device_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "calibrate", "--device", "warp")
    assert (code, "no device 'warp'" in err) == (2, True)


def test_a_forecast_is_an_interval_and_says_what_it_is_of(
    model: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "plan", model, "--hardware", mine, "--batch", 8, "--sequence", 64)
    assert (code, err) == (0, "")
    assert out.startswith("small on one Imaginary 1, calibrated 2026-11-19")
    assert "8 sequences of 64 tokens per step, bf16, plain loss, adamw, no recomputation" in out
    assert "host-bound" in out
    assert "a guess" in out
    found = json.loads(run(capsys, "plan", model, "--hardware", mine, "--batch", 8, "--sequence", 64, "--json")[1])
    assert found["seconds"]["low"] < found["seconds"]["middle"] < found["seconds"]["high"]
    assert found["host_bound"] is True
    assert found["setting"]["rows"] == 8
    assert found["limit_bytes"] == 140 * 2**30


def test_settings_reach_the_forecast(model: Path, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dtype", "fp32", "--loss", "fused", "--optimizer", "muon", "--recompute", "full"]
    words += ["--memory", "1GiB", "--headroom", "0.5"]
    found = json.loads(run(capsys, "plan", model, "--hardware", mine, "--batch", 2, *words, "--json")[1])
    setting = {"rows": 2, "dtype": "fp32", "loss": "fused", "optimizer": "muon", "recompute": "full"}
    assert (found["setting"], found["limit_bytes"]) == (setting, 2**29)


@pytest.mark.parametrize(("limit", "said"), [(1e9, "fits in"), (70e6, "does not fit in"), (0, "may not fit in")])
def test_whether_it_fits_is_said(
    limit: float, said: str, model: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("plan", model, "--hardware", mine, "--batch", 2)
    if not limit:
        limit = json.loads(run(capsys, *words, "--json")[1])["peak_bytes"]["middle"]
    out = run(capsys, *words, "--memory", limit)[1]
    assert f", {said} " in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--batch is missing"),
        (("--batch", "0"), "--batch is 0"),
        (("--batch", "2", "--gpus", "8"), "--gpus is 8, but"),
        (("--batch", "2", "--tensor", "2"), "--tensor is not for a calibrated device"),
        (("--batch", "2", "--ranks", "2"), "--ranks is not for a calibrated device"),
        (("--batch", "2", "--recompute", "selective"), "recompute is 'selective'"),
        (("--batch", "2", "--optimizer", "sgd"), "optimizer is 'sgd'"),
    ],
)
def test_what_a_forecast_does_not_have_is_refused(
    words: tuple[str, ...], said: str, model: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "plan", model, "--hardware", mine, *words)
    assert (code, out) == (2, "")
    assert said in err


def test_flags_of_forecasts_need_a_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "profile.json"
    model_profile([0.001, 0.004], overheads=SOME).save(profile)
    for subject in (profile, "gpt-1.7b"):
        code, _, err = run(capsys, "plan", subject, "--loss", "fused", "--batch", 4)
        assert (code, "--loss is for a device that `drumline calibrate` measured" in err) == (2, True)


def test_a_model_with_other_layers_is_refused(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", "mixtral-8x7b", "--hardware", mine, "--batch", 2)
    assert (code, "mixtral-8x7b has experts" in err) == (2, True)


def test_a_damaged_calibration_is_no_other_hardware(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "old.json"
    old.write_text('{"format": "drumline calibration", "version": 0}')
    code, _, err = run(capsys, "plan", model, "--hardware", old, "--batch", 2)
    assert (code, "the calibration has version 0" in err, "calibrate again" in err) == (2, True, True)


@pytest.mark.torch
def test_the_command_measures_this_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from drumline.profile.calibrate import real_steps

    for name in ("host_times", "judges"):  # tests/profile measures these
        monkeypatch.setattr(real_steps, name, lambda *args: iter(()))
    file = tmp_path / "mine.json"
    words = ("--device", "cpu", "--seconds", "0.2", "--dtypes", "fp32", "--threads", "1")
    code, out, err = run(capsys, "calibrate", *words, "--out", file)
    assert (code, err) == (0, "")
    assert f"wrote {file}" in out
    found = Calibration.load(file)
    assert (found.device.kind, found.device.num_processors) == ("cpu", 1)
    assert {entry.work.dtype for entry in found.works} == {"fp32"}
