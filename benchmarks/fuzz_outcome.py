"""What the cases of a fuzzer came to, and the table of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class FuzzOutcome:
    """What became of all cases."""

    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)  # by their reason
    kinds: dict[str, Counter[str]] = field(default_factory=dict)  # what cases of each came to
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found."""
        return not self.failures

    def table(self, columns: Sequence[str], width: int) -> str:
        """Return how many cases of each kind came to what, and why some were refused."""
        lines = [f"{'cases with':<30}" + "".join(f"{name:>{width}}" for name in columns)]
        for kind, counts in [*sorted(self.kinds.items()), ("all", self.counts)]:
            lines.append(f"{kind:<30}" + "".join(f"{counts[name]:>{width}}" for name in columns))
        lines += ["", *(f"{count:>6} refused: {reason}" for reason, count in self.refusals.most_common())]
        return "\n".join([*lines, "", f"{self.seconds:.0f} s"])
