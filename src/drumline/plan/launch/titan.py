"""A plan for torchtitan: its job config in TOML, as far as that can express it.

Releases after 0.2 have configs in Python instead (pull request 2386 of pytorch/torchtitan). They take the same names as
command-line flags: `--parallelism.tensor_parallel_degree 8`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drumline.core.lower.torch_text import titan_by_placement
from drumline.plan.cluster.layout import BY_OPERATION, Layout
from drumline.plan.cluster.transformer import Transformer
from drumline.schedules import find


def titan(transformer: Transformer, layout: Layout) -> tuple[dict[str, Any], list[str]]:
    """Return the config's tables, and a sentence for everything they cannot express."""
    missing: list[str] = []
    parallelism: dict[str, Any] = {
        **_sharding(layout, missing),
        "tensor_parallel_degree": layout.tensor,
        "context_parallel_degree": layout.context,
        **_experts_shared(layout, missing),
        "pipeline_parallel_degree": layout.pipeline,
    }
    if layout.context > 1 and layout.practice.overlap_context:
        parallelism["context_parallel_rotate_method"] = "alltoall"
    asynchronous = layout.practice.overlap_forward and layout.tensor > 1
    if asynchronous:
        parallelism["enable_async_tensor_parallel"] = True
    if layout.pipeline > 1:
        parallelism |= _pipeline(layout, missing)
    if layout.tensor > 1 and not layout.sequence_parallel:
        missing.append("no sequence parallelism: torchtitan always uses it with tensor parallelism")
    mode: dict[str, Any] = {"mode": layout.recompute}
    if layout.recompute not in ("none", "full"):
        mode = {"mode": "selective", "selective_ac_option": "op"}
    if layout.recompute not in ("none", BY_OPERATION, "full"):
        missing.append(f"{layout.recomputation}: torchtitan keeps other operations than the plan assumes")
    # Without a pipeline, a forward takes the whole local batch and the rest is accumulated.
    local = layout.batch // layout.data if layout.pipeline > 1 else layout.microbatch
    if transformer.tied and layout.pipeline > 1:
        missing.append("tied embeddings: torchtitan does not tie weights across stages")
    missing.append(f"the model: choose or write the flavor for {transformer.name}: {described(transformer)}")
    tables = {
        **(_float8(transformer) if layout.practice.fp8 else {}),
        "training": {"seq_len": transformer.sequence, "local_batch_size": local, "global_batch_size": layout.batch},
        "parallelism": parallelism,
        "activation_checkpoint": mode,
        "compile": {"enable": True},  # as its preset assumes
    }
    return tables, missing


def _experts_shared(layout: Layout, missing: list[str]) -> dict[str, Any]:
    """Return the degrees of experts: by default torchtitan spreads whole experts over tensor-parallel ranks too."""
    if layout.expert == 1:
        return {"expert_parallel_degree": 1}
    if layout.practice.overlap_experts and not _hides_experts(layout):
        missing.append(
            "messages of experts that hide: torchtitan hides them with DualPipeV only, without recomputation"
        )
    return {"expert_parallel_degree": layout.expert, "expert_tensor_parallel_degree": layout.tensor}


def _hides_experts(layout: Layout) -> bool:
    """Whether messages of experts hide, as planned."""
    pairs = layout.pipeline > 1 and find(layout.schedule).titan == "DualPipeV"
    return layout.practice.overlap_experts and pairs and layout.recompute == "none"


def _float8(transformer: Transformer) -> dict[str, Any]:
    """Return the tables that convert linear layers and experts to FP8, all but the head and the router."""
    tables: dict[str, Any] = {"quantize.linear.float8": {"filter_fqns": ["output", "router.gate"]}}
    if transformer.experts is not None:
        tables["quantize.grouped_mm.float8"] = {"fqns": ["experts"]}
    return {"model": {"converters": list(tables)}, **tables}


def _sharding(layout: Layout, missing: list[str]) -> dict[str, Any]:
    if layout.zero == 0 and layout.tensor == layout.pipeline == layout.context == 1:
        return {"data_parallel_replicate_degree": layout.data, "data_parallel_shard_degree": 1}
    if layout.zero < 2 and layout.data * layout.context > 1:
        missing.append(
            f"ZeRO {layout.zero}: with other axes, torchtitan shards gradients and optimizer state (at least ZeRO 2), "
            "which holds less and sends more"
        )
    policy = "always" if layout.zero == 3 else "never"
    return {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": layout.data,
        "fsdp_reshard_after_forward": policy,
    }


