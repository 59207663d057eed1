"""What is wrong with a run is told before any rank starts, with file, line and key."""

from __future__ import annotations

import inspect
import json
import os
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drumline.cli.main import main
from drumline.core.errors import ConfigError, DrumlineError, UsageError
from drumline.train import start as starting
from drumline.train.config.files.settings_file import read_judged, read_settings
from drumline.train.config.files.signatures import OFFERED
from drumline.train.config.placed import placed
from drumline.train.data.own.user_data import data_by_function
from drumline.train.models import build
from drumline.train.preflight import preflight
from refused import refused

pytestmark = pytest.mark.torch

SMALL = "[batch]\nsequences = 4\nmicrobatch = 1\nsequence = 16\n"
USERS = """
from torch import nn
def model(width, settings): ...
def data(rank, size, *, folder): ...
def anything(**more): ...
@staticmethod
def decorated(a): ...
"""


def bad_weights(folder: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(7))


def written(folder: Path) -> None:
    """Write files that are wrong in one way each."""
    (folder / "good.txt").write_text("some text " * 400)
    (folder / "short.txt").write_text("short")
    (folder / "empty.txt").write_text("")
    (folder / "latin.txt").write_bytes(b"one\ntwo\n\xe9\n" + b"text " * 200)
    (folder / "bad.jsonl").write_text('{"text": "a"}\n\n{"text": \n')
    (folder / "answers.jsonl").write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a"}\n')
    (folder / "large.txt").write_bytes(b"x" * 5000 + b"\n\xff" + b"x" * 5000)
    (folder / "points.csv").write_text("1,2,0\n1,x,0\n")
    (folder / "circle.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    (folder / "mine.py").write_text(USERS)
    (folder / "wrong.py").write_text("def data(:\n")
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "gone").symlink_to(folder / "nowhere")
    for name, text in (
        ("torn", "{"), ("kindless", "{}"), ("unknown", '{"model_type": "nosuchmodel"}'), ("list", "[1]"), ("cut", "{}"),
        ("shards", '{"model_type": "llama"}'), ("torn_tokens", '{"model_type": "llama"}'),
    ):  # fmt: skip
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(text)
    bad_weights(folder / "cut")
    (folder / "shards" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part.safetensors"}}')
    (folder / "torn_tokens" / "tokenizer.json").write_text('{\n"a": }')
    (folder / "bare").mkdir()


WRONG: dict[str, tuple[str, str]] = {
    "a pipe": ('[data]\nfiles = ["good.txt",\n"pipe"]', "line 3: data.files: pipe: is a pipe, not a regular file"),
    "a device": ('[data]\nfiles = ["/dev/null"]', "line 2: data.files: /dev/null: is a device, not a regular file"),
    "a loop": ('[data]\nfiles = ["loop"]', "line 2: data.files: loop: cannot be read: Too many levels"),
    "a dead link": ('[data]\nfiles = ["gone"]', "line 2: data.files: gone: is a link to a file that is not there"),
    "none": ('[data]\nfiles = ["no*.such"]', r"line 2: data.files: no\*.such: no such file"),
    "empty": ('[data]\nvalidation_files = ["empty.txt"]', "line 2: data.validation_files: empty.txt: is empty"),
    "not UTF-8": (
        f'{SMALL}[data]\nfiles = ["good.txt", "latin.txt"]',
        "line 6: data.files: latin.txt, line 3: not UTF-8",
    ),
    "too short": (
        f'{SMALL}[data]\nfiles = ["short.txt"]',
        "line 6: data.files: the data have 1 row, and a step takes 4",
    ),
    "bad lines": (f'{SMALL}[data]\nfiles = ["bad.jsonl"]', "line 6: data.files: bad.jsonl, line 3: not JSON"),
    "bad answers": (
        f'{SMALL}[data]\nkind = "instructions"\nfiles = ["answers.jsonl"]',
        "line 7: data.files: answers.jsonl, line 2: the keys are prompt",
    ),
    "bad points": (
        '[model]\nkind = "mlp"\ninputs = 2\n[data]\nfiles = ["points.csv"]',
        r"line 5: data.files: points.csv: could not",
    ),
    "a circle": (
        '[batch]\nsequences = 2\nmicrobatch = 1\n[pipeline]\nschedule = "circle.csv"',
        r"line 5: pipeline.schedule: program 'circle.csv' cannot run: rank",
    ),
    "no such cut": (
        '[pipeline]\ncuts = ["blocks.33"]',
        r"line 2: pipeline.cuts: 'blocks.33' is no block .* did you mean",
    ),
    "few cuts": (
        '[pipeline]\ncuts = ["layers.1", "layers.2"]',
        "line 2: pipeline.cuts has 2 names.*expected 1: one for",
    ),
    "no such parameter": (
        '[[optimizer.groups]]\nnames = ["*.wieght"]',
        r"line 2: optimizer.groups.0: no trainable parameter is named",
    ),
    "betas": (
        "[optimizer.settings]\nweight_decay = 0.1\nbetas = [0.9, 2]",
        r"line 3: optimizer.settings.betas is \[0.9, 2\]: Invalid beta parameter at index 1",
    ),
    "three betas": (
        "[optimizer.settings]\nbetas = [0.9, 0.9, 0.9]",
        "line 2: optimizer.settings.betas .* 2 numbers, like",
    ),
    "timeout": (
        "[pipeline]\ntimeout = 1e300",
        r"line 2: pipeline.timeout is 1e\+300.*expected a number above 0 and at",
    ),
    "torn": ('[model]\nkind = "hf"\npath = "torn"', "line 3: model.path: torn/config.json, line 1: not JSON"),
    "no model": ('[model]\nkind = "hf"\npath = "bare"', "line 3: model.path: bare: has no config.json"),
    "a file for a model": ('[model]\nkind = "hf"\npath = "pipe"', "line 3: model.path: pipe: is a pipe"),
    "kindless": (
        '[model]\nkind = "hf"\npath = "kindless"',
        "line 3: model.path: .*config.json: there is no model_type",
    ),
    "unknown": (
        '[model]\nkind = "hf"\npath = "unknown"',
        "line 3: model.path: .*'nosuchmodel', which transformers does not",
    ),
    "a list": (
        '[model]\nkind = "hf"\npath = "list/config.json"',
        "line 3: model.path: .*: a list instead of an object",
    ),
    "weights cut off": ('[model]\nkind = "hf"\npath = "cut"', "line 3: model.path: cut/model.safetensors: has .* need"),
    "a lost shard": (
        '[model]\nkind = "hf"\npath = "shards"',
        "line 3: model.path: shards/part.safetensors: no such file",
    ),
    "tokens": (
        '[model]\nkind = "hf"\npath = "torn_tokens"',
        "model.path: torn_tokens/tokenizer.json, line 2: not JSON",
    ),
    "an argument too much": (
        '[model]\nkind = "function"\nfunction = "mine.py:model"\n[model.arguments]\nwidth = 2\nwide = 1',
        "line 6: model.arguments.wide: mine.py, line 3: model does not take wide.*did you mean width?",
    ),
    "an argument too few": (
        '[data]\nkind = "function"\nfunction = "mine.py:data"',
        r"line 3: data.function: mine.py, line 4: data needs folder.*.* add it to the table \[data.arguments\]",
    ),
    "no such function": (
        '[data]\nkind = "function"\nfunction = "mine.py:date"',
        "line 3: .*has no function 'date'.*did you",
    ),
    "no Python": ('[data]\nkind = "function"\nfunction = "wrong.py:data"', "line 3: data.function: wrong.py, line 1: "),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_told_before_any_rank_starts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starting, "launch", None)
    written(tmp_path)
    text, match = WRONG[kind]
    (tmp_path / "run.toml").write_text(text)
    assert main(["train", "run.toml"]) == 2
    told = capsys.readouterr().err
    assert re.search(f"^drumline: run.toml, {match}" if match[:4] == "line" else match, " ".join(told.split())), told
    assert not (tmp_path / "out").exists()


def test_a_flag_is_the_place_of_what_it_gave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    judged = read_judged(None, {"data.files": ["latin.txt"], "batch.sequence": 16}, flags={"data.files": "--data"})
    with refused(ConfigError, r"^--data: data\.files: latin\.txt, line 3: not UTF-8") as caught:
        preflight(judged.settings, judged.source)
    assert caught.value.problems[0]["key"] == "data.files"


def test_of_large_data_only_the_beginning_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from drumline.train import preflight as module

    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    settings = read_settings(None, {"data.files": ["large.txt"], "batch.sequence": 16})
    with refused(ConfigError, r"large\.txt, line 2: not UTF-8"):
        preflight(settings)
    monkeypatch.setattr(module, "_SMALL", 100)
    monkeypatch.setattr(module, "_FEW", 1000)
    preflight(settings)


def test_what_ranks_find_gets_its_place(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[data]\nfiles = [\n"good.txt"]\n[pipeline]\nbalance = "even"\n')
    (tmp_path / "good.txt").write_text("text")
    source = read_judged(tmp_path / "run.toml", {"data.files.0": str(tmp_path / "good.txt")}).source
    source.flags.clear()

    def told(error: DrumlineError, key: str = "") -> str:
        error.key = key
        return str(placed(error, source))

    assert told(UsageError("good.txt, line 9: not UTF-8"), "data.files").endswith("good.txt, line 9: not UTF-8")
    assert re.match(r".*run\.toml, line 2: data\.files: x, line 9", told(UsageError("x, line 9: no"), "data.files"))
    assert re.match(r".*run\.toml, line 5: pipeline\.balance is odd", told(UsageError("pipeline.balance is odd")))
    assert told(UsageError("batch.sequence is 3")) == "batch.sequence is 3"  # nobody gave it
    assert told(UsageError("something else")) == "something else"


def test_functions_that_can_be_called_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    for name, arguments in (("anything", {"a": 1}), ("decorated", {}), ("nn", {}), ("model", {"width": 3})):
        read_settings(
            None, {"model.kind": "function", "model.function": f"mine.py:{name}", "model.arguments": arguments}
        )
    for name in ("math:gcd", "not_there_at_all:build"):
        read_settings(None, {"model.kind": "function", "model.function": name})


@pytest.mark.parametrize(("table", "function"), [("model", build._by_function), ("data", data_by_function)])
def test_what_functions_are_offered_is_what_is_checked(table: str, function: Callable[..., Any]) -> None:
    text = inspect.getsource(function)
    offered = text[text.index("offered = {") :].partition("}")[0]
    assert tuple(re.findall(r'"(\w+)":', offered)) == OFFERED[table]


def test_looking_needs_no_transformers_and_no_compiler(tmp_path: Path) -> None:
    before = set(sys.modules)
    preflight(read_settings(None, {"optimizer.settings": {"betas": [0.9, 0.95]}}))
    added = {module.partition(".")[0] for module in set(sys.modules) - before} | (set(sys.modules) - before)
    assert not added & {"transformers", "torch._dynamo", "sympy"}


def test_folders_of_patterns_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    assert read_settings(None, {"data.files": ["goo*.txt"]}).data.files == ("goo*.txt",)
