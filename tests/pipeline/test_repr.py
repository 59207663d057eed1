"""What a pipeline says of itself, and to those who may take turns for speed."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch import nn

import drumline as dl
from drumline.engine.ranks import crew

pytestmark = pytest.mark.torch


def pipeline(**options: Any) -> dl.Pipeline:
    blocks = [nn.Linear(2, 2) for _ in range(4)]
    return dl.Pipeline(blocks, loss_fn=nn.functional.mse_loss, num_microbatches=3, **options)


def test_a_pipeline_shows_what_runs_where() -> None:
    with pipeline(num_ranks=2, schedule="1f1b") as pipe:
        shown = (
            "Pipeline(1f1b: 2 ranks (all in this process, taking turns), 2 stages, 3 microbatches, in-process on cpu)"
        )
        assert repr(pipe) == shown
    with pipeline() as pipe:
        assert repr(pipe) == "Pipeline(1f1b: 1 rank (in this process), 1 stage, 3 microbatches, in-process on cpu)"


def test_turns_are_told_once_and_only_to_those_who_did_not_ask_for_them(caplog: pytest.LogCaptureFixture) -> None:
    crew._tell_of_turns.cache_clear()
    with caplog.at_level(logging.WARNING, logger="drumline"):
        for options in ({"num_ranks": 2, "transport": "in-process"}, {"num_ranks": 1}):
            pipeline(**options).close()
        assert not caplog.records
        for _ in range(2):
            pipeline(num_ranks=2).close()
    assert [record.getMessage().partition(" because")[0] for record in caplog.records] == [
        "2 ranks take turns in this process"
    ]
