"""Causes of idle time in words: each has a sentence of its own."""

from __future__ import annotations

from typing import Any

import pytest

from drumline.core.action import Action, B, F, Op
from drumline.core.timeline.idle import Cause, Idle

SEND, REDUCE = Action(0, Op.SEND_F, 1), Action(0, Op.REDUCE_GRAD, None)


@pytest.mark.parametrize(
    ("cause", "given", "words"),
    [
        (Cause.OVERHEAD, {"kind": "post"}, "the rank posts receives"),
        (Cause.OVERHEAD, {"kind": "own"}, "the rank is busy with work that is not an action"),
        (Cause.OUTSIDE, {"kind": "requests"}, "the service waits for requests, or holds them back"),
        (Cause.OUTSIDE, {}, "the rank had not begun its step"),
        (Cause.TRANSFER, {"waits_for": SEND, "before": B(0, 0)}, "the rank itself is busy with 0SEND_F1"),
        (Cause.TRANSFER, {"waits_for": REDUCE, "before": B(0, 0)}, "its gradients are being exchanged"),
        (Cause.TRANSFER, {}, "its gradients are being exchanged"),
        (
            Cause.TRANSFER,
            {"waits_for": F(0, 1), "on_rank": 3, "before": F(1, 1)},
            "0F1 of rank 3 has finished and its output is on its way to 1F1",
        ),
        (Cause.FILL, {"waits_for": F(0, 0), "on_rank": 0, "before": F(1, 0)}, "fills; 1F0 waits for 0F0 of rank 0"),
        (Cause.DRAIN, {"waits_for": B(0, 3), "on_rank": 0}, "drains; 0B3 of rank 0 ends last"),
        (Cause.WAIT, {"before": F(1, 0)}, "1F0 waits for nothing"),
        (Cause.MEMORY, {"before": F(1, 2), "waits_for": B(1, 0), "on_rank": 1}, "the memory limit does not allow"),
        (Cause.UNEXPLAINED, {}, "no measurement says what the rank did"),
    ],
)
def test_a_cause_is_told_in_its_own_words(cause: Cause, given: dict[str, Any], words: str) -> None:
    idle = Idle(1, 2.0, 4.5, cause, **given)
    assert words in idle.why
    assert str(idle) == f"rank 1 idle 2.5 from 2: {idle.why}"
