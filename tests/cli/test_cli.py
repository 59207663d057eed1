"""`drumline simulate`, `check` and `compare`: what they print, write and refuse."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

import drumline
from drumline.cli.explore import PORT
from drumline.cli.main import VERBS, main
from drumline.core.costs import Costs
from drumline.core.lower.lower import lower
from drumline.core.program import Program
from drumline.core.prove.frozen import prune
from drumline.core.simulate.simulate import simulate
from drumline.report import explore_server
from drumline.schedules import unregister
from names import NAMES, build

COUNTS = ("--ranks", "4", "--microbatches", "8")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code, out, err = run(capsys, *words, "--json")
    assert err == ""
    value = json.loads(out)
    assert isinstance(value, dict)
    return code, value


@pytest.mark.parametrize("name", NAMES)
def test_simulate_prints_what_the_library_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(
        capsys, "simulate", name, *COUNTS, "--forward", "2", "--comm", "0.5", "--activation-bytes", "10"
    )
    timeline = simulate(build(name, 4, 8), Costs(forward=2, comm=0.5, activation_bytes=10))
    assert code == 0
    assert found["schedule"] == name
    assert (found["ranks"], found["stages"]) == (4, timeline.program.num_stages)
    assert found["microbatches"] == timeline.program.num_microbatches
    assert found["makespan"] == timeline.makespan
    assert (found["bubble"], found["span_bubble"]) == (timeline.bubble, timeline.span_bubble)
    assert found["idle"] == list(timeline.idle)
    assert found["peak_activations"] == list(timeline.peak_activations)
    assert found["peak_bytes"] == list(timeline.peak_bytes or ())
    for rank in range(4):
        assert sum(seconds[rank] for seconds in found["idle_by_cause"].values()) == pytest.approx(found["idle"][rank])


def test_frozen_stages_are_left_out_in_every_verb_that_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    pruned = prune(build("zb-v", 4, 8), [stage not in (0, 1, 2, 6) for stage in range(8)])
    frozen = ("--frozen", "0-2,6")
    assert run_json(capsys, "show", "zb-v", *COUNTS, *frozen, "--format", "csv")[1]["text"] == pruned.format()
    assert run_json(capsys, "simulate", "zb-v", *COUNTS, *frozen)[1]["makespan"] == simulate(pruned).makespan
    rows = run_json(capsys, "compare", *COUNTS, "--frozen", "0")[1]["rows"]
    halves = prune(build("zb-v", 4, 8), [stage > 1 for stage in range(8)])
    costs = Costs(forward=0.5, backward_input=0.5, backward_weight=0.5)
    assert next(row for row in rows if row["schedule"] == "zb-v")["makespan"] == simulate(halves, costs).makespan


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("simulate", "1f1b", "--frozen", "4"), "--frozen names stage 4"),
        (("compare", "--frozen", "3-4"), "--frozen names stage 4"),
        (("show", "1f1b", "--frozen", "2-1"), "'2-1' is not a list of stages like 0-2,5"),
        (("show", "1f1b", "--frozen", "1,"), "'1,' is not a list of stages like 0-2,5"),
    ],
)
def test_frozen_stages_that_are_not_there(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run_json(capsys, *words, *COUNTS)
    assert code == 2
    assert says in found["error"]


def test_bytes_are_reported_only_where_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert "peak_bytes" not in run_json(capsys, "simulate", "1f1b", *COUNTS)[1]


def test_costs_come_from_a_file_and_flags_override_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"forward": [2, 1, 1, 1], "backward_input": [2, 1, 1, 1], "backward_weight": [2, 1, 1, 1]}')
    words = ("simulate", "1f1b", *COUNTS, "--costs", str(path))
    assert run_json(capsys, *words)[1]["makespan"] == 51
    assert run_json(capsys, *words, "--forward", "1")[1]["makespan"] < 51


def test_a_csv_file_does_wherever_a_schedule_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.csv"
    lower(build("zb-v", 4, 8), channel="rank").save(path)
    assert run_json(capsys, "simulate", str(path))[1]["span"] == 48
    assert run(capsys, "show", str(path))[0] == 0
    assert run_json(capsys, "check", str(path)) == (0, {"ok": True, "channel": "rank", "violations": []})
    code, found = run_json(capsys, "simulate", str(path), "--ranks", "3")
    assert (code, found["error"]) == (2, f"--ranks is 3, but {path} has 4")


OWN = """
import drumline as dl
from drumline import F, B

