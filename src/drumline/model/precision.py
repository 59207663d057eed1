"""The precision of a stage: that of the model, or autocast to bfloat16 or float16.

Every action that runs a forward enters one autocast context: F with the loss, a recomputation, an evaluation.
Parameters keep their dtype. Autograd casts each weight's gradient back before adding it, so that sums over microbatches
use the parameters' own dtype.

Autocast casts a weight at its first use and drops the cast when its context ends. Every microbatch in flight would then
hold a copy of all weights for its backward. So casts are kept from the first action of a step to the last: each weight
is cast once per step, and all microbatches share the copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from drumline.core.errors import ModelError, nearest
from drumline.model.values import mapped

_KINDS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
LOW = (torch.bfloat16, torch.float16)


class Precision:
    """A choice of precision, on one type of device.

    >>> bf16 = Precision("bf16", torch.device("cpu"))
    >>> with bf16.autocast:
    ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
    torch.bfloat16
    """

    def __init__(self, name: str = "fp32", device: torch.device | None = None) -> None:
        if name not in _KINDS:
            raise ModelError(
                f"precision is {name!r}", expected='"fp32", "bf16" or "fp16"', fix=nearest(str(name), _KINDS)
            )
        self.name = name
        self.dtype = _KINDS[name]
        self.scales = name == "fp16"  # whether to scale the loss, so that small gradients do not vanish
        self.autocast: AbstractContextManager[Any] = nullcontext()
        if self.dtype is not None:
            kind = "cpu" if device is None else device.type
            self.autocast = torch.autocast(kind, dtype=self.dtype, cache_enabled=True)
        # Keeps casts of weights during a step.
        self.step: Callable[[], AbstractContextManager[None]] = nullcontext if self.dtype is None else casts_kept

    def uncached(self) -> AbstractContextManager[Any]:
        """Return the same as `autocast`, which casts a weight again whenever it is used."""
        kind = getattr(self.autocast, "device", "cpu")
        return nullcontext() if self.dtype is None else torch.autocast(kind, dtype=self.dtype, cache_enabled=False)

    def full(self, loss: Tensor) -> Tensor:
        """Return a loss computed under autocast as float32, like its weights and scale."""
        return loss.float() if self.dtype is not None and loss.dtype in LOW else loss


def cast_apart(value: Any) -> Any:
    """Return a stage's input, or a block's, so that autocast casts it again for each use, as inside of a stage.

    It takes a leaf for a weight: it would keep the cast until the step ends, and uses would add their gradients in low
    precision. Without autocast, nobody needs this.
    """
    return mapped(value, lambda tensor: tensor.view_as(tensor) if tensor.is_leaf and tensor.requires_grad else tensor)


@contextmanager
def casts_kept() -> Iterator[None]:
    """Let autocast keep its casts of weights inside, even if contexts end, and drop them afterwards."""
    torch.clear_autocast_cache()
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which a parameter's gradients accumulate.

    >>> gradient_dtype(torch.nn.Parameter(torch.ones(2)))
    torch.float32
    """
    kind: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return parameter.dtype if kind is None else kind


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as every rank does: splitting a product over threads may change its last bits.

    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def settle_products() -> None:
    """Let all later float32 products of this process round alike, on processors without bfloat16 too.

    There, PyTorch's first large bfloat16 product turns oneDNN off for good, and float32 products go to another library.
    Muon makes that product in its first step. A run that continues from a checkpoint would make one forward before it
    that the continued run made after it, and lose the same bits.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it tells with a long stack that oneDNN failed
        square = torch.ones(64, 64, dtype=torch.bfloat16)
        torch.mm(square, square.T)
