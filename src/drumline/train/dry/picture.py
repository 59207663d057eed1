"""What each rank will hold, drawn: a bar for every rank, and one for the card that it has to fit on."""

from __future__ import annotations

from collections.abc import Mapping

from drumline.core.units import size_text
from drumline.report.draw.chart import HUES, Bar, bars
from drumline.train.dry.dry_run import DryRun

_FROZEN, _TRAINED = "frozen weights", "weights that train"
_HUES = dict(
    zip((_FROZEN, _TRAINED, "gradients", "optimizer", "activations", "received", "working"), HUES, strict=True)
) | {"room": "#c3cbd3"}
_GIB = 2**30


def held_picture(dry_run: DryRun) -> str:
    """Return an SVG of what every rank of a dry run holds at its fullest moment, and of the card if one is known."""
    info, fit = dry_run.summary(), dry_run.fit
    rows = [_bar(f"rank {rank}", sizes) for rank, sizes in enumerate(info["rank_bytes"])]
    if fit is not None:
        usable = f"{size_text(fit.usable)} may be used"
        rows.append(Bar(fit.card, {"room": fit.card_bytes / _GIB}, usable))
    title = f"{info['model']}: memory of each rank, {info['schedule']}, {info['microbatches']} microbatches"
    return bars(rows, _HUES, title=title, x_label="GiB at the fullest moment of a step", right=170, unit=" GiB")


def _bar(name: str, sizes: Mapping[str, float]) -> Bar:
    frozen = sizes["frozen_weights"]
    parts = {_FROZEN: frozen, _TRAINED: sizes["weights"] - frozen}
    parts |= {part: sizes[part] for part in _HUES if part in sizes}
    return Bar(name, {part: size / _GIB for part, size in parts.items()}, size_text(sizes["total"]))
