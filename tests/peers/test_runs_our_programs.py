"""PyTorch's own runtime runs our exported programs, and its gradients are those of our pipeline.

PyTorch divides a stage's sum by the number of microbatches, we weigh each microbatch's loss. With 4 microbatches both
are exact. With 6 both round, which alone is some 1e-6 of this narrow model's gradients in float32: so that is float64.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from drumline.channel.launch.launch import launch
from drumline.core.lower.torch_text import for_torch
from drumline.core.program import Program
from drumline.schedules import generate
from matrices import long
from torch_versions import RUNS_V_OVER_GLOO

pytestmark = [pytest.mark.torch, pytest.mark.cold_ranks]

NAMES = ("1f1b", "interleaved-1f1b", "zb-h1", *(["zb-v"] if RUNS_V_OVER_GLOO else []), "looped-bfs", "interleaved-zb")
FORMATS = ("compute_only", "compute_comms")
ALLOWED = {(4, "float32"): 1e-6, (6, "float64"): 1e-12}
NUM_BLOCKS, PER_BLOCK = 8, 4

Off = dict[str, float]
Run = tuple[str, int, str]


def file_of(folder: Path, name: str, num_microbatches: int, kind: str) -> Path:
    return folder / f"{name}.{num_microbatches}.{kind}.csv"


def of_torch(program: Program, path: Path, kind: str, model: Any, batch: Any, target: Any, **settings: Any) -> Any:
    """Return the gradients of this rank's parameters after one step of PyTorch's runtime."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, schedules
    from torch.nn import functional

    from drumline.model.block import blocks_of
    from drumline.model.blocks.cut import cut

    cuts = cut(blocks_of(model), program.num_stages)
    mine = program.placement.stages_of(dist.get_rank())
    modules = {index: nn.Sequential(*(block.module for block in cuts[index])) for index in mine}
    stages = [PipelineStage(module, at, program.num_stages, torch.device("cpu")) for at, module in modules.items()]
    kind_of_runtime: Any = schedules._PipelineScheduleRuntime  # which has no types
    runtime = kind_of_runtime(stages, program.num_microbatches, loss_fn=functional.mse_loss, **settings)
    runtime._load_csv(str(path), format=kind)
    runtime.step(*([batch] if 0 in mine else []), target=target if program.num_stages - 1 in mine else None)
    return {
        f"{block.name}.{name}": parameter.grad
        for index in mine
        for block in cuts[index]
        for name, parameter in block.module.named_parameters()
    }


def run_both(programs: dict[tuple[str, int], Program], folder: Path) -> tuple[dict[Run, Off], Off]:
    """Return how far PyTorch's gradients are from ours on this rank: of every file, and with unscaled gradients."""
    import warnings

    import torch
    from torch.nn import functional

    from drumline.engine.unsplit.comparing import difference
    from drumline.pipeline.pipeline import Pipeline
    from torch_models import data, mlp

    warnings.simplefilter("ignore")
    found = {}
    unscaled: Off = {}
    for num_microbatches, kind_of_number in ALLOWED:
        dtype = getattr(torch, kind_of_number)
        batch, target = (tensor.to(dtype) for tensor in data(2 * num_microbatches))
        for name in NAMES:
            program = programs[name, num_microbatches]
            with Pipeline(
                mlp(NUM_BLOCKS).to(dtype),
                loss_fn=functional.mse_loss,
                schedule=program,
                transport="shared-memory",
            ) as pipe:
                pipe.step(batch, target=target)
                pipe.settle()
                ours = {text: parameter.grad for text, parameter in pipe.named_parameters()}
            for kind in FORMATS:
                path = file_of(folder, name, num_microbatches, kind)
                theirs = of_torch(program, path, kind, mlp(NUM_BLOCKS).to(dtype), batch, target)
                assert theirs.keys() == ours.keys()
                found[name, num_microbatches, kind] = {
                    value: difference(theirs[value], ours[value]) for value in theirs
                }
            if not unscaled:
                theirs = of_torch(program, path, kind, mlp(NUM_BLOCKS).to(dtype), batch, target, scale_grads=False)
                unscaled = {value: difference(theirs[value], ours[value]) for value in theirs}
    return found, unscaled


@long
def test_torch_runs_our_files_and_finds_our_gradients(tmp_path: Path) -> None:
    programs = {
        (name, count): generate(name, num_ranks=2, num_microbatches=count) for name in NAMES for count, _ in ALLOWED
    }
    for (name, count), program in programs.items():
        for kind in FORMATS:
            text = for_torch(program, communication=kind == "compute_comms")
            file_of(tmp_path, name, count, kind).write_text(text)
    (first, unscaled), (second, also_unscaled) = launch(run_both, programs, tmp_path, num_ranks=2, timeout=240)
    for (count, _), allowed in ALLOWED.items():
        for name, kind in itertools.product(NAMES, FORMATS):
            run = name, count, kind
            off = first[run] | second[run]
            assert len(first[run]) + len(second[run]) == len(off) == NUM_BLOCKS * PER_BLOCK
            worst = max(off, key=off.__getitem__)
            assert off[worst] <= allowed, f"{run}: {worst}"
    # PyTorch divides by the number of microbatches only where it is told to (scale_grads), and the comparison sees it.
    off = unscaled | also_unscaled
    assert off == pytest.approx(dict.fromkeys(off, 4 - 1), rel=1e-5)
