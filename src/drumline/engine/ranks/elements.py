"""A few elements of each of a step's tensors, as bytes: enough to see that two ranks got different tensors.

The choice of elements depends only on a tensor's shape, not on its device or memory layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

NUM_ELEMENTS = 8  # at least this many elements of each tensor, and fewer than twice as many

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_NUMPYS = {
    torch.float64, torch.float32, torch.float16, torch.complex64, torch.complex128, torch.bool,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
}  # fmt: skip


def samples_begun(tensors: Sequence[Tensor]) -> Callable[[], list[bytes]]:
    """Return a function that returns some elements of each tensor, as they are now; b"" for a sparse one.

    >>> value = torch.arange(6.0).view(2, 3)
    >>> samples_begun([value.t()])() == samples_begun([value.t().contiguous()])()
    True
    """
    chunks = [b"" if _is_away(tensor) else _sample(tensor) for tensor in tensors]
    places = [at for at, t in enumerate(tensors) if _is_away(t) and t.layout is torch.strided and not t.is_meta]
    if not places:
        return lambda: chunks
    late = [(here, _on_the_way([tensors[at] for at in here])) for here in _by_device(tensors, places)]

    def samples() -> list[bytes]:
        for here, arrived in late:
            for at, chunk in zip(here, arrived(), strict=True):
                chunks[at] = chunk
        return chunks

    return samples


def _is_away(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _sample(tensor: Tensor) -> bytes:
    """Return some elements as bytes; every step does this, so it uses NumPy, whose calls cost a tenth of torch's."""
    if tensor.layout is not torch.strided:
        return b""
    value = tensor.detach()
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    if value.dtype not in _NUMPYS:
        value = value.view(_INTEGERS[value.dtype.itemsize])
    array = value.numpy()
    flat = array.reshape(-1) if value.is_contiguous() else array.flat
    sample: bytes = flat[:: max(1, array.size // NUM_ELEMENTS)].tobytes()
    return sample


def _by_device(tensors: Sequence[Tensor], places: Sequence[int]) -> Iterator[list[int]]:
    for device in dict.fromkeys(tensors[at].device for at in places):
        yield [at for at in places if tensors[at].device == device]


def _on_the_way(tensors: Sequence[Tensor]) -> Callable[[], list[bytes]]:
    """Start one copy of elements of a device's tensors to the host; the returned function waits only for that."""
    with torch.no_grad():
        picked = [_picked(tensor.detach()).view(torch.uint8) for tensor in tensors]
        joined = torch.cat(picked)
    sizes = [tensor.numel() for tensor in picked]
    module = torch.get_device_module(tensors[0].device)
    if not hasattr(module, "Event"):  # a device without streams: nothing is on the way
        host = joined.to("cpu")
        return lambda: [tensor.numpy().tobytes() for tensor in torch.split(host, sizes)]
    host = joined.to("cpu", non_blocking=True)
    event = module.Event()
    event.record(module.current_stream(tensors[0].device))

    def arrived() -> list[bytes]:
        event.synchronize()
        return [tensor.numpy().tobytes() for tensor in torch.split(host, sizes)]

    return arrived


def _picked(tensor: Tensor) -> Tensor:
    """Return the same elements as a small tensor; indices are computed here, so that nothing waits for the device."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    number = tensor.numel()
    step = max(1, number // NUM_ELEMENTS)
    if tensor.is_contiguous():
        return tensor.view(-1)[::step].contiguous()
    return torch.stack([tensor[np.unravel_index(place, tensor.shape)] for place in range(0, number, step)])
