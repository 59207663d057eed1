"""Whether data of the user's can be continued exactly, tried before training: with their first batches, twice.

    count    begin, two batches; the random numbers as before, begin again: the same two batches
    state    begin, a batch, save, another one of every worker; load: the same others. Load the beginning: the first

What hides its randomness, continues where it was left, or has a state that cannot be saved is found here, not when the
run is to be continued.
"""

from __future__ import annotations

import json
from typing import Any

from drumline.checkpoint.plain_json import packed, unpacked
from drumline.core.errors import RunError, UsageError
from drumline.train.data.own.digests import digest_of
from drumline.train.data.own.repeated import END, DataSource

_ANYHOW = "or set data.exact = false to train without checkpoints that continue exactly"


def check_resumable(source: DataSource, name: str) -> None:
    """Refuse data that a run could not continue exactly; leaves them at their beginning."""
    batches = source.batches
    if type(batches) in (list, tuple):
        return
    if getattr(batches, "num_workers", 0) > 1 and getattr(batches, "in_order", True) is False:
        raise UsageError(
            f"{name} gives a loader with in_order=False, whose batches come in another order every time",
            expected="batches in order",
            fix=f"leave in_order out, {_ANYHOW}",
        )
    (_try_state if source.has_state else _try_again)(source, name)
    source.close()


def check_state(state: Any, name: str) -> Any:
    """Return a position as it comes back from a checkpoint; refuse one that cannot be saved."""
    try:
        return unpacked(json.loads(json.dumps(packed(state, "state"))))
    except RunError as error:
        raise UsageError(
            f"the position in the data of {name} cannot be saved: {error.error}",
            expected=error.expected,
            fix="let state_dict return such values alone; checkpoints are read back without unpickling",
        ) from None


def _try_again(source: DataSource, name: str) -> None:
    begun = source.draws.state()
    first = _digests(source, 2)
    source.draws.restore(begun)
    second = _digests(source, 2)
    source.draws.restore(begun)
    if first != second:
        raise UsageError(
            f"{name} gives other batches when it is gone through once more from the same random state",
            expected="batches that depend on the epoch and on random generators that the data hold, as a DataLoader's",
            fix="draw from torch's, numpy's or Python's generator; for an order that changes with the epoch, have"
            f" set_epoch(epoch); for its own position, have state_dict() and load_state_dict(state); {_ANYHOW}",
        )


def _try_state(source: DataSource, name: str) -> None:
    begun = source.draws.state()
    start = check_state(source.state(), name)
    first = _digests(source, 1)
    saved, now = check_state(source.state(), name), source.draws.state()
    count = 1 + int(getattr(source.batches, "num_workers", 0))  # so that each worker's second batch is among them
    behind = _next(source, count)
    source.draws.restore(begun)
    source.load(saved)
    source.draws.restore(begun)
    source.begin(0)
    source.draws.restore(now)
    again = _next(source, count)
    source.load(start)
    source.draws.restore(begun)
    anew = _digests(source, 1)
    source.load(start)
    source.draws.restore(begun)
    if behind != again or first != anew:
        when = "after a batch" if behind != again else "at the beginning"
        raise UsageError(
            f"{name} gives data that do not continue where their state_dict says, {when}",
            expected="load_state_dict(state) after which the next batch is the one that would have followed",
            fix=f"let the state hold all that decides what follows, random generators too, {_ANYHOW}",
        )


def _digests(source: DataSource, count: int) -> list[str]:
    source.begin(0)
    return _next(source, count)


def _next(source: DataSource, count: int) -> list[str]:
    digests: list[str] = []
    while len(digests) < count and digests[-1:] != ["end"]:
        batch = source.next()
        digests.append("end" if batch is END else digest_of(batch))
    return digests
