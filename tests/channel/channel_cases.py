"""What every channel must do, run by each rank of one launch: `main(transport, rank, num_ranks, port)`.

Starting ranks takes long, so one launch runs all cases, each rank prints what became of them as lines of JSON, and the
tests look at that. The cases that end in a failure come last, each over a channel of its own.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from drumline.channel.channel import Channel, Delivery, Wait
from drumline.channel.distributed import DistributedChannel
from drumline.channel.shared_memory import SharedMemoryChannel
from drumline.core.action import Action
from drumline.core.errors import MismatchError, RankFailed, WaitTimeout

Make = Callable[[], Channel]

NOT_COPYABLE = {"bit", "int1", "int2", "int3", "int4", "int5", "int6", "int7"}  # torch itself cannot copy these
NOT_COPYABLE |= {"uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7"}
NOT_COPYABLE |= {"qint8", "qint32", "quint8", "quint2x4", "quint4x2"}


def deadline(seconds: float = 300.0) -> int:
    return time.perf_counter_ns() + int(seconds * 1e9)


def receive(microbatch: int) -> Action:
    return Action.parse(f"1RECV_F{microbatch}")


def get(channel: Channel, action: Action, source: int, seconds: float = 300.0) -> Delivery:
    delivery = channel.take(action, source)
    while delivery is None:
        channel.block(Wait(channel.rank, Action.parse("1F0"), action, source), deadline(seconds))
        delivery = channel.take(action, source)
    return delivery


class Steps:
    """The same count of steps on every rank."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.step = 0

    def next(self) -> int:
        self.step += 1
        self.channel.begin(self.step)
        return self.step


# ---- what works ------------------------------------------------------------------------------------------------------


def order_is_kept(channel: Channel, steps: Steps) -> None:
    steps.next()
    for microbatch in range(12):
        if channel.rank == 0:
            channel.send(receive(microbatch), 1, (torch.full((3,), float(microbatch)),), microbatch)
        elif channel.rank == 1:
            channel.post(receive(microbatch), 0)
    if channel.rank == 1:
        for microbatch in range(12):
            delivery = get(channel, receive(microbatch), 0)
            assert delivery.form == microbatch
            assert delivery.tensors[0].tolist() == [float(microbatch)] * 3
            assert delivery.num_bytes == 12


def messages_can_be_taken_in_another_order(channel: Channel, steps: Steps) -> None:
    steps.next()
    if channel.rank == 0:
        for microbatch in range(20):
            channel.send(receive(microbatch), 1, (torch.full((3,), float(microbatch)),), None)
        channel.flush(deadline())
    elif channel.rank == 1:
        for microbatch in reversed(range(20)):
            assert get(channel, receive(microbatch), 0).tensors[0].tolist() == [float(microbatch)] * 3


def every_type_and_shape_arrives(channel: Channel, steps: Steps) -> None:
    steps.next()
    warnings.simplefilter("ignore")  # complex halves and quantized types say that they are experimental
    names = sorted(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))
    types = {getattr(torch, name) for name in names if name not in NOT_COPYABLE}
    messages: list[tuple[torch.Tensor, ...]] = []
    for dtype in sorted(types, key=str):
        for shape in ((), (0, 3), (3, 5)):
            noise = torch.arange(1, 1 + 16 * 15, dtype=torch.uint8)
            if dtype is torch.bool:
                noise %= 2
            size = int(torch.Size(shape).numel()) * dtype.itemsize
            messages.append((noise[:size].view(dtype).view(shape),))
    matrix = torch.arange(12.0).view(3, 4)
    number = torch.tensor([1 + 2j])
    messages += [
        (matrix.t(),),
        (matrix[:, ::2], torch.tensor(True), matrix[1:2].expand(5, 4)),
        (number.conj(), number.conj().imag),
        (matrix.clone().requires_grad_() * 2,),
        (),
    ]
    for index, message in enumerate(messages):
        if channel.rank == 0:
            channel.send(receive(index), 1, message, None)
        elif channel.rank == 1:
            delivery = get(channel, receive(index), 0)
            assert len(delivery.tensors) == len(message)
            for got, want in zip(delivery.tensors, message, strict=True):
                assert (got.dtype, got.shape, got.requires_grad) == (want.dtype, want.shape, False)
                assert got.is_contiguous()
                assert raw(got) == raw(want), f"{want.dtype} {want.shape}"


