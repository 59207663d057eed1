"""The beginnings of a stage's graph, gradients that would get lost there, and gradients taken inside a forward.

Parameters that a block uses without holding them are refused, because their gradient would be lost. A head that reaches
its embedding through a list or a closure hides that the two share a weight. In one process this works, but on another
rank the weight would be a copy that nothing updates. The graph of a first forward shows it.

The graph also shows a tensor that another stage created and left in an attribute, such as a router's loss that
`loss_fn` reads. By then it may belong to another microbatch, and its gradient cannot flow back.

Tensors that a stage received: if a forward takes a gradient of one of several, this misses how the others depend on it
in earlier stages. This is refused by a hook on the tensor, or when autograd says that the tensor needs no gradient.
torch's own frames show which tensors were asked for, so nothing of torch is replaced. A stage that receives one tensor
needs no check.

Gradients that a model takes inside its forward: an energy's forces, a gradient penalty, torch.func.grad.

Layers whose weight gradients wait for W compute with stand-ins of their parameters, so a second derivative through them
would miss the parameters. Therefore, while a forward is recorded, a call of autograd's engine is stopped before it does
anything, and the forward starts again with plain layers. Then I finds their gradients as ordinary ones, and W adds
them. This is right, only early. It is remembered, so that later forwards run this way at once.

The same holds for a hook on a layer's output (`h.register_hook`), because the gradient that W gets has not passed
through it. It also holds for a layer that uses a tensor besides its arguments, whose gradient would end there. Such a
forward also starts again with plain layers.

A reentrant checkpoint (`torch.utils.checkpoint` with `use_reentrant=True`) runs a backward of its own, and works only
if autograd is not told for which tensors. So a forward with one starts again too, and I runs its whole backward.

A forward that is not recorded, as in any schedule without split backwards, replaces nothing of torch.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from drumline.core.errors import ModelError
from drumline.model.patches import Patch, Replacement
from drumline.runtime.backward.tape import Tape


def begun(tensor: Tensor) -> Tensor:
    """Mark a tensor as the beginning of a stage's graph, where only gradients of this stage end."""
    tensor.__dict__["is_beginning"] = True
    return tensor


def leaves_of(roots: Sequence[GradientEdge]) -> Iterator[Tensor]:
    """Yield the tensors with which a graph begins.

    >>> from torch.autograd.graph import get_gradient_edge
    >>> x = nn.Parameter(nn.Linear(2, 2).weight)
    >>> [leaf is x for leaf in leaves_of([get_gradient_edge(x * 3)])]
    [True]
    """
    for node in nodes_of(roots):
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf


def nodes_of(roots: Sequence[GradientEdge]) -> Iterator[Node]:
    """Yield the nodes of a graph, each once."""
    seen_nodes: set[Node] = set()
    todo: list[Node | None] = [root.node for root in roots]
    while todo:
        node = todo.pop()
        if node is None or node in seen_nodes:
            continue
        seen_nodes.add(node)
        yield node
        todo += [source for source, _ in node.next_functions]


def refuse_foreign(
    roots: Sequence[GradientEdge],
    own_parameters: Iterable[nn.Parameter],
    names: Sequence[str],
    begins: Iterable[Tensor],
    *,
    has_loss: bool = False,
    since: int = 0,
) -> None:
    """Refuse a graph that begins with a parameter outside `own_parameters`, or with the beginning of another graph.

    `names` are the blocks that built it, `begins` the tensors with which their graph may begin. With `has_loss`, a
    loss function built it too. `since` is the number of autograd's next node when their forward began.
    """
    known = {id(tensor) for tensor in (*own_parameters, *begins)}
    for leaf in leaves_of(roots):
        if id(leaf) in known:
            continue
        one_of = f"one of the blocks {', '.join(names)}" if names else "the loss"
        is_beginning = getattr(leaf, "is_beginning", False)
        if is_beginning or (names and isinstance(leaf, nn.Parameter) and _goes_back(roots, since)):
            raise ModelError(
                f"{one_of}{', or the loss,' if names else ''} uses a tensor that a block of another stage created but "
                "did not return",
                expected="blocks and a loss that use only what the previous block returns",
                fix="return it from the block that creates it, as (x, aux), and pass it on",
            )
        if isinstance(leaf, nn.Parameter) and has_loss:
            raise ModelError(
                f"{one_of}, or loss_fn, uses a parameter of shape {tuple(leaf.shape)} that this rank's stage does not"
                " hold",
                expected="a loss of the output, the target and its own parameters",
                fix="for a penalty on all weights, use the optimizer's weight_decay; or run all ranks in one process"
                " with a schedule that flushes; for a tied weight, tie it explicitly: head.weight = embedding.weight",
            )
        if isinstance(leaf, nn.Parameter):
            raise ModelError(
                f"{one_of} uses a parameter of shape {tuple(leaf.shape)} that it does not hold",
                expected="every parameter, tied or not, to be an attribute of the module that uses it",
                fix="tie it explicitly: head.weight = embedding.weight; if another block computes a tensor from it, "
                "return that tensor from the block; for a penalty on all weights, use the optimizer's weight_decay",
            )


def _goes_back(roots: Sequence[GradientEdge], since: int) -> bool:
    """Whether a graph has nodes from before a forward: a tensor of another forward came in, by a hook for example."""
    return any(node._sequence_nr() < since for node in nodes_of(roots))


_ASKING = (torch.autograd.grad.__code__, torch.autograd.backward.__code__)
NOTHING: AbstractContextManager[None] = nullcontext()


