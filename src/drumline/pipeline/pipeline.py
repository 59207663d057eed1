"""`Pipeline`: a model, a loss and a schedule, run on this rank and its peers as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError, RunError
from drumline.core.lower import lower
from drumline.core.program import Program
from drumline.pipeline import assembly, transports
from drumline.pipeline.assembly import Assembly, Checkpointing
from drumline.pipeline.crew import Crew
from drumline.pipeline.guard import Guard
from drumline.pipeline.intake import Intake
from drumline.pipeline.programs import attempt, forwards_of, program_for
from drumline.pipeline.result import StepResult
from drumline.pipeline.tally import Ledger, Tally, Told
from drumline.runtime import clip
from drumline.runtime.channel import Channel
from drumline.runtime.compiled import Compile, compiler_for
from drumline.runtime.cuda import CapturedStep, clock_for
from drumline.runtime.cut import Model, blocks_of, cut
from drumline.runtime.executor import Executor, Step
from drumline.runtime.finite import all_finite
from drumline.runtime.randomness import Randomness
from drumline.runtime.record import Measured, Record
from drumline.runtime.stage import Stage
from drumline.runtime.stash import Scale
from drumline.runtime.values import joined


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
    - `compile`: run every stage's blocks by torch.compile: True, a backend's name, or a dict of its arguments.
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
        compile: Compile = False,  # noqa: A002 - as torch calls it
    ) -> None:
        transports.check(transport)
        self.device = torch.device(device) if device is not None else assembly.device_of(model)
        self.check_finite = check_finite
        self._number = 0  # of the next step
        self._ledger = Ledger()
        self._named: list[tuple[str, nn.Parameter]] | None = None
        self._executors: list[Executor] = []
        program, problem = attempt(
            program_for,
            schedule,
            num_ranks=transports.num_ranks(transport, num_ranks),
            num_microbatches=num_microbatches,
            stages_per_rank=stages_per_rank,
        )
        self._crew = Crew.gathered(
            transport, self.device, num_ranks=num_ranks, program=program, ahead=ahead, timeout=timeout
        )
        self._crew.current = self._action
        with self._crew.together("the set-up"):
            # A rank that was given something wrong connects all the same, so that the others learn of it.
            if program is None:
                raise problem
            self.program = program
            self._intake = Intake(loss_fn, loss_weight, self.device, num_microbatches=program.num_microbatches)
            stages = cut(blocks_of(model), program.num_stages, balance, cuts)
            self._assembly = Assembly(
                lower(program, ahead=ahead),
                stages,
                self.device,
                Randomness(seed, self.device),
                assembly.checkpointed(checkpoint, stages),
                self._intake.loss if loss_fn is not None else None,
                compiler_for(compile, self.device),
            )
            described = self._assembly.described(check_finite=check_finite)
            assembly.agree(self._crew.all_told("set-up", [described] * len(self._crew.channels)))
            self._executors = [
                self._executor(channel, merge_weight_gradients, weigh) for channel in self._crew.channels
            ]
            self._intake.precise = any(one.dtype is torch.float64 for one in self.parameters())
            self._share_copies()
            self._evaluators = self._forward_executors(ahead)
            self._captured = self._capturer() if capture else None
        self._guard = Guard(list(self.parameters()), self.settle)

    @property
    def num_ranks(self) -> int:
        """How many ranks there are, in this process and others."""
        return self._crew.num_ranks

    @property
    def rank(self) -> int:
        """This process's rank, the first of them if several take turns here."""
        return self._crew.rank

    @property
    def transport(self) -> str:
        """How the ranks talk: "in-process", "shared-memory", "gloo" or "nccl"."""
        return self._crew.channels[0].name

    # ---- setting up --------------------------------------------------------------------------------------------------

    def _executor(self, channel: Channel, merge: bool, weigh: bool) -> Executor:
        stages = self._assembly.stages_of(channel.rank, apart=self._crew.alone)
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
        if not self.program.placement.mirrored:
            return
        mine = [
            {index: [tensor.detach().cpu() for tensor in assembly.state(stage)] for index, stage in at_home}
            for at_home in map(self._at_home, self._executors)
        ]
        weights = {index: state for one in self._crew.all_told("weights", mine) for index, state in one.items()}
        with torch.no_grad():
            for executor in self._executors:
                home = dict(self._at_home(executor))
                for index, stage in executor.stages.items():
                    if index not in home:
                        for tensor, value in zip(assembly.state(stage), weights[index], strict=True):
                            tensor.copy_(value)

    def _at_home(self, executor: Executor) -> list[tuple[int, Stage]]:
        """Return a rank's stages without those that are a second copy."""
        homes = self.program.placement.homes
        return [(index, stage) for index, stage in executor.stages.items() if homes[index] == executor.rank]

    # ---- steps -------------------------------------------------------------------------------------------------------

    def step(self, batch: Any = None, *, target: Any = None) -> StepResult:
        """Run one step of the program: gradients are added to the parameters', the loss is returned.

        Only ranks with the first stage need `batch`, only those with the last need `target`.
        """
        if self._intake.loss_fn is None:
            raise ModelError("the pipeline has no loss_fn", fix="pass one, or use eval_step for inference")
        if torch.is_inference_mode_enabled():
            raise RunError("step inside torch.inference_mode()", fix="leave it: nothing can be trained there")
        self._settle(until=self._number - 2)  # raises alike on all ranks, which may go on afterwards
        self._renew()
        step = Step(self._number)
        records = [Record(executor.rank) for executor in self._executors]
        with self._crew.together("the start of a step"):
            self._intake.take(step, batch, target, self._ends, self.rank)
            if self._captured is not None and self._captured.fits(step) and self._intake.same_as_before(step):
                self._captured.run(step)
            else:
                self._intake.cut(step)
                before = self._put_aside()
                self._run(self._executors, step, records)
                self._put_back(before)
            tally = self._told(step, records)
        return StepResult(step.number, lambda: tally.loss)

    def eval_step(self, batch: Any = None, *, target: Any = None) -> StepResult:
        """Run the forwards alone, in eval mode and without gradients; `result.output` is there with the last stage."""
        self._settle(until=self._number - 2)
        self._renew()
        step = Step(self._number, train=False)
        blocks = [block for one in self._executors for stage in one.stages.values() for block in stage.blocks]
        training = [module for block in blocks for module in block.module.modules() if module.training]
        with self._crew.together("the start of a step"):
            self._intake.take(step, batch, target, self._ends, self.rank)
            self._intake.cut(step)
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

    @property
    def _ends(self) -> set[str]:
        """Which ends of the model this process holds."""
        held = {index for executor in self._executors for index in executor.stages}
        return {end for end, index in (("first", 0), ("last", self.program.num_stages - 1)) if index in held}

    def _run(self, executors: Sequence[Executor], step: Step, records: Sequence[Record]) -> None:
        """Run every rank of this process through its row."""
        randomness = self._assembly.randomness
        randomness.step = step.number
        if step.train and self._captured is not None:
            self._captured.run(step)
            return
        # A backward that runs in this very thread saves handing it to another and back, for every action.
        with randomness.kept_aside(), torch.autograd.set_multithreading_enabled(False):
            self._crew.drive([one.run(step, record) for one, record in zip(executors, records, strict=True)])

    def _renew(self) -> None:
        """Follow what happened to the parameters since the last step."""
        stages = [stage for executor in self._executors for stage in executor.stages.values()]
        renewed = [stage.renew() for stage in stages]
        if any(renewed):
            self._named = None
            self._guard = Guard(list(self.parameters()), self.settle)
            self._ledger.reached = False
        if self._crew.alone:
            self._share_copies()

    def _put_aside(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        """Take earlier steps' gradients away where stages have two copies: only this step's are exchanged."""
        if not self.program.placement.mirrored:
            return []
        before = [(one, one.grad) for one in self.parameters()]
        for executor in self._executors:
            for stage in executor.stages.values():
                for one in stage.parameters:
                    one.grad = None
        return before

    def _put_back(self, before: list[tuple[nn.Parameter, Tensor | None]]) -> None:
        for parameter, earlier in before:
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)

    def _action(self) -> str:
        """Return the action that this process is at, if it is in the middle of a step."""
        return next((str(one.current) for one in self._executors if one.current is not None), "")

    # ---- the end of a step -------------------------------------------------------------------------------------------

    def _told(self, step: Step, records: Sequence[Record]) -> Tally:
        """Tell all ranks how the step went here; returns what will be heard of all of them."""
        alone = self._crew.alone
        told = Told(sorted(step.losses))
        checked = [one.grad for one in self.parameters() if one.grad is not None]
        if told.microbatches:
            losses = torch.stack([step.losses[one] for one in told.microbatches])
            parts = losses * torch.stack([step.shares[one] for one in told.microbatches]).to(losses.dtype)
            checked.append(parts)
            told.dtype = str(losses.dtype).removeprefix("torch.")
            told.losses = parts.unbind() if alone else parts.tolist()
        if step.train and self.check_finite:
            finite = all_finite(checked)
            told.finite = finite if alone else bool(finite)
        if step.train and not self._ledger.reached:
            self._ledger.reached = True
            told.unreached = [name for name, one in self.named_parameters() if one.requires_grad and one.grad is None]
        each = [told] + [Told() for _ in self._crew.channels[1:]]
        for one, executor, record in zip(each, self._executors, records, strict=False):
            one.record = record if alone else executor.clock.settle(record)
        topic = f"step/{step.number}"
        self._crew.tell(topic, each)
        clocks = [executor.clock for executor in self._executors] if alone else []
        tally = Tally(step.number, lambda: self._crew.heard(topic), self.program, clocks)
        self._ledger.add(tally, trained=step.train)
        self._number += 1
        return tally

    def settle(self) -> None:
        """Hear how the steps so far went on all ranks, and raise if one must not be built on.

        Optimizers do this before they step; call it before changing parameters by hand.
        """
        self._settle(until=None)

    def _settle(self, *, until: int | None) -> None:
        self._ledger.settle(until=until, gradients_left=lambda: any(one.grad is not None for one in self.parameters()))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all ranks' gradients so that their global norm is at most `max_norm`; returns the norm before."""
        self.settle()
        with self._crew.together("clip_grad_norm_"):
            own = [self._norms(executor, norm_type) for executor in self._executors]
            norms = {name: norm for one in self._crew.all_told("norms", own) for name, norm in one.items()}
        blocks = (block for stage in self._assembly.cuts for block in stage)
        order = (name for block in blocks for name, _ in block.named_parameters())
        total = clip.total_norm([norms[name] for name in order if name in norms], norm_type)
        clip.scale(self.parameters(), total, max_norm)
        return total

    def _norms(self, executor: Executor, norm_type: float) -> dict[str, float]:
        """Return the gradient norms of the parameters whose home is this rank."""
        named = [pair for _, stage in self._at_home(executor) for pair in assembly.named_parameters(stage)]
        found = clip.norms_of([one for _, one in named], norm_type)
        return {name: norm for (name, _), norm in zip(named, found, strict=True) if norm is not None}

    def timeline(self) -> Measured:
        """Return what the last training step did on all ranks, as it was measured."""
        if self._ledger.last is None:
            raise RunError("no step has run yet", fix="call step first")
        return self._ledger.last.timeline

    # ---- what it holds -----------------------------------------------------------------------------------------------

    def optimizer(self, kind: type[torch.optim.Optimizer], **settings: Any) -> torch.optim.Optimizer:
        """Return a torch optimizer over this process's trainable parameters."""
        return kind([{"params": [one for one in self.parameters() if one.requires_grad]}], **settings)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this process's parameters under the names of the unsplit model."""
        if self._named is None:
            # Of two copies in one process the second follows the first, so it is not the user's.
            held = [(self._at_home(one) if self._crew.alone else one.stages.items()) for one in self._executors]
            self._named = [pair for stages in held for _, stage in stages for pair in assembly.named_parameters(stage)]
        return iter(self._named)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this process's parameters."""
        return (one for _, one in self.named_parameters())

    def zero_grad(self) -> None:
        """Forget this process's gradients."""
        for one in self.parameters():
            one.grad = None

    def close(self) -> None:
        """Take leave of the other ranks; nothing is left behind."""
        self._crew.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
