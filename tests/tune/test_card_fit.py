"""`--dry-run` says whether a run with an adapter fits on its cards, and what to try next if it does not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from drumline.cli.main import main
from drumline.core.errors import ConfigError
from drumline.model.quantised.packed import num_bytes
from drumline.train.dry.dry_run import DryRun, dry_run
from drumline.train.tune.build_tuned import build_tuned
from matrices import long
from refused import refused
from tune.llama import chats as chats_of
from tune.runs import settings_of

KEYS: dict[str, Any] = {
    "adapter__rank": 16, "batch__sequences": 8, "batch__microbatch": 4, "pipeline__device": "cpu",
    "optimizer__kind": "AdamW",
}  # fmt: skip


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chats_of(tmp_path_factory.mktemp("data") / "chats.jsonl", 200)


def forecast(llama: Path, chats: Path, tmp_path: Path, **keys: Any) -> DryRun:
    return dry_run(settings_of(llama, chats, tmp_path / "run", **KEYS, **keys))


def test_memory_of_an_adapter_and_its_base_is_counted_apart(llama: Path, chats: Path, tmp_path: Path) -> None:
    found = forecast(llama, chats, tmp_path, adapter__base="nf4")
    model = build_tuned(found.settings, device="meta").model
    trained = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    ranks = found.forecast.ranks
    assert sum(rank.gradients for rank in ranks) == trained
    assert sum(rank.optimizer for rank in ranks) == pytest.approx(2 * trained, rel=0.01), "AdamW keeps two of each"
    every = sum(num_bytes(param) for param in model.parameters())
    assert sum(rank.weights for rank in ranks) == pytest.approx(every, rel=0.02)
    told = found.summary()
    assert told["trained_parameters"] == trained // 4
    assert told["fit"] is None, "on a host, without a card that is named"


def test_a_run_that_does_not_fit_says_what_to_try_next(llama: Path, chats: Path, tmp_path: Path) -> None:
    roomy = forecast(llama, chats, tmp_path, memory__card="rtx-4090")
    assert roomy.fit is not None
    assert roomy.fit.fits
    assert not roomy.fit.remedies
    most = max(rank.total for rank in roomy.forecast.ranks)
    tight = forecast(llama, chats, tmp_path, memory__card=f"{max(1.0, most / 0.95 / 1e6):f}MB", batch__sequence=64)
    assert tight.fit is not None
    assert not tight.fit.fits
    changes = {remedy.change: remedy for remedy in tight.fit.remedies}
    assert {"--recompute full", "-m 8", "--base nf4", "--adapter-rank 8"} <= changes.keys()
    assert tight.fit.next_change
    # What is foretold of a change is what a dry run of the changed run says.
    smaller = forecast(llama, chats, tmp_path, batch__sequence=64, memory__recompute="full")
    assert changes["--recompute full"].num_bytes == max(rank.total for rank in smaller.forecast.ranks)
    base = forecast(llama, chats, tmp_path, batch__sequence=64, adapter__base="nf4")
    assert changes["--base nf4"].num_bytes == pytest.approx(max(rank.total for rank in base.forecast.ranks), rel=0.02)


def test_the_command_line_tells_it_and_the_answer_no_is_1(
    llama: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(llama), "--adapter", "lora", "--data", str(chats), "--batch", "32", "-m", "2", "--dry-run"]
    words += ["--sequence", "64", "--device", "cpu", "--out", str(tmp_path / "run")]
    assert main(["train", *words, "--card", "1MB"]) == 1
    told = capsys.readouterr().out
    assert "It does not fit on a card of 977 KiB" in told
    assert "Try next: " in told
    picture = tmp_path / "cards.svg"
    assert main(["train", *words, "--card", "l40s", "--json", "--picture", str(picture)]) == 0
    told_json = json.loads(capsys.readouterr().out)
    assert told_json["fit"]["fits"]
    drawn = picture.read_text()
    assert drawn.count(", frozen weights: ") == len(told_json["rank_bytes"]) == drawn.count(", activations: ")
    assert ">room<" in drawn
    without = [word for word in words if word != "--dry-run"]
    assert main(["train", *without, "--picture", str(picture)]) == 2
    assert "--dry-run" in capsys.readouterr().err


def test_an_unknown_card_is_refused(llama: Path, chats: Path, tmp_path: Path) -> None:
    for name, fix in (("rtx-4091", "did you mean rtx-4090"), ("3090", "")):
        with refused(ConfigError, f"memory.card is '{name}'", expected="or a size like 24GiB", fix=fix):
            settings_of(llama, chats, tmp_path, memory__card=name)


@long
def test_data_that_training_refuses_are_forecast_like_others_of_full_rows(
    llama: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = chats_of(tmp_path / "few.jsonl", 2)
    found, enough = forecast(llama, few, tmp_path), forecast(llama, chats, tmp_path)
    assert re.match("the data have . rows?, and a step takes 8; .*--batch", found.drawn)
    assert not enough.drawn
    assert found.forecast.ranks == enough.forecast.ranks
    bare = tmp_path / "bare" / "config.json"
    bare.parent.mkdir()
    config = json.loads((llama / "config.json").read_text()) | {"vocab_size": 300}
    bare.write_text(json.dumps(config))
    words = ["--model", str(bare), "--adapter", "lora", "--data", str(few), "--dry-run", "--device", "cpu"]
    assert main(["train", *words, "--sequence", "32", "--out", str(tmp_path / "run")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Its rows are drawn, and full. Training refuses the data: data.chat_template is not set" in told
    assert main(["train", *words, "--sequence", "32", "--data", str(tmp_path / "none.jsonl")]) == 2, "no such file"
