"""Let the stages of a pipeline know which slice they run: where attention finds the slices before it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from drumline.features.slices.calls import SliceCalls
from drumline.runtime.segment import Segment
from drumline.runtime.stage import Stage


def follow(stage: Stage, calls: SliceCalls) -> None:
    """Have every run of a stage's blocks, first or repeated, see the slices before its own.

    While sequences are in one piece, blocks run as if nothing followed them.
    """
    stage.beside = partial(calls.context, stage.index)
    for segment in stage.segments:
        segment.whole = [
            _entering(calls, name, run) for (name, _), run in zip(segment.blocks, segment.whole, strict=True)
        ]
        segment.pieces = [(name, _entering(calls, name, run)) for name, run in segment.pieces]
        segment.run = _sliced(stage, segment, calls)  # type: ignore[method-assign]


def _entering(calls: SliceCalls, name: str, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def entered(value: Any) -> Any:
        calls.enter(name)
        return run(value)

    return entered


def _sliced(stage: Stage, segment: Segment, calls: SliceCalls) -> Callable[..., Any]:
    run = segment.run

    def sliced(value: Any, microbatch: int, *more: Any) -> Any:
        if calls.division.num_slices == 1:
            return run(value, microbatch, *more)
        with calls.around(), calls.at(stage.index, microbatch, value):
            return run(value, microbatch, *more)

    return sliced
