"""Bugs for schedules without a flush: rows, versions, updates, pauses."""

from __future__ import annotations

from planting import Bug

STREAM = (
    Bug(
        "version-updated-in-place",
        "Versions.update",
        "if self._needed[_place(param)]:",
        "if False:",
        "An update changes the weights that a backward in flight still needs.",
    ),
    Bug(
        "recomputed-with-newer-weights",
        "Versions.backward",
        "        with _swapped(moved):\n",
        "        with _swapped([]):\n",
        "A segment that runs again before its backward sees weights that its forward did not see.",
    ),
    Bug(
        "old-microbatch-draws-anew",
        "StreamExecutor._take_of",
        ".randomness.step = step.draw",
        ".randomness.step = max(number.draw for number, _ in self._steps.values())",
        "A microbatch of an earlier step that is recomputed draws another dropout mask.",
    ),
    Bug(
        "paused-backwards-run-twice",
        "StreamExecutor._between_steps",
        "        self.since = 0\n        assert",
        "        assert",
        "After an evaluation, a rank waits for backwards that have run.",
    ),
    Bug(
        "newest-rate-for-old-gradients",
        "Stream.update",
        "with having_gradients(others), updates.inside(parameters, move), with_settings(optimizers, settings):",
        "with having_gradients(others), updates.inside(parameters, move):",
        "An update uses the learning rate of a later step.",
    ),
    Bug(
        "microbatch-counts-by-its-share-of-the-step",
        "StreamExecutor._share",
        "return torch.where(total > 0, share / total, torch.zeros_like(share))",
        "return share",
        "PipeDream's updates are smaller by the number of microbatches.",
    ),
    Bug(
        "norm-of-one-rank",
        "Stream.total",
        "return self._engine.assembly.total_norm(norms, 2.0)",
        "return self._engine.assembly.total_norm(norms[:1], 2.0)",
        "Gradients are clipped by rank 0's norm alone.",
    ),
    Bug(
        "nan-left-out-by-its-own-rank-alone",
        "StreamExecutor._update",
        "if judged.bad if judged is not None else not group.is_finite:",
        "if not group.is_finite:",
        "A NaN on one rank leaves out its update there, and the other ranks make theirs.",
    ),
    Bug(
        "nan-in-a-checkpoint-forgotten",
        "Stream.take.is_finite",
        'is_finite = group.get("finite", True)',
        "is_finite = True",
        "A run that goes on makes an update with the NaN that the checkpoint holds.",
    ),
    Bug(
        "frozen-rank-tells-nothing",
        "StreamExecutor.attach",
        "self._closes = BACKWARDS if any(op in rows for op in BACKWARDS) else (Op.FORWARD,)",
        "self._closes = BACKWARDS",
        "Ranks wait for the word of a rank that has no backward.",
    ),
    Bug(
        "step-begins-empty",
        "Measured.memory",
        "if self.in_flight is None:\n            return memory\n        known",
        "if True:\n            return memory\n        known",
        "A report counts what a step without a flush holds from nothing.",
    ),
)
