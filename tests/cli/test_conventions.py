"""What holds for every verb: --out and its endings, stdin and stdout, short flags, colour, help, exit codes."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from drumline.cli import completion
from drumline.cli.main import BUG, VERBS, main, parser_of
from drumline.core.errors import RankFailed, WaitTimeout
from drumline.plan.cluster.hardware import MACHINES
from drumline.plan.cluster.models import MODELS
from drumline.report.explore_server import ExploreServer
from drumline.schedules import generate, schedules
from matrices import left
from names import build
from profiles import SOME, model_profile
from simulated_runs import per_stage, write_simulated_run
from some import some

DOCS = Path(__file__).parents[2] / "docs"
NEEDS_TORCH = ("demo", "verify")
LLAMA = '{"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 99}'
SERVES = ("explore", "watch", "completion", "demo", "train", "export", "serve", "load")  # what they give is no file
SERVED = ("export", "serve", "load")  # tests/serve runs theirs, one after the other
FORMATS = {".txt": "text", ".json": "json", ".svg": "svg", ".html": "html", ".csv": "csv", ".gz": "perfetto"}
BEGINS = {".json": b"{", ".svg": b"<svg", ".html": b"<!doctype html>", ".csv": b"0F0,", ".gz": b"\x1f\x8b"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what examples name: traces, profiles, recorded runs, and a program that cannot run."""
    monkeypatch.chdir(tmp_path)
    for name in ("traces", "profiles"):
        Path(name).symlink_to(DOCS / name)
    program = generate("1f1b", num_ranks=2, num_microbatches=4)
    for name in ("first", "second"):
        Path("runs", name).parent.mkdir(exist_ok=True)
        write_simulated_run(Path("runs", name), program, per_stage(1e-3, 2e-3))
    Path("torn.csv").write_text("0F0,0B0\n1F0\n")
    return tmp_path


def test_a_file_that_cannot_be_written_is_told_before_a_command_works_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    formats = {verb: parser_of(verb).get_default("formats") for verb in VERBS}
    (tmp_path / "file").write_text("")
    for verb in some([verb for verb in VERBS if formats[verb]]):
        name = f"x{next(iter(formats[verb]))}"
        (tmp_path / verb / name).mkdir(parents=True)
        places = {
            f"missing/{name}": "No such file or directory",
            f"{verb}/{name}": "Is a directory",
            f"file/{name}": "Not a directory",
        }
        monkeypatch.setattr(import_module(f"drumline.cli.{verb}"), "run", lambda args: pytest.fail("it works"))
        for place, said in places.items():
            assert main([*shlex.split(example(verb))[1:], "--out", str(tmp_path / place)]) == 2
            assert f"cannot write {tmp_path / place}: {said}" in capsys.readouterr().err
    assert formats["load"]


@pytest.mark.parametrize("words", ["demo", "export nothing"])
def test_a_folder_that_cannot_be_written_is_told_before_a_command_works_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    for package in ("torch", "onnx", "onnxruntime"):
        pytest.importorskip(package)
    (tmp_path / "file").write_text("")
    assert main([*words.split(), "--out", str(tmp_path / "file" / "out")]) == 2
    assert f"cannot write to {tmp_path / 'file' / 'out'}: Not a directory" in capsys.readouterr().err


def run(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str, str]:
    code = main(shlex.split(command))
    out, err = capsys.readouterr()
    return code, out, err


def example(verb: str) -> str:
    return str(import_module(f"drumline.cli.{verb}").EXAMPLE)


# A command of every verb that writes files, and the endings that it knows.
WRITING = {
    "show": ("show zb-v", ".txt .json .svg .html .csv .gz"),
    "show list": ("show", ".txt .json"),
    "plan --list": ("plan --list", ".txt .json"),
    "simulate": ("simulate zb-v", ".txt .json .svg .html .gz"),
    "compare": ("compare -r 2 -m 2", ".txt .json .html"),
    "replicas": ("replicas 1f1b -r 2 -m 2 --jitter 0.1", ".txt .json .svg"),
    "search": ("search -r 2 -m 2", ".txt .json .svg .html .csv"),
    "search --pareto": ("search -r 2 -m 2 --pareto --tries 5", ".txt .json .svg .html"),
    "profile": ("profile profile.json", ".txt .json .svg .html"),
    "calibrate": ("calibrate profiles/calibration.json", ".txt .json"),
    "plan": ("plan profile.json -r 2 --batch 4 --seconds 0 --schedules 1f1b", ".txt .json .svg .html"),
    "check": ("check 1f1b", ".txt .json"),
    "report": ("report runs/first", ".txt .json .html .gz"),
    "analyze": ("analyze traces/1f1b", ".txt .json .svg .html .csv .gz"),
}


