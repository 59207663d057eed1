"""Whether a run fits on its cards, each of which holds one rank; and if not, what would make it fit.

What changes nothing but seconds comes first: recomputing, smaller microbatches, more cards. Then what changes the
numbers of the frozen model, the adapter, or how much memory stays free. Each is told with what the fullest rank would
need, as far as it is known without measuring again: activations are those that were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from drumline.core.errors import DrumlineError
from drumline.model.quantised.packed import num_bytes
from drumline.train.config.files.cards import card_named
from drumline.train.config.settings import TrainSettings
from drumline.train.memory.forecast import Forecast, RankMemory
from drumline.train.tune.build_tuned import build_tuned

Ranks = Sequence[RankMemory]
Again = Callable[..., Forecast]  # the forecast of the same blocks with other options
_MOST_CARDS = 64
_BASE = "--base "
# From many bytes to few. Not int8: its layers keep the unpacked weight of each microbatch in flight.
_BASES = ("bf16", "nf4")


@dataclass(frozen=True, slots=True)
class Remedy:
    """What could be changed, as flags, and what the fullest rank would then need."""

    change: str
    num_bytes: float
    fits: bool


@dataclass(frozen=True, slots=True)
class CardFit:
    """What a card has, how much of it a rank may use, what every rank needs, and what could be changed."""

    card: str
    card_bytes: float
    usable: float
    needed: tuple[float, ...]
    remedies: tuple[Remedy, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether every rank fits on its card."""
        return max(self.needed) <= self.usable

    @property
    def next_change(self) -> str:
        """What to try next; empty if it fits, or if nothing that is known here helps."""
        return next((remedy.change for remedy in self.remedies if remedy.fits), "")

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        remedies = [{"change": e.change, "bytes": e.num_bytes, "fits": e.fits} for e in self.remedies]
        sizes = {"card_bytes": self.card_bytes, "usable_bytes": self.usable, "needed_bytes": max(self.needed)}
        return {"card": self.card, "fits": self.fits, **sizes, "next": self.next_change, "remedies": remedies}


def card_fit(settings: TrainSettings, forecast: Forecast, again: Again, device: torch.device) -> CardFit | None:
    """Return whether a run fits on the cards that it names, or on this machine's; None on the host."""
    text = settings.memory.card
    card = card_named(text) if text else _card_here(device)
    if card is None:
        return None
    name, size = card
    fit = CardFit(name, size, size * (1.0 - settings.memory.headroom), tuple(rank.total for rank in forecast.ranks))
    if fit.fits:
        return fit
    search = _Search(settings, forecast, again)
    return replace(fit, remedies=tuple(search.remedies(fit)))


def _card_here(device: torch.device) -> tuple[str, float] | None:
    """Return the same of this machine's device; None for the host, whose memory ranks share."""
    if device.type == "cpu":
        return None
    return f"this machine's {device.type}", float(torch.accelerator.get_memory_info(device)[1])


