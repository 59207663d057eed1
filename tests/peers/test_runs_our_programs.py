"""PyTorch's own runtime runs our exported programs, and its gradients are those of our pipeline."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from drumline.core.program import Program
from drumline.core.torch_text import for_torch
from drumline.pipeline.launch import launch
from drumline.schedules import generate

pytestmark = pytest.mark.torch

NAMES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "looped-bfs", "interleaved-zb")
FORMATS = ("compute_only", "compute_comms")
NUM_MICROBATCHES = 6  # not a power of two, so that dividing by it rounds
NUM_BLOCKS, PER_BLOCK = 8, 4

Off = dict[str, float]


def file_of(folder: Path, name: str, kind: str) -> Path:
    return folder / f"{name}.{kind}.csv"


def of_torch(program: Program, path: Path, kind: str, model: Any, batch: Any, target: Any, **settings: Any) -> Any:
    """Return the gradients of this rank's parameters after one step of PyTorch's runtime, by their names in the model."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
    from torch.nn import functional

    from drumline.runtime.cut import blocks_of, cut

    cuts = cut(blocks_of(model), program.num_stages)
    mine = program.placement.stages_of(dist.get_rank())
    modules = {index: nn.Sequential(*(block.module for block in cuts[index])) for index in mine}
    stages = [PipelineStage(one, at, program.num_stages, torch.device("cpu")) for at, one in modules.items()]
    runtime = _PipelineScheduleRuntime(stages, program.num_microbatches, loss_fn=functional.mse_loss, **settings)
    runtime._load_csv(str(path), format=kind)
    runtime.step(*([batch] if 0 in mine else []), target=target if program.num_stages - 1 in mine else None)
    return {
        f"{block.name}.{name}": parameter.grad
        for index in mine
        for block in cuts[index]
        for name, parameter in block.module.named_parameters()
    }


def run_both(programs: dict[str, Program], folder: Path) -> tuple[dict[tuple[str, str], Off], Off]:
    """Return how far PyTorch's gradients are from ours on this rank: of every file, and with unscaled gradients."""
    import warnings

    from torch.nn import functional

    from drumline.pipeline.pipeline import Pipeline
    from drumline.pipeline.verify import difference
    from models import data, mlp

    warnings.simplefilter("ignore")
    batch, target = data(2 * NUM_MICROBATCHES)
    ours: dict[str, Any] = {}
    found = {}
    for name, program in programs.items():
        model = mlp(NUM_BLOCKS)
        own = copy.deepcopy(model)
        with Pipeline(own, loss_fn=functional.mse_loss, schedule=program, transport="shared-memory") as pipe:
            pipe.step(batch, target=target)
            pipe.settle()
            ours[name] = {parameter: one.grad for parameter, one in pipe.named_parameters()}
        for kind in FORMATS:
            theirs = of_torch(program, file_of(folder, name, kind), kind, copy.deepcopy(model), batch, target)
            assert theirs.keys() == ours[name].keys()
            found[name, kind] = {one: difference(theirs[one], ours[name][one]) for one in theirs}
    path = file_of(folder, "1f1b", "compute_only")
    unscaled = of_torch(programs["1f1b"], path, "compute_only", mlp(NUM_BLOCKS), batch, target, scale_grads=False)
    return found, {one: difference(unscaled[one], ours["1f1b"][one]) for one in unscaled}


def test_torch_runs_our_files_and_finds_our_gradients(tmp_path: Path) -> None:
    programs = {name: generate(name, num_ranks=2, num_microbatches=NUM_MICROBATCHES) for name in NAMES}
    for name, program in programs.items():
        for kind in FORMATS:
            text = for_torch(program, communication=kind == "compute_comms")
            file_of(tmp_path, name, kind).write_text(text)
    (first, unscaled), (second, also_unscaled) = launch(run_both, programs, tmp_path, num_ranks=2, timeout=240)
    for name in NAMES:
        for kind in FORMATS:
            off = first[name, kind] | second[name, kind]
            assert len(first[name, kind]) + len(second[name, kind]) == len(off) == NUM_BLOCKS * PER_BLOCK
            worst = max(off, key=off.__getitem__)
            assert off[worst] <= 1e-6, f"{name} as {kind}: {worst}"
    # That PyTorch divides by the number of microbatches is what makes them equal: the comparison sees it.
    off = unscaled | also_unscaled
    assert off == pytest.approx(dict.fromkeys(off, NUM_MICROBATCHES - 1), rel=1e-5)
