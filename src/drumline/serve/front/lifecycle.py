"""A whole service: stages, pipe, front, metrics; from start to drained end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from drumline.core.errors import UsageError, counted
from drumline.serve.cores import of_messages, own_cores, shares, stay_on
from drumline.serve.front.answer_sizes import AnswerSizes
from drumline.serve.front.metrics import Metrics
from drumline.serve.front.metrics_port import MetricsPort
from drumline.serve.front.pipe import Pipe, Rules
from drumline.serve.front.queue import Queue
from drumline.serve.front.record import LoadRecord, check_record
from drumline.serve.front.service import FrontService
from drumline.serve.front.tuner import Tuner
from drumline.serve.logs import EventLog, with_libraries
from drumline.serve.stage import MAX_BYTES
from drumline.serve.stages.hang import SHORTEST_HANG
from drumline.serve.stages.remote import RemoteStages
from drumline.serve.stages.supervisor import LocalStages, ServedStages
from drumline.serve.wire.flow import CallStream
from drumline.serve.wire.frames import Failed
from drumline.serve.wire.links import PLAIN, Tls, connect, listen, options, parts_of
from drumline.serve.wire.manifest import ANY_SIZE, BATCH, Manifest, read_manifest
from drumline.serve.wire.protocol import PROTOCOL_FILES, SERVICE

_SPARE_CALLS = 64  # beside requests: state and metadata


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """How a service runs."""

    folder: Path
    listen: str = "127.0.0.1:8001"
    metrics: str = "127.0.0.1:8002"  # empty: none
    hosts: tuple[str, ...] = ()  # stages that others have started; none: local processes
    tls: Tls = PLAIN
    threads: int = 1
    pin: bool = False  # whether stages have cores of their own
    budget: float = 0.05  # seconds from a microbatch's entry into the first stage until it leaves the last
    rules: Rules = field(default_factory=Rules)
    rows: int | None = None  # of a microbatch; None: tuned
    window: int | None = None  # microbatches in the pipe; None: tuned
    max_requests: int = 512
    max_queue_bytes: int = 256 * 2**20
    max_bytes: int = MAX_BYTES
    timeout: float = 60.0  # of requests without a deadline
    hang: float = 30.0  # of a local stage until it is started again; 0: never
    drain: float = 30.0
    log_requests: bool = False
    record: Path | None = None

    def __post_init__(self) -> None:
        counts = {"threads": self.threads, "max-batch": self.rules.max_batch, "max-requests": self.max_requests}
        for name, value in counts.items():
            if value < 1:
                raise UsageError(f"--{name} is {value}", expected="1 or more")
        for name, amount in {"budget": self.budget, "timeout": self.timeout}.items():
            if amount <= 0:
                raise UsageError(f"--{name} is {amount:g}", expected="more than 0 seconds")
        for name, count in {"microbatch-rows": self.rows, "window": self.window}.items():
            if count is not None and count < 1:
                raise UsageError(f"--{name} is {count}", expected="1 or more", fix="leave it out to have it tuned")
        least = {"max-wait": self.rules.max_wait, "retries": self.rules.retries, "drain": self.drain}
        for name, number in least.items():
            if number < 0:
                raise UsageError(f"--{name} is {number:g}", expected="0 or more")
        if self.hang and self.hang < SHORTEST_HANG:
            expectation = f"{SHORTEST_HANG:g} second or more, or 0 to let stages hang"
            raise UsageError(f"--hang is {self.hang:g}", expected=expectation)
        if self.hosts and self.pin:
            raise UsageError("--pin with --hosts", expected="stages on this machine", fix="pin them where they run")
        if self.hosts and self.record is not None:
            raise UsageError("--record with --hosts", expected="stages on this machine, whose clocks are one")


@dataclass(frozen=True, slots=True)
class RunningService:
    """Where a service listens, and the processes of its stages."""

    port: int
    metrics_port: int
    stages: ServedStages


async def serve(
    settings: ServiceSettings, *, notify: Callable[[RunningService], None], stop: asyncio.Event | None = None
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`, then answer what is under way and end. `notify` hears once it is ready."""
    manifest = read_manifest(settings.folder)
    if settings.hosts and len(settings.hosts) != len(manifest.stages):
        has = counted(len(manifest.stages), "stage")
        raise UsageError(f"--hosts names {len(settings.hosts)}", expected=f"one address for each of {has}")
    if settings.record is not None:
        check_record(settings.record, settings.folder)
    stopped = stop or asyncio.Event()
    log = EventLog(requests=settings.log_requests)
    metrics = Metrics(len(manifest.stages))
    async with AsyncExitStack() as kept_stack:
        kept_stack.callback(log.close)
        kept_stack.enter_context(with_libraries(log))
        stages = _stages(settings, manifest, log, metrics)
        kept_stack.push_async_callback(stages.stop)
        _on_signals(stopped)
        await _unless(stopped, stages.start())
        if stopped.is_set():
            return
        channel = await kept_stack.enter_async_context(
            connect(stages.addresses[0], _between(settings), settings.max_bytes)
        )
        record = _record(settings, manifest, log)
        if record is not None:
            kept_stack.callback(record.close)
        flow = CallStream(channel, stage=0, export=manifest.handshake(0), max_bytes=settings.max_bytes)
        sizes = AnswerSizes(manifest, settings.max_bytes)
        pipe = _pipe(settings, manifest, flow, stages, metrics, record, sizes)
        kept_stack.push_async_callback(pipe.close)
        service = FrontService(
            manifest,
            pipe,
            stages,
            metrics,
            log,
            sizes=sizes,
            max_rows=settings.rules.max_batch * 64,
            timeout=settings.timeout,
        )
        await _front(settings, manifest, service, pipe, metrics, log, stopped, notify, kept_stack)