@pytest.mark.slow
@pytest.mark.parametrize("verb", WRITING)
def test_several_files_are_written_each_as_its_name_ends(
    verb: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_profile([0.001, 0.004], overheads=SOME).save(Path("profile.json"))
    command, endings = WRITING[verb]
    names = [f"out{ending}" for ending in endings.split()]
    code, out, err = run(capsys, command + "".join(f" --out {name}" for name in names))
    assert (code, err) == (0, "")
    assert out.splitlines()[-len(names) :] == [f"wrote {name}" for name in names]
    for name, ending in zip(names, endings.split(), strict=True):
        assert Path(name).read_bytes().startswith(BEGINS.get(ending, b""))
    assert json.loads(Path("out.json").read_text())
    told = json.loads(run(capsys, f"{command} --json -o out.txt -o out.json")[1])
    assert told["out"] == ["out.txt", "out.json"]


@pytest.mark.parametrize("verb", WRITING)
def test_an_unknown_ending_is_refused_with_the_known_ones(
    verb: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_profile([0.001, 0.004], overheads=SOME).save(Path("profile.json"))
    command, endings = WRITING[verb]
    code, out, err = run(capsys, f"{command} --out fine.txt --out out.docx")
    assert (code, out) == (2, "")
    assert err.startswith("drumline: --out is out.docx\n  expected a name that ends in ")
    assert all(ending in err for ending in endings.split())
    assert not Path("fine.txt").exists()


def test_every_verb_writes_files_or_has_none_to_write() -> None:
    assert {verb.split()[0] for verb in WRITING} == set(VERBS) - {*SERVES, "verify"}


@pytest.mark.features("check", "record")
@pytest.mark.torch
def test_verify_writes_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "verify -m 2 --steps 1 --transport in-process -o out.txt -o out.json")
    assert code == 0
    assert out.endswith("wrote out.txt\nwrote out.json\n")
    assert json.loads(Path("out.json").read_text())["passes"]
    assert "all bits are equal" in Path("out.txt").read_text()


def test_a_format_that_is_named_holds_whatever_the_names_end_in(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "show 1f1b --format torch --out a.csv --out b")[0] == 0
    assert Path("a.csv").read_text() == Path("b").read_text() != build("1f1b", 4, 8).format()


def test_stdout_is_a_dash_and_what_was_written_is_then_told_on_stderr(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "show 1f1b --format csv -o - -o kept.csv")
    assert (code, err) == (0, "wrote kept.csv\n")
    assert out == Path("kept.csv").read_text()
    assert not Path("-").exists()
    assert run(capsys, "compare -o -")[1] == run(capsys, "compare")[1]


def given(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_a_dash_reads_stdin(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, build("zb-v", 4, 8).format())
    assert "stdin is proven: 4 ranks, 8 stages" in run(capsys, "check -")[1]
    given(monkeypatch, '{"forward": 3}')
    assert json.loads(run(capsys, "simulate 1f1b --costs - --json")[1])["makespan"] == 55
    model_profile([0.001, 0.004], overheads=SOME).save(Path("profile.json"))
    given(monkeypatch, Path("profile.json").read_text())
    assert run(capsys, "plan - -r 2 --batch 4 --seconds 0 --schedules 1f1b")[0] == 0
    given(monkeypatch, "")
    code, _, err = run(capsys, "check -")
    assert (code, "stdin is empty" in err) == (2, True)


@pytest.mark.parametrize(
    ("words", "text", "said"),
    [
        ("check -", "0F0,0B0x", "drumline: stdin: row 1, column 2: "),
        ("simulate - -r 4", "0F0,0B0", "drumline: --ranks is 4, but stdin has 1"),
        ("simulate 1f1b --costs -", "[1", "drumline: stdin: not JSON"),
        ("plan -", LLAMA, "for example: drumline plan - --hardware h100"),
        ("plan -", "{}", "drumline: stdin: the config of stdin has no num_hidden_layers"),
    ],
)
def test_errors_about_stdin_call_it_so(
    words: str, text: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, text)
    code, _, err = run(capsys, words)
    assert (code, said in err) == (2, True), err
    given(monkeypatch, text)
    assert "/" not in run(capsys, f"{words} --json")[1]


def test_short_flags_mean_what_the_long_ones_do(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = run(capsys, "show zb-h1 --ranks 3 --microbatches 5 --out long.csv")
    assert run(capsys, "show zb-h1 -r 3 -m 5 -o short.csv")[0] == long[0] == 0
    assert Path("short.csv").read_text() == Path("long.csv").read_text()


@pytest.mark.parametrize("verb", ["show 1f1b", "simulate 1f1b", "compare", "check 1f1b"])
def test_four_ranks_and_eight_microbatches_unless_said(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, verb) == run(capsys, f"{verb} --ranks 4 --microbatches 8")
    assert run(capsys, f"{verb} -r 2") == run(capsys, f"{verb} -r 2 -m 8")


@pytest.mark.parametrize(
    ("settings", "coloured"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "0"}, False), ({"FORCE_COLOR": ""}, False)]
    + [({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False), ({"NO_COLOR": "", "FORCE_COLOR": "1", "TERM": "dumb"}, True)],
)
def test_colour_can_be_forced_and_forbidden(
    settings: dict[str, str], coloured: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert ("\x1b[" in run(capsys, "show 1f1b")[1]) is coloured


def test_files_and_json_have_no_colour(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in run(capsys, "show 1f1b --json -o out.txt")[1]
    assert "\x1b" not in Path("out.txt").read_text()


def test_plan_lists_models_and_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan --list")
    assert code == 0
    assert {line.split()[0] for line in out.splitlines() if line} == {*MODELS, *MACHINES, "model", "hardware"}
    found = json.loads(run(capsys, "plan --list --json")[1])
    assert (list(found["models"]), list(found["hardware"])) == (list(MODELS), list(MACHINES))
    code, _, err = run(capsys, "plan")
    assert (code, "run `drumline plan --list` to list the models" in err) == (2, True)


def test_report_takes_a_folder_of_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "report runs --json")[1])
    assert [path["name"] for path in found["runs"]] == ["first", "second"]
    code, out, _ = run(capsys, "report runs")
    assert (code, out.splitlines()[-1]) == (0, "wrote runs/report.html")
    assert Path("runs/report.html").exists()
    assert [path["name"] for path in json.loads(run(capsys, "report runs/second runs/first --json")[1])["runs"]] == [
        "second",
        "first",
    ]


KEPT = {
    "compare": {"microbatch", "bubble"},
    "simulate hanayo --stages-per-rank 4": {"idle", "activations"},
    "plan profile.json -r 2 --batch 4 --seconds 0 --schedules 1f1b,zb-h1": {"ms"},
    "plan gpt-1.7b --hardware a100-40 --gpus 8 --batch 16 --microbatch 2 --zero 1 --brief": {"mesh", "step"},
    "analyze traces/1f1b": {"idle", "bubble"},
    "report runs --format text": {"idle", "makespan", "bubble"},
    "search -r 2 -m 2 --pareto --tries 5": {"bubble", "bound"},
    "plan --list": {"layers", "memory"},
    "calibrate profiles/calibration.json": {"work", "real step", "forecast"},
}


@pytest.mark.parametrize("command", KEPT)
def test_the_column_that_matters_is_there_in_40_columns(
    command: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_profile([0.001, 0.004], overheads=SOME).save(Path("profile.json"))
    monkeypatch.setenv("COLUMNS", "40")
    code, out, _ = run(capsys, command)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 40
    cells = {cell for line in out.splitlines() for cell in re.split(r"  +", line.strip())}
    assert KEPT[command] <= cells


@pytest.mark.features("check", "record")
@pytest.mark.parametrize(
    "verb",
    [
        *(
            pytest.param(verb, marks=[pytest.mark.torch] if verb in NEEDS_TORCH else [])
            for verb in VERBS
            if verb not in (*SERVED, "demo")
        ),
        *left("demo"),  # test_cli.py runs it at length
    ],
)
def test_the_example_of_every_verb_runs(
    verb: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExploreServer, "serve_forever", lambda self: None)
    command = example(verb).partition(" > ")[0].replace("train.py:make", "profiles/llama.json")  # measured before
    command = command.replace("calibrate --out", "calibrate profiles/calibration.json --out")
    assert command.split()[:2] == ["drumline", verb]
    small = " --width 8 --epochs 1" if verb == "demo" else ""  # as fast as it can be
    code, out, err = run(capsys, command.removeprefix("drumline ") + small)
    assert (code, err) == (0, "")
    if verb == "demo":
        told = re.findall(r"^trained (\d+) of 11: (\S+)", out, re.MULTILINE)
        assert [int(at) for at, _ in told] == [*range(1, 12)]
        assert [what for _, what in told][3:6] == ["gpipe-4", "1f1b-4", "zb-h1-4"]


@pytest.mark.parametrize("verb", VERBS)
def test_help_says_what_every_flag_means_and_shows_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, f"{verb} --help")
    assert code == 0
    assert f"\nexample:\n  {example(verb)}\n" in out
    for action in some(parser_of(verb)._actions):
        assert action.help
        assert len(action.help.split()) >= 3
        default = action.default not in (None, False, [], "==SUPPRESS==")
        assert not (default and action.nargs != 0) or "default" in action.help, action.option_strings


NO = ["simulate gpipe --max-activations 4", "compare --max-activations 0.5", "check torn.csv"]


@pytest.mark.parametrize("command", NO)
def test_a_no_is_exit_1(command: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, command)[0] == 1
    assert run(capsys, f"{command} --json")[0] == 1


@pytest.mark.parametrize("verb", VERBS)
def test_bad_input_is_exit_2_in_every_verb(verb: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, f"{verb} --no-such-flag")
    assert (code, out) == (2, "")
    assert err.startswith("drumline: ")


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["show", "compare", "check 1f1b", "plan --list", "completion bash", "report RUNS"])
def test_output_that_nobody_takes_is_exit_3(verb: str, here: Path) -> None:
    command = [sys.executable, "-m", "drumline", *verb.replace("RUNS", str(here / "runs")).split()]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=250, check=False, cwd=DOCS.parent)
    assert (done.returncode, b"cannot write the output" in done.stderr) == (3, True)


