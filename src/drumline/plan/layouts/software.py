"""Presets of software by framework and release: what each overlaps, fuses, keeps and reaches, and how far off it was.

A release stands for the years until the next one. `plan --software NAME` takes one; `--launch` implies its own. What a
preset says is public, and `read` says where: a release's code, its documentation, or the paper that describes the runs.
Shares that libraries reach are fitted, to the rows that `docs/cluster-method.md` names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from drumline.core.errors import PlanError, nearest
from drumline.plan.cluster.practice import (
    EAGER_LOGIT,
    EAGER_LOSS,
    FUSED_LOGIT,
    FUSED_LOSS,
    IN_PLACE_LOGIT,
    IN_PLACE_LOSS,
    PARALLEL_LOSS,
    PRACTICE,
    Practice,
)


@dataclass(frozen=True, slots=True)
class Software:
    """A framework's release: its practice, what it does in words, and where that was read."""

    name: str
    practice: Practice
    does: str
    read: str


_MEGATRON_2021 = Practice(
    flash_attention=False,
    accumulation_bytes=6,
    gradient_bytes=2,
    overlap_tensor=False,
    overlap_pipeline=False,
    overlap_staged=False,
    loss_bytes=PARALLEL_LOSS,
    logit_bytes=FUSED_LOGIT,
)
_MEGATRON_2022 = replace(_MEGATRON_2021, accumulation_bytes=0, gradient_bytes=4, overlap_tensor=True)
_DEEPSPEED = replace(_MEGATRON_2021, accumulation_bytes=18, gradient_bytes=4, duplex=False)
_NEMO = replace(
    PRACTICE, overlap_forward=True, overlap_context=True, loss_bytes=FUSED_LOSS, logit_bytes=FUSED_LOGIT, fp8=True
)
_TITAN = replace(
    PRACTICE,
    overlap_tensor=False,
    loss_bytes=FUSED_LOSS,
    logit_bytes=FUSED_LOGIT,
    attention_kernels=2,
    keeps_fp8_inputs=False,
    keeps_fp8_weights=False,
    stops_early=True,
)
_COMPOSER = replace(
    PRACTICE,
    overlap_tensor=False,
    loss_bytes=IN_PLACE_LOSS,
    logit_bytes=IN_PLACE_LOGIT,
    attention_kernels=1,
    step_seconds=0.033,
)
_INTERNEVO = replace(
    PRACTICE,
    gradient_bytes=2,
    overlap_tensor=False,
    loss_bytes=FUSED_LOSS,
    logit_bytes=FUSED_LOGIT,
    attention_kernels=2,
)
_MODERN = "fused attention, messages of the backward hide, the loss is Megatron-LM's in 32 bits"
_FP8 = "FP8 of Transformer Engine, tensor-parallel messages and the ring of keys and values hide"
PRESETS = {
    software.name: software
    for software in (
        Software(
            "megatron@2021",
            _MEGATRON_2021,
            "attention is not fused, gradients are added up in 16 bits by a kernel, ranks wait for every message",
            "examples/sc21 of Megatron-LM",
        ),
        Software(
            "megatron@2022",
            _MEGATRON_2022,
            "products add gradients up in 32 bits, messages of the backward hide behind weights' gradients",
            "arXiv 2205.05198",
        ),
        Software(
            "deepspeed@2022",
            _DEEPSPEED,
            "gradients are cast, then added, messages between stages go one way at a time",
            "arXiv 2201.11990 and DeepSpeed's bf16 optimizer",
        ),
        Software("meta@2024", PRACTICE, "fused attention, messages of the backward hide", "arXiv 2407.21783"),
        Software(
            "nemo@24.07",
            replace(_NEMO, attention_kernels=2, product_share=1.137),
            f"{_FP8}, the loss is fused",
            "docs/source/performance of NVIDIA/NeMo and its recipes",
        ),
        Software(
            "nemo@25.09",
            replace(_NEMO, product_share=1.222),
            f"{_FP8}, the loss is fused",
            "performance recipes of NVIDIA-NeMo/Megatron-Bridge",
        ),
        Software(
            "deepseek@2024",
            replace(PRACTICE, fp8=True, overlap_experts=True, product_share=112 / 132),
            "FP8, tokens travel to experts while another microbatch computes, 20 of 132 processors send",
            "arXiv 2412.19437",
        ),
        Software(
            "composer@2023-10",
            replace(_COMPOSER, stops_early=True),
            "as in May, with PyTorch 2.1, whose full recomputation ends before a layer's last product",
            "scripts/train of mosaicml/llm-foundry and its README of October 2023",
        ),
        Software(
            "composer@2023-05",
            _COMPOSER,
            "FSDP of PyTorch 1.13, fused attention of the first generation, the loss is fused and works in place",
            "scripts/train of mosaicml/llm-foundry",
        ),
        Software(
            "internevo@2023",
            _INTERNEVO,
            "fused attention of the second generation, gradients are exchanged in 16 bits, the loss is fused",
            "doc/en/train_performance.md of InternLM/InternEvo",
        ),
        Software(
            "fms@2024",
            replace(_TITAN, gradient_bytes=2),
            "FSDP of PyTorch, compiled, gradients are exchanged in 16 bits",
            "foundation-model-stack/fms-fsdp",
        ),
        Software(
            "torchtitan@2024",
            replace(_TITAN, loss_bytes=EAGER_LOSS, logit_bytes=EAGER_LOGIT),
            "FSDP, layers are compiled and the loss is not, FP8 keeps inputs in 16 bits",
            "pytorch/torchtitan at 9dec370, December 2024",
        ),
        Software(
            "torchtitan@0.2",
            _TITAN,
            "FSDP, layers and the loss are compiled, FP8 keeps inputs in 16 bits",
            "pytorch/torchtitan at e7c0cae and v0.2.0",
        ),
        Software("megatron@0.13", PRACTICE, _MODERN, "core_v0.13.1"),
        Software(
            "megatron@0.14",
            PRACTICE,
            _MODERN,
            "core_v0.14.0",
        ),
        Software(
            "drumline@0",
            replace(PRACTICE, loss_bytes=EAGER_LOSS, logit_bytes=EAGER_LOGIT),
            "PyTorch's fused attention and loss",
            "this repository",
        ),
    )
}


