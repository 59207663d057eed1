"""A script that `accelerate launch` starts on two ranks writes the adapter of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from extras import needed
from matrices import long

needed("trl", extra="trainers")
needed("peft", extra="tune")
safetensors: Any = needed("safetensors.torch", extra="hf")
ROOT = Path(__file__).parents[2]
LAUNCH = [
    "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
    "--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1",
    "--main_process_port", "0",
]  # fmt: skip
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(900)]


def adapter(folder: Path, *command: str) -> dict[str, torch.Tensor]:
    """Run a script of the examples, and return the adapter that it has saved."""
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, *command, str(folder)], env=environment, cwd=folder.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = "pipeline_idle_wait" in done.stdout + done.stderr
    assert ranks == ("-m" in command)
    tensors: dict[str, torch.Tensor] = safetensors.load_file(folder / "adapter_model.safetensors")
    return tensors


@long
def test_a_script_that_accelerate_launches_trains_as_in_one_process(tmp_path: Path) -> None:
    own = adapter(tmp_path / "ranks", *LAUNCH, str(ROOT / "examples" / "sft_after.py"))
    plain = adapter(tmp_path / "plain", str(ROOT / "examples" / "sft_before.py"))
    assert own.keys() == plain.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(own[name], tensor, rtol=1e-4, atol=1e-5)
