"""How the tensors of a message are packed into one piece of memory, and how ranks agree on it.

    tensors   (8, 4) float32 | () bool | (3,) int64        form   how they are put together
    bytes     0 ......... 128 | 128    | 192 ... 216         each starts at a multiple of 64

Most messages of an edge look like an earlier one: a layout is sent once, and afterwards only by its number.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drumline.core.errors import ModelError

ALIGNMENT = 64
# Layouts beyond the limit share this number: each is sent again, right before its message.
ONE_OFF = 0xFFFF
_MOST_KEPT = 1024

TypeAndShape = tuple[torch.dtype, tuple[int, ...]]


class MessageLayout:
    """Dtypes, shapes and offsets of a message's tensors.

    >>> layout = MessageLayout(0, ((torch.float32, (8, 4)), (torch.bool, ()), (torch.int64, (3,))), form=None)
    >>> layout.offsets, layout.num_bytes, layout.room
    ((0, 128, 192), 153, 216)
    """

    __slots__ = ("form", "is_told", "metas", "num_bytes", "number", "offsets", "room", "sizes")

    def __init__(self, number: int, metas: tuple[TypeAndShape, ...], form: Any) -> None:
        self.number = number
        self.metas = metas
        self.form = form
        self.is_told = False
        self.sizes = tuple(math.prod(shape) * dtype.itemsize for dtype, shape in metas)
        offsets, self.room = [], 0
        for size in self.sizes:
            offsets.append(-(-self.room // ALIGNMENT) * ALIGNMENT)
            self.room = offsets[-1] + size
        self.offsets = tuple(offsets)
        self.num_bytes = sum(self.sizes)

    @property
    def is_kept(self) -> bool:
        """Whether both sides remember it by its number."""
        return self.number != ONE_OFF

    def text(self) -> bytes:
        """Return what another rank needs to build the same layout."""
        return pickle.dumps((self.number, self.metas, self.form))

    @staticmethod
    def parse(text: bytes | memoryview) -> MessageLayout:
        """Return the layout of a text."""
        return MessageLayout(*pickle.loads(text))

    def views(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Return the message's tensors as views into a piece of memory (uint8)."""
        # These are kept and reused in other modes: a view created in inference mode is read-only outside it.
        with torch.inference_mode(False), torch.no_grad():
            return tuple(
                memory[offset : offset + size].view(dtype).view(shape)
                if size
                else torch.empty(shape, dtype=dtype, device=memory.device)
                for (dtype, shape), offset, size in zip(self.metas, self.offsets, self.sizes, strict=True)
            )

    def packed(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return one flat byte tensor on `device` with all tensors: the message's own memory if it is contiguous."""
        if len(tensors) == 1 and tensors[0].device == device and tensors[0].is_contiguous():
            tensor = tensors[0].detach().resolve_conj().resolve_neg()
            # A single element may have any stride, which a view as bytes would refuse.
            return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        flat = torch.empty(self.room, dtype=torch.uint8, device=device)
        for view, tensor in zip(self.views(flat), tensors, strict=True):
            view.copy_(tensor.detach())
        return flat

    def unpacked(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors in a flat one; they share its memory but are not views: each can be changed separately."""
        storage = flat.untyped_storage()
        return tuple(
            # Without strides there are no gaps, which torch's types do not know.
            torch.empty(0, dtype=dtype, device=flat.device).set_(storage, offset // dtype.itemsize, shape)  # type: ignore[call-overload]
            for (dtype, shape), offset in zip(self.metas, self.offsets, strict=True)
        )


class MessageLayouts:
    """The layouts that one edge has used, by their contents.

    >>> layouts = MessageLayouts()
    >>> value = layouts.find([torch.zeros(3)], "x")
    >>> layouts.find([torch.ones(3)], "x") is value, layouts.find([torch.ones(3)], "y") is value
    (True, False)
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], list[tuple[bytes, MessageLayout]]] = {}
        self._num_known = 0

    def find(self, tensors: Sequence[Tensor], form: Any) -> MessageLayout:
        """Return the layout of a message; a form must not change after it is used."""
        # Hot: a tuple of dtypes and one of shapes hash faster than pairs; so does the single tensor of most messages.
        if len(tensors) == 1:
            tensor = tensors[0]
            key: tuple[Any, ...] = (tensor.dtype, tensor.shape)
        else:
            key = (tuple([t.dtype for t in tensors]), tuple([t.shape for t in tensors]))
        same = self._known.get(key, [])
        if same and same[0][1].form is form:
            return same[0][1]
        # Compare forms by their bytes: 1, 1.0 and True are equal but not the same.
        text = pickle.dumps(form)
        for index, (other, layout) in enumerate(same):
            if text == other:
                same[0], same[index] = same[index], same[0]
                return layout
        layout = self._new(tensors, form)
        if layout.is_kept:
            self._known.setdefault(key, []).append((text, layout))
        return layout

    def _new(self, tensors: Sequence[Tensor], form: Any) -> MessageLayout:
        for tensor in tensors:
            if tensor.layout is not torch.strided or tensor.is_quantized:
                raise ModelError(
                    f"a {tensor.layout} tensor of {tensor.dtype} cannot be sent",
                    expected="a dense tensor",
                    fix="convert it to a dense tensor first",
                )
        number = self._num_known if self._num_known < _MOST_KEPT else ONE_OFF
        self._num_known += 1
        return MessageLayout(number, tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors), form)
