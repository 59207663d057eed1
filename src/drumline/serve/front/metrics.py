"""What a service counts, in Prometheus' form: requests, queues, and for every stage its time and how much it idles."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from drumline.serve.stage import Times

_NANO = 1e-9
_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_SECONDS_BACK = 10.0


class Metrics:
    """The counters of one service; `listen` lets Prometheus fetch them."""

    def __init__(self, num_stages: int) -> None:
        self.registry = made = CollectorRegistry()
        self.requests = Counter(
            "drumline_requests", "Requests by the status they were answered with", ["code"], registry=made
        )
        self.latency = Histogram(
            "drumline_request_seconds", "From a request's arrival to its answer", buckets=_BUCKETS, registry=made
        )
        self.waiting = Histogram(
            "drumline_request_queue_seconds",
            "From a request's arrival until its first rows are sent",
            buckets=_BUCKETS,
            registry=made,
        )
        self.pipe = Histogram(
            "drumline_pipe_seconds",
            "From a microbatch's entry into the first stage until it leaves the last",
            buckets=_BUCKETS,
            registry=made,
        )
        self.stage_latency = Histogram(
            "drumline_stage_seconds",
            "From a microbatch's arrival at a stage until it is computed",
            ["stage"],
            buckets=_BUCKETS,
            registry=made,
        )
        self.stage_compute = Histogram(
            "drumline_stage_compute_seconds",
            "What a stage computed for a microbatch",
            ["stage"],
            buckets=_BUCKETS,
            registry=made,
        )
        self.rows = Histogram(
            "drumline_microbatch_rows",
            "Rows of a microbatch",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
            registry=made,
        )
        self.cuts = Gauge("drumline_microbatches_per_batch", "Microbatches of the last batch, as tuned", registry=made)
        self.window = Gauge("drumline_pipe_window", "Microbatches that may be in the pipe, as tuned", registry=made)
        self.retries = Counter("drumline_retries", "Microbatches that were sent again", registry=made)
        self.restarts = Counter("drumline_stage_restarts", "Stages that were started again", ["stage"], registry=made)
        self.queued = Gauge("drumline_queue_requests", "Requests that wait", registry=made)
        self.queued_bytes = Gauge("drumline_queue_bytes", "Bytes of requests that wait", registry=made)
        self.in_pipe = Gauge("drumline_pipe_microbatches", "Microbatches in the pipe", registry=made)
        self.depth = Gauge(
            "drumline_stage_queue_seconds", "How long the last microbatch waited at a stage", ["stage"], registry=made
        )
        bubble = Gauge(
            "drumline_bubble", f"Idle share of all stages over the last {_SECONDS_BACK:g} seconds", registry=made
        )
        idle = Gauge(
            "drumline_stage_idle",
            f"Idle share of a stage over the last {_SECONDS_BACK:g} seconds",
            ["stage"],
            registry=made,
        )
        self.busy = [Busy() for _ in range(num_stages)]
        bubble.set_function(lambda: sum(one.idle() for one in self.busy) / num_stages)
        for number, one in enumerate(self.busy):
            idle.labels(str(number)).set_function(one.idle)

    def took(self, times: Sequence[Times], rows: int) -> None:
        """Take in what the stages measured of a microbatch."""
        self.rows.observe(rows)
        self.pipe.observe((times[-1].end - times[0].arrived) * _NANO)
        for one in times:
            stage = str(one.stage)
            self.stage_latency.labels(stage).observe((one.end - one.arrived) * _NANO)
            self.stage_compute.labels(stage).observe((one.end - one.start) * _NANO)
            self.depth.labels(stage).set((one.start - one.arrived) * _NANO)
            self.busy[one.stage].add(one.start, one.end)

    def listen(self, host: str, port: int) -> tuple[int, Callable[[], None]]:
        """Answer Prometheus on a port; returns the port, and what ends it."""
        server, thread = start_http_server(port, host, registry=self.registry)

        def end() -> None:
            server.shutdown()
            server.server_close()
            thread.join(timeout=5)

        return int(server.server_port), end


class Busy:
    """When a stage computed lately."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock, self._lock = clock, Lock()
        self._spans: deque[tuple[int, int]] = deque()
        self._began = clock()

    def add(self, start: int, end: int) -> None:
        """Take in a span."""
        with self._lock:
            self._spans.append((start, end))
            self._forget(end)

    def _forget(self, now: int) -> int:
        since = max(self._began, now - int(_SECONDS_BACK / _NANO))
        while self._spans and self._spans[0][1] < since:
            self._spans.popleft()
        return since

    def idle(self) -> float:
        """Return the idle share of the last seconds.

        >>> moments = iter([0, 1_000_000_000])
        >>> busy = Busy(lambda: next(moments)); busy.add(0, 250_000_000); busy.idle()
        0.75
        """
        now = self._clock()
        with self._lock:
            since = self._forget(now)
            computed = sum(end - max(start, since) for start, end in self._spans)
        return max(0.0, 1.0 - computed / (now - since)) if now > since else 1.0
