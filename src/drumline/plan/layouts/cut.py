"""How many layers each stage takes when the embedding and the head weigh something too.

    126 layers on 16 stages, a head worth two thirds of a layer:   7 8 8 8 8 8 8 8 8 8 8 8 8 8 8 7

Layers are equal, so they are dealt one by one (`dealt`). Ties go to the middle: the first stage holds the embedding,
the last one the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from drumline.core.errors import PlanError, counted
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.cut.exact import dealt
from drumline.schedules import find

# A look-up costs no operations, but its weights lie in the first stage: it loses every tie.
_EMBEDDING = 1e-3


@lru_cache(maxsize=4096)
def layer_counts(transformer: Transformer, pipeline: int, schedule: str = "1f1b", per_rank: int = 1) -> tuple[int, ...]:
    """Return the layers of every stage, each at least one; the largest rank is as small as it can be.

    >>> llama = Transformer("405b", 126, 16384, 128, 128256, 8192, 8, 53248, gated=True, tied=False)
    >>> layer_counts(llama, 16)
    (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7)
    >>> layer_counts(llama, 4, "zb-v", 2)
    (16, 16, 16, 16, 16, 16, 15, 15)
    """
    num_stages = pipeline * per_rank
    if not 1 <= num_stages <= transformer.num_layers:
        raise PlanError(
            f"{transformer.name} has {counted(transformer.num_layers, 'layer')} for {counted(num_stages, 'stage')}",
            expected="at least one layer per stage, and at least one stage",
        )
    owners = [rank_of(stage, pipeline, schedule) for stage in range(num_stages)]
    return dealt(transformer.num_layers, owners, stage_weights(transformer, [0] * num_stages))


def rank_of(stage: int, pipeline: int, schedule: str) -> int:
    """Return the rank that holds a stage.

    >>> [rank_of(stage, 4, "zb-v") for stage in range(8)]
    [0, 1, 2, 3, 3, 2, 1, 0]
    """
    known = find(schedule)
    return known.layout(pipeline, max(known.stages_per_rank, stage // pipeline + 1)).homes[stage]


def stage_weights(transformer: Transformer, counts: Sequence[int]) -> list[float]:
    """Return the work of every stage, counted in layers."""
    weights = [float(count) for count in counts]
    weights[0] += _EMBEDDING
    weights[-1] += head_weight(transformer)
    return weights


def head_weight(transformer: Transformer) -> float:
    """Return the operations of the head as a multiple of a layer's.

    >>> round(head_weight(Transformer("405b", 126, 16384, 128, 128256, 8192, 8, 53248, gated=True)), 2)
    0.61
    """
    hidden, shared = transformer.hidden, transformer.num_key_value_heads * transformer.head_width
    attention = 2 * hidden * hidden + 2 * hidden * shared + 2 * transformer.sequence * hidden
    width = transformer.feedforward
    if transformer.experts is not None:
        width = transformer.experts.feedforward * (transformer.experts.per_token + transformer.experts.num_shared)
    return transformer.vocabulary * hidden / (attention + (3 if transformer.gated else 2) * hidden * width)
