"""Data that change between a run and its continuation are noticed, whatever their kind and however little changes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drumline.core.errors import UsageError
from drumline.train.config.settings import BatchSettings, DataSettings, LengthSettings, ModelSettings, TrainSettings
from drumline.train.data import build
from drumline.train.data.items import fingerprint
from drumline.train.data.read import encoding
from drumline.train.data.stream import PlannedStream
from drumline.train.models.build import build_model
from drumline.train.models.tokenizers import ByteTokenizer
from refused import refused

pytestmark = pytest.mark.torch


def stream_of(path: Path, kind: str, how: str = "sampled") -> PlannedStream:
    settings = TrainSettings(
        model=ModelSettings(kind="mlp", inputs=2, outputs=3)
        if kind == "points"
        else ModelSettings(num_layers=1, hidden=8, num_heads=1, vocabulary=300),
        data=DataSettings(kind=kind, files=(str(path),), validation=0.0, separator="\n", fingerprint=how),
        batch=BatchSettings(sequences=2, microbatch=1, sequence=8),
        lengths=LengthSettings(how="blocks"),
    )
    made = build.build_data(settings, build_model(settings, device="meta"))
    assert isinstance(made.training, PlannedStream)
    return made.training


def instructions(answer: str) -> bytes:
    return b"".join(json.dumps({"prompt": "what?", "response": name}).encode() + b"\n" for name in ("abcd", answer) * 9)


def points(value: float) -> bytes:
    return "".join(f"{at},{value},{at % 3}\n" for at in range(9)).encode()


KINDS: dict[str, tuple[str, str, Callable[[int], bytes]]] = {
    "text": ("a.txt", "text", lambda at: b"some text\n" * 20 + bytes([97 + at])),
    "where documents end": ("a.txt", "text", lambda at: b"ab" * 40 + (b"\ncd" if at else b"c\nd") + b"ab" * 40),
    "records": ("a.jsonl", "text", lambda at: b'{"text": "some words"}\n' * 20 + b'{"text": "%d"}\n' % at),
    "tokens": ("a.bin", "tokens", lambda at: np.array([*range(200), at], dtype=np.uint16).tobytes()),
    "instructions": ("a.jsonl", "instructions", lambda at: instructions("efg" + "hi"[at])),
    "points": ("a.csv", "points", lambda at: points(float(at))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_data_of_the_same_size_with_other_contents_are_refused(kind: str, tmp_path: Path) -> None:
    name, what, content = KINDS[kind]
    path = tmp_path / name
    path.write_bytes(content(0))
    saved = json.loads(json.dumps(stream_of(path, what).state_dict()))
    moved = tmp_path / "elsewhere" / name
    moved.parent.mkdir()
    moved.write_bytes(content(0))
    stream_of(moved, what).load_state_dict(saved)  # the same data, wherever they are
    path.write_bytes(content(1))
    assert path.stat().st_size == moved.stat().st_size
    with refused(UsageError, r"the data have changed since the position was saved: .* other contents"):
        stream_of(path, what).load_state_dict(saved)


def test_large_data_are_compared_by_samples_or_whole_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_MOST", 4)
    path = tmp_path / "a.txt"
    content = bytearray(b"x" * 100_000)
    path.write_bytes(content)
    sampled, whole = stream_of(path, "text").state_dict(), stream_of(path, "text", "whole").state_dict()
    content[10_000] = ord("y")  # between the samples
    path.write_bytes(content)
    stream_of(path, "text").load_state_dict(sampled)
    for now in ("whole", "sampled"):  # as it was saved, whatever is asked for now
        with refused(UsageError, r"a\.txt has other contents"):
            stream_of(path, "text", now).load_state_dict(whole)
    for at in (0, 99_999):  # the first and the last block are always looked at
        content[at] = ord("z")
        path.write_bytes(content)
        with refused(UsageError, r"a\.txt has other contents"):
            stream_of(path, "text").load_state_dict(sampled)
        content[at] = ord("x")


def test_a_checkpoint_without_a_fingerprint_still_continues(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"text " * 40)
    state: dict[str, Any] = stream_of(path, "text").state_dict()
    del state["contents"]  # as earlier versions saved it
    stream_of(path, "text").load_state_dict(state)


def test_cached_tokens_are_those_of_the_contents(tmp_path: Path) -> None:
    keys = []
    for text in ("one", "two"):
        path = tmp_path / "a.txt"
        path.write_text(text)
        os.utime(path, ns=(1, 1))
        keys.append(encoding._key([path], "", ByteTokenizer()))
    assert keys[0] != keys[1]
