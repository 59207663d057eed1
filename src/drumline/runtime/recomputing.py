"""Blocks that run twice: what the first run skips, and the buffers (running statistics) that it changes.

A checkpointed segment runs twice, and both runs must compute the same bits. Some kernels and modules check whether
gradients are on. oneDNN's LSTM uses another kernel on x86; a transformer layer in eval mode uses a fused one on every
processor; and Python code may branch. So the first run records a graph like the second, but saves no tensor in it:

    torch.no_grad()    other kernels, nothing saved
    discarding()       the kernels of training, nothing saved
    torch.enable_grad  the kernels of training, everything saved

Buffers change once per microbatch, not twice. Before a forward that will be recomputed, the buffers that forwards are
known to change are copied. The recomputation runs on these copies, so it sees what the first run saw. Afterwards the
current buffers are restored.

Comparing values over the first forward in each mode (training or not) shows which buffers change; after that, their
versions do. Normalisations are always assumed to change theirs, because they bypass the versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from drumline.core.errors import ModelError
from drumline.model.patches import put_in


class Buffers:
    """The buffers of some modules, and which of them forwards change."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        modules_seen = dict.fromkeys(part for module in modules for part in module.modules())
        self.places: list[tuple[nn.Module, str]] = [
            (part, name) for part in modules_seen for name, buffer in part._buffers.items() if buffer is not None
        ]
        self._statistics = {
            index for index, (part, _) in enumerate(self.places) if isinstance(part, nn.modules.batchnorm._NormBase)
        }
        self._changing: dict[tuple[bool, ...], set[int]] = {}  # by mode
        self._before: tuple[dict[int, Tensor], list[tuple[int, int]]] | None = None
        self._asked = self._marks()

    def save(self) -> dict[int, Tensor]:
        """Return copies of the buffers that may change; in a mode's first forward, all of them."""
        if not self.places:
            return {}
        changing = self._changing.get(self._mode(), set(range(len(self.places))))
        saved = {index: self._at(index).detach().clone() for index in changing}
        self._before = saved, self._marks()
        return saved

    def learn(self) -> None:
        """After the forward that followed `save`, remember which buffers it changed."""
        if self._before is None:
            return
        (saved, marks), self._before = self._before, None
        now = self._marks()
        by_value = {index for index, copy in saved.items() if not torch.equal(copy, self._at(index))}
        by_version = {index for index, mark in enumerate(now) if mark != marks[index]}
        self._changing.setdefault(self._mode(), set()).update(by_value, by_version, self._statistics)

    def undo(self, saved: dict[int, Tensor]) -> None:
        """Restore the buffers' values from `save`, for a forward that starts again."""
        if self._before is not None:
            self._refuse_unsaved(saved, self._before[1])
        with torch.no_grad():
            for index, copy in saved.items():
                self._at(index).copy_(copy)

    def _refuse_unsaved(self, saved: dict[int, Tensor], marks: list[tuple[int, int]]) -> None:
        changed = [at for at, mark in enumerate(self._marks()) if mark != marks[at] and at not in saved]
        if changed:
            raise ModelError(
                f"a block changes its buffer {self.places[changed[0]][1]} and takes a gradient inside its forward; "
                "in earlier steps it did neither",
                expected="a recomputed block to do the same in every step",
                fix='do not recompute this block: checkpoint="none", or name the other blocks',
            )

    def changed_lately(self) -> bool:
        """Whether any buffer has changed since the last call (the first time, ever), or may change unseen."""
        before, self._asked = self._asked, self._marks()
        updating = any(self.places[index][0].training for index in self._statistics)
        return updating or before != self._asked

    def as_they_were(self, saved: dict[int, Tensor]) -> AbstractContextManager[None]:
        """Run on the saved copies, then restore the current buffers."""
        places = ((self.places[index], copy) for index, copy in saved.items())
        return put_in((module._buffers, name, copy) for (module, name), copy in places)

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Return every buffer with a copy of it."""
        buffers = [self._at(index) for index in range(len(self.places))]
        return [(buffer, buffer.detach().clone()) for buffer in buffers]

    def put_back(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        """Restore the buffers' values from when `copies` was called."""
        with torch.no_grad():
            for (module, name), (buffer, copy) in zip(self.places, copies, strict=True):
                module._buffers[name] = buffer.copy_(copy)

    def _at(self, index: int) -> Tensor:
        module, name = self.places[index]
        buffer = module._buffers[name]
        assert buffer is not None
        return buffer

    def _mode(self) -> tuple[bool, ...]:
        return tuple(module.training for module, _ in self.places)

    def _marks(self) -> list[tuple[int, int]]:
        return [(id(self._at(index)), self._at(index)._version) for index in range(len(self.places))]


class GraphNeeded(BaseException):
    """Ends a forward that takes a gradient itself; a model's own `except Exception` must not catch it."""


def _discard(tensor: Tensor) -> None:
    """Save nothing."""


def _missing(saved: None) -> NoReturn:
    raise GraphNeeded


def uses_kept(blocks: Iterable[str]) -> ModelError:
    """Return what to raise for a backward through what a recomputed block kept of its first run: it has no graph."""
    return ModelError(
        f"one of the blocks {', '.join(blocks)}, or the loss, uses a tensor that a recomputed block created but did "
        "not return",
        expected="recomputed blocks that return all that other blocks and the loss use",
        fix="return it from the block that creates it, as (x, aux), or do not recompute that block",
    )


@contextmanager
def discarding() -> Iterator[None]:
    """Record a graph in which no tensor is saved; a forward that needs one raises GraphNeeded.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> with discarding():
    ...     loss = (weight * weight).sum()
    >>> loss.requires_grad
    True
    """
    try:
        with torch.enable_grad(), saved_tensors_hooks(_discard, _missing):
            yield
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        raise GraphNeeded from error  # torch.func's gradients refuse such hooks
