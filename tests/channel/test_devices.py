"""Devices of ranks: how many ranks there are, where each computes, what carries their messages, and what is said."""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import drumline as dl
from drumline.channel.devices import visible as here
from drumline.channel.devices.choice import (
    AskedDevice,
    VisibleDevices,
    default_num_ranks,
    device_of_rank,
    kind_for,
    refusal,
    too_many_text,
)
from drumline.channel.devices.rank_devices import DeviceCard, RankDevices, chosen_transport
from drumline.channel.launch import launch as launching
from drumline.core.errors import LaunchError, UsageError
from drumline.engine.ranks import transports
from refused import misses, refused, saying

NONE, ONE, TWO, FOUR = VisibleDevices(), VisibleDevices("cuda", 1), VisibleDevices("cuda", 2), VisibleDevices("cuda", 4)
HIDDEN, APPLE = VisibleDevices(hidden_by="CUDA_VISIBLE_DEVICES"), VisibleDevices("mps", 1)


@pytest.mark.parametrize(
    ("there", "asked", "lines", "expected"),
    [
        (NONE, "", 1, ["cpu", "cpu"]),
        (HIDDEN, "", 1, ["cpu", "cpu"]),
        (NONE, "", 4, ["cpu", "cpu"]),
        (ONE, "", 1, ["cuda:0"]),
        (ONE, "cuda", 1, ["cuda:0"]),
        (ONE, "", 2, ["cuda:0"]),
        (FOUR, "", 1, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (FOUR, "", 2, ["cuda:0", "cuda:1"]),
        (FOUR, "", 3, ["cuda:0"]),
        (FOUR, "cuda:2", 1, ["cuda:2"]),
        (FOUR, "cpu", 1, ["cpu", "cpu"]),
        (APPLE, "", 1, ["mps:0"]),
    ],
)
def test_a_pipeline_has_a_rank_for_each_accelerator_or_two(
    there: VisibleDevices, asked: str, lines: int, expected: list[str]
) -> None:
    named = AskedDevice.read(asked)
    count = default_num_ranks(there, named, lines)
    assert [str(device_of_rank(rank, there, named)) for rank in range(count)] == expected


def test_ranks_beyond_the_accelerators_begin_with_the_first_again() -> None:
    asked = AskedDevice()
    for there, count in itertools.product((ONE, TWO, FOUR), (1, 2, 3, 5, 8)):
        places = [device_of_rank(rank, there, asked).index for rank in range(count)]
        uses = [places.count(index) for index in range(there.count)]
        assert sum(uses) == count
        assert max(uses) - min(uses) <= 1
        assert bool(too_many_text(count, there, asked)) == (max(uses) > 1)
    assert too_many_text(3, TWO, asked).startswith("3 ranks were asked for, and this process sees cuda:0 and cuda:1")
    assert too_many_text(2, TWO, AskedDevice("cuda", 1)) == (
        "2 ranks were asked for on cuda:1 alone: they share it, which is slow"
    )
    assert not too_many_text(1, TWO, AskedDevice("cuda", 1))
    assert not too_many_text(8, NONE, asked)
    assert not too_many_text(8, TWO, AskedDevice("cpu"))


def test_several_processes_do_not_share_an_apple_gpu() -> None:
    wrong = refusal(AskedDevice("mps"), APPLE, 2)
    assert wrong is not None
    assert not misses(wrong, saying("2 processes on mps", fix="device cpu"))
    assert refusal(AskedDevice("mps"), APPLE, 1) is None
    assert (kind_for(1, APPLE), kind_for(2, APPLE), kind_for(2, ONE), kind_for(1, NONE)) == (
        "mps",
        "cpu",
        "cuda",
        "cpu",
    )
    assert "compute on the CPU" in too_many_text(2, APPLE, AskedDevice())


@pytest.mark.parametrize(
    ("asked", "there", "error", "fix"),
    [
        ("cuda", NONE, "'cuda', but PyTorch finds no such device: this process sees no accelerator", ""),
        ("cuda", HIDDEN, r"\(CUDA_VISIBLE_DEVICES lists none\)", "unset CUDA_VISIBLE_DEVICES"),
        ("cuda:2", TWO, "'cuda:2', but this process sees cuda:0 and cuda:1", ""),
        ("mps", TWO, "'mps', but PyTorch finds no such device: this process sees cuda:0 and cuda:1", ""),
        ("xpu:0", NONE, "'xpu:0', but PyTorch finds no such device", ""),
        ("cuda", APPLE, "this process sees mps:0", ""),
        ("cpu:1", TWO, "'cpu:1'", ""),
    ],
)
def test_devices_that_are_not_there_are_refused_by_name(
    asked: str, there: VisibleDevices, error: str, fix: str
) -> None:
    wrong = refusal(AskedDevice.read(asked), there)
    assert wrong is not None
    assert not misses(wrong, saying(error, fix=fix))


@pytest.mark.parametrize("asked", ["", "cpu", "cpu:0", "cuda", "cuda:0", "cuda:1"])
def test_devices_that_are_there_are_taken(asked: str) -> None:
    assert refusal(AskedDevice.read(asked), TWO, 2) is None


@pytest.mark.parametrize(
    ("text", "fix"),
    [("gpu", "use cuda"), ("gpu:1", "use cuda:1"), ("rocm", "use cuda"), ("hip:0", "use cuda:0"), ("CUDA", "use cuda"),
     ("cuda:", ""), ("cuda:x", ""), ("cuda 0", ""), ("metal:1", "use cuda:1"), ("0", ""), (":0", "")],
)  # fmt: skip
def test_other_spellings_are_refused_with_the_one_that_is_meant(text: str, fix: str) -> None:
    with refused(UsageError, "device is", expected="such as cpu or cuda:0", fix=fix) as caught:
        AskedDevice.read(text, TWO)
    assert bool(caught.value.fix) == bool(fix)


def test_another_name_for_an_accelerator_that_is_not_there_has_no_fix() -> None:
    with refused(UsageError, "device is 'gpu'") as caught:
        AskedDevice.read("gpu", NONE)
    assert not caught.value.fix


def cards(*places: str) -> tuple[DeviceCard, ...]:
    """Return cards of ranks on "host/device" or "host/device/identity"."""
    return tuple(DeviceCard(*place.split("/")) for place in places)


@pytest.mark.parametrize(
    ("places", "transport", "line"),
    [
        (["a/cpu", "a/cpu"], "shared-memory", "ranks 0-1 on cpu, by shared-memory"),
        (["a/cpu", "b/cpu"], "gloo", "host 0: rank 0 on cpu; host 1: rank 1 on cpu; by gloo"),
        (["a/cuda:0", "a/cuda:1"], "nccl", "rank 0 on cuda:0, rank 1 on cuda:1, by nccl"),
        (["a/cuda:0"] * 2, "shared-memory", "ranks 0-1 on cuda:0, by shared-memory: 2 ranks share cuda:0"),
        (
            ["a/cuda:0", "a/cuda:1", "a/cuda:0"],
            "shared-memory",
            "rank 0 on cuda:0, rank 1 on cuda:1, rank 2 on cuda:0, by shared-memory: 2 ranks share cuda:0",
        ),
        (
            ["a/cuda:0", "a/cuda:1", "b/cuda:0"],
            "nccl",
            "host 0: rank 0 on cuda:0, rank 1 on cuda:1; host 1: rank 2 on cuda:0; by nccl",
        ),
        (
            ["a/cuda:0", "b/cuda:0", "b/cuda:0"],
            "gloo",
            "host 0: rank 0 on cuda:0; host 1: ranks 1-2 on cuda:0; by gloo: 2 ranks share cuda:0",
        ),
        (["a/mps:0"], "shared-memory", "rank 0 on mps:0, by shared-memory"),
    ],
)
def test_one_line_says_where_every_rank_computes(places: list[str], transport: str, line: str) -> None:
    kind = "nccl" if "cuda" in places[0] else "gloo"
    ranks = cards(*places)
    if len(ranks) > 1:
        assert chosen_transport("auto", ranks, [range(len(ranks))], by_device=kind) == transport
    devices = RankDevices(ranks, transport)
    assert str(devices) == line
    assert bool(devices.warning) == ("share" in line.rpartition("shared-memory")[2])
    told = devices.to_json()
    assert (told["text"], told["transport"]) == (line, transport)
    assert [rank["device"] for rank in told["ranks"]] == [card.device for card in ranks]


def test_what_is_asked_for_is_the_transport() -> None:
    shared = cards("a/cuda:0", "a/cuda:0")
    assert chosen_transport("nccl", shared, [[0, 1]], by_device="nccl") == "nccl"


def test_lines_of_a_mesh_have_one_transport_that_suits_all_of_them() -> None:
    apart = cards("a/cpu", "a/cpu", "b/cpu", "b/cpu")
    assert chosen_transport("auto", apart, [[0, 1], [2, 3]], by_device="gloo") == "shared-memory"
    assert chosen_transport("auto", apart, [[0, 2], [1, 3]], by_device="gloo") == "gloo"
    # The first host has one device for its two ranks, the second has two.
    uneven = cards("a/cuda:0", "a/cuda:0", "b/cuda:0", "b/cuda:1")
    assert chosen_transport("auto", uneven, [[0, 1], [2, 3]], by_device="nccl") == "gloo"


def test_processes_that_each_see_one_device_do_not_share_it() -> None:
    own = tuple(DeviceCard("a", "cuda:0", f"GPU-{at}", f"CUDA_VISIBLE_DEVICES={at}") for at in (0, 1))
    assert chosen_transport("auto", own, [[0, 1]], by_device="nccl") == "nccl"
    devices = RankDevices(own, "nccl")
    assert not devices.shared
    assert str(devices) == (
        "rank 0 on cuda:0 of CUDA_VISIBLE_DEVICES=0, rank 1 on cuda:0 of CUDA_VISIBLE_DEVICES=1, by nccl"
    )
    same = (DeviceCard("a", "cuda:0", "GPU-1", "CUDA_VISIBLE_DEVICES=0"), DeviceCard("b", "cuda:3", "GPU-1"))
    assert RankDevices(same, "gloo").shared == {0: [0, 1]}  # two containers of one machine


def test_nccl_takes_no_two_ranks_on_a_device_for_the_same_host() -> None:
    for count, ranks in itertools.product((1, 2, 3), range(1, 8)):
        devices = RankDevices(cards(*(f"a/cuda:{rank % count}" for rank in range(ranks))), "nccl")
        names = [(devices.nccl_host(rank), card.device) for rank, card in enumerate(devices.cards)]
        assert len(set(names)) == ranks
        assert (names[0][0] == "") == (ranks <= count)  # ranks with devices of their own keep what NCCL finds


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let PyTorch say that there are two CUDA devices; returns which were made the current one."""
    current = [0]
    answers = {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "device_count": lambda: 2,
        "current_device_index": lambda: current[-1],
        "set_device_index": current.append,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.accelerator, name, answer)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NCCL_HOSTID", "NCCL_IB_DISABLE"):
        monkeypatch.setenv(name, "")  # to put back what a rank sets
        monkeypatch.delenv(name)
    return current


@pytest.mark.torch
def test_a_rank_takes_the_device_of_its_number_on_its_host(
    two_devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert here.visible() == TWO
    assert here.in_use(torch.device("cuda")) == torch.device("cuda", 0)
    assert two_devices == [0]  # nothing to change
    for rank, index in ((1, 1), (2, 0), (3, 1)):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert here.in_use(torch.device("cuda")) == torch.device("cuda", index)
        assert two_devices[-1] == index
        assert transports.default_device() == torch.device("cuda", index)
    assert here.in_use(torch.device("cuda", 0)) == torch.device("cuda", 0)  # whoever names one gets it
    assert two_devices[-1] == 0
    assert here.in_use(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.torch
@pytest.mark.parametrize(("ranks", "rank", "host"), [(2, 1, None), (3, 0, "drumline-0-0"), (3, 2, "drumline-0-1")])
def test_launched_ranks_that_share_a_device_are_hosts_of_their_own_for_nccl(
    two_devices: list[int], monkeypatch: pytest.MonkeyPatch, ranks: int, rank: int, host: str | None
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    here.take_own()
    assert os.environ.get("NCCL_HOSTID") == host
    assert two_devices[-1] == rank % 2


@pytest.mark.torch
def test_a_host_that_a_user_names_for_nccl_stays(two_devices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for before, after in ((None, "drumline-0-1"), ("drumline-0-0", "drumline-0-1"), ("mine", "mine")):
        monkeypatch.delenv("NCCL_HOSTID", raising=False)
        if before is not None:
            monkeypatch.setenv("NCCL_HOSTID", before)
        here.tell_nccl("drumline-0-1", is_one_host=False)
        assert os.environ["NCCL_HOSTID"] == after
    assert "NCCL_IB_DISABLE" not in os.environ


@pytest.mark.torch
def test_launch_starts_a_rank_for_each_device(two_devices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert here.group_backend() == "cpu:gloo,cuda:nccl"
    assert (launching._num_ranks(None), launching._num_ranks("nccl"), launching._num_ranks("gloo")) == (2, 2, 2)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert (launching._num_ranks(None), launching._num_ranks("gloo")) == (1, 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert here.group_backend() == "gloo"
    assert launching._num_ranks(None) == 2


@pytest.mark.torch
def test_nccl_without_any_device_is_refused() -> None:
    with refused(LaunchError, "2 ranks with backend nccl", fix="gloo"):
        dl.launch(os.getpid, num_ranks=2, backend="nccl")


@pytest.mark.torch
@pytest.mark.parametrize(("variable", "value"), [("CUDA_VISIBLE_DEVICES", ""), ("HIP_VISIBLE_DEVICES", "-1")])
def test_a_variable_that_hides_all_devices_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert here.visible() == NONE
    monkeypatch.setenv(variable, value)
    assert here.visible() == VisibleDevices(hidden_by=variable)
    with refused(UsageError, "device is 'cuda'", fix=variable):
        here.device_named("cuda")


@pytest.mark.torch
def test_a_model_left_on_the_cpu_beside_devices_is_warned_of_once(
    two_devices: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    here._warn.cache_clear()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    options: dict[str, Any] = {"loss_fn": torch.nn.functional.mse_loss, "num_microbatches": 1}
    with caplog.at_level(logging.WARNING, "drumline"):
        dl.Pipeline(model, device="cpu", **options)
        assert not caplog.records
        for _ in range(2):
            pipe = dl.Pipeline(model, **options)
    assert str(pipe.devices) == "rank 0 on cpu, in-process"
    (record,) = caplog.records
    assert "this process sees cuda:0 and cuda:1. Pass device='cuda'" in record.getMessage()


def told_by_rank(folder: str) -> list[tuple[str, str | None, list[str]]]:
    """Make a pipeline on the CPU, and another whose ranks say that they share a device.

    Returns of each what it says of devices, the rank's host for NCCL, and warnings.
    """
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("drumline").addHandler(handler)
    told = []
    claims = DeviceCard("here", "cuda:0", "GPU-1")
    for name, patch in (
        ("own", mock.MagicMock()),
        ("shared", mock.patch.object(transports, "card_of", return_value=claims)),
    ):
        heard.clear()
        torch.manual_seed(0)
        with (
            patch,
            dl.Pipeline(
                torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
                loss_fn=torch.nn.functional.mse_loss,
                num_microbatches=2,
                record=f"{folder}/{name}",
            ) as pipe,
        ):
            pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))
            told.append((str(pipe.devices), os.environ.get("NCCL_HOSTID"), list(heard)))
    return told


@pytest.mark.torch
@pytest.mark.features("record")
def test_ranks_tell_each_other_their_devices_and_write_them_down(tmp_path: Path) -> None:
    first, second = dl.launch(told_by_rank, str(tmp_path), num_ranks=2)
    line = "ranks 0-1 on cpu, by shared-memory"
    assert first[0] == second[0] == (line, None, [])
    assert dl.read_run(tmp_path / "own").environment["devices"] == {
        "text": line,
        "transport": "shared-memory",
        "ranks": [{"rank": rank, "host": 0, "device": "cpu", "shared_with": []} for rank in (0, 1)],
    }
    shared = "ranks 0-1 on cuda:0, by shared-memory: 2 ranks share cuda:0"
    assert first[1][:2] == (shared, "drumline-0-0")
    assert second[1] == (shared, "drumline-0-1", [])
    (warning,) = first[1][2]
    assert warning.startswith(f"{shared}. They compute by turns and their messages go through the host")
    assert "Start 1 instead of 2" in warning
    written = dl.read_run(tmp_path / "shared").environment["devices"]
    assert [rank["shared_with"] for rank in written["ranks"]] == [[1], [0]]
