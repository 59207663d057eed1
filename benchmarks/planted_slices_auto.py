"""Bugs for slices that a pipeline takes up by itself, and for blocks that are profiled by slice length."""

from __future__ import annotations

from planting import Bug

SLICES_AUTO = (
    Bug(
        "slices-tried-with-many-microbatches",
        "are_few",
        "program.num_microbatches < _FEW * program.num_ranks",
        "True",
        "Slices are tried where they cannot gain.",
    ),
    Bug(
        "slices-kept-without-a-gain",
        "AutoSlices._conclude",
        "outcome.gained >= LEAST_GAIN",
        "True",
        "Slices stay although a measured step takes longer.",
    ),
    Bug(
        "slices-short-ones-cost-nothing",
        "parts_of",
        "(0, _TOKENS, whole), *points",
        "(0, _TOKENS, whole), (0, _TOKENS // 2, whole / 2)",
        "What short slices cost does not enter the choice of their number.",
    ),
    Bug(
        "slices-that-nobody-chose-stay",
        "AutoSlices._conclude",
        "if quickest != self._now:",
        "if quickest == self._now:",
        "The program that was measured last stays, whichever is the quickest.",
    ),
    Bug(
        "slices-adapted-as-whole-sequences",
        "AutoSlices._end",
        "self._auto.program.num_slices > 1",
        "False",
        "Adapting decides for a program in slices, of which it knows nothing.",
    ),
    Bug(
        "slices-given-are-left",
        "AutoSchedule._searched",
        "orders_in_slices(first, first.num_slices)",
        "orders_in_slices(first, 2 * first.num_slices)",
        "A user's slices are others after the search.",
    ),
    Bug(
        "slices-taken-up-undivided",
        "SlicesOnDemand.take_call",
        "self._divide(1 if why else self._num_slices)",
        "self._divide(1)",
        "Steps by a program in slices are cut like whole sequences.",
    ),
    Bug(
        "slices-tried-by-nothing",
        "StageTrials._trying.tried",
        "microbatch < self._num_slices and not",
        "microbatch < 0 and not",
        "A model whose layers mix tokens by themselves is taken to run in slices.",
    ),
    Bug(
        "slices-tried-without-the-loss",
        "SlicesOnDemand._trial",
        "not near(divided, whole)",
        "not near(whole, whole)",
        "A loss that is no mean over tokens is taken to run in slices.",
    ),
    Bug(
        "slices-tried-loss-ends-the-run",
        "StageTrials.on",
        "[*runs, *losses]",
        "runs",
        "A loss that fails on slices ends the run that tried them.",
    ),
    Bug(
        "slices-odd-lengths-end-the-run",
        "SlicesOnDemand.take_call",
        "step.instead = self._whole",
        "step.instead = None",
        "A batch whose sequences do not divide stops a run that took up slices by itself.",
    ),
    Bug(
        "slices-taken-up-unchecked",
        "ModelCheck.took",
        "program.num_slices > 1",
        "program.num_slices < 1",
        "The first step in slices that a run takes up is not checked.",
    ),
    Bug(
        "slices-of-stages-alike",
        "_by_slice",
        "table[work.stage[computes], work.microbatch[computes]]",
        "table[0, work.microbatch[computes]]",
        "All stages have the slices of the first.",
    ),
    Bug(
        "slices-of-blocks-call-often",
        "SliceProfile.stage_curves",
        "(end - first - 1) * self._call",
        "0 * self._call",
        "A stage pays for the call of each of its blocks.",
    ),
    Bug(
        "slices-of-blocks-forgotten",
        "SliceProfile.knows_blocks",
        "len(self.blocks) == sum(counts)",
        "False",
        "A plan does not use what slices of blocks took.",
    ),
    Bug(
        "slices-of-blocks-in-one-kind",
        "_Timing.kinds",
        "(is_last, layers, sizes)",
        "is_last",
        "An embedding counts as a layer with attention.",
    ),
)
