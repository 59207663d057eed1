"""A pipeline without a flush: its optimizers step inside of `pipe.step`, and steps follow each other without a gap.

    pipe.step     all forwards of the batch; backwards and updates of this batch and those before, as the rows say
    pause         before evaluations and checkpoints: backwards in flight run, updates stay where they are in the rows
    drain         backwards in flight run, and all updates that are due are made; the stream begins again

An update uses the optimizers' settings, such as learning rates, of the step whose gradients it takes, as they were when
that step was called. A checkpoint keeps the gradients of updates that are due, so that a run continues from it exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drumline.core.errors import ModelError, RunError, UsageError, counted
from drumline.engine.flow import Flow
from drumline.engine.ground import Ground
from drumline.engine.ranks.observer import Observer
from drumline.engine.ranks.tally import RankReport, Tally
from drumline.engine.state.keeper import Keeper, Named
from drumline.engine.updates.optimizer_state import plain
from drumline.engine.updates.validation_time import check as validated_after
from drumline.features.stream.executor import Group, StreamExecutor
from drumline.features.stream.rows import StreamRows
from drumline.model.patches import having_gradients, put_in
from drumline.runtime.gradients import clip
from drumline.runtime.step import Step

Move = Callable[[list[nn.Parameter]], None]
Settings = list[list[dict[str, Any]]]  # of every optimizer's groups


class Stream(Flow, Keeper):
    """What a pipeline without a flush does beyond running steps; the optimizers as its executors see them.

    It `is_synchronous` if an update comes at the same place in the rows of all ranks.
    """

    order: ClassVar[int] = -4  # whatever fails later breaks it

    def __init__(self, ground: Ground, rows: StreamRows, *, check_finite: bool, is_synchronous: bool) -> None:
        super().__init__(ground, check_finite=check_finite)
        self._engine, self._updates, self._programs = ground.engine, ground.updates, ground.programs
        self.rows = rows
        self.num_ahead, self.num_in_flight = rows.num_back, 1 + rows.num_back
        self.executors = [executor for executor in self._engine.executors if isinstance(executor, StreamExecutor)]
        self.is_broken = False  # whether a step failed, so that nothing fits together any more
        self.max_norm: float | None = None  # largest norm of all gradients in an update
        self._updates.streams = True
        ground.recording.notes_late = self.num_in_flight
        for executor in self.executors:
            executor.attach(rows, self, check_finite=check_finite, together=is_synchronous)
        self.skipped: dict[int, str] = {}

    @property
    def name(self) -> str:
        """The schedule's name."""
        return self.rows.name

    @property
    def told_until(self) -> int:
        """The last step that has left all ranks."""
        return self.ground.ledger.number - 1 - self.num_in_flight

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in flight and no update is due; the same on all ranks after the same calls."""
        return self.executors[0].position == 0

    # ---- steps -------------------------------------------------------------------------------------------------------

    def at_call(self, step: Step) -> None:
        """Prepare a step, which may fail from here on."""
        self._check()
        if not self._updates.optimizers():
            raise RunError(
                f"{self.name} steps optimizers inside pipe.step, and there is none",
                fix="create one with pipe.optimizer(torch.optim.AdamW, ...) before the first step",
            )
        if step.share != 1.0:
            self.ground.refuse(share=step.share)
        first = self.executors[0]
        step.program = self._programs.added(self.rows.program(first.position, first.since))
        self.is_broken = True

    def after_telling(self, step: Step, tally: Tally, each: Sequence[RankReport]) -> None:
        """Note that a step has not failed."""
        if step.train:
            self._ran()

    def judge(self, step: Step, report: RankReport, losses: list[Tensor]) -> None:
        """Note nothing: every update checks its own gradients."""

    def pause(self, what: str) -> None:
        """Run the backwards in flight, so that the ranks may do something else; all ranks call it alike."""
        with self.ground.crew.together(what, lambda: self._engine.action):
            self._between("pause")

    def drain(self) -> None:
        """Run the backwards in flight, and make all updates that are due; all ranks call it alike."""
        self.pause("drain")
        self.ground.recording.settle()
        with self.ground.crew.together("drain", lambda: self._engine.action):
            self._between("drain")

    def _between(self, what: str) -> None:
        if self.is_empty:
            return
        self._check()
        self.is_broken = True
        self._engine.between(what)
        self._ran()

    def _ran(self) -> None:
        self.is_broken = False
        naming = self._updates.holdings.crew.naming
        for executor in self.executors:  # all say the same
            self.skipped |= {number: naming.listed(ranks) for number, ranks in executor.verdicts.skipped_updates()}

    def _check(self) -> None:
        if self.is_broken:
            raise RunError("a step failed, and the steps in flight with it", fix="load a checkpoint: pipe.load(folder)")

    def need_drained(self, what: str) -> None:
        """Refuse something that needs finished weights."""
        if not self.is_empty:
            raise RunError(
                f"{what} was called while updates are due: {self.name} has no flush",
                fix="call pipe.drain() on every rank first",
            )

    # ---- optimizers --------------------------------------------------------------------------------------------------

    def clips(self, validated: str, max_norm: float | None) -> None:
        """Clip the gradients of every update, those of all optimizers together."""
        validated_after(validated, None)
        if max_norm is None:
            return
        clip.check(max_norm, 2.0)
        if self.max_norm not in (None, float(max_norm)) or not self.is_empty:
            raise UsageError(
                f"max_norm is {max_norm}, and {self.max_norm} before",
                expected="the same for all optimizers, before the first step",
            )
        self.max_norm = float(max_norm)

    def norms(self, rank: int) -> dict[str, float]:
        """Return the norms of the gradients that a rank's own parameters have now, by name."""
        executor = next(stream_executor for stream_executor in self.executors if stream_executor.rank == rank)
        named = self._updates.holdings.named_on(executor, at_home=True)
        norms = clip.norms_of([param for _, param in named], 2.0)
        return {name: norm for (name, _), norm in zip(named, norms, strict=True) if norm is not None}

    def total(self, norms: list[dict[str, float]]) -> Tensor:
        """Return the norm of all gradients, given those of every rank's own."""
        return self._engine.assembly.total_norm(norms, 2.0)

    def clip(self, norm: Tensor, parameters: list[nn.Parameter]) -> None:
        """Scale the gradients of these parameters, given the norm of all ranks' gradients."""
        assert self.max_norm is not None
        clip.scale(parameters, norm, self.max_norm)

    def settings(self) -> Settings:
        """Return what the optimizers' groups say now."""
        return [
            [
                {key: _copy_of(value) for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ]
            for optimizer in self._updates.optimizers()
        ]

    def update(self, parameters: list[nn.Parameter], settings: Settings, move: Move) -> None:
        """Update these parameters alone, by such settings; `move` gives them new memory where that is needed."""
        updates, chosen = self._updates, set(parameters)
        # Other ranks of this process have gradients that are not complete.
        others = [param for param in updates.holdings.parameters() if param not in chosen]
        optimizers = updates.optimizers()
        with having_gradients(others), updates.inside(parameters, move), with_settings(optimizers, settings):
            for optimizer in optimizers:
                optimizer.step()

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def asked(self, what: str) -> None:
        """Run what is in flight, unless that is to be left because a step has failed."""
        if not (what == "load" and self.is_broken):
            self.pause(what)

    def due(self, named: Named) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """Return the gradients of updates that are due, by name, and for each rank what is no tensor about them."""
        names = {param: name for name, param in named.items()}
        tensors: dict[str, Tensor] = {}
        listed = []
        for rank in self.executors:
            groups = []
            for place, group in sorted(rank.pending.items()):
                for param, gradient in group.gradients.items():
                    tensors[f"{_head(rank.rank, place)}/{names[param]}/gradient"] = gradient
                is_finite = {} if group.is_finite else {"finite": False}
                groups.append({"at": list(place), "settings": _as_json(group.settings), **is_finite})
            versions = [version.number for version in rank.versions.values()]
            listed.append({"rank": rank.rank, "versions": versions, "groups": groups})
        return tensors, listed

    def described(self) -> dict[str, Any]:
        """Return where the stream is, the same on all ranks; None if nothing is due."""
        return {"stream": None if self.is_empty else {**self._counts(), "position": self.executors[0].position}}

    def _counts(self) -> dict[str, Any]:
        program = self._engine.assembly.program
        rows = hashlib.blake2b(repr(self.rows.slices).encode(), digest_size=8).hexdigest()
        counts = {"num_ranks": program.num_ranks, "num_microbatches": self.rows.num_microbatches}
        return {"schedule": self.name, **counts, "rows": rows}

    def refuse_stored(self, content: Mapping[str, Any]) -> None:
        """Refuse updates that are due, unless the schedule continues here: it has the same rows."""
        stored = content.get("stream")
        if stored is not None and self._counts() != {key: entry for key, entry in stored.items() if key != "position"}:
            raise _cannot_go_on(stored)

    def loading(self) -> None:
        """Forget all that is in flight and due."""
        self.restart()

    def take(self, content: Mapping[str, Any], tensors: Mapping[str, Tensor], named: Named) -> None:
        """Continue from where a stream was."""
        stored = content.get("stream")
        if stored is None:
            return
        by_rank = {update["rank"]: update for update in content["due"]}
        for rank in self.executors:
            rank.go_on(int(stored["position"]))
            for versions, number in zip(rank.versions.values(), by_rank[rank.rank]["versions"], strict=True):
                versions.number = number
            for group in by_rank[rank.rank]["groups"]:
                position, microbatch = group["at"]
                head = f"{_head(rank.rank, (position, microbatch))}/"
                tensors_by_parameter = {
                    named[name.removeprefix(head).rpartition("/")[0]]: tensor.clone()
                    for name, tensor in tensors.items()
                    if name.startswith(head)
                }
                settings = [[_restored(item) for item in each] for each in group["settings"]]
                is_finite = group.get("finite", True)
                rank.pending[position, microbatch] = Group(
                    tensors_by_parameter, settings, is_summed=True, is_finite=is_finite
                )

    def restart(self) -> None:
        """Forget all that is in flight and due."""
        self.is_broken = False
        for executor in self.executors:
            executor.restart()


class NoStream(Observer, Keeper):
    """Refuses checkpoints with updates that are due, where the pipeline's own schedule has a flush."""

    def described(self) -> dict[str, Any]:
        """Return that nothing is due."""
        return {"stream": None}

    def refuse_stored(self, content: Mapping[str, Any]) -> None:
        """Refuse updates that are due: no schedule here makes them."""
        if content.get("stream") is not None:
            raise _cannot_go_on(content["stream"])


def _cannot_go_on(stored: Mapping[str, Any]) -> ModelError:
    """Return the error of a checkpoint with updates that are due, where its schedule does not continue."""
    return ModelError(
        f"the checkpoint has updates of {stored['schedule']} that are due, with"
        f" {counted(stored['num_ranks'], 'rank')} and {counted(stored['num_microbatches'], 'microbatch')}",
        expected="the same schedule, ranks and microbatches here",
        fix="continue as it was saved, or call pipe.drain() before pipe.save; optimizers=False loads the model alone",
    )


def _head(rank: int, place: tuple[int, int]) -> str:
    return f"due.{rank}.{place[0]}.{place[1]}"


def _as_json(settings: Settings) -> list[list[dict[str, Any]]]:
    return [[{key: plain(value, key) for key, value in group.items()} for group in each] for each in settings]


def _copy_of(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _restored(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings as torch has them: pairs are tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}


def with_settings(optimizers: Sequence[Optimizer], settings: Settings) -> AbstractContextManager[None]:
    """Let optimizers have other settings inside."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    pairs = zip(groups, (entry for each in settings for entry in each), strict=True)
    return put_in((group, key, _like(group.get(key), value)) for group, other in pairs for key, value in other.items())


def _like(own_value: Any, value: Any) -> Any:
    """Return a setting in the form that an optimizer has it: a number, or a tensor where it has one."""
    return torch.as_tensor(value).to(own_value) if isinstance(own_value, Tensor) else value
