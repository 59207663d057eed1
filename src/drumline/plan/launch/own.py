"""What `drumline train` makes of a cluster's plan: what it does not run, and where it holds more than was planned.

Training divides optimizer state over the data-parallel ranks that hold the same parameters, and with ZeRO 3 it gathers
the parameters of a whole stage. Plans count with the usual software: state is divided over context-parallel ranks too,
and ZeRO 3 gathers layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from drumline.core.units import size_text
from drumline.plan.cluster.device_memory import device_bytes, peak_bytes, trained_parameters
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.stages import alike, counts_of
from drumline.plan.cluster.transformer import Transformer
from drumline.schedules import find


def not_run(transformer: Transformer, cluster: Cluster, layout: Layout, *, source: str = "") -> Iterator[str]:
    """Yield why `drumline train` does not run a plan; `source` is the folder or config.json of the model.

    >>> from drumline.plan.cluster.hardware import cluster
    >>> from drumline.plan.cluster.models import MODELS
    >>> list(not_run(MODELS["gpt-1.7b"], cluster("a100-80", 8), Layout(batch=8, pipeline=4, data=2, zero=2)))
    ['ZeRO 2: training divides optimizer state (--zero 1), or parameters and gradients too (--zero 3)']
    """
    if layout.practice.fp8:
        yield "FP8 products: it computes in fp32, bf16 or fp16 (--precision bf16 plans so)"
    yield from _state(transformer, cluster, layout)
    if layout.recompute not in ("none", "full"):
        yield f"{layout.recomputation}: it recomputes nothing or everything (--recompute none or full plans so)"
    if layout.data % layout.expert:
        yield f"expert {layout.expert}: training shares experts out between data-parallel ranks, here {layout.data}"
    yield from _adapters(transformer, layout, source)
    if source:
        return
    details = transformer.details
    beyond = {
        "experts": transformer.experts is not None,
        "latent attention": transformer.latent is not None,
        "ALiBi positions": details.alibi,
        **dict.fromkeys(said_of_model(transformer).values(), True),
        **dict.fromkeys(details.others, True),
    }
    for name in (name for name, there in beyond.items() if there):
        yield f"{name}: the built-in GPT has none; plan from the model's Hugging Face folder to train that model"


def said_of_model(transformer: Transformer) -> dict[str, str]:
    """Return, by its name, each of a model's details beyond what the built-in GPT has, in words.

    With biases the built-in GPT has LayerNorm, without them RMSNorm, and both add 1e-5.

    >>> from drumline.plan.cluster.models import MODELS
    >>> said_of_model(MODELS["deepseek-v3"])
    {'norm_epsilon': 'norms that add 1e-06'}
    """
    details, own_norm = transformer.details, "LayerNorm" if transformer.biased else "RMSNorm"
    said = {
        "norm": details.norm if details.norm not in ("", own_norm) else "",
        "norm_epsilon": f"norms that add {details.norm_epsilon:g}" if details.norm_epsilon not in (0.0, 1e-5) else "",
        "activation": f"the activation {details.activation}" if details.activation else "",
    }
    return {name: words for name, words in said.items() if words}


def _adapters(transformer: Transformer, layout: Layout, source: str) -> Iterator[str]:
    """Yield why adapters are not trained so."""
    if (base := transformer.frozen_base) is None:
        return
    if layout.tensor > 1 or layout.expert > 1:
        name = "tensor" if layout.tensor > 1 else "expert"
        yield f"adapters with {name} parallelism: it trains them in whole layers (--{name} 1 plans so)"
    if base.kind == "int4":
        yield "a base of int4: it has int8, float8 and nf4"
    if not source:
        yield "adapters: the built-in GPT has no trained weights for them; plan from the model's Hugging Face folder"


def _state(transformer: Transformer, cluster: Cluster, layout: Layout) -> Iterator[str]:
    zero, more = zero_of(layout), more_bytes(transformer, layout)
    if zero == 2:
        yield "ZeRO 2: training divides optimizer state (--zero 1), or parameters and gradients too (--zero 3)"
    elif zero and lines_that_share(layout) <= 1:
        yield f"ZeRO {zero}: no two data-parallel ranks hold the same parameters (--zero 0 plans without)"
    elif zero == 3 and find(layout.schedule).layout(layout.pipeline, layout.stages_per_rank).mirrored:
        yield f"ZeRO 3: {layout.schedule} holds each stage on two ranks (--zero 1 plans without)"
    elif more > 0 and (needed := peak_bytes(transformer, layout) + more) > cluster.device.memory_bytes:
        without = " (--zero 1 plans without)" if zero == 3 else ""
        yield f"ZeRO {zero}: training {_how(layout)} and would need {size_text(round(needed))} per device{without}"


def zero_of(layout: Layout) -> int:
    """Return the ZeRO stage of a layout, 0 if it has no rank to divide anything with.

    >>> zero_of(Layout(batch=8, pipeline=8, zero=1)), zero_of(Layout(batch=8, data=8, zero=1))
    (0, 1)
    """
    return layout.zero if layout.data * layout.context > 1 else 0


def _how(layout: Layout) -> str:
    """Return how training divides state, where it is not as planned."""
    return "gathers whole stages" if layout.zero == 3 else f"divides state by {lines_that_share(layout)} only"


def lines_that_share(layout: Layout) -> int:
    """Return between how many ranks training divides state: data-parallel ones that hold the same experts.

    >>> lines_that_share(Layout(batch=8, data=4, expert=2))
    2
    """
    return layout.data // layout.expert


def more_bytes(transformer: Transformer, layout: Layout) -> float:
    """Return how many bytes more than planned the fullest device holds in training.

    >>> from drumline.plan.cluster.models import MODELS
    >>> more_bytes(MODELS["gpt-1.7b"], Layout(batch=8, pipeline=4, data=2, zero=1))
    0.0
    """
    lines = lines_that_share(layout)
    if zero_of(layout) == 0 or lines == 0:
        return 0.0
    held_totals, whole, counts = [], replace(layout, zero=0), counts_of(transformer, layout)
    for twin in alike(transformer, counts, layout.schedule, layout.pipeline, layout.stages_per_rank):
        saved = (
            layout.practice.states.state_bytes * sum(trained_parameters(transformer, layout, twin)) * (1 - 1 / lines)
        )
        held_totals.append(device_bytes(transformer, whole, twin).total - saved)
    return max(held_totals) - peak_bytes(transformer, layout)


def differs(transformer: Transformer, layout: Layout, *, source: str = "") -> Iterator[str]:
    """Yield what training does otherwise than planned.

    >>> from drumline.plan.cluster.models import MODELS
    >>> list(differs(MODELS["gpt-1.7b"], Layout(batch=8, tensor=2)))
    ['dropout inside attention: tensor-parallel ranks would each draw for their own heads, so it is left out']
    """
    if (more := round(more_bytes(transformer, layout))) >= 2**20:
        yield f"ZeRO {layout.zero} as planned: training {_how(layout)}, which takes {size_text(more)} more per device"
    if source and layout.tensor > 1:
        yield f"how tensor {layout.tensor} divides the model: its class in transformers must have a tp_plan"
    if drops_less(transformer, layout, source=source):
        why = "tensor-parallel ranks would each draw for their own heads"
        if layout.slices > 1:
            why = "on GPUs, slices have no kernel that draws it"
        yield f"dropout inside attention: {why}, so it is left out"


def drops_less(transformer: Transformer, layout: Layout, *, source: str = "") -> bool:
    """Whether training leaves out the dropout of attention: ranks that share heads, and slices, cannot draw alike."""
    return transformer.dropout and (layout.tensor > 1 or layout.slices > 1) and not source