class _Search:
    """Looks for what would make a run fit."""

    def __init__(self, settings: TrainSettings, forecast: Forecast, again: Again) -> None:
        self.settings, self.forecast, self.again = settings, forecast, again

    def remedies(self, fit: CardFit) -> Iterator[Remedy]:
        """Yield all changes that help, alone; and all of them together if no single one is enough."""
        single = list(self._single())
        remedies = [Remedy(change, _most(ranks), _most(ranks) <= fit.usable) for change, ranks in single]
        single = [pair for pair, remedy in zip(single, remedies, strict=True) if remedy.num_bytes < max(fit.needed)]
        remedies = [remedy for remedy in remedies if remedy.num_bytes < max(fit.needed)]
        yield from remedies
        remedies += list(self._cards(fit.usable))
        yield from remedies[len(single) :]
        if not any(remedy.fits for remedy in remedies):
            changes = self._one_base([change for change, _ in single])
            ranks = self._together({change: ranks for change, ranks in single if change in changes})
            if len(changes) > 1:
                yield Remedy(" ".join(changes), _most(ranks), _most(ranks) <= fit.usable)
            yield from self._cards(fit.usable, checkpoint="full")
        if max(fit.needed) <= fit.card_bytes:
            free = max(0.0, 1.0 - max(fit.needed) / fit.card_bytes)
            yield Remedy(f"--set memory.headroom={int(free * 1000) / 1000:g}", max(fit.needed), True)

    def _single(self) -> Iterator[tuple[str, Ranks]]:
        batch = self.settings.batch
        if self.settings.memory.recompute == "none":
            with suppress(DrumlineError):
                yield "--recompute full", self.again(checkpoint="full").ranks
        if batch.microbatch > 1 and self.settings.lengths.how != "buckets":
            with suppress(DrumlineError):
                yield f"-m {self.settings.num_microbatches * batch.microbatch}", self._smaller(batch.microbatch)
        if self.settings.adapter.is_on:
            yield from self._bases()
            if self.settings.adapter.method != "ia3" and self.settings.adapter.rank > 1:
                rank = self.settings.adapter.rank // 2
                yield f"--adapter-rank {rank}", self._ranked(rank / self.settings.adapter.rank)

    def _smaller(self, times: int) -> Ranks:
        """Return what ranks hold with microbatches of one row."""
        ranks = self.again(num_microbatches=self.settings.num_microbatches * times).ranks
        return [
            replace(e, **{part: getattr(e, part) / times for part in ("activations", "received", "working")})
            for e in ranks
        ]

    def _bases(self) -> Iterator[tuple[str, Ranks]]:
        """Yield the base in fewer bytes."""
        now = self._sizes(self.settings)
        for base in _BASES:
            if base == self.settings.adapter.base:
                continue
            other = replace(self.settings, adapter=replace(self.settings.adapter, base=base))
            with suppress(DrumlineError):
                sizes = self._sizes(other)
                ranks = [
                    replace(rank, weights=rank.weights + sum(sizes[name] - now[name] for name in names))
                    for rank, names in zip(self.forecast.ranks, self._names(), strict=True)
                ]
                yield f"{_BASE}{base}", ranks

    def _sizes(self, settings: TrainSettings) -> dict[str, int]:
        model = build_tuned(settings, device="meta").model
        return {name: num_bytes(param) for name, param in model.named_parameters(remove_duplicate=False)}

    def _names(self) -> list[set[str]]:
        """Return the names of every rank's parameters."""
        program, stages = self.forecast.program, self.forecast.stages
        rows = [program.placement.stages_of(rank) for rank in range(program.num_ranks)]
        return [
            {name for stage in row for block in stages[stage] for name, _ in block.named_parameters()} for row in rows
        ]

    def _ranked(self, share: float) -> Ranks:
        """Return what ranks hold with an adapter of a smaller rank; what is trained whole stays."""
        sizes: Mapping[str, int] = {
            name: num_bytes(param)
            for stage in self.forecast.stages for block in stage for name, param in block.named_parameters()
            if param.requires_grad and "modules_to_save" not in name
        }  # fmt: skip
        ranks = []
        for rank, names in zip(self.forecast.ranks, self._names(), strict=True):
            own_total = sum(sizes.get(name, 0) for name in names)
            part = 1.0 - (1.0 - share) * (own_total / rank.gradients if rank.gradients else 1.0)
            less = {"gradients": rank.gradients * part, "optimizer": rank.optimizer * part}
            ranks.append(replace(rank, weights=rank.weights - own_total * (1.0 - share), **less))
        return ranks

    def _together(self, single: Mapping[str, Ranks]) -> Ranks:
        """Return what ranks hold if all is changed at once: of each kind of memory the least."""
        every = [self.forecast.ranks, *single.values()]
        names = [field.name for field in fields(RankMemory)]
        return [
            RankMemory(**{e: min(getattr(r, e) for r in ranks) for e in names}) for ranks in zip(*every, strict=True)
        ]

    def _one_base(self, changes: Sequence[str]) -> list[str]:
        """Return changes that can be made together: of bases only the last, which has the fewest bytes."""
        bases = [change for change in changes if change.startswith(_BASE)]
        return [change for change in changes if change not in bases[:-1]]

    def _cards(self, usable: float, **others: Any) -> Iterator[Remedy]:
        """Yield the fewest cards, one for each rank, on which it fits."""
        if self.settings.mesh.num_lines > 1:
            return
        also = " --recompute full" if others else ""
        for num_ranks in range(self.settings.mesh.pipeline + 1, _MOST_CARDS + 1):
            try:
                needed = _most(self.again(num_ranks=num_ranks, **others).ranks)
            except DrumlineError:
                return  # the schedule or the model does not divide further
            if needed <= usable:
                yield Remedy(f"--ranks {num_ranks}{also}", needed, True)
                return


def _most(ranks: Ranks) -> float:
    return max(rank.total for rank in ranks)
