"""Which devices runs use on this machine, checked by real runs: needs a CUDA device, PyTorch and numpy, no pytest.

    PYTHONPATH=src:tests python tests/device_checks.py [NAME ...]

Each check prints what it saw. `tests/train/test_device_checks.py` runs them under pytest. The machine may have any
number of GPUs: what needs two of them says that it was left out.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl

SMALL = "--steps 3 --batch 8 -m 4 --sequence 32 --set model.num_layers=4 --set model.hidden=64 --set model.num_heads=2"
COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NCCL_HOSTID", "NCCL_IB_DISABLE")


def command(
    words: str, folder: Path, *, env: Mapping[str, str] | None = None, module: str = "drumline", code: int = 0
) -> tuple[str, str]:
    """Run a command of ours in a folder, and return what it wrote to stdout and stderr."""
    here = Path(__file__).parent
    paths = [str(here.parent / "src"), str(here), os.environ.get("PYTHONPATH", "")]
    plain = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    ran = subprocess.run(
        [sys.executable, "-m", module, *words.split()],
        env={**plain, "PYTHONPATH": os.pathsep.join(paths), **(env or {})},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == code, f"{words}: exit code {ran.returncode}\n{ran.stdout[-3000:]}\n{ran.stderr[-5000:]}"
    return ran.stdout, ran.stderr


def trained(words: str, folder: Path, **more: Any) -> tuple[dict[str, Any], str]:
    """Train a small GPT and return the result with what was said; result, first line and folder must agree."""
    name = f"run{len(list(folder.iterdir()))}"
    out, err = command(f"train {SMALL} {words} --out {name} --json", folder, **more)
    found: dict[str, Any] = json.loads(out)
    lines = err.splitlines()
    first_step = next(at for at, line in enumerate(lines) if line.startswith("step "))
    assert found["devices"]["text"] in lines[:first_step], err
    written = json.loads((folder / name / "environment.json").read_text())["devices"]
    assert written == found["devices"], written
    assert all(map(math.isfinite, found["losses"])), found["losses"]
    assert len(found["losses"]) == 3, found["losses"]
    return found, err


def equal_losses(entry: dict[str, Any], other: dict[str, Any]) -> None:
    """Assert that two runs had the same losses, up to the rounding of float32 on a GPU."""
    for a, b in zip(entry["losses"], other["losses"], strict=True):
        assert math.isclose(a, b, rel_tol=1e-3), (entry["losses"], other["losses"])


def every_device(folder: Path) -> str:
    """Without --ranks, there is a rank on each GPU."""
    found, _ = trained("--set model.num_layers=8", folder)
    places = [rank["device"] for rank in found["devices"]["ranks"]]
    assert places == [f"cuda:{index}" for index in range(len(places))], places
    assert len(places) == min(COUNT, 10), places  # 8 layers, embedding and head
    assert found["devices"]["transport"] == ("in-process" if COUNT == 1 else "nccl")
    return str(found["devices"]["text"])


def shared_device(folder: Path) -> str:
    """More ranks than GPUs share them over every transport, and learn as one rank does; a warning says so."""
    alone, _ = trained("--ranks 1", folder)
    said = []
    for transport, hidden in (("auto", "0"), ("nccl", "0"), ("gloo", "0")):
        env = {"CUDA_VISIBLE_DEVICES": hidden}
        found, err = trained(f"--ranks 2 --set pipeline.transport={transport}", folder, env=env)
        text = found["devices"]["text"]
        wanted = "shared-memory" if transport == "auto" else transport
        assert text == f"ranks 0-1 on cuda:0, by {wanted}: 2 ranks share cuda:0", text
        assert [rank["shared_with"] for rank in found["devices"]["ranks"]] == [[1], [0]]
        assert "2 ranks were asked for, and this process sees cuda:0: they share it" in err, err
        assert "Start 1 instead of 2" in err, err
        equal_losses(found, alone)
        said.append(text)
    return "; ".join(said)


def shared_mesh(folder: Path) -> str:
    """Lines of a mesh that share a GPU add up their gradients by NCCL."""
    alone, _ = trained("--ranks 1", folder)
    found, _ = trained("--ranks 1 -m 2 --set mesh.data=2", folder, env={"CUDA_VISIBLE_DEVICES": "0"})
    assert found["devices"]["text"].endswith("2 ranks share cuda:0"), found["devices"]
    equal_losses(found, alone)
    return str(found["devices"]["text"])


def cpu_when_asked(folder: Path) -> str:
    """The CPU is used if it is named or if the environment hides the GPUs, and only then."""
    named, _ = trained("--device cpu", folder)
    hidden, _ = trained("", folder, env={"CUDA_VISIBLE_DEVICES": ""})
    for found in (named, hidden):
        assert found["devices"]["text"] == "ranks 0-1 on cpu, by shared-memory", found["devices"]
    equal_losses(named, hidden)
    return str(named["devices"]["text"])


def named_device(folder: Path) -> str:
    """A device with a number is the one that is used, and what is not there is refused."""
    last = COUNT - 1
    found, _ = trained(f"--device cuda:{last}", folder)
    assert [rank["device"] for rank in found["devices"]["ranks"]] == [f"cuda:{last}"]
    both, err = trained(f"--device cuda:{last} --ranks 2", folder)
    assert both["devices"]["text"].endswith(f"2 ranks share cuda:{last}"), both["devices"]
    assert f"on cuda:{last} alone: they share it" in err, err
    equal_losses(found, both)
    refusals = {
        f"--device cuda:{COUNT}": ({}, f"device is 'cuda:{COUNT}', but this process sees"),
        "--device mps": ({}, "device is 'mps', but PyTorch finds no such device"),
        "--device gpu": ({}, "use cuda"),
        "--device cuda": ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES lists none"),
    }
    for words, (env, error) in refusals.items():
        _, err = command(f"train {SMALL} {words} --out refused", folder, env=env, code=2)
        assert error in " ".join(err.split()), err
    return f"cuda:{last}; refused: {', '.join(refusals)}"


def needed_ranks(folder: Path) -> str:
    """A schedule that needs two ranks gets them on one GPU: they take turns in one process."""
    found, err = trained("--schedule chimera", folder, env={"CUDA_VISIBLE_DEVICES": "0"})
    assert found["devices"]["text"] == "ranks 0-1 on cuda:0, in-process", found["devices"]
    assert "the settings need 2 ranks, and this process sees cuda:0: they take turns on cuda:0" in err, err
    return str(found["devices"]["text"])


def torchrun(folder: Path) -> str:
    """Under torchrun there is a rank for each process, on the GPU of its LOCAL_RANK."""
    words = f"--standalone --nproc-per-node 2 -m drumline train {SMALL} --out torchrun --json"
    out, _ = command(words, folder, module="torch.distributed.run")
    devices = json.loads(out[out.index("{") :])["devices"]
    assert [rank["device"] for rank in devices["ranks"]] == ["cuda:0", f"cuda:{1 % COUNT}"], devices
    assert ("share" in devices["text"]) == (COUNT == 1), devices
    return str(devices["text"])


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


def _batch() -> Tensor:
    return torch.linspace(-1, 1, 8 * 16).reshape(8, 16)


def on_rank(transport: str) -> tuple[str, dict[str, Tensor], float]:
    """Run a step on this rank's GPU, and a sum over NCCL beside it."""
    own = torch.ones(1, device="cuda") * (dist.get_rank() + 1)
    dist.all_reduce(own)
    with dl.Pipeline(
        _model(), loss_fn=functional.mse_loss, num_microbatches=4, transport=transport, device="cuda"
    ) as pipe:
        pipe.step(_batch().cuda(), target=_batch().flip(1).cuda())
        gradients = {name: param.grad.cpu() for name, param in pipe.named_parameters() if param.grad is not None}
        return str(pipe.devices), gradients, own.item()


