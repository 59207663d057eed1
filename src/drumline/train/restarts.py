"""Starting local ranks again after a failure: the same ones, or fewer where one does not come back.

    attempt 1   ranks 0 1 2   rank 2 dies at step 57       newest checkpoint: step 50
    attempt 2   ranks 0 1 2   from step 50; rank 2 dies    again within `again_within` restarts: it does not come back
    attempt 3   ranks 0 1     from step 50, stages cut again

torchrun does the same for its ranks with --max-restarts, and with --nnodes=MIN:MAX.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from drumline.channel.launch.stop import asked
from drumline.core.errors import DrumlineError, LaunchError, NonFiniteError, RankFailed, RunError, counted
from drumline.train.config.settings import TrainSettings
from drumline.train.replan import most_within, planned_for

Attempt = Callable[[TrainSettings, bool], Any]


def is_worth_another(error: RunError) -> bool:
    """Whether the same ranks may get further next time: not if the settings, the model or the numbers are wrong.

    >>> is_worth_another(RankFailed(1, "rank 1 was killed by SIGKILL")), is_worth_another(NonFiniteError("a NaN"))
    (True, False)
    """
    cause = error.__cause__
    if isinstance(cause, DrumlineError) and not isinstance(cause, RunError):
        return False
    return not any(isinstance(failure, NonFiniteError | LaunchError) for failure in (error, cause))


@dataclass(slots=True)
class Restarts:
    """How often ranks may be started again, and which ones failed so far."""

    settings: TrainSettings
    check: Callable[[TrainSettings], None]  # raises if the ranks of some settings cannot hold the model
    died: list[int | None] = field(default_factory=list)

    def run(self, attempt: Attempt, *, continues: bool) -> Any:
        """Run attempts until one succeeds, none is left, another would fail alike, or somebody has stopped the run."""
        most = self.settings.failures.restarts
        while True:
            try:
                return attempt(self.settings, continues)
            except RunError as error:
                if len(self.died) >= most or asked() or not is_worth_another(error):
                    raise
                self._after(error)
                text = "%s; restart %d of %d, on %s"
                ranks = counted(self.settings.num_ranks, "rank")
                logging.getLogger("drumline").warning(text, error.error, len(self.died), most, ranks)
            continues = True

    def _after(self, error: RunError) -> None:
        """Take note of a failure; plan for fewer ranks if one does not come back."""
        rank = error.rank if isinstance(error, RankFailed) else None
        failures = self.settings.failures
        again = rank is not None and rank in self.died[-failures.again_within :]
        self.died.append(rank)
        if not (failures.elastic and again):
            return
        left = most_within(self.settings, self.settings.num_ranks - 1)
        if left < failures.min_ranks:
            why = f"failures.min_ranks = {failures.min_ranks}: a run may not continue with fewer ranks"
            error.add_note(why if left else "no data-parallel pipeline is left that could be left out")
            raise error
        fewer = planned_for(self.settings, left)
        self.check(fewer)
        self.settings = fewer
        self.died = [None] * len(self.died)  # the ranks that are left have other numbers
