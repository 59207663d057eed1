"""Questions to the planner and layouts drawn at random, and the files that are written for them."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from drumline.core.errors import PlanError
from drumline.plan.cluster.hardware import Cluster, cluster
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.models import MODELS
from drumline.plan.cluster.transformer import Details, ExpertShape, LatentAttention, Transformer
from drumline.plan.launch.launch import launch
from drumline.plan.launch.releases import arguments
from drumline.plan.layouts.pins import Pins
from drumline.plan.layouts.space import layout_of, meshes, schedules_of

WRITTEN = (("megatron", "0.13"), ("megatron", "0.14"), ("torchtitan", "0.2"))


class Question(NamedTuple):
    """What a planner is asked."""

    transformer: Transformer
    cluster: Cluster
    batch: int
    pins: Pins


class WrittenFile(NamedTuple):
    """A file as values, with the environment that its command sets; whether it starts, and what it is said to lack."""

    values: dict[str, Any]
    starts: bool
    missing: tuple[str, ...]


def drawn_models(draw: random.Random) -> Transformer:
    """Return a model: one with a name, or one of any kind."""
    if draw.random() < 0.4:
        return MODELS[draw.choice(["gpt-1.7b", "gpt-7.5b", "llama-3-8b", "llama-3-70b", "mixtral-8x7b", "deepseek-v3"])]
    biased, gated = draw.random() < 0.4, draw.random() < 0.5
    experts = ExpertShape(draw.choice([8, 16, 64]), draw.choice([1, 2, 4]), 1024, draw.choice([0, 1]))
    details = Details(
        rotary_base=draw.choice([0.0, 1e4, 5e5]),
        qk_norm=draw.random() < 0.3,
        norm=draw.choice(["", "LayerNorm", "LayerNorm1P", "RMSNorm"]),
        norm_epsilon=draw.choice([0.0, 1e-6]),
        activation="" if gated else draw.choice(["", "relu2"]),
    )
    sparse = not biased and draw.random() < 0.5
    return Transformer(
        "drawn",
        draw.choice([6, 16, 24, 30]),
        2048,
        16,
        vocabulary=32000,
        sequence=draw.choice([1024, 4096, 16384]),
        num_key_value_heads=draw.choice([4, 16]),
        gated=gated,
        tied=draw.random() < 0.5,
        learned_positions=draw.random() < 0.3,
        experts=experts if sparse else None,
        num_dense_layers=draw.choice([0, 2]) if sparse else 0,
        biased=biased,
        dropout=draw.random() < 0.3,
        latent=LatentAttention(256, 128, 64, 32, 64) if not biased and draw.random() < 0.3 else None,
        details=details,
    )


def questions(seed: int) -> Iterator[Question]:
    """Yield questions without end, each for a release of a framework."""
    draw = random.Random(seed)
    while True:
        framework, release = draw.choice(WRITTEN)
        hides = tuple(name for name in ("forward", "experts", "context") if draw.random() < 0.3)
        precision = draw.choice(["bf16", "bf16", "fp8"])
        machines = cluster(
            draw.choice(["h100", "h100", "a100-80"]) if precision == "bf16" else "h100", draw.choice([8, 16, 64])
        )
        pins = Pins(framework=framework, release=release, overlaps=hides, precision=precision)
        yield Question(drawn_models(draw), machines, draw.choice([64, 128, 256]), pins)


def drawn_layouts(question: Question, draw: random.Random, count: int) -> Iterator[Layout]:
    """Yield some of the layouts among which the planner chooses."""
    transformer, machines, batch, pins = question
    try:
        degrees = meshes(transformer, machines, batch, pins)
    except PlanError:  # heads that no degree divides, or a sequence too few
        return
    for _ in range(count):
        mesh = draw.choice(degrees)
        size = draw.choice(pins.microbatch_sizes(batch, mesh))
        if not (admitted := schedules_of(transformer, mesh, batch // (mesh.data * size), pins)):
            continue
        kinds = [*pins.recomputations(transformer), *(["full:1"] if pins.runs.some_layers else [])]
        zero, again = draw.choice(pins.zero_stages(mesh)), draw.choice(kinds)
        yield layout_of(transformer, batch, pins, mesh, size, draw.choice(admitted), zero, again)


def written(question: Question, layout: Layout) -> WrittenFile:
    """Return the file for a question's framework and release, read back."""
    transformer, machines, _, pins = question
    config = launch(transformer, machines, layout, releases={pins.framework: pins.release}).of(pins.framework)
    if pins.framework == "torchtitan":
        return WrittenFile(tomllib.loads(config.text), config.starts, config.missing)
    setting = next(word for word in config.command.split() if word.startswith("CUDA_DEVICE_MAX_CONNECTIONS="))
    environment = {"$CUDA_DEVICE_MAX_CONNECTIONS": int(setting.partition("=")[2]), "$WORLD_SIZE": machines.num_devices}
    return WrittenFile({**arguments(config.text), **environment}, config.starts, config.missing)


def as_planned(question: Question, layout: Layout) -> Layout:
    """Return a layout as the planner has it for a question, for one that was made by hand."""
    return replace(layout, practice=question.pins.practice)
