"""Move layers between ranks, in the running processes and between two steps.

    agree      all ranks compare the new cut and their optimizers; whoever cannot move says so before anything changes
    send       what leaves goes over the pipeline's channels to the ranks that hold it from now on
    rebuild    stages, programs and whatever knows them are built for the new cut; optimizers drop and take over

Ranks that take turns in one process share one model, so there nothing is sent. With several lines of a mesh, each line
moves what it holds, be it copies or parts. A rank sends to ranks of its own line, whose other coordinates are the same.
If a rank dies meanwhile, the others fail within their time limit, and the last checkpoint holds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drumline.adapt.move import Move
from drumline.channel.transfer import transferred
from drumline.core.errors import DrumlineError, MismatchError, UsageError
from drumline.engine.ranks.observer import Observer
from drumline.engine.site import Site
from drumline.features.moving.parcels import Freight, Parcel, TensorParcel, freights, packed, put_attributes, unpacked
from drumline.model.blocks.cut import cut
from drumline.model.quantised.packed import put_value, settle
from drumline.model.weights.remote_blocks import give_up
from drumline.model.weights.tied import Ties
from drumline.plan.cut.peaks import held_by

_DURING = "the move of layers"


class Mover(Observer):
    """Moves the layers of one pipeline; `moves` are those so far. It has nothing to do in a step."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._seconds: dict[str, float] = {}
        self.moves: list[Move] = []

    def repartition(self, cuts: Any = None, *, balance: Any = None) -> Move:
        """Give the stages other blocks; see Pipeline.repartition."""
        site = self._site
        site.recording.settle()
        with site.recording.between.during("move"):
            self._seconds = {}
            with self._timed("agree"):
                counts = self._agreed(cuts, balance)
            with site.crew.together(_DURING):
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
        updates = self._site.updates
        optimizers = [(type(optimizer).__name__, len(optimizer.param_groups)) for optimizer in updates.optimizers()]
        with self._site.crew.together(_DURING):
            answers = self._site.crew.everywhere("move", (problem, counts, optimizers))
        for answer, _, _ in answers:
            if answer is not None:
                raise answer
        for rank, (_, theirs, optimizers_there) in enumerate(answers):
            if (theirs, optimizers_there) != answers[0][1:]:
                what = "cuts" if theirs != answers[0][1] else "optimizers"
                first, second = (answers[0][1], theirs) if what == "cuts" else (answers[0][2], optimizers_there)
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
        engine = self._site.engine
        program, chain = engine.assembly.program, engine.chain
        *others, last = cut(chain.shown(), program.num_stages, balance, cuts, held_pairs=held_by(program))
        return (*map(len, others), len(last) + chain.has_loss)

    def _refuse(self, counts: Sequence[int]) -> None:
        """Refuse what cannot move."""
        site = self._site
        site.refuse(call="repartition")
        changes = site.frozen.would_change(counts)
        for observer in site.observers.each:
            observer.refuse_move(changes_program=changes)
        if strangers := site.updates.strangers():
            kind = type(strangers[0]).__name__
            raise UsageError(
                f"repartition: {kind} was created directly over the pipeline's parameters",
                expected="optimizers from pipe.optimizer: their state moves too",
                fix=f"use pipe.optimizer(torch.optim.{kind}, ...)",
            )
        self._refuse_sparse()
        site.engine.assembly.ties.recut(counts)  # refuses statistics that several stages would share
        for number in self._numbers(counts):
            site.engine.chain.block(number)  # refuses what could not be copied

    def _refuse_sparse(self) -> None:
        chain = self._site.engine.chain
        for name, value in chain.tensors(self._numbers(chain.counts)).items():
            for what, tensor in (("value", value), ("gradient", value.grad)):
                if tensor is not None and tensor.layout is not torch.strided:
                    raise UsageError(
                        f"repartition: the {what} of {name} is a {tensor.layout} tensor",
                        expected="dense tensors",
                        fix="move after optimizer.zero_grad()" if what == "gradient" else "",
                    )

    # ---- send --------------------------------------------------------------------------------------------------------

    def _moved(self, counts: tuple[int, ...]) -> Move:
        site = self._site
        site.holdings.follow()  # what the user changed since the last step moves too
        chain, before, program = site.engine.chain, site.engine.assembly.ties, site.frozen.program
        counts_before, after = chain.counts, before.recut(counts)
        moves = freights(before, after, [counts_before, counts])
        arrived: dict[str, TensorParcel] = {}
        num_bytes = 0
        site.crew.connect(sorted({*after.edges, *moves}))
        if not site.crew.alone:
            with self._timed("send"):
                numbers = self._numbers(counts_before)
                settle(module for number in numbers for module in chain.block(number).module.modules())
                held_tensors = chain.tensors(numbers)
                pieces = {name: site.holdings.shown(tensor) for name, tensor in held_tensors.items()}
                parcels, arrived = self._sent(moves, pieces)
                num_bytes = sum(parcel.num_bytes for entry in parcels for parcel in entry.values())
                self._leave(before, after, held_tensors)
        with self._timed("rebuild"):
            self._rebuild(counts, after, arrived)
        each = site.crew.collect("moved", self._seconds)
        return self._noted(
            Move(
                step=site.ledger.num_trained,
                before=chain.cuts_of(counts_before),
                after=chain.cuts_of(counts),
                balance_before=chain.balance(counts_before),
                balance_after=chain.balance(counts),
                program_before=program.name,
                program_after=site.frozen.program.name,
                text_before=program.format(),
                text_after=site.frozen.program.format(),
                bytes_moved=num_bytes,
                seconds={part: max(parcel[part] for parcel in each) for part in each[0]},
            )
        )

    def _numbers(self, counts: Sequence[int]) -> list[int]:
        """Return the numbers of the blocks that this process holds, if stages have so many."""
        site = self._site
        placement = site.frozen.program.placement
        held_stages = {stage for channel in site.crew.channels for stage in placement.stages_of(channel.rank)}
        return site.engine.chain.numbers(counts, held_stages)

    def _sent(
        self, moves: dict[tuple[int, int], Freight], held_tensors: dict[str, Tensor]
    ) -> tuple[list[dict[int, Parcel]], dict[str, TensorParcel]]:
        """Exchange what moves; return what every rank told of it, and what has come here."""
        site = self._site
        rank, chain = site.crew.rank, site.engine.chain
        packages = {
            target: packed(freight, held_tensors, chain, site.updates)
            for (source, target), freight in moves.items()
            if source == rank
        }
        parcels_of_ranks: list[dict[int, Parcel]] = site.crew.collect(
            "moves", {target: p for target, (p, _) in packages.items()}
        )
        parcels = {source: entry[rank] for source, entry in enumerate(parcels_of_ranks) if rank in entry}
        tensors: dict[int, list[Tensor]] = {}
        site.crew.drive(
            [
                transferred(
                    site.crew.channels[0],
                    {target: each for target, (_, each) in packages.items()},
                    {source: [shape for _, _, shape in parcel.tensors] for source, parcel in parcels.items()},
                    site.intake.device,
                    tensors,
                )
            ]
        )
        arrived: dict[str, TensorParcel] = {}
        for source, parcel in parcels.items():
            arrived |= unpacked(parcel, tensors[source])
            put_attributes(parcel, chain)
        return parcels_of_ranks, arrived

    def _leave(self, before: Ties, after: Ties, held_tensors: dict[str, Tensor]) -> None:
        """Free what this process no longer holds."""
        rank = self._site.crew.rank
        pairs = zip(before.tensors, after.tensors, strict=True)
        left = [held_tensors[old.name] for old, new in pairs if rank in old.ranks and rank not in new.ranks]
        holdings = self._site.holdings
        pieces = [holdings.shown(tensor) for tensor in left]
        self._site.updates.drop([tensor for tensor in pieces if isinstance(tensor, nn.Parameter)])
        for tensor in left:
            give_up(tensor)
            if holdings.shards is not None:
                holdings.shards.drop(tensor)

    # ---- rebuild -----------------------------------------------------------------------------------------------------

    def _rebuild(self, counts: tuple[int, ...], ties: Ties, arrived: dict[str, TensorParcel]) -> None:
        """Build everything for the new cut."""
        site = self._site
        named = site.engine.chain.tensors(self._numbers(counts))
        for name, parcel in arrived.items():
            if parcel.trains is not None:
                named[name].requires_grad_(parcel.trains)
            self._put(named[name], parcel)
        program = site.frozen.recut(counts)
        site.engine.recut(counts, program, ties, site.programs.own_number)
        site.frozen.forget_all_but(site.engine.assembly.cuts)
        site.programs.renew()
        site.intake.recut(counts[-1], program.num_units)
        site.holdings.recut(ties, list(site.engine.copies.values()))
        site.holdings.follow()
        site.updates.follow(site.engine.parameters())
        if site.holdings.shards is not None:
            site.engine.divide_again(site.holdings.shards)
        parts = {name: site.holdings.shown(named[name]) for name in arrived}
        for name, parcel in arrived.items():
            parts[name].grad = parcel.gradient
        handed = {
            tensor: parcel.handed for name, parcel in arrived.items() if isinstance(tensor := parts[name], nn.Parameter)
        }
        site.updates.take_over(handed, site.holdings.parameters())
        for moved in site.observers.moved:
            moved()
        site.attend()

    def _put(self, tensor: Tensor, parcel: TensorParcel) -> None:
        """Give a tensor that has come its value, or this line its piece."""
        if not parcel.is_piece:
            put_value(tensor, parcel.value)
            return
        shards = self._site.holdings.shards
        assert shards is not None
        assert isinstance(tensor, nn.Parameter)
        shards.take_over(tensor, *parcel.value.values())

    def _noted(self, move: Move) -> Move:
        self.moves.append(move)
        if self._site.crew.rank == self._site.crew.axes.number == 0:
            self._site.recording.decided(move.step, {"kind": "move", **move.to_json()})
        return move
