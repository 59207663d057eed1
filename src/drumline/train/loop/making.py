"""From settings to what a run trains with: the model, and the arguments of its pipeline.

Every rank builds the same model from the same seed. A large one is built on the meta device, so that each rank makes or
reads only the parameters of its own stages.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from drumline.adapt.settings import SIZE
from drumline.channel.lines.axes import Axes
from drumline.core.errors import UsageError, counted
from drumline.core.simulate.simulate import simulate
from drumline.engine.model.blocks import guesses, is_chain
from drumline.report.run.follow import needed
from drumline.schedules import schedules
from drumline.train.config.keys import TABLES
from drumline.train.config.mesh_relations import experts_are_shared_out, slices_divide
from drumline.train.config.relations import check_made, one_cut, program_of, schedule_exists
from drumline.train.config.settings import TrainSettings
from drumline.train.data.items.batch import Batch
from drumline.train.models.built import DTYPES, Adapter, Built, Tokenizer

MakeModel = Callable[..., Built]
_LARGE = 2**31  # bytes of parameters from which on each process makes only its own


def check(settings: TrainSettings) -> None:
    """Refuse what the loop cannot do, alike on all ranks and before anything is built.

    >>> from drumline.train.config.settings import MemorySettings
    >>> check(TrainSettings(memory=MemorySettings(recompute="some")))
    Traceback (most recent call last):
    drumline.core.errors.ConfigError: memory.recompute is 'some'; expected "none", "selective" or "full"; ...
    """
    check_made(settings, TABLES, (experts_are_shared_out, schedule_exists, one_cut, slices_divide))
    for package, wanted in (("tensorboard", settings.run.tensorboard), ("wandb", bool(settings.run.wandb))):
        if wanted:
            needed(package, extra=package)


def gathered(settings: TrainSettings) -> TrainSettings:
    """Return settings with one pipeline step to an update, if `adapt` chooses how many microbatches run at once.

    Such a step begins in groups of as many microbatches as a step had, and may hold no more unless the settings say so.

    >>> from drumline.train.config.settings import AdaptSettings, BatchSettings
    >>> batch = BatchSettings(sequences=16, microbatch=1, accumulate=4)
    >>> gathered(TrainSettings(batch=batch)).num_microbatches
    4
    >>> gathered(TrainSettings(batch=batch, adapt=AdaptSettings(on=True, microbatches="size"))).num_microbatches
    16
    """
    chooses = settings.adapt.on and settings.adapt.microbatches == SIZE and settings.lengths.how != "buckets"
    is_generated = settings.pipeline.schedule in schedules() and not settings.pipeline.plan
    if not (chooses and is_generated and settings.batch.accumulate > 1):
        return settings
    most = settings.adapt.max_activations or max(simulate(program_of(settings)).peak_activations)
    return replace(
        settings,
        batch=replace(settings.batch, accumulate=1),
        adapt=replace(settings.adapt, max_activations=most),
    )


def seeded(seed: int) -> None:
    """Let all random numbers that building may draw be the same on every rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def build(settings: TrainSettings, make_model: MakeModel, *, whole: bool | None = None) -> Built:
    """Return the model: whole, or on the meta device, from which every rank gives memory to its own stages.

    Unless told, it is on the meta device if it is large or has an adapter. Functions of users build it whole.
    """
    seeded(settings.run.seed)
    built = None
    if not whole and settings.model.kind != "function":
        built = make_model(settings, device="meta")
        if (
            whole is None
            and built.adapter is None
            and sum(param.numel() * 4 for param in built.model.parameters()) < _LARGE
        ):
            built = None
    if built is None:
        seeded(settings.run.seed)
        built = make_model(settings, device="cpu")
    dtype = DTYPES[settings.precision.weights]
    for param in built.model.parameters():
        is_base = built.adapter is not None and not param.requires_grad  # which has numbers of its own
        if param.is_floating_point() and dtype is not torch.float32 and not is_base:
            param.data = param.data.to(dtype)
    return built


