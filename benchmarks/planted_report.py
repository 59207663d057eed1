"""Bugs for `report`: text that is not escaped, arrows of two timelines."""

from __future__ import annotations

from planting import Bug

REPORT = (
    Bug(
        "replicas-exchange-too-early",
        "_Cluster._exchanges",
        "self.ready.max(axis=0)",
        "self.ready[0]",
        "Copies of a pipeline exchange gradients before the slowest of them has any.",
    ),
    Bug(
        "replicas-all-alike",
        "FactorDraws.actions",
        "if not self._varies:",
        "if True:",
        "Every copy of a pipeline takes the same times.",
    ),
    Bug(
        "replicas-the-fastest-link",
        "_Cluster._slowest",
        "int(self.waited.argmax())",
        "int(self.waited.argmin())",
        "The link that nobody waits for is called the slowest.",
    ),
    Bug(
        "compared-peaks-in-another-unit",
        "compare_table",
        'f"{timeline.span_bubble:.2%}", str(max(timeline.peak_activations))]',
        'f"{timeline.span_bubble:.2%}", number(row.peak_share, 3)]',
        "A comparison prints whole microbatches under the name that is pairs in every other command.",
    ),
    Bug(
        "config-as-markup",
        "_launch",
        "<pre>{safe(config.text)}</pre></details>",
        "<pre>{config.text}</pre></details>",
        "A configuration's text becomes markup of the plan's page.",
    ),
    Bug(
        "command-as-markup",
        "_launch.start",
        "<pre>{safe(config.command)}</pre>",
        "<pre>{config.command}</pre>",
        "A command's text becomes markup of the plan's page.",
    ),
    Bug(
        "cells-as-markup",
        "table_html",
        'f"<td{kind}>{safe(cell)}</td>"',
        'f"<td{kind}>{cell}</td>"',
        "A reason in a table becomes markup of the plan's page.",
    ),
    Bug(
        "arrows-with-the-same-ids",
        "traces",
        "        first_id += len(timeline.transfers)\n",
        "        first_id = 0\n",
        "Arrows of two timelines in one trace have the same ids, and join messages of both.",
    ),
    Bug(
        "blocks-of-a-stage-of-two",
        "_blocks",
        'if len(names) == 1 else f"blocks {names[0]} to {names[-1]}"',
        'if len(names) <= 2 else f"blocks {names[0]} to {names[-1]}"',
        "A stage of two blocks is shown as its first one.",
    ),
    Bug(
        "halves-of-equal-length",
        "both_kinds",
        "slower * timed_input + tape * forward, slower * timed_weight",
        "slower * timed_whole / 2, slower * timed_whole / 2",
        "Advice takes split backwards for free, although blocks were timed.",
    ),
)
