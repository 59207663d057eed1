"""How many microbatches the steps of a bucket may have, beside those that the settings name."""

from __future__ import annotations

from drumline.core.errors import DrumlineError
from drumline.engine.program.programs import check_fits
from drumline.schedules.registry import made_by
from drumline.train.config.relations import program_of
from drumline.train.config.settings import TrainSettings

_PARTS = 8  # of the settings' number: counts are multiples of it divided by this, up to twice the number


def counts_of(settings: TrainSettings) -> tuple[int, ...]:
    """Return the numbers of microbatches for which the schedule has a program with the same stages in the same places.

    >>> from drumline.train.config.settings import LengthSettings
    >>> counts_of(TrainSettings(lengths=LengthSettings("buckets")))
    (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
    """
    own, given = settings.num_microbatches, settings.pipeline
    # A captured step is one program, and a file holds one.
    if settings.lengths.how != "buckets" or given.plan or given.capture or given.schedule.endswith(".csv"):
        return ()
    program = program_of(settings)
    found = {own}
    for count in {max(round(own * part / _PARTS), 1) for part in range(1, 2 * _PARTS + 1)}:
        other = made_by(given.schedule, program, count)
        try:
            if other is not None:
                check_fits(other, program, other.name)
                found.add(count)
        except DrumlineError:
            continue
    return tuple(sorted(found))
