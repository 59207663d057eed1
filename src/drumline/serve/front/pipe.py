"""Microbatches into the pipe: when one may enter, what becomes of its answer, and what if a stage dies.

A microbatch enters while the pipe has room (the tuner's window) and the first stage has at most one that waits. If the
first stage has nothing to do, whatever is queued enters at once. Otherwise a batch gathers until it fills a microbatch
or its oldest request has waited for `max_wait`.

If a stage is gone, a microbatch waits for it to come back and is sent again, `retries` times: stages keep nothing
between calls, so that repeating one is safe. The microbatch that it was computing is not sent again, as it may be what
ended the stage. What a stage cannot compute, or has no memory for, is sent again request by request: only those at
fault fail.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import grpc

from drumline.serve.front.metrics import Metrics
from drumline.serve.front.queue import Queue
from drumline.serve.front.tickets import Microbatch, Signature, Ticket
from drumline.serve.front.tuner import Tuner
from drumline.serve.wire.flow import CallStream
from drumline.serve.wire.frames import Answer, Failed, Lost
from drumline.serve.wire.protocol import InferRequest, InferResponse
from drumline.serve.wire.stage_times import StageTimes, times_of
from drumline.serve.wire.tensors import put_inputs, read_outputs

_NANO = 1e-9
_MOST_IN_FIRST = 2  # one computes, one waits
_LOST = (grpc.StatusCode.UNAVAILABLE,)
_PERHAPS_ALONE = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
Seen = Callable[[Microbatch, list[StageTimes]], None]


@dataclass(frozen=True, slots=True)
class Rules:
    """How requests become microbatches."""

    max_batch: int = 64  # rows
    max_wait: float = 0.005  # seconds that a request waits for others while the pipe is busy
    retries: int = 1


class Pipe:
    """Sends microbatches through the stages, as many at a time as keep them busy."""

    def __init__(
        self,
        infer: CallStream,
        queue: Queue,
        tuner: Tuner,
        metrics: Metrics,
        *,
        rules: Rules,
        is_back: Callable[[float], Awaitable[bool]],
        struck: Callable[..., Awaitable[str]],
        on_times: Seen | None = None,
    ) -> None:
        self._infer, self.queue, self._tuner, self._metrics = infer, queue, tuner, metrics
        self._rules, self._is_back, self._struck, self._on_times = rules, is_back, struck, on_times
        self._run = uuid.uuid4().hex[:12]  # tells its microbatches from those of others who call a stage
        self._timer: asyncio.TimerHandle | None = None
        self._batch: tuple[Signature, list[int]] = ((), [])  # microbatches of the batch that is being sent
        self._cut = 0, 0  # how many microbatches it had at first, and how many might be in the pipe
        self._sent: dict[asyncio.Task[None], Microbatch] = {}
        self._in_first = 0
        self._is_closed = False
        metrics.queued.set_function(lambda: len(queue))
        metrics.queued_bytes.set_function(lambda: queue.bytes)
        metrics.in_pipe.set_function(lambda: self.in_pipe)

    @property
    def in_pipe(self) -> int:
        """How many microbatches are in the pipe."""
        return len(self._sent)

    def poke(self) -> None:
        """Send what may enter now, and look again when more may."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wait = None if self._is_closed else self._send_what_may()
        if wait is not None:
            self._timer = asyncio.get_running_loop().call_later(wait, self.poke)

    async def close(self) -> None:
        """Give up what is under way, and start nothing more."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._sent:
            task.cancel()
        await asyncio.gather(*self._sent, return_exceptions=True)
        await self._infer.close()

    def _send_what_may(self) -> float | None:
        """Send microbatches while they may enter; returns after how many seconds to look again, if nothing happens."""
        while True:
            wait = self._holds_back()
            if wait is not None:
                return wait if wait > 0 else None
            signature, sizes = self._batch
            microbatch = self.queue.take(signature, sizes.pop(0))
            if microbatch is None:
                sizes.clear()  # what was left of the batch is over
                continue
            # It is on its way before its task runs: a turn of the loop takes as long as some messages.
            first = self._enter(microbatch)
            task = asyncio.create_task(self._carry(microbatch, first))
            self._sent[task] = microbatch
            task.add_done_callback(self._done)

    def _enter(self, microbatch: Microbatch) -> _Once:
        """Send a microbatch to the first stage; returns what to call once it has left that."""
        self._in_first += 1
        first = _Once(self._left_first)
        try:
            self._pack(microbatch)
            self._ask(microbatch, first)
        except Exception as error:
            microbatch.call = asyncio.get_running_loop().create_future()
            microbatch.call.set_exception(error)
        return first

    def _pack(self, microbatch: Microbatch) -> None:
        request = InferRequest(id=self._name(microbatch))
        put_inputs(request, microbatch.inputs())
        microbatch.body = request.SerializeToString()

    def _name(self, microbatch: Microbatch) -> str:
        """Return what ledgers call a microbatch."""
        return f"{self._run}-{microbatch.number}"

    def _ask(self, microbatch: Microbatch, first: _Once) -> None:
        timeout = microbatch.deadline - time.monotonic()
        if timeout <= 0:
            raise Failed(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")
        # With nothing else on its way, nobody waits for the first stage: its word would only cost time.
        busy = len(self.queue) > 0 or any(sent is not microbatch for sent in self._sent.values())
        microbatch.asked = time.monotonic()
        answered = partial(self._answered, microbatch)
        left = first if busy else None
        microbatch.call = self._infer(microbatch.body, timeout=timeout, left=left, done=answered)

    def _holds_back(self) -> float | None:
        """Return None if a microbatch may enter now, else after how many seconds to look again; 0: once woken."""
        if self._in_first >= _MOST_IN_FIRST:
            return 0
        oldest = self.queue.oldest() if len(self.queue) else None
        if oldest is None:
            self._batch[1].clear()
            return 0
        signature = oldest.signature
        if signature != self._batch[0]:
            self._batch[1].clear()  # it is the turn of another shape
        window = self._tuner.window(signature)
        if self.in_pipe >= window:
            return 0
        if self._batch[1]:
            return None
        rows = self.queue.rows_of(signature, self._rules.max_batch)
        left = oldest.arrived + self._rules.max_wait - time.monotonic()
        if self._in_first and left > 0 and rows < self._tuner.most_rows(signature):
            return left
        behind = self.in_pipe > 0 or self.queue.rows > rows
        self._batch = signature, self._tuner.sizes(signature, rows, behind=behind)
        self._cut = len(self._batch[1]), window
        return None

    def _done(self, task: asyncio.Task[None]) -> None:
        self._sent.pop(task, None)
        self.poke()

    async def _carry(self, microbatch: Microbatch, first: _Once) -> None:
        """Take a microbatch that has entered through the pipe and answer its tickets, whatever happens."""
        try:
            await self._through(microbatch, first)
        except Failed as error:
            if error.code in _PERHAPS_ALONE and len(microbatch.slices) > 1:
                first()
                for part in microbatch.slices:
                    alone = self.queue.alone(part)
                    await self._carry(alone, self._enter(alone))
            else:
                microbatch.fail(error)
        except asyncio.CancelledError:
            microbatch.fail(Failed(grpc.StatusCode.UNAVAILABLE, "the service stops"))
            raise
        except Exception as error:
            microbatch.fail(_internal(error))
        finally:
            first()

    def _left_first(self) -> None:
        self._in_first -= 1
        self.poke()

    async def _through(self, microbatch: Microbatch, first: _Once) -> None:
        """Wait until a microbatch is answered; if a stage was lost, send it again."""
        while True:
            try:
                await microbatch.call
                return
            except Failed as error:
                if error.code not in _LOST or microbatch.attempts >= self._rules.retries:
                    raise
                await self._check_spared(microbatch, error)
                await self._is_back(microbatch.deadline - time.monotonic())
                self._ask_again(microbatch, first)
            except asyncio.CancelledError:
                if microbatch.is_over and microbatch.call.cancelled():
                    raise Failed(grpc.StatusCode.CANCELLED, "no request waits for it") from None
                raise

    async def _check_spared(self, microbatch: Microbatch, error: Failed) -> None:
        """Raise Failed for a microbatch on which a stage was at work when it ended."""
        if isinstance(error, Lost):
            left = microbatch.deadline - time.monotonic()
            name, asked = self._name(microbatch), microbatch.asked
            if why := await self._struck(name, error.stage, seconds=left, asked=asked):
                raise Failed(error.code, why) from None

    def _ask_again(self, microbatch: Microbatch, first: _Once) -> None:
        """Send a microbatch again, without rows of requests that are answered: others of them may have failed."""
        if microbatch.drop_answered():
            if not microbatch.slices:
                raise Failed(grpc.StatusCode.CANCELLED, "no request waits for it")
            self._pack(microbatch)
        microbatch.attempts += 1
        self._metrics.retries.inc()
        self._ask(microbatch, first)

    def _answered(self, microbatch: Microbatch, answer: Answer) -> None:
        """Answer the tickets of a microbatch that has come back."""
        try:
            times, seconds = times_of(answer.times), time.monotonic() - microbatch.asked
            microbatch.took(times, seconds)
            microbatch.put(read_outputs(InferResponse.FromString(answer.body)))
        except Failed as error:
            microbatch.fail(error)
        except Exception as error:
            microbatch.fail(_internal(error))
        else:
            # Clients get their answers first: counting takes as long as some stages do.
            asyncio.get_running_loop().call_soon(self._count, microbatch, times, seconds)

    def _count(self, microbatch: Microbatch, times: list[StageTimes], seconds: float) -> None:
        """Hand on what stages measured: to the tuner, to metrics, and to the record."""
        self._metrics.cuts.set(self._cut[0])
        self._metrics.window.set(self._cut[1])
        if len(times) != self._tuner.num_stages:
            return
        computed = [(stage_times.end - stage_times.start) * _NANO for stage_times in times]
        queued = sum(stage_times.start - stage_times.arrived for stage_times in times) * _NANO
        hop = max(0.0, (seconds - sum(computed) - queued) / len(times))
        inside = (times[-1].end - times[0].arrived) * _NANO
        self._tuner.add(microbatch.signature, microbatch.rows, computed, hop, inside)
        self._metrics.took(times, microbatch.rows)
        if self._on_times is not None:
            self._on_times(microbatch, times)

    def drop(self, ticket: Ticket) -> None:
        """Forget a request that nobody waits for; stages stop computing microbatches of such requests alone."""
        self.queue.drop(ticket)
        for microbatch in self._sent.values():
            if microbatch.call is not None and microbatch.is_over:
                microbatch.call.cancel()
        self.poke()

    async def drained(self, seconds: float) -> bool:
        """Wait until nothing is queued or in the pipe; whether that came true."""
        end = time.monotonic() + seconds
        while len(self.queue) or self._sent:
            if time.monotonic() >= end:
                return False
            await asyncio.sleep(0.01)
        return True


def _internal(error: Exception) -> Failed:
    return Failed(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")


class _Once:
    """Calls a function the first time it is called."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    def __call__(self) -> None:
        if self._function is not None:
            function, self._function = self._function, None
            function()
