"""Order, shares, positions and padding of the data, for every way of laying documents out."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drumline.core.errors import DrumlineError, UsageError
from drumline.core.measured.run import read_run
from drumline.train.config.keys import keys
from drumline.train.config.settings import (
    BatchSettings,
    DataSettings,
    EvaluationSettings,
    LearningRateSettings,
    LengthSettings,
    MeshSettings,
    ModelSettings,
    PipelineSettings,
    RunSettings,
    TrainSettings,
)
from drumline.train.data.build import build_data
from drumline.train.data.items.batch import Batch, Data
from drumline.train.data.stream import PlannedStream
from drumline.train.dry.dry_run import dry_run
from drumline.train.loop.run import run_training
from drumline.train.models.build import build_model
from drumline.train.models.built import IGNORED, Built
from drumline.train.models.tokenizers import ByteTokenizer
from matrices import long
from refused import refused
from some import some

END = 256
HOWS = keys()["lengths"]["how"].rule.choices
MODEL = ModelSettings(num_layers=1, hidden=8, num_heads=1)
NOTHING_HELD = EvaluationSettings(every=0)


def log_normal(seed: int, count: int = 3000) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(math.log(128), 0.8, count)
    return [int(value) for value in np.clip(drawn, 1, 1024)]


def documents(folder: Path, lengths: list[int]) -> str:
    """Write documents of whose letters every one is of the document's own."""
    path = folder / "text.txt"
    path.write_text("\n".join(chr(ord("a") + at % 26) * length for at, length in enumerate(lengths)))
    return str(path)


def settings(how: str, files: tuple[str, ...], **changes: Any) -> TrainSettings:
    batch = changes.pop("batch", BatchSettings(sequences=12, microbatch=2, sequence=16))
    data = DataSettings(files=files, separator="\n", **changes.pop("data", {}))
    return TrainSettings(
        model=MODEL, batch=batch, data=data, lengths=LengthSettings(how=how), evaluation=NOTHING_HELD, **changes
    )


@pytest.fixture(scope="module")
def built() -> Built:
    return build_model(TrainSettings(model=MODEL, batch=BatchSettings(sequence=1024)), device="meta")


