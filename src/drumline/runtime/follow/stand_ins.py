"""What a block returns while a model is followed: by running it on stand-ins, or in the end on zeros.

Hooks of the block run in any case, on stand-ins, as they will when it really runs. What blocks return that were run on
zeros is remembered for others like them: only the forward of these is left out.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.runtime.follow.ambient import BACKWARD, FORWARD
from drumline.runtime.follow.skeleton import Meta, Skeleton
from drumline.runtime.patches import Patch
from drumline.runtime.values import pack, unpack

Known = dict[Any, tuple[Any, tuple[int | Meta, ...]]]


class StandIns:
    """Runs blocks on stand-ins; `known` remembers what those return that cannot run so."""

    def __init__(self, skeleton: Skeleton, known: Known) -> None:
        self.skeleton = skeleton
        self.known = known

    def run(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what a block makes, hooks and all: on stand-ins, or in the end on zeros or from memory."""
        tensors, form = pack((args, kwargs))
        metas = tuple(Meta.of(one) for one in tensors)
        around = (module.training, torch.is_grad_enabled(), torch.is_autocast_enabled(self.skeleton.device.type))
        key = (_kind(module), str(form), metas, around)
        if key not in self.known:
            try:
                with _QUIET[0].by(self), _QUIET[1].by(self), self.skeleton.mode:
                    return call(*args, **kwargs)
            except ModelError:
                raise
            except Exception:
                self.known[key] = self._on_zeros(module, args, kwargs, tensors)
        with _instead(module, lambda *given, **named: self._remembered(self.known[key], pack((given, named))[0])):
            return call(*args, **kwargs)

    def _on_zeros(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor]
    ) -> tuple[Any, tuple[int | Meta, ...]]:
        with _without_hooks(module):
            outputs, form = pack(self.skeleton.really(module, args, kwargs))
        places = {id(one): at for at, one in enumerate(tensors)}
        return form, tuple(places[id(one)] if id(one) in places else Meta.of(one) for one in outputs)

    def _remembered(self, memory: tuple[Any, Sequence[Any]], tensors: Sequence[Tensor]) -> Any:
        form, outputs = memory
        fakes = iter(self.skeleton.fakes(one for one in outputs if not isinstance(one, int)))
        return unpack([tensors[one] if isinstance(one, int) else next(fakes) for one in outputs], form)


@contextmanager
def _instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module's forward be another one, so that calling it runs its hooks all the same."""
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Leave a module's own hooks out: they are to see stand-ins."""
    kinds = (*FORWARD, *BACKWARD)
    own = {kind: vars(module)[kind] for kind in kinds}
    vars(module).update({kind: OrderedDict() for kind in kinds})
    try:
        yield
    finally:
        vars(module).update(own)


# Keep torch from logging that a function cannot run on stand-ins: there is another way.
_QUIET = [
    Patch(logging.getLogger(f"torch._subclasses.{name}"), "disabled", lambda _: True)
    for name in ("fake_tensor", "fake_impls")
]


def _kind(module: nn.Module) -> str:
    """Return what modules have in common that return the same kind of thing."""
    shapes = [(name, tuple(one.shape), one.dtype) for name, one in module.named_parameters()]
    return f"{type(module)} {module} {shapes}"
