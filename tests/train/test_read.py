"""Files that are trained on: what is read, what counts, and what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drumline.core.errors import DrumlineError, UsageError
from drumline.train.config.settings import BatchSettings, DataSettings, EvaluationSettings, ModelSettings, TrainSettings
from drumline.train.data.build import build_data
from drumline.train.data.items.batch import Batch, Data
from drumline.train.data.items.documents import Documents
from drumline.train.data.read import encoding, text
from drumline.train.data.read.instructions import instruction_documents
from drumline.train.data.read.text import text_documents
from drumline.train.data.read.tokens import token_documents
from drumline.train.models.build import build_model
from drumline.train.models.built import IGNORED
from drumline.train.models.tokenizers import ByteTokenizer
from refused import refused, saying
from some import some

BYTES = ByteTokenizer()
SMALL = BatchSettings(sequences=4, microbatch=2, sequence=8)


def written(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def texts(documents: Documents) -> list[str]:
    return [
        BYTES.decode(documents.read(at, 0, length).tolist()) for at, length in enumerate(documents.lengths.tolist())
    ]


class Reversed(ByteTokenizer):
    """A tokenizer that is not known to be bytes."""

    def encode(self, text: str) -> list[int]:
        return [255 - number for number in text.encode()]


def test_text_is_divided_alike_whoever_encodes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [
        written(tmp_path, "a.txt", "\ufeffone é\n\ntwo\n\n"),
        written(tmp_path, "b.txt", "three\n\n\n\nfour"),
    ]
    found = text_documents(files, "\n\n", BYTES)
    assert texts(found) == ["one é", "two", "three", "four"]
    assert found.read(1, 0, 4).tolist() == [*b"two", 256]
    monkeypatch.setenv("DRUMLINE_CACHE", str(tmp_path / "cache"))
    for in_memory in (0, 0, 1 << 20):  # into the cache, from the cache, into memory
        monkeypatch.setattr(encoding, "IN_MEMORY", in_memory)
        other = text_documents(files, "\n\n", Reversed())
        assert len(other) == 4
        for at, length in some(enumerate(found.lengths.tolist())):
            assert other.read(at, 0, length - 1).tolist() == (255 - found.read(at, 0, length - 1)).tolist()
    monkeypatch.setattr(text, "_PIECE", 3)  # in the middle of é, and without lines
    again = text_documents(files, "\n\n", Reversed())
    assert [again.read(at, 0, 99).tolist() for at in range(4)] == [other.read(at, 0, 99).tolist() for at in range(4)]
    lines = written(tmp_path, "c.jsonl", '{"text": "five"}\n{"text": "six"}\n')
    assert texts(text_documents([lines], "", BYTES)) == ["five", "six"]


@pytest.mark.parametrize("separator", ["\n\n", "\r\n\r\n"])
def test_separators_match_the_line_ends_that_a_file_has(separator: str, tmp_path: Path) -> None:
    lines = ["one", "two", "", "three", "", "", "four"]
    names = [written(tmp_path, f"{at}.txt", end.join(lines).encode()) for at, end in enumerate(("\n", "\r\n"))]
    names.append(written(tmp_path, "mixed.txt", b"one\r\n\ntwo\n\r\n\n\r\nthree"))
    other: type[ByteTokenizer] = type("Other", (ByteTokenizer,), {})  # is not known to be bytes, and so encodes
    for tokenizer in (BYTES, other()):
        found = [texts(text_documents([name], separator, tokenizer)) for name in names]
        assert found[0] == ["one\ntwo", "three", "\nfour"]
        assert found[1] == ["one\r\ntwo", "three", "\r\nfour"]
        assert found[2] == ["one", "two", "three"]


def test_the_shipped_text_trains_by_default() -> None:
    settings = TrainSettings(model=ModelSettings(num_layers=1, hidden=8, num_heads=1))
    data = build_data(settings, build_model(settings, device="meta"))
    assert data.num_tokens > 180_000
    assert 4096 < data.validation[0].num_tokens < data.validation[0].num_padded == 32 * 256
    data.close()


def test_tokens_of_every_type_are_divided_at_their_ends(tmp_path: Path) -> None:
    tokens = [5, 6, 0, 7, 8, 9, 0, 1]
    for kind in ("uint16", "uint32", "int32", "int64"):
        bare = tmp_path / f"{kind}.bin"
        np.array(tokens, dtype=kind).tofile(bare)
        array = tmp_path / f"{kind}.npy"
        np.save(array, np.array(tokens, dtype=kind))
        for path in (bare, array):
            found = token_documents([str(path)], kind, 0, 10)
            assert [found.read(at, 0, 9).tolist() for at in range(len(found))] == [[5, 6, 0], [7, 8, 9, 0], [1]]
    whole = token_documents([str(tmp_path / "*.npy")], "uint16", None, None)
    assert whole.lengths.tolist() == [8] * 4


def test_only_responses_count(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"prompt": "2+2? ", "response": "4"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
    ]
    file = written(tmp_path, "a.jsonl", "\n".join(map(json.dumps, records)))
    found = instruction_documents([file], BYTES)
    counted = [
        BYTES.decode(
            [token for token, counts in zip(found.read(at, 0, n), found.counts(at, 0, n), strict=True) if counts]
        )
        for at, n in enumerate(found.lengths.tolist())
    ]
    assert counted == ["4", "yo\n"]
    assert texts(found) == ["2+2? 4", "user: hi\nassistant: yo\n"]
    many = written(tmp_path, "b.jsonl", "\n".join(json.dumps(records[0]) for _ in range(20)))
    settings = TrainSettings(
        model=ModelSettings(num_layers=1, hidden=8, num_heads=1),
        batch=SMALL,
        data=DataSettings(kind="instructions", files=(many,)),
        evaluation=EvaluationSettings(every=0),
    )
    data = build_data(settings, build_model(settings, device="meta"))
    batch = next(iter(data.training))
    data.close()
    assert set(batch.target.flatten().tolist()) == {ord("4"), 256, IGNORED}
    assert batch.num_tokens == int((batch.target != IGNORED).sum()) < batch.num_padded


def test_wrong_files_are_refused_with_name_and_line(tmp_path: Path) -> None:
    long = "x" * 400
    np.save(tmp_path / "floats.npy", np.zeros(4))
    cases: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"files": ("none.txt",)}, saying("data.files: none.txt: no such file", expected="a file to read")),
        ({"files": (str(tmp_path),)}, saying("is no file but a folder", fix="name what is in it")),
        ({"files": (written(tmp_path, "empty.txt", ""),)}, saying("data.files: .*empty.txt: is empty")),
        ({"files": (written(tmp_path, "short.txt", "abc"),)}, saying("the data have 1 row, and a step takes 4")),
        ({"files": (written(tmp_path, "latin.txt", b"a\nb\xe9\n"),)}, saying("latin.txt, line 2: not UTF-8")),
        ({"files": (written(tmp_path, "cut.txt", b"a\nb\n\xc3"),)}, saying("cut.txt, line 3: not UTF-8")),
        ({"files": (written(tmp_path, "ok.txt", long),), "validation": 1.0}, saying("data.validation is 1.0")),
        (
            {"files": (written(tmp_path, "ok.txt", long),), "tokenizer": "nowhere"},
            saying("data.tokenizer is 'nowhere'"),
        ),
        ({"kind": "txet"}, saying("data.kind is 'txet'", fix="did you mean text")),
        ({"kind": "tokens"}, saying("data.files names no file")),
        (
            {"kind": "tokens", "files": (written(tmp_path, "odd.bin", b"abc"),)},
            saying("3 bytes, which is no multiple of 2"),
        ),
        (
            {"kind": "tokens", "files": (written(tmp_path, "big.bin", b"\x01\x00\x2c\x01"),)},
            saying("token 300 at place 1"),
        ),
        ({"kind": "tokens", "files": (str(tmp_path / "floats.npy"),)}, saying("holds float64")),
        (
            {"kind": "tokens", "token_type": "float", "files": (str(tmp_path / "floats.npy"),)},
            saying("data.token_type"),
        ),
        (
            {"kind": "instructions", "files": (written(tmp_path, "a.jsonl", '{"prompt": 1}\n'),)},
            saying("a.jsonl, line 1: the"),
        ),
        ({"kind": "instructions", "files": (written(tmp_path, "b.jsonl", "{}\n{\n"),)}, saying("b.jsonl, line 1")),
        (
            {"kind": "instructions", "files": (written(tmp_path, "c.jsonl", "\n[]\n"),)},
            saying("c.jsonl, line 2: a list"),
        ),
        ({"kind": "instructions", "files": (written(tmp_path, "d.jsonl", "{"),)}, saying("d.jsonl, line 1: not JSON")),
        (
            {"kind": "instructions", "files": (written(tmp_path, "e.jsonl", '{"prompt": "a", "response": ""}'),)},
            saying("e.jsonl, line 1: the response is empty"),
        ),
    ]
    for changes, said in some(cases):
        settings = TrainSettings(
            model=ModelSettings(num_layers=1, hidden=8, num_heads=1, vocabulary=257),
            batch=SMALL,
            data=DataSettings(**changes),
        )
        with refused(DrumlineError, **said):
            build_data(settings, build_model(settings, device="meta"))


def test_an_mlp_trains_on_points(tmp_path: Path) -> None:
    model = ModelSettings(kind="mlp", num_layers=3, hidden=8, inputs=2, outputs=3)
    settings = TrainSettings(model=model, batch=BatchSettings(sequences=8, microbatch=2))
    built = build_model(settings)
    data = build_data(settings, built)
    batch = next(iter(data.training))
    data.close()
    assert len(data.validation) == 4
    assert built.loss_fn is not None
    assert built.loss_fn(built.model(**batch.inputs), batch.target).isfinite()
    rows = "\n".join(f"{at},{at + 1},{at % 3}" for at in range(40))
    for content, said in {rows: "", rows + ",1": "40", rows.replace(",2\n", ",7\n"): "classes from 0 to 7"}.items():
        file = written(tmp_path, "points.csv", content)
        named = TrainSettings(
            model=model, batch=settings.batch, data=DataSettings(kind="points", files=(file,), validation=0.2)
        )
        if not said:
            assert build_data(named, built).num_tokens == 32
            continue
        with refused(UsageError, said):
            build_data(named, built)


USERS = """
import torch
from torch import nn

