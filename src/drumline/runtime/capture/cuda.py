"""CUDA only: times measured on the device, and work recorded as graphs. The only file that calls torch.cuda."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from drumline.core.errors import ModelError
from drumline.runtime.capture.captured import Recorder
from drumline.runtime.draft import Clock, Draft

# Age at which an anchor is renewed: until then the time since it is known to a tenth of a microsecond.
_ANCHOR_NS = 1_000_000_000


class _Anchor:
    """An event, and the host's time at which the device passed it.

    If the device was idle, that is the time of recording, except for the microseconds of a launch. Otherwise it is
    computed from the previous anchor. Anchors are renewed, because an event's time is a 32-bit number.
    """

    def __init__(self, event: Any, moment_ns: int, before: _Anchor | None = None) -> None:
        self.event = event
        self.recorded_ns = moment_ns
        self._moment_ns = moment_ns
        self._before = before

    def moment(self, event: Any) -> int:
        """Return when the device passed an event."""
        if self._before is not None:
            self._moment_ns, self._before = self._before.moment(self.event), None
        return self._moment_ns + int(self.event.elapsed_time(event) * 1e6)


@dataclass(slots=True)
class _Marks:
    """The events of one step."""

    events: list[Any]
    anchor: _Anchor
    num_used: int = 0
    is_settled: bool = False

    @property
    def last(self) -> Any:
        """The event that the device passes last."""
        return self.events[self.num_used - 1] if self.num_used else self.anchor.event


class EventClock(Clock):
    """Marks moments on the device's stream; they become times when the device has passed them.

    begin ── is the device idle? ──► anchor: an event that it passes right now
    mark ─── an event on the stream; nobody waits for it
    settle ─ has it passed the last one? then every mark is the anchor's time plus the time since
    """

    def __init__(self) -> None:
        self._free: list[list[Any]] = []  # events of settled steps
        self._marks: _Marks | None = None  # of the current step

    def begin(self, draft: Draft) -> None:
        """Start a step: if the device is idle, the first event relates its clock to the host's."""
        self._stream = torch.cuda.current_stream()
        before = self._marks
        anchor = self._anchor(None if before is None else before.anchor)
        if before is not None and before.is_settled:
            self._free.append(before.events)
        self._marks = draft.marks = _Marks(self._free.pop() if self._free else [], anchor)
        draft.on_device = 1

    def _anchor(self, before: _Anchor | None) -> _Anchor:
        if before is None:
            self._stream.synchronize()  # once, before the first step
        is_idle = self._stream.query()
        if before is not None and not is_idle and self.now() - before.recorded_ns < _ANCHOR_NS:
            return before
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _Anchor(event, self.now(), None if is_idle else before)

    def start(self, directly: bool) -> int:
        """Mark the start of an action, using the end of the previous one if it follows directly."""
        assert self._marks is not None
        return self._marks.num_used - 1 if directly and self._marks.num_used else self.mark()

    def mark(self) -> int:
        """Mark the moment when the device's work so far is done; return the mark's number."""
        marks = self._marks
        assert marks is not None
        if marks.num_used == len(marks.events):
            marks.events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        marks.events[marks.num_used].record(self._stream)
        marks.num_used += 1
        return marks.num_used - 1

    def settle(self, draft: Draft, *, wait: bool) -> bool:
        """Turn marks into times if the device has passed them; wait only for the draft's own marks."""
        marks = draft.marks
        if marks is None:
            return True
        if not marks.last.query():
            if not wait:
                return False
            marks.last.synchronize()
        moments = [marks.anchor.moment(event) for event in marks.events[: marks.num_used]]
        draft.starts = [moments[mark] for mark in draft.starts]
        draft.ends = [moments[mark] for mark in draft.ends]
        draft.end_ns = max(draft.end_ns, *draft.ends) if draft.ends else draft.end_ns
        draft.marks, marks.is_settled = None, True
        if self._marks is not marks:
            self._free.append(marks.events)
        return True


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Disable garbage collection while recording: freeing an old graph would break the recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CudaRecorder(Recorder):
    """Records on its own stream; a recording is launched on the stream that is current then."""

    device_type = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run on the stream of the recordings: libraries keep workspaces per stream, as autograd does leaves."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def new_pool(self) -> Any:
        """Return a pool; unused cached memory goes back to the device, from which the pool will allocate."""
        gc.collect()
        torch.cuda.synchronize(self._stream.device)
        torch.cuda.empty_cache()
        return torch.cuda.graph_pool_handle()

    def capture(self, pool: Any, run: Callable[[], None]) -> Callable[[], None]:
        """Record as a CUDA graph. Other threads, such as a loader that pins memory, may continue meanwhile."""
        torch.cuda.synchronize(self._stream.device)
        graph = torch.cuda.CUDAGraph()
        with _no_garbage(), torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # a stage may do nothing at all
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # the first error says more than a broken recording
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay

    def borrowed(self, tensor: Tensor) -> Tensor:
        """Return a tensor that knows the memory only by its address."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return torch.empty_like(tensor)
        # The protocol by which libraries share memory of a CUDA device: bytes at an address.
        place = {"shape": (storage.nbytes(),), "typestr": "|u1", "data": (storage.data_ptr(), False), "version": 3}
        memory = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=place), device=tensor.device)
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        made = made.conj() if tensor.is_conj() else made
        return torch._neg_view(made) if tensor.is_neg() else made


def recorder_for(device: torch.device) -> Recorder:
    """Return a recorder that captures steps on a device."""
    if device.type != "cuda":
        raise ModelError(f"capture=True on {device.type}", expected="a CUDA device", fix="use capture=False")
    return CudaRecorder(device)


def device_name(device: torch.device) -> str:
    """Return the name of a device; an empty text for the host.

    >>> device_name(torch.device("cpu"))
    ''
    """
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return "" if device.type == "cpu" or named is None else str(named(device))


def clock_for(device: torch.device) -> Clock:
    """Return the clock that measures a device's times."""
    return EventClock() if device.type == "cuda" else Clock()