def launched(folder: Path) -> str:
    """`dl.launch` starts a rank on each GPU; two that share one have the gradients of one process, and NCCL."""
    model, x = _model().cuda(), _batch().cuda()
    for rows, wanted in zip(x.chunk(4), x.flip(1).chunk(4), strict=True):
        torch.autograd.backward(functional.mse_loss(model(rows), wanted) / 4)
    expected = {name: param.grad.cpu() for name, param in model.named_parameters() if param.grad is not None}
    said = []
    for transport in ("auto", "nccl", "gloo"):
        ranks = dl.launch(on_rank, transport, num_ranks=2)
        gradients = {name: value for _, named, _ in ranks for name, value in named.items()}
        assert gradients.keys() == expected.keys(), gradients.keys()
        for name, value in expected.items():
            torch.testing.assert_close(gradients[name], value, rtol=1e-4, atol=1e-6)
        assert [total for _, _, total in ranks] == [3.0, 3.0], ranks
        said.append(ranks[0][0])
    every = dl.launch(dist.get_world_size)
    assert every == [COUNT] * COUNT, every
    return "; ".join(said)


def idle_devices(folder: Path) -> str:
    """verify and demo say that they compute on the CPU, and still match one process to the last bit."""
    out, _ = command("verify 1f1b --microbatches 4 --json", folder)
    found = json.loads(out)
    assert found["identical"], found
    assert found["devices"]["text"] == "ranks 0-1 on cpu, by shared-memory", found["devices"]
    out, _ = command("demo --epochs 1 --width 32 --out demo --json", folder)
    devices = json.loads(out)["devices"]
    assert devices["text"] == "ranks 0-1 on cpu, by shared-memory", devices
    return str(devices["text"])