def parts(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def plain(batch: Batch) -> list[Any]:
    """Return all of a batch as numbers."""
    values = [*batch.inputs.values(), batch.target]
    numbers = [part.tolist() for value in values for part in parts(value)]
    return [*numbers, batch.num_tokens, batch.num_padded, batch.bucket]


def counted(batches: list[Batch]) -> Counter[tuple[int, ...]]:
    """Return how often every run of inputs comes, up to its end: a piece of a document, or a block."""
    found: Counter[tuple[int, ...]] = Counter()
    for batch in batches:
        ids = parts(batch.inputs.get("document_ids", [torch.zeros_like(part) for part in parts(batch.target)]))
        for tokens, target, document in zip(parts(batch.inputs["tokens"]), parts(batch.target), ids, strict=True):
            for row, wanted, numbers in zip(tokens.tolist(), target.tolist(), document.tolist(), strict=True):
                for number in set(numbers):
                    run = [pair[:2] for pair in zip(row, wanted, numbers, strict=True) if pair[2] == number]
                    run = [pair for pair in run if pair[1] != IGNORED]
                    assert all(after[0] == before[1] for before, after in pairwise(run))
                    if run:
                        found[(*(pair[0] for pair in run), run[-1][1])] += 1
    return found


def readers() -> list[threading.Thread]:
    """Return the threads that read data ahead."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("drumline-data")]


def first(data: Data, count: int) -> list[Batch]:
    batches = list(islice(iter(data.training), count))
    data.close()
    return batches


@pytest.mark.parametrize("how", HOWS)
def test_ranks_share_an_epoch_without_loss_or_double(how: str, built: Built, tmp_path: Path) -> None:
    lengths = [1 + (7 * at) % 40 for at in range(96)]
    file = documents(tmp_path, lengths)
    wanted = settings(how, (file,))
    data = build_data(wanted, built)
    assert data.num_tokens == sum(lengths) + (95 if how == "blocks" else 0)  # between documents only blocks predict
    stream, batches = iter(data.training), list[Batch]()
    while sum(batch.num_tokens for batch in batches) < 3 * data.num_tokens:
        batches += islice(stream, 8)
    data.close()
    alone = counted(batches)
    ranks = [first(build_data(wanted, built, rank=rank, size=2), len(batches) // 2) for rank in (0, 1)]
    shared = counted([*ranks[0], *ranks[1]])
    # Buckets of twice as many rows fill at other times; all else is dealt from one and the same order.
    if how != "buckets":
        assert alone == shared
    text = [(*map(ord, name), END) for name in Path(file).read_text().split("\n")]
    once = Counter(entry[at : at + 17] for entry in text for at in range(0, len(entry) - 1, 16))
    if how == "blocks":
        whole = [token for entry in text for token in entry]
        once = Counter(tuple(whole[at : at + 17]) for at in range(0, len(whole) - 1, 16))
    epochs = sum(batch.num_tokens for batch in batches) / data.num_tokens
    for found in (alone, shared):
        assert found.keys() == once.keys()
        for run, times in found.items():
            # Buckets carry some of an epoch into the next.
            assert math.floor(epochs) - 1 <= times / once[run] <= math.ceil(epochs) + 1
    for batch in [*batches, *ranks[0]]:
        assert batch.num_tokens == sum(int((part != IGNORED).sum()) for part in parts(batch.target))
        assert batch.num_padded == sum(part.numel() for part in parts(batch.target))


@pytest.mark.parametrize("how", HOWS)
def test_it_goes_on_bit_for_bit_from_every_position(how: str, built: Built, tmp_path: Path) -> None:
    file = documents(tmp_path, [1 + (7 * at) % 40 for at in range(60)])
    wanted = settings(how, (file,), batch=BatchSettings(sequences=6, microbatch=2, sequence=16))
    data = build_data(wanted, built)
    stream, batches, states = iter(data.training), [], []
    for _ in range(26):
        states.append(json.loads(json.dumps(data.training.state_dict())))
        batches.append(plain(next(stream)))
    data.close()
    again = build_data(wanted, built)
    for at, state in some(enumerate(states)):
        again.training.load_state_dict(state)
        assert plain(next(iter(again.training))) == batches[at], at
    assert states[-1]["epoch"] > 0
    again.close()
    other = build_data(settings(how, (documents(tmp_path, [20] * 30),), batch=wanted.batch), built)
    with refused(UsageError, "was saved with num_samples"):
        other.training.load_state_dict(states[3])


@long
def test_the_order_depends_on_seed_and_epoch_and_not_on_who_reads_ahead(built: Built, tmp_path: Path) -> None:
    file = documents(tmp_path, [1 + (7 * at) % 40 for at in range(40)])
    orders = {
        name: [plain(batch) for batch in first(build_data(settings("padded", (file,), data=data), built), 12)]
        for name, data in {"": {}, "workers": {"workers": 1}, "seed": {"seed": 1}, "none": {"shuffle": False}}.items()
    }
    assert orders[""] == orders["workers"]
    assert orders[""] != orders["seed"] != orders["none"]
    assert readers() == []


@pytest.mark.features("capture", "check", "lengths", "precision", "record", "stream")
def test_a_run_that_fails_ends_what_reads_ahead_while_its_error_is_still_held(tmp_path: Path) -> None:
    def fails(told: object) -> None:
        raise KeyError("no more")

    wanted = settings(
        "padded",
        (documents(tmp_path, [20] * 40),),
        mesh=MeshSettings(pipeline=1),
        pipeline=PipelineSettings(transport="in-process", device="cpu"),
        run=RunSettings(steps=3, out=str(tmp_path / "run")),
    )
    with pytest.raises(KeyError) as caught:
        run_training(wanted, tell=fails)
    assert readers() == [], caught


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_log_normal_lengths_are_padded_by_less_than_a_twentieth(seed: int, built: Built, tmp_path: Path) -> None:
    file = documents(tmp_path, log_normal(seed))
    for how in ("packed", "padded", "buckets"):
        wanted = settings(how, (file,), batch=BatchSettings(sequences=32, microbatch=4, sequence=1024))
        stream = build_data(wanted, built).training
        assert isinstance(stream, PlannedStream)
        real, places = 0, []
        for plan, _ in islice(stream.plans(), 100):  # with what an epoch of buckets leaves over
            rows = [[(row, unit.width) for unit in row for row in unit.rows] for row in plan]
            read = [at for group in rows for row, _ in group for at in row]
            real += int(stream.steps.layout.samples.lengths(np.array(read)).sum())
            places += [sum(width for _, width in row) for row in rows]
        assert 0 < 1 - real / sum(places) < 0.05, how
        assert max(places) <= 1024 * (4 if how == "packed" else 1), "a microbatch costs no more than the longest row"


def test_rows_of_a_bucket_have_one_length_and_steps_cost_alike(built: Built, tmp_path: Path) -> None:
    file = documents(tmp_path, log_normal(0))
    wanted = settings("buckets", (file,), batch=BatchSettings(sequences=32, microbatch=4, sequence=1024))
    data = build_data(wanted, built)
    known = {(bucket.length, bucket.num_microbatches): bucket.rows for bucket in data.buckets}
    mean = data.num_tokens / len(log_normal(0))
    whole = 0
    for batch in some(first(data, 100)):
        rows, left = divmod(len(batch.target), batch.num_microbatches)
        assert (left, batch.target.shape) == (0, (rows * batch.num_microbatches, batch.bucket))
        assert batch.num_microbatches in (8, *data.counts)
        assert all(int((part != IGNORED).sum()) for part in batch.target.chunk(batch.num_microbatches))
        if known.get((batch.bucket, batch.num_microbatches)) == rows:
            whole += 1
            assert batch.num_padded == pytest.approx(32 * mean, rel=0.15)
    assert whole > 80
    assert len({bucket.num_microbatches for bucket in data.buckets}) > 5
    fixed = replace(wanted, pipeline=PipelineSettings(capture=True))  # one program, so rows alone differ
    data = build_data(fixed, built)
    assert (data.counts, {bucket.num_microbatches for bucket in data.buckets}) == ((), {8})
    assert {bucket.rows for bucket in data.buckets} > {1, 2, 4, 8}
    data.close()


@pytest.mark.features("capture", "check", "lengths", "precision", "record", "saving", "stream")
def test_every_bucket_runs_by_its_own_program_with_gradients_of_one_process(tmp_path: Path) -> None:
    """Losses, norms, what the folder says, and the forecast, which knows the fullest bucket."""
    lengths = [2 + (11 * at) % 60 for at in range(160)]
    wanted = TrainSettings(
        model=ModelSettings(num_layers=2, hidden=16, num_heads=2),
        data=DataSettings(files=(documents(tmp_path, lengths),), separator="\n", validation=0.1),
        batch=BatchSettings(sequences=12, microbatch=2, sequence=64, accumulate=2),
        lengths=LengthSettings(how="buckets", buckets=(8, 16, 24, 32, 48, 64)),
        mesh=MeshSettings(pipeline=2),
        pipeline=PipelineSettings(transport="in-process", device="cpu"),
        learning_rate=LearningRateSettings(shape="constant", warmup_steps=0),
        evaluation=EvaluationSettings(every=6, batches=3),
        run=RunSettings(steps=6, out=str(tmp_path / "run")),
    )
    found = run_training(wanted, tell=lambda told: None)
    model, data = build_model(wanted), build_data(wanted, build_model(wanted, device="meta"))
    optimizer, stream = torch.optim.AdamW(model.model.parameters(), lr=wanted.optimizer.lr), iter(data.training)
    losses, norms, counts = [], [], []
    for _ in range(wanted.run.steps):
        batches = [next(stream), next(stream)]
        counts += [batch.num_microbatches for batch in batches]
        real = sum(batch.num_tokens for batch in batches)
        loss = sum((_sum(model, batch) for batch in batches), torch.zeros(())) / real
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.model.parameters(), 1.0)))
        optimizer.step()
    data.close()
    assert len(set(counts)) > 2
    assert found.losses == pytest.approx(losses, rel=1e-5)
    assert found.grad_norms == pytest.approx(norms, rel=1e-4)
    held = sum(_sum(model, batch).item() for batch in data.validation) / sum(b.num_tokens for b in data.validation)
    assert found.evaluations[-1].loss == pytest.approx(held, rel=1e-5)
    run = read_run(tmp_path / "run")
    assert [run.program_of(step).num_microbatches for step in run.steps] == counts
    told = json.loads((tmp_path / "run" / "buckets.json").read_text())
    assert [report["length"] for report in told] == [8, 16, 24, 32, 48, 64]
    assert {metric["bucket"] for metric in run.metrics() if "bucket" in metric} <= {8, 16, 24, 32, 48, 64}
    dry = dry_run(wanted)
    assert [item["num_microbatches"] for item in dry.summary()["buckets"]] == [
        report["num_microbatches"] for report in told
    ]
    assert not dry.violations
    assert set(counts) <= {program.num_microbatches for program in dry.programs}
    for rank, size in some(enumerate(found.peak_bytes)):
        forecast = dry.forecast.ranks[rank]
        waiting = forecast.total - forecast.received - forecast.working  # what is weighed on a host
        assert size == pytest.approx(waiting, rel=0.1), rank


def _sum(built: Built, batch: Batch) -> torch.Tensor:
    logits = built.model(batch.inputs["tokens"])
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.target.flatten(), ignore_index=IGNORED, reduction="sum"
    )


@pytest.mark.parametrize("how", HOWS)
def test_held_out_batches_are_apart_and_the_same_every_time(how: str, built: Built, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("\n".join(f"{at:04d}" for at in range(400)))
    wanted = TrainSettings(
        model=MODEL,
        batch=BatchSettings(sequences=16, microbatch=2, sequence=16),
        data=DataSettings(files=(str(file),), separator="\n", validation=0.1),
        lengths=LengthSettings(how=how),
        evaluation=EvaluationSettings(batches=2),
    )
    data = build_data(wanted, built)
    assert [plain(batch) for batch in data.validation] == [plain(item) for item in build_data(wanted, built).validation]
    held = {"".join(map(chr, run)).strip(chr(END)) for run in counted(list(data.validation))}
    trained = {"".join(map(chr, run)).strip(chr(END)) for run in counted(first(data, 40))}
    assert held
    if how != "blocks":
        assert not held & trained
        assert held <= {f"{at:04d}" for at in range(9, 400, 10)}
        assert len(trained) == 360


def test_packed_rows_keep_documents_apart_in_the_model(tmp_path: Path) -> None:
    wanted = settings("packed", (documents(tmp_path, [3, 9, 4, 7, 5, 2] * 10),))
    built = build_model(wanted)
    batch = first(build_data(wanted, built), 1)[0]
    logits = built.model(**batch.inputs)
    row = batch.inputs["document_ids"][0].tolist()
    start, stop = row.index(1), len(row) - row[::-1].index(1)
    alone = built.model(batch.inputs["tokens"][:1, start:stop])
    assert torch.allclose(logits[0, start:stop], alone[0], atol=1e-6)
    model_without = Built(torch.nn.Linear(1, 1), built.loss_fn, ByteTokenizer())
    with refused(DrumlineError, "does not learn where documents begin"):
        build_data(wanted, model_without)
