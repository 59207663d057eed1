"""How schedules without a flush attach to a pipeline."""

from __future__ import annotations

from functools import partial

from drumline.engine.ground import Ground
from drumline.engine.kit import Kit
from drumline.engine.setup import PipelineSetup
from drumline.engine.site import Site
from drumline.features.stream.executor import StreamExecutor
from drumline.features.stream.options import StreamOptions, check_ties, rows_of
from drumline.features.stream.stream import NoStream, Stream
from drumline.features.stream.together import is_synchronous
from drumline.model.weights.tied import Ties


def fit(kit: Kit, setting: PipelineSetup, options: StreamOptions) -> None:
    """Make rows endless if the schedule has no flush."""
    if setting.program.num_updates:
        kit.executor, kit.flow, kit.admit = StreamExecutor, partial(_stream, options), partial(_admit, options)


def attach(site: Site) -> NoStream | None:
    """Return what refuses checkpoints of streams, where there is none."""
    return None if isinstance(site.flow, Stream) else NoStream()


def _named(setting: PipelineSetup) -> str:
    """Return the name of the schedule, which one without a flush has."""
    assert isinstance(setting.options.schedule, str)
    return setting.options.schedule


def _admit(options: StreamOptions, setting: PipelineSetup, ties: Ties) -> None:
    check_ties(ties, _named(setting), options, alone=setting.crew.alone)


def _stream(options: StreamOptions, setting: PipelineSetup, ground: Ground) -> Stream:
    name = _named(setting)
    rows = rows_of(name, options, setting.program, ground.frozen.pruned_too)
    finite, together = setting.options.check_finite, is_synchronous(name, vertical_sync=options.vertical_sync)
    return Stream(ground, rows, check_finite=finite, is_synchronous=together)
