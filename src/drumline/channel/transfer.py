"""Send tensors of any kind from rank to rank, in messages of a few sizes.

    weight | bias | exp_avg | step ──► bytes, one after the other ──► messages of 4 MiB, the last one smaller

Messages of few sizes keep the channel's memory small and its list of layouts short. The receiver knows dtypes and
shapes, and how many messages come.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drumline.channel.channel import Channel, Wait
from drumline.core.action import Action, Op

_MOST, _LEAST = 4 * 2**20, 64 * 2**10
_BETWEEN_STEPS = -1


class TensorShape(NamedTuple):
    """What a receiver must know of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_host: bool  # whether it is on the host even if the stages are not

    @staticmethod
    def of(tensor: Tensor) -> TensorShape:
        """Return it for a tensor."""
        return TensorShape(tensor.dtype, tuple(tensor.shape), tensor.is_cpu)

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class LayerWait(Wait):
    """A rank waits for layers of another."""

    def __str__(self) -> str:
        return f"rank {self.rank} waits for layers that rank {self.source} moves to it"


def sizes_of(num_bytes: int) -> list[int]:
    """Return the sizes of the messages that carry so many bytes.

    >>> [size // 1024 for size in sizes_of(9 * 2**20)], sizes_of(1), sizes_of(0)
    ([4096, 4096, 1024], [65536], [])
    """
    whole, rest = divmod(num_bytes, _MOST)
    return [_MOST] * whole + ([max(_LEAST, 1 << (rest - 1).bit_length())] if rest else [])


def transferred(
    channel: Channel,
    sent: Mapping[int, Sequence[Tensor]],
    coming: Mapping[int, Sequence[TensorShape]],
    device: torch.device,
    arrived: dict[int, list[Tensor]],
) -> Generator[Wait, None, None]:
    """Send tensors to other ranks, and put what comes from them into `arrived`; yield to wait for a message."""
    channel.begin(_BETWEEN_STEPS)
    for source, shapes in coming.items():
        for number in range(len(sizes_of(sum(shape.num_bytes for shape in shapes)))):
            channel.post(_key(number), source)
    for target, tensors in sent.items():
        for number, message in enumerate(_messages(tensors, device)):
            channel.send(_key(number), target, (message,), None)
    for source, shapes in coming.items():
        copies = arrived[source] = [torch.empty(s.shape, dtype=s.dtype, device=_place(s, device)) for s in shapes]
        places = _places(copies)
        for number in range(len(sizes_of(sum(shape.num_bytes for shape in shapes)))):
            while (delivery := channel.take(_key(number), source)) is None:
                yield LayerWait(channel.rank, _key(number), _key(number), source)
            _spread(delivery.tensors[0], places)


def _key(number: int) -> Action:
    return Action(number, Op.REDUCE_GRAD)


def _place(shape: TensorShape, device: torch.device) -> torch.device:
    return torch.device("cpu") if shape.on_host else device


def _bytes(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _messages(tensors: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yield the bytes of tensors in messages; what fills one by itself is not copied.

    >>> originals = [torch.arange(2**20), torch.ones(3), torch.zeros(0), torch.arange(2**19)]
    >>> messages = list(_messages(originals, torch.device("cpu")))
    >>> [message.numel() // 1024 for message in messages]
    [4096, 4096, 4096, 64]
    >>> copies = [torch.empty_like(value) for value in originals]
    >>> places = _places(copies)
    >>> for message in messages:
    ...     _spread(message, places)
    >>> all(torch.equal(*pair) for pair in zip(originals, copies))
    True
    """
    parts = [_bytes(tensor) for tensor in tensors]
    sizes = sizes_of(sum(part.numel() for part in parts))
    left = [part for part in reversed(parts) if part.numel()]
    for size in sizes:
        if left[-1].numel() >= size and left[-1].device == device:
            yield left[-1][:size]
            _shorten(left, size)
            continue
        flat = torch.empty(size, dtype=torch.uint8, device=device)
        at = 0
        while left and at < size:
            piece = left[-1][: size - at]
            flat[at : at + piece.numel()].copy_(piece)
            at += piece.numel()
            _shorten(left, piece.numel())
        yield flat


def _shorten(left: list[Tensor], size: int) -> None:
    """Take so many bytes off the last tensor."""
    rest = left.pop()[size:]
    if rest.numel():
        left.append(rest)


def _places(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors' memory as bytes, the last first."""
    return [tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in reversed(tensors)]


def _spread(flat: Tensor, places: list[Tensor]) -> None:
    """Fill the next places with the bytes of a message."""
    at = 0
    while places and at < flat.numel():
        place = places.pop()
        piece = flat[at : at + place.numel()]
        place[: piece.numel()].copy_(piece)
        at += piece.numel()
        if piece.numel() < place.numel():
            places.append(place[piece.numel() :])