def _record(settings: ServiceSettings, manifest: Manifest, log: EventLog) -> LoadRecord | None:
    if settings.record is None:
        return None

    def stopped(error: OSError) -> None:
        log("record stopped", level="error", folder=str(settings.record), why=error.strerror or str(error))

    return LoadRecord(settings.record, manifest, stopped=stopped)


def _stages(settings: ServiceSettings, manifest: Manifest, log: EventLog, metrics: Metrics) -> ServedStages:
    def restarted(number: int) -> None:
        metrics.restarts.labels(str(number)).inc()

    if settings.hosts:
        return RemoteStages(settings.hosts, manifest, tls=settings.tls, log=log, restarted=restarted)
    cores: list[list[int]] = []
    left: list[int] = []
    if settings.pin:
        *cores, left = shares(own_cores(), len(manifest.stages), settings.threads)
        if left:
            stay_on(left)
    limit = max(2 * len(manifest.stages), settings.window or 0) + 8
    return LocalStages(
        settings.folder,
        manifest,
        threads=settings.threads,
        limit=limit,
        max_bytes=settings.max_bytes,
        log=log,
        restarted=restarted,
        hang=settings.hang,
        cores=cores,
        message_cores=of_messages(left, len(manifest.stages)),
    )


def _between(settings: ServiceSettings) -> Tls:
    """Return how front and stages connect: stages of this machine are on its loopback interface."""
    return settings.tls if settings.hosts else PLAIN


def _pipe(
    settings: ServiceSettings,
    manifest: Manifest,
    flow: CallStream,
    stages: ServedStages,
    metrics: Metrics,
    record: LoadRecord | None,
    sizes: AnswerSizes,
) -> Pipe:
    queue = Queue(max_requests=settings.max_requests, max_bytes=settings.max_queue_bytes)
    fixed = settings.rows or 0, settings.window or 0
    most = manifest.dimensions.get(BATCH, ANY_SIZE).most
    if most is not None and (settings.rows or 0) > most:
        raise UsageError(f"--microbatch-rows is {settings.rows}", expected=f"at most the {most} rows of the export")
    rows = min(settings.rules.max_batch, most or settings.rules.max_batch)
    tuner = Tuner(len(manifest.stages), settings.budget, rows, *fixed, sizes.most_rows)
    seen_function = None if record is None else lambda microbatch, times: record.add(times, microbatch.rows)
    return Pipe(
        flow,
        queue,
        tuner,
        metrics,
        rules=settings.rules,
        is_back=stages.back,
        struck=stages.struck,
        on_times=seen_function,
    )


async def _front(
    settings: ServiceSettings,
    manifest: Manifest,
    service: FrontService,
    pipe: Pipe,
    metrics: Metrics,
    log: EventLog,
    stopped: asyncio.Event,
    notify: Callable[[RunningService], None],
    stack: AsyncExitStack,
) -> None:
    """Listen, answer until stopped, then drain."""
    calls = settings.max_requests + settings.rules.max_batch + _SPARE_CALLS
    server = grpc.aio.server(options=options(settings.max_bytes), maximum_concurrent_rpcs=calls)
    server.add_generic_rpc_handlers((service.handlers(),))
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server, pool=_described())
    port = listen(server, settings.listen, settings.tls)
    metrics_port = 0
    if settings.metrics:
        host, asked = parts_of(settings.metrics, flag="--metrics")
        metrics_port, end = await MetricsPort(metrics.registry).listen(host, asked)
        stack.callback(end)
    await server.start()
    watching = asyncio.create_task(_tell_health(service, healthy))
    stack.callback(watching.cancel)
    log("serving", model=manifest.model, stages=len(manifest.stages), port=port, metrics_port=metrics_port)
    notify(RunningService(port, metrics_port, service.stages))
    await stopped.wait()
    service.is_draining = True
    await healthy.enter_graceful_shutdown()
    log("draining", requests=len(pipe.queue), microbatches=pipe.in_pipe)
    whole = await pipe.drained(settings.drain)
    if not whole:
        pipe.queue.clear(lambda: Failed(grpc.StatusCode.UNAVAILABLE, "the service stopped before this request's turn"))
    await server.stop(1.0)
    log("stopped", drained=whole)


def _described() -> Any:
    """Return the descriptions of all services that reflection lists."""
    pool = descriptor_pool.DescriptorPool()
    for file in (*PROTOCOL_FILES, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        pool.AddSerializedFile(getattr(file, "serialized_pb", None) or file.SerializeToString())
    return pool


async def _tell_health(service: FrontService, healthy: Any) -> None:
    """Keep the health service in step with the stages."""
    status = health_pb2.HealthCheckResponse
    last = None
    while True:
        now = status.SERVING if service.is_ready else status.NOT_SERVING
        if now != last:
            for name in ("", SERVICE):
                await healthy.set(name, now)
            last = now
        await asyncio.sleep(0.1)


def _on_signals(stopped: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    with suppress(RuntimeError, ValueError):  # a loop outside of the main thread gets none
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, stopped.set)


async def _unless(stopped: asyncio.Event, starting: Any) -> None:
    """Wait for a start, or until told to stop."""
    begun = asyncio.ensure_future(starting)
    waiting = asyncio.ensure_future(stopped.wait())
    await asyncio.wait({begun, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if begun.done():
        begun.result()
    else:
        begun.cancel()
        with suppress(asyncio.CancelledError):
            await begun
