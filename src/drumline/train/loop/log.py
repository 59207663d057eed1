"""What a run leaves in its folder beside what the pipeline records, and what it forwards to TensorBoard and W&B.

    settings.json        the settings of the run
    buckets.json         with lengths.how = "buckets": length, rows and microbatches of each
    metrics.jsonl        written by the pipeline; an update's own figures stand in the line of its last step
    evaluations.jsonl    a line per evaluation: step, loss, tokens, seconds, bubble
    samples.jsonl        a line per sample text: step, prompt, text
    failures.jsonl       a line per update that was skipped, and one where the run was stopped: step, and why
    restarts.jsonl       a line whenever the run continues in its folder: from which step, how many steps were lost

Rank 0 alone writes. On a full disk, what it has to write waits until there is room: see core/measured/outbox.py.
TensorBoard and W&B get every figure of `metrics.jsonl`, by the number of the update.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from drumline.core.measured.outbox import Outbox
from drumline.core.measured.run import CONFIG, METRICS, Run, read_run
from drumline.pipeline.pipeline import Pipeline
from drumline.report.run.follow import TensorBoard, WandB, Writer, scalars
from drumline.train.config.settings import TrainSettings
from drumline.train.data.items.batch import Bucket
from drumline.train.loop.evaluate import Evaluation, Sample
from drumline.train.loop.progress import Told, Update
from drumline.train.loop.stopping import EarlyStop, SkippedUpdate

STEP = "train/step"
HELD_OUT = "validation_metrics/global_avg_loss"
_SECONDS_TO_FORWARD = 2.0
_TAIL = 2**20  # bytes at the end of metrics.jsonl that name its last update
_FILES = {
    Evaluation: "evaluations.jsonl",
    Sample: "samples.jsonl",
    SkippedUpdate: "failures.jsonl",
    EarlyStop: "failures.jsonl",
}


class Log:
    """Takes what a run tells, on rank 0, and puts it where it is read from."""

    def __init__(self, pipe: Pipeline, settings: TrainSettings, folder: Path) -> None:
        self._pipe = pipe
        self._reached = reached(folder / METRICS)  # the last step of the run that this one may continue
        self._outbox = Outbox(folder, "the log")
        self._outbox.put("settings.json", json.dumps(asdict(settings), indent=2) + "\n")
        writers: list[Writer] = []
        if settings.run.tensorboard:
            writers.append(TensorBoard(folder / "tensorboard"))
        if settings.run.wandb:
            writers.append(WandB(settings.run.wandb, name=folder.name, config=asdict(settings)))
        self._forward = Forward(folder, writers) if writers else None

    def __call__(self, news: Told, of_step: int | None = None) -> None:
        """Write what is new; an update belongs to the line of its last pipeline step."""
        if isinstance(news, Update):
            self._pipe.note(of_step, **figures(news))
            if self._outbox.is_waiting:
                self._outbox.flush()
            if self._forward is not None:
                self._forward.poll()
            return
        if isinstance(news, Evaluation):
            self._pipe.note(**{HELD_OUT: news.loss})
        self._add(_FILES[type(news)], {name: _plain(value) for name, value in asdict(news).items()})

    def _add(self, name: str, line: dict[str, Any]) -> None:
        self._outbox.add(name, (json.dumps(line) + "\n").encode())
        self._outbox.flush()

    def buckets(self, buckets: Sequence[Bucket]) -> None:
        """Write which lengths steps have, with rows and microbatches of each."""
        if buckets:
            text = json.dumps([asdict(bucket) for bucket in buckets], indent=1)
            self._outbox.put("buckets.json", text + "\n")

    def continued(self, step: int) -> None:
        """Take up the run after a step: lines of later steps are gone, as those of metrics.jsonl are."""
        for name in dict.fromkeys(_FILES.values()):
            self._outbox.cut(name, lambda line: _is_until(line, step))
        line = {
            "step": step,
            "lost": max(self._reached - step, 0),
            "ranks": self._pipe.num_ranks * self._pipe.axes.num_lines,
            "schedule": self._pipe.program.name,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._add("restarts.jsonl", line)
        if self._forward is not None:
            self._forward.skip()

    def close(self) -> None:
        """Write and forward what is left, once the pipeline has written all."""
        self._outbox.close()
        if self._forward is not None:
            self._forward.close()


def figures(update: Update) -> dict[str, float | Tensor]:
    """Return an update's figures by the names that they have in the run folder.

    >>> update = Update(1, 5, 2.5, 1e-3, None, 64, 640.0, 0.25, 0.1, 2**20, 4.0)
    >>> figures(update)["train/loss"], figures(update)["padding"]
    (2.5, 0.25)
    """
    numbers: dict[str, float | Tensor] = {
        STEP: update.step,
        "train/loss": update.loss,
        "lr": update.lr,
        "n_tokens_seen": update.num_tokens,
        "tokens_per_second": update.tokens_per_second,
        "padding": update.padding,
        "train/skipped": update.num_skipped,
        "memory/peak_bytes": update.peak_bytes,
        "memory/resident_bytes": update.resident_bytes,
    }
    return numbers | ({"bucket": update.bucket} if update.bucket else {})


class Forward:
    """Hands lines of `metrics.jsonl` to writers as they appear, and all that is left at the end."""

    def __init__(self, folder: Path, writers: list[Writer]) -> None:
        self._folder = folder
        self._writers = writers
        self._run: Run | None = None
        self._known = 0
        self._asked = time.monotonic()

    def poll(self) -> None:
        """Forward what is there by now, if a while has passed."""
        if time.monotonic() - self._asked >= _SECONDS_TO_FORWARD:
            self._hand_on()
            self._asked = time.monotonic()

    def skip(self) -> None:
        """Pass over what is there: it was forwarded before."""
        if (self._folder / CONFIG).exists():
            self._run = read_run(self._folder)
            self._known = len(self._run.metrics())

    def close(self) -> None:
        """Forward the rest."""
        try:
            self._hand_on()
        finally:
            for writer in self._writers:
                writer.close()

    def _hand_on(self) -> None:
        if self._run is None and not (self._folder / CONFIG).exists():
            return  # a full disk has not taken it yet
        self._run = self._run or read_run(self._folder)
        lines = self._run.metrics(since=self._known)
        self._known += len(lines)
        for line in lines:
            if line.get(STEP) is not None:  # the last step of an update
                for writer in self._writers:
                    writer.write(int(line[STEP]), _named(line))


def _named(line: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in scalars(line).items() if name != STEP}


def reached(metrics: Path) -> int:
    """Return the last update that a run has written down."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - _TAIL))
            steps = re.findall(rb'"train/step":(\d+)', file.read())
    except OSError:
        return 0
    return int(steps[-1]) if steps else 0


def _is_until(line: bytes, step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] <= step)
    except (ValueError, TypeError, KeyError):
        return False  # torn by a crash


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
