"""Microbatches through the model by itself, with nothing left behind: what pieces must equal.

    forward 0, backward 0, forward 1, backward 1      as plain training runs them; only a pipeline interleaves them

None of its gradients stays in the model. As each is made, its sketch is taken and its memory freed, which the next one
uses again; only those that are wanted in full leave for the host. There they are taken, not copied, unless others hold
their memory too.
Buffers, attributes, random generators and gradients of before are given back. The user's hooks run, since what they do
is part of the model; those that run once a parameter's gradient has been added do not, since an optimizer may be in
them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.engine.unsplit.keeping import undisturbed
from drumline.engine.unsplit.plain import ByItself
from drumline.model.loss.sheet import Factors
from drumline.model.precision import Precision
from drumline.model.randomness import HostChance, Randomness
from drumline.model.values import mapped, moved
from drumline.runtime.gradients.sketch import sketch


@dataclass(frozen=True, slots=True)
class Slice:
    """One microbatch of a step: its number, what goes in, what is wanted, and what part of the loss it is.

    `factors` are what the parts of a model's own loss are multiplied by. `seen_share` returns what part of the loss it
    is once the loss has run: some must be seen before it is known.
    """

    microbatch: int
    inputs: Any
    target: Any
    share: float
    factors: Factors = ()
    seen_share: Callable[[], float] | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the model by itself made of a microbatch, on the host but for sketches."""

    output: Any
    loss: Tensor
    share: float  # what part of the batch's loss it was taken for
    gradients: dict[nn.Parameter, Tensor]  # in full
    sketches: dict[nn.Parameter, Tensor]
    drew: bool  # whether it drew random numbers of torch's
    drew_elsewhere: bool  # whether it drew some of Python's or numpy's, which nobody seeds
    loss_drew: bool = False  # whether the loss function drew some, which are others in every order of microbatches


def plain_steps(
    plain: ByItself,
    each: Sequence[Slice],
    loss_fn: Callable[[Any, Any], Tensor | None],
    *,
    wanted: Collection[nn.Parameter],
    sketched: Collection[nn.Parameter] = (),
    device: torch.device,
    randomness: Randomness,
    precision: Precision,
    scale: float = 1.0,
    multiplying: Callable[[Slice], AbstractContextManager[object]] = lambda _: nullcontext(),
    others: Iterable[nn.Parameter] = (),
    keeping: Any = None,
) -> list[Wanted]:
    """Run microbatches one after another, and return what the model by itself makes of each.

    These are the gradients of the parameters that are `wanted`, with the loss times its share, and sketches of those to
    be `sketched`. What blocks keep of one microbatch the next one finds, and nobody afterwards. `others` are parameters
    outside of the model, such as those of a loss. The user's own loss may be `keeping` something too.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> from drumline.engine.unsplit.plain import Plain
    >>> [seen] = plain_steps(
    ...     Plain([model], ["0"]), [Slice(0, torch.ones(3, 2), None, 1.0)], lambda output, _: output.sum(),
    ...     wanted=[model.weight], device=torch.device("cpu"), randomness=Randomness(0, torch.device("cpu")),
    ...     precision=Precision(),
    ... )
    >>> seen.gradients[model.weight], model.weight.grad
    (tensor([[3., 3.]]), None)
    """
    found, made = _Collected(frozenset(wanted), frozenset(sketched)), []
    chance = HostChance()
    modules = plain.modules
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_on(device, modules))
        stack.enter_context(undisturbed(modules, keeping))
        stack.enter_context(found.collecting([*plain.named_parameters().values(), *others]))
        stack.enter_context(randomness.kept_aside())
        stack.enter_context(chance.kept())
        for given in each:
            found.begin()
            inputs, target = moved(given.inputs, device), moved(given.target, device)
            inputs = mapped(inputs, lambda one: one.detach().clone())  # a model may change them in place
            with plain.seeding(given.microbatch, randomness) as run:
                with randomness.listening() as drawing, precision.autocast:
                    with multiplying(given):
                        output = run(inputs)
                    before = randomness.states()
                    loss = loss_fn(output, target)
                    loss_drew = randomness.has_moved(before)
                    assert loss is not None, "a step that trains has a loss"
                    loss = precision.full(loss)
                share = given.share if given.seen_share is None else given.seen_share()
                if loss.requires_grad:
                    weight = torch.as_tensor(share * scale, dtype=loss.dtype, device=loss.device)
                    torch.autograd.backward(loss, weight)
            found.finish()
            on_host = mapped(output, lambda one: one.detach().cpu())
            loss = loss.detach().cpu()
            drew = bool(drawing), False, loss_drew
            made.append(Wanted(on_host, loss, share, found.gradients, found.sketches, *drew))
            del output
    return [replace(one, drew_elsewhere=True) for one in made] if chance.moved else made


