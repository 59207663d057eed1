"""The line that `drumline plan` prints for a cluster trains here, in small, with the losses of one process."""

from __future__ import annotations

import contextlib
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from cluster_models import small_cluster
from drumline.cli.main import main
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.layouts.explain import brief
from drumline.plan.layouts.pins import Pins
from drumline.plan.layouts.planner import plan
from extras import needed
from matrices import ALL, long
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(600)]

TINY = Transformer("tiny", 4, 32, 4, vocabulary=300, sequence=32)
PINS = {
    "data": Pins(pipeline=2, data=2, tensor=1, zero=3, schedules=("zb-v",)),
    "tensor": Pins(pipeline=2, data=1, tensor=2, schedules=("1f1b",)),
    "context": Pins(pipeline=1, data=2, context=2, zero=1),
}
if not ALL:  # test_train has the others
    del PINS["context"]
TOY = {
    "name": "toy", "flops_per_second": 1e12, "memory_bytes": 4e9, "memory_bytes_per_second": 1e11,
    "node_bytes_per_second": 1e10, "network_bytes_per_second": 1e9, "devices_per_node": 4,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Numbers that can be compared, without dropout, and few of them.
EXACT = ["precision.compute=fp32", "precision.weights=fp32", "precision.master_weights=false", "evaluation.every=0"]
QUICK = ["--steps", "3", "--threads", "1", "--device", "cpu"]
ALONE = [
    "mesh.data=1", "mesh.tensor=1", "mesh.context=1", "mesh.expert=1", "mesh.pipeline=1", "memory.zero=0",
    "pipeline.schedule=1f1b", "pipeline.stages_per_rank=none", "pipeline.layers=[]",
]  # fmt: skip


def trained(capsys: pytest.CaptureFixture[str], line: str, *assignments: str, out: str) -> list[float]:
    """Run a line that a plan printed, with some settings changed, and return its losses."""
    program, *words = shlex.split(line)
    assert program == "drumline"
    given = [word for assignment in (*EXACT, *assignments) for word in ("--set", assignment)]
    capsys.readouterr()
    assert main([*words, *QUICK, *given, "--out", out, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return [float(loss) for loss in found["losses"]]


@long
def test_plans_of_a_small_cluster_train_as_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone: list[float] = []
    for name, pins in some(PINS.items()):
        told = brief(plan(TINY, small_cluster(4), batch=8, pins=pins)).launch.of("drumline")
        assert told.starts
        assert told.command == "drumline train plan.toml"
        with contextlib.chdir(tmp_path):
            Path("plan.toml").write_text(told.text)
            more = ["model.dropout=0"]
            alone = alone or trained(capsys, told.command, *more, *ALONE, out="alone")  # all plans train the same
            assert trained(capsys, told.command, *more, out=name) == pytest.approx(alone, rel=1e-5)
            assert len(alone) == 3


@long
def test_the_line_that_is_printed_for_a_mixture_of_experts_trains_as_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed("transformers", extra="hf")
    with contextlib.chdir(tmp_path):
        for file, values in (("mixtral.json", MIXTRAL), ("toy.json", TOY)):
            Path(file).write_text(json.dumps(values))
        words = ["plan", "mixtral.json", "--hardware", "toy.json", "--gpus", "4", "--batch", "8", "--brief"]
        words += ["--pipeline", "2", "--data", "2", "--expert", "2", "--zero", "0", "--recompute", "none"]
        assert main([*words, "--out", "plan.toml"]) == 0
        line = next(name for name in capsys.readouterr().out.splitlines() if name.startswith("Start it: "))
        line = line.removeprefix("Start it: ")
        found = trained(capsys, line, out="mesh")
        assert found == pytest.approx(trained(capsys, line, *ALONE, out="alone"), rel=1e-5)
