"""What the lines of a mesh do with a step's arguments: each takes its part of them, and all compare the rest."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import torch

from drumline.channel.lines.axes import Axes
from drumline.channel.lines.grid import DATA
from drumline.core.errors import MismatchError
from drumline.engine.program.programs import digest_of
from drumline.engine.ranks.agreement import ArgumentPrint, begun
from drumline.engine.ranks.observer import Observer
from drumline.engine.site import Site
from drumline.features.mesh.attach.lines import MeshLines
from drumline.features.mesh.sequences import divided
from drumline.model.values import pack
from drumline.runtime.step import CalledWith, Step

_STEP, _EVALUATED, _KINDS = 100, 200, 1000  # the kinds of step on which lines agree
_SHARED = {"tp": "hold parts of the same layers", "cp": "see parts of the same sequences"}


class LineCalls(Observer):
    """Refuses steps for which lines were called with what does not go together."""

    def __init__(self, site: Site, lines: MeshLines) -> None:
        self._site, self._lines, self._axes = site, lines, lines.axes
        self._whole: Callable[[], ArgumentPrint] | None = None  # fingerprint of the step's whole sequences

    def take_call(self, step: Step, call: CalledWith) -> CalledWith:
        """Return this line's part of a step's arguments."""
        positions = self._lines.positions
        if positions is None:
            return call
        self._whole = begun((call.batch, call.named), call.target)
        return CalledWith(*divided(*call, positions, self._axes))

    def compared(self, step: Step, fingerprint: Callable[[], ArgumentPrint]) -> None:
        """Raise where lines were called with what does not go together, before they exchange anything."""
        site, axes, device = self._site, self._axes, self._site.intake.device
        if axes.size("tp") > 1:
            _agree_on_rows(axes, "tp", fingerprint(), step.number, device)
        if self._whole is not None:
            _agree_on_rows(axes, "cp", self._whole(), step.number, device)
        is_own = site.programs.own_number == step.program
        if axes.size(*DATA) > 1 and "last" in site.engine.ends and not (step.train and is_own):
            kind = _STEP if step.train else _EVALUATED + min(len(pack(step.target)[0]), _STEP)
            number = 0 if is_own else int(digest_of(site.programs[step.program])[:4], 16)
            axes.agree_on_call(kind + _KINDS * number, device)


def _agree_on_rows(axes: Axes, axis: str, fingerprint: ArgumentPrint, step: int, device: torch.device) -> None:
    """Raise on all lines along tp or cp, which compute parts of the same rows, unless they got the same ones."""
    own_digests = torch.tensor(
        [_digest(fingerprint.batch), _digest(fingerprint.target)], dtype=torch.int64, device=device
    )
    every = [tensor.tolist() for tensor in axes.gathered(own_digests, axis)]
    ranks = axes.members(axis)
    for at, what in enumerate(("batch", "target")):
        digests = [(rank, row[at]) for rank, row in zip(ranks, every, strict=True) if row[at]]
        for rank, digest in digests[1:]:
            if digest != digests[0][1]:
                first, other = axes.named(digests[0][0]), axes.named(rank)
                raise MismatchError(
                    f"step {step}: {first} and {other}, which {_SHARED[axis]} "
                    f"({axis}), got different {what}{'es' if what == 'batch' else 's'}",
                    expected=f"the same {what} on both",
                    fix=f"choose rows by pipe.axes.rows, which is the same for all lines along {axis}",
                )


def _digest(prints: tuple[Any, ...]) -> int:
    """Return a number for a fingerprint, 0 for nothing.

    >>> _digest(()), _digest((("torch.float32", (4, 2), b""),)) > 0
    (0, True)
    """
    return int.from_bytes(blake2b(repr(prints).encode(), digest_size=7).digest(), "little") + 1 if prints else 0
