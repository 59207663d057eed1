"""The inputs of a step: the batch at the first stage, and the target and its loss at the last."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import BatchError, DrumlineError, ModelError
from drumline.engine.loss.fn_loss import FnWeight
from drumline.engine.loss.own_loss import OwnShares, own_loss
from drumline.engine.loss.targets import size_of, uneven
from drumline.engine.model.blocks import inputs_for, is_chain
from drumline.engine.model.splits import found_split
from drumline.engine.ranks.crew import Crew
from drumline.engine.stages.sizes import sizes_of
from drumline.model.block import Block, Model
from drumline.model.blocks.pieces import Piece
from drumline.model.loss.counts import Across, Weighing, weighed
from drumline.model.loss.factors import Factors, Multiplying
from drumline.model.loss.guard import guard
from drumline.model.values import moved, pack
from drumline.runtime.batch import Split, cut_and_counted, num_rows, rows_apart, rows_of_each
from drumline.runtime.step import CalledWith, Step
from drumline.runtime.user_batch import has_microbatches

LossFunction = Callable[..., Tensor]
Weigh = Callable[[Any], float | Tensor]
_NOTHING: Any = object()  # the target of a microbatch with weight 0


class Intake:
    """Splits batches and targets into microbatches, weights these, and computes their losses."""

    num_slices = 1  # units in which each microbatch of a step runs, which are cut and counted as microbatches are

    def __init__(
        self,
        model: Model,
        loss_fn: LossFunction | None,
        device: torch.device,
        *,
        num_microbatches: int,
        weigh: Weigh | None = None,
        split: Split | None = None,
    ) -> None:
        for name, function in (("loss_fn", loss_fn), ("loss_weight", weigh)):
            if function is not None and (not callable(function) or isinstance(function, type)):
                what = f"the class {function.__name__}" if isinstance(function, type) else repr(function)
                fix = f"create an instance: {function.__name__}()" if isinstance(function, type) else ""
                raise ModelError(f"{name} is {what}", expected="a function", fix=fix)
        self.loss_fn = loss_fn
        self.weigh = weigh
        self.device = device
        self.num_microbatches = num_microbatches
        self._is_chain = is_chain(model)
        self._trains = True
        self.has_own_loss = not self._is_chain and loss_fn is None  # whether the model computes its own loss
        self.has_loss = self.has_own_loss or loss_fn is not None
        self._split = found_split(model, split)
        self._says = split is not None  # whether the user says how to split the batch
        self._own_shares: OwnShares | None = None
        self._fn = None if loss_fn is None or weigh is not None else FnWeight(loss_fn, device)
        self._step: Step | None = None  # the current step
        self._rows: list[int] = []  # rows of each microbatch
        self._sizes: list[int] | None = None  # elements of their targets, if their lengths may differ
        self.is_open = False  # whether it is still unknown what the loss averages over
        self._factors: Mapping[int, Factors] = {}  # of the parts of loss_fn, by microbatch, if they need them
        self.precise = False  # whether the loss shares need double precision
        self._weights: list[float | Tensor] = []
        self._shares: Sequence[Tensor] = ()
        # Rows and number of microbatches of the last step, if its shares depend on these alone.
        self._settled: tuple[int, int] | None = None
        self._across: Across | None = None

    def count_across(self, across: Across, sequences: int = 1) -> None:
        """Weigh microbatches among those of all lines of a mesh; `across` returns what all of them count.

        So many lines have parts of the same sequences.
        """
        self._across = across
        if self._fn is not None:
            self._fn.parts = sequences
        for weight in (self._fn, self._own_shares):
            if weight is not None:
                weight.across = across

    def weigh_by(self, stages: Sequence[Sequence[Block]]) -> None:
        """Learn what the loss averages over; a model with its own loss shows it in its pieces."""
        last = stages[-1][-1].module
        if self.has_own_loss and self.weigh is None and isinstance(last, Piece):
            self._own_shares = OwnShares(last.script, last, len(stages[-1]))

    def recut(self, num_last: int, num_microbatches: int) -> None:
        """Follow a move of layers: so many blocks are in the last stage now, and the next step has its own program."""
        self.num_microbatches = num_microbatches
        if self._own_shares is not None:
            self._own_shares.recut(num_last)

    def lent(self) -> Collection[nn.Parameter]:
        """Return the parameters that loss_fn uses without holding them."""
        return () if self._fn is None else self._fn.lent

    @property
    def counts_labels(self) -> bool:
        """Whether the shares depend on the targets' values, so that every step counts them."""
        return self.weigh is not None or self.has_own_loss or (self._fn is not None and self._fn.counts_targets)

    def first_value(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of a step as the value that the first block takes."""
        if self._is_chain and len(args) == 1 and not kwargs:
            return args[0]
        return inputs_for(args, kwargs, is_chain=self._is_chain)

    def num_rows(self, call: CalledWith) -> int:
        """Return the rows of a step's batch, as far as its arguments here show it; 0 if they are cut or unclear."""
        value = self.first_value(call.batch, call.named) if call.batch or call.named else None
        for entry, split in ((value, self._split(value)), (call.target, None)):
            if entry is None or has_microbatches(entry):
                continue
            with suppress(DrumlineError):  # the step itself says what is wrong
                return num_rows(entry, split=split)
        return 0

    def take(self, step: Step, batch: Any, target: Any, ends: Collection[str], crew: Crew) -> None:
        """Store batch and target on the processes whose `ends` are "first" or "last"."""
        self._trains = step.train
        is_plain = isinstance(batch, Tensor) and isinstance(target, Tensor)
        step.is_split = not is_plain and self._are_apart(batch, target)
        if step.is_split:
            step.sizes = sizes_of(batch) or sizes_of(target)
        if "first" in ends:
            if batch is None:
                raise BatchError(f"{crew.name} holds the first stage but got no batch", fix="pass the batch to step")
            step.batch = batch.to(self.device, non_blocking=True) if is_plain else moved(batch, self.device)
        if "last" in ends and self.has_own_loss:  # the batch tells the weight of each microbatch
            if batch is None:
                raise BatchError(
                    f"{crew.name} holds the last stage but got no batch",
                    expected="the batch here too: the model computes its own loss, and its labels must be counted",
                )
            step.target = moved(batch, self.device) if step.batch is None else step.batch
        elif "last" in ends and (target is not None or step.train):
            if target is None:
                raise BatchError(f"{crew.name} holds the last stage but got no target", fix="pass target= to step")
            step.target = target.to(self.device, non_blocking=True) if is_plain else moved(target, self.device)

    def _are_apart(self, batch: Any, target: Any) -> bool:
        """Whether the user has cut the microbatches, in batch and target alike."""
        are_split = [has_microbatches(value) for value in (batch, target) if value is not None]
        if len(are_split) == 2 and are_split[0] != are_split[1] and not self.has_own_loss:
            whole = "target" if are_split[0] else "batch"
            raise BatchError(
                f"the {'batch' if are_split[0] else 'target'} is given as Microbatches and the {whole} is not",
                expected="both microbatch by microbatch, or both to be cut",
                fix=f"pass Microbatches for the {whole} too",
            )
        return any(are_split)

    def cut(self, step: Step) -> None:
        """Split batch and target into microbatches and compute their weights."""
        self._step = step
        step.cuts = self.cut_batch
        num_inputs: int | None = None
        if step.batch is not None:
            step.inputs, num_inputs = self._cut(step.batch, "the batch")
        if step.order and step.inputs:
            step.inputs = [step.inputs[at] for at in step.order]
        if step.target is None:
            return
        targets, rows = self._cut(step.target, "the batch" if self.has_own_loss else "the target")
        if step.is_split:
            self._settled = None
            each = rows_apart(step.target, self._split(step.target) if self.has_own_loss else None)
            step.targets = targets = [targets[at] for at in step.order or range(len(targets))]
            self._rows = [each[at] for at in step.order or range(len(each))]
            self._sizes = [size_of(target) for target in targets]
            self._take_shares(step, self._weighed(targets))
            return
        if num_inputs not in (None, rows):
            raise BatchError(f"the batch has {num_inputs} rows and the target has {rows}", expected="equal numbers")
        step.targets = targets
        if self._settled == (rows, self.num_microbatches):
            step.shares = self._shares
            return
        self._settled = None
        self._rows, self._sizes = rows_of_each(rows, self.num_microbatches), None
        self._take_shares(step, self._weighed(targets))
        counts_rows = not self.is_open and not self.counts_labels and self._across is None
        if counts_rows and all(self.is_counted(step, microbatch) for microbatch in range(len(targets))):
            self._settled = rows, self.num_microbatches

    @staticmethod
    def is_counted(step: Step, microbatch: int) -> bool:
        """Whether a microbatch has its own loss: one whose weight is known to be 0 has none.

        A step that repeats another is not split again; each of its microbatches has one.
        """
        return not step.targets or step.targets[microbatch] is not _NOTHING

    def cut_batch(self, batch: Any, *, what: str = "the batch") -> list[Any]:
        """Return the microbatches of a batch, split as the user or the model says."""
        return self._cut(batch, what)[0]

    def _cut(self, batch: Any, what: str) -> tuple[list[Any], int]:
        """Return the microbatches of a batch, and its rows."""
        if isinstance(batch, Tensor) and not self._says and batch.dim() and len(batch) >= self.num_microbatches:
            return list(batch.tensor_split(self.num_microbatches)), len(batch)
        split = None if what.endswith("target") else self._split(batch)
        return cut_and_counted(batch, self.num_microbatches, what=what, split=split)

    def _weighed(self, targets: Sequence[Any]) -> Weighing | None:
        """Return the microbatches' shares; None if the loss must run first."""
        if self.weigh is not None:
            return weighed([[_plain(self.weigh(target))] for target in targets], self._rows, across=self._across)
        if self._own_shares is not None:
            return self._own_shares(targets, self._rows, train=self._trains)
        if self._fn is not None:
            return self._fn(targets, self._rows, self._sizes)
        return weighed([[float(row)] for row in self._rows], self._rows, across=self._across)

    def factors_of(self, microbatch: int) -> Factors:
        """Return the factors for parts of the model's own loss in a microbatch, if they do not all share one.

        Those of loss_fn are applied where it is called.
        """
        return () if self._own_shares is None else self._own_shares.script.sheet.factors.get(microbatch, ())

    def has_factors(self, microbatch: int) -> bool:
        """Whether parts of loss_fn have shares of their own in a microbatch."""
        return bool(self._factors.get(microbatch)) and self._own_shares is None

    def multiplying(self, inputs: Any, factors: Factors) -> AbstractContextManager[object]:
        """Multiply the parts of the model's own loss where the model computes it."""
        if self._own_shares is None or not factors:
            return nullcontext()
        plan = self._own_shares.script
        loss = plan.loss(plan.kind(inputs, train=True)[0])
        if loss is None or plan.model is None:
            return nullcontext()
        return Multiplying(loss.walk, factors, plan.model)

    def _take_shares(self, step: Step, weighing: Weighing | None) -> None:
        """Set the microbatches' shares for a step; microbatches with weight 0 need no loss."""
        self.is_open = weighing is None
        if weighing is None:
            weighing = weighed([[float(row)] for row in self._rows], self._rows)
        step.shares = self._shares_of(list(weighing.shares))
        step.targets = [
            target if isinstance(share, Tensor) or share else _NOTHING
            for target, share in zip(step.targets, weighing.shares, strict=True)
        ]
        self._factors = weighing.factors
        if self._own_shares is not None:
            self._own_shares.script.sheet.fill(weighing.factors)

    def _shares_of(self, weights: list[float | Tensor]) -> Sequence[Tensor]:
        """Return each microbatch's share of the loss as a tensor, reused while the shares stay the same."""
        if any(isinstance(weight, Tensor) for weight in weights):
            return [torch.as_tensor(share).to(self.device) for share in weights]
        if weights != self._weights:
            parts = torch.tensor(weights, dtype=torch.float64)
            self._shares = parts.to(self.device, torch.float64 if self.precise else torch.float32).unbind()
            self._weights = weights
        return self._shares

    def loss(self, output: Any, target: Any, fn: LossFunction | None = None) -> Tensor | None:
        """Return the loss of one microbatch's output; None only if a model with its own loss runs in evaluation.

        `fn` replaces the loss function if the stage has its own copy.
        """
        if target is _NOTHING:
            return self._nothing(output)
        if self.has_own_loss:
            return own_loss(output, needed=self._trains)
        fn = fn or self.loss_fn
        assert fn is not None
        factors: Factors = ()
        if self._fn is not None and (microbatch := self._place(target)) is not None:
            self._weigh_now(self._fn, output, microbatch)
            if self._step is not None and self._step.targets[microbatch] is _NOTHING:
                return self._nothing(output)
            factors = self._factors.get(microbatch, ())
        multiplying = nullcontext() if self._fn is None else self._fn.multiplying(output, target, factors)
        with multiplying:
            loss = fn(output, target)
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ModelError(f"loss_fn returned {what}", expected="a scalar tensor: the mean over the microbatch")
        if not loss.is_cpu:
            guard(pack(output)[0], loss)
        return loss

    def _place(self, target: Any) -> int | None:
        """Return which microbatch of the step a target belongs to; None if blocks are only being measured."""
        if self._step is None:
            return None
        for at, wanted_target in enumerate(self._step.targets):
            if wanted_target is target:
                return at
        tensors = pack(target)[0]
        for at, wanted_target in enumerate(self._step.targets):
            if tensors and [id(each) for each in pack(wanted_target)[0]] == [id(each) for each in tensors]:
                return at
        return None

    def _weigh_now(self, fn: FnWeight, output: Any, microbatch: int) -> None:
        """Weigh the step by what the loss counts, if its output was needed to tell, and compare the loss if needed."""
        step = self._step
        assert step is not None
        if self.is_open:
            self._take_shares(step, fn.resolve(output, microbatch, step.targets, self._rows, self._sizes))
        else:
            fn.verify(output, step.targets[microbatch], self._rows[microbatch], is_split=step.is_split)
        if step.is_split and fn.is_uneven:
            raise uneven("averages over something that does not grow with its target")

    def _nothing(self, output: Any) -> Tensor:
        """Return a zero loss: the mean over nothing would be NaN, and so would its gradient."""
        tensors = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in pack(output)[0]]
        new_tensors = [
            tensor for tensor in tensors if tensor.is_floating_point() and not (self.has_own_loss and tensor.dim() == 0)
        ]
        zeros = [(tensor * 0.0).nan_to_num().sum() for tensor in new_tensors if tensor.requires_grad]
        if zeros:
            return sum(zeros[1:], start=zeros[0])
        return torch.zeros((), dtype=new_tensors[0].dtype if new_tensors else None, device=self.device)


def _plain(weight: float | Tensor) -> float | Tensor:
    """Return a weight as a number, unless reading it would wait for a device."""
    if not isinstance(weight, int | float | Tensor) or (isinstance(weight, Tensor) and weight.numel() != 1):
        what = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
        raise BatchError(f"loss_weight returned {what}", expected="a number: the weight of the microbatch")
    return float(weight) if isinstance(weight, Tensor) and weight.device.type == "cpu" else weight
