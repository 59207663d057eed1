"""A pipeline's whole state: taken for a checkpoint, and given back from one.

Each rank reads its own tensors, whatever ranks and cut wrote them. All processes look whether what they need is whole
before any takes it in. Where one finds damage, all turn to the checkpoint before, and rank 0 says so.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drumline.channel.lines.axes import Axes
from drumline.channel.lines.slices import FlatSlice, Slice, cut_out, put_together, slice_of, writes
from drumline.checkpoint import folder as folders
from drumline.checkpoint.extra_files import checked_files
from drumline.checkpoint.line import Course
from drumline.checkpoint.plain_json import packed, unpacked
from drumline.checkpoint.reader import Checkpoint
from drumline.checkpoint.saves import Loaded, Saving
from drumline.checkpoint.shelf import ResumeOrder, Shelf
from drumline.core.errors import DrumlineError, MismatchError, ModelError, RecordError
from drumline.engine.site import Site
from drumline.engine.state.keeper import Keeper
from drumline.features.saving import snapshot
from drumline.features.saving.saver import Saver
from drumline.features.saving.snapshot import Snapshot

_MOST_STEPS = 2**53


class State:
    """Saves and loads what one pipeline's processes hold, and what its keepers have beside that."""

    def __init__(self, site: Site, keepers: Sequence[Keeper]) -> None:
        self._site, self._keepers = site, keepers
        self._course = Course()

    @cached_property
    def _saver(self) -> Saver:
        return Saver(self._process, self._num_processes, self._site.crew.everywhere, self._site.crew.timeout)

    @property
    def _process(self) -> int:
        return 0 if self._site.crew.alone else self._axes.rank

    @property
    def _num_processes(self) -> int:
        return 1 if self._site.crew.alone else self._site.crew.num_ranks * self._axes.num_lines

    @property
    def _axes(self) -> Axes:
        return self._site.crew.axes

    def save(
        self,
        folder: str | Path,
        step: int | None,
        extra: Any,
        keep: int | None,
        files: Any = None,
        only: Collection[str] | None = None,
    ) -> Saving:
        """Begin a checkpoint of everything; see Pipeline.save."""
        site = self._site
        beside, plain = checked_files(files), packed(extra)
        _check_step(step)
        for keeper in self._keepers:
            keeper.asked("save")
        site.recording.settle()
        site.recording.flush()  # a checkpoint and the lines of its steps outlive this process together
        number = site.ledger.number
        content = {
            "step": number if step is None else step,
            "number": number,
            "num_trained": site.ledger.num_trained,
            "schedule": site.frozen.program.name,
            "extra": plain,
            **({} if only is None else {"only": True}),
        }
        for keeper in self._keepers:
            content |= keeper.described()
        content["line"] = [list(part) for part in self._course.saving(folder, content["step"]).parts]
        with site.recording.between.during("save"), site.crew.together("save"):
            taken = partial(self._taken, None if only is None else frozenset(only))
            saving = self._saver.save(folder, content["step"], taken, content, keep=keep, beside=beside)
        if saving.refusal is not None:
            raise saving.refusal  # out here: all ranks raise it alike, and may train on
        return saving

    def finish(self, most_seconds: float | None = None) -> None:
        """Wait for a checkpoint under way; with `most_seconds`, no longer than that, and without an error."""
        if "_saver" in self.__dict__:
            self._saver.finish(most_seconds)

    def _taken(self, only: frozenset[str] | None = None) -> Snapshot:
        site = self._site
        training: dict[str, Tensor] = {}
        if site.updates.masters.is_on:
            named = site.updates.named(site.holdings.named_parameters())
            low = {name for name, param in site.holdings.named_parameters() if param.dtype != torch.float32}
            training |= {f"masters/{name}": tensor.detach() for name, tensor in named if name in low}
        optimizers = []
        for number, optimizer in enumerate(site.updates.optimizers()):
            tensors, plain = snapshot.optimizer_share(number, optimizer)
            training |= tensors
            optimizers.append(plain)
        pieces = self._pieces()
        training = self._whole(training, {name: pieces.get(_parameter_of(name)) for name in training}, pieces=True)
        tensors, plain = snapshot.generators(site.intake.device)
        training |= {f"random.{self._process}/{name}": tensor for name, tensor in tensors.items()}
        state = site.holdings.state_dict() if only is None else site.holdings.some_state(only)
        model = self._whole(snapshot.model_tensors(state), site.holdings.slices())
        due: list[dict[str, Any]] = []
        for keeper in self._keepers:
            tensors, more = keeper.due(dict(site.holdings.named_parameters()))
            training |= tensors
            due += more
        return Snapshot(model, training, {"optimizers": optimizers, "generators": plain, "due": due})

    def _pieces(self) -> dict[str, Slice | FlatSlice | None]:
        """Return which part of each parameter this process's optimizers update."""
        site = self._site
        return {name: slice_of(site.updates.piece(param)) for name, param in site.holdings.named_parameters()}

    def _whole(
        self, tensors: Mapping[str, Tensor], slices: Mapping[str, Slice | FlatSlice | None], *, pieces: bool = False
    ) -> dict[str, Tensor]:
        """Return what this process writes of these tensors: whole ones, each on one rank of the mesh."""
        if not self._axes.is_mesh:
            return dict(tensors)
        entries = {}
        for name, tensor in tensors.items():
            part = slices.get(name)
            is_part = part is not None and not (pieces and not _is_part(tensor, part, self._axes))
            whole = put_together(tensor, part, self._axes) if is_part else tensor
            if writes(part, self._axes):
                entries[name] = whole
        return entries

    def load(self, folder: str | Path, *, optimizers: bool, missing_ok: bool) -> Loaded | None:
        """Take in the newest checkpoint that is whole on all processes; see Pipeline.load."""
        site = self._site
        for keeper in self._keepers:
            keeper.asked("load")
        site.recording.settle()
        with site.crew.together("load"):
            self.finish()
            listed = [str(reason) for reason in folders.checkpoints(folder)]
            choice = Shelf().choose(Path(folder)) if self._process == 0 else ResumeOrder()
            own_lists = listed, [str(reason) for reason in choice.paths], [str(reason) for reason in choice.left]
            paths, left = agreed_paths(self._site.crew.everywhere("checkpoints", own_lists))
            if not paths and missing_ok:
                site.recording.rewind()
                return None
            skipped: list[str] = []
            for path in paths:
                opened, wrong = self._opened(path, optimizers)
                problems = [reason for reason in self._site.crew.everywhere("checkpoint", wrong) if reason]
                if not problems:
                    assert opened is not None
                    self._tell_of_left(path, left)
                    return self._take(*opened, optimizers, tuple(skipped))
                skipped.append(f"{path}: {problems[0]}")
                if site.crew.rank == self._axes.number == 0:
                    logging.getLogger("drumline").warning("passed over a damaged checkpoint: %s", skipped[-1])
        hints = [*skipped, *(f"{reason} is whole, on a line that was left: name it to use it" for reason in left[:1])]
        raise RecordError(
            f"{folder} holds no checkpoint that is whole" if skipped else f"{folder} holds no checkpoint",
            expected="a folder given to pipe.save, or one checkpoint in it",
            fix="; ".join(hints),
        )

    def _tell_of_left(self, path: Path, left: Sequence[Path]) -> None:
        """Say if a checkpoint of a later step is not used, because training continued from an earlier one since."""
        later = [file for file in left if folders.step_of(file) > folders.step_of(path)]
        if later and self._process == 0:
            text = "going on from %s: %s has a later step, on a line that was left; name it to use it"
            logging.getLogger("drumline").warning(text, path, later[0])

    def _opened(
        self, path: Path, optimizers: bool
    ) -> tuple[tuple[Checkpoint, dict[str, Tensor], dict[str, Tensor]] | None, str]:
        """Return a checkpoint with what this process needs of it, or what is wrong with it."""
        try:
            checkpoint = Checkpoint(path)
            names = {name for name in self._site.holdings.stored_names() if name in checkpoint.model}
            slices, pieces = self._site.holdings.slices(), self._pieces()
            model = {name: cut_out(checkpoint.model[name], slices.get(name), self._axes) for name in names}
            mine = f"random.{self._process}/"
            training = {
                name: checkpoint.training[name]
                if name.startswith(mine)
                else _own_part(checkpoint.training[name], pieces[_parameter_of(name)], self._axes)
                for name in checkpoint.training
                if name.startswith(mine) or _is_held(pieces.get(_parameter_of(name), False), self._axes)
            }
            self._check(checkpoint.content, training, optimizers)
        except (DrumlineError, OSError) as error:
            return None, str(error)
        return (checkpoint, model, training), ""

    def _check(self, content: Mapping[str, Any], training: Mapping[str, Tensor], optimizers: bool) -> None:
        """Raise if generators or optimizers cannot take what is stored."""
        if content["num_processes"] == self._num_processes:
            snapshot.check_generators(self._random(training), content["generators"][self._process])
        new_optimizers, stored = self._site.updates.optimizers(), content["optimizers"]
        if optimizers and [type(updater).__name__ for updater in new_optimizers] == [name["kind"] for name in stored]:
            for optimizer, plain in zip(new_optimizers, stored, strict=True):
                snapshot.check_groups(optimizer, plain)

    def _random(self, training: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the stored generators of this process."""
        prefix = f"random.{self._process}/"
        return {name.removeprefix(prefix): tensor for name, tensor in training.items() if name.startswith(prefix)}

    def _take(
        self,
        checkpoint: Checkpoint,
        model: Mapping[str, Tensor],
        training: Mapping[str, Tensor],
        optimizers: bool,
        skipped: tuple[str, ...],
    ) -> Loaded:
        site, content = self._site, checkpoint.content
        for keeper in self._keepers if optimizers else ():
            keeper.refuse_stored(content)
        for keeper in self._keepers:
            keeper.loading()
        site.holdings.load_state_dict(model, partly=content.get("only", False) is True)
        for keeper in self._keepers:
            keeper.loaded(model, checkpoint.model)
        if optimizers:
            self._take_updates(content, training)
        if content["num_processes"] == self._num_processes:
            plain = content["generators"][self._process]
            snapshot.restore_generators(self._random(training), plain, site.intake.device)
        site.ledger.number, site.ledger.num_trained = content["number"], content["num_trained"]
        self._course.loaded(checkpoint.path, content)
        site.recording.rewind()
        return Loaded(checkpoint.path, content["step"], unpacked(content["extra"]), skipped)

    def _take_updates(self, content: Mapping[str, Any], training: Mapping[str, Tensor]) -> None:
        """Give masters, optimizers and keepers their state back."""
        site = self._site
        if site.updates.masters.is_on:
            with torch.no_grad():
                for name, tensor in site.updates.named(site.holdings.named_parameters()):
                    if f"masters/{name}" in training:
                        tensor.copy_(training[f"masters/{name}"])
        optimizers, stored = site.updates.optimizers(), content["optimizers"]
        kinds, theirs = [type(updater).__name__ for updater in optimizers], [entry["kind"] for entry in stored]
        if kinds != theirs:
            raise ModelError(
                f"the checkpoint has state of {', '.join(theirs) or 'no optimizer'}",
                expected=f"that of {', '.join(kinds) or 'no optimizer'}, which pipe.optimizer made here",
                fix="make the same optimizers before pipe.load, or pass optimizers=False to load the model alone",
            )
        for number, (optimizer, plain) in enumerate(zip(optimizers, stored, strict=True)):
            entries = snapshot.by_parameter(f"optimizer.{number}", training.items())
            snapshot.restore_optimizer(optimizer, plain, entries)
        for keeper in self._keepers:
            keeper.take(content, training, dict(site.holdings.named_parameters()))


def _is_part(tensor: Tensor, part: Slice | FlatSlice, axes: Axes) -> bool:
    """Whether an optimizer's tensor is divided like its parameter; others, such as counts of steps, are not."""
    if isinstance(part, FlatSlice):
        if part.owner is not None:
            return tuple(tensor.shape) == part.shape and part.inner is not None
        first, last = part.span(axes.place(part.axis), axes.size(part.axis))
        return tensor.dim() == 1 and tensor.numel() == last - first
    return tensor.dim() > part.dim


def _own_part(tensor: Tensor, part: Slice | FlatSlice | None, axes: Axes) -> Tensor:
    """Return this rank's part of an optimizer's whole tensor; a number stays as it is."""
    return tensor if tensor.dim() == 0 else cut_out(tensor, part, axes)


def _is_held(part: Slice | FlatSlice | bool | None, axes: Axes) -> bool:
    """Whether this rank holds state of a parameter of which it has this part; False if it has not the parameter."""
    if isinstance(part, bool):
        return part
    return not isinstance(part, FlatSlice) or part.owner in (None, axes.place(part.axis))


def _parameter_of(name: str) -> str:
    """Return the parameter that a stored tensor belongs to.

    >>> _parameter_of("optimizer.0/a.weight/exp_avg"), _parameter_of("masters/a.weight")
    ('a.weight', 'a.weight')
    """
    head, _, rest = name.partition("/")
    return rest if head == "masters" else rest.rpartition("/")[0]


def _check_step(step: Any) -> None:
    if step is not None and (type(step) is not int or not 0 <= step <= _MOST_STEPS):
        raise RecordError(f"step is {step!r:.60}", expected="a whole number of 0 or more", fix="leave it out to count")


def agreed_paths(lists: Sequence[Sequence[Sequence[str]]]) -> tuple[list[Path], list[Path]]:
    """Return what process 0 has chosen among its checkpoints, and left; all others must see the same ones.

    Each process tells which it sees; the first also which to load, in order, and which were left.

    >>> agreed_paths([[["run/2", "run/1"], ["run/1"], ["run/2"]], [["run/2", "run/1"], [], []]])
    ([PosixPath('run/1')], [PosixPath('run/2')])
    """
    seen_paths, chosen, left = lists[0]
    for rank, (its, _, _) in enumerate(lists):
        if list(its) != list(seen_paths):
            raise MismatchError(
                f"rank {rank} finds {len(its)} checkpoints and rank 0 {len(seen_paths)}",
                expected="a folder that all hosts share",
            )
    return [Path(name) for name in chosen], [Path(name) for name in left]