def program_name(num_microbatches: int) -> str:
    """Return how a run calls the program of steps with so many microbatches, beside its own.

    >>> program_name(1), program_name(5)
    ('1 microbatch', '5 microbatches')
    """
    return counted(num_microbatches, "microbatch")


def pipeline_arguments(
    settings: TrainSettings, built: Built, example: Batch, folder: Path, *, counts: Sequence[int] = ()
) -> dict[str, Any]:
    """Return what `Pipeline` is made with beside the model; steps may have so many microbatches beside its own."""
    pipeline = settings.pipeline
    arguments: dict[str, Any] = {
        "loss_fn": built.loss_fn,
        "transport": pipeline.transport,
        "interface": pipeline.interface,
        "device": pipeline.device or None,
        "seed": settings.run.seed,
        "precision": settings.precision.compute,
        "master_weights": settings.precision.master_weights,
        "check_model": pipeline.check_model,
        "timeout": pipeline.timeout,
        "compile": pipeline.compile,
        "capture": pipeline.capture,
        "arrange": settings.lengths.search,
        "record": folder,
    }
    if pipeline.num_slices > 1:
        arguments["slices"] = pipeline.slices
    if pipeline.plan:
        arguments["plan"] = pipeline.plan
    else:
        arguments |= {
            "num_ranks": settings.mesh.pipeline,
            "schedule": pipeline.schedule,
            "num_microbatches": settings.num_microbatches,
            "stages_per_rank": pipeline.stages_per_rank,
            "vertical_sync": pipeline.vertical_sync,
            "checkpoint": settings.memory.recompute,
            **_cut(settings, built.model),
        }
    if settings.mesh.num_lines > 1:
        arguments |= {
            "mesh": settings.mesh.axes,
            "zero": settings.memory.zero,
            "sequence_parallel": settings.memory.sequence_parallel,
        }
    if settings.adapt.on:
        arguments["adapt"] = {name: value for name, value in asdict(settings.adapt).items() if name != "on"}
    if counts:
        arguments["programs"] = {program_name(count): count for count in counts}
    if _wants_example(built.model) or arguments.get("balance") == "auto":
        arguments["example"] = example.inputs[built.inputs] if is_chain(built.model) else example.inputs
        if not (pipeline.plan or arguments.get("balance") or arguments.get("cuts")):
            arguments["balance"] = "parameters"  # measured cuts are another in every run
        if built.loss_fn is not None:
            arguments["example_target"] = example.target
    if built.weights is not None:
        arguments["weights"] = built.weights
    return arguments


def rows_of(settings: TrainSettings) -> tuple[int, int]:
    """Return which part of the data's rows this process reads: its number, and how many parts there are.

    It is `pipe.axes.rows`, which is needed before there is a pipeline.

    >>> rows_of(TrainSettings())
    (0, 1)
    """
    sizes = settings.mesh.axes
    ranks = np.arange(settings.num_ranks).reshape(tuple(sizes.values()))
    return Axes(ranks, tuple(sizes), int(os.environ.get("RANK", "0")), timeout=0.0, store=None).rows


def _wants_example(model: nn.Module) -> bool:
    return not is_chain(model) and next(iter(guesses(model)), None) is None


def _cut(settings: TrainSettings, model: nn.Module) -> dict[str, Any]:
    pipeline = settings.pipeline
    if pipeline.layers:
        return {"cuts": layer_cuts(model, pipeline.layers) or None}
    return {"cuts": list(pipeline.cuts) or None, "balance": pipeline.balance or None}


