"""Steps that run functions which call the model, such as a trainer's `compute_loss`.

    function(model, batch)    runs for each microbatch: before the step, and again at the last stage (functions.py)
    fewer batches             the last of them runs again, and counts nothing
    random numbers            as if each function had run once, on every rank (draws.py)

So a loop of somebody else's trains on a pipeline as it is, if it hands over the batches of a whole step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from drumline.core.errors import BatchError, UsageError, counted, refuse
from drumline.model.microbatches import Microbatches
from drumline.model.values import mapped
from drumline.pipeline.calls.draws import TwiceDrawn
from drumline.pipeline.calls.functions import Call, Functions, copied
from drumline.pipeline.pipeline import Pipeline

T = TypeVar("T")
LossFunction = Callable[[Any, Any], Any]
# Settings that a pipeline has no use for which only evaluates.
_OF_TRAINING = ("adapt", "continue_record", "master_weights", "programs", "zero")


class FunctionSteps:
    """A pipeline whose steps run `function(model, batch)` for every batch, each of them a microbatch.

    `settings` are those of `dl.Pipeline`, but for the loss. The schedule needs a flush and one last stage; a mesh may
    have data-parallel lines.

    >>> def loss_of(model, row):
    ...     return (model(row) - 1).square().mean() / 2
    >>> model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    >>> steps = FunctionSteps(model, num_microbatches=2, num_ranks=2)
    >>> rows = [torch.zeros(1, 3), torch.ones(1, 3)]
    >>> torch.isclose(steps.train(loss_of, rows), sum(loss_of(model, row) for row in rows))
    tensor(True)
    >>> [tuple(output.shape) for output in steps.evaluate(lambda model, row: model(row), rows)]
    [(1, 1), (1, 1)]
    """

    who = "compute_loss"  # the function's name in errors
    differing: Collection[str] | None = None  # arguments by name that may differ between several calls of the model

    def __init__(self, model: nn.Module, *, num_microbatches: int, seed: int = 0, **settings: Any) -> None:
        self.model, self.size = model, num_microbatches
        self.number: int | None = None  # of the microbatch whose function runs at the last stage
        self._batches: Sequence[Any] = ()
        self._function: LossFunction | None = None  # while a step runs
        self._step, self._seed = 0, seed
        self._functions = Functions(model, self.who)
        self._modules = list(model.modules())
        self._settings = settings
        self._is_autocast = settings.get("precision", "fp32") != "fp32"
        this: Any = weakref.ref(self)  # nobody who looks at the loss function looks at all of this
        self.pipe = Pipeline(
            model,
            **settings,
            num_microbatches=num_microbatches,
            seed=seed,
            loss_fn=lambda output, number: this()._loss(output, number),
            loss_weight=lambda number: float(number < len(this()._batches)),
        )
        self._draws = TwiceDrawn(seed, torch.device(self.pipe.device))
        self._check()

    def _check(self) -> None:
        program = self.pipe.program
        ends = "updates inside of a step" if program.num_updates else "has two last stages"
        others = "".join(sorted(set(self.pipe.axes.names) - {"pp", "dp"})[:1])
        refuse(
            (program.num_updates or program.placement.name == "bidirectional", f"the schedule {program.name} {ends}",
             "a schedule with a flush and one last stage", "leave out the schedule, or choose another one"),
            (others, f"the mesh has the axis {others}, and {self.who} calls the model", "pp and dp alone",
             "use a loop of your own"),
        )  # fmt: skip

    @property
    def has_loss(self) -> bool:
        """Whether this process has the last stage, and so the model's outputs and the losses."""
        placement = self.pipe.program.placement
        return self.pipe.transport == "in-process" or self.pipe.rank == placement.rank_of(placement.num_stages - 1, 0)

    def train(self, function: LossFunction, batches: Sequence[Any], *, step: int = 0, holder: Any = None) -> Tensor:
        """Add the gradients of all losses that the function returns, in training mode; return their sum on every rank.

        `step` seeds what the function draws after its call of the model. The function must not set attributes of
        `holder` before that call.
        """
        if len(batches) < self.size and any(map(_keeps_statistics, self._modules)):
            raise UsageError(
                f"the step has {counted(len(batches), 'microbatch')}, and the model keeps running statistics",
                expected=f"{self.size}: one that runs again would change these",
                fix="leave incomplete steps out, or choose a dataset of a multiple of that many batches",
            )
        count = len(batches)  # the pipeline takes the mean over as many
        self._begin(lambda model, batch: function(model, batch) * count, batches, step, train=True)
        total: Tensor = self._run(self.pipe.step, holder).loss
        return total

    def evaluate(
        self, function: Callable[[Any, Any], T], batches: Sequence[Any], *, step: int = 0, holder: Any = None
    ) -> list[T | None]:
        """Return what the function returns for each batch in eval mode; None for each where the last stage is not."""
        answers: dict[int | None, T] = {}

        def noted(model: Any, batch: Any) -> Tensor:
            if self.number not in answers:
                answers[self.number] = function(model, batch)
            return torch.zeros((), device=self.pipe.device)

        self._begin(noted, batches, step, train=False)
        self._run(partial(self.pipe.eval_step, outputs=False), holder)
        return [answers.get(number) if self.has_loss else None for number in range(len(batches))]

    def from_last(self, value: T) -> T:
        """Return on every rank what the one with the last stage passes, and go on with its random numbers."""
        line = self.pipe.axes.rows[0]
        sent = (line, value, self._draws.states()) if self.has_loss else None
        received: T
        _, received, states = next(each for each in self.pipe.gather(sent) if each is not None and each[0] == line)
        self._draws.go_on(states)
        return received

    def over_lines(self, value: Tensor) -> Tensor:
        """Return the numbers of all data-parallel lines, one after the other; all of them call it alike."""
        return torch.cat(self.pipe.axes.gathered(value.reshape(-1), "dp"))

    def beside(self, model: nn.Module) -> Self:
        """Return steps of a model that is not trained, beside this one: a reference, for example."""
        settings = {name: value for name, value in self._settings.items() if name not in _OF_TRAINING}
        return type(self)(model, **{**settings, "num_microbatches": self.size, "seed": self._seed, "record": False})

    def asked(self, calls: list[Call]) -> list[Call]:
        """Return what the pipeline's model is called with for each microbatch: what the function has asked for."""
        return calls

    def answered(self, output: Any, named: dict[str, Any]) -> Any:
        """Return what a call of the model with these arguments returns, of what the pipeline has computed."""
        return output

    def _begin(self, function: LossFunction, batches: Sequence[Any], step: int, *, train: bool) -> None:
        if not 0 < len(batches) <= self.size:
            raise BatchError(
                f"the step has {counted(len(batches), 'batch')}", expected=f"1 to {self.size}, one a microbatch"
            )
        self._function, self._batches, self._step = function, batches, step
        if any(module.training is not train for module in self._modules):  # else this would take long
            self.model.train(train)

    def _run(self, run: Callable[..., Any], holder: Any) -> Any:
        """Run a step by what the functions ask of the model."""
        try:
            with self._functions.unchanged(self if holder is None else holder, self._batches):
                calls = [
                    self._functions.call_of(partial(self._on_copy, self._batches[number]))
                    for number in self._draws.noted(len(self._batches))
                ]
            calls = self.asked(calls)
            calls += calls[-1:] * (self.size - len(calls))
            args, named = self._functions.together(calls)
            return run(*args, target=Microbatches(range(self.size)), **named)
        finally:
            self._function = None

    def _on_copy(self, batch: Any, model: Any) -> Any:
        assert self._function is not None
        return self._function(model, copied(batch))

    def _loss(self, output: Any, number: int) -> Any:
        """Return what becomes of a microbatch's output at the last stage."""
        self.number = min(number, len(self._batches) - 1)
        output = _with_own_losses(mapped(output, _as_float) if self._is_autocast else output)
        try:
            with self._outside_autocast(), self._draws.again(self.number, self._step):
                return self._functions.answered(
                    lambda named: self.answered(output, named),
                    partial(self._on_copy, self._batches[self.number]),
                    differing=self.differing,
                )
        finally:
            self.number = None

    def _outside_autocast(self) -> AbstractContextManager[Any]:
        device = torch.device(self.pipe.device).type
        return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _as_float(tensor: Tensor) -> Tensor:
    """Return what autocast has computed as float32."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _with_own_losses(output: Any) -> Any:
    """Return an output whose losses are copies, which functions may scale in place."""
    if not isinstance(output, dict):
        return mapped(output, lambda tensor: tensor if tensor.dim() else tensor.clone())
    fresh = copy(output)  # the first step's check compares what the model has returned
    for name, value in output.items():
        if isinstance(value, Tensor) and not value.dim():
            fresh[name] = value.clone()
    return fresh


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