class _Collected:
    """Lets every gradient go where it belongs: the host, a sketch, or nowhere."""

    def __init__(self, wanted: frozenset[nn.Parameter], sketched: frozenset[nn.Parameter]) -> None:
        self.wanted, self.sketched = wanted, sketched
        self._parameters: list[nn.Parameter] = []
        self.begin()

    def begin(self) -> None:
        """Begin with another microbatch."""
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self.sketches: dict[nn.Parameter, Tensor] = {}

    def finish(self) -> None:
        """Take what the model's own code has put beside what autograd adds."""
        for one in self._parameters:
            self._take(one)

    def _take(self, one: Tensor) -> None:
        assert isinstance(one, nn.Parameter)
        gradient = one.grad
        if gradient is None:
            return
        if one in self.sketched:
            made = sketch(gradient)
            self.sketches[one] = self.sketches[one] + made if one in self.sketches else made
        if one in self.wanted:
            copy = _is_shared(gradient)  # asked before `detach`, which shares the memory too
            made = gradient.detach().to("cpu", copy=copy)
            made = made if made.layout is torch.strided else made.to_dense()
            self.gradients[one] = self.gradients[one] + made if one in self.gradients else made
        one.grad = None

    @contextmanager
    def collecting(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Take what a backward makes, and give back the gradients of before."""
        self._parameters = parameters = list(dict.fromkeys(parameters))
        before = [(one, one.grad, one._post_accumulate_grad_hooks) for one in parameters]
        handles = []
        try:
            for one in parameters:
                one.grad = None
                one._post_accumulate_grad_hooks = None  # type: ignore[assignment]
                if one.requires_grad:
                    handles.append(one.register_post_accumulate_grad_hook(self._take))  # type: ignore[no-untyped-call]
            yield
        finally:
            for handle in handles:
                handle.remove()
            for one, gradient, hooks in before:
                if hooks is not None:
                    one._post_accumulate_grad_hooks = hooks
                one.grad = gradient


def _is_shared(gradient: Tensor) -> bool:
    """Whether others hold a gradient's memory too, a buffer of the model's perhaps, and may change it."""
    storage = gradient.untyped_storage() if gradient.layout is torch.strided else None
    return storage is None or torch._C._storage_Use_Count(storage._cdata) > 2  # the gradient, and `storage` here


@contextmanager
def _on(device: torch.device, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Have all of the model on a device, and give back what was elsewhere."""
    tensors = [one for module in modules for one in (*module._parameters.values(), *module._buffers.values())]
    away = [(one, one.data) for one in dict.fromkeys(tensors) if one is not None and not _is_on(one, device)]
    if any(one.is_meta for one, _ in away):
        raise ModelError("part of the model is on the meta device", expected="all of it in memory")
    try:
        for one, data in away:
            one.data = data.to(device)
        yield
    finally:
        for one, data in away:
            one.data = data


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and (device.index is None or tensor.device.index == device.index)
