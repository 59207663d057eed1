"""Cuts of interleaved pipelines: near the best of all, within the memory, and the same on every machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drumline.plan.cluster.device_memory import peak_bytes
from drumline.plan.cluster.hardware import cluster
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.models import model
from drumline.plan.cluster.stages import layer_counts
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.cut.cuts import every_cut
from drumline.plan.layouts.layer_moves import MovedLayers, moves
from drumline.plan.layouts.pins import Pins
from drumline.plan.layouts.survey import Survey, other_cuts
from some import some

INTERLEAVED = "interleaved-1f1b"


def survey_of(transformer: Transformer, pipeline: int, batch: int) -> Survey:
    pins = Pins(tensor=1, pipeline=pipeline, microbatch=1)
    machines = cluster("a100-80", pipeline)
    return Survey(transformer, machines, batch, pins)


def staged(transformer: Transformer, pipeline: int, per_rank: int, batch: int) -> Layout:
    counts = layer_counts(transformer, pipeline, INTERLEAVED, per_rank)
    return Layout(batch, 1, 1, pipeline, stages_per_rank=per_rank, schedule=INTERLEAVED, counts=counts)


# What stages of equal ranks, or equal stages, took longer than the best of all cuts: up to 11%.
@pytest.mark.parametrize(
    ("name", "pipeline", "per_rank", "num_layers", "batch"),
    [
        ("gpt-7.5b", 2, 3, 10, 8),
        ("gpt-7.5b", 2, 4, 11, 8),
        ("gpt-7.5b", 4, 2, 11, 8),
        ("llama-3-8b", 2, 2, 9, 8),
        ("llama-3-8b", 2, 4, 11, 8),
    ],
)
def test_the_cut_is_near_the_best_of_all(name: str, pipeline: int, per_rank: int, num_layers: int, batch: int) -> None:
    transformer = replace(model(name), num_layers=num_layers)
    survey, layout = survey_of(transformer, pipeline, batch), staged(transformer, pipeline, per_rank, batch)
    found = survey.cut(layout, 1e15)
    every = every_cut(num_layers, layout.num_stages)
    timed = MovedLayers(transformer, survey.cluster, layout).seconds(every)
    few = [counts for _, counts in sorted(zip(timed, every, strict=True))[:12]]
    best = min(survey.exact(replace(layout, counts=counts)).seconds for counts in few)
    assert found.seconds <= 1.03 * best
    assert found.seconds <= survey.exact(layout).seconds
    assert (sum(found.layout.counts), min(found.layout.counts)) == (num_layers, 1)


def test_many_cuts_at_once_take_what_each_takes_alone() -> None:
    transformer = replace(model("gpt-7.5b"), num_layers=10)
    survey, layout = survey_of(transformer, 2, 4), staged(transformer, 2, 3, 4)
    timed = MovedLayers(transformer, survey.cluster, layout)
    cuts = [layout.counts, *moves(layout.counts)]
    alone = [survey.exact(replace(layout, counts=counts)).estimate.seconds for counts in cuts]
    tied = alone[0].data_exposed  # the exchange after the pipeline, the same for all
    for took, seconds in some(zip(timed.seconds(cuts), alone, strict=True)):
        assert took + tied == pytest.approx(seconds.total - seconds.optimizer)
    assert timed.actions(layout.counts) == len(moves(layout.counts)) * 2 * 6 * 4


def test_moved_layers_fit_in_the_memory() -> None:
    transformer = replace(model("gpt-7.5b"), num_layers=13)
    survey, layout = survey_of(transformer, 4, 16), staged(transformer, 4, 2, 16)
    roomy = survey.cut(layout, 1e15)
    limit = (roomy.bytes + peak_bytes(transformer, layout)) / 2
    tight = survey.cut(layout, limit)
    unmoved = [survey.exact(replace(layout, counts=cut)) for cut in (layout.counts, *other_cuts(13, 8))]
    assert tight.bytes <= limit < roomy.bytes
    assert roomy.seconds < tight.seconds < min(choice.seconds for choice in unmoved if choice.bytes <= limit)


def test_later_stages_of_a_rank_get_more() -> None:
    gpt = replace(model("gpt-7.5b"), num_layers=11)
    assert layer_counts(gpt, 4, INTERLEAVED, 2) == (1, 1, 1, 1, 2, 2, 2, 1)
    assert all(some(count == 1 for count in layer_counts(gpt, 4, INTERLEAVED, 2)[:4]))
    assert moves((1, 1)) == []
