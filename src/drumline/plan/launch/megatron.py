"""A plan for Megatron-LM: the arguments of its pretraining scripts, as far as a release accepts them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from drumline.core.units import size_text
from drumline.plan.cluster.device_memory import peak_bytes
from drumline.plan.cluster.layout import PARTS, Layout, recomputed_ops, whole_layers
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.launch.releases import Release
from drumline.schedules import find

MANY = 8  # CUDA's own number of connections; Megatron-LM's FSDP refuses 1, which all else wants
_SHARDED = {2: "optim_grads", 3: "optim_grads_params"}
_FSDP = ("--use-megatron-fsdp", "--use-custom-fsdp")  # its name changed
_OVERLAPS = "--overlap-moe-expert-parallel-comm"


class Norm(NamedTuple):
    """A kind of norm, and whether that is only a guess."""

    kind: str
    is_guess: bool


def megatron(transformer: Transformer, layout: Layout, release: Release) -> tuple[list[str], list[str]]:
    """Return the arguments, one per line, and a sentence for everything they cannot express."""
    missing = list(_unsaid(transformer))
    lines = [
        *_sizes(transformer),
        *_attention(transformer),
        *_positions(transformer, release),
        *_experts(transformer),
        *_batch_and_degrees(transformer, layout),
        *_stages(layout, missing),
    ]
    lines += [*_sharding(layout, release, missing), *_memory(transformer, layout, release, missing)]
    lines += _hidden(layout, release, missing)
    # Flash attention wants keys as wide as values.
    lines += [f"--attention-backend {'flash' if transformer.latent is None else 'fused'}", "--bf16"]
    if layout.practice.fp8:
        lines += ["--fp8-format hybrid", "--fp8-recipe tensorwise"]
    missing.append(f"the vocabulary of {transformer.vocabulary}: it comes from the tokenizer you choose")
    missing.append("the length of the run and the learning rate: add --train-iters and --lr")
    missing.append("the data: add --data-path and arguments for the tokenizer, or --mock-data to try the plan")
    return lines, missing


def connections(layout: Layout) -> int:
    """Return the number of connections to a device that a layout wants."""
    overlaps = _overlaps_experts(layout) and layout.tensor == layout.context == 1
    return MANY if shards_by_fsdp(layout) or overlaps else 1


def _unsaid(transformer: Transformer) -> Iterator[str]:
    """Yield what has no argument."""
    if transformer.details.alibi:
        yield "ALiBi positions: Megatron-LM does not support them, and no others are written"
    norm = norm_of(transformer)
    if norm.is_guess:
        biases = "with" if transformer.biased else "without"
        yield f"the kind of norm: {norm.kind} is written, which is usual {biases} biases; nothing says so of this model"
    for other in transformer.details.others:
        yield f"{other}: add the arguments for it yourself, if there are any"


def norm_of(transformer: Transformer) -> Norm:
    """Return the kind of norm of a model, by its details or by whether it has biases.

    >>> from drumline.plan.cluster.models import MODELS
    >>> norm_of(MODELS["gpt-1.7b"]), norm_of(Transformer("mine", 1, 64, 4, vocabulary=10, sequence=8))
    (Norm(kind='LayerNorm', is_guess=False), Norm(kind='LayerNorm', is_guess=True))
    """
    if known := transformer.details.norm:
        return Norm(known, is_guess=False)
    return Norm("LayerNorm" if transformer.biased else "RMSNorm", is_guess=True)


def _sizes(transformer: Transformer) -> Iterator[str]:
    yield f"--num-layers {transformer.num_layers}"
    yield f"--hidden-size {transformer.hidden}"
    yield f"--ffn-hidden-size {transformer.feedforward}"
    yield f"--num-attention-heads {transformer.num_heads}"
    if transformer.gated:
        yield "--swiglu"
    if transformer.details.activation == "relu2":
        yield "--squared-relu"
        if transformer.biased:
            yield "--no-bias-gelu-fusion"
    if not transformer.tied:
        yield "--untie-embeddings-and-output-weights"
    if not transformer.biased:
        yield "--disable-bias-linear"
    yield from _norms(transformer)
    if not transformer.dropout:
        yield "--attention-dropout 0"
        yield "--hidden-dropout 0"


def _norms(transformer: Transformer) -> Iterator[str]:
    kind = norm_of(transformer).kind
    if kind == "LayerNorm1P":
        yield "--apply-layernorm-1p"
    elif kind != "LayerNorm":
        yield f"--normalization {kind}"
    if transformer.details.norm_epsilon:
        yield f"--norm-epsilon {transformer.details.norm_epsilon:g}"


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


def _positions(transformer: Transformer, release: Release) -> Iterator[str]:
    """Yield the arguments of positions; with latent attention the default is yarn, fused.

    Plain positions are not fused there. A release that knows only yarn scales positions by 1, which leaves them plain.
    """
    if transformer.details.alibi:
        yield "--position-embedding-type none"
    elif not transformer.learned_positions:
        yield "--position-embedding-type rope"
        if transformer.latent is not None and "--rope-type" in release.flags:
            yield "--rope-type rope"
            yield "--no-rope-fusion"
        if transformer.details.rotary_base:
            yield f"--rotary-base {transformer.details.rotary_base:.0f}"


def _experts(transformer: Transformer) -> Iterator[str]:
    experts = transformer.experts
    if experts is None:
        return
    yield f"--num-experts {experts.num_experts}"
    yield f"--moe-router-topk {experts.per_token}"
    if experts.per_token == 1:
        yield "--moe-router-pre-softmax"  # a softmax over the only one is always 1
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
    """Return the stages in Megatron-LM's notation: E is the embedding, t a layer, L the loss, and a bar ends a stage.

    >>> pipeline_layout((7, 8, 8, 7)), pipeline_layout((0, 1, 0)), pipeline_layout((1, 2, 2, 2, 2, 1))
    ('Et*7|t*8|t*8|t*7L', 'E|t|L', 'Et|(t*2|)*4tL')
    """
    first, *middle, last = ["t" if count == 1 else f"t*{count}" if count else "" for count in counts]
    runs = [(stage, len(list(many))) for stage, many in groupby(middle)]
    between = "".join(f"({stage}|)*{times}" if times > 2 else f"{stage}|" * times for stage, times in runs)
    return f"E{first}|{between}{last}L"


def _hidden(layout: Layout, release: Release, missing: list[str]) -> Iterator[str]:
    """Yield how messages hide, and report those that may not."""
    practice = layout.practice
    if layout.context > 1:
        yield f"--cp-comm-type {'p2p' if practice.overlap_context else 'all_gather'}"
    if practice.overlap_forward and layout.sequence_parallel:
        yield "--tp-comm-overlap"
    if practice.overlap_experts and layout.expert > 1:
        if _OVERLAPS not in release.flags:
            missing.append(f"messages of experts that hide: {release.name} {release.release} has no {_OVERLAPS}")
        elif not _overlaps_experts(layout):
            missing.append(
                f"messages of experts that hide: {release.name} hides them without a pipeline or with several stages "
                "per rank, and without full recomputation"
            )
        else:
            yield _OVERLAPS
    if shards_by_fsdp(layout) and layout.tensor > 1:
        missing.append(
            "hidden tensor-parallel messages: they want CUDA_DEVICE_MAX_CONNECTIONS=1, which FSDP refuses, "
            "so they may show"
        )


def _overlaps_experts(layout: Layout) -> bool:
    """Whether messages of experts hide behind another microbatch."""
    staged = layout.pipeline == 1 or (layout.stages_per_rank > 1 and find(layout.schedule).in_megatron)
    hides = layout.practice.overlap_experts and layout.expert > 1
    return hides and staged and not layout.recompute.startswith("full")


def shards_by_fsdp(layout: Layout) -> bool:
    """Whether Megatron-LM's own FSDP shards a layout: ZeRO 2 or 3, which it has only without a pipeline.

    >>> shards_by_fsdp(Layout(batch=8, data=8, zero=3)), shards_by_fsdp(Layout(batch=8, data=8, zero=1))
    (True, False)
    """
    return layout.zero > 1 and layout.pipeline == 1


def _sharding(layout: Layout, release: Release, missing: list[str]) -> Iterator[str]:
    if layout.zero == 0:
        yield "--overlap-grad-reduce"
        return
    yield "--use-distributed-optimizer"
    yield "--overlap-grad-reduce"
    yield "--overlap-param-gather"
    if shards_by_fsdp(layout):
        yield next(name for name in _FSDP if name in release.flags)
        yield "--no-gradient-accumulation-fusion"
        if "fsdp_dtensor" in release.flags["--ckpt-format"]["choices"]:
            yield "--ckpt-format fsdp_dtensor"
        yield f"--data-parallel-sharding-strategy {_SHARDED[layout.zero]}"
    elif layout.zero > 1:
        missing.append(f"ZeRO {layout.zero} within a pipeline: the distributed optimizer is ZeRO 1, which holds more")


# Its modules, by what we call what they recompute.
_MODULES = {
    "input-norms": "layernorm",
    "expert-norms": "layernorm",
    "expert-activation": "moe_act",
    "attention": "core_attn",
    "experts": "moe",
    "projections": "mla_up_proj",
}


def recomputed_there(transformer: Transformer, layout: Layout, release: Release) -> str:
    """Return the recomputation that a release runs of a layout's.

    Transformer Engine fuses most norms with the product behind them, and keeps what these need. Only the norm before
    latent attention and the one before experts are modules of their own, which are recomputed both or not at all. Of
    activation functions, only those of experts are.

    >>> from drumline.plan.cluster.models import MODELS
    >>> from drumline.plan.launch.releases import release
    >>> norms = Layout(batch=8, recompute="norms")
    >>> [recomputed_there(MODELS[name], norms, release("megatron")) for name in ("gpt-1.7b", "mixtral-8x7b")]
    ['none', 'expert-norms']
    """
    if layout.recompute.startswith("full"):
        return layout.recompute
    asked = {PARTS.get(op, op) for op in recomputed_ops(layout)}
    there = {
        "input-norms": "norms" in asked and transformer.latent is not None,
        "expert-norms": "norms" in asked and transformer.experts is not None,
        "expert-activation": "activation" in asked and transformer.experts is not None,
        **{name: name in asked for name in ("attention", "experts", "projections")},
    }
    excluded = release.not_in_fp8 if layout.practice.fp8 else ()
    return "+".join(name for name, is_there in there.items() if is_there and _MODULES[name] not in excluded) or "none"


def _memory(transformer: Transformer, layout: Layout, release: Release, missing: list[str]) -> Iterator[str]:
    if layout.recompute == "full":
        yield "--recompute-granularity full"
        yield "--recompute-method uniform"
        yield "--recompute-num-layers 1"
    elif layout.recompute.startswith("full:"):
        yield "--recompute-granularity full"
        yield "--recompute-method block"
        yield f"--recompute-num-layers {whole_layers(layout.recompute, max(layout.counts))}"
    else:
        run = replace(layout, recompute=recomputed_there(transformer, layout, release))
        if set(recomputed_ops(run)) != set(recomputed_ops(layout)):
            more = peak_bytes(transformer, run) - peak_bytes(transformer, layout)
            holds = f"holds {size_text(round(abs(more)))} {'more' if more >= 0 else 'less'} per device"
            which = f"{release.name} {release.release} runs {run.recomputation}"
            missing.append(f"{layout.recomputation}: {which}, and {holds}")
        if modules := dict.fromkeys(_MODULES[op] for op in recomputed_ops(run)):
            yield "--recompute-granularity selective"
            yield f"--recompute-modules {' '.join(modules)}"
            if layout.practice.fp8 and not modules.keys().isdisjoint({"layernorm", "moe_act"}):
                missing.append("norms and activation functions that run again in FP8: Transformer Engine 2.6 or newer")
