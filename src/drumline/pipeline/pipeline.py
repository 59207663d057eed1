"""`Pipeline` trains a model with a schedule, on this rank and its peers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from drumline.channel.devices.rank_devices import RankDevices
from drumline.channel.lines.axes import Axes
from drumline.channel.lines.grid import AXES
from drumline.core.errors import DrumlineError, UsageError, counted
from drumline.core.measured.measured import Measured
from drumline.core.program import Program
from drumline.engine.state.put_back import kept_in
from drumline.pipeline.attached import AttachedMethods
from drumline.pipeline.options import Options, made_with
from drumline.pipeline.parameters import ParameterMethods
from drumline.pipeline.setup import set_up
from drumline.pipeline.steps.result import StepResult, output_of
from drumline.runtime.step import CalledWith, Step

T = TypeVar("T")

_SECONDS_FOR_A_CHECKPOINT = 5.0  # that was being written when another rank failed


class Pipeline(ParameterMethods, AttachedMethods):
    """Train a model cut into stages, with one schedule on all ranks. Create it with the same call on every rank.

    >>> from torch import nn
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> pipe = Pipeline(model, loss_fn=nn.functional.mse_loss, schedule="1f1b", num_microbatches=4, num_ranks=2)
    >>> optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    >>> result = pipe.step(torch.randn(8, 4), target=torch.zeros(8, 2))
    >>> optimizer.step(); optimizer.zero_grad()
    >>> pipe.timeline().program.name, result.loss.shape
    ('1f1b', torch.Size([]))

    Under torchrun or `dl.launch`, each process is one rank. Otherwise `num_ranks` ranks take turns in this process.

    - `model`: an nn.Sequential, a list or dict of blocks in order, or any module, which is cut between its submodules.
    - `loss_fn(output, target)`: returns the mean or sum over a microbatch. Default: the model's own loss.
    - `schedule`: a name (default "1f1b"), a `Program`, a CSV file, or "auto", which measures a few steps and then
      searches for a faster program. Where microbatches are few, it tries slices of sequences. With an example, it also
      chooses how many stages a rank holds.
    - `num_microbatches`, `num_ranks`, `stages_per_rank`: the counts that the schedule needs.
    - `vertical_sync`: with "pipedream", let all ranks use the weights that rank 0 uses, as of the same update.
    - `example`, `example_target`: a batch and its target, like those you pass to `step` (a dict by name, a tuple in
      order). Drumline times the blocks with them and picks the best cut. Modules that are not a chain of blocks need an
      example, except Hugging Face models.
    - `balance`: "auto" (timed with the example), "even", "parameters" (by their number), or the number of blocks per
      stage. `cuts`: instead, the names of the first blocks of stages 1, 2, ... With none of these, it is "auto" if
      there is an example, else "parameters".
    - `plan`: a plan from `dl.plan` or its file. It replaces schedule, microbatches, cut and checkpointing.
    - `weights`: a folder, a file or `dl.Weights`; each rank reads only its own parameters. A model on the meta device
      gets memory only for this rank's stages; without `weights`, its modules initialise them.
    - `checkpoint`: blocks to recompute: "none" (default), "full", block names, or a dict with one of these per stage.
    - `loss_weight(target)`: returns the weight of a microbatch. Default: what the loss is found to average over, by
      comparing it with itself on fewer rows: labels that are not ignored, rows, or nothing for a sum.
    - `split`: how to split arguments that are not split along dimension 0. A dict from name or position to one of
      these: a dimension; None (pass it whole); a function of all arguments that returns how many rows of a packed
      argument belong to each row of the batch.
    - `unused`: what to do about parameters that no loss reaches: "warn" once about those that no loss can reach
      (default), "raise" at the first step, or "ignore". Their gradient stays None.
    - `transport`, `device`, `seed`: what carries messages ("auto"), where this rank computes, the random seed (0).
    - `interface`: between hosts, the network interface to listen on, or an address of it; by default the one towards
      rank 0's host. Ranks of one host use loopback alone.
    - `precision`: "fp32" (the model's dtypes), "bf16" or "fp16" (autocast; fp16 scales the loss, see `pipe.scaler`).
    - `master_weights`: `pipe.optimizer` updates float32 copies of bf16 or fp16 parameters.
    - `check_finite`: on a NaN, raise NonFiniteError on all ranks before an optimizer steps (default True). A schedule
      without a flush leaves out that update instead: see `StepResult.skipped`.
    - `check_model`: compare two microbatches of the first step with the unsplit model, and one of a few later steps
      (default True). "first" checks the first step alone, a number every so many steps, False none. If they differ,
      raise ModelError before an optimizer steps. `pipe.checked` says what was compared and what it cost.
    - `merge_weight_gradients`: run adjacent W actions as one larger product, which sums in a different order.
    - `timeout`: longest wait for another rank, in seconds (default 300). `ahead`: open receives per edge (default 2).
    - `weigh`: count the bytes of activations after every action, for `timeline().stash`. This slows steps down.
    - `compile`: compile each stage's blocks with torch.compile: True, a backend's name, or a dict of arguments.
    - `capture`: run the work between two messages as one CUDA graph. Blocks must not draw random numbers.
    - `programs`: further programs by name, for `step(program=NAME)`: a `Program`, a CSV file, or a number of
      microbatches for the same schedule. All must place the same stages on the same ranks.
    - `arrange`: run `Microbatches` of unequal sizes in the order that the simulator finds fastest. This adds gradients
      in a different order.
    - `slices`: run every microbatch in so many slices of its sequences, or in slices of these lengths (a list). For
      causal models that call `scaled_dot_product_attention` and take positions. See the page on slices.
    - `mesh`: several pipelines side by side that train one model, as a dict or a DeviceMesh: `{"pp": 2, "dp": 2}`.
      Each rank passes its part of the batch, `pipe.axes.rows`. See the page on meshes.
    - `zero`: what the data-parallel lines of a mesh divide: 1 the optimizer's state, 3 parameters and gradients too; a
      dict by stage for different choices. Then `pipe.parameters()` are this line's pieces, with 3.
    - `tensor_parallel`: how an axis tp divides layers, as a dict from patterns of their names to styles, such as
      `{"*.q_proj": "colwise", "*.o_proj": "rowwise"}`. Default: the model's own `tensor_parallel_plan` or `tp_plan`.
    - `sequence_parallel`: between layers that tp divides, also divide the tokens of each row.
    - `adapt`: change the program, the cut or the number of microbatches during training, where measured steps show that
      it pays: True, or a dict of settings, such as `{"rebalance": "half"}`. See the page on adapting.
    - `record`: True keeps the last step's timeline (default), False records nothing, a folder stores the whole run.
    - `continue_record`: let the folder of `record` hold a run already, which this one continues: see `load`.
    """

    @made_with(Options)
    def __init__(self, options: Options) -> None:
        self._run = set_up(options.decided())
        self.device, self.balance = self._run.intake.device, self._run.balance
        self._crew, self._engine, self._ledger = self._run.crew, self._run.engine, self._run.ledger
        self._site = self._run
        self._recording, self._holdings, self._updates = self._run.recording, self._run.holdings, self._run.updates

    @property
    def program(self) -> Program:
        """The program that the ranks run, without backwards for frozen parameters; schedule="auto" may replace it."""
        return self._run.frozen.program

    @property
    def programs(self) -> dict[str, Program]:
        """The programs that `step(program=NAME)` may name, beside the one that runs without a name."""
        return self._run.programs.named

    @property
    def check_finite(self) -> bool:
        """Whether a NaN or infinite loss or gradient stops the optimizers of all ranks from stepping."""
        return self._run.flow.check_finite

    @property
    def axes(self) -> Axes:
        """This process's place in the mesh: `pipe.axes.rows` says which part of the batch to pass to `step`."""
        return self._crew.axes

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the pipeline, in this process and in others; in a mesh, those of one line."""
        return self._crew.num_ranks

    @property
    def rank(self) -> int:
        """This process's place in the pipeline; if several ranks take turns here, the first of them."""
        return self._crew.rank

    @property
    def transport(self) -> str:
        """What carries messages between ranks: "in-process", "shared-memory", "gloo" or "nccl"."""
        return self._crew.channels[0].name

    @property
    def devices(self) -> RankDevices:
        """Where every rank computes and what carries their messages, of all lines of a mesh; `str` is one line.

        >>> pipe = Pipeline([torch.nn.Linear(1, 1)], loss_fn=torch.nn.functional.mse_loss, num_microbatches=1)
        >>> str(pipe.devices)
        'rank 0 on cpu, in-process'
        """
        return self._crew.devices

    def step(
        self,
        *batch: Any,
        target: Any = None,
        outputs: Any = False,
        share: Any = 1.0,
        program: Any = None,
        **named: Any,
    ) -> StepResult:
        """Run one training step: add gradients to the parameters' `.grad` and return the loss.

        Call it as you would call the model: with the first block's input, or with the model's arguments. Only ranks
        with the first stage need the batch, and only ranks with the last stage need `target`. With `outputs=True`,
        `result.output` is the detached output of the last stage, or None on ranks without that stage.

        `share` multiplies the step's gradients but not its loss. If several steps add up to one update, pass this
        step's share of the update's tokens, the same on every rank. `program` is a name out of `programs`, or a
        `Program` that places the same stages on the same ranks; the same on every rank.
        """
        step = self._new_step()
        step.wants_outputs, step.share = _switched(outputs), _shared(share)
        run = self._run
        tally = run.run(step, run.prepared(step, CalledWith(batch, named, target), program))
        for after in run.observers.after:
            after(step)
        return StepResult(step.draw, lambda: tally.loss, output_of(step), run.flow.skipped)

    def eval_step(
        self, *batch: Any, target: Any = None, outputs: Any = True, program: Any = None, **named: Any
    ) -> StepResult:
        """Run only the forwards, of `program` if it is given, in eval mode and without gradients.

        Ranks with the last stage return `result.output`, unless `outputs=False`.
        """
        step = self._new_step(train=False)
        step.wants_outputs = _switched(outputs)
        self._run.run_by(step, program)
        self._run.flow.pause("eval_step")
        with self._recording.between.during("evaluate"):
            tally = self._run.evaluate(step, CalledWith(batch, named, target))
            return StepResult(step.draw, lambda: tally.loss, output_of(step))

    def _new_step(self, *, train: bool = True) -> Step:
        return Step(self._ledger.number, train=train, draw=self._ledger.num_trained)

    def settle(self) -> None:
        """Wait for the outcome of all steps so far on all ranks, and raise if one of them failed.

        Optimizers call this before they step, unless they were made with `validated="after"`. Call it yourself before
        you read or change parameters by hand. With a schedule without a flush, call it on every rank: it runs the
        backwards in flight, and makes no update early.
        """
        self._run.settle("settle")

    @property
    def steps_in_flight(self) -> int:
        """How many of the last steps other ranks may not have finished: 0 unless the schedule has no flush.

        Reading the loss of one of these waits for them, and lets ranks run empty.
        """
        return self._run.flow.num_in_flight

    def drain(self) -> None:
        """Finish all steps of a schedule without a flush: run what is in flight, and make all updates that are due.

        Call it on every rank at the end of training, before you read the weights. The next step starts with empty
        ranks. Evaluations and checkpoints need no drain, and do not change what is trained. With flushed schedules this
        does nothing.

        >>> layers, loss_fn = [torch.nn.Linear(1, 1)], torch.nn.functional.mse_loss
        >>> pipe = Pipeline(layers, loss_fn=loss_fn, schedule="pipedream", num_microbatches=1)
        >>> optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        >>> result = pipe.step(torch.ones(1, 1), target=torch.ones(1, 1))
        >>> pipe.drain()
        """
        self._run.flow.drain()

    def stopping(self) -> str:
        """Return why the run should stop, such as "SIGTERM on rank 1"; empty while it should not.

        Call it on every rank after a step. All get the same answer, whichever of them got a signal, because each rank
        reports signals with the outcome of its step. Signals ask inside `dl.stop_on_signals`, and under
        `dl.launch(..., stoppable=True)`.

        >>> from drumline.channel.launch.stop import ask, stop_on_signals
        >>> pipe = Pipeline([torch.nn.Linear(1, 1)], loss_fn=torch.nn.functional.mse_loss, num_microbatches=1)
        >>> with stop_on_signals():
        ...     ask("SIGTERM")
        ...     result = pipe.step(torch.ones(1, 1), target=torch.ones(1, 1))
        >>> pipe.stopping()
        'SIGTERM on rank 0'
        """
        with self._recording.between.during("hear"):
            own_stop = self._ledger.stop(self._run.flow.told_until)
            if not self.axes.is_mesh:
                return own_stop
            # Every rank of a line knows the same, so that those at one place of all lines know everything.
            asked = self.axes.summed(torch.tensor([float(bool(own_stop))], device=self.device), *AXES[1:]).item()
            return next(filter(None, self._crew.everywhere("stop", own_stop)), "") if asked else ""

    def take_program(self, program: str | Path | Program, num_microbatches: int | None = None) -> Program:
        """Run by another program from the next step on: a schedule's name, a `Program` or a CSV file.

        Call it on every rank, between two steps. It must place the same stages on the same ranks. It is proven first,
        and refused if it holds more than `adapt` allows. With a schedule's name, `num_microbatches` is that of now
        unless given. Returns the program as it runs.

        >>> pipe = Pipeline([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)], num_microbatches=4, num_ranks=2)
        >>> pipe.take_program("gpipe", num_microbatches=2).num_microbatches
        2
        """
        return self._run.choice.take_program(program, num_microbatches)

    @property
    def blocks(self) -> list[list[str]]:
        """The names of the blocks in each stage, of the whole model."""
        chain = self._engine.chain
        return [
            [chain.names[number] for number in chain.numbers(chain.counts, [at])] for at in range(len(chain.counts))
        ]

    @property
    def kept_state(self) -> dict[str, list[str]]:
        """What forwards of this process's blocks have changed beside parameters and buffers, by block.

        Recomputed blocks find it again as their first run found it. Others are looked at in their first forward alone.

        >>> __name__ = "mine"  # not a part of this library
        >>> class Counts(torch.nn.Linear):
        ...     calls = 0
        ...     def forward(self, x):
        ...         self.calls += 1
        ...         return super().forward(x)
        >>> pipe = Pipeline([Counts(1, 1)], loss_fn=torch.nn.functional.mse_loss, num_microbatches=1, checkpoint="full")
        >>> result = pipe.step(torch.ones(1, 1), target=torch.ones(1, 1))
        >>> pipe.kept_state
        {'0': ['calls']}
        """
        return kept_in(segment.ledger for stage in self._engine.stages() for segment in stage.segments)

    def timeline(self, what: str = "train") -> Measured:
        """Return the measured timeline of the last training step on all ranks, or with "evaluate" of `eval_step`."""
        self._recording.check()
        return self._ledger.timeline(what)

    def note(self, of_step: int | None = None, /, **metrics: float | Tensor) -> None:
        """Add metrics to the last training step's line of the run folder; nothing where no run is recorded.

        With `validated="after"`, `of_step` may be the number of the step before it, as `StepResult.step` has it.
        """
        self._recording.note(of_step, **metrics)

    def gather(self, value: Any) -> list[Any]:
        """Return what every rank passes here, rank 0's first; call it on every rank.

        >>> pipe = Pipeline([torch.nn.Linear(1, 1)], loss_fn=torch.nn.functional.mse_loss, num_microbatches=1)
        >>> pipe.gather("ready")
        ['ready']
        """
        with self._crew.together("gather"):
            return self._crew.everywhere("gather", value)

    def data(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of `loader`, and measure the time spent waiting for each.

        >>> pipe = Pipeline([torch.nn.Linear(1, 1)], loss_fn=torch.nn.functional.mse_loss, num_microbatches=1)
        >>> for x in pipe.data([torch.ones(1, 1)]):
        ...     _ = pipe.step(x, target=x)
        >>> [value.kind for value in pipe.timeline().between]
        ['data', 'check']
        """
        return self._recording.data(loader)

    def count_from(self, step: int) -> None:
        """Give the next training step this number, where another loader than `load` has restored a run.

        Random numbers inside blocks follow from it, so that a resumed run draws what it would have drawn.
        """
        self._ledger.num_trained = step

    def close(self) -> None:
        """Finish writing a checkpoint, and disconnect from the other ranks."""
        self._close()

    def _close(self, most_seconds: float | None = None) -> None:
        self._finish(most_seconds)
        for observer in self._run.observers.each:
            observer.close()
        self._crew.close()

    def __repr__(self) -> str:
        program = self.program
        alone = "in this process" if self.num_ranks == 1 else "all in this process, taking turns"
        here = alone if self._crew.alone else f"this is {self._crew.naming.rank(self.rank)}"
        sizes = f"{counted(program.num_stages, 'stage')}, {counted(program.num_microbatches, 'microbatch')}"
        ranks = f"{counted(self.num_ranks, 'rank')} ({here})"
        return f"Pipeline({program.name}: {ranks}, {sizes}, {self.transport} on {self.device})"

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, DrumlineError) and not self._crew.over:
            self._crew.axes.failed("its own code", error)  # other lines of a mesh may wait for this rank
        if kind is not None and not issubclass(kind, Exception):  # whoever interrupts a run does not wait for a disk
            self._close(0.0)
        else:
            # Where a rank has failed, its part of a checkpoint may never come.
            self._close(_SECONDS_FOR_A_CHECKPOINT if self._crew.over else None)


def _switched(outputs: Any) -> bool:
    # `outputs` is not annotated as bool, so that type checkers accept step(**batch) with a dict of tensors.
    if not isinstance(outputs, bool):
        raise UsageError(f"outputs is {outputs!r:.80}", expected="True or False: whether to return the model's output")
    return outputs


def _shared(share: Any) -> float:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share < math.inf:
        raise UsageError(
            f"share is {share!r:.80}", expected="a number above 0: what part of the update's tokens this is"
        )
    return float(share)