@dl.schedule("own-{0}")
def own(num_ranks, *, num_microbatches):
    "One at a time."
    for rank in range(num_ranks):
        yield [op(rank, m) for m in range(num_microbatches) for op in (F, B)]
"""


def test_a_python_file_brings_its_own_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN.format("a"))
    try:
        assert run_json(capsys, "simulate", str(path), *COUNTS)[1]["makespan"] == 8 * 4 * 3
        code, found = run_json(capsys, "simulate", f"{path}:b", *COUNTS)
        assert (code, found["error"]) == (
            2,
            f"{path} failed with ScheduleError: a schedule named 'own-a' is already registered; choose another name",
        )
        path.write_text(OWN.format("b") + OWN.format("c"))
        assert "registers own-b, own-c" in run_json(capsys, "check", str(path), *COUNTS)[1]["error"]
    finally:
        for name in ("own-a", "own-b", "own-c"):
            unregister(name)
    path.write_text("1 / 0")
    assert "ZeroDivisionError" in run_json(capsys, "check", str(path), *COUNTS)[1]["error"]
    assert run(capsys, "check", "no-such.py", *COUNTS)[0] == 2


def test_compare_takes_names_python_files_and_csv_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, csv = tmp_path / "own.py", tmp_path / "saved.csv"
    path.write_text(OWN.format("a") + OWN.format("b"))
    try:
        assert run(capsys, "show", "gpipe", *COUNTS, "--out", str(csv))[0] == 0
        words = ("zb-h1", str(csv), f"{path}:own-a", f"{path}:own-b")
        code, found = run_json(capsys, "compare", *words, *COUNTS)
        assert code == 0
        assert [row["schedule"] for row in found["rows"]] == ["zb-h1", "saved", "own-a", "own-b"]
        assert run_json(capsys, "compare", str(csv))[1]["rows"][0]["microbatches"] == 8
        code, found = run_json(capsys, "compare", "1f1b", str(csv), "--ranks", "3")
        assert [value["schedule"] for value in found["left_out"]] == ["saved"]
    finally:
        for name in ("own-a", "own-b"):
            unregister(name)
    try:
        assert "registers own-a, own-b, not own-c" in refused_by(capsys, "compare", "1f1b", f"{path}:own-c")
    finally:
        for name in ("own-a", "own-b"):
            unregister(name)
    assert "unknown schedule 'zbh1'" in refused_by(capsys, "compare", "zbh1")
    assert "forward-only has no backward" in refused_by(capsys, "compare", "forward-only")
    assert "dualpipe cannot use 3 ranks" in refused_by(capsys, "compare", "dualpipe", "--ranks", "3")


def refused_by(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code, found = run_json(capsys, *words)
    assert code == 2
    return str(found["error"])


def test_a_limit_that_is_broken_is_a_no(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "simulate", "gpipe", *COUNTS, "--max-activations", "4")
    assert code == 1
    assert len(found["over_limit"]) == 4
    code, found = run_json(capsys, "simulate", "1f1b", *COUNTS, "--max-activations", "4")
    assert code == 0
    assert found["idle_by_cause"]["memory"][0] > 0


def test_intervals_explain_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "simulate", "1f1b", *COUNTS, "--intervals")
    assert code == 0
    assert "rank 0 idle 6 from 4: 0B0 waits for 1B0 of rank 1" in out


def test_compare_lists_all_best_first(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "compare", *COUNTS)
    assert code == 0
    assert {row["schedule"] for row in found["rows"]} == set(NAMES) - {"forward-only"}
    times = [row["seconds_per_microbatch"] for row in found["rows"]]
    assert times == sorted(times)
    by_name = {row["schedule"]: row for row in found["rows"]}
    assert by_name["1f1b"]["makespan"] == 33
    assert by_name["zb-v"]["makespan"] == 51 / 2
    printed = run(capsys, "compare", *COUNTS)[1].splitlines()
    table = printed[1 : printed.index("")]
    names = [line.split()[0] for line in table if not line.startswith("schedule ")]
    assert names == [row["schedule"] for row in found["rows"]]


def test_nothing_fits_is_a_no(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "compare", *COUNTS, "--max-activations", "0.5")[0] == 1


def test_check_returns_every_violation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("0B0,0F0,0F1,0B1\n1F0,1B0,1F1\n")
    code, found = run_json(capsys, "check", str(path))
    assert code == 1
    assert found["ok"] is False
    assert {"rank": 0, "index": 0, "action": "0B0", "reason": "runs before 0F0"} in found["violations"]
    assert any(violation["index"] is None and violation["action"] == "1B1" for violation in found["violations"])
    code, out, _ = run(capsys, "check", str(path))
    assert code == 1
    assert out.splitlines()[-1].endswith("bad cannot run")


def test_check_holds_a_stated_placement_and_limit_against_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "check", "zb-v", *COUNTS, "--placement", "v")[0] == 0
    assert run(capsys, "check", "zb-v", *COUNTS, "--placement", "loop")[0] == 1
    assert run(capsys, "check", "chimera", *COUNTS, "--placement", "bidirectional")[0] == 0
    assert run(capsys, "check", "zb-v", *COUNTS, "--placement", "linear")[0] == 2
    assert run(capsys, "check", "1f1b", *COUNTS, "--max-activations", "3")[0] == 1


def test_check_holds_messages_against_the_strictest_channel_unless_told_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "early.csv"
    show = ("show", "1f1b", *COUNTS, "--format", "csv", "--lower", "--out", str(path))
    assert run(capsys, *show, "--channel", "edge")[0] == 0
    code, out, _ = run(capsys, "check", str(path))
    assert code == 1
    assert out.splitlines()[-2:] == [
        "1 violation: early cannot run with one message queue per rank",
        "it can run with one queue per directed edge (--channel edge)",
    ]
    assert run(capsys, "check", str(path), "--channel", "pair")[0] == 1
    code, out, _ = run(capsys, "check", str(path), "--channel", "edge")
    assert code == 0
    assert out.endswith("nothing can hang with one message queue per directed edge\n")
    code, found = run_json(capsys, "check", str(path), "--channel", "edge")
    assert (code, found) == (0, {"ok": True, "channel": "edge", "violations": []})
    code, _, err = run(capsys, "show", str(path), "--format", "torch-comms")
    assert code == 2
    assert "would hang in PyTorch" in err
    assert run(capsys, *show)[0] == 0
    assert run(capsys, "check", str(path))[0] == 0
    assert run(capsys, "check", str(path), "--channel", "node")[0] == 2


def test_show_writes_waits_for_torch_2_15_only(capsys: pytest.CaptureFixture[str]) -> None:
    show = ("show", "1f1b", *COUNTS, "--format", "torch-comms")
    older, newer = run(capsys, *show)[1], run(capsys, *show, "--torch-version", "2.15")[1]
    assert "WAIT" not in older
    assert newer.count("WAIT_SEND") == older.count("SEND") > 0
    assert newer.count("WAIT_REDUCE_GRAD") == 4
    assert run(capsys, *show, "--torch-version", "newest")[0] == 2
    assert run(capsys, *show, "--lower")[1] == older


@pytest.mark.parametrize("name", NAMES)
def test_show_draws_and_writes(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys, "show", name, *COUNTS)
    assert code == 0
    assert "\x1b" not in out
    assert all(len(line) <= 80 for line in out.splitlines())
    path = tmp_path / "out.csv"
    assert run(capsys, "show", name, *COUNTS, "--format", "csv", "--out", str(path))[0] == 0
    assert Program.load(path) == build(name, 4, 8)


def test_show_lowers_and_exports(capsys: pytest.CaptureFixture[str]) -> None:
    assert "0SEND_F0" in run(capsys, "show", "1f1b", *COUNTS, "--format", "csv", "--lower")[1]
    assert "REDUCE_GRAD" not in run(capsys, "show", "zb-h1", *COUNTS, "--format", "torch")[1]
    assert "0SEND_F0" in run(capsys, "show", "zb-h1", *COUNTS, "--format", "torch-comms")[1]
    code, found = run_json(capsys, "show", "1f1b", *COUNTS)
    assert code == 0
    assert found["rows"][0][:2] == ["0F0", "0F1"]
    assert run_json(capsys, "show")[1]["schedules"].keys() == set(NAMES)


@pytest.mark.parametrize(
    ("kind", "begins"),
    [("svg", b"<svg"), ("html", b"<!doctype html>"), ("perfetto", b"\x1f\x8b"), ("text", b"zb-v: 4")],
)
def test_show_writes_every_kind_of_picture(
    kind: str, begins: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "picture"
    code, out, _ = run(capsys, "show", "zb-v", *COUNTS, "--format", kind, "--out", str(path))
    assert (code, out) == (0, f"wrote {path}\n")
    assert path.read_bytes().startswith(begins)
    code, found = run_json(capsys, "show", "zb-v", *COUNTS, "--format", kind, "--out", str(path))
    assert (code, found["out"], found["format"]) == (0, str(path), kind)


def test_show_draws_slots_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    slots = run(capsys, "show", "1f1b", "--ranks", "2", "--microbatches", "2", "--slots")[1].splitlines()
    assert slots[1].startswith("rank 0 |F0 F1 .. B0 .. B1 |")
    memory = run(capsys, "show", "1f1b", "--ranks", "2", "--microbatches", "2", "--memory")[1].splitlines()
    assert memory[2].startswith("held   |1  2  2  2  2  2  1  1  1  |")


def test_compare_names_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    counts = ("--ranks", "3", "--microbatches", "4")
    found = run_json(capsys, "compare", *counts)[1]
    assert [(value["schedule"], value["expected"]) for value in found["left_out"]] == [
        ("dualpipe", "an even number of ranks"),
        ("chimera", "an even number of ranks"),
    ]
    printed = run(capsys, "compare", *counts)[1]
    assert "left out: dualpipe cannot use 3 ranks" in printed
    assert "Not compared: dualpipe, chimera." in " ".join(printed.split())
    assert run_json(capsys, "compare", *COUNTS)[1]["left_out"] == []
    assert "left out" not in run(capsys, "compare", *COUNTS)[1]


def test_compare_writes_its_page_and_says_what_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "compare.html"
    code, found = run_json(capsys, "compare", *COUNTS, "--out", str(path))
    assert code == 0
    assert found["advice"].startswith("Run zb-v")
    assert found["out"] == str(path)
    assert found["advice"].split(";")[0] in path.read_text()
    assert "Run zb-v" in run(capsys, "compare", *COUNTS)[1]


def test_explore_serves_until_it_is_interrupted() -> None:
    # Where tests run in the background, a process that they start would ignore Ctrl-C.
    attend = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    started = f"{attend}; from drumline.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", started, "explore", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        address = json.loads("".join(process.stdout.readline().decode() for _ in range(3)))["address"]
        with urllib.request.urlopen(f"{address}answer?schedule=1f1b", timeout=250) as answer:
            assert json.load(answer)["summary"]["makespan"] == 33
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=250) == 130


@pytest.mark.parametrize("columns", [20, 40, 80])
@pytest.mark.parametrize(
    "words", [("show",), ("show", "1f1b", *COUNTS), ("simulate", "zb-v", *COUNTS), ("compare", *COUNTS)]
)
def test_nothing_is_wider_than_the_terminal(
    words: tuple[str, ...], columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert max(len(line) for line in run(capsys, *words)[1].splitlines()) <= columns


def column(text: str, heading: str) -> list[str]:
    """Return the cells below a right-aligned heading of a table."""
    lines = text.splitlines()
    top = next(at for at, line in enumerate(lines) if heading in line)
    end = lines[top].index(heading) + len(heading)
    return [line[:end].split()[-1] for line in "\n".join(lines[top + 1 :]).split("\n\n")[0].splitlines()]


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-1f1b", "chimera"])
def test_peaks_are_pairs_under_one_name_in_every_command(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    peaks = list(map(str, simulate(build(name, 4, 8)).peak_activations))
    shown = run(capsys, "show", name, *COUNTS)[1]
    assert re.findall(r"idle +\d+% peak +(\d+)$", shown, re.MULTILINE) == peaks
    assert column(run(capsys, "simulate", name, *COUNTS)[1], "peak activations") == peaks
    compared = run(capsys, "compare", name, *COUNTS)[1]
    assert column(compared, "peak activations") == [max(peaks, key=int)]
    per_rank = int(column(compared, "stages/rank")[0])
    if per_rank > 1:  # what can be compared with schedules of other stages has a name of its own
        assert float(column(compared, "microbatches held")[0]) == max(map(int, peaks)) / per_rank
    else:
        assert "microbatches held" not in compared.splitlines()[0]


@pytest.mark.parametrize("columns", [40, 59])
def test_a_narrow_terminal_shows_idle_and_peak(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert "\nidle 27% 27% 27% 27%\npeak activations 4 3 2 1\n" in run(capsys, "show", "1f1b", *COUNTS)[1]


def test_output_that_cannot_be_written_is_exit_3() -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "drumline.cli.main", "show", "1f1b", *COUNTS]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=250, check=False)
    assert done.returncode == 3
    assert done.stderr == b"drumline: cannot write the output: No space left on device\n"


def test_a_flood_of_violations_is_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "many.csv"
    path.write_text(",".join(["0F0"] * 3000 + ["0B0"]))
    out = run(capsys, "check", str(path))[1].splitlines()
    assert len(out) == 1002
    assert out[-2] == "... and 1999 more (--json lists all)"
    assert len(run_json(capsys, "check", str(path))[1]["violations"]) == 2999


@pytest.mark.features("record", "stream")
@pytest.mark.torch
def test_demo_trains_by_every_schedule_to_the_weights_of_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run_json(capsys, "demo", "--out", str(tmp_path), "--width", "16", "--epochs", "1")
    assert code == 0
    assert [row["difference"] for row in found["rows"]] == [0] * 8
    page = Path(found["report"]).read_text()
    assert page.startswith("<!doctype html>")
    assert all(Path(row["run"]).name in page for row in found["rows"])
    bounds = {(row["schedule"], row["microbatches"]): round(row["bound"], 4) for row in found["rows"]}
    assert bounds == {
        ("gpipe", 4): 0.8,
        ("1f1b", 4): 0.8,
        ("zb-h1", 4): round(12 / 13, 4),
        ("pipedream-2bw", 4): 1.0,
        ("gpipe", 8): round(8 / 9, 4),
        ("1f1b", 8): round(8 / 9, 4),
    }
    stash = {Path(row["run"]).name: row["peak_stash_bytes"] for row in found["rows"]}
    assert stash["1f1b-8"][0] == stash["gpipe-8"][0] / 4  # two microbatches of eight
    whole, received = stash["gpipe-8"][1] / 8, 8 * 16 * 4  # bytes of a microbatch, and of its input
    assert stash["gpipe-8-checkpointed"] == [whole, 7 * received + whole]  # inputs, and one that is computed again


VERIFY = ("verify", "--microbatches", "4", "--transport", "in-process")


@pytest.mark.features("check", "record")
@pytest.mark.torch
def test_verify_says_yes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, *VERIFY, "zb-v", "--dropout", "0.1", "--checkpoint", "full")
    assert code == 0
    assert found.pop("loss") > 0
    assert 0 < found.pop("bubble") < 1
    assert [rank["device"] for rank in found.pop("devices")["ranks"]] == ["cpu", "cpu"]
    assert found == {
        "schedule": "zb-v",
        "ranks": 2,
        "stages": 4,
        "microbatches": 4,
        "steps": 2,
        "batches_differ": True,
        "transport": "in-process",
        "loss_difference": 0.0,
        "gradient_difference": 0.0,
        "weight_difference": 0.0,
        "worst_parameter": "",
        "first_wrong_parameter": "",
        "last_wrong_parameter": "",
        "parameters": 32,
        "tolerance": 0.0,
        "identical": True,
        "passes": True,
    }
    code, out, err = run(capsys, *VERIFY, "dualpipe", "--steps", "1")
    assert (code, err) == (0, "")
    assert out.startswith("dualpipe: 2 ranks, 2 stages, 4 microbatches, 1 step, in-process on cpu\n")
    assert "matches single-process training in 1 step, up to rounding (1e-06 allowed)" in out
    assert "batch;" not in out
    path = tmp_path / "mine.csv"
    build("gpipe", 3, 5).save(path)
    found = run_json(capsys, "verify", str(path), "--transport", "in-process")[1]
    assert (found["ranks"], found["microbatches"], found["passes"]) == (3, 5, True)


@pytest.mark.features("check", "record")
@pytest.mark.torch
def test_verify_says_no_and_names_the_parameter(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from drumline.pipeline.pipeline import Pipeline

    right = Pipeline.step

    def wrong(pipe: Pipeline, batch: Any = None, *, target: Any = None) -> Any:
        result = right(pipe, batch, target=target)
        gradient = dict(pipe.named_parameters())["6.0.weight"].grad
        assert gradient is not None
        gradient.neg_()
        return result

    monkeypatch.setattr(Pipeline, "step", wrong)
    code, found = run_json(capsys, *VERIFY)
    assert (code, found["passes"], found["worst_parameter"]) == (1, False, "6.0.weight")
    assert found["gradient_difference"] == pytest.approx(2)
    code, out, _ = run(capsys, *VERIFY)
    assert code == 1
    assert "does not match single-process training" in out
    assert "Wrong gradients: 6.0.weight." in " ".join(out.split())


@pytest.mark.features("check", "record")
@pytest.mark.torch
def test_verify_says_no_to_a_model_that_was_followed_wrongly_and_names_the_first_wrong_parameter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import follow_faults as faults

    path = tmp_path / "own_model.py"
    path.write_text("from follow_faults import make\n")
    faults.stale_attribute(monkeypatch)
    code, out, _ = run(capsys, *VERIFY, "--model", f"{path}:make")
    assert code == 1
    assert "The first in model order: layers.0.weight." in " ".join(out.split())


OWN_MODEL = """
import os, torch
from torch import nn

