"""Ranks on two hosts train as one process does, listen on one interface alone, and name a link that is cut.

Ranks start on this machine and then move to their hosts, each with torchrun's variables: see test_torchrun for torchrun
itself.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from drumline.channel import mesh, rendezvous
from drumline.channel.launch.launch import launch
from drumline.core.errors import DrumlineError, RunError
from drumline.train.config.settings import (
    BatchSettings,
    CheckpointSettings,
    EvaluationSettings,
    MeshSettings,
    ModelSettings,
    PipelineSettings,
    RunSettings,
    TrainSettings,
)
from drumline.train.loop.progress import Told, Update
from drumline.train.loop.run import run_training
from drumline.train.loop.training import TrainResult
from hosts.namespaces import TwoHosts, two_hosts
from matrices import ALL, long
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 4


def settings_for(folder: Path, num_ranks: int = 2, *, steps: int = 2, **pipeline: Any) -> TrainSettings:
    return TrainSettings(
        model=ModelSettings(num_layers=2, hidden=64, num_heads=2),
        batch=BatchSettings(sequences=8, microbatch=2, sequence=128),  # messages larger than what fits beside a header
        mesh=MeshSettings(pipeline=num_ranks),
        pipeline=PipelineSettings(device="cpu", timeout=200, check_model=False, **pipeline),
        evaluation=EvaluationSettings(every=0),
        checkpoint=CheckpointSettings(every=2, at_end=False),
        run=RunSettings(steps=steps, threads=1, out=str(folder)),
    )


def in_one_process(folder: Path, num_ranks: int, *, steps: int = 2) -> list[float]:
    return run_training(
        settings_for(folder, num_ranks, steps=steps, transport="in-process"), tell=lambda told: None
    ).losses


def join(hosts: TwoHosts, host: int, *, rank: int, num_ranks: int, port: int, at: str = "") -> None:
    """Move this process to a host, as a rank that has connected to nobody."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    told = {"RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_ADDR": at or hosts.addresses[0], "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in told.items()})
    hosts.enter(host)


def train_everywhere(pairs: list[TwoHosts], folder: Path) -> list[tuple[Any, ...]]:
    """Train on hosts with one rank each, on both pairs at once, then with two; return losses and what listens here."""
    number = int(os.environ["RANK"])
    host, local = divmod(number, 2)
    found: list[tuple[Any, ...]] = []
    for hosts, num_ranks in ((pairs[local], 2), *((pair, 4) for pair in pairs if pair.ipv6 or ALL)):
        rank = host if num_ranks == 2 else number
        join(hosts, host, rank=rank, num_ranks=num_ranks, port=29500 + num_ranks)
        settings = settings_for(folder / f"{hosts.ipv6}-{num_ranks}", num_ranks)
        trained = run_training(settings, tell=lambda told: None)
        found.append((num_ranks, trained.losses, hosts.ipv6, hosts.listening(host)))
    join(pairs[0], 0, rank=number, num_ranks=4, port=29509, at="localhost")
    trained = run_training(settings_for(folder / "together", 4), tell=lambda told: None)
    found.append((4, trained.losses, None, pairs[0].listening(0)))
    join(pairs[0], host, rank=number, num_ranks=4, port=29510)
    try:
        settings = settings_for(folder / "wrong", 4, interface="wire7" if number == 3 else "wire0")
        found.append((run_training(settings, tell=lambda told: None),))
    except RunError as error:
        found.append((str(error),))
    return found


def test_two_hosts_train_as_one_process_does_and_listen_on_the_link_alone(tmp_path: Path) -> None:
    with two_hosts() as old, two_hosts(ipv6=True) as new:
        told = launch(train_everywhere, [old, new], tmp_path, num_ranks=4, timeout=800)
    links = {None: {"127.0.0.1"}, False: set(old.addresses), True: set(new.addresses)}
    expected = {num_ranks: in_one_process(tmp_path / f"one-{num_ranks}", num_ranks) for num_ranks in (2, 4)}
    for *runs, (refused,) in told:
        assert [(num_ranks, ipv6) for num_ranks, _, ipv6, _ in runs][-2:] == [(4, True), (4, None)]
        for num_ranks, losses, ipv6, listening in runs:
            assert losses == expected[num_ranks]
            assert {address for address, _ in some(listening)} <= links[ipv6]
        problem = "interface is 'wire7'; expected an interface of this host, or its address: lo (127.0.0.1, ::1), "
        assert refused.removeprefix("rank 3: ") == f"{problem}wire0 ({old.addresses[1]})"


def wait_for(path: Path) -> None:
    while not path.exists():  # as long as the launch may take
        time.sleep(0.01)


def train_and_cut(hosts: TwoHosts, folder: Path) -> tuple[str, TrainResult]:
    """Train until the link is cut, restore it, and continue; return the error and how the rest went."""
    host = int(os.environ["RANK"])
    setattr(mesh, "SILENCE", 1.0)  # noqa: B010 - seconds, for a short test
    rendezvous._KEEPALIVE = dict.fromkeys(rendezvous._KEEPALIVE, 1)
    join(hosts, host, rank=host, num_ranks=2, port=29500)

    def cut(told: Told) -> None:
        if isinstance(told, Update) and told.step == 3:  # one after a checkpoint
            hosts.cut()

    settings = settings_for(folder / "cut", steps=STEPS)
    error = ""
    try:
        run_training(settings, tell=cut)
    except DrumlineError as found:
        error = str(found)
    (folder / f"noticed-{host}").touch()
    if not host:
        wait_for(folder / "noticed-1")  # what is under way arrives once the link is back
        hosts.restore()
        (folder / "restored").touch()
    wait_for(folder / "restored")
    join(hosts, host, rank=host, num_ranks=2, port=29501)
    again = replace(settings, checkpoint=CheckpointSettings(resume=str(folder / "cut"), at_end=False))
    again = replace(again, run=replace(again.run, out=str(folder / "again")))
    return error, run_training(again, tell=lambda told: None)


@long
def test_a_cut_link_is_named_on_both_hosts_and_the_run_continues_after_it(tmp_path: Path) -> None:
    with two_hosts(ipv6=True) as hosts:
        told = launch(train_and_cut, hosts, tmp_path, num_ranks=2, timeout=800)
    expected = in_one_process(tmp_path / "one", 2, steps=STEPS)
    for rank, (error, rest) in enumerate(told):
        assert f"rank {1 - rank} can no longer be reached at {hosts.addresses[1 - rank]}" in error
        assert "the link between the hosts is cut, or that host is down" in error
        assert (rest.first_step, rest.losses) == (2, expected[2:])
