"""The files of deploy/ are clean by shellcheck and yamllint; torchrun and `drumline train` accept what they start.

Neither Slurm nor Kubernetes nor a container engine is here: `srun`, `scontrol` and `torchrun` are stand-ins that write
down how they were called.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline.cli.main import main
from extras import needed
from some import some

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
STAND_INS = {
    "srun": 'shift; exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then echo node7; echo node8; else echo "$@" >>"$RECORD/scontrol"; fi',
    "torchrun": """printf '%s\\n' "$@" >"$RECORD/torchrun.$$"; mv "$RECORD/torchrun.$$" "$RECORD/torchrun"
        if [ -n "${LINGER:-}" ]; then
          trap 'mkdir -p "$OUT/checkpoints/step-00000007"; exit 1' TERM
          touch "$RECORD/lingers"; while :; do sleep 0.05; done
        fi""",
}


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of two nodes, with stand-ins for what starts it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (programs / name).chmod(0o755)
    (programs / "drumline-node").symlink_to(DEPLOY / "node.sh")
    (tmp_path / "plan.toml").write_text("[mesh]\npipeline = 4\n[batch]\nsequences = 8\nmicrobatch = 1\n")
    told = {"JOB_NODELIST": "node[7-8]", "JOB_NUM_NODES": "2", "JOB_ID": "31", "GPUS_ON_NODE": "2"}
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "RECORD": str(tmp_path),
        "DRUMLINE_DEPLOY": str(DEPLOY),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        **{f"SLURM_{name}": value for name, value in told.items()},
    }


def accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the words that torchrun got, and the settings that `drumline train` reads from its part of them."""
    words = (tmp_path / "torchrun").read_text().splitlines()
    at = words.index("-m")
    assert words[at : at + 3] == ["-m", "drumline", "train"]
    code = main([*words[at + 2 :], "--print-config"])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    from torch.distributed.run import get_args_parser

    assert get_args_parser().parse_args(words).training_script == "drumline"
    return words[:at], tomllib.loads(out)


def test_scripts_and_yaml_are_clean() -> None:
    if shutil.which("shellcheck") is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("no shellcheck on the PATH: install it")
    scripts = [*some(sorted(DEPLOY.glob("*.sh"))), ROOT / ".ci" / "run"]
    found = subprocess.run(["shellcheck", *map(str, scripts)], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")
    needed("yamllint", "dev")
    command = [sys.executable, "-m", "yamllint", "--strict", *map(str, some(DEPLOY.glob("*.yaml"))), ".yamllint.yaml"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.torch
def test_slurm_starts_a_run_stops_it_when_told_and_continues_it(
    tmp_path: Path, shell: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["bash", str(DEPLOY / "slurm.sh"), "plan.toml", "--save-every", "5"]
    job = subprocess.Popen(command, env={**shell, "LINGER": "1"}, cwd=tmp_path, text=True, stdout=subprocess.PIPE)
    while not (tmp_path / "lingers").exists():
        assert job.poll() is None
        time.sleep(0.01)
    torchrun, settings = accepted(tmp_path, capsys)
    rendezvous = ["--rdzv-backend", "drumline", "--rdzv-endpoint", "node7:29500", "--rdzv-id", "slurm-31"]
    assert torchrun == ["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "3", *rendezvous]
    assert settings["mesh"]["pipeline"] == 4
    assert settings["run"]["out"] == str(tmp_path / "out" / "slurm-31")
    assert settings["checkpoint"]["every"] == 5
    assert not settings["checkpoint"].get("resume")
    job.send_signal(signal.SIGUSR1)
    assert "continues when the job starts again" in job.communicate(timeout=60)[0]
    assert (job.returncode, (tmp_path / "scontrol").read_text()) == (0, "requeue 31\n")

    done = subprocess.run(command, env={**shell, "INTERFACE": "ib0"}, cwd=tmp_path, check=False)
    torchrun, settings = accepted(tmp_path, capsys)
    assert torchrun[-2:] == ["--rdzv-conf", "interface=ib0"]
    assert settings["pipeline"]["interface"] == "ib0"
    assert settings["checkpoint"]["resume"] == settings["run"]["out"]
    assert (done.returncode, (tmp_path / "scontrol").read_text()) == (0, "requeue 31\n")


FIELDS = {
    "TrainingRuntime": {"mlPolicy", "podGroupPolicy", "template"},
    "TrainJob": {
        "runtimeRef",
        "initializer",
        "trainer",
        "runtimePatches",
        "suspend",
        "activeDeadlineSeconds",
        "managedBy",
    },
}
TRAINER = {"image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode"}


@pytest.mark.torch
def test_a_pod_of_the_train_job_starts_its_part_of_the_run(
    tmp_path: Path, shell: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    yaml = needed("yaml", "dev")
    runtime, job = yaml.safe_load_all((DEPLOY / "trainjob.yaml").read_text())
    for value in (runtime, job):
        assert value["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        assert set(value["spec"]) <= FIELDS[value["kind"]]
    assert job["spec"]["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    trainer = job["spec"]["trainer"]
    assert set(trainer) <= TRAINER
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = node["template"]["spec"]["template"]["spec"]
    assert (node["name"], [container["name"] for container in pod["containers"]]) == ("node", ["node"])
    mounted = {volumeMount["name"] for volumeMount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}

    given = {value["name"]: value["value"] for value in trainer["env"]} | {"CONFIG": str(tmp_path / "plan.toml")}
    told = {"MASTER_ADDR": "gpt-node-0-0.gpt", "MASTER_PORT": "29400", "NNODES": "2", "NPROC_PER_NODE": "2"}
    pets = {f"PET_{name}": value for name, value in told.items()}
    subprocess.run(trainer["command"], env={**shell, **given, **pets}, check=True)
    torchrun, settings = accepted(tmp_path, capsys)
    assert torchrun[torchrun.index("--rdzv-endpoint") + 1] == "gpt-node-0-0.gpt:29400"
    assert (settings["mesh"]["pipeline"], settings["run"]["out"]) == (4, "/runs/gpt")


def instructions(file: str) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a container file, with their continued lines."""
    text = re.sub(r"\\\n\s*", "", (DEPLOY / file).read_text())
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            yield name, rest


@pytest.mark.parametrize("file", ["Containerfile", "Containerfile.serve"])
def test_a_container_file_copies_what_is_there_and_ends_as_a_plain_user(file: str) -> None:
    found = list(instructions(file))
    copied = [text for name, rest in found if name == "COPY" and "--from" not in rest for text in rest.split()[:-1]]
    for name in some(name for name in copied if not name.startswith("--")):
        assert (ROOT / name).exists(), name
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = re.findall(r'--constraint constraints.txt "\.\[([\w,]+)\]"', " ".join(rest for _, rest in found))
    assert set(wanted.split(",")) <= set(extras)
    assert [rest for name, rest in found if name == "USER"] == ["10001"]
