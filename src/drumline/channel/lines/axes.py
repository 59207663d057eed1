"""What the ranks of a mesh exchange along its axes.

Each axis has a process group of torch for its collectives. Small values that all ranks exchange go through the store,
which also tells every line when a rank of another one has failed. `grid.py` has the axes themselves.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import combinations, product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import ProcessGroup, Store, Work

from drumline.channel.channel import too_late
from drumline.channel.lines.grid import DATA, Grid, described
from drumline.channel.rank_names import mesh_shown
from drumline.channel.rendezvous import exchange
from drumline.core.errors import MismatchError, ModelError, RankFailed

_LOOK_SECONDS = 0.5  # how often a rank that waits asks whether another one has failed
_NUM_LOOKS = 10
_MOST_COUNTS = 16  # of one step: the parts of its loss, and its rows
_FAILED = "drumline/failed"
_SPIN_SECONDS = 2e-3  # how long it polls before it sleeps


class Axes(Grid):
    """The place of this process in the mesh, and its groups.

    >>> axes = Axes.single(num_ranks=4, rank=1)
    >>> axes.line, axes.place("pp"), axes.size("dp"), axes.rows
    ([0, 1, 2, 3], 1, 1, (0, 1))
    """

    def __init__(
        self, ranks: np.ndarray[Any, Any], names: Sequence[str], rank: int, *, timeout: float, store: Store | None
    ) -> None:
        super().__init__(ranks, names, rank)
        self.timeout, self._store = timeout, store
        self._groups: dict[tuple[str, ...], ProcessGroup | None] = {}

    @staticmethod
    def single(num_ranks: int, rank: int = 0) -> Axes:
        """Return the axes of a pipeline without a mesh: one line."""
        return Axes(np.arange(num_ranks), ("pp",), rank, timeout=0.0, store=None)

    @staticmethod
    def of(mesh: Any, *, timeout: float, store: Store, rank: int, num_ranks: int) -> Axes:
        """Return the axes of a mesh, after all ranks agree on it."""
        sizes, ranks = described(mesh)
        pairs = exchange(store, rank, num_ranks, "drumline/mesh", (sizes, ranks), timeout=timeout)
        for other, report in enumerate(pairs):
            if report != pairs[0]:
                raise MismatchError(
                    f"ranks 0 and {other} have different meshes: {mesh_shown(pairs[0][0])} and {mesh_shown(report[0])}",
                    expected="the same mesh on every rank",
                )
        if math.prod(sizes.values()) != num_ranks:
            raise MismatchError(
                f"the mesh {mesh_shown(sizes)} has {math.prod(sizes.values())} ranks, and {num_ranks} were started",
                expected="a mesh whose sizes multiply to the number of ranks",
                fix=f"start {math.prod(sizes.values())} processes, or change the mesh",
            )
        listed = np.array(ranks if ranks is not None else range(num_ranks)).reshape(tuple(sizes.values()))
        axes = Axes(listed, tuple(sizes), rank, timeout=timeout, store=store)
        axes._connect()
        return axes

    def _connect(self) -> None:
        """Create the groups of all combinations of axes; torch creates every group on all ranks, in one order."""
        several = [name for name in self.names if name != "pp" and self._sizes[name] > 1]
        for count in range(1, len(several) + 1):
            for names in combinations(several, count):
                self._groups[names] = self._new_group(names)

    most_counts = _MOST_COUNTS  # parts of a loss, and its rows

    def group(self, *names: str) -> ProcessGroup | None:
        """Return the group of the ranks along these axes, None if this rank is alone there."""
        return self._groups.get(tuple(name for name in self.names if name in names and self._sizes[name] > 1))

    def _new_group(self, names: tuple[str, ...]) -> ProcessGroup | None:
        fixed = [name for name in self.names if name not in names]
        own_group = None
        for at in product(*(range(self._sizes[name]) for name in fixed)):
            place = dict(zip(fixed, at, strict=True))
            rank = self._ranks[tuple(place.get(name, slice(None)) for name in self.names)]
            ranks = [int(rank) for rank in rank.reshape(-1)]
            group = dist.new_group(ranks, timeout=timedelta(seconds=self.timeout))
            if self.rank in ranks:
                assert isinstance(group, ProcessGroup)
                own_group = group
        return own_group

    def summed(self, numbers: Tensor, *names: str) -> Tensor:
        """Return the sum of a small tensor over the ranks along these axes; all of them call it alike."""
        group = self.group(*names)
        if group is None:
            return numbers
        total = numbers.clone(memory_format=torch.contiguous_format)
        work = dist.all_reduce(total, group=group, async_op=True)
        assert work is not None
        self.wait(work, f"the sum over {' and '.join(names)}", names)
        return total

    def gathered(self, tensor: Tensor, name: str) -> list[Tensor]:
        """Return the tensors of all ranks along an axis, in order; all of them call it alike.

        Their shapes may differ only if they are flat.
        """
        group, own_tensor = self.group(name), tensor.detach().contiguous()
        if group is None:
            return [own_tensor]
        lengths = [tensor.numel()]
        if tensor.dim() == 1:  # flat ones may differ: fill up to the longest
            reported_tensor = torch.zeros(self.size(name), dtype=torch.int64, device=tensor.device)
            reported_tensor[self.place(name)] = tensor.numel()
            lengths = self.summed(reported_tensor, name).tolist()
            own_tensor = torch.nn.functional.pad(own_tensor, (0, max(lengths) - tensor.numel()))
        tensors = [torch.empty_like(own_tensor) for _ in range(self.size(name))]
        work = dist.all_gather(tensors, own_tensor, group=group, async_op=True)
        assert work is not None
        self.wait(work, f"gathering a tensor of shape {tuple(tensor.shape)} over {name}", [name])
        return (
            tensors if tensor.dim() != 1 else [value[:length] for value, length in zip(tensors, lengths, strict=True)]
        )

    def scattered(self, parts: Sequence[Tensor], name: str) -> Tensor:
        """Return the sum of what all ranks along an axis have for this one: of each rank's parts, its own place's."""
        group = self.group(name)
        if group is None:
            return parts[0]
        if parts[0].is_cpu:  # gloo sums all parts too, and its work does not say when it is done
            return self.summed(torch.stack(list(parts)), name)[self.place(name)]
        total = torch.empty_like(parts[0])
        work = dist.reduce_scatter(total, list(parts), group=group, async_op=True)
        assert work is not None
        self.wait(work, f"a part of the sum over {name}, of shape {tuple(total.shape)}", [name])
        return total

    def totals(self, counts: Sequence[Any], device: torch.device) -> list[Any]:
        """Return the sums of a step's counts over all lines that see other tokens; each calls it once a step.

        The counts may be numbers, or tensors on the device: then the sums are tensors too, and nothing waits for them.
        """
        if len(counts) > _MOST_COUNTS:
            raise ModelError(
                f"the loss has {len(counts) - 1} parts",
                expected=f"at most {_MOST_COUNTS - 1}, in a mesh of several lines",
            )
        stays = any(isinstance(count, Tensor) and not count.is_cpu for count in counts)
        total = self._first_of_step(counts, len(counts), device)
        if stays:
            return list(total[: len(counts)].unbind())
        self._check_first(total, len(counts))
        return total[: len(counts)].tolist()

    def agree_on_call(self, kind: int, device: torch.device) -> None:
        """Raise on all lines that see other tokens unless they are in the same kind of step, a number above 16."""
        self._check_first(self._first_of_step((), kind, device), kind)

    def _first_of_step(self, counts: Sequence[Any], kind: int, device: torch.device) -> Tensor:
        """Return the sums of what lines exchange first in a step.

        It has the same form in every kind of step. So lines in different kinds of steps find out here: a backend may
        kill the process if lines send different forms.
        """
        filled = [*counts, *[0.0] * (_MOST_COUNTS - len(counts)), float(kind), float(kind) ** 2]
        numbers = torch.stack(
            [torch.as_tensor(item, dtype=torch.float64, device=device).reshape(()) for item in filled]
        )
        return self.summed(numbers, *DATA)

    def _check_first(self, total: Tensor, kind: int) -> None:
        size = self.size(*DATA)
        if total[_MOST_COUNTS:].tolist() != [kind * size, kind**2 * size]:  # only if all kinds are equal
            raise MismatchError(
                f"{self.described()}: other lines of the mesh make another kind of step",
                expected="the same call on every line (step or eval_step), the same program, a target on all lines or "
                "on none, and losses with as many parts",
                fix="decide these by what all lines know, not by a line's own part of the batch",
            )

    def wait(self, work: Work, what: str, names: Sequence[str]) -> None:
        """Return when a collective along these axes has ended; raise if a rank failed, or after the timeout.

        On an accelerator only the stream waits.
        """
        started = looked = time.perf_counter()
        blocks = dist.get_backend(self.group(*names)) == "gloo"  # its threads need the cores that polling takes
        while not work.is_completed():
            now = time.perf_counter()
            if now - started > self.timeout:
                listed = " and ".join(map(self.named, self._others(names)))
                raise too_late(f"{self.described()} waits for {listed} in {what}", now - started)
            if now - looked > _LOOK_SECONDS:
                self.look()
                looked = now
            if blocks:
                with suppress(RuntimeError):  # not yet, or an error that the last wait tells
                    work.wait(timedelta(seconds=_LOOK_SECONDS))
            elif now - started > _SPIN_SECONDS:
                time.sleep(1e-4)
        try:
            work.wait()
        except RuntimeError as error:
            raise self.explained(error, what, names) from error

    def explained(self, error: RuntimeError, what: str, names: Sequence[str]) -> RankFailed:
        """Return the error of a collective that failed because a rank of another line failed or left."""
        for _ in range(_NUM_LOOKS):  # whoever noticed first says what happened
            self.look()
            time.sleep(_LOOK_SECONDS / _NUM_LOOKS)
        others = self._others(names)
        listed = " or ".join(map(self.named, others))
        return RankFailed(others[0], f"{what} failed at {self.described()}: {listed} has died or left ({error!s:.200})")

    def _others(self, names: Sequence[str]) -> list[int]:
        return [member for member in self.members(*names) if member != self.rank]

    def exchanged(self, topic: str, value: Any) -> list[Any]:
        """Return what every rank of the mesh passes here, by rank; all of them call it alike."""
        if self._store is None:
            return [value]
        arguments = (self._store, self.rank, self._ranks.size, topic, value)
        return exchange(*arguments, timeout=self.timeout, look=self.look)

    def agree(self, settings: Mapping[str, Any]) -> None:
        """Raise on all ranks unless all lines were given the same settings."""
        if not self.is_mesh:
            return
        own_digests = {what: _digest(value) for what, value in settings.items()}
        answers = self.exchanged("drumline/settings", own_digests)
        for other, report in enumerate(answers):
            for what, digest in answers[0].items():
                if report.get(what) != digest:
                    raise MismatchError(
                        f"{self.named(0)} and {self.named(other)} disagree on {what}",
                        expected="the same Pipeline(...) call on every rank",
                    )

    def failed(self, at: str, error: BaseException) -> None:
        """Tell the other lines that this rank failed; the first failure counts."""
        if self._store is not None:
            text = f"{self.rank} {self.described()} failed at {at}: {type(error).__name__}: {error}"
            if isinstance(error, RankFailed):  # the failure of another rank, which may not have told it
                text = f"{error.rank} {error.error}"
            try:
                self._store.compare_set(_FAILED, "", text[:2000])
            except (RuntimeError, DistStoreError):  # the store died with its rank
                return

    def look(self) -> None:
        """Raise RankFailed if a rank of any line has failed."""
        if self._store is None:
            return
        try:
            failure = self._store.get(_FAILED).decode() if self._store.check([_FAILED]) else ""
        except (RuntimeError, DistStoreError) as error:
            raise RankFailed(0, "the ranks' store is gone: the rank that held it has died or left") from error
        if failure:
            rank, _, text = failure.partition(" ")
            raise RankFailed(int(rank), text)


def _digest(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()