print("the file was loaded")

class Picky(nn.Module):
    def forward(self, x):
        if os.environ.get("RANK") == "1":
            raise RuntimeError("no room here")
        return x

def make(*more):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), *more)
    return model, nn.functional.mse_loss, torch.ones(8, 4), torch.ones(8, 4)

def fails():
    return make(Picky())
"""


@pytest.mark.features("check", "record")
@pytest.mark.torch
def test_verify_keeps_what_a_model_file_prints_off_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own_model.py"
    path.write_text(OWN_MODEL)
    code, out, err = run(capsys, *VERIFY, "--model", f"{path}:make", "--json")
    assert (code, json.loads(out)["parameters"]) == (0, 4)
    assert err == "the file was loaded\n" * 3  # the pipeline's model, the one that is cut, and the plain one


@pytest.mark.features("check")
@pytest.mark.torch
def test_a_rank_that_fails_is_exit_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own_model.py"
    path.write_text(OWN_MODEL)
    code, out, err = run(capsys, "verify", "--microbatches", "4", "--model", f"{path}:fails")
    assert (code, out) == (3, "")
    assert err.splitlines()[-1] == "drumline: rank 1 failed with RuntimeError: no room here"


def test_verify_without_torch_says_what_to_install() -> None:
    code = """if True:
        import sys
        sys.modules["torch"] = None  # makes importing it fail
        from drumline.cli.main import main
        raise SystemExit(main(["verify", "1f1b"]))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "drumline: verify runs a model, which needs PyTorch\n"
        "  in your clone of Drumline, run: pip install -e '.[train]'\n"
    )