def layer_cuts(model: nn.Module, layers: Sequence[int]) -> list[str]:
    """Return the names of the modules with which stages 1, 2, ... begin if each gets so many of the model's layers.

    What stands before the layers belongs to the first stage, and what stands behind them to the last one.

    >>> model = nn.Sequential(nn.Embedding(9, 4), *(nn.Linear(4, 4) for _ in range(4)), nn.LayerNorm(4))
    >>> layer_cuts(model, [1, 3]), layer_cuts(model, [4, 0])
    (['2'], ['5'])
    >>> layer_cuts(model, [2, 3])
    Traceback (most recent call last):
    drumline.core.errors.UsageError: pipeline.layers sum to 5, and no list of modules in the model has so many ...
    """
    named_layers = _layers(model, sum(layers))
    if named_layers is None:
        raise UsageError(
            f"pipeline.layers sum to {sum(layers)}, and no list of modules in the model has so many of one kind",
            expected="how many of the model's layers each stage gets",
            fix="name the first module of every stage but the first in pipeline.cuts instead",
        )
    names, behind = named_layers
    if any(layer < 1 for layer in layers[1:-1]):
        raise UsageError(
            f"pipeline.layers are {list(layers)}", expected="a layer in every stage but the first and the last"
        )
    starts = list(accumulate(layers))[:-1]
    if any(start >= len(names) for start in starts) and not behind:
        raise UsageError(
            f"pipeline.layers are {list(layers)}", expected=f"1 of the {counted(len(names), 'layer')} in the last stage"
        )
    return [names[start] if start < len(names) else behind for start in starts]


def _layers(model: nn.Module, count: int) -> tuple[list[str], str] | None:
    """Return the names of `count` modules of one kind that follow each other, and of the module behind them."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        kinds = Counter(type(child) for child in module.children())
        for kind, number in kinds.items():
            if number == count:
                prefix = f"{name}." if name else ""
                children = list(module.named_children())
                names = [prefix + key for key, child in children if isinstance(child, kind)]
                last = max(at for at, (_, child) in enumerate(children) if isinstance(child, kind))
                inside = [prefix + key for key, _ in children[last + 1 :]]
                return names, inside[0] if inside else _behind(model, name)
    return None


def _behind(model: nn.Module, name: str) -> str:
    """Return the name of the module that is defined behind another, beside it."""
    if not name:
        return ""
    parent, _, own_name = name.rpartition(".")
    beside = [key for key, _ in model.get_submodule(parent).named_children()]
    later = beside[beside.index(own_name) + 1 :]
    return f"{parent}.{later[0]}" if parent and later else later[0] if later else ""


@dataclass(frozen=True, slots=True)
class Calling:
    """How a pipeline is called; it does not keep alive the model, most of which other ranks hold.

    >>> from drumline.train.models.built import Built
    >>> call = Calling.of(Built(nn.Sequential(nn.ReLU()), nn.functional.mse_loss, inputs="points"))
    >>> call(Batch({"points": torch.ones(1)}, torch.zeros(1), 1, 1))
    ((tensor([1.]),), {'target': tensor([0.])})
    """

    is_chain: bool
    inputs: str
    takes_target: bool
    tokenizer: Tokenizer | None
    adapter: Adapter | None = None
    counts: frozenset[int] = frozenset()  # microbatches of steps that have their own program

    @staticmethod
    def of(built: Built, counts: Sequence[int] = ()) -> Calling:
        """Return how a model's pipeline is called."""
        takes_target = built.loss_fn is not None
        how = is_chain(built.model), built.inputs, takes_target, built.tokenizer, built.adapter
        return Calling(*how, frozenset(counts))

    def __call__(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what a step gets of a batch: in order, and by name."""
        args, kwargs = self.inputs_only(batch.inputs)
        if batch.num_microbatches in self.counts:
            kwargs = {**kwargs, "program": program_name(batch.num_microbatches)}
        return args, {**kwargs, "target": batch.target} if self.takes_target else kwargs

    def inputs_only(self, inputs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the same of inputs alone."""
        if not self.is_chain:
            return (), inputs
        return (inputs[self.inputs] if len(inputs) == 1 else inputs,), {}
