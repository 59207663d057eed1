"""What may enter and in which turn: by the bytes of the answer to come, and a microbatch for each request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drumline.serve.front.answer_sizes import AnswerSizes
from drumline.serve.front.service import FrontService
from drumline.serve.front.tickets import Ticket, signature_of
from drumline.serve.front.tuner import Tuner
from drumline.serve.logs import EventLog
from drumline.serve.wire.loops import run_to_end
from drumline.serve.wire.manifest import Manifest, ManifestStage, Sizes, Tensor
from drumline.serve.wire.protocol import stub
from served.carried import LIMIT, Carried, Code, failure
from served.services import WIDTH, channel_to, request_of, rows_of, serving, status_of, write_served

MOST_TURNS = 10  # microbatches that one row waits for behind a request of 4,096


def _turn_of_one_row(carried: Carried, before: int, row: Any) -> int:
    """Return how many microbatches enter between one row's arrival and its own, behind so many large requests."""

    async def run() -> int:
        large = [Ticket("large", {"x": rows_of(4096, at)}, timeout=600.0, loop=asyncio.get_running_loop())
                 for at in range(before)]  # fmt: skip
        for ticket in large:
            carried.queue.admit(ticket)
        carried.pipe.poke()
        while len(carried.calls) < 3 * before:
            await asyncio.sleep(0)
        entered = len(carried.calls)
        ticket = carried.send(row)
        carried.pipe.poke()
        await ticket.answer
        assert not any(ticket.answer.done() for ticket in large)
        turn = next(at for at, x in enumerate(carried.calls) if (x == row[0, 0]).any())
        await carried.pipe.close()
        return turn - entered

    return run_to_end(run())


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_one_row_behind_a_request_of_4096_waits_for_few_microbatches(rows: int) -> None:
    carried = Carried(rows=rows, window=4, max_wait=0.0)
    assert _turn_of_one_row(carried, 1, np.full((1, WIDTH), 7.0, np.float32)) <= MOST_TURNS


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_one_row_of_another_shape_waits_no_longer(rows: int) -> None:
    carried = Carried(rows=rows, window=4, max_wait=0.0)
    assert _turn_of_one_row(carried, 1, np.full((1, 3), 7.0, np.float32)) <= MOST_TURNS


def test_one_row_waits_for_one_microbatch_of_each_large_request() -> None:
    carried = Carried(rows=8, window=4, max_wait=0.0)
    assert _turn_of_one_row(carried, 6, np.full((1, WIDTH), 7.0, np.float32)) <= MOST_TURNS


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    """A stream of single rows leaves it its turn."""

    async def run() -> None:
        carried = Carried(rows=4, window=2, max_wait=0.0)
        large = carried.send(rows_of(64))
        small: list[Ticket] = []
        while not large.answer.done():
            small.append(carried.send(rows_of(1, len(small))))
            carried.pipe.poke()
            await asyncio.sleep(0)
            assert len(small) < 5000
        np.testing.assert_array_equal((await large.answer)["y"], 2 * rows_of(64))
        for seed, ticket in enumerate(small):
            np.testing.assert_array_equal((await ticket.answer)["y"], 2 * rows_of(1, seed))

    run_to_end(run())


def described(*outputs: Tensor) -> Manifest:
    """Return a manifest with one stage and these outputs; the input has rows of a length."""
    x = Tensor("x", "FP32", ("batch", "length"))
    stage = ManifestStage("model.onnx", {}, (x,), outputs)
    return Manifest("tanh", (x,), outputs, {"batch": Sizes(), "length": Sizes()}, (stage,))


