"""Services to test: stages made by hand, which need no exporter, and a front that runs in a thread of the test."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from drumline.serve.front.lifecycle import RunningService, ServiceSettings, serve
from drumline.serve.wire.files import digest_of
from drumline.serve.wire.manifest import Manifest, ManifestStage, Sizes, Tensor
from drumline.serve.wire.protocol import InferRequest, stub
from drumline.serve.wire.tensors import Array, Arrays, put_inputs, read_outputs

WIDTH = 8


def weights_of(num_stages: int, width: int = WIDTH) -> list[Array]:
    chance = np.random.default_rng(7)
    return [(chance.standard_normal((width, width)) / width**0.5).astype(np.float32) for _ in range(num_stages)]


def expected(x: Array, num_stages: int = 2, repeat: int = 1) -> Array:
    for weight in weights_of(num_stages, x.shape[1]):
        for _ in range(repeat):
            x = np.tanh(x @ weight)
    return x


def write_served(folder: Path, *, num_stages: int = 2, width: int = WIDTH, repeat: int = 1) -> Path:
    """Write a model whose every stage is tanh(x @ weight), `repeat` times."""
    stages = []
    for number, weight in enumerate(weights_of(num_stages, width)):
        first, last = ("x" if number == 0 else f"h{number}"), ("y" if number == num_stages - 1 else f"h{number + 1}")
        nodes, value = [], first
        for at in range(repeat):
            made = last if at == repeat - 1 else f"t{at}"
            nodes += [
                helper.make_node("MatMul", [value, "w"], [f"m{at}"]),
                helper.make_node("Tanh", [f"m{at}"], [made]),
            ]
            value = made
        ends = [helper.make_tensor_value_info(text, TensorProto.FLOAT, ["batch", width]) for text in (first, last)]
        graph = helper.make_graph(nodes, "stage", [ends[0]], [ends[1]], [numpy_helper.from_array(weight, "w")])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
        model.ir_version = 10
        path = folder / f"stage{number}" / "model.onnx"
        path.parent.mkdir(parents=True)
        onnx.save(model, str(path))
        taken, given = ((Tensor(text, "FP32", ("batch", width)),) for text in (first, last))
        name = f"stage{number}/model.onnx"
        stages.append(ManifestStage(name, {name: digest_of(path)}, taken, given, (f"block{number}",), 0.001))
    dimensions = {"batch": Sizes()}
    Manifest("tanh", stages[0].inputs, stages[-1].outputs, dimensions, tuple(stages)).save(folder)
    return folder


class Running:
    """A service in a thread."""

    def __init__(self, started: RunningService) -> None:
        self.started = started
        self.address = f"127.0.0.1:{started.port}"

    @property
    def processes(self) -> list[int]:
        """The processes of the stages."""
        return [process.pid for process in getattr(self.started.stages, "processes", ())]

    @property
    def cores(self) -> list[set[int]]:
        """The cores on which each stage computes; it has computed before."""
        return [min((cores for _, cores in threads_of(process)), key=len) for process in self.processes]


def threads_of(process: int) -> list[tuple[int, set[int]]]:
    """Return the threads of a process, and the cores on which each may run."""
    threads = [int(name) for name in os.listdir(f"/proc/{process}/task")] if os.path.isdir("/proc") else [process]
    found = []
    for thread in threads:
        with suppress(ProcessLookupError):  # it has ended
            found.append((thread, os.sched_getaffinity(thread)))
    return found


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[Running]:
    """Serve a folder on free ports, until the block ends."""
    given = {"listen": "127.0.0.1:0", "metrics": "127.0.0.1:0"} | settings
    loop, ready, failed = asyncio.new_event_loop(), threading.Event(), []
    told: list[RunningService] = []
    stop: list[asyncio.Event] = []

    def heard(started: RunningService) -> None:
        told.append(started)
        ready.set()

    async def run() -> None:
        stop.append(asyncio.Event())
        await serve(ServiceSettings(folder, **given), notify=heard, stop=stop[0])

    def thread() -> None:
        try:
            loop.run_until_complete(run())
        except BaseException as error:
            failed.append(error)
        finally:
            ready.set()
            loop.close()

    running = threading.Thread(target=thread)
    running.start()
    assert ready.wait(120)
    if failed:
        raise failed[0]
    try:
        yield Running(told[0])
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop[0].set)
        running.join(60)
        assert not running.is_alive()
    if failed:
        raise failed[0]


def channel_to(address: str) -> Any:
    return grpc.insecure_channel(
        address, options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    )


def metrics_at(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def request_of(arrays: Arrays, name: str = "", model: str = "tanh") -> Any:
    made = InferRequest(model_name=model, id=name)
    put_inputs(made, arrays)
    return made


def inferred(channel: Any, arrays: Arrays, *, timeout: float = 60.0, model: str = "tanh") -> Arrays:
    """Send a request over a channel, and return the outputs."""
    return read_outputs(stub(channel, "ModelInfer")(request_of(arrays, model=model), timeout=timeout))


def status_of(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    """Return the status with which a call fails."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


def rows_of(count: int, seed: int = 0, width: int = WIDTH) -> Array:
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def waiting_for(condition: Callable[[], Any]) -> None:
    """Wait until something has become true."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def together(number: int, work: Callable[[int], None]) -> list[BaseException]:
    """Do some work in so many threads; returns what they raised."""
    raised: list[BaseException] = []

    def guarded(at: int) -> None:
        try:
            work(at)
        except BaseException as error:
            raised.append(error)

    threads: Sequence[threading.Thread] = [threading.Thread(target=guarded, args=(at,)) for at in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return raised
