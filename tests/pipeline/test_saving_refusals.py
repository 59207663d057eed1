"""What a checkpoint does not take, and what a damaged one holds: refused with its place, in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drumline.checkpoint.extra_files import checked_files
from drumline.checkpoint.manifest import _object, problem_of_files
from drumline.checkpoint.plain_json import packed, unpacked
from drumline.core.errors import DrumlineError
from drumline.engine.model import splits
from drumline.engine.state.name_patterns import matching
from drumline.features.saving.snapshot import model_tensors
from drumline.schedules import generate, schedule
from refused import refused, saying

pytestmark = [pytest.mark.torch, pytest.mark.features("saving")]


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


def tagged(kind: str, of: Any) -> dict[str, Any]:
    (tag,) = (name for name in packed((1,), "x") if name != "of")
    return {tag: kind, "of": of}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: checked_files(["a"]), saying(r"files is \['a'\]", expected="contents or paths by name")),
        (lambda: checked_files({"../a": "b"}), saying("files has '../a'", expected="a name inside of the checkpoint")),
        (lambda: checked_files({"/a": "b"}), saying("files has '/a'")),
        (lambda: checked_files({"": "b"}), saying("files has ''")),
        (lambda: checked_files({3: "b"}), saying("files has 3")),
        (lambda: checked_files({"a\0": "b"}), saying("files has")),
        (lambda: checked_files({"a": 3}), saying("files has 'a' as 3", expected="text, bytes, or a Path")),
        (lambda: packed(nested(2000), "state"), saying("lies too deep")),
        (lambda: packed({"a": object()}, "state"), saying(r"state\['a'\] is an object of the class object")),
        (lambda: packed([torch.ones(2, device="meta")], "state"), saying(r"state\[0\] is a tensor of the kind")),
        (lambda: packed(torch.eye(2).to_sparse(), "state"), saying("state is a tensor of the kind torch.sparse_coo")),
        (lambda: packed(np.array([object()]), "state"), saying("state is an array of objects")),
        (lambda: unpacked(tagged("tensor", ["float31", [1], ""])), saying("a saved value is damaged")),
        (
            lambda: unpacked(tagged("tensor", ["nn", [1], ""])),
            saying("a saved value is damaged: TypeError: nn is no kind of number"),
        ),
        (lambda: unpacked(tagged("nothing", 1)), saying("a saved value is damaged: KeyError")),
        (lambda: model_tensors({"a": torch.ones(1), "extra": 3}), saying("the model's state has 'extra', a int")),
        (lambda: matching([3], ["0.weight"]), saying("names holds 3", expected="text")),  # type: ignore[list-item]
        (lambda: splits.check([1]), saying(r"split is \[1\]", expected="a dict")),
        (lambda: splits.check({True: 0}), saying("split names True", expected="an argument's name or position")),
        (lambda: splits.check({1.5: 0}), saying("split names 1.5")),
        (
            lambda: splits.check({"a": True}),
            saying("split is True for 'a'", expected="a dimension"),
        ),
        (
            lambda: generate("pipedream-2bw", num_ranks=2, num_microbatches=2, num_steps=0),
            saying("num_steps is 0", expected="^1"),
        ),
        (lambda: schedule("odd-one", stage_counts="some")(lambda: iter(())), saying("stage_counts is 'some'")),
    ],
)
def test_what_cannot_be_kept_or_is_damaged_is_refused(make: Callable[[], Any], said: dict[str, str]) -> None:
    with refused(DrumlineError, **said):
        make()


def test_what_may_be_kept_comes_back() -> None:
    given = {"a": [1, (2, 3)], "b": torch.eye(2), "c": {4, 5}, "d": 2**80, "e": float("inf")}
    found = unpacked(packed(given, "state"))
    assert torch.equal(found.pop("b"), given.pop("b"))  # type: ignore[arg-type]
    assert found == given
    assert unpacked(packed(nested(20), "state")) == nested(20)


def test_a_manifest_that_is_no_object_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    for text, said in (("[" * 100_000, "nested too deeply"), ("{", "not JSON"), ("[1]", "holds a list, not an object")):
        path.write_text(text)
        with refused(DrumlineError, said):
            _object(path)
    path.write_text('{"a": 1}')
    assert _object(path) == {"a": 1}


def test_files_that_are_gone_or_cut_off_are_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert problem_of_files(tmp_path, {"a": 3}) == ""
    assert problem_of_files(tmp_path, {"a": 4}) == f"{tmp_path / 'a'} has 3 bytes; expected 4, as it was written"
    assert problem_of_files(tmp_path, {"a": 3, "b": 1}) == f"{tmp_path / 'b'} is missing"