def speed(folder: Path) -> str:
    """One rank on the GPU is quicker than two that share it, and these than two on the CPU."""
    words = "--steps 8 --evaluate-every 0 --set pipeline.check_model=false"
    rates: dict[str, float] = {}
    for name, more in {
        "1 rank": "--ranks 1",
        "2 share": "--ranks 2",
        "cpu": "--ranks 2 --device cpu --steps 3",
    }.items():
        out, _ = command(
            f"train {words} {more} --out speed-{len(rates)} --json", folder, env={"CUDA_VISIBLE_DEVICES": "0"}
        )
        found = json.loads(out)
        lines = map(json.loads, (folder / f"speed-{len(rates)}/metrics.jsonl").read_text().splitlines())
        each = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
        assert len(each) > 1, found
        rates[name] = statistics.median(each[1:])
    assert rates["1 rank"] > rates["cpu"], rates
    assert rates["2 share"] > rates["cpu"], rates
    return ", ".join(f"{name} {rate:,.0f} tokens/s" for name, rate in rates.items())


CHECKS: dict[str, Callable[[Path], str]] = {
    check.__name__: check
    for check in (
        every_device, shared_device, shared_mesh, cpu_when_asked, named_device, needed_ranks, torchrun, launched,
        idle_devices, speed,
    )
}  # fmt: skip


def main(names: list[str]) -> int:
    """Run the checks of these names, or all; returns how many failed."""
    if not COUNT:
        print("there is no CUDA device here")
        return 1
    print(f"{COUNT} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}", flush=True)
    failed = 0
    for name in names or CHECKS:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                said = CHECKS[name](Path(folder))
            except Exception as error:
                failed += 1
                said = f"FAILED {type(error).__name__}: {error}"
        print(f"{name} ({time.perf_counter() - began:.0f} s): {said}", flush=True)
    print(f"{failed} failed")
    return failed


if __name__ == "__main__":
    import device_checks  # so that ranks find its functions by name, without cloudpickle

    sys.exit(device_checks.main(sys.argv[1:]))