def test_interrupted_is_exit_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*words: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("drumline.cli.compare.compare", interrupted)
    assert run(capsys, "compare")[0] == 130


def test_a_bug_is_exit_70_with_its_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*words: object, **settings: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("drumline.cli.compare.compare", broken)
    monkeypatch.setattr(sys, "argv", ["drumline", "compare"])
    assert main() == BUG == 70
    err = capsys.readouterr().err
    assert "ZeroDivisionError: planted" in err
    assert err.splitlines()[-1].startswith("drumline: this is a bug in Drumline")
    with pytest.raises(ZeroDivisionError):
        main(["compare"])


def test_what_a_users_code_raises_on_a_rank_is_exit_3_with_its_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(cause: Exception) -> Callable[..., None]:
        error = RankFailed(1, f"rank 1 failed with {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        error.add_note("rank 1's traceback:\nTraceback ...\n  line 7, in mine")

        def fail(*words: object, **settings: object) -> None:
            raise error

        return fail

    monkeypatch.setattr("drumline.cli.compare.compare", failed(KeyError("weights")))
    assert run(capsys, "compare") == (
        3,
        "",
        "Traceback ...\n  line 7, in mine\ndrumline: rank 1 failed with KeyError: 'weights'\n",
    )
    monkeypatch.setattr("drumline.cli.compare.compare", failed(WaitTimeout("rank 1 waits")))  # says enough by itself
    assert run(capsys, "compare") == (3, "", "drumline: rank 1 failed with WaitTimeout: rank 1 waits\n")


def test_exit_codes_are_documented() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert all(f"\n| {code} | " in page for code in (0, 1, 2, 3, 70, 130))


def test_python_runs_the_package() -> None:
    command = [sys.executable, "-m", "drumline", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stdout[:9]) == (0, "drumline ")


def completed(script: str, line: str) -> list[str]:
    """Return what bash offers for a line."""
    words = [*shlex.split(line), *([""] if line.endswith(" ") else [])]
    asked = f"{script}\nCOMP_WORDS=({' '.join(map(shlex.quote, words))})\nCOMP_CWORD={len(words) - 1}\n_drumline\n"
    shell = shutil.which("bash")
    assert shell is not None
    done = subprocess.run([shell], input=f'{asked}printf "%s\\n" "${{COMPREPLY[@]}}"', capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_verbs_schedules_flags_and_their_values(capsys: pytest.CaptureFixture[str]) -> None:
    script = run(capsys, "completion bash")[1]
    assert completed(script, "drumline ") == [*VERBS, "--help", "--version"]
    assert completed(script, "drumline sh") == ["show"]
    assert completed(script, "drumline show zb-") == ["zb-h1", "zb-h2", "zb-v"]
    assert set(schedules()) <= set(completed(script, "drumline simulate "))
    assert completed(script, "drumline show zb-v --mi") == ["--microbatches"]
    assert completed(script, "drumline show zb-v --format s") == ["svg"]
    assert completed(script, "drumline plan llama-3-8b --hardware h") == ["h100", "h200", "h800", "h100-96"]
    assert completed(script, "drumline show --out ") == []  # the shell's own: names of files
    assert completed(script, "drumline completion ") == [*completion._SCRIPTS, "-h", "--help"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_flag_of_every_verb(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, script, _ = run(capsys, f"completion {shell}")
    assert code == 0
    for verb in VERBS:
        assert verb in script
        for action in some(parser_of(verb)._actions):
            long = [name for name in action.option_strings if name.startswith("--")]
            assert [name for name in long if (f"-l {name[2:]} " if shell == "fish" else name) not in script] == []
    if path := shutil.which(shell):
        assert subprocess.run([path, "-n"], input=script, text=True, check=False).returncode == 0


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "completion tcsh")[0] == 2


def test_what_is_no_text_does_not_go_to_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, out, err = run(capsys, "show 1f1b --format perfetto")
    assert (code, out, err) == (2, "", "drumline: perfetto is not text, so it cannot be printed\n  add --out FILE\n")