def raw(tensor: torch.Tensor) -> list[int]:
    """Return the bytes: NaNs are equal too."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return plain.view(-1).view(torch.uint8).tolist()


def shapes_and_forms_may_change(channel: Channel, steps: Steps) -> None:
    forms: list[Any] = [1, 1.0, True, None, {"a": [1]}, {"a": [1.0]}]
    for form in forms:
        steps.next()
        for length in (3, 7, 3):
            if channel.rank == 0:
                channel.send(receive(length), 1, (torch.ones(length), torch.zeros(2, length)), form)
        if channel.rank == 1:
            for length in (3, 7, 3):
                delivery = get(channel, receive(length), 0)
                assert [tuple(tensor.shape) for tensor in delivery.tensors] == [(length,), (2, length)]
                assert repr(delivery.form) == repr(form)


def more_layouts_than_are_remembered(channel: Channel, steps: Steps) -> None:
    steps.next()
    for form in range(1100):
        if channel.rank == 0:
            channel.send(receive(form), 1, (torch.full((2,), float(form)),), form)
        elif channel.rank == 1:
            delivery = get(channel, receive(form), 0)
            assert (delivery.form, delivery.tensors[0].tolist()) == (form, [float(form)] * 2)


def messages_may_grow(channel: Channel, steps: Steps) -> None:
    steps.next()
    lengths = [10, 100_000, 10, 1_000_000, 3_000_000, 10, 100_000, 3_000_000]
    for index, length in enumerate(lengths):
        if channel.rank == 0:
            channel.send(receive(index), 1, (torch.arange(length),), None)
    if channel.rank == 1:
        for index, length in enumerate(lengths):
            assert torch.equal(get(channel, receive(index), 0).tensors[0], torch.arange(length))


def a_rank_may_be_steps_ahead(channel: Channel, steps: Steps) -> None:
    first = steps.step + 1
    for _ in range(3):
        step = steps.next()
        if channel.rank == 0:
            channel.send(receive(0), 1, (torch.tensor(step),), None)
    if channel.rank == 0:
        channel.tell("three steps ahead", None)
        channel.hear("three steps ahead", deadline())
        channel.flush(deadline())
    else:
        channel.tell("three steps ahead", None)
        channel.hear("three steps ahead", deadline())
    if channel.rank == 1:
        for step in range(first, first + 3):
            channel.begin(step)
            assert get(channel, receive(0), 0).tensors[0].item() == step


def what_arrived_is_nobody_elses(channel: Channel, steps: Steps) -> None:
    steps.next()
    kept = []
    for microbatch in range(12):
        if channel.rank == 0:
            channel.send(receive(microbatch), 1, (torch.full((4,), float(microbatch)), torch.ones(2)), None)
        elif channel.rank == 1:
            kept.append(get(channel, receive(microbatch), 0).tensors)
            kept[-1][1].add_(1)
    for microbatch, (first, second) in enumerate(kept):
        assert first.tolist() == [float(microbatch)] * 4
        assert second.tolist() == [2.0, 2.0]
        assert (first._version, second._version) == (kept[0][0]._version, kept[0][0]._version + 1)


def inference_mode_makes_no_difference(channel: Channel, steps: Steps) -> None:
    for inference in (True, False, True):
        steps.next()
        with torch.inference_mode(inference):
            ones = torch.ones(5, 5)
            if channel.rank == 0:
                channel.send(receive(0), 1, (ones.t(),), "inference")
            elif channel.rank == 1:
                assert torch.equal(get(channel, receive(0), 0).tensors[0], ones)


def the_same_action_twice_comes_in_order(channel: Channel, steps: Steps) -> None:
    steps.next()
    both = Action.parse("0REDUCE_GRAD")
    if channel.rank == 0:
        for value in range(6):
            channel.send(both, 1, (torch.tensor(value),), None)
    elif channel.rank == 1:
        assert [get(channel, both, 0).tensors[0].item() for _ in range(6)] == list(range(6))


def everybody_sends_to_everybody(channel: Channel, steps: Steps) -> None:
    others = [rank for rank in range(channel.num_ranks) if rank != channel.rank]
    for _ in range(3):
        step = steps.next()
        for microbatch in range(10):
            for other in others:
                channel.send(receive(microbatch), other, (torch.tensor([channel.rank, step, microbatch]),), None)
        for other in others:
            for microbatch in range(10):
                assert get(channel, receive(microbatch), other).tensors[0].tolist() == [other, step, microbatch]
        channel.flush(deadline())


def words_reach_everybody(channel: Channel, steps: Steps) -> None:
    mine = [channel.rank]
    channel.tell("first", mine)
    channel.tell("second", bytes([channel.rank]) * 1_000_000)
    second, first = channel.hear("second", deadline()), channel.hear("first", deadline())
    assert second == [bytes([rank]) * 1_000_000 for rank in range(channel.num_ranks)]
    assert first == [[rank] for rank in range(channel.num_ranks)]
    assert first[channel.rank] is not mine


def stamps_are_in_order(channel: Channel, steps: Steps) -> None:
    steps.next()
    if channel.rank == 0:
        channel.send(receive(0), 1, (torch.ones(3),), None)
    elif channel.rank == 1:
        delivery = get(channel, receive(0), 0)
        assert delivery.sent_ns <= time.perf_counter_ns()
        # Between hosts clocks are compared by pings: good to a fraction of their round trip.
        assert delivery.made_ns <= delivery.sent_ns + 1_000_000_000


CASES = (
    order_is_kept,
    messages_can_be_taken_in_another_order,
    every_type_and_shape_arrives,
    shapes_and_forms_may_change,
    more_layouts_than_are_remembered,
    messages_may_grow,
    a_rank_may_be_steps_ahead,
    what_arrived_is_nobody_elses,
    inference_mode_makes_no_difference,
    the_same_action_twice_comes_in_order,
    everybody_sends_to_everybody,
    words_reach_everybody,
    stamps_are_in_order,
)


# ---- what fails, and how ---------------------------------------------------------------------------------------------


def what_was_never_taken_is_noticed(make: Make) -> str:
    channel = make()
    channel.begin(0)
    if channel.rank == 0:
        channel.send(receive(3), 1, (torch.ones(3),), None)
    channel.tell("sent", None)
    channel.hear("sent", deadline())
    try:
        channel.begin(1)
    except MismatchError as error:
        return error.error
    finally:
        channel.tell("noticed", None)
        channel.hear("noticed", deadline())
        channel.close()
    return ""


def a_wait_that_is_too_long_names_itself(make: Make) -> str:
    channel = make()
    channel.begin(0)
    text = ""
    if channel.rank == 1:
        try:
            get(channel, receive(3), 0, seconds=0.05)
        except WaitTimeout as error:
            text = str(error)
        try:
            channel.hear("nothing", deadline(0.05))
        except WaitTimeout as error:
            text += "|" + str(error)
    channel.tell("end", None)
    channel.hear("end", deadline())
    channel.close()
    return text


def an_abort_names_its_origin(make: Make) -> str:
    """Rank 0 waits for 1, which waits for 2, which fails: both must blame 2."""
    channel = make()
    channel.begin(0)
    try:
        if channel.rank == channel.num_ranks - 1:
            raise ZeroDivisionError("no such number")
        get(channel, receive(0), channel.rank + 1)
    except RankFailed as error:
        channel.abort(error, "1F0")
        return f"{error.rank}|{error}"
    except ZeroDivisionError as error:
        channel.abort(error, "2F7")
    finally:
        channel.close()
    return ""


def an_orderly_end_fails_only_those_who_wait(make: Make) -> str:
    channel = make()
    channel.begin(0)
    last = channel.num_ranks - 1
    if channel.rank == last:
        channel.tell("end", None)
        channel.close()
        return ""
    # The others still talk to each other.
    if channel.rank == 0:
        channel.send(receive(0), 1, (torch.ones(3),), None)
        channel.flush(deadline())
        channel.tell("end", None)
    else:
        assert get(channel, receive(0), 0).tensors[0].tolist() == [1.0] * 3
        channel.tell("end", None)
    channel.hear("end", deadline())
    try:
        get(channel, receive(9), last)
    except RankFailed as error:
        return f"{error.rank}|{error}"
    finally:
        channel.close()
    return ""


def a_killed_rank_is_named(make: Make) -> str:
    channel = make()
    channel.begin(0)
    if channel.rank == 1:
        # A child that outlives this rank has copies of its sockets, and must not hide its death.
        if (child := os.fork()) == 0:
            os.read(int(os.environ["RELEASE_FD"]), 1)
            os._exit(0)
        assert child
    for step in range(200):
        channel.begin(step)
        following, before = (channel.rank + 1) % channel.num_ranks, (channel.rank - 1) % channel.num_ranks
        try:
            channel.send(receive(0), following, (torch.ones(1000),), None)
            if channel.rank == 1 and step == 100:
                print(json.dumps({"a_killed_rank_is_named": f"maps {named_memory()}"}), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            get(channel, receive(0), before, seconds=300)
        except RankFailed as error:
            channel.abort(error, "1F0")
            channel.close()
            return f"{error.rank}|{error}"
    return ""


def named_memory() -> list[str]:
    with open("/proc/self/maps") as file:
        paths = {line.split()[-1] for line in file if "rw-s" in line}
    return sorted(path for path in paths if not path.startswith(("/memfd:", "(deleted)")))


FAILURES = (
    what_was_never_taken_is_noticed,
    a_wait_that_is_too_long_names_itself,
    an_abort_names_its_origin,
    an_orderly_end_fails_only_those_who_wait,
    a_killed_rank_is_named,
)


def main(transport: str, rank: int, num_ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=300))
    if transport != "shared-memory":
        group_store = PrefixStore("group", store)
        dist.init_process_group("gloo", store=group_store, rank=rank, world_size=num_ranks)

    def make() -> Channel:
        if transport == "shared-memory":
            return SharedMemoryChannel(rank, num_ranks, store=store)
        if transport == "gloo":  # every message by a transfer, the smallest too
            return DistributedChannel(rank, num_ranks, store=store, backend="gloo", small_bytes=0)
        return DistributedChannel(rank, num_ranks, store=store, backend="gloo", host=f"host {rank}")

    outcomes: dict[str, str] = {}
    channel = make()
    steps = Steps(channel)
    for case in CASES:
        try:
            case(channel, steps)
            channel.flush(deadline())
            channel.tell(f"{case.__name__} is over", None)
            channel.hear(f"{case.__name__} is over", deadline())
            outcomes[case.__name__] = ""
        except BaseException as error:
            # Whoever fails ends the launch for all: the others blame this rank, in this case.
            outcomes[case.__name__] = traceback.format_exc()
            channel.abort(error, case.__name__)
            channel.close()
            print(json.dumps(outcomes), flush=True)
            return
    channel.close()
    print(json.dumps(outcomes), flush=True)
    for failure in FAILURES:
        try:
            outcome = failure(make)
        except Exception:
            outcome = traceback.format_exc()
        print(json.dumps({failure.__name__: outcome}), flush=True)
