"""What a stage's blocks call while a slice runs: attention sees earlier slices, dropout draws for the whole sequence.

Everything else works token by token. What is known to carry something along a sequence otherwise is refused by name.
Calls are seen as torch shows them to a `TorchFunctionMode`, so models need not be changed, nor functions of torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from drumline.core.errors import ModelError
from drumline.core.slices.division import SliceLengths
from drumline.features.slices.attention import SliceMemory, attend
from drumline.model.layers.routing import is_traced
from drumline.model.values import pack
from drumline.runtime.sequences import sequences_in
from drumline.runtime.step import CalledWith

Key = tuple[int, str, int, int]  # a call of attention in a sequence: stage, block, how many calls before it, microbatch

# What mixes the tokens of a sequence, by the calls that do it.
_MIXES: dict[str, tuple[Callable[..., Any], ...]] = {
    "a convolution": (functional.conv1d, functional.conv2d, functional.conv3d, functional.conv_transpose1d,
                      torch.conv1d, torch.conv2d, torch.conv3d),
    "a recurrent layer": (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
    "attention of its own": (functional.multi_head_attention_forward, torch._native_multi_head_attention,
                             torch._transformer_encoder_layer_fwd),
    "a dropout of whole channels": (functional.alpha_dropout, functional.feature_alpha_dropout, functional.dropout1d,
                                    functional.dropout2d, functional.dropout3d),
    "pooling": (functional.avg_pool1d, functional.max_pool1d, torch.max_pool1d, functional.adaptive_avg_pool1d),
    "statistics of the batch": (functional.batch_norm, torch.batch_norm, functional.instance_norm),
}  # fmt: skip
_ALONG = {torch.cumsum, Tensor.cumsum, torch.cumprod, Tensor.cumprod, torch.logcumsumexp, Tensor.logcumsumexp,
          torch.cummax, Tensor.cummax, torch.cummin, Tensor.cummin,
          torch.flip, Tensor.flip, torch.roll, Tensor.roll}  # fmt: skip
_DRAWS = {torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.bernoulli, Tensor.bernoulli,
          Tensor.bernoulli_, Tensor.normal_, Tensor.uniform_}  # fmt: skip
_ATTENTION_ALONE = "blocks in which only scaled_dot_product_attention sees other tokens"
_NO_CHECKPOINT = (
    'call gradient_checkpointing_disable() of a model of transformers, and pass checkpoint="full" to Pipeline'
)
_SOFTMAX = {torch.softmax, Tensor.softmax, functional.softmax}


class SliceCalls(TorchFunctionMode):
    """Where a slice runs, and what its calls see there; active while blocks of a stage run."""

    def __init__(
        self, division: SliceLengths, around: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        super().__init__()
        self.division = division
        self.around = around  # what blocks run inside of, beside this
        self.memories: dict[Key, SliceMemory] = {}
        self._stage, self._unit, self._block, self._number = 0, 0, "", 0
        self.shapes: tuple[tuple[int, ...], ...] = ()  # of a step's units, where this rank knows them
        self._shape: tuple[int, ...] = (0, 0)  # rows and tokens of the unit
        self._handlers: dict[Any, Callable[..., Any]] = {
            functional.scaled_dot_product_attention: self._attention,
            functional.dropout: self._named_dropout,
            torch.dropout: self._named_dropout,
        }
        for what, functions in _MIXES.items():
            self._handlers.update(dict.fromkeys(functions, self._refusing(what)))
        # Python's functions of torch.nn.functional and the C functions below them are seen alike.
        self._watched = _ALONG | _DRAWS | _SOFTMAX

    # ---- where it is -------------------------------------------------------------------------------------------------

    def at(self, stage: int, unit: int, value: Any) -> SliceCalls:
        """Let blocks of a stage run on a unit inside of `with`; what is not known of its shape, their input tells."""
        self._stage, self._unit = stage, unit
        if self.shapes:
            self._shape = self.shapes[unit]
        else:
            tensors = [tensor for tensor in pack(value)[0] if tensor.dim() > 1]
            largest = max(tensors, key=lambda tensor: (tensor.dim() == 3, tensor.numel()), default=None)
            self._shape = (0, 0) if largest is None else tuple(largest.shape[:2])
        return self

    def enter(self, block: str) -> None:
        """Begin a block: its calls of attention are counted from here."""
        self._block, self._number = block, 0

    def begin(self, units: CalledWith) -> None:
        """Forget all sequences, and note the shapes of a step's units."""
        self.clear()
        args, named, target = units
        self.shapes = tuple(tuple(tensor.shape[:2]) for tensor in sequences_in(*args, *named.values(), target))

    def clear(self) -> None:
        """Forget all sequences."""
        self.memories.clear()
        self.shapes = ()

    def context(self, stage: int) -> list[Tensor]:
        """Return the keys and values that a stage keeps, and their gradients so far."""
        memories = [memory for (index, *_), memory in self.memories.items() if index == stage]
        return [tensor for memory in memories for tensor in memory.tensors()]

    # ---- calls -------------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a call of a block."""
        handler = self._handlers.get(func)
        if handler is not None and not _are_traced(args) and not _are_traced((kwargs or {}).values()):
            if _runs_again():
                self._refuse("a checkpoint of its own", "blocks that the pipeline runs again itself", _NO_CHECKPOINT)
            return handler(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func in self._watched and not _are_traced(result if isinstance(result, tuple) else [result]):
            self._look(func, args, result)
        return result

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            raise ModelError(
                f"attention in block {self._block!r} gets a mask, and its sequences are divided into slices",
                expected="is_causal=True and no mask: a mask is made for one slice alone",
                fix="leave out padding masks, packed documents and windows shorter than the sequence, or use slices=1",
            )
        if not is_causal or query.shape[-2] != key.shape[-2]:
            raise ModelError(
                f"attention in block {self._block!r} is not causal attention of a sequence to itself, and its"
                " sequences are divided into slices",
                expected="is_causal=True, and as many keys as queries",
                fix="use slices=1 for models with cross attention, a cache, or attention to later tokens",
            )
        if self.shapes and query.shape[-2] != self._shape[1]:
            self._refuse(f"attention over {query.shape[-2]} of {self._shape[1]} tokens")
        if torch.is_autocast_enabled(query.device.type):
            kind = torch.get_autocast_dtype(query.device.type)
            query, key, value = (tensor.to(kind) for tensor in (query, key, value))
        microbatch, number = self.division.place(self._unit)
        noise = self._noise(query, number, dropout_p) if dropout_p > 0.0 else None
        place = (self._stage, self._block, self._number, microbatch)
        self._number += 1
        memory = self.memories.get(place)
        if memory is None:
            memory = self.memories[place] = SliceMemory()
        output = attend(query, key, value, memory, number, scale=scale, noise=noise)
        if number == self.division.num_slices - 1 and not output.requires_grad:  # nothing goes back
            del self.memories[place]
        return output

    def _noise(self, query: Tensor, number: int, chance: float) -> Tensor:
        """Return what dropout multiplies the weights of a slice's queries by, as drawn for the whole sequence."""
        if not query.is_cpu:
            raise ModelError(
                f"attention in block {self._block!r} has a dropout of {chance}, and its sequences are divided into"
                " slices",
                expected="dropout inside of attention on a CPU alone: kernels of devices draw by places of a sequence",
                fix="set the dropout of attention to 0, or use slices=1",
            )
        start, stop, length = self.division.bounds(query.shape[-2], number)
        shape = (*query.shape[:-2], length, length)
        kind = query.dtype if query.dtype is torch.float64 else torch.float32
        whole = functional.dropout(torch.ones(shape, dtype=kind), chance)
        return whole[..., start:stop, :stop].to(query.dtype)

    def _named_dropout(self, *args: Any, **named: Any) -> Tensor:
        names = {"input": "value", "train": "training"}
        return self._dropout(*args, **{names.get(name, name): value for name, value in named.items()})

    def _dropout(self, value: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return value
        rows, tokens = self._shape
        if value.dim() > 1 and value.shape[:2] == self._shape:
            noise = self._drawn(value, tokens, p)
        elif value.dim() > 1 and value.shape[0] == rows * tokens:  # all tokens in one dimension
            noise = self._drawn(value.view(*self._shape, *value.shape[1:]), tokens, p).flatten(0, 1)
        else:
            self._refuse(f"a dropout of the shape {tuple(value.shape)} where slices have {rows} x {tokens} tokens")
        return value.mul_(noise) if inplace else value * noise

    def _drawn(self, value: Tensor, tokens: int, p: float) -> Tensor:
        """Return what dropout multiplies a slice by, as drawn for the whole sequence: in the order of its memory."""
        start, stop, length = self.division.bounds(tokens, self.division.place(self._unit)[1])
        strides = value.stride()
        order = sorted(range(value.dim()), key=lambda at: (-strides[at], at))
        shape = [length if at == 1 else value.shape[at] for at in order]
        ones = torch.ones(shape, dtype=value.dtype, device=value.device)
        return functional.dropout(ones.permute([order.index(at) for at in range(value.dim())]), p)[:, start:stop]

    def _look(self, function: Any, args: tuple[Any, ...], result: Any) -> None:
        """Refuse what works along a sequence: sums over it, numbers drawn for its tokens, attention by products."""
        result = result[0] if isinstance(result, tuple) else result  # values and their places
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return
        name = getattr(function, "__name__", str(function))
        if function in _SOFTMAX:
            has_heads = result.dim() == 4 or (result.dim() == 3 and result.shape[0] != self._shape[0])
            if has_heads and result.shape[-1] == result.shape[-2] > 1:
                self._refuse("attention by a softmax of its own")
        elif result.dim() > 1 and (result.shape[:2] == self._shape or result.shape[0] == math.prod(self._shape) > 1):
            self._refuse(f"`{name}` over a sequence")

    def _refusing(self, what: str) -> Callable[..., Any]:
        def refuse(*args: Any, **settings: Any) -> Any:
            self._refuse(what)

        return refuse

    def _refuse(self, what: str, expected: str = _ATTENTION_ALONE, fix: str = "use slices=1") -> NoReturn:
        raise ModelError(
            f"block {self._block!r} has {what}, and its sequences are divided into slices", expected=expected, fix=fix
        )


def _runs_again() -> bool:
    """Whether this is a forward inside of `torch.utils.checkpoint`, which its backward repeats."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != torch.utils.checkpoint.__file__:
        frame = frame.f_back
    return frame is not None


def _are_traced(values: Iterable[Any]) -> bool:
    return any(isinstance(value, Tensor) and is_traced(value) for value in values)