def _pipeline(layout: Layout, missing: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    schedule = find(layout.schedule)
    if schedule.titan:
        settings["pipeline_parallel_schedule"] = schedule.titan
        if schedule.titan == "DualPipeV" and not _hides_experts(layout):
            settings["pipeline_parallel_expert_parallel_overlap"] = False  # by default it does, with nothing recomputed
    else:
        # The name then only determines the placement of stages; the order comes from the file.
        placed = titan_by_placement(schedule.layout(layout.pipeline, layout.stages_per_rank))
        if placed is None:
            missing.append(f"the placement of {layout.schedule}: torchtitan has no schedule with this placement")
        settings["pipeline_parallel_schedule"] = placed or "1F1B"
        settings["pipeline_parallel_schedule_csv"] = f"{layout.schedule}.csv"
        missing.append(
            f"the schedule {layout.schedule} by name: write its file with `drumline show {layout.schedule} --ranks "
            f"{layout.pipeline} --microbatches {layout.num_microbatches} --format torch --out {layout.schedule}.csv`"
        )
    settings["pipeline_parallel_microbatch_size"] = layout.microbatch
    settings["module_fqns_per_model_part"] = parts(layout)
    return settings


def parts(layout: Layout) -> list[list[str]]:
    """Return the module names of every stage, as in torchtitan's decoders.

    >>> parts(Layout(batch=2, pipeline=2, counts=(1, 2)))
    [['tok_embeddings', 'layers.0'], ['layers.1', 'layers.2', 'norm', 'output']]
    """
    stages, first = [], 0
    for count in layout.counts:
        stages.append([f"layers.{layer}" for layer in range(first, first + count)])
        first += count
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    return stages


def described(transformer: Transformer) -> str:
    """Return everything that distinguishes a transformer from others.

    >>> described(Transformer("tiny", 4, 64, 4, vocabulary=1000, sequence=128))
    '4 layers of width 64, 4 heads of 16, feed-forward 256, vocabulary 1000, learned positions, biases, dropout, tied'
    """
    return ", ".join(_phrases(transformer))


def _phrases(transformer: Transformer) -> Iterator[str]:
    yield f"{transformer.num_layers} layers of width {transformer.hidden}"
    details, shared = transformer.details, transformer.num_key_value_heads
    if transformer.latent is not None:
        yield f"{transformer.num_heads} heads with {transformer.latent}"
    else:
        keys = f" on {shared} of keys and values" if shared != transformer.num_heads else ""
        yield f"{transformer.num_heads} heads of {transformer.head_width}{keys}"
    if details.qk_norm:
        yield "norms of queries and keys"
    if details.qkv_bias:
        yield "biases of queries, keys and values"
    yield f"{'gated ' if transformer.gated else ''}feed-forward {transformer.feedforward}"
    yield from _experts(transformer)
    yield f"vocabulary {transformer.vocabulary}"
    yield _positions(transformer)
    if transformer.biased:
        yield "biases"
    if transformer.dropout:
        yield "dropout"
    if details.norm:
        yield f"{details.norm} {details.norm_epsilon:g}" if details.norm_epsilon else details.norm
    elif details.norm_epsilon:
        yield f"norms that add {details.norm_epsilon:g}"
    if details.activation:
        yield f"the activation {details.activation}"
    yield "tied" if transformer.tied else "not tied"
    yield from details.others


def _experts(transformer: Transformer) -> Iterator[str]:
    experts = transformer.experts
    if experts is not None:
        shared = f" and {experts.num_shared} shared" if experts.num_shared else ""
        yield f"{experts.per_token} of {experts.num_experts} experts of {experts.feedforward}{shared}"
        if transformer.num_dense_layers:
            yield f"the first {transformer.num_dense_layers} layers without experts"


def _positions(transformer: Transformer) -> str:
    if transformer.details.alibi:
        return "ALiBi positions"
    if transformer.learned_positions:
        return "learned positions"
    base = transformer.details.rotary_base
    return f"rotary positions of base {base:.0f}" if base else "rotary positions"
