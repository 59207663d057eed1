"""Bugs for training runs: data that continue elsewhere, changes that nobody notices, checks that look away."""

from __future__ import annotations

from planting import Bug

TRAIN = (
    Bug(
        "data-draw-from-training",
        "Draws.running",
        "        before = _now()\n        _put(self._global_states)\n",
        "        before = _now()\n",
        "Data draw from the state that training draws from, so a run that continues draws other batches.",
    ),
    Bug(
        "generators-of-data-are-not-kept",
        "Draws.state",
        '        return {"global": dict(self._global_states), "held": held_states}',
        '        return {"global": dict(self._global_states), "held": {}}',
        "A loader with a generator of its own begins its epoch elsewhere.",
    ),
    Bug(
        "epoch-begins-where-it-stopped",
        "RepeatedStream._go_on",
        '        self.epoch, self.batches, self._begun = saved["epoch"], saved["batches"], saved["begun"]\n'
        "        source.draws.restore(self._begun)\n",
        '        self.epoch, self.batches, self._begun = saved["epoch"], saved["batches"], saved["begun"]\n',
        "The random state of the epoch's start is saved and not restored.",
    ),
    Bug(
        "workers-draw-on",
        "DataSource.close",
        "            self.batches._iterator = None",
        "            pass",
        "Workers that live on draw on in the next epoch, and those of a run that continues begin anew.",
    ),
    Bug(
        "other-batches-are-passed-over",
        "RepeatedStream._go_on",
        'if self._digest != saved["seen"]:',
        "if False:",
        "Batches that have changed are passed over without a word.",
    ),
    Bug(
        "one-position-for-all-lines",
        "own_position.part",
        "    part: dict[str, Any] = parts[number]",
        "    part: dict[str, Any] = parts[0]",
        "Every data-parallel rank goes on from the position of the first.",
    ),
    Bug(
        "contents-are-not-compared",
        "changed",
        '    if now["digest"] == then.get("digest") and now["size"] == then.get("size"):',
        '    if now["size"] == then.get("size"):',
        "Data of the same size with other contents continue a run.",
    ),
    Bug(
        "the-last-block-is-not-sampled",
        "blocks.start",
        "        start = (size - _BLOCK) * at // max(most - 1, 1)",
        "        start = (size - _BLOCK) * at // most",
        "What is appended or changed at the end of a large file is not noticed.",
    ),
    Bug(
        "separators-of-windows-do-not-match",
        "_separators",
        'if b"\\n" in sought and content.find(b"\\r\\n") >= 0:',
        "if False:",
        "Files with other line ends are one document.",
    ),
    Bug(
        "programs-of-files-are-not-proven",
        "_schedule_admits",
        'settings.pipeline.schedule.endswith(".csv") and (violations := validate(program))',
        'settings.pipeline.schedule.endswith(".csv") and (violations := validate(program)[:0])',
        "A CSV file that deadlocks is found by ranks that wait for each other.",
    ),
    Bug(
        "shards-are-not-measured",
        "_check_header",
        "    if size - 8 - length != max(ends, default=0):",
        "    if False:",
        "Weights that were cut off while they were copied are found when ranks read them.",
    ),
    Bug(
        "problems-lose-their-place",
        "problem_of",
        "    return Problem(source.where(path), key, text, error.expected, error.fix)",
        '    return Problem("", key, text, error.expected, error.fix)',
        "What is found while building says neither file nor line.",
    ),
)
