"""Load a service and measure it, by a closed loop (so many requests at a time) or an open one (so many a second).

A closed loop sends the next request when one has been answered, so a slow service gets less load. An open loop sends at
random moments (Poisson), whatever the service does, and counts a request's latency from when it should have been sent.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from drumline.core.errors import RunError, UsageError
from drumline.serve.wire.links import PLAIN, Tls, connect
from drumline.serve.wire.protocol import InferRequest, message, stub
from drumline.serve.wire.tensors import DATATYPES, Arrays, put_inputs, read_outputs

PERCENTILES = (50, 90, 95, 99)
_MOST_OPEN = 4096  # requests that an open loop has under way at most
_MOST_LATE = 1.0  # seconds after the last one's moment until which an open loop still sends


@dataclass(frozen=True, slots=True)
class Demand:
    """What requests look like: rows from `least` to `most`, a length, whole numbers below `below`."""

    least: int = 1
    most: int = 1
    length: int = 32
    below: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for what, value in (("rows", self.least), ("length", self.length), ("integers-below", self.below)):
            if value < 1:
                raise UsageError(f"--{what} is {value}", expected="1 or more")
        if self.least > self.most:
            raise UsageError(f"--rows is {self.least}-{self.most}", expected="the smaller number first")

    def arrays(self, inputs: Sequence[Any], chance: np.random.Generator) -> Arrays:
        """Return random inputs by a model's metadata: the first open dimension is rows, others the length."""
        rows = int(chance.integers(self.least, self.most + 1))
        arrays: Arrays = {}
        for tensor in inputs:
            shape = [rows if at == 0 else self.length if size < 0 else size for at, size in enumerate(tensor.shape)]
            dtype = DATATYPES[tensor.datatype]
            if dtype.kind == "f":
                arrays[tensor.name] = chance.standard_normal(shape).astype(dtype)
            else:
                arrays[tensor.name] = chance.integers(0, 2 if dtype.kind == "b" else self.below, shape).astype(dtype)
        return arrays


@dataclass(slots=True)
class Result:
    """What a load measured: requests by status, and of those answered seconds in all, in queues and computing."""

    concurrency: int = 0  # 0: an open loop
    rate: float = 0.0
    seconds: float = 0.0
    codes: Counter[str] = field(default_factory=Counter)
    whys: dict[str, str] = field(default_factory=dict)  # what the first failure of each status said
    rows: int = 0
    latencies: list[float] = field(default_factory=list)
    queues: list[float] = field(default_factory=list)
    pipes: list[float] = field(default_factory=list)
    computes: list[float] = field(default_factory=list)

    def add(self, latency: float, rows: int, response: Any) -> None:
        """Take in an answer."""
        self.codes["OK"] += 1
        self.rows += rows
        self.latencies.append(latency)
        for name, values in (("queue_ns", self.queues), ("pipe_ns", self.pipes), ("compute_ns", self.computes)):
            values.append(response.parameters[name].int64_param * 1e-9 if name in response.parameters else 0.0)

    def to_json(self) -> dict[str, Any]:
        """Return the numbers of the table."""
        ok = self.codes["OK"]
        fields: dict[str, Any] = {
            "concurrency": self.concurrency or None,
            "rate": self.rate or None,
            "seconds": self.seconds,
            "requests": sum(self.codes.values()),
            "errors": {code: count for code, count in self.codes.items() if code != "OK"},
            "first_errors": dict(self.whys),
            "requests_per_second": ok / self.seconds if self.seconds else 0.0,
            "rows_per_second": self.rows / self.seconds if self.seconds else 0.0,
        }
        for name, values in (
            ("latency", self.latencies),
            ("queue", self.queues),
            ("pipe", self.pipes),
            ("compute", self.computes),
        ):
            percentiles = np.percentile(values, PERCENTILES).tolist() if values else [None] * len(PERCENTILES)
            fields[f"{name}_seconds"] = {
                f"p{number}": value for number, value in zip(PERCENTILES, percentiles, strict=True)
            }
        return fields


Answered = Callable[[Arrays, Arrays], None]


