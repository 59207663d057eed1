"""Work of a CUDA device recorded as graphs."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from drumline.core.errors import ModelError
from drumline.features.capture.captured_row import Recorder


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
        tensor_there = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        tensor_there = tensor_there.conj() if tensor.is_conj() else tensor_there
        return torch._neg_view(tensor_there) if tensor.is_neg() else tensor_there


def recorder_for(device: torch.device) -> Recorder:
    """Return a recorder that captures steps on a device."""
    if device.type != "cuda":
        raise ModelError(f"capture=True on {device.type}", expected="a CUDA device", fix="use capture=False")
    return CudaRecorder(device)
