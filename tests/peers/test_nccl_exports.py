"""PyTorch's own runtime runs our lowered files over NCCL, between ranks that share one GPU as separate hosts.

Over NCCL messages of one rank, or of one pair of ranks, wait for each other in posting order: what is lowered for one
queue per directed edge hangs here. Gradients are those of the whole model in one process.

On a machine without a GPU the same over gloo: `python tests/peers/test_nccl_exports.py gloo 2`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional

from drumline.core.lower.torch_text import for_torch
from drumline.core.program import Program
from drumline.model.block import blocks_of
from drumline.model.blocks.cut import cut
from drumline.schedules import generate
from nccl_ranks import NEEDS_NCCL
from torch_models import data, mlp

pytestmark = [pytest.mark.torch, *NEEDS_NCCL]

# One schedule of each placement that the export admits.
PLACEMENTS = {"1f1b": "linear", "interleaved-1f1b": "loop", "zb-v": "v"}
FORMATS = ("compute_only", "compute_comms")
NUM_MICROBATCHES, NUM_STEPS = 6, 2
LIMIT = 240  # seconds that all of them may take; a hang never ends


def gradients(model: nn.Module, batch: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return the whole model's gradients in one process, the mean over the microbatches."""
    for x, y in zip(batch.chunk(NUM_MICROBATCHES), target.chunk(NUM_MICROBATCHES), strict=True):
        (functional.mse_loss(model(x), y) / NUM_MICROBATCHES).backward()  # type: ignore[no-untyped-call]
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def run_file(program: Program, kind: str, device: torch.device) -> int:
    """Let PyTorch run one file on this rank and compare; return how many gradients were compared."""
    model = mlp(12).double().to(device)
    cuts = cut(blocks_of(model), program.num_stages)
    mine = program.placement.stages_of(dist.get_rank())
    modules = {index: nn.Sequential(*(block.module for block in cuts[index])) for index in mine}
    stages = [PipelineStage(module, at, program.num_stages, device) for at, module in modules.items()]
    kind_of_runtime: Any = schedules._PipelineScheduleRuntime  # which has no types
    runtime = kind_of_runtime(stages, program.num_microbatches, loss_fn=functional.mse_loss)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.csv"
        path.write_text(for_torch(program, communication=kind == "compute_comms"))
        runtime._load_csv(str(path), format=kind)
    compared = 0
    for step in range(NUM_STEPS):
        batch, target = (tensor.double().to(device) for tensor in data(2 * NUM_MICROBATCHES, seed=step))
        model.zero_grad()
        runtime.step(*([batch] if 0 in mine else []), target=target if program.num_stages - 1 in mine else None)
        expected = gradients(mlp(12).double().to(device), batch, target)
        for index in mine:
            for block in cuts[index]:
                for name, parameter in block.module.named_parameters():
                    whole = expected[f"{block.name}.{name}"]
                    torch.testing.assert_close(parameter.grad, whole, rtol=1e-9, atol=1e-12)
                    compared += 1
    return compared


def run_all(backend: str) -> None:
    """Run a file of each placement and format on this rank."""
    warnings.simplefilter("ignore")
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    eager: dict[str, Any] = {"device_id": device} if os.environ.get("EAGER") else {}
    dist.init_process_group(backend, timeout=timedelta(seconds=LIMIT), **eager)
    for name, placement in PLACEMENTS.items():
        program = generate(name, num_ranks=dist.get_world_size(), num_microbatches=NUM_MICROBATCHES)
        assert program.placement.name == placement
        for kind in FORMATS:
            compared = run_file(program, kind, device)
            assert compared >= NUM_STEPS
            print(f"rank {dist.get_rank()}: {name} {kind} is the same in {compared} gradients", flush=True)
    dist.destroy_process_group()


def launch(backend: str, num_ranks: int, *, eager: bool) -> list[str]:
    """Start the ranks, each as a host of its own, and return what they said; kill them when they take too long."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tests = Path(__file__).parents[1]
    common = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "EAGER": "1" if eager else "",
        "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent / "src")]),
    }
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.txt" for rank in range(num_ranks)]
        ranks = []
        for rank, log in enumerate(logs):
            own = {"RANK": str(rank), "LOCAL_RANK": "0", "NCCL_HOSTID": f"host{rank}"}
            with log.open("w") as out:
                command = [sys.executable, __file__, "--rank", backend]
                ranks.append(
                    subprocess.Popen(command, env={**os.environ, **common, **own}, stdout=out, stderr=subprocess.STDOUT)
                )
        until = time.monotonic() + LIMIT
        try:
            # One that fails leaves the others waiting for its messages.
            while None in (codes := [rank.poll() for rank in ranks]) and time.monotonic() < until and not any(codes):
                time.sleep(0.1)
        finally:
            for popen in ranks:
                popen.kill()
                popen.wait()
        said = [log.read_text() for log in logs]
    assert codes == [0] * num_ranks, "\n".join(text[-3000:] for text in said)
    return said


@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "eager"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_torch_runs_our_lowered_files_over_nccl(num_ranks: int, eager: bool) -> None:
    for text in launch("nccl", num_ranks, eager=eager):
        assert text.count("is the same") == len(PLACEMENTS) * len(FORMATS), text[-3000:]


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        run_all(sys.argv[2])
    else:
        print("".join(launch(sys.argv[1], int(sys.argv[2]), eager=False)), end="")
