"""Bugs for schedules without a flush: rows, versions, updates, pauses."""

from __future__ import annotations

from planting import Bug

STREAM = (
    Bug(
        "version-updated-in-place",
        "runtime/stream/versions.py",
        "if self._needed[_place(one)]:",
        "if False:",
        "An update changes the weights that a backward in flight still needs.",
    ),
    Bug(
        "recomputed-with-newer-weights",
        "runtime/stream/versions.py",
        "        with _swapped(moved):\n",
        "        with _swapped([]):\n",
        "A segment that runs again before its backward sees weights that its forward did not see.",
    ),
    Bug(
        "old-microbatch-draws-anew",
        "runtime/stream/executor.py",
        "stage.randomness.step = step.draw",
        "stage.randomness.step = max(one.draw for one, _ in self._steps.values())",
        "A microbatch of an earlier step that is recomputed draws another dropout mask.",
    ),
    Bug(
        "paused-backwards-run-twice",
        "runtime/stream/executor.py",
        "        self.since = 0\n        self._leave()\n        assert",
        "        self._leave()\n        assert",
        "After an evaluation, a rank waits for backwards that have run.",
    ),
    Bug(
        "newest-rate-for-old-gradients",
        "pipeline/state/stream.py",
        "with updates.inside(parameters, move), with_settings(optimizers, settings):",
        "with updates.inside(parameters, move):",
        "An update uses the learning rate of a later step.",
    ),
    Bug(
        "microbatch-counts-by-its-share-of-the-step",
        "runtime/stream/executor.py",
        "return torch.where(total > 0, share / total, torch.zeros_like(share))",
        "return share",
        "PipeDream's updates are smaller by the number of microbatches.",
    ),
    Bug(
        "norm-of-one-rank",
        "pipeline/state/stream.py",
        "every = {name: norm for one in norms for name, norm in one.items()}",
        "every = dict(norms[0])",
        "Gradients are clipped by rank 0's norm alone.",
    ),
)
