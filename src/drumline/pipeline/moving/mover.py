"""Move layers between ranks, in the running processes and between two steps.

    agree      all ranks compare the new cut and their optimizers; whoever cannot move says so before anything changes
    send       what leaves goes over the pipeline's channels to the ranks that hold it from now on
    rebuild    stages, programs and whatever knows them are built for the new cut; optimizers drop and take over

Ranks that take turns in one process share one model, so there nothing is sent. With several lines of a mesh, each line
moves its own copies. If a rank dies meanwhile, the others fail within their time limit, and the last checkpoint holds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drumline.adapt.move import Move
from drumline.channel.transfer import transferred
from drumline.core.errors import DrumlineError, MismatchError, UsageError
from drumline.engine.ranks.observer import Observers
from drumline.model.blocks.cut import cut
from drumline.model.weights.absent import give_up
from drumline.model.weights.tied import Ties
from drumline.pipeline.moving.parcels import Freight, Parcel, Unpacked, freights, packed, put_attributes, unpacked
from drumline.plan.cut.peaks import held_by

if TYPE_CHECKING:
    from drumline.pipeline.steps.step import StepRun

_DURING = "the move of layers"


class Mover:
    """Moves the layers of one pipeline; `moves` are those so far."""

    def __init__(self, run: StepRun) -> None:
        self._run = run
        self._seconds: dict[str, float] = {}
        self.moves: list[Move] = []

    def repartition(self, cuts: Any, balance: Any) -> Move:
        """Give the stages other blocks; see Pipeline.repartition."""
        run = self._run
        run.recording.settle()
        with run.recording.between.during("move"):
            self._seconds = {}
            with self._timed("agree"):
                counts = self._agreed(cuts, balance)
            with run.crew.together(_DURING):
                return self._moved(counts)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - begun

    # ---- agree -------------------------------------------------------------------------------------------------------

    def _agreed(self, cuts: Any, balance: Any) -> tuple[int, ...]:
        """Return the numbers of blocks per stage, once every rank can have them; else raise alike on all ranks."""
        counts: tuple[int, ...] = ()
        problem: DrumlineError | None = None
        try:
            counts = self._counts(cuts, balance)
            self._refuse(counts)
        except DrumlineError as error:
            problem = error
        updates = self._run.updates
        optimizers = [(type(one).__name__, len(one.param_groups)) for one in updates.optimizers()]
        with self._run.crew.together(_DURING):
            told = self._run.crew.everywhere("move", (problem, counts, optimizers))
        for one, _, _ in told:
            if one is not None:
                raise one
        for rank, (_, theirs, made) in enumerate(told):
            if (theirs, made) != told[0][1:]:
                what = "cuts" if theirs != told[0][1] else "optimizers"
                first, second = (told[0][1], theirs) if what == "cuts" else (told[0][2], made)
                raise MismatchError(
                    f"repartition: ranks 0 and {rank} have different {what}: {first} and {second}",
                    expected="the same call on every rank, and the same optimizers",
                )
        return counts

    def _counts(self, cuts: Any, balance: Any) -> tuple[int, ...]:
        """Return the number of blocks in each stage that is asked for."""
        if (cuts is None) is (balance is None):
            raise UsageError(
                f"repartition got cuts={cuts!r:.60} and balance={balance!r:.60}",
                expected="one of them: names of first blocks, or the number of blocks in each stage",
            )
        if isinstance(balance, str) and balance == "auto":
            raise UsageError(
                "repartition got balance='auto', which measures blocks before the start",
                expected='"even", "parameters", or a list with the number of blocks per stage',
                fix="pass adapt=True to Pipeline: it moves layers where measured steps show that it pays",
            )
        engine = self._run.engine
        program, chain = engine.assembly.program, engine.chain
        *others, last = cut(chain.shown(), program.num_stages, balance, cuts, held=held_by(program))
        return (*map(len, others), len(last) + chain.has_loss)

    def _refuse(self, counts: Sequence[int]) -> None:
        """Refuse what cannot move."""
        run = self._run
        axes = run.crew.axes
        if run.stream is not None:
            raise UsageError(
                f"repartition: {run.stream.name} has no flush",
                expected="a flushed schedule: between its steps no microbatch is in flight",
            )
        if run.validation.is_on:
            raise UsageError(
                'repartition: an optimizer has validated="after"',
                expected='validated="before": copies of updates that may be taken back do not move',
            )
        for name, why in {"tp": "divides layers", "ep": "divides experts"}.items():
            if axes.size(name) > 1:
                raise UsageError(
                    f"repartition: the mesh's axis {name} {why}", expected="a mesh of pp, dp and cp: parts cannot move"
                )
        if run.updates.divided is not None or run.holdings.shards is not None:
            raise UsageError("repartition: lines of the mesh divide state", expected="zero=0: pieces cannot move")
        if run.check.is_pending and not run.check.is_chain and not run.crew.alone:
            raise UsageError(
                "repartition: the first step has not run",
                expected="a step before it, which is checked against the whole model",
                fix="pass the cut to Pipeline: cuts= or balance=",
            )
        if strangers := run.updates.strangers():
            kind = type(strangers[0]).__name__
            raise UsageError(
                f"repartition: {kind} was created directly over the pipeline's parameters",
                expected="optimizers from pipe.optimizer: their state moves too",
                fix=f"use pipe.optimizer(torch.optim.{kind}, ...)",
            )
        if run.recording.folder is not None and run.frozen.would_change(counts):
            raise UsageError(
                "repartition: stages would have other backwards, because of frozen parameters",
                expected="the same program in a recorded run",
                fix="keep a trainable block in each stage that has one now, or pass record=True",
            )
        self._refuse_sparse()
        run.engine.assembly.ties.recut(counts)  # refuses statistics that several stages would share
        for number in self._numbers(counts):
            run.engine.chain.block(number)  # refuses what could not be copied

    def _refuse_sparse(self) -> None:
        chain = self._run.engine.chain
        for name, one in chain.tensors(self._numbers(chain.counts)).items():
            for what, tensor in (("value", one), ("gradient", one.grad)):
                if tensor is not None and tensor.layout is not torch.strided:
                    raise UsageError(
                        f"repartition: the {what} of {name} is a {tensor.layout} tensor",
                        expected="dense tensors",
                        fix="move after optimizer.zero_grad()" if what == "gradient" else "",
                    )

    # ---- send --------------------------------------------------------------------------------------------------------

    def _moved(self, counts: tuple[int, ...]) -> Move:
        run = self._run
        run.holdings.follow()  # what the user changed since the last step moves too
        chain, before, program = run.engine.chain, run.engine.assembly.ties, run.frozen.program
        counts_before, after = chain.counts, before.recut(counts)
        moves = freights(before, after, [counts_before, counts])
        arrived: dict[str, Unpacked] = {}
        num_bytes = 0
        run.crew.connect(sorted({*after.edges, *moves}))
        if not run.crew.alone:
            with self._timed("send"):
                held = chain.tensors(self._numbers(counts_before))
                told, arrived = self._sent(moves, held)
                num_bytes = sum(parcel.num_bytes for one in told for parcel in one.values())
                self._leave(before, after, held)
        with self._timed("rebuild"):
            self._rebuild(counts, after, arrived)
        each = run.crew.collect("moved", self._seconds)
        return self._noted(
            Move(
                step=run.ledger.num_trained,
                before=chain.cuts_of(counts_before),
                after=chain.cuts_of(counts),
                balance_before=chain.balance(counts_before),
                balance_after=chain.balance(counts),
                program_before=program.name,
                program_after=run.frozen.program.name,
                text_before=program.format(),
                text_after=run.frozen.program.format(),
                bytes_moved=num_bytes,
                seconds={part: max(one[part] for one in each) for part in each[0]},
            )
        )

    def _numbers(self, counts: Sequence[int]) -> list[int]:
        """Return the numbers of the blocks that this process holds, if stages have so many."""
        run = self._run
        placement = run.frozen.program.placement
        held = {stage for one in run.crew.channels for stage in placement.stages_of(one.rank)}
        return run.engine.chain.numbers(counts, held)

    def _sent(
        self, moves: dict[tuple[int, int], Freight], held: dict[str, Tensor]
    ) -> tuple[list[dict[int, Parcel]], dict[str, Unpacked]]:
        """Exchange what moves; return what every rank told of it, and what has come here."""
        run = self._run
        rank, chain = run.crew.rank, run.engine.chain
        made = {
            target: packed(freight, held, chain, run.updates)
            for (source, target), freight in moves.items()
            if source == rank
        }
        told: list[dict[int, Parcel]] = run.crew.collect("moves", {target: one for target, (one, _) in made.items()})
        parcels = {source: one[rank] for source, one in enumerate(told) if rank in one}
        tensors: dict[int, list[Tensor]] = {}
        run.crew.drive(
            [
                transferred(
                    run.crew.channels[0],
                    {target: each for target, (_, each) in made.items()},
                    {source: [shape for _, _, shape in one.tensors] for source, one in parcels.items()},
                    run.intake.device,
                    tensors,
                )
            ]
        )
        arrived: dict[str, Unpacked] = {}
        for source, one in parcels.items():
            arrived |= unpacked(one, tensors[source])
            put_attributes(one, chain)
        return told, arrived

    def _leave(self, before: Ties, after: Ties, held: dict[str, Tensor]) -> None:
        """Free what this process no longer holds."""
        rank = self._run.crew.rank
        pairs = zip(before.tensors, after.tensors, strict=True)
        left = [held[old.name] for old, new in pairs if rank in old.ranks and rank not in new.ranks]
        self._run.updates.drop([one for one in left if isinstance(one, nn.Parameter)])
        for one in left:
            give_up(one)

    # ---- rebuild -----------------------------------------------------------------------------------------------------

    def _rebuild(self, counts: tuple[int, ...], ties: Ties, arrived: dict[str, Unpacked]) -> None:
        """Build everything for the new cut."""
        run = self._run
        named = run.engine.chain.tensors(self._numbers(counts))
        for name, one in arrived.items():
            named[name].data = one.value
            if one.trains is not None:
                named[name].requires_grad_(one.trains)
        program = run.frozen.recut(counts)
        run.engine.recut(counts, program, ties, run.programs.own)
        run.frozen.forget_all_but(run.engine.assembly.cuts)
        run.programs.renew()
        run.intake.recut(counts[-1], program.num_microbatches)
        run.holdings.recut(ties, list(run.engine.copies.values()))
        run.holdings.follow()
        run.updates.follow(run.engine.parameters())
        for name, one in arrived.items():
            named[name].grad = one.gradient
        handed = {
            tensor: one.handed for name, one in arrived.items() if isinstance(tensor := named[name], nn.Parameter)
        }
        run.updates.take_over(handed, run.holdings.parameters())
        for moved in run.observers.moved:
            moved()
        run.observers = Observers(run.observers.each)

    def _noted(self, move: Move) -> Move:
        self.moves.append(move)
        if self._run.crew.rank == self._run.crew.axes.number == 0:
            self._run.recording.decided(move.step, {"kind": "move", **move.to_json()})
        return move
