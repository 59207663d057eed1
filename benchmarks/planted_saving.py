"""Bugs for checkpoints, `features/saving` and what stands beside both: lines, rotation, full disks, `--continue`."""

from __future__ import annotations

from planting import Bug

SAVING = (
    Bug(
        "rotation-counts-damaged-ones",
        "Shelf.surplus.whole",
        "whole = [other for other in others if other.is_on(line) and not other.problem]",
        "whole = [other for other in others if other.is_on(line)]",
        "A damaged checkpoint counts as one that is kept, and pushes a whole one out.",
    ),
    Bug(
        "rotation-counts-other-lines",
        "Shelf.surplus.whole",
        "whole = [other for other in others if other.is_on(line) and not other.problem]",
        "whole = [other for other in others if not other.problem]",
        "Later steps of a line that was left push this line's checkpoints out.",
    ),
    Bug(
        "rotation-removes-other-runs",
        "_is_worthless",
        "    return line.is_kin(shelf_entry.line)\n",
        "    return True\n",
        "A run removes the checkpoints of another in the same folder.",
    ),
    Bug(
        "line-not-announced",
        "_complete",
        "    job.shelf.announce(job.folder, line)\n",
        "",
        "After a rewind, damage to the newest manifest brings the abandoned line back.",
    ),
    Bug(
        "rewind-goes-on-with-the-line",
        "Course.loaded",
        'self.line, self.name = Lineage.of(content).left_at(content["step"]), ""',
        'self.line, self.name = Lineage.of(content), ""',
        "Checkpoints after the one that was loaded still count as this line's.",
    ),
    Bug(
        "replaced-is-never-found",
        "step_of.match",
        "match = _NAME.fullmatch(checkpoint.name) or _REPLACED.fullmatch(checkpoint.name)",
        "match = _NAME.fullmatch(checkpoint.name)",
        "A crash while a step is saved again leaves no checkpoint of it.",
    ),
    Bug(
        "manifest-of-any-step",
        "_check",
        '    for name in ("step", "number", "num_trained"):\n        content[name].whole()\n',
        "",
        "A checkpoint of step -3 is loaded.",
    ),
    Bug(
        "torn-line-begins-again",
        "PendingLines.write",
        "            del self.data[:count]\n",
        "            self.data.clear()\n",
        "What a disk has taken of a line before it was full has no end.",
    ),
    Bug(
        "undone-lines-wait",
        "Outbox.cut",
        "            self._lines[name].cut(is_kept)\n",
        "            pass\n",
        "Steps that were undone while a disk was full are written once it has room.",
    ),
)