def build_model(width, settings):
    torch.manual_seed(settings.run.seed)
    return nn.Sequential(nn.Linear(2, width), nn.Linear(width, 3)), nn.functional.cross_entropy

def build_data(rank, size, batches):
    made = [(torch.full((4, 2), float(at)), torch.tensor([0, 1, 2, -100])) for at in range(batches)]
    return made[rank::size], made[:1]
"""


def test_functions_of_users_give_model_and_data(tmp_path: Path) -> None:
    file = written(tmp_path, "mine.py", USERS)
    settings = TrainSettings(
        model=ModelSettings(kind="function", function=f"{file}:build_model", arguments={"width": 4}),
        data=DataSettings(kind="function", function=f"{file}:build_data", arguments={"batches": 6}),
    )
    built = build_model(settings)
    data = build_data(settings, built, rank=1, size=2)
    assert isinstance(data, Data)
    seen = []
    stream = iter(data.training)
    for _ in range(4):
        batch = next(stream)
        seen.append(batch.inputs["input"][0, 0].item())
        state = data.training.state_dict()
    assert seen == [1, 3, 5, 1]
    assert (batch.num_tokens, batch.num_padded) == (3, 4)
    again = build_data(settings, built, rank=1, size=2)
    again.training.load_state_dict(state)
    following: Batch = next(iter(again.training))
    assert following.inputs["input"][0, 0].item() == 3
    for changes, said in {
        "build_modle": saying("model.function: .* has no function 'build_modle'", fix="did you mean build_model"),
        "USERS": saying("has no function 'USERS'"),
    }.items():
        wrong = TrainSettings(model=ModelSettings(kind="function", function=f"{file}:{changes}"))
        with refused(UsageError, **said):
            build_model(wrong)
    wrong = TrainSettings(model=ModelSettings(kind="function", function=f"{file}:build_model"))
    with refused(UsageError, "needs width"):
        build_model(wrong)