class Missed(NamedTuple):
    """How far off a preset was on rows that gave it no constant: how many, the mean and the worst, and which."""

    rows: int
    mean: float
    worst: float
    source: str


# `benchmarks/published.py --found` compares these rows again, and `tests/plan/test_software.py` checks the numbers.
MISSED = {
    "megatron@2021": Missed(6, 0.012, 0.026, "SC'21, Table 2"),
    "megatron@2022": Missed(8, 0.015, 0.031, "arXiv 2205.05198"),
    "deepspeed@2022": Missed(4, 0.084, 0.114, "MT-NLG and BLOOM"),
    "deepseek@2024": Missed(1, 0.042, 0.042, "arXiv 2412.19437"),
    "nemo@25.09": Missed(6, 0.047, 0.086, "NeMo 25.11 and 26.02"),
    "composer@2023-05": Missed(58, 0.064, 0.311, "llm-foundry on A100"),
    "composer@2023-10": Missed(31, 0.044, 0.200, "llm-foundry on H100"),
    "internevo@2023": Missed(22, 0.192, 0.399, "InternEvo"),
    "torchtitan@2024": Missed(17, 0.124, 0.335, "torchtitan, December 2024"),
    "torchtitan@0.2": Missed(2, 0.017, 0.025, "torchtitan, June 2025"),
}
EVERY = Missed(155, 0.079, 0.399, "docs/published.md")  # of all of them
DEFAULT = "megatron@0.14"  # what plans assume that name no software
OTHERS = ("megatron@0.14", "nemo@25.09", "torchtitan@0.2", "deepspeed@2022")  # what a plan is compared under
NEWEST = {"megatron": "megatron@0.14", "torchtitan": "torchtitan@0.2", "drumline": "drumline@0"}


def software(name: str) -> Software:
    """Return the preset of a framework's release.

    >>> software("megatron@2021").practice.flash_attention
    False
    >>> software("megatron@2020")
    Traceback (most recent call last):
    drumline.core.errors.PlanError: unknown software 'megatron@2020'; did you mean megatron@2022?
    """
    if name not in PRESETS:
        raise PlanError(f"unknown software {name[:60]!r}", fix=nearest(name[:60], PRESETS))
    return PRESETS[name]
