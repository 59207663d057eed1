"""A function that calls the model, on a pipeline: what it asks of the model, and what it makes of the answer.

`function(model)` calls the model once, and makes a loss of what it returns. It runs twice for a microbatch, with a
stand-in for the model:

    before the step      the stand-in notes what it is called with: that goes into the pipeline
    at the last stage    the stand-in returns what the pipeline has computed, and the loss goes back through it

So a loss that some trainer computes, or a user's own, works as it is. What would differ for being run twice is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from drumline.core.errors import ModelError
from drumline.model.microbatches import Microbatches

Call = tuple[tuple[Any, ...], dict[str, Any]]
# What reads weights, of which this rank has trained a part.
_WEIGHTS = {
    "buffers", "generate", "get_parameter", "named_buffers", "named_parameters", "parameters", "push_to_hub",
    "save_pretrained", "state_dict",
}  # fmt: skip


class _Called(BaseException):  # nobody catches it on its way
    def __init__(self, call: Call) -> None:
        self.call = call


class StandIn:
    """A model whose calls are answered by a function, or refused; all else is the model's own, but for its weights.

    `attributes` are what it has in place of the model's.

    >>> stand_in = StandIn(nn.Linear(2, 1), lambda x: x + 1, attributes={"parameters": lambda: ["these"]})
    >>> stand_in(2), stand_in.in_features, stand_in.parameters()
    (3, 2, ['these'])
    """

    def __init__(
        self,
        model: nn.Module,
        answer: Callable[..., Any] | None = None,
        who: str = "compute_loss",
        attributes: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._model, self._answer, self._who = model, answer, who
        vars(self).update(attributes)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Be an instance of the model's class, as trainers ask."""
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        if name in _WEIGHTS:
            raise ModelError(
                f"{self._who} uses {name}() of the model, of which this rank trains a part",
                expected="what needs no weights of other ranks",
                fix="read weights after train(), or from a checkpoint; weight_decay is a penalty on them",
            )
        return getattr(self._model, name)

    def train(self, mode: bool = True) -> StandIn:
        """Switch the model, if it is not switched so: trainers ask for that in every microbatch."""
        if self._model.training is not mode:
            self._model.train(mode)
        return self

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Answer as the model would."""
        if self._answer is None:
            raise ModelError(
                f"{self._who} calls the model, of which this rank trains a part",
                expected="calls in functions that the pipeline runs",
                fix="call it after the training, or let the trainer evaluate or predict",
            )
        return self._answer(*args, **named)


class Functions:
    """Runs functions that call a model, and names them `who` in errors.

    >>> model = nn.Linear(2, 1)
    >>> def loss_of(model):
    ...     return model([3.0]) + 1
    >>> functions = Functions(model)
    >>> functions.call_of(loss_of)
    (([3.0],), {})
    >>> functions.answered(lambda named: 5, loss_of)
    6
    """

    def __init__(self, model: nn.Module, who: str = "compute_loss") -> None:
        self._model, self._who = model, who
        self._own_modules = set(map(id, model.modules()))

    def call_of(self, function: Callable[[Any], Any]) -> Call:
        """Return what a function calls the model with; the function ends there."""

        def note(*args: Any, **named: Any) -> None:
            raise _Called((args, named))

        with self._alone():
            try:
                function(StandIn(self._model, note, self._who))
            except _Called as end:
                return end.call
        raise ModelError(
            f"{self._who} did not call the model that it got",
            expected=f"one call of it in every {self._who}",
            fix="call the argument `model`, not self.model or a part of it",
        )

    def answered(
        self,
        output: Callable[[dict[str, Any]], Any],
        function: Callable[[Any], Any],
        *,
        differing: Collection[str] | None = None,
    ) -> Any:
        """Return what a function returns, whose call of the model gets this output of its named arguments.

        It may call the model again with the same arguments, if `differing` says by name which of them may differ.
        """
        earlier: list[dict[str, Any]] = []  # arguments of calls

        def answer(*_: Any, **named: Any) -> Any:
            rows = {name: value for name, value in named.items() if name not in (differing or ())}
            if earlier and differing is None:
                raise ModelError(
                    f"{self._who} called the model a second time",
                    expected="one call for each microbatch: the pipeline has run it once",
                    fix="compute all that the loss needs in one call",
                )
            if earlier and not _are_same(rows, earlier[0]):
                raise ModelError(
                    f"{self._who} calls the model a second time with other arguments",
                    expected="one call, or several with the same arguments",
                    fix="compute all that the loss needs in one call",
                )
            earlier.append(rows)
            return output(named)

        with self._alone():
            return function(StandIn(self._model, answer, self._who))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse calls of the model's own modules: this rank has the trained weights of a part of them."""

        def refuse(module: nn.Module, _: Any) -> None:
            if id(module) in self._own_modules:
                raise ModelError(
                    f"{self._who} calls a {type(module).__name__} of the model by itself",
                    expected="one call of the argument `model`: other ranks hold parts of it",
                    fix="compute all that the loss needs in that call",
                )

        handle = register_module_forward_pre_hook(refuse)
        try:
            yield
        finally:
            handle.remove()

    def together(self, calls: Sequence[Call]) -> Call:
        """Return one call of the pipeline for the calls of all microbatches.

        >>> import torch
        >>> calls = [((), {"x": torch.ones(1), "flag": True}), ((), {"x": torch.zeros(1), "flag": True})]
        >>> Functions(nn.Identity()).together(calls)
        ((), {'x': Microbatches([tensor([1.]), tensor([0.])]), 'flag': True})
        """
        (args, named), *others = calls
        if any(len(other[0]) != len(args) or other[1].keys() != named.keys() for other in others):
            raise ModelError(
                f"{self._who} calls the model with other arguments for some microbatches of a step",
                expected="the same arguments for all of them",
            )
        positional = tuple(_joined([call[0][at] for call in calls]) for at in range(len(args)))
        return positional, {name: _joined([call[1][name] for call in calls]) for name in named}

    @contextmanager
    def unchanged(self, holder: Any, batches: Sequence[Any]) -> Iterator[None]:
        """Refuse changes of an object's attributes and of batches inside: they would be made twice.

        >>> import torch
        >>> model, row = nn.Identity(), {"x": torch.zeros(2)}
        >>> with Functions(model).unchanged(model, [row]):
        ...     _ = row["x"].add_(1)
        Traceback (most recent call last):
        drumline.core.errors.ModelError: compute_loss changes x of its inputs in place...
        """
        attributes, versions = dict(vars(holder)), [_versions(batch) for batch in batches]
        yield
        for batch, before in zip(batches, versions, strict=True):
            for name, version in _versions(batch).items():
                if version != before.get(name):
                    raise ModelError(
                        f"{self._who} changes {name} of its inputs in place, before it calls the model",
                        expected=f"inputs as they were: {self._who} runs twice",
                        fix=f"change a clone of {name}",
                    )
        for name, value in vars(holder).items():
            if attributes.get(name) is not value:
                raise ModelError(
                    f"{self._who} sets self.{name}, before it calls the model",
                    expected=f"attributes as they were: {self._who} runs twice",
                    fix="set it after the call, or outside of it",
                )


def _are_same(named: dict[str, Any], others: dict[str, Any]) -> bool:
    return named.keys() == others.keys() and all(value is others[name] for name, value in named.items())


def _versions(batch: Any) -> dict[str, int]:
    items = batch.items() if isinstance(batch, Mapping) else ()
    return {name: value._version for name, value in items if isinstance(value, Tensor)}


def _joined(values: list[Any]) -> Any:
    """Return the values of one argument: one for all microbatches, if it is no tensor of rows."""
    first = values[0]
    if isinstance(first, Tensor) and first.dim() == 0 and all(value is first for value in values):
        return first
    if first is None or isinstance(first, bool | int | float | str):
        return first if all(value == first for value in values) else Microbatches(values)
    return Microbatches(values)


def copied(inputs: Any) -> Any:
    """Return inputs that a function may add to and take from."""
    return type(inputs)(inputs) if isinstance(inputs, dict) else dict(inputs) if isinstance(inputs, Mapping) else inputs
