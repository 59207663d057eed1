"""Data that no good run has: files, functions and streams that are refused, each with its name and its place."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from drumline.core.errors import (
    DrumlineError,
    UsageError,
)
from drumline.train.config import settings as tables
from drumline.train.config.settings import TrainSettings
from drumline.train.data.build import build_data
from drumline.train.data.fill import TokenFiller
from drumline.train.data.items.batch import Batch, Data
from drumline.train.data.items.documents import Documents
from drumline.train.data.items.fingerprint import Part, changed, fingerprint
from drumline.train.data.items.order import Shuffle
from drumline.train.data.own.repeated import DataSource, RepeatedStream, batch_of
from drumline.train.data.own.resume_trial import check_resumable
from drumline.train.data.own.user_data import data_by_function
from drumline.train.data.points import Points
from drumline.train.data.read.instructions import instruction_documents
from drumline.train.data.read.text import text_documents
from drumline.train.data.read.tokens import token_documents
from drumline.train.data.samples import Blocks
from drumline.train.models.built import Built
from drumline.train.models.tokenizers import ByteTokenizer
from refused import refused, saying

pytestmark = pytest.mark.torch


def built(**changes: Any) -> Built:
    return replace(Built(nn.Linear(2, 2), nn.functional.mse_loss), **changes)


def filler(model: Built, how: str) -> TokenFiller:
    samples: Any = None  # nothing is read
    return TokenFiller(samples, model, how, 5)


def settings(**changed: Any) -> TrainSettings:
    return replace(TrainSettings(), **changed)


def in_buckets(*lengths: int) -> Data:
    batch, buckets = tables.BatchSettings(sequence=8), tables.LengthSettings(how="buckets", buckets=lengths)
    return build_data(settings(batch=batch, lengths=buckets), built())


def test_blocks_have_the_lengths_that_are_read() -> None:
    blocks = Blocks(Documents.of([list(range(5)), list(range(5, 12))]), 4)  # 12 tokens: 11 places
    assert blocks.lengths(np.arange(blocks.num)).tolist() == [4, 4, 3]
    assert [len(blocks.read(at)[0]) for at in range(blocks.num)] == [4, 4, 3]


def _reference_order(size: int, key: tuple[int, ...]) -> list[int]:
    """Return the shuffle of a key by whole numbers of Python: splitmix64 in a Feistel network of eight rounds."""
    odd, whole = 0x9E3779B97F4A7C15, 2**64 - 1

    def mixed(number: int) -> int:
        number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & whole
        number = ((number ^ number >> 27) * 0x94D049BB133111EB) & whole
        return number ^ number >> 31

    state = 0
    for index in key:
        state = mixed(((state ^ index) + odd) & whole)
    keys = [mixed((number * odd & whole) ^ state) for number in range(1, 9)]
    half = max((max(size - 1, 1).bit_length() + 1) // 2, 1)
    found = []
    for count in range(size):
        while True:
            left, right = count >> half, count & 2**half - 1
            for its in keys:
                left, right = right, left ^ (mixed((right + its) & whole) & 2**half - 1)
            count = left << half | right
            if count < size:
                break
        found.append(count)
    return found


@pytest.mark.parametrize(("size", "key"), [(1, (0,)), (2, (5,)), (10, (0, 3)), (1000, (1234, 7))])
def test_the_order_of_a_seed_stays_what_it_was(size: int, key: tuple[int, ...]) -> None:
    assert Shuffle(size, key=key).at(0, size).tolist() == _reference_order(size, key)


def test_data_that_were_tried_are_closed_before_the_run_begins_with_them() -> None:
    closed = []
    tried = SimpleNamespace(
        batches=object(),
        has_state=False,
        draws=SimpleNamespace(state=lambda: 0, restore=lambda value: None),
        begin=lambda epoch: None,
        next=lambda: torch.zeros(1),
        close=lambda: closed.append(True),
    )
    check_resumable(tried, "mine")  # type: ignore[arg-type]
    assert closed == [True]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: build_data(TrainSettings(), built(), rank=2, size=2), saying("rank is 2 of 2", expected="0 to 1")),
        (lambda: build_data(TrainSettings(), built(), rank=-1, size=2), saying("rank is -1 of 2")),
        (lambda: build_data(settings(data=tables.DataSettings(kind="txt")), built()), saying("data.kind is 'txt'")),
        (
            lambda: build_data(settings(lengths=tables.LengthSettings(how="block")), built()),
            saying(fix=r"did you mean blocks\?"),
        ),
        (
            lambda: build_data(settings(lengths=tables.LengthSettings(how="pack")), built()),
            saying("lengths.how is 'pack'", fix=r"did you mean packed\?"),
        ),
        (lambda: in_buckets(0, 4), saying(r"lengths.buckets is \(0, 4\)", expected="whole numbers of 1 or more")),
        (lambda: in_buckets(4, 9), saying(r"lengths.buckets is \[4, 9\]", expected="at most batch.sequence, 8")),
        (lambda: in_buckets(8, 4), saying(r"lengths.buckets is \[8, 4\]", expected="rising lengths")),
        (
            lambda: build_data(settings(data=tables.DataSettings(validation=1.0)), built()),
            saying("data.validation is 1.0", expected="from 0 to less than 1"),
        ),
        (
            lambda: filler(built(), "padded")._check(np.array([[1, 5]])),
            saying("the token 5, and the model 5 tokens"),
        ),
        (lambda: filler(built(loss_fn=None), "packed"), saying("Linear comes without a loss function and takes")),
        (
            lambda: batch_of(torch.zeros(2), built(), "mine"),
            saying("mine gave a Tensor", expected=r"Batch or \(inputs, target\)"),
        ),
        (
            lambda: batch_of((1, 2, 3), built(), "mine"),
            saying("mine gave a tuple", expected=r"Batch or \(inputs, target\)"),
        ),
        (lambda: next(iter(RepeatedStream(DataSource([]), built(), "mine"))), saying("mine gives no batch")),
    ],
)
def test_data_that_cannot_be_used_are_refused(make: Callable[[], Any], said: dict[str, str]) -> None:
    with refused(DrumlineError, **said):
        make()


def test_the_last_token_of_a_vocabulary_is_one() -> None:
    filler(built(), "padded")._check(np.array([[1, 4]]))


@pytest.mark.parametrize("exact", [True, False])
def test_other_batches_than_before_are_refused_or_told(exact: bool, caplog: pytest.LogCaptureFixture) -> None:
    def pairs(*values: float) -> list[Any]:
        return [(torch.full((1, 2), value), torch.zeros(1, 2)) for value in values]

    before = RepeatedStream(DataSource(pairs(1, 2, 3)), built(), "mine")
    batches = iter(before)
    next(batches), next(batches)
    state = before.state_dict()
    for data, said in (
        (pairs(1, 9, 3), "gives other batches than"),
        (pairs(1), "gives 1 batches in an epoch of which 2"),
    ):
        after = RepeatedStream(DataSource(data), built(), "mine", exact=exact)
        after.load_state_dict(state)
        assert after.state_dict() is state
        if exact:
            with refused(UsageError, said):
                next(iter(after))
        else:
            with caplog.at_level(logging.WARNING, logger="drumline"):
                next(iter(after))
            assert said in caplog.text
    with refused(UsageError, "saved by another version"):
        before.load_state_dict({**state, "version": -1})
    with refused(UsageError, "gives data without their own state_dict"):
        before.load_state_dict({**state, "source": {}})


class Once:
    """A stream that cannot say where it is."""

    def __iter__(self) -> Any:
        return iter(())


def own_data(made: Any, monkeypatch: pytest.MonkeyPatch, *, exact: bool = True, size: int = 1, **changed: Any) -> Data:
    """Return what a user's function makes of its data."""
    module: Any = SimpleNamespace(make=lambda: made)
    monkeypatch.setitem(sys.modules, "some_own_data", module)
    own = tables.DataSettings(kind="function", function="some_own_data:make", exact=exact)
    return data_by_function(settings(data=own, **changed), built(), rank=0, size=size)


