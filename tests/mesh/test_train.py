"""`drumline train` on meshes: the curve of one process, and a run folder that the report reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.core.measured.run import read_run
from drumline.train.config.files.settings_file import read_settings
from drumline.train.start import start
from matrices import ALL, long
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.matrix]

SMALL = {
    "run.steps": 3, "run.threads": 1, "model.num_layers": 2, "model.hidden": 16, "model.num_heads": 2,
    "batch.sequences": 8, "batch.sequence": 16, "batch.microbatch": 1, "evaluation.every": 3, "evaluation.batches": 1,
    "checkpoint.at_end": False, "pipeline.device": "cpu", "pipeline.timeout": 120.0,
}  # fmt: skip
MESHES = {
    "data": {"mesh.pipeline": 2, "mesh.data": 2, "memory.zero": 3},
    "tensor": {"mesh.pipeline": 1, "mesh.tensor": 2},
    "context": {"mesh.pipeline": 1, "mesh.context": 2},
}
if not ALL:  # test_plans has the others
    del MESHES["tensor"]


@long
def test_training_on_a_mesh_has_the_losses_of_one_process(tmp_path: Path) -> None:
    def losses(name: str, more: dict[str, object]) -> tuple[list[float], float]:
        settings = read_settings(None, {**SMALL, **more, "run.out": str(tmp_path / name)})
        trained = start(settings)
        return trained.losses, trained.evaluations[-1].loss

    plain, held_out = losses("alone", {"mesh.pipeline": 1})
    for name, mesh in some(MESHES.items()):
        found, evaluated = losses(name, dict(mesh))
        assert found == pytest.approx(plain, rel=1e-5)
        assert evaluated == pytest.approx(held_out, rel=1e-5)
        run = read_run(tmp_path / name)
        assert len(run.steps) == SMALL["run.steps"]
