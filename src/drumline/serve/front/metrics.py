"""What a service counts, in Prometheus' form: requests, queues, and for every stage its time and how much it idles."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from drumline.serve.wire.stage_times import StageTimes

_NANO = 1e-9
_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SECONDS_BACK = 10.0


class Metrics:
    """The counters of one service; Prometheus fetches its registry from `MetricsPort`."""

    def __init__(self, num_stages: int) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by the status they were answered with", "code")
        self.latency = self._histogram("request_seconds", "From a request's arrival to its answer")
        self.waiting = self._histogram(
            "request_queue_seconds", "From a request's arrival until its first rows are sent"
        )
        self.pipe = self._histogram("pipe_seconds", "A microbatch from entering the first stage to leaving the last")
        self.rows = self._histogram("microbatch_rows", "Rows of a microbatch", buckets=_ROWS)
        self.cuts = self._gauge("microbatches_per_batch", "Microbatches of the last batch, as tuned")
        self.window = self._gauge("pipe_window", "Microbatches that may be in the pipe, as tuned")
        self.retries = self._counter("retries", "Microbatches that were sent again")
        self.restarts = self._counter("stage_restarts", "Stages that were started again", "stage")
        self.queued = self._gauge("queue_requests", "Requests that wait")
        self.queued_bytes = self._gauge("queue_bytes", "Bytes of requests that wait")
        self.in_pipe = self._gauge("pipe_microbatches", "Microbatches in the pipe")
        latency = self._histogram("stage_seconds", "From a microbatch's arrival at a stage to its end there", "stage")
        compute = self._histogram("stage_compute_seconds", "What a stage computed for a microbatch", "stage")
        depth = self._gauge("stage_queue_seconds", "How long the last microbatch waited at a stage", "stage")
        stages = [str(number) for number in range(num_stages)]
        self._of_stage = [(latency.labels(stage), compute.labels(stage), depth.labels(stage)) for stage in stages]
        lately = f"over the last {_SECONDS_BACK:g} seconds"
        bubble = self._gauge("bubble", f"Idle share of all stages {lately}")
        idle = self._gauge("stage_idle", f"Idle share of a stage {lately}", "stage")
        self.busy = [Busy() for _ in range(num_stages)]
        bubble.set_function(lambda: sum(busy.idle() for busy in self.busy) / num_stages)
        for number, busy in enumerate(self.busy):
            idle.labels(str(number)).set_function(busy.idle)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"drumline_{name}", meaning, labels, registry=self.registry)

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(f"drumline_{name}", meaning, labels, registry=self.registry)

    def _histogram(self, name: str, meaning: str, *labels: str, buckets: Sequence[float] = _BUCKETS) -> Histogram:
        return Histogram(f"drumline_{name}", meaning, labels, buckets=buckets, registry=self.registry)

    def took(self, times: Sequence[StageTimes], rows: int) -> None:
        """Take in what the stages measured of a microbatch."""
        self.rows.observe(rows)
        self.pipe.observe((times[-1].end - times[0].arrived) * _NANO)
        for stage_times in times:
            latency, compute, depth = self._of_stage[stage_times.stage]
            latency.observe((stage_times.end - stage_times.arrived) * _NANO)
            compute.observe((stage_times.end - stage_times.start) * _NANO)
            depth.set((stage_times.start - stage_times.arrived) * _NANO)
            self.busy[stage_times.stage].add(stage_times.start, stage_times.end)


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
