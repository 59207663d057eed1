"""KServe's calls at the front: what clients see."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from itertools import count
from math import inf
from typing import Any

import grpc

from drumline.serve.front.answer_sizes import AnswerSizes
from drumline.serve.front.metrics import Metrics
from drumline.serve.front.pipe import Pipe
from drumline.serve.front.tickets import Ticket, signature_of
from drumline.serve.logs import EventLog
from drumline.serve.stages.supervisor import ServedStages
from drumline.serve.wire.frames import Failed
from drumline.serve.wire.manifest import BATCH, Manifest, Sizes
from drumline.serve.wire.protocol import CALLS, SERVICE, InferResponse, handler, message
from drumline.serve.wire.tensors import SHARED_MEMORY, Arrays, Refused, put_outputs, read_inputs

VERSION = "1"
_LONGEST_ID = 256
_NOT_OFFERED = {"classification", SHARED_MEMORY}  # extensions that would change what an output is
_Code = grpc.StatusCode
_TIMEOUT = "timeout"  # the parameter by which Triton's clients bound a request, in microseconds


def _asked_seconds(request: Any) -> float:
    """Return how long a request may take by its parameter; without one, as long as it likes."""
    if _TIMEOUT not in request.parameters:
        return inf
    parameter = request.parameters[_TIMEOUT]
    kind = parameter.WhichOneof("parameter_choice")
    microseconds = getattr(parameter, kind) if kind in ("int64_param", "uint64_param") else 0
    if microseconds <= 0:
        raise Refused(f"the parameter {_TIMEOUT} is {str(parameter).strip()[:80]!r}; expected microseconds, 1 or more")
    return microseconds * 1e-6


class FrontService:
    """Answers clients: state, metadata, inference."""

    def __init__(
        self,
        manifest: Manifest,
        pipe: Pipe,
        stages: ServedStages,
        metrics: Metrics,
        log: EventLog,
        *,
        sizes: AnswerSizes,
        max_rows: int,
        timeout: float,
    ) -> None:
        self._manifest, self._pipe, self.stages = manifest, pipe, stages
        self._metrics, self._log, self._sizes = metrics, log, sizes
        self._max_rows, self._timeout = max_rows, timeout
        self._dimensions = {**manifest.dimensions, BATCH: Sizes(1, max_rows)}  # cut into microbatches
        self._outputs = [output.name for output in manifest.outputs]
        self.is_draining = False
        self._run, self._numbers = uuid.uuid4().hex[:8], count()  # names of requests that have none

    def handlers(self) -> Any:
        """Return the calls as gRPC wants them."""
        named = {
            "ServerLive": self.live,
            "ServerReady": self.ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.metadata,
            "ModelMetadata": self.model_metadata,
            "ModelInfer": self.infer,
        }
        return grpc.method_handlers_generic_handler(SERVICE, {call: handler(call, named[call]) for call in CALLS})

    @property
    def is_ready(self) -> bool:
        """Whether requests would be computed now."""
        return self.stages.are_ready and not self.is_draining

    async def live(self, request: Any, context: Any) -> Any:
        """Say whether the front runs, and can look after its stages."""
        return message("ServerLiveResponse")(live=self.stages.are_watched)

    async def ready(self, request: Any, context: Any) -> Any:
        """Say whether all stages can compute."""
        return message("ServerReadyResponse")(ready=self.is_ready)

    async def model_ready(self, request: Any, context: Any) -> Any:
        """Say the same of a model by its name; one that is not here is not ready, as Triton says it."""
        known = request.name == self._manifest.model and request.version in ("", VERSION)
        return message("ModelReadyResponse")(ready=known and self.is_ready)

    async def metadata(self, request: Any, context: Any) -> Any:
        """Name the server."""
        return message("ServerMetadataResponse")(name="drumline", version=VERSION, extensions=[])

    async def model_metadata(self, request: Any, context: Any) -> Any:
        """Describe the model's inputs and outputs; without a name those of the only model."""
        await self._asked(request.name or self._manifest.model, request.version, context)
        model_metadata = message("ModelMetadataResponse")(
            name=self._manifest.model, versions=[VERSION], platform="onnx_pipeline"
        )
        for which in ("inputs", "outputs"):
            for tensor in getattr(self._manifest, which):
                getattr(model_metadata, which).add(
                    name=tensor.name, datatype=tensor.datatype, shape=tensor.open_shape()
                )
        return model_metadata

    def _check_model(self, name: str, version: str) -> None:
        if name != self._manifest.model:
            raise Failed(_Code.NOT_FOUND, f"unknown model {name[:80]!r}; expected {self._manifest.model!r}")
        if version not in ("", VERSION):
            raise Failed(_Code.NOT_FOUND, f"unknown version {version[:80]!r}; expected {VERSION!r} or none")

    async def _asked(self, name: str, version: str, context: Any) -> None:
        """Answer a question about another model with NOT_FOUND."""
        try:
            self._check_model(name, version)
        except Failed as error:
            await context.abort(error.code, error.why)

    async def infer(self, request: Any, context: Any) -> bytes:
        """Answer a request, with the bytes of the response."""
        began = time.monotonic()
        name = request.id[:_LONGEST_ID] or f"{self._run}-{next(self._numbers)}"
        code, why = "OK", ""
        try:
            return await self._infer(request, context, name)
        except Failed as error:
            code, why = error.code.name, error.why
            if error.code is _Code.DEADLINE_EXCEEDED and (down := self.stages.down):
                why = f"{why}; stage {down[0]} does not answer"
        except Refused as error:
            code, why = _Code.INVALID_ARGUMENT.name, str(error)
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        finally:
            # Clients get their answers first.
            asyncio.get_running_loop().call_soon(self._count, name, code, why, time.monotonic() - began)
        await context.abort(_Code[code], why)
        raise AssertionError

    def _count(self, name: str, code: str, why: str, seconds: float) -> None:
        self._metrics.requests.labels(code).inc()
        self._metrics.latency.observe(seconds)
        if self._log.requests or code not in ("OK", "CANCELLED"):
            level = "info" if code in ("OK", "CANCELLED") else "warning"
            more = {"why": why} if why else {}
            self._log("request", level=level, request=name, code=code, seconds=round(seconds, 6), **more)

    async def _infer(self, request: Any, context: Any, name: str) -> bytes:
        self._check_model(request.model_name, request.model_version)
        if self.is_draining:
            raise Failed(_Code.UNAVAILABLE, "the service is stopping")
        inputs = read_inputs(request, self._manifest.inputs, self._dimensions)
        wanted = self._wanted(request)
        typed = not request.raw_input_contents
        left = context.time_remaining()
        timeout = min(self._timeout, self._timeout if left is None else left, _asked_seconds(request))
        loop = asyncio.get_running_loop()
        ticket = Ticket(name, inputs, timeout=timeout, loop=loop, answer_bytes=self._answer_bytes(inputs, wanted))
        context.add_done_callback(lambda context: self._pipe.queue.release(ticket))
        self._pipe.queue.admit(ticket)
        timer = loop.call_later(timeout, ticket.expire)
        self._pipe.poke()
        try:
            outputs = await ticket.answer
        except BaseException:
            self._pipe.drop(ticket)
            raise
        finally:
            timer.cancel()
        self._metrics.waiting.observe(ticket.began - ticket.arrived)
        self._sizes.came(ticket.signature, ticket.rows, outputs)
        return self._answer(request, ticket, {name: outputs[name] for name in wanted}, typed=typed)

    def _answer_bytes(self, inputs: Arrays, wanted: list[str]) -> int:
        """Return the bytes that an answer will have in memory; Failed if its message would be too large."""
        signature, rows = signature_of(inputs), len(next(iter(inputs.values())))
        self._check_message(self._sizes.predicted(signature, rows, wanted))
        return self._sizes.predicted(signature, rows, self._outputs)

    def _check_message(self, size: int) -> None:
        if size > self._sizes.max_bytes:
            why = f"an answer of {size} bytes, {self._sizes.max_bytes} are allowed; send fewer rows"
            raise Failed(_Code.RESOURCE_EXHAUSTED, why)

    def _wanted(self, request: Any) -> list[str]:
        if not request.outputs:
            return self._outputs
        names = [output.name for output in request.outputs]
        if odd := [name for name in names if name not in self._outputs]:
            raise Refused(f"output {odd[0][:80]!r} is unknown; expected {', '.join(self._outputs)}")
        for output in request.outputs:
            if wishes := sorted(set(output.parameters) & _NOT_OFFERED):
                raise Refused(f"output {output.name!r} asks for {wishes[0]}, which is not offered")
        return list(dict.fromkeys(names))

    def _answer(self, request: Any, ticket: Ticket, outputs: Arrays, *, typed: bool) -> bytes:
        response = InferResponse(model_name=self._manifest.model, model_version=VERSION, id=request.id)
        seconds: Mapping[str, float] = {
            "queue_ns": ticket.began - ticket.arrived,
            "pipe_ns": ticket.pipe,
            "compute_ns": ticket.compute,
        }
        for name, value in seconds.items():
            response.parameters[name].int64_param = int(value * 1e9)
        put_outputs(response, outputs, typed=typed)
        body = response.SerializeToString()
        self._check_message(len(body))
        return bytes(body)