class Loader:
    """Sends requests to one model over one connection."""

    def __init__(self, address: str, *, model: str = "", tls: Tls = PLAIN, timeout: float = 30.0) -> None:
        self._address, self._tls, self._timeout = address, tls, timeout
        self.model = model
        self._inputs: list[Any] = []

    async def __aenter__(self) -> Loader:
        """Connect, and ask what the model takes."""
        self._channel = connect(self._address, self._tls, 2**30)
        self._infer = stub(self._channel, "ModelInfer")
        try:
            metadata = await self._metadata()
        except grpc.aio.AioRpcError as error:
            await self._channel.close()
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise RunError(f"{self._address}: {error.details()}", fix="name the model with --model") from None
            raise RunError(
                f"no answer from {self._address}: {error.code().name}: {error.details()}",
                fix="start the service; if it has TLS, give --tls-ca, and for mutual TLS --tls-cert and --tls-key",
            ) from None
        self.model, self._inputs = metadata.name, list(metadata.inputs)
        return self

    async def _metadata(self) -> Any:
        """Ask for the model's inputs, for up to 10 seconds; the last attempt says why there is no connection."""
        ask, about = stub(self._channel, "ModelMetadata"), message("ModelMetadataRequest")(name=self.model)
        try:
            return await ask(about, timeout=10.0, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        return await ask(about, timeout=2.0)

    async def __aexit__(self, *_: object) -> None:
        """Disconnect."""
        await self._channel.close()

    async def once(self, arrays: Arrays, result: Result, began: float, answered: Answered | None = None) -> None:
        """Send a request and take in its answer; the latency counts from `began`."""
        request = InferRequest(model_name=self.model)
        put_inputs(request, arrays)
        try:
            response = await self._infer(request, timeout=self._timeout)
        except grpc.aio.AioRpcError as error:
            result.codes[error.code().name] += 1
            result.whys.setdefault(error.code().name, str(error.details() or "")[:300])
            return
        result.add(time.perf_counter() - began, len(next(iter(arrays.values()))), response)
        if answered is not None:
            answered(arrays, read_outputs(response))

    async def closed(
        self, concurrency: int, seconds: float, demand: Demand, requests: int = 0, answered: Answered | None = None
    ) -> Result:
        """Keep so many requests under way for so many seconds, or until so many were sent."""
        result = Result(concurrency)
        begun = time.perf_counter()
        left = requests or -1

        async def client(number: int) -> None:
            nonlocal left
            chance = np.random.default_rng([demand.seed, number])
            while left != 0 and (requests or time.perf_counter() - begun < seconds):
                left -= 1
                await self.once(demand.arrays(self._inputs, chance), result, time.perf_counter(), answered)

        await asyncio.gather(*(client(number) for number in range(concurrency)))
        result.seconds = time.perf_counter() - begun
        return result

    async def opened(self, rate: float, seconds: float, demand: Demand) -> Result:
        """Send requests at random moments, so many a second on average.

        Those that this side cannot send in time are counted as `NOT_SENT`.
        """
        result = Result(rate=rate)
        chance = np.random.default_rng(demand.seed)
        begun = time.perf_counter()
        at = begun
        sent: set[asyncio.Task[None]] = set()
        while (at := at + chance.exponential(1 / rate)) - begun < seconds:
            if time.perf_counter() - begun > seconds + _MOST_LATE:
                result.codes["NOT_SENT"] += max(1, round(rate * (begun + seconds - at)))  # of those still to come
                break
            arrays = demand.arrays(self._inputs, chance)
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            if len(sent) >= _MOST_OPEN:
                result.codes["NOT_SENT"] += 1
                continue
            task = asyncio.create_task(self.once(arrays, result, at))
            sent.add(task)
            task.add_done_callback(sent.discard)
        await asyncio.gather(*sent)
        result.seconds = time.perf_counter() - begun
        return result


async def load(
    address: str,
    *,
    model: str = "",
    concurrencies: Sequence[int] = (),
    rates: Sequence[float] = (),
    seconds: float = 10.0,
    demand: Demand | None = None,
    tls: Tls = PLAIN,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """Load a service with each concurrency and each rate in turn, after a short warm-up."""
    for concurrency in concurrencies:
        if concurrency < 1:
            raise UsageError(f"--concurrency is {concurrency}", expected="1 request or more at a time")
    for name, value in (*(("rate", number) for number in rates), ("seconds", seconds)):
        if value <= 0:
            raise UsageError(f"--{name} is {value:g}", expected="more than 0")
    demand = demand or Demand()
    results = []
    async with Loader(address, model=model, tls=tls) as loader:
        await loader.closed(1, min(1.0, seconds / 10), demand)
        for concurrency in concurrencies:
            tell(f"{concurrency} at a time ...")
            results.append(await loader.closed(concurrency, seconds, demand))
        for rate in rates:
            tell(f"{rate:g} a second ...")
            results.append(await loader.opened(rate, seconds, demand))
    return results
