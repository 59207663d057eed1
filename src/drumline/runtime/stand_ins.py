"""What a block returns while a model is followed: from memory, by running it on stand-ins, or in the end on zeros."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.runtime.skeleton import Skeleton
from drumline.runtime.values import pack, unpack

Known = dict[Any, tuple[Any, tuple[int | tuple[torch.Size, torch.dtype], ...]]]


class StandIns:
    """Runs blocks on stand-ins; `known` remembers what they return from one following to the next."""

    def __init__(self, skeleton: Skeleton, known: Known) -> None:
        self.skeleton = skeleton
        self.known = known

    def run(self, module: nn.Module, name: str, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what a block makes: from memory, by running it on stand-ins, or in the end on zeros."""
        tensors, form = pack((args, kwargs))
        shapes = tuple((one.shape, one.dtype) for one in tensors)
        key = (name, str(form), shapes, module.training)
        alike = (_kind(module), str(form), shapes, module.training)
        if key in self.known:
            return self._remembered(self.known[key], tensors)
        if alike in self.known:  # one like it could not run on stand-ins
            return self._remembered(self.known[alike], tensors)
        try:
            with _quiet(), self.skeleton.mode:
                made = call(*args, **kwargs)
        except ModelError:
            raise
        except Exception:
            made = self.skeleton.really(module, args, kwargs)
            key = alike
        outputs, output_form = pack(made)
        places = {id(one): at for at, one in enumerate(tensors)}
        self.known[key] = (
            output_form, tuple(places.get(id(one), (one.shape, one.dtype)) for one in outputs)
        )  # fmt: skip
        return made

    def _remembered(self, memory: tuple[Any, Sequence[Any]], tensors: Sequence[Tensor]) -> Any:
        form, outputs = memory
        fakes = iter(self.skeleton.fakes(tuple(one for one in outputs if not isinstance(one, int))))
        return unpack([tensors[one] if isinstance(one, int) else next(fakes) for one in outputs], form)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging that a function cannot run on stand-ins: there is another way."""
    loggers = [logging.getLogger(f"torch._subclasses.{name}") for name in ("fake_tensor", "fake_impls")]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger in loggers:
            logger.disabled = False


def _kind(module: nn.Module) -> str:
    """Return what modules have in common that return the same kind of thing."""
    shapes = [(name, tuple(one.shape), one.dtype) for name, one in module.named_parameters()]
    return f"{type(module)} {module} {shapes}"
