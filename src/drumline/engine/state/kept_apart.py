"""State that blocks keep where plain training's order of microbatches is lost: such changes are refused.

    two copies of a stage     each sees half of the batch, and keeps its own
    several stages            a later stage sees what earlier ones have kept of later microbatches; in another process,
                              nothing

What makes no difference may change: what is only stored or counted, what is set before it is read, tables that are made
when first needed. Code tells the first; an experiment with other inputs the others: see forgets.py.
It runs when a step has changed something, which for most models is never.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from drumline.core.errors import ModelError
from drumline.engine.ranks.observer import Observer
from drumline.engine.stages.engine import Engine
from drumline.engine.state.forgets import Influence, Kept, tried
from drumline.engine.state.sharing import Identity, Sharing, is_written_by, name_of
from drumline.model.block import Block
from drumline.model.kept_state.contents import is_same_value
from drumline.model.kept_state.outside import OuterPlace
from drumline.model.kept_state.snapshot import MOST_BYTES, Snapshot
from drumline.model.kept_state.spaces import Space, Table, fill, is_same_table, own_values, spaces_of
from drumline.model.kept_state.spies import Spies
from drumline.model.values import MISSING
from drumline.model.weights.tied import Ties
from drumline.runtime.stage import Stage
from drumline.runtime.step import Step

_BY_VALUE = 2  # steps that look at everything; later ones at what is small, set anew, or counts its changes
_FEW = 64


class KeptApart(Observer):
    """Looks at what a step changes in stages with two copies, and in what several stages share."""

    def __init__(
        self,
        engine: Engine,
        stages: Sequence[Sequence[Block]],
        *,
        is_mesh: bool,
        remember: Callable[[ModelError], None] = lambda refusal: None,
    ) -> None:
        self._engine, self._is_mesh, self._remember = engine, is_mesh, remember
        self._homes = {block.name: at for at, blocks in enumerate(stages) for block in blocks}
        self._sharing = Sharing(block for blocks in stages for block in blocks) if len(stages) > 1 else Sharing(())
        self._num_steps = 0
        self._looks: list[_StageLook] = []
        engine.explanations.append(self._missing)
        self.moved()

    def moved(self) -> None:
        """Find the stages here whose state others see or have, too."""
        ties, stages = self._engine.assembly.ties, list(self._engine.stages())
        self._homes |= {block.name: stage.index for stage in stages for block in stage.blocks}
        shared = self._sharing.between(self._homes)
        for stage in stages:
            stage.is_doubled = _is_doubled(ties, stage)
        for look in self._looks:
            look.stage.keeps_latest = False
        looks = [_StageLook(stage, self._sharing, shared, is_doubled=stage.is_doubled) for stage in stages]
        self._looks = [look for look in looks if look.spaces]
        for look in self._looks:
            look.stage.keeps_latest = True
        self._num_steps = 0

    @property
    def is_idle(self) -> bool:
        """Whether no stage here has state that others see."""
        return not self._looks

    def begin(self, step: Step) -> None:
        """Take what blocks keep before a step."""
        for look in self._looks:
            look.begin(by_value=self._num_steps < _BY_VALUE)
        self._num_steps += 1

    def end(self, step: Step) -> None:
        """Refuse changes that make a difference."""
        changed = False
        for look in self._looks:
            changes = list(look.changes())
            changed |= bool(changes)
            try:
                self._judge(look, [change for change in changes if not self._is_harmless(look, change)])
            except ModelError as refusal:
                self._remember(refusal)  # nothing may be built on this step
                raise
            look.stage.latest = None
        for copies in self._engine.copies.values() if changed else ():
            copies.settle()

    def _missing(self, error: LookupError) -> ModelError | None:
        """Return what to raise if a block finds nothing where blocks of another process leave something."""
        here = {block.name for stage in self._engine.stages() for block in stage.blocks}
        for look in self._looks:
            for space, key, identity in look.all_shared():
                others = [name for name in self._sharing.blocks_of(identity) if name not in here]
                if others:
                    return ModelError(
                        f"{space.named(key)} lacks something, perhaps what block {others[0]!r} leaves there in another "
                        f"process: {type(error).__name__}: {error}",
                        expected="state that several blocks use to be in one stage",
                        fix="return it from the block that has it and pass it on, or put these blocks into one stage "
                        "(cuts=, balance=)",
                    )
        return None

    def _is_harmless(self, look: _StageLook, change: Kept) -> bool:
        """Whether code shows that a change makes no difference: nobody reads it, or only the stage that makes it."""
        return self._is_only_written(look, change) or (
            not look.is_doubled
            and self._sharing.are_own_entries(look.value(change), look.shared_in(change), self._homes)
        )

    def _is_only_written(self, look: _StageLook, change: Kept) -> bool:
        space, key = change
        fields = look.fields_changed(change)
        return is_written_by(space.code, {name_of(key)}, fields) and all(
            is_written_by(code, names, fields)
            for at in look.shared_in(change)
            for names, code in self._sharing.reaches_of(at)
        )

    def _judge(self, look: _StageLook, changes: list[Kept]) -> None:
        if not changes:
            return
        can_try = not self._is_mesh and not any(look.is_used_up(change) for change in changes)
        verdicts = tried(look.stage, changes, look.as_it_was) if can_try else [Influence(False, False)] * len(changes)
        here = {block.name for block in look.stage.blocks}
        for change, (stays, forgets) in zip(changes, verdicts, strict=True):
            shared = look.shared_in(change)
            if stays or (forgets and not any(self._sharing.is_read_elsewhere(at, here) for at in shared)):
                continue
            if look.is_doubled:
                _refuse_doubled(*change)
            _refuse_shared(*change, [name for at in shared[:1] for name in self._sharing.blocks_of(at)])


def _is_doubled(ties: Ties, stage: Stage) -> bool:
    return len(ties.placement.ranks_of(stage.index)) > 1


def _refuse_doubled(space: Space, key: Any) -> None:
    what = f"the {key.label}" if isinstance(key, OuterPlace) else f"its attribute {space.path(key)!r}"
    raise ModelError(
        f"block {space.block!r} changes {what} in its forward",
        expected="no changes under this schedule: each of its two copies of a stage sees half of the batch",
        fix="choose a schedule with one copy of each stage, such as zb-v",
    )


def _refuse_shared(space: Space, key: Any, blocks: Sequence[str]) -> None:
    others = " and ".join(f"block {name!r}" for name in blocks if name != space.block)
    raise ModelError(
        f"a forward changes {space.named(key)}, which {others} in another stage can read or change, too",
        expected="state that a forward changes to belong to one stage, which sees all microbatches in order",
        fix="keep it in one block, pass it on from block to block, or put all blocks that use it into one stage "
        "(cuts=, balance=)",
    )


class _StageLook:
    """A look at what a step changes in one stage; of a stage with one copy, at what it shares."""

    def __init__(self, stage: Stage, sharing: Sharing, shared: set[Identity], *, is_doubled: bool) -> None:
        self.stage, self.is_doubled, self._sharing, self._shared = stage, is_doubled, sharing, shared
        spaces = spaces_of(block for block in stage.blocks if any(block.name in s.suspects for s in stage.segments))
        self.spaces = [space for space in spaces if is_doubled or self._shares(space)]
        self._tables: list[Table] = []
        self._small: set[tuple[int, Any]] | None = None  # what later steps look into
        self._snapshot: Snapshot | None = None
        self._spies: Spies | None = None
        self._iterates = False
        self._is_refused = any(segment.checkpointed for segment in stage.segments)  # iterators are, by the ledger
        self._used: list[Any] = []

    def _shares(self, space: Space) -> bool:
        return any(self._identities(space, key, value) for key, value in own_values(space.table.copy()).items())

    def _identities(self, space: Space, key: Any, value: Any) -> list[Identity]:
        """Return what is shared of a place: itself, or what is in it."""
        if not self._shared:
            return []
        each = (space.identity(key), *self._sharing.identities_in(value))
        return [identity for identity in each if identity in self._shared]

    def all_shared(self) -> Iterator[tuple[Space, Any, Identity]]:
        """Yield what other stages reach of all places that hold something."""
        for space in self.spaces:
            for key, value in own_values(space.table.copy()).items():
                for identity in self._identities(space, key, value) if value is not MISSING else ():
                    yield space, key, identity

    def begin(self, *, by_value: bool) -> None:
        """Take what is kept."""
        if self._spies is not None:  # of a step that failed
            self._spies.leave()
            self._spies = None
        self._tables = [space.table.copy() for space in self.spaces]
        by_value = by_value or self._iterates
        each = [(at, key, value) for at, table in enumerate(self._tables) for key, value in own_values(table).items()]
        if not by_value and self._small is not None:
            small = self._small
            each = [entry for entry in each if entry[:2] in small or isinstance(entry[2], Tensor)]
        self._snapshot = Snapshot((value for *_, value in each), most_bytes=MOST_BYTES if by_value else -1)
        if by_value:
            self._small = {(at, key) for at, key, value in each if self._snapshot.is_small(value, _FEW)}
        self._iterates = bool(self._snapshot.iterators) and not self._is_refused
        if self._iterates:
            self._spies = Spies(self._snapshot, [space.table for space in self.spaces])

    def changes(self) -> Iterator[Kept]:
        """Yield the places that the step has changed, of those that are looked at."""
        assert self._snapshot is not None
        snapshot, self._used = self._snapshot, []
        if self._spies is not None:
            self._spies.leave()
            self._used = self._spies.used()
            self._spies = None
        changed = snapshot.changed() | {id(value) for value in self._used}
        for space, table in zip(self.spaces, self._tables, strict=True):
            if not changed and is_same_table(table, space.table):
                continue
            now = own_values(space.table.copy())
            for key in {**own_values(table), **now}:
                value = table.get(key, MISSING)
                is_set = not is_same_value(value, now.get(key, MISSING))
                is_changed = is_set or snapshot.reaches(value, changed)
                if is_changed and (self.is_doubled or self._is_shared(space, key, value, changed, is_set=is_set)):
                    yield space, key

    def _is_shared(self, space: Space, key: Any, value: Any, changed: set[int], *, is_set: bool) -> bool:
        if is_set and space.identity(key) in self._shared:
            return True
        assert self._snapshot is not None
        here = {number for number in changed if not self._shared.isdisjoint(self._sharing.with_memory([number]))}
        return self._snapshot.reaches(value, here)

    def value(self, change: Kept) -> Any:
        """Return what a place held when the step began."""
        space, key = change
        table = next(table for other, table in zip(self.spaces, self._tables, strict=True) if other is space)
        return table.get(key, MISSING)

    def shared_in(self, change: Kept) -> list[Identity]:
        """Return what other stages reach of a place."""
        return self._identities(*change, self.value(change))

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Let the stage keep inside what it kept when the step began."""
        assert self._snapshot is not None
        now = [space.table.copy() for space in self.spaces]
        with self._snapshot.put_in():
            try:
                for space, table in zip(self.spaces, self._tables, strict=True):
                    fill(space.table, table)
                yield
            finally:
                for space, table in zip(self.spaces, now, strict=True):
                    fill(space.table, table)

    def is_used_up(self, change: Kept) -> bool:
        """Whether iterators were used up in a place."""
        space, key = change
        used = {id(value) for value in self._used}
        return bool(used) and not used.isdisjoint(Snapshot([space.table.get(key)], most_bytes=-1).iterators)

    def fields_changed(self, change: Kept) -> list[str]:
        """Return the one field that has changed inside of a place; none if there are others."""
        assert self._snapshot is not None
        space, key = change
        names = set[str]()
        reached = Snapshot([space.table.get(key)], most_bytes=-1).objects
        for number, (value, kind, state) in self._snapshot.objects.items():
            if number not in reached:
                continue
            now = kind.take(value)
            if kind.is_same(state, now):
                continue
            if not isinstance(state, dict) or state.keys() != now.keys() or not kind.holds_objects:
                return []
            if isinstance(value, dict):
                return []
            names |= {str(name) for name, item in state.items() if not is_same_value(item, now[name])}
        return sorted(names) if len(names) == 1 else []
