"""Nothing asks for CUDA by name: the same code trains on any accelerator that PyTorch knows."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROOM = TESTS.parent / "src" / "drumline"
MAY_NAME_IT = {
    "features/capture/cuda.py": "CUDA graphs, which have no general form",
    "runtime/clocks.py": "events that know their time, which have no general form",
    "runtime/backward/facts.py": "facts that are known of CUDA alone",
    "profile/calibrate/cuda.py": "CUDA graphs, and which number formats a GPU multiplies",
    "model/watch/surroundings.py": "torch's settings, whose names begin so",
    "model/loss/terms.py": "a list of a tensor's methods, `cpu` and `cuda` among them",
}


def named(source: str) -> Iterator[str]:
    """Yield where a module names CUDA: as `torch.cuda`, in an import, or as a device's type."""
    for node in ast.walk(ast.parse(source)) if "cuda" in source else ():
        match node:
            case ast.Attribute(attr="cuda"):
                pass
            case ast.Constant(value=str(text)) if re.fullmatch(r"cuda(:\d*)?", text):
                pass
            case ast.Import() | ast.ImportFrom() if "torch.cuda" in ast.unparse(node).replace(" import ", "."):
                pass
            case _:
                continue
        yield f"line {node.lineno}: {ast.unparse(node)}"


def test_no_module_but_those_of_cuda_names_it() -> None:
    files = {path.relative_to(ROOM).as_posix(): list(named(path.read_text("utf-8"))) for path in ROOM.rglob("*.py")}
    assert {name for name, found in files.items() if found} == set(MAY_NAME_IT), files


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "from torch import cuda",
        "import torch.cuda.nccl",
        'x.to("cuda")',
        'torch.device("cuda:0")',
        'torch.device(f"cuda:{rank}")',
        "x.cuda()",
        'if device.type == "cuda": pass',
    ],
)
def test_the_search_finds_every_way_to_name_it(line: str) -> None:
    assert list(named(line))


def _on_a_device() -> list[str]:
    """Train on another accelerator, which changes the process for good."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)  # all ranks take turns here
    import imagined_device

    return imagined_device.compared()


@pytest.mark.features("capture", "check", "lengths", "precision", "record", "saving", "stream", "validated")
@pytest.mark.torch
@pytest.mark.cold_ranks  # PyTorch counts devices in a process's first backward, which forked ranks have behind them
@pytest.mark.slow
def test_another_accelerator_trains_to_the_same_bits_as_the_host() -> None:
    from drumline.channel.launch.launch import launch

    lines = launch(_on_a_device, num_ranks=1)[0]
    assert [line.rsplit(maxsplit=2)[0] for line in lines[:-1]] == [
        "1f1b",
        "split backward",
        "two copies",
        "recomputed and weighed",
        "master weights",
        "validated after",
        "without a flush",
        "no labels",
        "found wrong",
        "drumline train",
    ]
    assert lines[-1].endswith("operators ran on imagined")
