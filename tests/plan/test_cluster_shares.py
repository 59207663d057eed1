"""What is divided on a cluster and what is not: levels of ZeRO, experts, embeddings, dense layers."""

from __future__ import annotations

import pytest

from cluster_models import small_cluster, small_transformer
from drumline.plan.cluster.estimate import estimate
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.practice import Practice
from drumline.plan.cluster.stages import slices_of
from drumline.plan.cluster.transformer import ExpertShape, model_flops
from some import some

PLAIN = Practice(overlap_data=False)


def sizes(zero: int) -> tuple[float, float, float]:
    found = estimate(small_transformer(), small_cluster(4), Layout(batch=8, data=4, zero=zero)).bytes
    return found.weights, found.gradients, found.optimizer


def test_each_level_of_zero_shards_one_thing_more() -> None:
    weights, gradients, optimizer = sizes(0)
    assert sizes(1) == (weights, gradients, optimizer / 4)
    assert sizes(2) == (weights, gradients / 4, optimizer / 4)
    assert sizes(3) == (weights / 4, gradients / 4, optimizer / 4)


def test_sharded_weights_are_gathered_for_the_forward_and_again_for_the_backward() -> None:
    def sent(zero: int, batch: int) -> float:
        layout = Layout(batch=batch, data=4, zero=zero, practice=Practice(gradient_bytes=2))
        return estimate(small_transformer(), small_cluster(4), layout).volumes.data

    # Two bytes of gradient out and two of weight back: with ZeRO 1 once a step, with ZeRO 3 one and two a microbatch.
    assert sent(3, 4) == pytest.approx(1.5 * sent(1, 4))
    assert sent(3, 8) == pytest.approx(3.0 * sent(1, 8))


def test_experts_that_every_token_visits_are_counted() -> None:
    def flops(per_token: int, shared: int) -> float:
        experts = ExpertShape(num_experts=8, per_token=per_token, feedforward=2048, num_shared=shared)
        return model_flops(small_transformer(experts=experts), 1)

    assert flops(2, 1) == flops(3, 0)
    assert flops(2, 1) > flops(2, 0)


def test_a_tied_embedding_is_exchanged_between_the_ends_of_a_pipeline() -> None:
    layout = Layout(batch=8, pipeline=4, practice=PLAIN)
    apart, tied = (
        estimate(small_transformer(tied=flag), small_cluster(4), layout).seconds.data_exposed for flag in (False, True)
    )
    assert tied > apart


def test_only_the_first_layers_are_dense() -> None:
    model = small_transformer(experts=ExpertShape(8, 2, 2048), num_dense_layers=4)
    found = slices_of(model, (3, 3, 3, 3))
    assert [(layers.dense, layers.experts) for layers in some(found)] == [(3, 0), (1, 2), (0, 3), (0, 3)]
