"""The data of a training run: the stream that it trains on, and the batches held out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from drumline.core.errors import DrumlineError, UsageError, counted
from drumline.engine.program.programs import check_fits
from drumline.schedules.registry import made_by
from drumline.train.config.placed import concerning
from drumline.train.config.relations import buckets_rise, check_made, program_of
from drumline.train.config.settings import DataSettings, TrainSettings
from drumline.train.data.buckets import Buckets, layout_of
from drumline.train.data.fill import Fill, TokenFiller
from drumline.train.data.items.batch import Batch, Data
from drumline.train.data.items.documents import Documents
from drumline.train.data.items.fingerprint import Part
from drumline.train.data.items.unready import Unready
from drumline.train.data.layouts import RowLayout, StepShape, Unit
from drumline.train.data.own.user_data import data_by_function
from drumline.train.data.points import Points
from drumline.train.data.read.instructions import instruction_documents
from drumline.train.data.read.text import text_documents
from drumline.train.data.read.tokens import token_documents
from drumline.train.data.samples import Blocks, Pieces, Samples
from drumline.train.data.stream import PlannedStream, Position, Steps
from drumline.train.models.built import Built

_PARTS = 8  # of the number of microbatches: those of buckets are multiples of it divided by this, up to twice as many
_DRAWN = 4096  # points, where no file is named
_SEED_OF_HELD_OUT = 0  # the same batches in every run


@dataclass(frozen=True, slots=True)
class _Place:
    """Which share of the data this is, and in what shape it is laid out."""

    shape: StepShape
    rank: int
    seed: int


def build_data(
    settings: TrainSettings, built: Built, *, rank: int = 0, size: int = 1, documents: Documents | None = None
) -> Data:
    """Return the data of one data-parallel rank: number `rank` of `size`; `documents` take the place of the files.

    >>> from drumline.train.config.settings import BatchSettings
    >>> from drumline.train.models.build import build_model
    >>> settings = TrainSettings(batch=BatchSettings(sequences=8, microbatch=2, sequence=64))
    >>> data = build_data(settings, build_model(settings, device="meta"))
    >>> first = next(iter(data.training))
    >>> first.inputs["tokens"].shape, first.num_tokens, first.num_padded
    (torch.Size([8, 64]), 512, 512)
    >>> data.close()
    """
    data = settings.data
    check_made(settings, ("data", "lengths", "batch"), (buckets_rise,))
    if not 0 <= rank < size:
        raise UsageError(f"rank is {rank} of {size}", expected=f"0 to {size - 1}")
    if data.kind == "function":
        return data_by_function(settings, built, rank=rank, size=size)
    if settings.num_microbatches < 1:
        raise UsageError(
            f"batch.sequences is {settings.batch.sequences}",
            expected="at least batch.microbatch x batch.accumulate x mesh.data",
        )
    shape = StepShape(settings.batch.microbatch, settings.num_microbatches, size, _counts_of(settings))
    place = _Place(shape, rank, settings.run.seed if data.seed is None else data.seed)
    if data.kind == "points" or (settings.model.kind == "mlp" and not data.files):
        return _points(settings, built, place)
    return _tokens(settings, built, place, documents)


def _counts_of(settings: TrainSettings) -> tuple[int, ...]:
    """Return the numbers of microbatches for which the schedule has a program with the same stages in the same places.

    >>> from drumline.train.config.settings import LengthSettings
    >>> _counts_of(TrainSettings(lengths=LengthSettings("buckets")))
    (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
    """
    own_number, pipeline = settings.num_microbatches, settings.pipeline
    # A captured step is one program, and a file holds one.
    if settings.lengths.how != "buckets" or pipeline.plan or pipeline.capture or pipeline.schedule.endswith(".csv"):
        return ()
    program = program_of(settings)
    counts = {own_number}
    for count in {max(round(own_number * part / _PARTS), 1) for part in range(1, 2 * _PARTS + 1)}:
        other = made_by(pipeline.schedule, program, count)
        try:
            if other is not None:
                check_fits(other, program, other.name)
                counts.add(count)
        except DrumlineError:
            continue
    return tuple(sorted(counts))


def _tokens(settings: TrainSettings, built: Built, place: _Place, instead: Documents | None) -> Data:
    how, sequence = settings.lengths.how, settings.batch.sequence
    documents, held_documents = _documents(settings, built) if instead is None else instead.split(0.0)
    width = max(settings.lengths.buckets) if how == "buckets" and settings.lengths.buckets else sequence
    kind: type[Samples] = Blocks if how == "blocks" else Pieces
    samples = kind(documents, width)
    layout = layout_of(how, samples, place.shape, width, settings.lengths.buckets)
    _check_size(layout)
    vocabulary = vocabulary_of(settings, built)
    fill = TokenFiller(samples, built, how, vocabulary).batch
    validation: tuple[Batch, ...] = ()
    if settings.evaluation.every and len(held_documents):
        kept_samples = kind(held_documents, width)
        validation = _held_out(
            settings, layout.beside(kept_samples), TokenFiller(kept_samples, built, how, vocabulary).batch, place
        )
    stream = _stream(settings.data, layout, fill, place, samples.contents)
    buckets = layout.buckets if isinstance(layout, Buckets) else ()
    most = max((bucket.num_microbatches for bucket in buckets), default=0)
    others = tuple(count for count in place.shape.counts if count <= most and count != settings.num_microbatches)
    return Data(stream, validation, samples.num_targets, buckets, others)


def _documents(settings: TrainSettings, built: Built) -> tuple[Documents, Documents]:
    """Return the documents to train on, and those held out."""
    data = settings.data

    def read(names: tuple[str, ...], key: str) -> Documents:
        with concerning(key):
            return read_as(names, key)

    def read_as(names: tuple[str, ...], key: str) -> Documents:
        if data.kind == "tokens":
            end = data.end if built.tokenizer is None or data.end is not None else built.tokenizer.end
            return token_documents(names, data.token_type, end, vocabulary_of(settings, built), key=key)
        if built.tokenizer is None:
            fix = 'name one in data.tokenizer: "bytes", or a folder'
            raise Unready(f"data.kind is {data.kind!r}, and there is no tokenizer", fix=fix)
        if data.kind == "instructions":
            how: dict[str, Any] = {"template": data.chat_template, "strict": settings.adapter.is_on}
            with concerning("data.chat_template") if data.chat_template else nullcontext():
                return instruction_documents(names, built.tokenizer, key=key, **how)
        return text_documents(names, data.separator, built.tokenizer, key=key)

    documents = read(data.files, "data.files")
    if data.validation_files:
        return documents, read(data.validation_files, "data.validation_files")
    return documents.split(data.validation if settings.evaluation.every else 0.0)


def _points(settings: TrainSettings, built: Built, place: _Place) -> Data:
    model, data, rows = settings.model, settings.data, place.shape.all_rows
    sizes: dict[str, Any] = {"inputs": model.inputs, "classes": model.outputs}
    wanted = settings.evaluation.batches if settings.evaluation.every else 0
    if not data.files:
        drawn = max(_DRAWN, 4 * rows)
        points = Points.drawn(drawn + wanted * rows, seed=place.seed, **sizes)
        training, held_points = points.split(wanted * rows / points.num)
    elif data.validation_files:
        training = Points.of_files(data.files, **sizes)
        held_points = Points.of_files(data.validation_files, key="data.validation_files", **sizes)
    else:
        training, held_points = Points.of_files(data.files, **sizes).split(data.validation if wanted else 0.0)
    layout = RowLayout(training, place.shape, 1)
    _check_size(layout)
    kept_layout = RowLayout(held_points, place.shape, 1)
    validation = (
        _held_out(settings, kept_layout, partial(held_points.batch, built.inputs), place)
        if wanted and held_points.num
        else ()
    )
    stream = _stream(data, layout, partial(training.batch, built.inputs), place, training.contents)
    return Data(stream, validation, num_tokens=training.num)


def _stream(
    data: DataSettings, layout: RowLayout, fill: Fill, place: _Place, contents: Sequence[Part]
) -> PlannedStream:
    steps = Steps(layout, seed=place.seed, shuffle=data.shuffle)
    how: dict[str, Any] = {"contents": contents, "fingerprint": data.fingerprint}
    return PlannedStream(steps, fill, rank=place.rank, workers=data.workers, **how)


def _held_out(settings: TrainSettings, layout: RowLayout, fill: Fill, place: _Place) -> tuple[Batch, ...]:
    """Return whole steps of what is held out; where there is not one, a step that is filled up with empty rows."""
    steps, at = Steps(layout, seed=_SEED_OF_HELD_OUT), Position()
    shorts: list[list[Unit]] = []
    while layout.samples.num and len(shorts) < settings.evaluation.batches:
        units, at = steps.step(at)
        if at.epoch:
            break
        shorts.append(units)
    short = layout.short_step() if not shorts else None
    if short is not None:
        shorts.append(short)
    if not shorts:
        least = place.shape.num_microbatches * place.shape.size
        raise Unready(
            f"only {counted(layout.count_rows(), 'row')} can be held out, for {counted(least, 'microbatch')}",
            expected="at least a row for each",
            fix="raise data.validation, name data.validation_files, or set evaluation.every = 0",
        )
    return tuple(fill(layout.share(units, place.rank)) for units in shorts)


def _check_size(layout: RowLayout) -> None:
    rows = layout.count_rows()
    if rows < layout.shape.all_rows:
        raise Unready(
            f"the data have {counted(rows, 'row')}, and a step takes {layout.shape.all_rows}",
            expected="at least enough for one step",
            fix="give more data, or lower batch.sequences (--batch) or batch.sequence (--sequence)",
        )


def vocabulary_of(settings: TrainSettings, built: Built) -> int | None:
    """Return how many tokens the model knows; None where it does not say."""
    for holder, name in (
        (getattr(built.model, "sizes", None), "vocabulary"),
        (getattr(built.model, "config", None), "vocab_size"),
    ):
        if isinstance(vocabulary := getattr(holder, name, None), int):
            return vocabulary
    return settings.model.vocabulary
