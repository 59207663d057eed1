"""LoRA adapters of a transformer: how many parameters they have, and the transformer with its base frozen under them.

Projections have the names that PEFT's `target_modules` has for Llama, Mixtral and DeepSeek:

    attention      q_proj k_proj v_proj o_proj; latent: q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj
    feed-forward   gate_proj up_proj down_proj, of every expert too
    router         gate

"all-linear" means all but the router, which PEFT leaves alone where it is no linear layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from drumline.core.errors import PlanError, counted, nearest
from drumline.plan.cluster.frozen_base import FrozenBase
from drumline.plan.cluster.transformer import Transformer

ALL_LINEAR = "all-linear"
_ROUTER = "gate"


class Projection(NamedTuple):
    """A linear layer of a transformer: its name, widths, and how many there are in all layers."""

    name: str
    inputs: int
    outputs: int
    times: int


def projections(transformer: Transformer) -> Iterator[Projection]:
    """Yield every linear layer between the embedding and the head.

    >>> gpt = Transformer("tiny", 2, hidden=64, num_heads=4, vocabulary=10, sequence=8)
    >>> [(projection.name, projection.outputs) for projection in projections(gpt)]
    [('q_proj', 64), ('k_proj', 64), ('v_proj', 64), ('o_proj', 64), ('up_proj', 256), ('down_proj', 64)]
    """
    hidden, heads, times = transformer.hidden, transformer.num_heads, transformer.num_layers
    if (latent := transformer.latent) is None:
        shared = transformer.num_key_value_heads
        yield Projection("q_proj", hidden, heads * transformer.head_width, times)
        yield Projection("k_proj", hidden, shared * transformer.head_width, times)
        yield Projection("v_proj", hidden, shared * transformer.value_width, times)
    else:
        names = ["q_a_proj"] * bool(latent.queries) + ["kv_a_proj_with_mqa"]
        for name, (inputs, outputs) in zip(names, latent.down(hidden), strict=True):
            yield Projection(name, inputs, outputs, times)
        ups = ["q_b_proj" if latent.queries else "q_proj", "kv_b_proj"]
        for name, (inputs, each) in zip(ups, latent.up(hidden), strict=True):
            yield Projection(name, inputs, heads * each, times)
    yield Projection("o_proj", heads * transformer.value_width, hidden, times)
    blocks = [(transformer.feedforward, transformer.num_dense_layers)]
    if (experts := transformer.experts) is not None:
        num_layers = transformer.num_layers - transformer.num_dense_layers
        blocks.append((experts.feedforward, num_layers * (experts.num_experts + experts.num_shared)))
        yield Projection(_ROUTER, hidden, experts.num_experts, num_layers)
    for width, count in blocks:
        if count:
            for name in ("gate_proj", "up_proj") if transformer.gated else ("up_proj",):
                yield Projection(name, hidden, width, count)
            yield Projection("down_proj", width, hidden, count)


def lora_parameters(transformer: Transformer, rank: int, targets: str | Sequence[str] = ALL_LINEAR) -> int:
    """Return the parameters of LoRA adapters of this rank: `rank` for every input and output of a target.

    >>> from drumline.plan.cluster.models import model
    >>> lora_parameters(model("llama-3-8b"), 16), lora_parameters(model("llama-3-8b"), 8, ["q_proj", "v_proj"])
    (41943040, 3407872)
    """
    if rank < 1:
        raise PlanError(f"the rank of an adapter is {rank}", expected="1 or more")
    every = list(projections(transformer))
    names = [projection.name for projection in every]
    wanted = [name for name in names if name != _ROUTER] if targets == ALL_LINEAR else targets
    wanted = [wanted] if isinstance(wanted, str) else wanted
    for name in wanted:
        if name not in names:
            raise PlanError(
                f"{transformer.name} has no linear layers named {name[:60]!r}",
                expected=f"{ALL_LINEAR}, or some of {', '.join(dict.fromkeys(names))}",
                fix=nearest(name[:60], [ALL_LINEAR, *names]),
            )
    return rank * sum(item.times * (item.inputs + item.outputs) for item in every if item.name in wanted)


def with_adapters(
    transformer: Transformer, rank: int, *, targets: str | Sequence[str] = ALL_LINEAR, base: str = "bf16"
) -> Transformer:
    """Return the transformer with nothing but LoRA adapters of this rank to train, and its base kept as `base`.

    >>> from drumline.plan.cluster.models import model
    >>> with_adapters(model("llama-3-8b"), 16, base="nf4").frozen_base
    FrozenBase(trainable_share=0.006009615384615385, kind='nf4')
    """
    weights = sum(item.times * item.inputs * item.outputs for item in projections(transformer))
    parameters = lora_parameters(transformer, rank, targets)
    if parameters > weights:
        raise PlanError(
            f"adapters of rank {rank} have {counted(parameters, 'parameter')}",
            expected=f"fewer than the {weights} weights of the base",
            fix="use a smaller rank",
        )
    named = () if targets == ALL_LINEAR else (targets,) if isinstance(targets, str) else tuple(targets)
    return replace(transformer, frozen_base=FrozenBase(parameters / weights, base, rank, named))
