"""What a run tells people: where its ranks compute, then one line that is drawn again on a terminal, or some lines.

::

    ranks 0-1 on cuda:0, by shared-memory: 2 ranks share cuda:0
    step 120/300  loss 2.314  51,200 tokens/s  bubble 12.3%  1.21 GiB  2 min left
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from torch import Tensor

from drumline.core.units import percent, size_text
from drumline.train.loop.evaluate import Evaluation, Sample
from drumline.train.loop.stopping import EarlyStop, SkippedUpdate

_SECONDS_APART = 10.0  # between lines where nobody watches a terminal
_FEWEST_SECONDS = 0.5  # between two drawings of a line: each waits for the device


@dataclass(frozen=True, slots=True)
class Update:
    """What one update of the parameters came to; `step` counts from 1, rates and sums are those of all ranks."""

    step: int
    num_steps: int
    loss: float | Tensor  # a tensor in the log, which reads it later
    lr: float
    grad_norm: float | None
    num_tokens: int  # so far
    tokens_per_second: float
    padding: float  # share of all places that were computed and do not count
    bubble: float | None
    peak_bytes: int  # of the ranks in this process
    seconds_left: float
    resident_bytes: int = 0  # of this process
    num_skipped: int = 0  # updates left out so far
    bucket: int = 0  # length of all rows of the last step, if steps have one

    def __str__(self) -> str:
        parts = [f"step {self.step}/{self.num_steps}", f"loss {float(self.loss):.4g}"]
        parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        parts += [] if self.bubble is None else [f"bubble {percent(self.bubble)}"]
        parts += [f"{self.num_skipped} skipped"] if self.num_skipped else []
        parts += [size_text(self.peak_bytes), f"{time_left(self.seconds_left)} left"]
        return "  ".join(parts)


Told = Update | Evaluation | Sample | SkippedUpdate | EarlyStop
Tell = Callable[[Told], None]


def time_left(seconds: float) -> str:
    """Return a time for people who wait.

    >>> time_left(42.3), time_left(200), time_left(7260), time_left(200_000)
    ('42 s', '3 min', '2.0 h', '2.3 days')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


class Progress:
    """Writes updates to a stream: in place on a terminal, now and then elsewhere; evaluations and samples always.

    >>> show = Progress(5, stream=sys.stdout, now=iter([0.0, 0.0, 0.0, 1.0, 20.0, 20.0]).__next__)
    >>> for step in (1, 2, 3):
    ...     show(Update(step, 5, 2.0 / step, 1e-3, None, 64 * step, 640.0, 0.0, 0.25, 2**20, 4.0))
    step 1/5  loss 2  640 tokens/s  bubble 25.0%  1 MiB  4 s left
    step 3/5  loss 0.6667  640 tokens/s  bubble 25.0%  1 MiB  4 s left
    >>> show(Evaluation(3, 1.25, 640, 0.5)); show(Sample(3, "Once", " more"))
    step 3  held-out loss 1.25 over 640 tokens, in 0.50 s
    step 3  sample: 'Once more'
    >>> show(SkippedUpdate(4, "the norm of all gradients is inf", 1)); show(EarlyStop(4, "SIGTERM on rank 0", "run/4"))
    step 4  skipped: the norm of all gradients is inf
    step 4  stopped by SIGTERM on rank 0; saved run/4
    """

    def __init__(
        self, num_steps: int, *, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_steps = num_steps
        self._stream = sys.stderr if stream is None else stream
        self._redraws = self._stream.isatty()
        self._now = now
        self._shown = now() - _SECONDS_APART  # the first one is shown
        self._is_drawn = False

    def begin(self, devices: str) -> None:
        """Show where ranks compute, before the first step."""
        self._line(devices)

    def __call__(self, news: Told) -> None:
        """Show what is new."""
        if isinstance(news, Update):
            self._update(news)
        elif isinstance(news, Evaluation):
            loss = f"held-out loss {news.loss:.4g} over {news.num_tokens:,} tokens"
            self._line(f"step {news.step}  {loss}, in {news.seconds:.2f} s")
        elif isinstance(news, Sample):
            self._line(f"step {news.step}  sample: {news.prompt + news.text!r}")
        elif isinstance(news, SkippedUpdate):
            times = f", {news.in_a_row} in a row" if news.in_a_row > 1 else ""
            self._line(f"step {news.step}  skipped: {news.skipped}{times}")
        else:
            saved = f"; saved {news.checkpoint}" if news.checkpoint else ""
            self._line(f"step {news.step}  stopped by {news.stopped}{saved}")

    def is_due(self, step: int) -> bool:
        """Whether an update would be shown now: if it is the last one, or some time has passed."""
        least_seconds = _FEWEST_SECONDS if self._redraws else _SECONDS_APART
        return step == self._num_steps or self._now() - self._shown >= least_seconds

    def _update(self, update: Update) -> None:
        if not self.is_due(update.step):
            return
        self._shown = self._now()
        if self._redraws:
            width = max(shutil.get_terminal_size(fallback=(100, 24)).columns - 1, 10)
            self._print(f"\r\x1b[2K{str(update)[:width]}", end="")
            self._is_drawn = True
        else:
            self._line(str(update))

    def _line(self, text: str) -> None:
        self.close()
        self._print(text)

    def _print(self, text: str, end: str = "\n") -> None:
        with suppress(OSError):  # a log on a full disk must not end the run; what it has buffered comes later
            print(text, end=end, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the line that was drawn last where it is."""
        if self._is_drawn:
            self._print("")
        self._is_drawn = False
