"""What only CUDA has: times taken on the device, and work recorded as graphs. The one file that names torch.cuda."""

from __future__ import annotations

import gc
import time
import warnings
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from drumline.core.errors import ModelError
from drumline.runtime.clock import Clock
from drumline.runtime.draft import Draft
from drumline.runtime.recorder import Recorder


class EventClock(Clock):
    """Marks moments on the device's stream; they become times when the device has passed them."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._used = 0
        self._zero: tuple[torch.cuda.Event, int] | None = None

    def begin(self) -> None:
        """Start a step: events are used again, and the first fixes where the device's clock stands on the host's."""
        self._used = 0
        self._zero = None
        self._stream = torch.cuda.current_stream()

    def start(self, directly: bool) -> int:
        """Mark the start of an action, by the end of the one before where it follows directly."""
        return self._used - 1 if directly and self._used else self.mark()

    def mark(self) -> int:
        """Mark the moment that the device's work so far is done; returns the mark's number."""
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._events[self._used]
        event.record(self._stream)
        if self._zero is None:
            self._zero = (event, time.perf_counter_ns())
        self._used += 1
        return self._used - 1

    def settle(self, draft: Draft) -> None:
        """Turn marks into moments; waits for the device."""
        if self._zero is None:
            return
        torch.cuda.synchronize()
        event, zero = self._zero

        def moment(mark: int) -> int:
            return zero + int(event.elapsed_time(self._events[mark]) * 1e6)

        draft.starts = array("q", map(moment, draft.starts))
        draft.ends = array("q", map(moment, draft.ends))
        draft.end_ns = max(draft.end_ns, *draft.ends) if draft.ends else draft.end_ns
        self._zero = None


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Collect no garbage while recording: an old graph that is freed meanwhile would break the recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CudaRecorder(Recorder):
    """Records on a stream of its own; a recording is launched on the stream that is current then."""

    device_type = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run on the stream of the recordings: libraries keep their workspaces by stream, and autograd its leaves."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def new_pool(self) -> Any:
        """Return a pool; what lies about unused goes back to the device, which the pool will ask for memory."""
        gc.collect()
        torch.cuda.synchronize(self._stream.device)
        torch.cuda.empty_cache()
        return torch.cuda.graph_pool_handle()

    def capture(self, pool: Any, run: Callable[[], None]) -> Callable[[], None]:
        """Record as a CUDA graph. Other threads, a loader's that pins memory say, may go on meanwhile."""
        torch.cuda.synchronize(self._stream.device)
        graph = torch.cuda.CUDAGraph()
        with _no_garbage(), torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # a stage may do nothing at all
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # what went wrong says more than that the recording is broken
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay

    def borrowed(self, tensor: Tensor) -> Tensor:
        """Return a tensor that knows the memory by its address alone."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return torch.empty_like(tensor)
        memory = torch.as_tensor(_Memory(storage.data_ptr(), storage.nbytes()), device=tensor.device)
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        made = made.conj() if tensor.is_conj() else made
        return torch._neg_view(made) if tensor.is_neg() else made


class _Memory:
    """Bytes at an address, in the words by which libraries hand each other memory of a CUDA device."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def recorder_for(device: torch.device) -> Recorder:
    """Return what captures steps on a device."""
    if device.type != "cuda":
        raise ModelError(f"capture=True on {device.type}", expected="a CUDA device", fix="use capture=False")
    return CudaRecorder(device)


def device_name(device: torch.device) -> str:
    """Return what a device is called; nothing where it is the host.

    >>> device_name(torch.device("cpu"))
    ''
    """
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def clock_for(device: torch.device) -> Clock:
    """Return the clock that tells a device's times."""
    return EventClock() if device.type == "cuda" else Clock()
