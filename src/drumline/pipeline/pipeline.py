"""`Pipeline`: a model, a loss and a schedule, run on this rank and its peers as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from drumline.core.errors import UsageError, counted
from drumline.core.measured.measured import Measured
from drumline.core.program import Program
from drumline.pipeline.auto_schedule import Searched
from drumline.pipeline.lengths.arrange import SearchedSizes
from drumline.pipeline.options import Options, made_with
from drumline.pipeline.setup import set_up
from drumline.pipeline.state.scaler import LossScaler
from drumline.pipeline.step import CalledWith, StepResult, output_of
from drumline.pipeline.verify.verdict import Checked
from drumline.runtime.executor import Step
from drumline.runtime.gradients import clip

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
    - `programs`: further programs by name, for `step(program=NAME)`: a `Program`, a CSV file, or a number of
      microbatches for the same schedule. All have the same stages in the same places.
    - `arrange`: let `Microbatches` of unequal sizes run in the order that takes least in the simulator. Gradients are
      then added in another order.
    - `record`: True keeps the last step's timeline, False records nothing, a folder gets the whole run.
    """

    @made_with(Options)
    def __init__(self, options: Options) -> None:
        self._run = set_up(options.decided())
        self.device, self.balance = self._run.intake.device, self._run.balance
        self._crew, self._engine, self._ledger = self._run.crew, self._run.engine, self._run.ledger
        self._recording, self._holdings, self._updates = self._run.recording, self._run.holdings, self._run.updates

    @property
    def program(self) -> Program:
        """What the ranks run, without backwards for what is frozen; with schedule="auto", another one some day."""
        return self._run.frozen.program

    @property
    def programs(self) -> dict[str, Program]:
        """The programs that `step(program=NAME)` may name, beside the one that runs without a name."""
        return self._run.programs.named

    @property
    def check_finite(self) -> bool:
        """Whether a loss or gradient that is not finite keeps all ranks' optimizers from stepping."""
        return self._run.check_finite

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

    def step(
        self, *batch: Any, target: Any = None, outputs: Any = False, program: Any = None, **named: Any
    ) -> StepResult:
        """Run one step of the program: gradients are added to the parameters', the loss is returned.

        The batch is what the model is called with: the first block's input, or a model's arguments in order and by
        name. Only ranks with the first stage need it, only those with the last need `target`. With `outputs`,
        `result.output` is what the last stage made, detached, on ranks that hold it; None on others. `program` is the
        name of one out of `programs`, or a `Program` for the same stages in the same places; the same on all ranks.
        """
        call, step = CalledWith(batch, named, target), Step(self._ledger.number, wants_outputs=_switched(outputs))
        self._run.refuse(step)
        self._run.run_by(step, program)
        self._run.catch_up(step)
        self._run.check_before(step, call)
        tally = self._run.run(step, call)
        self._run.check_after(step)
        return StepResult(step.number, lambda: tally.loss, output_of(step))

    @property
    def checked(self) -> Checked | None:
        """What the check of the first step compared, what it cost and what it left out; None before it."""
        return self._run.check.checked

    def eval_step(
        self, *batch: Any, target: Any = None, outputs: Any = True, program: Any = None, **named: Any
    ) -> StepResult:
        """Run the forwards alone, in eval mode and without gradients; by the forwards of `program`, if it is given.

        `result.output` is there with the last stage, unless `outputs` is off.
        """
        wanted, step = _switched(outputs), Step(self._ledger.number, train=False)
        self._run.run_by(step, program)
        with self._recording.between.during("evaluate"):
            self._run.catch_up(step)
            tally = self._run.run(step, CalledWith(batch, named, target))
            return StepResult(step.number, lambda: tally.loss, output_of(step) if wanted else None)

    def settle(self) -> None:
        """Hear how the steps so far went on all ranks, and raise if one must not be built on.

        Optimizers do this before they step; call it before changing parameters by hand.
        """
        self._recording.settle()

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scale, the same on all ranks; None unless `precision` is "fp16"."""
        return self._updates.scaler

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all ranks' gradients so that their global norm is at most `max_norm`; returns the norm before."""
        clip.check(max_norm, norm_type)
        with self._recording.between.during("clip"):
            self.settle()
            with self._crew.together("clip_grad_norm_"):
                own = self._holdings.norms(norm_type)
                norms = {name: norm for one in self._crew.all_told("norms", own) for name, norm in one.items()}
            total = clip.total_norm([norms[name] for name in self._engine.assembly.order if name in norms], norm_type)
            clip.scale(self.parameters(), total, max_norm)
            self._recording.note(grad_norm=total)
            return total

    def search(self, sizes: Iterable[Any], *, seconds: float = 2.0, num_steps: int = 1000) -> SearchedSizes:
        """Search a program for steps whose microbatches have these sizes: lengths, or (rows, length) for each.

        Costs are fitted to the steps with `Microbatches` so far. Rank 0 searches for so many seconds, in the memory of
        the pipeline's own program, and all ranks call this alike. `program` of what is returned is None unless it saves
        more in so many steps than the search took; pass it to `step`.

        >>> pipe = Pipeline([nn.Linear(1, 1), nn.Linear(1, 1)], num_microbatches=4, num_ranks=2)
        >>> pipe.search([100, 30, 50, 20], seconds=0.1).arranged.name
        'longest in the middle'
        """
        self.settle()
        return self._run.arranging.search(list(sizes), seconds=seconds, num_steps=num_steps)

    @property
    def searched(self) -> Searched | None:
        """With schedule="auto" on rank 0, what was found and gained; None as long as nothing was searched."""
        return None if self._run.auto is None else self._run.auto.searched

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
        return iter(self._holdings.named_parameters())

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this process's parameters."""
        return iter(self._holdings.parameters())

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
        self._run.check.loaded(mapping)

    def close(self) -> None:
        """Take leave of the other ranks; nothing is left behind but a run that was recorded."""
        self._recording.close()
        self._crew.close()

    def __repr__(self) -> str:
        program = self.program
        here = "all here, in turn" if self._crew.alone else f"this is rank {self.rank}"
        sizes = f"{counted(program.num_stages, 'stage')}, {counted(program.num_microbatches, 'microbatch')}"
        ranks = f"{counted(self.num_ranks, 'rank')} ({here})"
        return f"Pipeline({program.name}: {ranks}, {sizes}, {self.transport} on {self.device})"

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _switched(outputs: Any) -> bool:
    # Not declared as a bool, so that type checkers take step(**batch) with a dict of tensors.
    if not isinstance(outputs, bool):
        raise UsageError(f"outputs is {outputs!r:.80}", expected="True or False: whether to return what is made")
    return outputs
