"""A training run on this rank: what `drumline train` starts on every one.

    settings ──► model, data, pipeline ──► training.py

Every rank does the same in the same order. It reads the same batches, so it knows all counts of tokens in advance, and
steps, evaluates and samples at the same points.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from drumline.channel.launch.stop import stop_on_signals
from drumline.core.simulate.steps import in_groups
from drumline.pipeline.pipeline import Pipeline
from drumline.train.config.relations import program_of
from drumline.train.config.settings import TrainSettings
from drumline.train.config.write import keep_settings
from drumline.train.data.build import build_data
from drumline.train.data.example import example_of
from drumline.train.data.items.batch import Data
from drumline.train.loop.checkpoints import check_resumed
from drumline.train.loop.making import (
    Calling,
    MakeModel,
    build,
    check,
    gathered,
    pipeline_arguments,
    rows_of,
)
from drumline.train.loop.peak_memory import PeakMemory, resident
from drumline.train.loop.progress import Tell
from drumline.train.loop.training import Training, TrainResult
from drumline.train.tune.build_tuned import build_tuned

MakeData = Callable[..., Data]


@stop_on_signals()
def run_training(
    settings: TrainSettings,
    *,
    tell: Tell | None = None,
    make_model: MakeModel = build_tuned,
    make_data: MakeData = build_data,
    continues: bool = False,
) -> TrainResult:
    """Train by the settings; call it on every rank, under `dl.launch`, torchrun, or in one process for all of them.

    Rank 0 calls `tell` with every update, evaluation and sample; without it they are written to stderr. Reading an
    update waits for the device, so without `tell` only those are read that are shown. SIGTERM or Ctrl-C on any rank
    ends it after a step with a checkpoint. `continues` continues with the run in the folder, from its newest
    checkpoint.
    """
    check(settings)
    train_settings, settings = settings, gathered(settings)
    if settings.run.threads:
        torch.set_num_threads(settings.run.threads)
    before = resident()
    built = build(settings, make_model)
    check_resumed(settings, built.adapter, continues=continues)
    number, count = rows_of(settings)
    folder = Path(settings.folder)
    with closing(make_data(settings, built, rank=number, size=count)) as data:
        example = example_of(data, settings.num_microbatches)
        arguments = pipeline_arguments(settings, built, example, folder, counts=data.counts)
        arguments |= {"continue_record": continues}
        with Pipeline(built.model, **arguments) as pipe:
            if pipe.rank == pipe.axes.number == 0:
                keep_settings(train_settings, folder)
            if train_settings is not settings:
                pipe.take_program(in_groups(program_of(train_settings), train_settings.batch.accumulate))
            call, memory = Calling.of(built, data.counts), PeakMemory(torch.device(pipe.device), before=before)
            del built, arguments  # a rank keeps its own stages alone
            trained = TrainResult(folder, devices=pipe.devices.to_json())
            return Training(settings, pipe, call, data, trained, memory, continues=continues).run(tell)
