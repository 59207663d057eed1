"""`Pipeline`: a model, a loss and a schedule, run on this rank and its peers as one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import BatchError, MismatchError, ModelError, RunError
from drumline.core.lower import lower
from drumline.core.program import Program
from drumline.pipeline import assembly, transports
from drumline.pipeline.assembly import Assembly, Checkpointing
from drumline.pipeline.guard import Guard
from drumline.pipeline.programs import attempt, edges_of, forwards_of, program_for
from drumline.pipeline.result import StepResult
from drumline.pipeline.tally import Tally, Told
from drumline.runtime import clip
from drumline.runtime.batch import cut as cut_batch
from drumline.runtime.batch import num_rows, shares
from drumline.runtime.channel import Channel
from drumline.runtime.cuda import CapturedStep, clock_for
from drumline.runtime.cut import Model, blocks_of, cut
from drumline.runtime.executor import Executor, Step
from drumline.runtime.finite import all_finite
from drumline.runtime.in_process import Hub, take_turns
from drumline.runtime.randomness import Randomness
from drumline.runtime.record import Measured, Record
from drumline.runtime.stash import Scale
from drumline.runtime.values import joined, moved, pack

_scopes = itertools.count()
_NOTHING: Any = object()  # the target of a microbatch that weighs nothing


def _plain(weight: float | Tensor) -> float | Tensor:
    """Return a weight as a number, unless reading it would mean waiting for a device."""
    return float(weight) if isinstance(weight, Tensor) and weight.device.type == "cpu" else weight


class Pipeline:
    """A model cut into stages and trained by a program; make it with the same line on every rank.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> pipe = Pipeline(model, loss_fn=nn.functional.mse_loss, schedule="1f1b", num_microbatches=4, num_ranks=2)
    >>> optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    >>> result = pipe.step(torch.randn(8, 4), target=torch.zeros(8, 2))
    >>> optimizer.step(); optimizer.zero_grad()
    >>> pipe.timeline().program.name, result.loss.shape
    ('1f1b', torch.Size([]))

    Under torchrun or `dl.launch` every process is one rank; otherwise `num_ranks` ranks take turns in this process.

    - `model`: an nn.Sequential, or an ordered list of blocks.
    - `balance`: how many blocks each stage gets ("even" unless given; `dl.balance` finds the best); or `cuts`, the
      names of the blocks with which stages 1, 2, ... begin.
    - `loss_fn(output, target)`: the mean over a microbatch. Microbatches count by their rows, or, where the mean is
      over something else (tokens that are not padding), by what `loss_weight(target)` returns for each.
    - `schedule`: a name, a `Program`, or a CSV file.
    - `checkpoint`: "none", "full", names of blocks to recompute, or one of these per stage as a dict.
    - `check_finite`: raise NonFiniteError on all ranks before an optimizer steps on a NaN.
    - `merge_weight_gradients`: W actions that stand together run as one larger product, which sums in another order.
    - `timeout`: the longest that this rank waits for another, in seconds.
    - `ahead`: how many receives of one edge are open at once.
    - `weigh`: count the bytes of activations held after every action, for `timeline().stash`; slows steps down.
    - `capture`: run each step as one CUDA graph, for stages that are all on one rank and do not draw random numbers.
    """

    def __init__(
        self,
        model: Model,
        *,
        loss_fn: Callable[..., Tensor] | None = None,
        schedule: str | Path | Program = "1f1b",
        num_microbatches: int | None = None,
        num_ranks: int | None = None,
        stages_per_rank: int | None = None,
        balance: Sequence[int] | str | None = None,
        cuts: Sequence[str] | None = None,
        checkpoint: Checkpointing = "none",
        loss_weight: Callable[[Any], float | Tensor] | None = None,
        transport: str = "auto",
        device: torch.device | str | None = None,
        seed: int = 0,
        check_finite: bool = True,
        merge_weight_gradients: bool = False,
        timeout: float = 300.0,
        ahead: int = 2,
        capture: bool = False,
        weigh: bool = False,
    ) -> None:
        transports.check(transport)
        self.device = torch.device(device) if device is not None else assembly.device_of(model)
        self.timeout = timeout
        self.check_finite = check_finite
        self.loss_fn = loss_fn
        self.loss_weight = loss_weight
        self._over = ""  # why it cannot be used any more
        self._number = 0  # of the next step
        self._words = itertools.count()
        self._open_tallies: list[Tally] = []
        self._last: Tally | None = None
        self._refused: Tally | None = None  # a step that must not be built on, until another one is told of
        self._executors: list[Executor] = []
        self._named: list[tuple[str, nn.Parameter]] | None = None
        self._weights: list[float | Tensor] = []
        self._parts: Sequence[Tensor] = ()
        program, problem = attempt(
            program_for,
            schedule,
            num_ranks=transports.num_ranks(transport, num_ranks),
            num_microbatches=num_microbatches,
            stages_per_rank=stages_per_rank,
        )
        self._channels, self._hub = self._connect(transport, num_ranks, ahead, program)
        with self._failing_together("the set-up"):
            # A rank that was given something wrong connects all the same, so that the others learn of it.
            if program is None:
                raise problem
            self.program = program
            blocks = blocks_of(model)
            stages = cut(blocks, self.program.num_stages, balance, cuts)
            self._assembly = Assembly(
                lower(self.program, ahead=ahead),
                stages,
                self.device,
                Randomness(seed, self.device),
                assembly.checkpointed(checkpoint, stages),
                self._loss if loss_fn is not None else None,
            )
            described = self._assembly.described(check_finite=check_finite)
            assembly.agree(self._all_told("set-up", [described] * len(self._channels)))
            self._executors = [self._executor(channel, merge_weight_gradients, weigh) for channel in self._channels]
            self._share_copies()
            self._evaluators = self._forward_executors(ahead)
            self._captured = self._capturer() if capture else None
        self._guard = Guard([one for _, one in self.named_parameters()], self.settle)

    @property
    def num_ranks(self) -> int:
        """How many ranks there are, in this process and others."""
        return self._channels[0].num_ranks

    @property
    def transport(self) -> str:
        """How the ranks talk: "in-process", "shared-memory", "gloo" or "nccl"."""
        return self._channels[0].name

    @property
    def rank(self) -> int:
        """This process's rank, the first of them if several take turns here."""
        return self._channels[0].rank

    # ---- setting up --------------------------------------------------------------------------------------------------

    def _connect(
        self, transport: str, num_ranks: int | None, ahead: int, program: Program | None
    ) -> tuple[list[Channel], Hub | None]:
        """Return the channels of the ranks that live in this process."""
        if transports.alone(transport):
            hub = Hub(num_ranks or 1)
            return list(hub.channels()), hub
        channel = transports.open_channel(
            transport,
            self.device,
            timeout=self.timeout,
            num_slots=max(4, ahead),
            scope=f"drumline/{next(_scopes)}",
            edges=None if program is None else edges_of(program),
        )
        self._channels = [channel]
        with self._failing_together("the set-up"):
            if num_ranks not in (None, channel.num_ranks):
                raise MismatchError(
                    f"num_ranks is {num_ranks}", expected=f"{channel.num_ranks}, as many processes as were started"
                )
        return [channel], None

    def _executor(self, channel: Channel, merge: bool, weigh: bool) -> Executor:
        stages = self._assembly.stages_of(channel.rank, apart=self._hub is not None)
        return Executor(
            self._assembly.program,
            channel.rank,
            stages,
            channel,
            clock_for(self.device),
            merge_weight_gradients=merge,
            scale=Scale(stages.values()) if weigh else None,
        )

    def _capturer(self) -> CapturedStep:
        if self.device.type != "cuda" or self.num_ranks > 1:
            raise ModelError(
                f"capture=True with {self.num_ranks} ranks on {self.device.type}", expected="one rank on a CUDA device"
            )
        return CapturedStep(self._executors[0], self._assembly.randomness, list(self.parameters()))

    def _forward_executors(self, ahead: int) -> list[Executor]:
        program = lower(forwards_of(self.program), ahead=ahead)
        return [Executor(program, one.rank, one.stages, one.channel, one.clock) for one in self._executors]

    def _share_copies(self) -> None:
        """Give the second copy of every stage the weights of the first."""
        homes = self.program.placement.homes
        if not self.program.placement.mirrored:
            return
        mine = [
            {
                index: [tensor.detach().cpu() for tensor in assembly.state(stage)]
                for index, stage in executor.stages.items()
                if homes[index] == executor.rank
            }
            for executor in self._executors
        ]
        weights = {index: state for one in self._all_told("weights", mine) for index, state in one.items()}
        with torch.no_grad():
            for executor in self._executors:
                for index, stage in executor.stages.items():
                    if homes[index] != executor.rank:
                        for tensor, value in zip(assembly.state(stage), weights[index], strict=True):
                            tensor.copy_(value)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def step(self, batch: Any = None, *, target: Any = None) -> StepResult:
        """Run one step of the program: gradients are added to the parameters', the loss is returned.

        Only ranks with the first stage need `batch`, only those with the last need `target`.
        """
        if self.loss_fn is None:
            raise ModelError("the pipeline has no loss_fn", fix="pass one, or use eval_step for inference")
        self._refuse_if_over()
        step = Step(self._number)
        records = [Record(executor.rank) for executor in self._executors]
        self.settle(until=self._number - 2)  # raises alike on all ranks, which may go on afterwards
        with self._failing_together("the start of a step"):
            self._prepare(step, batch, target)
            before = self._put_aside()
            self._run(self._executors, step, records)
            self._put_back(before)
            tally = self._told(step, records)
        self._last = tally
        return StepResult(step.number, lambda: tally.loss)

    def eval_step(self, batch: Any = None, *, target: Any = None) -> StepResult:
        """Run the forwards alone, in eval mode and without gradients; `result.output` is there with the last stage."""
        self._refuse_if_over()
        step = Step(self._number, train=False)
        modules = [
            part
            for one in self._executors
            for s in one.stages.values()
            for b in s.blocks
            for part in b.module.modules()
        ]
        training = [module for module in modules if module.training]
        with self._failing_together("the start of a step"):
            self._prepare(step, batch, target)
            for module in training:
                module.training = False
            try:
                self._run(self._evaluators, step, [Record(executor.rank) for executor in self._evaluators])
            finally:
                for module in training:
                    module.training = True
            tally = self._told(step, [])
        output = joined([step.outputs[one] for one in sorted(step.outputs)]) if step.outputs else None
        return StepResult(step.number, lambda: tally.loss, output)

    def _prepare(self, step: Step, batch: Any, target: Any) -> None:
        """Take batch and target in where their stages are, and cut them."""
        held = {index for executor in self._executors for index in executor.stages}
        if 0 in held:
            if batch is None:
                raise BatchError(f"rank {self.rank} holds the first stage and got no batch", fix="pass it to step")
            step.batch = moved(batch, self.device)
        if self.program.num_stages - 1 in held and (target is not None or step.train):
            if target is None:
                raise BatchError(f"rank {self.rank} holds the last stage and got no target", fix="pass target= to step")
            step.target = moved(target, self.device)
        if step.train and self.loss_weight is None and self._captured is not None and self._captured.fits(step):
            step.shares = self._parts  # a graph that was captured for these shapes knows where to cut
        else:
            self._cut(step)

    def _cut(self, step: Step) -> None:
        """Cut batch and target into microbatches, and weigh these."""
        batch, target, num_microbatches = step.batch, step.target, self.program.num_microbatches
        if batch is not None:
            step.inputs = cut_batch(batch, num_microbatches)
        if target is None:
            return
        if batch is not None and num_rows(batch) != num_rows(target, what="the target"):
            raise BatchError(
                f"the batch has {num_rows(batch)} rows and the target {num_rows(target)}", expected="as many in both"
            )
        step.targets = cut_batch(target, num_microbatches, what="the target")
        weigh = self.loss_weight or num_rows
        weights = [_plain(weigh(one)) for one in step.targets]
        step.shares = self._shares(weights)
        step.targets = [
            one if isinstance(weight, Tensor) or weight else _NOTHING
            for one, weight in zip(step.targets, weights, strict=True)
        ]

    def _shares(self, weights: list[float | Tensor]) -> Sequence[Tensor]:
        """Return each microbatch's share of the loss as a tensor, kept as long as they stay the same."""
        if any(isinstance(weight, Tensor) for weight in weights):
            return [torch.as_tensor(share).to(self.device) for share in shares(weights)]
        if weights != self._weights:
            parts = torch.tensor(shares(weights), dtype=torch.float64)
            precise = any(one.dtype is torch.float64 for one in self.parameters())
            self._parts = parts.to(self.device, torch.float64 if precise else torch.float32).unbind()
            self._weights = weights
        return self._parts

    def _loss(self, output: Any, target: Any) -> Tensor:
        """Return the loss of one microbatch's output."""
        assert self.loss_fn is not None
        if target is _NOTHING:
            # A mean over nothing is NaN, and its gradient too: a microbatch without weight adds zeros instead.
            return sum((one.float().sum() for one in pack(output)[0] if one.requires_grad), torch.zeros(())) * 0.0
        loss = self.loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            what = f"a tensor of the shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ModelError(f"loss_fn returned {what}", expected="a tensor without dimensions: the microbatch's mean")
        return loss

    def _run(self, executors: Sequence[Executor], step: Step, records: Sequence[Record]) -> None:
        """Run every rank of this process through its row."""
        randomness = self._assembly.randomness
        randomness.step = step.number
        if step.train and self._captured is not None:
            self._captured.run(step)
            self._number += 1
            return
        runs = [executor.run(step, record) for executor, record in zip(executors, records, strict=True)]
        # A backward that runs in this very thread saves handing it to another and back, for every action.
        with randomness.kept_aside(), torch.autograd.set_multithreading_enabled(False):
            if self._hub is not None:
                take_turns(self._hub, runs)
            else:
                for wait in runs[0]:
                    self._channels[0].block(wait, self._deadline())
                self._channels[0].flush(self._deadline())
        self._number += 1

    def _put_aside(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        """Take earlier steps' gradients away where stages have two copies: only this step's are exchanged."""
        if not self.program.placement.mirrored:
            return []
        before = [(one, one.grad) for one in self.parameters()]
        self.zero_grad()
        return before

    def _put_back(self, before: list[tuple[nn.Parameter, Tensor | None]]) -> None:
        for parameter, earlier in before:
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)

    # ---- the end of a step -------------------------------------------------------------------------------------------

    def _told(self, step: Step, records: Sequence[Record]) -> Tally:
        """Tell all ranks how the step went here; returns what will be heard of all of them."""
        told = Told(sorted(step.losses))
        checked = [one.grad for one in self.parameters() if one.grad is not None]
        if told.microbatches:
            losses = torch.stack([step.losses[one] for one in told.microbatches])
            parts = losses * torch.stack([step.shares[one] for one in told.microbatches]).to(losses.dtype)
            checked.append(parts)
            told.dtype = str(losses.dtype).removeprefix("torch.")
            told.losses = parts.unbind() if self._hub is not None else parts.tolist()
        if step.train and self.check_finite:
            finite = all_finite(checked)
            told.finite = finite if self._hub is not None else bool(finite)
        if step.train and self._last is None:
            told.unreached = [name for name, one in self.named_parameters() if one.requires_grad and one.grad is None]
        each = [told] + [Told() for _ in self._channels[1:]]
        for one, executor, record in zip(each, self._executors, records, strict=False):
            one.record = record if self._hub is not None else executor.clock.settle(record)
        topic = f"step/{step.number}"
        for channel, one in zip(self._channels, each, strict=True):
            channel.tell(topic, one)
        clocks = [executor.clock for executor in self._executors] if self._hub is not None else []
        tally = Tally(step.number, lambda: self._heard(topic), self.program, clocks)
        self._open_tallies.append(tally)
        self._refused = None  # gradients add up, so this step's check covers what was there before
        return tally

    def settle(self, *, until: int | None = None) -> None:
        """Hear how the steps so far went on all ranks, and raise if one must not be built on.

        Optimizers do this before they step; call it before changing parameters by hand.
        """
        if until is None and self._refused is not None and any(one.grad is not None for one in self.parameters()):
            self._refused.check()  # the gradients that were refused are still there
        while self._open_tallies and (until is None or self._open_tallies[0].number <= until):
            self._refused = self._open_tallies.pop(0)
            self._refused.check()
            self._refused = None

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all ranks' gradients so that their global norm is at most `max_norm`; returns the norm before."""
        self._refuse_if_over()
        self.settle()
        with self._failing_together("clip_grad_norm_"):
            own = [self._norms(executor, norm_type) for executor in self._executors]
            norms = {name: norm for one in self._all_told("norms", own) for name, norm in one.items()}
        blocks = (block for stage in self._assembly.cuts for block in stage)
        order = (f"{block.name}.{name}" for block in blocks for name, _ in block.module.named_parameters())
        total = clip.total_norm([norms[name] for name in order if name in norms], norm_type)
        clip.scale(self.parameters(), total, max_norm)
        return total

    def _norms(self, executor: Executor, norm_type: float) -> dict[str, float]:
        """Return the gradient norms of the parameters whose home is this rank."""
        homes = self.program.placement.homes
        named = [
            pair
            for index, stage in executor.stages.items()
            if homes[index] == executor.rank
            for pair in assembly.named_parameters(stage)
        ]
        found = clip.norms_of([one for _, one in named], norm_type)
        return {name: norm for (name, _), norm in zip(named, found, strict=True) if norm is not None}

    def timeline(self) -> Measured:
        """Return what the last training step did on all ranks, as it was measured."""
        if self._last is None:
            raise RunError("no step has run yet", fix="call step first")
        return self._last.timeline

    # ---- what it holds -----------------------------------------------------------------------------------------------

    def optimizer(self, kind: type[torch.optim.Optimizer], **settings: Any) -> torch.optim.Optimizer:
        """Return a torch optimizer over this process's trainable parameters."""
        return kind([{"params": [one for one in self.parameters() if one.requires_grad]}], **settings)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this process's parameters under the names of the unsplit model."""
        if self._named is None:
            stages = [stage for executor in self._executors for stage in executor.stages.values()]
            self._named = [pair for stage in stages for pair in assembly.named_parameters(stage)]
        return iter(self._named)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this process's parameters."""
        return (one for _, one in self.named_parameters())

    def zero_grad(self) -> None:
        """Forget this process's gradients."""
        for one in self.parameters():
            one.grad = None

    # ---- words between ranks, failures -------------------------------------------------------------------------------

    def _deadline(self) -> int:
        return time.perf_counter_ns() + int(self.timeout * 1e9)

    def _all_told(self, what: str, values: Sequence[Any]) -> list[Any]:
        """Tell each of this process's ranks' values to all, and return what every rank told."""
        topic = f"{what}/{next(self._words)}"
        for channel, value in zip(self._channels, values, strict=True):
            channel.tell(topic, value)
        return self._heard(topic)

    def _heard(self, topic: str) -> list[Any]:
        told = [channel.hear(topic, self._deadline()) for channel in self._channels]
        return told[0]

    @contextmanager
    def _failing_together(self, during: str) -> Iterator[None]:
        """Let every rank know if this one fails; a pipeline with several processes is over then."""
        try:
            yield
        except BaseException as error:
            action = next((str(one.current) for one in self._executors if one.current is not None), during)
            for channel in self._channels:
                channel.abort(error, action)
            if self._hub is None:
                self._over = f"it failed at {action}: {error}"
                self._channels[0].close()
            raise

    def _refuse_if_over(self) -> None:
        if self._over:
            raise RunError(f"this pipeline cannot be used any more: {self._over}", fix="make a new one on all ranks")

    def close(self) -> None:
        """Take leave of the other ranks; nothing is left behind."""
        if not self._over:
            self._over = "it was closed"
            for channel in self._channels:
                channel.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
