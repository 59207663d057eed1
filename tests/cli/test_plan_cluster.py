"""`drumline plan MODEL`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from drumline.cli.main import main
from train_configs import read_train_config

SMALL = ("gpt-1.7b", "--hardware", "a100-40", "--gpus", "8", "--batch", "16")
FAST = ("--microbatch", "2", "--zero", "1", "--schedules", "1f1b,interleaved-1f1b")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", *words])
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    code, out, _ = run(capsys, *words, "--json")
    assert code == 2
    found: dict[str, str] = json.loads(out)
    return found


@pytest.mark.slow
def test_plan_prints_the_choice_and_its_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *SMALL, *FAST)
    assert (code, err) == (0, "")
    assert out.startswith("gpt-1.7b on 8 x A100 40 GB in 1 node, 16 sequences of 2048 tokens per step\nRun TP")
    for words in (
        "Why the others lose:",
        "What more hardware would gain:",
        "one more GiB per device",
        "Start it: drumline train plan.toml",
    ):
        assert words in out
    _, out, _ = run(capsys, *SMALL, *FAST, "--zero", "3", "--brief", "--launch", "torchtitan")
    assert "Start it: torchrun --standalone --nproc-per-node 8" in out


def test_plan_recomputes_projections_of_latents(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--hardware", "h800", "--gpus", "2048", "--batch", "4096", "--pipeline", "16", "--microbatch", "1")
    pins = (*words, "--schedules", "1f1b", "--launch", "megatron", "--brief", "--recompute")
    again = "input-norms+expert-norms+projections"
    code, out, _ = run(capsys, "deepseek-v3", *pins, again, "--expert", "64")
    assert code == 0
    told = "recomputation of norms before attention, norms before experts and projections of latents"
    assert told in " ".join(out.split())
    code, _, error = run(capsys, "mixtral-8x7b", *pins, again)
    assert code == 2
    assert f"recompute is '{again}', but mixtral-8x7b has no latent attention" in " ".join(error.split())
    # Norms of latents are part of the projections behind them.
    code, _, error = run(capsys, "deepseek-v3", *pins, "norms+projections")
    assert code == 2
    assert "megatron does not recompute as 'norms+projections' says" in " ".join(error.split())
    # One of the two norms is not recomputed without the other.
    code, _, error = run(capsys, "deepseek-v3", *pins, "expert-norms")
    assert code == 2
    assert "megatron does not recompute expert-norms of deepseek-v3" in " ".join(error.split())


def test_json_has_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *SMALL, *FAST, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["format"], found["version"]) == ("drumline-cluster-plan", 1)
    assert found["chosen"]["peak_bytes"] <= found["limit_bytes"]
    parts = {"best", "changes", "more", "pareto", "scaling", "traffic", "launch", "ranks", "objective", "timeline"}
    assert parts <= found.keys()
    layout = found["chosen"]["layout"]
    assert layout["tensor"] * layout["pipeline"] * layout["data"] * layout["context"] == 8


def test_brief_leaves_the_explanations_out(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *SMALL, *FAST, "--brief", "--json")
    assert code == 0
    assert "more" not in json.loads(out)


@pytest.mark.slow
def test_out_writes_page_picture_json_and_configs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, begins in (("plan.html", "<!doctype html>"), ("plan.svg", "<svg")):
        code, out, _ = run(capsys, *SMALL, *FAST, "--pipeline", "2", "--out", str(tmp_path / name))
        assert code == 0
        assert f"wrote {tmp_path / name}" in out
        assert (tmp_path / name).read_text().startswith(begins)
    brief = (*SMALL, *FAST, "--brief", "--pipeline", "2")
    assert run(capsys, *brief, "--out", str(tmp_path / "plan.json"))[0] == 0
    layout = json.loads((tmp_path / "plan.json").read_text())["chosen"]["layout"]
    assert run(capsys, *brief, "--out", str(tmp_path / "plan.toml"))[0] == 0
    read = read_train_config((tmp_path / "plan.toml").read_text())
    assert {name: getattr(read, name) for name in ("tensor", "pipeline", "data", "schedule")} == {
        name: layout[name] for name in ("tensor", "pipeline", "data", "schedule")
    }
    assert run(capsys, *brief, "--zero", "3", "--launch", "torchtitan", "--out", str(tmp_path / "titan.toml"))[0] == 0
    assert tomllib.loads((tmp_path / "titan.toml").read_text())["parallelism"]["pipeline_parallel_degree"] == 2
    assert run(capsys, *brief, "--launch", "megatron", "--out", str(tmp_path / "plan.args"))[0] == 0
    assert "--pipeline-model-parallel-size 2" in (tmp_path / "plan.args").read_text()


def test_a_config_of_hugging_face_is_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "vocab_size": 50257,
        "n_positions": 1024,
    }
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for subject in (folder, folder / "config.json"):
        code, out, _ = run(capsys, str(subject), *SMALL[1:], *FAST, "--brief")
        assert code == 0
        assert out.startswith("mine on 8 x A100 40 GB")


def test_memory_and_headroom_are_settings(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *SMALL, *FAST, "--brief", "--json", "--memory", "20GiB", "--headroom", "0.25")
    assert json.loads(out)["limit_bytes"] == 15 * 2**30


def test_nodes_and_their_devices_make_the_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("gpt-1.7b", "--hardware", "a100-40", "--batch", "16", *FAST, "--brief", "--json")
    _, out, _ = run(capsys, *words, "--nodes", "4", "--gpus-per-node", "2")
    cluster = json.loads(out)["cluster"]
    assert (cluster["num_devices"], cluster["devices_per_node"]) == (8, 2)
    assert {value["layout"]["tensor"] for value in json.loads(out)["best"]} <= {1, 2}
    error = refused(capsys, *words[:-1], "--nodes", "4", "--gpus-per-node", "2", "--gpus", "9")
    assert error["error"] == "--nodes 4 x --gpus-per-node 2 is 8 devices, not --gpus 9"


@pytest.mark.parametrize(
    ("words", "error", "fix"),
    [
        (("gpt-1.7", *SMALL[1:]), "unknown model 'gpt-1.7'", "did you mean gpt-1.7b?"),
        (
            ("gpt-1.7b", "--hardware", "h10", "--gpus", "8", "--batch", "16"),
            "unknown hardware 'h10'",
            "did you mean h100 or h100-96?",
        ),
        (
            (*SMALL, "--tensor", "2", "--pipeline", "2", "--data", "4"),
            "TP 2 x PP 2 x DP 4 needs 16 devices, but the cluster has 8",
            "use DP 2",
        ),
        ((*SMALL, "--tensor", "3"), "TP 3 does not divide 8 devices", "use TP 2 or 4"),
        ((*SMALL, "--tensor", "16"), "TP 16 does not divide the number of attention heads", "use TP 8"),
        ((*SMALL, "--recompute", "ful"), "recompute is pinned to 'ful'", "did you mean full?"),
        ((*SMALL, "--schedules", "1f1v"), "schedule is pinned to '1f1v'", "did you mean 1f1b?"),
        (("gpt-1.7b", "--gpus", "8", "--batch", "16"), "--hardware is missing", "for example"),
        ((*SMALL, "--tensor", "0"), "--tensor is 0", ""),
        ((*SMALL, "--out", "plan.pdf"), "--out is plan.pdf", ""),
        ((*SMALL, "--brief", "--out", "plan.html"), "--out is plan.html, with --brief", "omit --brief"),
        ((*SMALL, "--brief", "--launch", "megatron", "--out", "plan.toml"), "megatron takes plan.args", "plan.args"),
        (("missing.json", *SMALL[1:]), "missing.json", ""),
        ((*SMALL, "--microbatch", "3"), "microbatches of 3 do not divide a batch of 16 sequences", ""),
        (
            (*SMALL, "--schedules", "zb-v", "--stages-per-rank", "3"),
            "allows schedule zb-v, stages per rank 3",
            "2 for zb-v",
        ),
    ],
)
def test_bad_input_is_refused(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], error: str, fix: str) -> None:
    found = refused(capsys, *words)
    assert error in found["error"]
    assert fix in found["fix"]


def test_a_model_that_fits_nowhere_is_refused_with_what_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "gpt-39.1b",
        "--hardware",
        "a100-40",
        "--gpus",
        "8",
        "--batch",
        "64",
        "--recompute",
        "none",
        "--microbatch",
        "1",
    )
    found = refused(capsys, *words)
    assert "gpt-39.1b does not fit on 8 x A100 40 GB: the smallest layout" in found["error"]
    assert "at most 36.0 GiB with 10% headroom" in found["expected"]
    assert "the smallest that fits:" in found["fix"]


def test_flags_of_the_other_kind_of_subject_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, *SMALL, "--ranks", "2")["error"]
    assert error == "--ranks is for a profile, but gpt-1.7b is a model on a cluster"


@pytest.mark.parametrize("words", [(), ("--ranks", "2"), ("--hardware", "nosuch"), SMALL[1:]])
def test_a_model_that_is_not_known_is_told_before_flags(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    error = refused(capsys, "gpt-1.7", *words)
    assert (error["error"], error["fix"]) == ("unknown model 'gpt-1.7'", "did you mean gpt-1.7b?")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"form', "not JSON"),
        ("", "not JSON"),
        ("[1]", "the JSON holds a list, not an object"),
        ("{}", "has no num_hidden_layers"),
    ],
)
def test_a_file_that_is_neither_profile_nor_config_is_named_with_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, error: str
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    for words in (("--ranks", "2", "--batch", "8"), SMALL[1:]):
        found = refused(capsys, str(path), *words)
        assert found["error"].startswith(f"{path}: ")
        assert error in found["error"]
        assert "`drumline profile --out FILE.json` wrote" in found["expected"]


def test_a_subject_that_is_a_path_to_nothing_is_no_unknown_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, "nofolder/llama")["error"] == "no such file: nofolder/llama"
    found = refused(capsys, str(tmp_path))
    assert found["error"] == f"{tmp_path} is a folder without config.json"
    assert "config.json" in found["expected"]
