"""Which steps are checked against the model by itself: the first, and sentinels later.

    check_model=True       the first step, those after 2, 10, 100 and 1,000 steps, then after every 1,000
    check_model=500        the first step, then after every 500
    check_model="first"    the first step
    check_model=False      none

With sentinels, so is the step after a state was loaded, layers moved, or the model was traced again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_EARLY = (2, 10, 100)
_EVERY = 1000

When = bool | int | str


def is_when(value: object) -> bool:
    """Whether a value says which steps to check.

    >>> [is_when(value) for value in (True, False, "first", 50, 0, "always", 1.5)]
    [True, True, True, True, False, False, False]
    """
    return isinstance(value, bool) or value == "first" or (isinstance(value, int) and value >= 1)


@dataclass(slots=True)
class Sentinels:
    """The steps after the first that are checked, by the number of training steps before them.

    >>> [at for at in range(3001) if Sentinels(True).takes(at)]
    [2, 10, 100, 1000, 2000, 3000]
    >>> [at for at in range(101) if Sentinels(50).takes(at)], Sentinels("first").takes(1000)
    ([50, 100], False)
    """

    when: When
    quiet_until: float = field(default=0)  # how many training steps come before the next one that may be checked
    _due: bool = field(default=False)  # whether something has happened

    @property
    def is_on(self) -> bool:
        """Whether any step but the first is checked."""
        return self.when is not False and self.when != "first"

    def ask(self) -> None:
        """Have the next step checked: what runs is no longer what was checked."""
        self._due = self.is_on
        self.quiet_until = 0

    def takes(self, num_steps: int) -> bool:
        """Whether the step after so many is checked."""
        due, self._due = self._due, False
        if not self.is_on:
            self.quiet_until = math.inf
            return due
        every = _EVERY if self.when is True else self.when
        assert isinstance(every, int)
        early = _EARLY if self.when is True else ()
        self.quiet_until = min([number for number in early if number > num_steps] + [(num_steps // every + 1) * every])
        return due or (num_steps > 0 and (num_steps % every == 0 or num_steps in early))