@pytest.mark.torch
@pytest.mark.parametrize(
    "words",
    [
        ("--model", "absent.py:make"),
        ("--model", "no-colon.py"),
        ("--dropout", "1"),
        ("--dropout", "-0.1"),
        ("--steps", "0"),
        ("forward-only",),
        ("pipedream",),
        ("--mesh", "pp=2,dp=2"),  # all ranks in one process
        ("--mesh", "pp=2,data=2"),
        ("--mesh", "pp=2", "--ranks", "4"),
        ("--zero", "1"),
    ],
    ids=" ".join,
)
def test_what_verify_cannot_run_is_exit_2(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, *VERIFY, *words)
    assert code == 2
    assert found.keys() == {"error", "expected", "fix"}
    assert run(capsys, *VERIFY, *words)[2].startswith("drumline: ")


BAD = [
    ("verify", "1f1v"),
    ("verify", "--ranks", "0"),
    ("verify", "--transport", "pigeon"),
    ("verify", "--checkpoint", "some"),
    ("verify", "--steps", "two"),
    ("verify", "--mesh", "pp=2,dp"),
    ("verify", "--mesh", "pp=2,pp=2"),
    ("verify", "--mesh", "dp=0"),
    ("verify", "--mesh", ","),
    ("verify", "no-such.csv"),
    ("simulate", "1f1v", *COUNTS),
    ("simulate", "1f1b", "--ranks", "0", "--microbatches", "8"),
    ("simulate", "1f1b", "--ranks", "-3", "--microbatches", "8"),
    ("simulate", "1f1b", "--ranks", "four", "--microbatches", "8"),
    ("simulate", "1f1b", *COUNTS, "--forward", "-1"),
    ("simulate", "1f1b", *COUNTS, "--forward", "nan"),
    ("simulate", "1f1b", *COUNTS, "--costs", "no-such.json"),
    ("simulate", "1f1b", *COUNTS, "--max-bytes", "10"),
    ("simulate", "1f1b", *COUNTS, "--max-activations", "0"),
    ("simulate", "1f1b", *COUNTS, "--no-such-flag"),
    ("simulate", "1f1b", "--ranks", "100000", "--microbatches", "100000"),
    ("simulate",),
    ("simulate", "no-such.csv"),
    ("simulate", "hanayo", *COUNTS, "--stages-per-rank", "3"),
    ("compare", "--ranks", "0", "--microbatches", "1"),
    ("check", "no-such.csv"),
    ("check", "1f1b", *COUNTS, "--max-bytes", "4"),
    ("compare", *COUNTS, "--max-bytes", "4"),
    ("demo", "--width", "0"),
    ("demo", "--epochs", "-1"),
    ("explore", "--port", "70000"),
    ("show", "1f1b", *COUNTS, "--format", "perfetto", "--out", "/no/such/folder/x"),
    ("show", "1f1b", *COUNTS, "--format", "pdf"),
    ("show", "1f1b", *COUNTS, "--window", "5:1"),
    ("show", "1f1b", *COUNTS, "--window", "100:200"),
    ("simulate", "1f1b", *COUNTS, "--forward", "1e308"),
    ("simulate", "1f1b", *COUNTS, "--comm", "1e308"),
    ("simulate", "1f1b", *COUNTS, "--activation-bytes", "1e308"),
    ("show", "chimera", *COUNTS, "--format", "torch"),
    ("show", "1f1b", *COUNTS, "--out", "/no/such/folder/x.txt"),
    ("simulat", "1f1b"),
    ("--nonsense",),
]