def looked_after(received: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Refuse gradients of one of several received tensors inside.

    >>> x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> with looked_after([x, y]):
    ...     _ = torch.autograd.grad((x * y).sum(), x)
    Traceback (most recent call last):
    drumline.core.errors.ModelError: a block takes the gradient of one of 2 tensors that it received from the ...
    """
    inputs = [tensor for tensor in received if tensor.is_floating_point() or tensor.is_complex()]
    return _several(inputs) if len(inputs) > 1 else NOTHING


@contextmanager
def _several(inputs: Sequence[Tensor]) -> Iterator[None]:
    def arrived(gradient: Tensor) -> None:
        if _is_asked(traceback.walk_stack(sys._getframe()), inputs):
            raise _refusal(len(inputs))

    without = [tensor for tensor in inputs if not tensor.requires_grad]
    hooks = [tensor.register_hook(arrived) for tensor in inputs if tensor.requires_grad]  # type: ignore[no-untyped-call]
    try:
        yield
    except RuntimeError as error:
        if _is_asked(traceback.walk_tb(error.__traceback__), inputs):
            raise _refusal(len(inputs)) from error
        raise
    finally:
        for hook in hooks:
            hook.remove()
    if not torch.is_grad_enabled() and any(tensor.requires_grad for tensor in without):
        raise _refusal(len(inputs))  # this stage does not train, so the forward took its gradient


def _is_asked(frames: Iterable[tuple[FrameType, int]], tensors: Sequence[Tensor]) -> bool:
    """Whether a call of autograd among the frames asks for the gradient of one of the tensors."""
    asked: list[Any] = []
    for frame, _ in frames:
        if frame.f_code in _ASKING:
            inputs = frame.f_locals.get("inputs")
            asked += [inputs] if isinstance(inputs, Tensor) else inputs or ()
    return any(value is other for value in asked for other in tensors)


def _refusal(number: int) -> ModelError:
    return ModelError(
        f"a block takes the gradient of one of {number} tensors that it received from the previous stage",
        expected="no such gradient: it would miss how the other tensors depend on this one in earlier stages",
        fix="take it in the block that creates the tensor; or, if the others do not depend on x, of x = x.view_as(x)",
    )


class TakesGradients(BaseException):
    """Ends a recorded forward that calls autograd's engine; a model's own `except Exception` must not catch it."""


class Lookout:
    """Watches a recorded forward: calls of autograd's engine, hooks on its layers' outputs, reentrant checkpoints.

    >>> with Lookout(Tape()):
    ...     torch.ones(1, requires_grad=True).backward()
    Traceback (most recent call last):
    drumline.runtime.backward.guards.TakesGradients
    """

    __slots__ = ("is_reentrant", "must_restart", "tape")

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.is_reentrant = False  # whether a checkpoint in it is
        self.must_restart = False  # whether the forward must start again; it may have caught the error

    def __enter__(self) -> Lookout:
        _engine.enter(self)
        _hooks.enter(self)
        _checkpoints.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        _checkpoints.leave()
        _hooks.leave()
        _engine.leave()

    def stop(self) -> None:
        """End the forward, so that it starts again with plain layers."""
        self.must_restart = True
        raise TakesGradients

    def reentrant(self) -> None:
        """End the forward because of a reentrant checkpoint."""
        self.is_reentrant = True
        self.stop()


class Checkpoints:
    """Watches a plain forward, whose I may be asked for tensors: whether a checkpoint in it is reentrant.

    >>> with Checkpoints() as seen:
    ...     _ = torch.utils.checkpoint.checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=True)
    >>> seen.is_reentrant
    True
    """

    __slots__ = ("is_reentrant",)

    def __init__(self) -> None:
        self.is_reentrant = False

    def __enter__(self) -> Checkpoints:
        _checkpoints.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        _checkpoints.leave()

    def reentrant(self) -> None:
        """Take note of a reentrant checkpoint."""
        self.is_reentrant = True


def begin_again() -> None:
    """End a recorded forward that cannot be recorded correctly, so that it starts again with plain layers."""
    if (lookout := _engine.watcher) is not None:
        lookout.stop()


class _Engine:
    """Replaces autograd's engine: all calls from Python pass through here."""

    def __init__(self, replaced: Replacement) -> None:
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replaced.original, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the engine, unless the forward that calls it is being recorded."""
        if (lookout := self._replaced.watcher) is not None:
            lookout.stop()
        return self._replaced.original.run_backward(*args, **kwargs)


def _hooking(replaced: Replacement) -> Callable[..., Any]:
    def register_hook(tensor: Tensor, hook: Callable[..., Any]) -> Any:
        """Register a hook, unless a gradient that a record needs would bypass it."""
        if (lookout := replaced.watcher) is not None:
            node = tensor.grad_fn
            if any(place.node is node for record in lookout.tape.records for place in record.places):
                lookout.stop()
        return replaced.original(tensor, hook)

    return register_hook


class _Reentrant:
    """Replaces the autograd function of reentrant checkpoints."""

    def __init__(self, replaced: Replacement) -> None:
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replaced.original, name)

    def apply(self, *args: Any) -> Any:
        """Run the checkpoint, once the watcher knows of it."""
        if (watcher := self._replaced.watcher) is not None:
            watcher.reentrant()
        return self._replaced.original.apply(*args)


_engine = Patch(torch.autograd.Variable, "_execution_engine", _Engine)
_checkpoints = Patch(torch.utils.checkpoint, "CheckpointFunction", _Reentrant)
_hooks = Patch(Tensor, "register_hook", _hooking)
