"""A pipe without stages, and what tests of calls and streams have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from drumline.serve.front.metrics import Metrics
from drumline.serve.front.pipe import Pipe, Rules
from drumline.serve.front.queue import Queue
from drumline.serve.front.tickets import Ticket
from drumline.serve.front.tuner import Tuner
from drumline.serve.wire.flows import Home
from drumline.serve.wire.frames import Answer, Failed
from drumline.serve.wire.protocol import InferRequest, InferResponse
from drumline.serve.wire.tensors import put_outputs

Code = grpc.StatusCode
LIMIT = 2**16
EXPORTED = "0123456789abcdef 1"


async def failure(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(Failed) as caught:
        await call
    return caught.value.code, caught.value.why


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


class Carried:
    """A pipe over a made-up first stage, which answers what `answers` says: y = 2 x, an error, or nothing."""

    def __init__(self, answers: Sequence[Failed | None] = (), **rules: Any) -> None:
        self.calls: list[Any] = []
        self.asked: list[tuple[str, int]] = []  # of which microbatches, and which stages
        self.why = str(rules.pop("why", ""))
        self.refusal = rules.pop("refusal", Code.INVALID_ARGUMENT)
        self._answers = list(answers)
        self.queue = Queue(max_requests=99, max_bytes=10**9)
        self.tuner = Tuner(2, 0.05, 64, rules.pop("rows", 0), rules.pop("window", 0))
        self.holds = rules.pop("holds", False)
        self.times = str(rules.pop("times", ""))  # what stages say that they measured
        self.metrics = Metrics(2)
        given = {"rules": Rules(**rules), "is_back": self._is_back, "struck": self._struck}
        self.pipe = Pipe(self, self.queue, self.tuner, self.metrics, **given)  # type: ignore[arg-type]

    async def _is_back(self, seconds: float) -> bool:
        return True

    async def _struck(self, name: str, stage: int, *, seconds: float, asked: float) -> str:
        self.asked.append((name.partition("-")[2], stage))
        return self.why

    async def close(self) -> None:
        pass

    def __call__(
        self,
        body: bytes,
        *,
        timeout: float,
        left: Callable[[], None] | None = None,
        done: Home,
    ) -> asyncio.Future[Answer]:
        loop = asyncio.get_running_loop()
        made = loop.create_future()
        request = InferRequest.FromString(body)
        x = np.frombuffer(request.raw_input_contents[0], np.float32).reshape(list(request.inputs[0].shape))
        self.calls.append(x)
        error = self._answers.pop(0) if self._answers else None
        if left is not None:
            loop.call_soon(left)
        if self.holds:
            return made
        if np.isnan(x).any():
            error = Failed(self.refusal, "stage 0: cannot compute")
        if error is not None:
            made.set_exception(error)
        else:
            response = InferResponse()
            put_outputs(response, {"y": 2 * x})
            answer = Answer(response.SerializeToString(), self.times)
            loop.call_soon(done, answer)
            made.set_result(answer)
        return made

    def send(self, x: Any) -> Ticket:
        """Let a request enter the queue."""
        ticket = Ticket("r", {"x": x}, timeout=60.0, loop=asyncio.get_running_loop())
        self.queue.admit(ticket)
        return ticket