@pytest.mark.parametrize("words", BAD, ids=" ".join)
def test_bad_input_is_one_clear_line_and_exit_2(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    assert 1 <= len(err.splitlines()) <= 2
    assert err.startswith("drumline: ")
    assert "Traceback" not in err
    code, found = run_json(capsys, *words)
    assert code == 2
    assert found.keys() == {"error", "expected", "fix"}
    assert found["error"]


@pytest.mark.parametrize(
    "data",
    [
        b"0F0,0B0x\n",
        b"\xff\xfe0\x00F\x00",
        b"0F0,0B0\n\n2F0,2B0\n",
        b"0F0,0B0\n2F0,2B0\n",
        b"\x00" * 1000,
        b"x" * 2**21,
    ],
    ids=["typo", "utf-16", "empty row", "missing rank", "zeros", "junk"],
)
@pytest.mark.parametrize("verb", ["check", "simulate", "show"])
def test_a_file_that_is_not_a_program_is_exit_2(
    verb: str, data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(data)
    code, out, err = run(capsys, verb, str(path))
    assert (code, out) == (2, "")
    assert "bad.csv" in err
    assert len(err) < 600


def test_a_program_that_cannot_run_is_not_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hangs.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    code, _, err = run(capsys, "simulate", str(path))
    assert code == 2
    assert "wait for each other" in err


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(verb in run(capsys, "--help")[1] for verb in VERBS)
    for verb in VERBS:
        assert run(capsys, verb, "--help")[0] == 0


def test_the_version_is_told_without_package_metadata(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    monkeypatch.setattr("importlib.metadata.distribution", missing)
    for flag in ("--version", "-V"):
        assert run(capsys, flag) == (0, f"drumline {drumline.__version__}\n", "")
    assert re.fullmatch(r"\d+\.\d+\.\d+", drumline.__version__)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--verison", "unknown flag '--verison'|expected a command; did you mean --version?"),
        ("--hlep", "unknown flag '--hlep'|expected a command; did you mean --help?"),
        ("--ver", "unknown flag '--ver'|expected a command; did you mean --version?"),
        ("-x", "unknown flag '-x'|expected a command; run `drumline --help` to list the commands"),
        ("--ranks 2 show 1f1b", "unknown flag '--ranks'|expected a command; put the command first: drumline show"),
        ("verfy", "unknown command 'verfy'|did you mean verify?"),
        ("show 1f1b --rnaks 4", "show has no flag --rnaks|did you mean --ranks?"),
        ("show 1f1b --rank=4", "show has no flag --rank|did you mean --ranks?"),
        ("simulate --microbatchs 4", "simulate has no flag --microbatchs|did you mean --microbatches?"),
        ("search --placment v", "search has no flag --placment|did you mean --placement?"),
        ("plan gpt-1.7b --nodes-per 8", "plan has no flag --nodes-per|did you mean --nodes?"),
        ("plan gpt-1.7b --devices 8", "plan has no flag --devices|run `drumline plan --help` to list its flags"),
        ("show 1f1b --version", "show has no flag --version|run `drumline --version` to print the version"),
    ],
)
def test_a_misspelt_word_is_told_with_what_was_meant(capsys: pytest.CaptureFixture[str], words: str, told: str) -> None:
    code, out, err = run(capsys, *words.split())
    what, fix = told.split("|")
    assert (code, out) == (2, "")
    assert err.startswith(f"drumline: {what}\n  {fix}")


def test_the_installed_command_and_a_closed_pipe() -> None:
    command = [
        sys.executable,
        "-m",
        "drumline.cli.main",
        "show",
        "1f1b",
        "--ranks",
        "64",
        "--microbatches",
        "64",
        "--format",
        "csv",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ}) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=250) == 0


def test_a_command_whose_caller_has_closed_its_files_opens_no_others_in_their_places() -> None:
    """As `drumline serve DIR <&- >&- 2>&-` is started: a socket with the number 2 would get what libraries write."""
    code = "import os; from drumline.cli.main import main; code = main(['show', '1f1b', '--ranks', '2',"
    code += " '--microbatches', '2']); os._exit(code if all(map(os.fstat, range(3))) else 9)"
    command = 'exec "$0" -c "$1" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", command, sys.executable, code], check=False, timeout=250).returncode == 0


@pytest.mark.parametrize(("taken", "ports"), [(False, [PORT]), (True, [PORT, 0])])
def test_explore_has_a_port_of_its_own_or_takes_a_free_one(
    taken: bool, ports: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Server(contextlib.nullcontext[None]):
        address = "http://127.0.0.1:1/"

        def __init__(self, port: int) -> None:
            super().__init__()
            asked.append(port)
            if taken and port == PORT:
                raise OSError(98, "Address already in use")

        def serve_forever(self) -> None:
            pass

    monkeypatch.setattr(explore_server, "ExploreServer", Server)
    assert run_json(capsys, "explore") == (0, {"address": Server.address})
    assert asked == ports
