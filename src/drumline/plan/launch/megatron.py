"""A plan for Megatron-LM: the arguments of its pretraining scripts, as far as they can express it."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.plan.cluster.layout import Layout, recomputed_ops, whole_layers
from drumline.plan.cluster.transformer import Transformer
from drumline.schedules import find

RELEASE = "core_r0.13"  # whose arguments these are
MANY = 8  # CUDA's own number of connections; Megatron-LM's FSDP refuses 1, which all else wants
_SHARDED = {2: "optim_grads", 3: "optim_grads_params"}


def megatron(transformer: Transformer, layout: Layout) -> tuple[str, tuple[str, ...]]:
    """Return the arguments, one per line, and a sentence for everything they cannot express."""
    missing = list(_unsaid(transformer))
    lines = [
        *_sizes(transformer),
        *_attention(transformer),
        *_positions(transformer),
        *_experts(transformer),
        *_batch_and_degrees(transformer, layout),
        *_stages(layout, missing),
    ]
    lines += [*_sharding(layout, missing), *_memory(layout, missing), *_hidden(transformer, layout, missing)]
    # Flash attention wants keys as wide as values.
    lines += [f"--attention-backend {'flash' if transformer.latent is None else 'fused'}", "--bf16"]
    if layout.practice.fp8:
        lines += ["--fp8-format hybrid", "--fp8-recipe tensorwise"]
    missing.append(f"the vocabulary of {transformer.vocabulary}: it comes from the tokenizer you choose")
    missing.append("the length of the run and the learning rate: add --train-iters and --lr")
    missing.append("the data: add --data-path and arguments for the tokenizer, or --mock-data to try the plan")
    written = f"# Written by `drumline plan` for the arguments of Megatron-LM {RELEASE}. Not expressed:"
    head = [written, *(f"# - {name}" for name in missing)]
    return "\n".join([*head, *lines]), tuple(missing)


def _unsaid(transformer: Transformer) -> Iterator[str]:
    """Yield what has no argument."""
    if transformer.details.alibi:
        yield "ALiBi positions: Megatron-LM does not support them, and no others are written"
    for other in transformer.details.others:
        yield f"{other}: add the arguments for it yourself, if there are any"


def _sizes(transformer: Transformer) -> Iterator[str]:
    yield f"--num-layers {transformer.num_layers}"
    yield f"--hidden-size {transformer.hidden}"
    yield f"--ffn-hidden-size {transformer.feedforward}"
    yield f"--num-attention-heads {transformer.num_heads}"
    if transformer.gated:
        yield "--swiglu"
    if not transformer.tied:
        yield "--untie-embeddings-and-output-weights"
    if not transformer.biased:
        yield "--disable-bias-linear"
        yield "--normalization RMSNorm"
    if not transformer.dropout:
        yield "--attention-dropout 0"
        yield "--hidden-dropout 0"


def _attention(transformer: Transformer) -> Iterator[str]:
    latent = transformer.latent
    if latent is not None:
        yield "--multi-latent-attention"
        if latent.queries:
            yield f"--q-lora-rank {latent.queries}"
        yield f"--kv-lora-rank {latent.keys_values}"
        yield f"--qk-head-dim {latent.head}"
        yield f"--qk-pos-emb-head-dim {latent.rotary_head}"
        yield f"--v-head-dim {latent.value_head}"
    else:
        if transformer.head_width * transformer.num_heads != transformer.hidden:
            yield f"--kv-channels {transformer.head_width}"
        if transformer.num_key_value_heads != transformer.num_heads:
            yield "--group-query-attention"
            yield f"--num-query-groups {transformer.num_key_value_heads}"
    if transformer.details.qk_norm or latent is not None:
        yield "--qk-layernorm"
    if transformer.details.qkv_bias:
        yield "--add-qkv-bias"


def _positions(transformer: Transformer) -> Iterator[str]:
    if transformer.details.alibi:
        yield "--position-embedding-type none"
    elif not transformer.learned_positions:
        yield "--position-embedding-type rope"
        if transformer.latent is not None:
            yield "--rope-type rope"  # its default there is yarn, which scales positions
        if transformer.details.rotary_base:
            yield f"--rotary-base {transformer.details.rotary_base:.0f}"


def _experts(transformer: Transformer) -> Iterator[str]:
    experts = transformer.experts
    if experts is None:
        return
    yield f"--num-experts {experts.num_experts}"
    yield f"--moe-router-topk {experts.per_token}"
    yield f"--moe-ffn-hidden-size {experts.feedforward}"
    if experts.num_shared:
        yield f"--moe-shared-expert-intermediate-size {experts.num_shared * experts.feedforward}"
    if transformer.num_dense_layers:
        sparse = transformer.num_layers - transformer.num_dense_layers
        yield f"--moe-layer-freq ([0]*{transformer.num_dense_layers}+[1]*{sparse})"
    yield "--moe-token-dispatcher-type alltoall"
    yield "--moe-grouped-gemm"


def _batch_and_degrees(transformer: Transformer, layout: Layout) -> Iterator[str]:
    yield f"--seq-length {transformer.sequence}"
    yield f"--max-position-embeddings {transformer.sequence}"
    yield f"--micro-batch-size {layout.microbatch}"
    yield f"--global-batch-size {layout.batch}"
    yield f"--tensor-model-parallel-size {layout.tensor}"
    yield f"--pipeline-model-parallel-size {layout.pipeline}"
    yield f"--context-parallel-size {layout.context}"
    if transformer.experts is not None:
        yield f"--expert-model-parallel-size {layout.expert}"
        yield f"--expert-tensor-parallel-size {layout.tensor}"
    if layout.sequence_parallel:
        yield "--sequence-parallel"


def _stages(layout: Layout, missing: list[str]) -> Iterator[str]:
    """Yield the placement of layers, and report schedules that Megatron-LM does not have."""
    if layout.pipeline == 1:
        return
    schedule = find(layout.schedule)
    looped = schedule.in_megatron and schedule.placement == "loop"
    if not schedule.in_megatron:
        missing.append(f"the schedule {layout.schedule}: Megatron-LM runs 1f1b instead, with a larger bubble")
    if looped or layout.stages_per_rank == 1:
        if len(set(layout.counts)) > 1:
            yield f"--pipeline-model-parallel-layout {pipeline_layout(layout.counts)}"
        elif looped:
            yield f"--num-virtual-stages-per-pipeline-rank {layout.stages_per_rank}"
        return
    # In a V, rank r has stages r and 2P - 1 - r; without the V, each rank keeps the same number of layers in one piece.
    together = [layout.counts[at] + layout.counts[-1 - at] for at in range(layout.pipeline)]
    missing.append("the V placement: every rank has the same number of layers, but in one piece")
    if len(set(together)) > 1:
        yield f"--pipeline-model-parallel-layout {pipeline_layout(together)}"


def pipeline_layout(counts: list[int] | tuple[int, ...]) -> str:
    """Return the stages in Megatron-LM's notation: E is the embedding, t a layer, L the loss.

    >>> pipeline_layout((7, 8, 8, 7)), pipeline_layout((0, 1, 0))
    ('Et*7|t*8|t*8|t*7L', 'E|t*1|L')
    """
    return "E" + "|".join(f"t*{count}" if count else "" for count in counts) + "L"


def _hidden(transformer: Transformer, layout: Layout, missing: list[str]) -> Iterator[str]:
    """Yield how messages hide, and report those that may not."""
    practice = layout.practice
    if layout.context > 1:
        yield f"--cp-comm-type {'p2p' if practice.overlap_context else 'all_gather'}"
    if practice.overlap_forward and layout.sequence_parallel:
        yield "--tp-comm-overlap"
    if practice.overlap_experts and layout.expert > 1:
        missing.append(
            "messages of experts that hide: add --overlap-moe-expert-parallel-comm, if your release has it for the plan"
        )
    if shards_by_fsdp(layout) and layout.tensor > 1:
        missing.append(
            "hidden tensor-parallel messages: they want CUDA_DEVICE_MAX_CONNECTIONS=1, which FSDP refuses, "
            "so they may show"
        )
    if transformer.experts is not None and layout.tensor > 1 and not layout.sequence_parallel:
        missing.append("no sequence parallelism: Megatron-LM refuses experts with tensor parallelism without it")


def shards_by_fsdp(layout: Layout) -> bool:
    """Whether Megatron-LM's own FSDP shards a layout: ZeRO 2 or 3, which it has only without a pipeline.

    >>> shards_by_fsdp(Layout(batch=8, data=8, zero=3)), shards_by_fsdp(Layout(batch=8, data=8, zero=1))
    (True, False)
    """
    return layout.zero > 1 and layout.pipeline == 1


def _sharding(layout: Layout, missing: list[str]) -> Iterator[str]:
    if layout.zero == 0:
        yield "--overlap-grad-reduce"
        return
    yield "--use-distributed-optimizer"
    yield "--overlap-grad-reduce"
    yield "--overlap-param-gather"
    if shards_by_fsdp(layout):
        yield "--use-megatron-fsdp"
        yield "--no-gradient-accumulation-fusion"
        yield "--ckpt-format fsdp_dtensor"
        yield f"--data-parallel-sharding-strategy {_SHARDED[layout.zero]}"
    elif layout.zero > 1:
        missing.append(f"ZeRO {layout.zero} within a pipeline: the distributed optimizer is ZeRO 1, which holds more")


_MODULES = {"norms": "layernorm", "attention": "core_attn", "experts": "moe", "projections": "mla_up_proj"}


def _memory(layout: Layout, missing: list[str]) -> Iterator[str]:
    if layout.recompute == "full":
        yield "--recompute-granularity full"
        yield "--recompute-method uniform"
        yield "--recompute-num-layers 1"
    elif layout.recompute.startswith("full:"):
        yield "--recompute-granularity full"
        yield "--recompute-method block"
        yield f"--recompute-num-layers {whole_layers(layout.recompute, max(layout.counts))}"
    elif ops := recomputed_ops(layout):
        if "activation" in ops:
            missing.append("recomputing the activation function: Megatron-LM keeps its output, and holds more")
        if modules := [_MODULES[op] for op in ops if op in _MODULES]:
            yield "--recompute-granularity selective"
            yield f"--recompute-modules {' '.join(modules)}"
