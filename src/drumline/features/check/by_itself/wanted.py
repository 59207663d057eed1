"""What the model by itself makes of microbatches, with nothing left behind: what pieces must equal.

None of its gradients stays in the model. As each is made, its sketch is taken and its memory freed, which the next one
uses again; only those that are wanted in full leave for the host. There they are taken, not copied, unless others hold
their memory too.
Buffers, attributes, random generators and gradients of before are given back. The user's hooks run, since what they do
is part of the model. Hooks that run once a parameter's gradient has been added do not run, since they may contain an
optimizer, or note what was added.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.engine.unsplit.plain import Plain
from drumline.engine.unsplit.unsplit_step import Made, UnsplitMicrobatch, unsplit_step
from drumline.features.check.gradients.sketch import sketch
from drumline.model.hooks import hooks_behind, with_holders
from drumline.model.kept_state.keeping import as_before
from drumline.model.patches import having_gradients
from drumline.model.precision import Precision
from drumline.model.quantised.packed import is_packed
from drumline.model.quantised.placing import is_on, packed_on
from drumline.model.randomness import Randomness
from drumline.model.values import mapped, moved
from drumline.model.watch.keeping import nothing_left


@dataclass(frozen=True, slots=True)
class PlainResult:
    """What the model by itself made of a microbatch, and its gradients."""

    outcome: Made
    gradients: dict[nn.Parameter, Tensor]  # in full, on the host
    sketches: dict[nn.Parameter, Tensor]
    drew_elsewhere: bool = False  # whether it drew random numbers of Python's or numpy's, which nobody seeds


def wanted_of(
    plain: Plain,
    each: Sequence[UnsplitMicrobatch],
    loss_fn: Callable[[Any, Any], Tensor | None],
    *,
    trained: Collection[nn.Parameter],
    in_full: bool,
    device: torch.device,
    randomness: Randomness,
    precision: Precision,
    scale: float = 1.0,
    multiplying: Callable[[UnsplitMicrobatch], AbstractContextManager[object]] = lambda _: nullcontext(),
    others: Iterable[nn.Parameter] = (),
    keeping: Any = None,
    goes_back: bool = True,
) -> list[PlainResult]:
    """Run microbatches one after another, and return what the model by itself makes of each.

    Gradients of what is `trained` are sketched; if they are wanted `in_full`, they are copied too. What blocks keep of
    one microbatch the next one finds, and nobody afterwards. `others` are parameters outside of the model, such as
    those of a loss. The user's own loss may be `keeping` something too. Without a backward, it keeps no activations.
    """
    collector = _GradientCollector(frozenset(trained), in_full=in_full)
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(goes_back))
        stack.enter_context(_on(device, plain.modules))
        stack.enter_context(as_before(plain.modules))
        chance = stack.enter_context(nothing_left(plain.modules, randomness, keeping))
        stack.enter_context(collector.collecting([*plain.named_parameters().values(), *others]))
        microbatches = (_on_device(microbatch, device) for microbatch in each)
        run = unsplit_step(
            plain,
            microbatches,
            loss_fn,
            randomness=randomness,
            precision=precision,
            scale=scale,
            multiplying=multiplying,
        )
        results = [PlainResult(outcome, *collector.finished()) for outcome in run]
    return [replace(result, drew_elsewhere=True) for result in results] if chance.moved else results


def _on_device(microbatch: UnsplitMicrobatch, device: torch.device) -> UnsplitMicrobatch:
    """Return a microbatch on a device, with inputs that the model may change in place."""
    inputs = mapped(moved(microbatch.inputs, device), lambda tensor: tensor.detach().clone())
    return replace(microbatch, inputs=inputs, target=moved(microbatch.target, device))


class _GradientCollector:
    """Lets every gradient go where it belongs: the host, a sketch, or nowhere."""

    def __init__(self, trained: frozenset[nn.Parameter], *, in_full: bool) -> None:
        self.trained, self.in_full = trained, in_full
        self._parameters: list[nn.Parameter] = []
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self.sketches: dict[nn.Parameter, Tensor] = {}

    def finished(self) -> tuple[dict[nn.Parameter, Tensor], dict[nn.Parameter, Tensor]]:
        """Return a microbatch's gradients and sketches, with what the model's own code has put beside autograd's."""
        for param in self._parameters:
            self._take(param)
        gradients = self.gradients, self.sketches
        self.gradients, self.sketches = {}, {}
        return gradients

    def _take(self, tensor: Tensor) -> None:
        assert isinstance(tensor, nn.Parameter)
        gradient = tensor.grad
        if gradient is None:
            return
        if tensor in self.trained:
            sketched = sketch(gradient)
            self.sketches[tensor] = self.sketches[tensor] + sketched if tensor in self.sketches else sketched
        if tensor in self.trained and self.in_full:
            copy = _is_shared(gradient)  # asked before `detach`, which shares the memory too
            sketched = gradient.detach().to("cpu", copy=copy)
            sketched = sketched if sketched.layout is torch.strided else sketched.to_dense()
            self.gradients[tensor] = self.gradients[tensor] + sketched if tensor in self.gradients else sketched
        tensor.grad = None

    @contextmanager
    def collecting(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Take what a backward makes, and give back the gradients of before."""
        self._parameters = parameters = list(dict.fromkeys(parameters))
        before = [(param, param._post_accumulate_grad_hooks) for param in parameters]
        behind = [(table, dict(table)) for param in with_holders(parameters) if (table := hooks_behind(param))]
        handles = []
        try:
            for table, _ in behind:
                table.clear()
            for param in parameters:
                param._post_accumulate_grad_hooks = None  # type: ignore[assignment]
                if param.requires_grad:
                    handles.append(param.register_post_accumulate_grad_hook(self._take))  # type: ignore[no-untyped-call]
            with having_gradients(parameters):
                yield
        finally:
            for handle in handles:
                handle.remove()
            for table, hooks in behind:
                table.update(hooks)
            for param, hooks in before:
                if hooks is not None:
                    param._post_accumulate_grad_hooks = hooks


def _is_shared(gradient: Tensor) -> bool:
    """Whether others hold a gradient's memory too, a buffer of the model's perhaps, and may change it."""
    storage = gradient.untyped_storage() if gradient.layout is torch.strided else None
    return storage is None or torch._C._storage_Use_Count(storage._cdata) > 2  # the gradient, and `storage` here


@contextmanager
def _on(device: torch.device, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Have all of the model on a device, and give back what was elsewhere."""
    tensors = [param for module in modules for param in (*module._parameters.values(), *module._buffers.values())]
    plain = (value for value in dict.fromkeys(tensors) if value is not None and not is_packed(value))
    away = [(value, value.data) for value in plain if not is_on(value, device)]
    if any(tensor.is_meta for tensor, _ in away):
        raise ModelError("part of the model is on the meta device", expected="all of it in memory")
    try:
        for tensor, data in away:
            tensor.data = data.to(device)
        with packed_on(device, modules):
            yield
    finally:
        for tensor, data in away:
            tensor.data = data
