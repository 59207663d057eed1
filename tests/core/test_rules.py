"""The rules of who needs what, and that everything else reads them there."""

from __future__ import annotations

import pytest

from drumline.core import rules
from drumline.core.action import Action
from drumline.core.costs import Costs
from drumline.core.lower.lower import lower
from drumline.core.placement import Placement
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.prove.violation import InvalidProgram
from drumline.core.simulate.simulate import simulate
from drumline.core.timeline.idle import Limit
from drumline.plan.search.bounds.instance import Instance
from drumline.plan.search.search import search
from drumline.schedules import generate


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


@pytest.fixture
def reversed_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let microbatches enter at the last stage and leave at the first: every input lies on the other side."""
    needs = {
        op: tuple(rules.Need(-need.stage_offset, need.ops) for need in inputs) for op, inputs in rules.NEEDS.items()
    }
    monkeypatch.setattr(rules, "NEEDS", needs)
    monkeypatch.setattr(rules, "MESSAGE_TO", rules.message_offsets(needs))


def relabelled(program: Program) -> Program:
    """Return the program with its stages numbered from the other end."""
    last = program.num_stages - 1
    return Program.of([[action._replace(stage=last - action.stage) for action in row] for row in program.rows])


@pytest.mark.usefixtures("reversed_rules")
def test_a_changed_rule_is_followed_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards, costs = generate("zb-h1", num_ranks=3, num_microbatches=5), Costs(forward=[3, 1, 2], comm=0.25)
    backwards = relabelled(forwards)
    assert validate(forwards) != []
    assert validate(backwards) == []
    with pytest.raises(InvalidProgram):
        simulate(forwards)
    lowered, spans = lower(backwards), list(simulate(backwards, costs).spans())
    ordered = lower(backwards, channel="rank")
    placement = Placement(3, (2, 1, 0))
    found = search(costs, placement, num_microbatches=5, limit=Limit(max_activations=3), tries=40)
    waits_for = Instance(costs, placement, 5).need
    monkeypatch.undo()

    # Under the rules as they are, the same holds with the stages numbered as usual.
    forwards = Program(forwards.rows)  # a program keeps what was compiled of it
    assert lower(forwards).rows == relabelled(lowered).rows
    assert lower(forwards, channel="rank").rows == relabelled(ordered).rows
    mirrored = Costs(forward=[2, 1, 3], comm=0.25)
    timed = [(span.rank, span.start, span.end) for span in simulate(forwards, mirrored).spans()]
    assert [(span.rank, span.start, span.end) for span in spans] == timed
    usual = Instance(mirrored, Placement.linear(3), 5)
    flipped = [-1 if number < 0 else _flipped(number, usual) for number in usual.need]
    assert waits_for == [flipped[_flipped(number, usual)] for number in range(len(flipped))]
    assert validate(relabelled(found.program)) == []
    assert simulate(relabelled(found.program), mirrored).makespan == found.timeline.makespan == found.value


def _flipped(number: int, instance: Instance) -> int:
    pair, op = divmod(number, 4)
    stage, microbatch = divmod(pair, instance.num_microbatches)
    return instance.number(instance.num_stages - 1 - stage, op, microbatch)
