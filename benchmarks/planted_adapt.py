"""Bugs for `adapt`: what counts as a change, what is proposed, and what comes of it."""

from __future__ import annotations

from planting import Bug

ADAPT = (
    Bug(
        "one-step-is-a-change",
        "_Series.see.off",
        "off = min(max(off, -most), most)",
        "off = min(max(off, -10 * most), 10 * most)",
        "One noisy step counts as a lasting change.",
    ),
    Bug(
        "only-slower-is-a-change",
        "_Series.see",
        "if max(self.up, self.down) < limit:",
        "if self.up < limit:",
        "A slowness that ends goes unnoticed.",
    ),
    Bug(
        "old-level-stays-the-reference",
        "_Series.see",
        "        self.begin(None)\n        return change",
        "        self.up = self.down = 0.0\n        return change",
        "The same change is told again and again.",
    ),
    Bug(
        "uneven-in-all",
        "Uneven.see",
        "self._in_a_row + 1 if excess >= self._threshold else 0",
        "self._in_a_row + 1 if excess >= self._threshold else self._in_a_row",
        "Noisy steps far apart count as a rank that stays slow.",
    ),
    Bug(
        "speeds-upside-down",
        "Layers.measured.speeds",
        "speeds = tuple(value / now if",
        "speeds = tuple(now / value if",
        "The slow rank gets more layers.",
    ),
    Bug(
        "bytes-of-what-stays",
        "Layers.moved_bytes",
        "            if old != new\n",
        "            if old == new\n",
        "A move is weighed by the layers that stay.",
    ),
    Bug(
        "split-where-it-was-whole",
        "repaired.new_program",
        "new_program = result.program if is_split(program) else join(result.program, [True] * program.num_stages)",
        "new_program = result.program",
        "A pipeline of whole backwards gets a program that splits them.",
    ),
    Bug(
        "search-without-limit",
        "Decider._limit",
        "return Limit(max_activations=self._most_pairs)",
        "return Limit()",
        "A searched program holds more than was allowed.",
    ),
    Bug(
        "never-taken-back",
        "Decider._judge.is_kept",
        "is_kept = 1.0 - self._seconds / without >= self.settings.least_gain / 2",
        "is_kept = True",
        "A change whose gain does not come stays.",
    ),
    Bug(
        "pays-some-day",
        "Decider._paying.pays",
        "pays = proposal.gain >= self.settings.least_gain and saved > cost",
        "pays = proposal.gain >= self.settings.least_gain",
        "Layers move although the move costs more than it saves in time.",
    ),
    Bug(
        "memory-of-any-size",
        "Sizing.program",
        "None if held_microbatches > self.most_rows * (1 + 1e-9) else program",
        "program",
        "Fewer and larger microbatches hold more than was allowed.",
    ),
    Bug(
        "queues-by-their-last-message",
        "series_of",
        "waits[edge] += max(transfer.consumed - transfer.end, 0.0)",
        "waits[edge] = max(transfer.consumed - transfer.end, 0.0)",
        "A queue that grows is seen by its last message alone.",
    ),
    Bug(
        "the-emptiest-rank-decides",
        "Sizing.program.held_microbatches",
        "max(simulate(program).peak_activations) * (self.rows",
        "min(simulate(program).peak_activations) * (self.rows",
        "A number of microbatches is taken whose first rank holds more than it may.",
    ),
    Bug(
        "no-time-to-start",
        "Aside.__init__",
        "time.monotonic() + seconds + _SECONDS_TO_START",
        "time.monotonic() + seconds - _SECONDS_TO_START",
        "A search is given up before its process has started.",
    ),
    Bug(
        "one-form-alone",
        "AutoSchedule._next",
        "if len(self._forms) == 1 and (other := self._other_form()) is not None:",
        "if not self._forms and (other := self._other_form()) is not None:",
        "What whole backwards take is a guess, and the search pays for splits that gain nothing.",
    ),
    Bug(
        "tape-for-nothing",
        "joint_costs",
        "[i + max(long - bare, 0.0) for",
        "[i for",
        "A search does not count the tape that split backwards need.",
    ),
    Bug(
        "longer-step-stays",
        "AutoSchedule._concluded",
        "return None if gained > 0 else best",
        "return None",
        "A program whose measured step is longer stays.",
    ),
    Bug(
        "placement-against-the-user",
        "placed",
        "or options.stages_per_rank is not None or",
        "or",
        "The set-up chooses how many stages a rank holds, although the user has said it.",
    ),
)