def test_streams_of_a_users_own_must_be_continued_or_say_that_they_need_not(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Data(Once(), (), num_tokens=0)  # type: ignore[arg-type]
    with refused(UsageError, "has no state_dict and no load_state_dict"):
        own_data(made, monkeypatch)
    assert own_data(made, monkeypatch, exact=False) is made
    with refused(UsageError, "returned a list_iterator"):
        own_data(iter([1]), monkeypatch)
    with refused(UsageError, r"failures.elastic is true, and some_own_data:make divides its data by 2"):
        own_data([], monkeypatch, size=2, failures=tables.FailureSettings(elastic=True))


@pytest.mark.parametrize(
    ("name", "content", "read", "said"),
    [
        ("a.jsonl", b"\n \n", "text", "has only blank lines"),
        ("a.jsonl", b'{"txt": "a"}\n', "text", 'a.jsonl, line 1: no "text"'),
        ("a.jsonl", b'{"text": "a"}\n\xff\n', "text", "line 2"),
        ("a.jsonl", b'{"prompt": "a"}\n', "instructions", "line 1: the keys are prompt"),
        ("a.jsonl", b'{"messages": []}\n', "instructions", r"line 1: messages is \[\]"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": "a"}]}\n', "instructions", "no message of the role"),
        ("a.npy", b"no numbers", "tokens", "is no .npy file that can be read"),
        ("a.bin", b"abc", "tokens", "has 3 bytes, which is no multiple of 2"),
        ("a.csv", b"1,2\n3,4\n", "points", r"holds numbers of the shape \(2, 2\)"),
        ("a.csv", b"1,2,3\n", "points", "has classes from 3 to 3"),
        ("a.csv", b"1,2,0.5\n", "points", "has classes from 0.5 to 0.5"),
        ("a.csv", b"1,nan,1\n", "points", r"holds numbers of the shape \(1, 3\)"),
    ],
)
def test_files_of_data_that_mean_nothing_are_named(
    name: str, content: bytes, read: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    readers: dict[str, Callable[[], Any]] = {
        "text": lambda: text_documents([str(path)], "", ByteTokenizer()),
        "instructions": lambda: instruction_documents([str(path)], ByteTokenizer()),
        "tokens": lambda: token_documents([str(path)], "uint16", None, None),
        "points": lambda: Points.of_files([str(path)], inputs=2, classes=3),
    }
    with refused(UsageError, said):
        readers[read]()


def test_what_changed_in_the_files_is_said() -> None:
    def part(name: str, size: int) -> Part:
        return Part(name, np.zeros(size, dtype=np.uint8))

    row, longer, two = [part("a", 9)], [part("a", 12)], [part("a", 9), part("b", 9)]
    assert changed(fingerprint(row), fingerprint(two), two) == "there are 2 files, and there were 1"
    assert changed(fingerprint(row), fingerprint(longer), longer) == "a has another size: 12, not 9"
    many = [part(f"{at}", 1) for at in range(150)]
    other = [*many[:-1], Part("149", np.ones(1, dtype=np.uint8))]
    assert changed(fingerprint(many), fingerprint(other), other) == "a file has other contents"


def test_a_batch_is_of_no_bucket_and_of_the_runs_own_program_unless_it_says_so() -> None:
    batch = Batch({}, None, num_tokens=0, num_padded=0)
    assert (batch.bucket, batch.num_microbatches) == (0, 0)