class Context:
    """A call of a client: `end` says that the client has its answer, or has gone."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)

    def time_remaining(self) -> None:
        return None

    def end(self) -> None:
        for callback in self.callbacks:
            callback(self)


def _front(carried: Any, manifest: Manifest, max_bytes: int = LIMIT) -> FrontService:
    sizes = AnswerSizes(manifest, max_bytes)
    return FrontService(
        manifest, carried.pipe, carried, carried.metrics, EventLog(), sizes=sizes, max_rows=9999, timeout=60.0
    )


def test_an_answer_that_is_too_large_is_refused_before_anything_is_computed() -> None:
    async def run() -> None:
        carried: Any = Carried(rows=64)
        front = _front(carried, described(Tensor("y", "FP64", ("batch", "length", 1000))))
        code, why = await failure(front._infer(request_of({"x": rows_of(2)}), Context(), "r"))
        assert (code, why) == (
            Code.RESOURCE_EXHAUSTED,
            f"an answer of 128000 bytes, {LIMIT} are allowed; send fewer rows",
        )
        assert carried.calls == []
        assert carried.queue.bytes == 0

    run_to_end(run())


def test_bytes_of_an_answer_count_from_its_request_until_the_client_has_it() -> None:
    async def run() -> None:
        carried: Any = Carried(rows=64)
        carried.queue.max_bytes = 5000
        front = _front(carried, described(Tensor("y", "FP64", ("batch", "length", 20))))  # 1280 bytes a row
        first, second = Context(), Context()
        await front._infer(request_of({"x": rows_of(2)}), first, "r")
        assert carried.queue.bytes == 2 * (1280 + 32)
        code, why = await failure(front._infer(request_of({"x": rows_of(2)}), second, "r"))
        assert (code, why.startswith("requests and answers have 2624 bytes already")) == (Code.RESOURCE_EXHAUSTED, True)
        first.end()
        assert carried.queue.bytes == 0
        await front._infer(request_of({"x": rows_of(2)}), second, "r")
        second.end()
        assert carried.queue.bytes == 0

    run_to_end(run())


def test_answers_that_are_larger_than_shapes_say_are_refused_and_then_predicted() -> None:
    """No dimension of the input says how long an answer is."""

    async def run() -> None:
        carried: Any = Carried(rows=64)
        front = _front(carried, described(Tensor("y", "FP32", ("batch", "y_1"))), max_bytes=8000)
        x = rows_of(500)
        for calls in (8, 8):  # microbatches of the first request; none of the second one
            code, why = await failure(front._infer(request_of({"x": x}), Context(), "r"))
            assert (code, "send fewer rows" in why) == (Code.RESOURCE_EXHAUSTED, True)
            assert len(carried.calls) == calls
        await front._infer(request_of({"x": rows_of(20)}), Context(), "r")

    run_to_end(run())


def test_no_more_rows_travel_together_than_fit_into_a_message() -> None:
    manifest = described(Tensor("y", "FP32", ("batch", "length", 100)))
    sizes = AnswerSizes(manifest, LIMIT)
    signature = signature_of({"x": rows_of(1)})
    most = sizes.most_rows(signature)
    assert 0 < LIMIT - most * 4 * WIDTH * 100 < LIMIT / 4
    sizes.came(signature, 1, {"y": np.zeros((1, 2 * WIDTH, 100), np.float32)})
    assert sizes.most_rows(signature) == most // 2
    tuner = Tuner(1, 1000.0, 64, fitting=sizes.most_rows)
    tuner.add(signature, 1, [0.001])
    assert tuner.most_rows(signature) == most // 2
    assert Tuner(1, 1000.0, 64, 50, fitting=sizes.most_rows).most_rows(signature) == most // 2


@pytest.mark.slow
def test_a_refused_answer_is_not_logged_as_answered(tmp_path: Path) -> None:
    folder = write_served(tmp_path / "tanh")
    with serving(folder, max_queue_bytes=2000) as running, channel_to(running.address) as channel:
        infer = stub(channel, "ModelInfer")
        code, why = status_of(lambda: infer(request_of({"x": rows_of(40)}), timeout=60))
        assert (code, why) == (
            Code.RESOURCE_EXHAUSTED,
            "it has 2560 bytes with its answer, 2000 are allowed; send fewer rows",
        )
        for _ in range(5):  # bytes are given back each time
            assert status_of(lambda: infer(request_of({"x": rows_of(30)}), timeout=60))[0] is Code.OK
