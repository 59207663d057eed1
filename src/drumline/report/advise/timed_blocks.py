"""What split and whole backwards take: a run has one of both, and blocks that were timed before it have both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drumline.core.costs import Costs
from drumline.plan.device.blocks import OpTimes, Profile, ProfiledBlock
from drumline.report.advise.cut import RunBlocks

_NOTHING = OpTimes(0.0, 0.0, 0.0, 0.0)


def profile_of(plan: Mapping[str, Any], blocks: RunBlocks) -> Profile:
    """Return the blocks of a run as they were timed before it, all of them trained; without bytes."""
    assert blocks.basis == "profile", "the blocks were timed"
    each = map(_times, plan["predicted"]["blocks"])
    layers = (
        ProfiledBlock(
            name,
            times,
            activation_bytes=0,
            held_until_weight_bytes=0,
            start_bytes=0,
            weight_bytes=1,  # any: a block without gradients has no backward
            gradient_bytes=1,
            output_bytes=0,
        )
        for name, times in zip(blocks.names, each, strict=True)
    )
    return Profile(tuple(layers), _NOTHING, "", 0)


def _times(block: Mapping[str, Any]) -> OpTimes:
    forward, backward, by_input, by_weight = (
        float(block[name]) for name in ("forward", "backward", "backward_input", "backward_weight")
    )
    taped = block.get("taped")
    return OpTimes(forward, backward, by_input, by_weight, taped=None if taped is None else float(taped))


def both_kinds(costs: Costs, profile: Profile, blocks: RunBlocks, *, split: bool) -> Costs:
    """Return the costs of a run, with both kinds of backward in the proportion in which its blocks were timed.

    `split` says which kind the costs have. A forward that keeps a tape takes longer; that counts with I.

    >>> from drumline.core.program import Program
    >>> program = Program.parse("0F0,0B0")
    >>> ran = Costs(forward=2.0, backward_input=4.0, backward_weight=0.0)
    >>> seconds = {"forward": (1.0,), "backward_input": (2.0,), "backward_weight": (0.0,)}
    >>> blocks = RunBlocks(("0",), (1,), seconds, (1.0,), "profile", program, ran)
    >>> timed = ProfiledBlock("0", OpTimes(1.0, 2.0, 1.0, 3.0, taped=1.5), *[0] * 6)
    >>> both = both_kinds(ran, Profile((timed,), OpTimes(0, 0, 0, 0), "cpu", 1), blocks, split=False)
    >>> both.backward, both.backward_input, both.backward_weight
    ([4.0], [3.0], [6.0])
    """
    plain, taped = (profile.costs(blocks.counts, split=share) for share in (0.0, 1.0))
    num_stages = len(blocks.counts)

    def each(of: Costs, name: str) -> tuple[float, ...]:
        return of.per_stage(name, num_stages)

    rows = zip(
        *(each(costs, name) for name in ("forward", "backward_input", "backward_weight")),
        *(each(plain, name) for name in ("forward", "backward", "backward_input", "backward_weight")),
        each(taped, "forward"),
        strict=True,
    )
    rows_of_both = []
    for forward, by_input, by_weight, timed_forward, timed_whole, timed_input, timed_weight, timed_taped in rows:
        halves = timed_input + timed_weight
        if not (timed_forward and timed_whole and halves):
            rows_of_both.append((forward, by_input + by_weight, by_input, by_weight))
            continue
        tape = max(timed_taped / timed_forward - 1, 0.0)
        if split:
            bare = forward / (1 + tape)
            whole = (by_input + by_weight) * timed_whole / halves
            rows_of_both.append((bare, whole, by_input + forward - bare, by_weight))
        else:
            slower = (by_input + by_weight) / timed_whole
            rows_of_both.append(
                (forward, slower * timed_whole, slower * timed_input + tape * forward, slower * timed_weight)
            )
    names = ("forward", "backward", "backward_input", "backward_weight")
    fields: dict[str, Any] = {
        name: list(values) for name, values in zip(names, zip(*rows_of_both, strict=True), strict=True)
    }
    return replace(costs, **fields)
