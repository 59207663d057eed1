"""`Pipeline`: a model, a loss and a schedule, run on this rank and its peers as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError, RunError, UsageError
from drumline.core.measured.measured import Measured
from drumline.core.program import Program
from drumline.pipeline.assembly import Checkpointing
from drumline.pipeline.auto_schedule import AUTO, AutoSchedule, Searched
from drumline.pipeline.record.tally import Ledger, Tally, Told
from drumline.pipeline.result import StepResult
from drumline.pipeline.setup import Options, set_up
from drumline.pipeline.state.guard import Guard
from drumline.pipeline.state.scaler import LossScaler
from drumline.pipeline.verify.agreement import Followed, Given, begun
from drumline.pipeline.verify.model_check import Checked
from drumline.plan.device.plan import Plan
from drumline.plan.device.planner import Planned
from drumline.runtime.backward.compiled import Compile
from drumline.runtime.batch import Split, counted_in
from drumline.runtime.blocks.cut import Model
from drumline.runtime.channel.channel import step_topic
from drumline.runtime.draft import Draft
from drumline.runtime.executor import Step
from drumline.runtime.gradients import clip
from drumline.runtime.gradients.clip import all_finite
from drumline.runtime.values import joined
from drumline.runtime.weights.files import Weights

T = TypeVar("T")


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

    - `model`: an nn.Sequential, an ordered list of blocks, or any module, which is cut at its own children.
    - `example`: a batch as `step` will get it (a dict by name, a tuple in order), with `example_target`: blocks are
      measured with it and cut where that is best. A module that is no chain needs one, but for Hugging Face's.
    - `balance`: "auto" (measured by the example), "even", or how many blocks each stage gets; or `cuts`, the names of
      the blocks with which stages 1, 2, ... begin. Without any of these the number of parameters decides.
    - `weights`: a folder or file to read parameters from, or `dl.Weights`; each rank reads its own. A model on the meta
      device gets memory for this rank's stages alone, and without weights what its modules' initialisers draw.
    - `loss_fn(output, target)`: the mean over a microbatch, or a sum. Microbatches count by what torch's losses in it
      count (labels that are not ignored), else by their rows, or by what `loss_weight(target)` returns for each.
    - `split`: how `step`'s arguments are cut into microbatches where that is not along the first dimension: by name or
      place, a dimension, None for whole to each, or a function of all arguments that returns how many of a packed
      argument's rows belong to each row of the batch.
    - `unused`: what to do about parameters that no loss reaches, whose gradient stays None: "warn" (once, of those that
      nothing can reach), "raise" at the first step, or "ignore".
    - `schedule`: a name ("1f1b" unless given), a `Program`, a CSV file, or "auto": a few steps are measured, and a
      program is searched for what they took.
    - `plan`: what `dl.plan` decided, or its file, in place of schedule, microbatches, cut and checkpointing.
    - `checkpoint`: "none", "full", names of blocks to recompute, or one of these per stage as a dict.
    - `precision`: "fp32" (as the model is), "bf16" or "fp16" (autocast; fp16 with `pipe.scaler`, a loss scale).
    - `master_weights`: of parameters in bf16 or fp16, `pipe.optimizer` updates float32 copies.
    - `check_model`: hold the first step against the model by itself, on one microbatch, and raise ModelError before an
      optimizer steps if they differ; `pipe.checked` says what was compared and what it cost.
    - `check_finite`: raise NonFiniteError on all ranks before an optimizer steps on a NaN.
    - `merge_weight_gradients`: W actions that stand together run as one larger product, which sums in another order.
    - `timeout`: the longest that this rank waits for another, in seconds.
    - `ahead`: how many receives of one edge are open at once.
    - `weigh`: count the bytes of activations held after every action, for `timeline().stash`; slows steps down.
    - `compile`: run every stage's blocks by torch.compile: True, a backend's name, or a dict of its arguments.
    - `capture`: launch what a rank computes between two messages as one CUDA graph; for blocks that draw no random
      numbers.
    - `record`: True keeps the last step's timeline, False records nothing, a folder gets the whole run.
    """

    def __init__(
        self,
        model: Model,
        *,
        loss_fn: Callable[..., Tensor] | None = None,
        schedule: str | Path | Program | None = None,
        num_microbatches: int | None = None,
        num_ranks: int | None = None,
        stages_per_rank: int | None = None,
        balance: Sequence[int] | str | None = None,
        cuts: Sequence[str] | None = None,
        plan: Plan | Planned | str | Path | None = None,
        example: Any = None,
        example_target: Any = None,
        weights: str | Path | Weights | None = None,
        checkpoint: Checkpointing = "none",
        loss_weight: Callable[[Any], float | Tensor] | None = None,
        split: Split | None = None,
        unused: str = "warn",
        transport: str = "auto",
        device: torch.device | str | None = None,
        seed: int = 0,
        precision: str = "fp32",
        master_weights: bool = False,
        check_finite: bool = True,
        check_model: bool = True,
        merge_weight_gradients: bool = False,
        timeout: float = 300.0,
        ahead: int = 2,
        capture: bool = False,
        weigh: bool = False,
        compile: Compile = False,  # noqa: A002 - as torch calls it
        record: bool | str | Path = True,
    ) -> None:
        options = Options.checked(locals())
        self.check_finite = check_finite
        self._number = 0  # of the next step
        self._ledger = Ledger(unused)
        self._named: list[tuple[str, nn.Parameter]] | None = None
        self._auto = AutoSchedule() if options.schedule == AUTO else None
        parts = set_up(options, self._ledger, self.settle)
        self.device, self.program, self.balance = parts.device, parts.program, parts.balance
        self._crew, self._intake, self._frozen = parts.crew, parts.intake, parts.frozen
        self._updates, self._recording = parts.updates, parts.recording
        self._engine, self._holdings, self._check = parts.engine, parts.holdings, parts.check
        self._watched, self._shared = parts.watched, parts.shared
        self._followed = Followed(block for stage in self._engine.stages() for block in stage.blocks)
        self._guard = self._guarded()
        self._ledger.unused.known = parts.unused if self.rank == 0 else None

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

    # ---- steps -------------------------------------------------------------------------------------------------------

    def step(self, *batch: Any, target: Any = None, outputs: Any = False, **named: Any) -> StepResult:
        """Run one step of the program: gradients are added to the parameters', the loss is returned.

        The batch is what the model is called with: the first block's input, or a model's arguments in order and by
        name. Only ranks with the first stage need it, only those with the last need `target`. With `outputs`,
        `result.output` is what the last stage made, detached, on ranks that hold it; None on others.
        """
        _check_switch(outputs)
        if outputs and self._engine.captured is not None:
            raise RunError("outputs of a captured step", expected="a step that runs as ever", fix="use capture=False")
        if not self._intake.has_loss:
            raise ModelError("the pipeline has no loss_fn", fix="pass one, or use eval_step for inference")
        if torch.is_inference_mode_enabled():
            raise RunError("step inside torch.inference_mode()", fix="leave it: nothing can be trained there")
        if self._auto is not None:
            with self._crew.together("the search for a program"):
                found = self._auto.before_step(self._number, self._ledger, self._crew, self.program)
                if found is not None:
                    self.settle()
                    self.program = self._frozen.pruned(found)
                    self._engine.take_up(self.program)
        self._check.refuse()
        self._frozen.check_trains()
        self._settle(until=self._number - 2)  # raises alike on all ranks, which may go on afterwards
        self._renew()
        if self._check.is_pending or self._number == 0:
            self._check_first(batch, target, named)
        drafts = self._recording.begin(self._number)
        step = Step(self._number, wants_outputs=outputs)
        with self._crew.together("the start of a step"):
            self._frozen.check_still(self._engine.stages())
            self._intake.take(step, self._intake.called(batch, named), target, self._engine.ends, self.rank)
            captured = self._engine.captured
            fits = captured is not None and captured.fits(step)
            given = self._given(batch, named, target)
            if not fits or self._intake.counts_labels:  # a step like the last one weighs what that did
                self._intake.cut(step)
            before = self._holdings.put_aside(list(self.parameters()))
            self._updates.begin(step, self.parameters())
            self._shared.before()
            self._engine.run(step, drafts)
            self._recording.ran(drafts)
            self._shared.after()
            self._updates.end(step, self.parameters())
            self._holdings.put_back(before)
            tally = self._told(step, drafts, given())
        if self._check.is_pending:
            self._compare_first(step)
        return StepResult(step.number, lambda: tally.loss, _output(step))

    def _check_first(self, batch: tuple[Any, ...], target: Any, named: dict[str, Any]) -> None:
        """Run a microbatch through the model by itself, for the first step to be held against."""
        recorded = self._recording.during("check") if self._check.is_pending else nullcontext()  # a chain has none
        with recorded, self._crew.together("the check of the model"):
            self._check.agree_on_weights()
            scale = 1.0 if self.scaler is None else self.scaler.scale
            self._check.before(self._number, self._intake.called(batch, named), target, scale)

    def _compare_first(self, step: Step) -> None:
        try:
            self._check.after(step)
        finally:
            if (found := self._check.checked) is not None:
                self._recording.note(
                    **{
                        "check_metrics/seconds": found.seconds,
                        "check_metrics/parameters": found.num_parameters,
                        "check_metrics/wrong": len(found.wrong),
                    }
                )

    @property
    def checked(self) -> Checked | None:
        """What the check of the first step compared, what it cost and what it left out; None before it."""
        return self._check.checked

    def eval_step(self, *batch: Any, target: Any = None, outputs: Any = True, **named: Any) -> StepResult:
        """Run the forwards alone, in eval mode and without gradients.

        `result.output` is there with the last stage, unless `outputs` is off.
        """
        _check_switch(outputs)
        with self._recording.during("evaluate"):
            return self._evaluated(batch, target, named, outputs)

    def _evaluated(self, batch: tuple[Any, ...], target: Any, named: dict[str, Any], outputs: bool) -> StepResult:
        self._settle(until=self._number - 2)
        self._renew()
        step = Step(self._number, train=False)
        with self._crew.together("the start of a step"):
            self._intake.take(step, self._intake.called(batch, named), target, self._engine.ends, self.rank)
            self._intake.cut(step)
            given = self._given(batch, named, target)
            self._engine.run(step, [])
            tally = self._told(step, [], given())
        return StepResult(step.number, lambda: tally.loss, _output(step) if outputs else None)

    def _renew(self) -> None:
        """Follow what happened to the model and its parameters since the last step."""
        with self._crew.together("the start of a step"):
            self._watched.look()
        self._holdings.follow()
        if self._engine.renew():
            self._named = None
            self._updates.follow(self._engine.parameters())
            self._guard = self._guarded()
            self._ledger.unused.begin()

    def _guarded(self) -> Guard:
        return Guard(list(self.parameters()), self._before_update, lambda optimizer: self._recording.leave())

    # ---- the end of a step -------------------------------------------------------------------------------------------

    def _given(self, batch: tuple[Any, ...], named: dict[str, Any], target: Any) -> Callable[[], Given | None]:
        """Return what says what other ranks compare their batches with; ranks of one process have one."""
        return (lambda: None) if self._crew.alone else begun((batch, named), target)

    def _told(self, step: Step, drafts: Sequence[Draft], given: Given | None) -> Tally:
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
        if step.train and (self.check_finite or self.scaler is not None):
            told.scale = None if self.scaler is None else step.scale
            finite = all_finite(checked)
            told.finite = finite if alone else bool(finite)
        if step.train and self._ledger.unused.looks:
            told.unreached = [name for name, one in self.named_parameters() if one.requires_grad and one.grad is None]
        each = [told] + [Told() for _ in self._crew.channels[1:]]
        told.num_rows, told.num_tokens = counted_in(step.batch)
        told.train, told.given, told.followed = step.train, given, self._followed.fresh()
        for one in each:
            one.train = step.train
        topic = step_topic(step.number)
        tally = Tally(step.number, lambda: self._crew.heard(topic), self.program, self.scaler)
        if alone and self._recording.is_on:
            tally.own = lambda: self._recording.settled(drafts)
        if step.train:
            self._recording.ended(drafts)
        with self._recording.during("tell"):
            if step.train:
                self._recording.fill(each, drafts)
            self._crew.tell(topic, each)
        self._ledger.add(tally, trained=step.train, alone=alone)
        if step.train:
            with self._recording.during("write"):
                self._recording.add(tally, each)
        self._number += 1
        return tally

    def settle(self) -> None:
        """Hear how the steps so far went on all ranks, and raise if one must not be built on.

        Optimizers do this before they step; call it before changing parameters by hand.
        """
        self._settle(until=None)

    def _settle(self, *, until: int | None) -> None:
        with self._recording.during("hear") if until is None else nullcontext():
            self._ledger.settle(
                until=until, gradients_left=lambda: any(one.grad is not None for one in self.parameters())
            )

    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
        self._updates.check(optimizer)
        self._check.refuse()
        self.settle()
        self._recording.enter("update")

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scale, the same on all ranks; None unless `precision` is "fp16"."""
        return self._updates.scaler

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all ranks' gradients so that their global norm is at most `max_norm`; returns the norm before."""
        clip.check(max_norm, norm_type)
        with self._recording.during("clip"):
            return self._clipped(max_norm, norm_type)

    def _clipped(self, max_norm: float, norm_type: float) -> Tensor:
        self.settle()
        with self._crew.together("clip_grad_norm_"):
            own = self._holdings.norms(norm_type)
            norms = {name: norm for one in self._crew.all_told("norms", own) for name, norm in one.items()}
        total = clip.total_norm([norms[name] for name in self._engine.assembly.order if name in norms], norm_type)
        clip.scale(self.parameters(), total, max_norm)
        self._recording.note(grad_norm=total)
        return total

    @property
    def searched(self) -> Searched | None:
        """With schedule="auto" on rank 0, what was found and gained; None as long as nothing was searched."""
        return None if self._auto is None else self._auto.searched

    def timeline(self) -> Measured:
        """Return what the last training step did on all ranks, as it was measured."""
        self._recording.check()
        return self._ledger.timeline()

    def data(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield what `loader` does; how long each batch takes to come is measured as waiting for data.

        >>> pipe = Pipeline([nn.Linear(1, 1)], loss_fn=nn.functional.mse_loss, num_microbatches=1)
        >>> for x in pipe.data([torch.ones(1, 1)]):
        ...     _ = pipe.step(x, target=x)
        >>> [one.kind for one in pipe.timeline().between]
        ['data']
        """
        return self._recording.data(loader)

    # ---- what it holds -----------------------------------------------------------------------------------------------

    def optimizer(self, kind: type[torch.optim.Optimizer], **settings: Any) -> torch.optim.Optimizer:
        """Return a torch optimizer over this process's trainable parameters, or their float32 copies.

        Its `state_dict` goes by parameter name: the ranks' states together load into any schedule and cut.
        """
        trained = [one for one in self.parameters() if one.requires_grad]
        return self._updates.optimizer(kind, trained, settings, self.named_master_weights)

    def named_master_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what optimizers update for each parameter: with `master_weights` float32 copies, else itself."""
        masters = self._updates.masters
        return self.named_parameters() if masters is None else masters.named(self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this process's parameters under the names of the unsplit model; a tied one once, by its first name."""
        if self._named is None:
            self._named = self._holdings.named_parameters()
        return iter(self._named)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this process's parameters."""
        return (one for _, one in self.named_parameters())

    def zero_grad(self) -> None:
        """Forget this process's gradients."""
        for one in self.parameters():
            one.grad = None
        self._updates.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return this process's parameters and persistent buffers under the names of the unsplit model.

        All processes' together have every tensor of the model once: a tied one under its first name, given by one rank.
        """
        return self._holdings.state_dict()

    def load_state_dict(self, mapping: Mapping[str, Any]) -> None:
        """Take parameters and buffers from a mapping with names of the unsplit model; call it on every rank.

        Names of other stages are left alone; a tied tensor may stand under any of its names, and reaches all owners.
        """
        self._holdings.load_state_dict(mapping)
        self._check.loaded(mapping)

    def close(self) -> None:
        """Take leave of the other ranks; nothing is left behind but a run that was recorded."""
        self._recording.close()
        self._crew.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_switch(outputs: Any) -> None:
    # Not declared as a bool, so that type checkers take step(**batch) with a dict of tensors.
    if not isinstance(outputs, bool):
        raise UsageError(f"outputs is {outputs!r:.80}", expected="True or False: whether to return what is made")


def _output(step: Step) -> Any:
    """Return what the last stage made of the whole batch; None where it was not here, or nobody wanted it."""
    order = sorted(step.outputs)
    shares = [step.shares[one] for one in order] if len(step.shares) else []
    return joined([step.outputs[one] for one in order], shares) if order else None
