"""A pipeline's whole state: taken for a checkpoint, and given back from one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drumline.channel.lines.axes import Axes
from drumline.channel.lines.slices import FlatSlice, Slice, cut_out, put_together, slice_of, writes
from drumline.core.errors import ModelError, RecordError
from drumline.features.saving import folder as folders
from drumline.features.saving import snapshot
from drumline.features.saving.beside import checked_files
from drumline.features.saving.line import Course
from drumline.features.saving.loader import Checkpoint, Loaded, agreed_paths, damage
from drumline.features.saving.plain import packed, unpacked
from drumline.features.saving.saver import Saver, Saving
from drumline.features.saving.shelf import Choice, Shelf
from drumline.features.saving.snapshot import Snapshot
from drumline.features.stream.stream import check_goes_on

if TYPE_CHECKING:
    from drumline.pipeline.steps.step import StepRun

_MOST_STEPS = 2**53


class State:
    """Saves and loads what one pipeline's processes hold."""

    def __init__(self, run: StepRun) -> None:
        self._run = run
        self._course = Course()

    @cached_property
    def _saver(self) -> Saver:
        return Saver(self._process, self._num_processes, self._run.crew.everywhere, self._run.crew.timeout)

    @property
    def _process(self) -> int:
        return 0 if self._run.crew.alone else self._axes.rank

    @property
    def _num_processes(self) -> int:
        return 1 if self._run.crew.alone else self._run.crew.num_ranks * self._axes.num_lines

    @property
    def _axes(self) -> Axes:
        return self._run.crew.axes

    def save(self, folder: str | Path, step: int | None, extra: Any, keep: int | None, files: Any = None) -> Saving:
        """Begin a checkpoint of everything; see Pipeline.save."""
        run = self._run
        beside, plain = checked_files(files), packed(extra)
        _check_step(step)
        run.pause("save")
        run.recording.settle()
        run.recording.flush()  # a checkpoint and the lines of its steps outlive this process together
        number = run.ledger.number
        content = {
            "step": number if step is None else step,
            "number": number,
            "num_trained": run.ledger.num_trained,
            "schedule": run.frozen.program.name,
            "scaler": None if run.scaler is None else run.scaler.state_dict(),
            "extra": plain,
            "stream": None if run.stream is None or run.stream.is_empty else run.stream.described(),
        }
        content["line"] = [list(part) for part in self._course.saving(folder, content["step"]).parts]
        with run.recording.between.during("save"), run.crew.together("save"):
            saving = self._saver.save(folder, content["step"], self._taken, content, keep=keep, beside=beside)
        if saving.refusal is not None:
            raise saving.refusal  # out here: all ranks raise it alike, and may train on
        return saving

    def finish(self, most_seconds: float | None = None) -> None:
        """Wait for a checkpoint under way; with `most_seconds`, no longer than that, and without an error."""
        if "_saver" in self.__dict__:
            self._saver.finish(most_seconds)

    def _taken(self) -> Snapshot:
        run = self._run
        training: dict[str, Tensor] = {}
        if run.updates.masters is not None:
            named = run.updates.named(run.holdings.named_parameters())
            low = {name for name, one in run.holdings.named_parameters() if one.dtype != torch.float32}
            training |= {f"masters/{name}": one.detach() for name, one in named if name in low}
        optimizers = []
        for number, optimizer in enumerate(run.updates.optimizers()):
            tensors, plain = snapshot.optimizer_share(number, optimizer)
            training |= tensors
            optimizers.append(plain)
        pieces = self._pieces()
        training = self._whole(training, {name: pieces.get(_parameter_of(name)) for name in training}, pieces=True)
        tensors, plain = snapshot.generators(run.intake.device)
        training |= {f"random.{self._process}/{name}": one for name, one in tensors.items()}
        model = self._whole(snapshot.model_tensors(run.holdings.state_dict()), run.holdings.slices())
        due: list[dict[str, Any]] = []
        if run.stream is not None:
            tensors, due = run.stream.due(dict(run.holdings.named_parameters()))
            training |= tensors
        return Snapshot(model, training, {"optimizers": optimizers, "generators": plain, "due": due})

    def _pieces(self) -> dict[str, Slice | FlatSlice | None]:
        """Return which part of each parameter this process's optimizers update."""
        run = self._run
        return {name: slice_of(run.updates.piece(one)) for name, one in run.holdings.named_parameters()}

    def _whole(
        self, tensors: Mapping[str, Tensor], slices: Mapping[str, Slice | FlatSlice | None], *, pieces: bool = False
    ) -> dict[str, Tensor]:
        """Return what this process writes of these tensors: whole ones, each on one rank of the mesh."""
        if not self._axes.is_mesh:
            return dict(tensors)
        found = {}
        for name, one in tensors.items():
            part = slices.get(name)
            is_part = part is not None and not (pieces and not _is_part(one, part, self._axes))
            whole = put_together(one, part, self._axes) if is_part else one
            if writes(part, self._axes):
                found[name] = whole
        return found

    def load(self, folder: str | Path, *, optimizers: bool, missing_ok: bool) -> Loaded | None:
        """Take in the newest checkpoint that is whole on all processes; see Pipeline.load."""
        run = self._run
        if run.stream is not None and not run.stream.is_broken:
            run.pause("load")
        run.recording.settle()
        with run.crew.together("load"):
            self.finish()
            listed = [str(one) for one in folders.checkpoints(folder)]
            choice = Shelf().choose(Path(folder)) if self._process == 0 else Choice()
            own = listed, [str(one) for one in choice.paths], [str(one) for one in choice.left]
            paths, left = agreed_paths(self._run.crew.everywhere("checkpoints", own))
            if not paths and missing_ok:
                run.recording.rewind()
                return None
            skipped: list[str] = []
            for path in paths:
                opened, wrong = self._opened(path, optimizers)
                problems = [one for one in self._run.crew.everywhere("checkpoint", wrong) if one]
                if not problems:
                    assert opened is not None
                    self._tell_of_left(path, left)
                    return self._take(*opened, optimizers, tuple(skipped))
                skipped.append(f"{path}: {problems[0]}")
                if run.crew.rank == self._axes.number == 0:
                    logging.getLogger("drumline").warning("passed over a damaged checkpoint: %s", skipped[-1])
        hints = [*skipped, *(f"{one} is whole, on a line that was left: name it to use it" for one in left[:1])]
        raise RecordError(
            f"{folder} holds no checkpoint that is whole" if skipped else f"{folder} holds no checkpoint",
            expected="a folder given to pipe.save, or one checkpoint in it",
            fix="; ".join(hints),
        )

    def _tell_of_left(self, path: Path, left: Sequence[Path]) -> None:
        """Say if a checkpoint of a later step is not used, because training went on from an earlier one since."""
        later = [one for one in left if folders.step_of(one) > folders.step_of(path)]
        if later and self._process == 0:
            text = "going on from %s: %s has a later step, on a line that was left; name it to use it"
            logging.getLogger("drumline").warning(text, path, later[0])

    def _opened(
        self, path: Path, optimizers: bool
    ) -> tuple[tuple[Checkpoint, dict[str, Tensor], dict[str, Tensor]] | None, str]:
        """Return a checkpoint with what this process needs of it, or what is wrong with it."""
        try:
            checkpoint = Checkpoint(path)
            names = {name for name in self._run.holdings.stored_names() if name in checkpoint.model}
            slices, pieces = self._run.holdings.slices(), self._pieces()
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
        except Exception as error:
            return None, damage(error)
        return (checkpoint, model, training), ""

    def _check(self, content: Mapping[str, Any], training: Mapping[str, Tensor], optimizers: bool) -> None:
        """Raise if generators or optimizers cannot take what is stored."""
        if content["num_processes"] == self._num_processes:
            snapshot.check_generators(self._random(training), content["generators"][self._process])
        made, stored = self._run.updates.optimizers(), content["optimizers"]
        if optimizers and [type(one).__name__ for one in made] == [one["kind"] for one in stored]:
            for optimizer, plain in zip(made, stored, strict=True):
                snapshot.check_groups(optimizer, plain)

    def _random(self, training: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the stored generators of this process."""
        prefix = f"random.{self._process}/"
        return {name.removeprefix(prefix): one for name, one in training.items() if name.startswith(prefix)}

    def _take(
        self,
        checkpoint: Checkpoint,
        model: Mapping[str, Tensor],
        training: Mapping[str, Tensor],
        optimizers: bool,
        skipped: tuple[str, ...],
    ) -> Loaded:
        run, content = self._run, checkpoint.content
        if optimizers and content.get("stream") is not None:
            check_goes_on(content["stream"], run.stream)
        if run.stream is not None:
            run.stream.restart()
        run.holdings.load_state_dict(model)
        run.check.loaded({**checkpoint.model, **model} if run.check.is_pending else model)
        if optimizers:
            self._take_updates(content, training)
        if content["num_processes"] == self._num_processes:
            plain = content["generators"][self._process]
            snapshot.restore_generators(self._random(training), plain, run.intake.device)
        run.ledger.number, run.ledger.num_trained = content["number"], content["num_trained"]
        self._course.loaded(checkpoint.path, content)
        run.recording.rewind()
        return Loaded(checkpoint.path, content["step"], unpacked(content["extra"]), skipped)

    def _take_updates(self, content: Mapping[str, Any], training: Mapping[str, Tensor]) -> None:
        """Give masters, optimizers and scaler their state back."""
        run = self._run
        if run.updates.masters is not None:
            with torch.no_grad():
                for name, one in run.updates.named(run.holdings.named_parameters()):
                    if f"masters/{name}" in training:
                        one.copy_(training[f"masters/{name}"])
        made, stored = run.updates.optimizers(), content["optimizers"]
        kinds, theirs = [type(one).__name__ for one in made], [one["kind"] for one in stored]
        if kinds != theirs:
            raise ModelError(
                f"the checkpoint has state of {', '.join(theirs) or 'no optimizer'}",
                expected=f"that of {', '.join(kinds) or 'no optimizer'}, which pipe.optimizer made here",
                fix="make the same optimizers before pipe.load, or pass optimizers=False to load the model alone",
            )
        for number, (optimizer, plain) in enumerate(zip(made, stored, strict=True)):
            entries = snapshot.by_parameter(f"optimizer.{number}", training.items())
            snapshot.restore_optimizer(optimizer, plain, entries)
        if run.stream is not None and content.get("stream") is not None:
            run.stream.take(content["stream"], content["due"], training, dict(run.holdings.named_parameters()))
        scaler = run.scaler
        if scaler is not None and content.get("scaler") is not None:
            scaler.load_state_dict(content["scaler"])


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
