from __future__ import annotations

import pytest

from drumline.core import rules
from drumline.core.action import Action


@pytest.mark.parametrize(
    ("action", "needs"),
    [
        ("0F3", []),
        ("1F3", [("0F3",)]),
        ("2B3", [("2F3",)]),
        ("1B3", [("1F3",), ("2B3", "2I3")]),
        ("1I3", [("1F3",), ("2B3", "2I3")]),
        ("1W3", [("1I3",)]),
        ("1SEND_F3", []),
    ],
)
def test_who_needs_what(action: str, needs: list[tuple[str, ...]]) -> None:
    found = [tuple(map(str, any_of)) for any_of in rules.needs(Action.parse(action), num_stages=3)]
    assert found == needs


def test_messages_are_what_the_needs_of_other_stages_ask_for() -> None:
    for text in ("0F0", "1F0", "1B0", "1I0", "2B0"):
        made = Action.parse(text)
        message = rules.message(made, num_stages=3)
        assert message is not None
        assert made in rules.producers(message.send)
        assert made in rules.producers(message.recv)
        assert rules.message_of(message.send) == rules.message_of(message.recv) == message


@pytest.mark.parametrize("text", ["2F0", "0B0", "0I0", "1W0"])
def test_ends_of_the_pipeline_and_weight_halves_send_nothing(text: str) -> None:
    assert rules.message(Action.parse(text), num_stages=3) is None
