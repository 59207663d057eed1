"""The one reader of files that users hand over, by itself and through everything that reads by it."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drumline.cli.main import main
from drumline.core.costs import Costs
from drumline.core.errors import DrumlineError, TraceError
from drumline.core.files import MAX_DEPTH, FileKind, opened, parse_json, read_object, read_text
from drumline.core.measured.run import read_run
from drumline.core.parsed import Parsed
from drumline.core.program import Program
from drumline.plan.cluster.hardware import load as load_machine
from drumline.plan.cluster.hugging_face import read_config
from drumline.plan.device.model_profile import ModelProfile, is_profile
from drumline.plan.device.plan import Plan
from drumline.report.kineto import events as kineto_events
from drumline.report.kineto.load import load as load_traces
from records import write_run
from refused import refused, saying

KIND = FileKind("thing", DrumlineError, "a JSON file", 2**20)

READERS: dict[str, Callable[[Path], object]] = {
    "object": lambda path: read_object(path, KIND),
    "costs": Costs.load,
    "program": Program.load,
    "profile": ModelProfile.load,
    "plan": Plan.load,
    "trace": lambda path: load_traces([path]),
    "config": read_config,
    "machine": load_machine,
}


def odd_file(path: Path, kind: str) -> str:
    """Make something at the path that is no regular file, and return what the refusal calls it."""
    if kind == "pipe":
        os.mkfifo(path)
        return "is a pipe, not a regular file"
    if kind == "folder":
        path.mkdir()
        return "a folder|contains no trace"
    if kind == "dangling":
        path.symlink_to(path.with_name("nowhere"))
        return "cannot read .*: No such file"
    if kind == "loop":
        path.symlink_to(path)
        return "cannot read .*: Too many levels"
    path.symlink_to("/dev/zero")
    return "is a device, not a regular file"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "folder", "dangling", "loop", "device"])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, reader: str, kind: str) -> None:
    path = tmp_path / "rank0.json"
    says = odd_file(path, kind)
    with refused(DrumlineError, says):
        READERS[reader](path)
    assert not is_profile(path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("name", ["config.json", "plan.json", "environment.json", "program.csv", "rank1.jsonl"])
def test_a_run_whose_file_never_ends_is_refused_at_once(tmp_path: Path, name: str, kind: str) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run" / name).unlink()
    says = odd_file(tmp_path / "run" / name, kind)
    with refused(DrumlineError, says):
        read_run(tmp_path / "run").timeline()


@pytest.mark.timeout(20)
def test_metrics_that_never_end_are_refused_at_once(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/zero")
    with refused(DrumlineError, "is a device, not a regular file"):
        read_run(tmp_path / "run").metrics()


@pytest.mark.parametrize("reader", sorted(READERS.keys() - {"trace"}))
def test_a_file_that_is_too_large_is_refused_without_being_read(tmp_path: Path, reader: str) -> None:
    path = tmp_path / "rank0.json"
    path.touch()
    os.truncate(path, 2**40)
    with refused(DrumlineError, r"rank0.json is larger than \d+ MiB"):
        READERS[reader](path)


@pytest.mark.parametrize("reader", sorted(READERS.keys() - {"trace"}))
def test_bytes_that_are_no_text_are_named(tmp_path: Path, reader: str) -> None:
    (tmp_path / "one.json").write_bytes(b'{"a": "\xff"}')
    with refused(DrumlineError, r"one.json: byte 0xff at offset 7 is not UTF-8 text"):
        READERS[reader](tmp_path / "one.json")


def test_a_byte_order_mark_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_bytes(b'\xef\xbb\xbf{"forward": 2}')
    assert read_text(tmp_path / "one.json", KIND) == '{"forward": 2}'
    assert Costs.load(tmp_path / "one.json").forward == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", saying("not JSON: Expecting")),
        ("[1, 2]", saying("the JSON holds a list, not an object")),
        ('{"a": {"b": NaN}}', saying("b is nan", expected="a finite number")),
        ('{"a": [1.0, -Infinity]}', saying("a is -inf", expected="a finite number")),
        ('{"a": 1e999}', saying("a is inf", expected="a finite number")),
        ('{"a": 36893488147419103232}', saying("a is an integer with more than 64 bits")),
        ('{"a": [1, -9223372036854775809]}', saying("a is an integer with more than 64 bits")),
        ('{"a": ' + "1" * 5000 + "}", saying("the JSON contains a number with thousands of digits")),
        ('{"a": {"b": 1, "b": 1}}', saying("the name 'b' appears twice")),
        ('{"a": "\\ud800"}', saying("half of a character")),
        ('{"\\udfff": 1}', saying("half of a character")),
        ('{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}", saying(f"nested deeper than {MAX_DEPTH} levels")),
        ('{"a": ' + "[" * 100_000, saying(f"nested deeper than {MAX_DEPTH} levels")),
    ],
)
def test_json_that_would_fail_later_is_refused(tmp_path: Path, text: str, says: dict[str, str]) -> None:
    (tmp_path / "one.json").write_text(text)
    with refused(DrumlineError, **says):
        read_object(tmp_path / "one.json", KIND)


def test_json_at_its_bounds_is_read() -> None:
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(deep, KIND) is not None
    assert parse_json("[18446744073709551615, -9223372036854775808]", KIND) == [2**64 - 1, -(2**63)]
    assert parse_json('{"é": 1.7976931348623157e308}', KIND) == {"é": 1.7976931348623157e308}


def test_a_file_that_grows_while_it_is_read_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.json").write_bytes(b" " * 100)
    small = FileKind("thing", DrumlineError, "a JSON file", 10)
    monkeypatch.setattr(os, "fstat", lambda number: os.stat_result((0o100644, *[0] * 9)))
    with refused(DrumlineError, "larger than 0 MiB"):
        read_text(tmp_path / "one.json", small)


def test_a_name_that_no_file_has_is_refused() -> None:
    for name, says in (("a\0b", "file names cannot contain a null byte"), ("x" * 5000, "File name too long")):
        with refused(DrumlineError, says), opened(name, KIND):
            pass


@pytest.mark.parametrize(
    ("value", "use", "says"),
    [
        ({"a": "x"}, lambda value: value["a"].whole(1), saying("a is 'x'", expected="a whole number of 1 or more")),
        ({"a": 2.0}, lambda value: value["a"].whole(), saying("a is 2.0")),
        ({"a": True}, lambda value: value["a"].whole(), saying("a is True")),
        ({"a": True}, lambda value: value["a"].number(), saying("a is True")),
        ({"a": -1}, lambda value: value["a"].number(), saying("a is -1", expected="a number of 0 or more")),
        ({"a": 1e200}, lambda value: value["a"].number(), saying("a is 1e.200")),
        ({"a": 5}, lambda value: value["a"].whole(0, 4), saying("a is 5", expected="from 0 to 4")),
        ({"a": 1}, lambda value: value["a"].text(), saying("a is 1", expected="text")),
        ({"a": 1}, lambda value: value["a"].flag(), saying("a is 1", expected="true or false")),
        ({"a": {}}, lambda value: value["a"].each(), saying("a is {}", expected="a list")),
        ({"a": [[], 3]}, lambda value: value["a"].each()[1]["b"], saying(r"a\[1\] is 3", expected="an object")),
        ({"a": {}}, lambda value: value["a"]["b"], saying("'a.b' is missing")),
        ({"size": 1}, lambda value: value.only(["sizes"]), saying("unknown name 'size'", fix="did you mean sizes")),
        ([], lambda value: value.only(["a"]), saying("it is", expected="an object")),
    ],
)
def test_a_field_of_another_kind_is_refused_by_name(
    value: Any, use: Callable[[Parsed], object], says: dict[str, str]
) -> None:
    with refused(DrumlineError, **says) as caught:
        use(Parsed(value, KIND))
    assert caught.value.error.startswith("a damaged thing: ")


@pytest.mark.parametrize("inside", [b" ", b'{"traceEvents": [', b'{"a": '])
def test_a_trace_that_inflates_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bytes
) -> None:
    monkeypatch.setattr(kineto_events, "_GROWTH_FROM", 2**20)
    (tmp_path / "rank0.json.gz").write_bytes(gzip.compress(inside + b" " * 2**24, 9))
    with refused(TraceError, "over 200 times its size"):
        load_traces([tmp_path / "rank0.json.gz"])


def test_a_trace_of_names_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text(json.dumps({f"name{at}": 0 for at in range(2000)}))
    with refused(TraceError, "more than 1000 names"):
        load_traces([tmp_path / "rank0.json"])


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "1f1b", "--ranks", "2", "--microbatches", "2", "--costs", "ODD"),
        ("check", "ODD"),
        ("plan", "ODD", "--ranks", "2", "--batch", "4"),
        ("plan", "gpt-1.7b", "--hardware", "ODD", "--gpus", "2", "--batch", "2"),
        ("report", "ODD"),
        ("watch", "ODD", "--once"),
        ("analyze", "ODD"),
        ("simulate", "LONG"),
        ("report", "LONG"),
        ("watch", "LONG", "--once"),
        ("plan", "LONG", "--hardware", "h100", "--gpus", "2", "--batch", "2"),
        ("analyze", "LONG"),
    ],
)
@pytest.mark.timeout(20)
def test_what_cannot_be_read_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    os.mkfifo(tmp_path / "odd.json")
    replaced = [{"ODD": str(tmp_path / "odd.json"), "LONG": "x" * 300}.get(word, word) for word in words]
    assert main(replaced) == 2
    out, err = capsys.readouterr()
    assert (out, "written" in err, len(err.splitlines()) <= 2) == ("", False, True)


def test_what_cannot_be_written_is_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["show", "1f1b", "--ranks", "2", "--microbatches", "2", "--format", "csv", "--out"]
    assert main([*words, str(tmp_path / "no" / "folder.csv")]) == 2
    assert f"cannot write {tmp_path / 'no' / 'folder.csv'}: No such file or directory" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "none.csv")]) == 2
    assert f"cannot read {tmp_path / 'none.csv'}: No such file or directory" in capsys.readouterr().err
