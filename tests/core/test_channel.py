"""Three channels: what the validator says of a program is what a model of brute force finds, on each of them."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from channel_model import CHANNELS, hangs, ways
from drumline.core.action import RECV_OPS, SEND_OPS, TRANSFER_OPS, WAIT_OPS, Action, Op
from drumline.core.channel import Queues
from drumline.core.errors import ProgramError
from drumline.core.lower.lower import lower
from drumline.core.lower.torch_text import for_torch
from drumline.core.program import Program
from drumline.core.prove.frozen import prune
from drumline.core.prove.validate import validate
from drumline.core.prove.violation import InvalidProgram
from matrices import kinds
from programs import NAMES, admissible, build
from refused import refused

REFUSED = ("dualpipe", "chimera", "pipedream", "pipedream-2bw", "forward-only")
EXPORTED = [name for name in NAMES if name not in REFUSED]

# What `show --format torch-comms` wrote once, and what two NCCL ranks never came back from.
EARLY = "0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0"
IN_TURN = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0"
# Rank 1 takes microbatch 1 in before it sends microbatch 0 on, round a ring of three ranks: each pair of ranks has one
# order, but the message that rank 1 waits for needs the one that stands behind it.
RING = (
    "0F0,0SEND_F0,3RECV_F0,3F0,0F1,0SEND_F1,3RECV_F1,3B0,3SEND_B0,3F1,3B1,3SEND_B1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1RECV_F1,1SEND_F0,1F1,1SEND_F1,1RECV_B0,1B0,1SEND_B0,1RECV_B1,1B1,1SEND_B1\n"
    "2RECV_F0,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1,2RECV_B0,2B0,2SEND_B0,2RECV_B1,2B1,2SEND_B1"
)


@pytest.mark.parametrize(
    ("text", "hanging"),
    [(IN_TURN, []), (EARLY, ["pair", "rank"]), (RING, ["rank"])],
    ids=["in turn", "receives posted early", "round a ring"],
)
def test_what_hangs_where(text: str, hanging: list[str]) -> None:
    assert [channel for channel in CHANNELS if hangs(text, channel)] == hanging
    assert [channel for channel in CHANNELS if validate(Program.parse(text), channel=channel)] == hanging


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("text", [IN_TURN, EARLY, RING])
def test_whether_a_program_hangs_does_not_depend_on_who_is_faster(text: str, channel: str) -> None:
    assert ways(text, channel) == {hangs(text, channel)}


def test_a_hang_is_told_link_by_link() -> None:
    (found,) = validate(Program.parse(EARLY), channel="rank")
    assert str(found) == (
        "rank 1, position 1: 1F0 never runs on a channel with one queue per rank: "
        "rank 1 at 1F0 (position 1) waits for 0SEND_F0 of rank 0; "
        "0SEND_F0 of rank 0 waits behind its 0RECV_B0; "
        "0RECV_B0 of rank 0 waits for 1SEND_B0 of rank 1 (position 3)"
    )


def test_messages_that_wait_only_for_each_other_are_told() -> None:
    text = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"
    (found,) = validate(Program.parse(text), channel="pair")
    assert str(found) == (
        "rank 0, position 4: 0RECV_B0 never arrives on a channel with one queue per pair of ranks: "
        "0RECV_B0 of rank 0 waits behind its 0SEND_F1; 1RECV_F1 of rank 1 waits behind its 1SEND_B0"
    )
    assert [channel for channel in CHANNELS if hangs(text, channel)] == ["pair", "rank"]


@pytest.mark.slow
@pytest.mark.parametrize("name", kinds(EXPORTED))
def test_no_export_hangs_on_any_channel(name: str) -> None:
    counts = [*admissible(name, 3, 4, 3), (4, 5, None), (6, 8, None)]
    assert len(counts) > 8
    for ranks, microbatches, stages in counts:
        program = build(name, ranks, microbatches, stages)
        for version in ("2.13", "2.15") if microbatches in (3, 8) else ("2.13",):
            text = for_torch(program, communication=True, version=version)
            assert [channel for channel in CHANNELS if hangs(text, channel)] == [], (ranks, microbatches, stages)


@pytest.mark.parametrize("name", EXPORTED)
def test_receives_posted_early_would_hang_in_every_export(name: str) -> None:
    """The order of Drumline's own runs, which one queue per edge allows: the model must see that others do not."""
    text = lower(build(name, 4, 8)).format()
    assert [channel for channel in CHANNELS if hangs(text, channel)] == ["pair", "rank"]


@pytest.mark.parametrize("name", kinds([name for name in NAMES if name not in ("chimera", "dualpipe")]))
@pytest.mark.parametrize("channel", CHANNELS)
def test_what_is_lowered_for_a_channel_runs_on_it_and_computes_the_same(name: str, channel: str) -> None:
    for counts in ((1, 2), (3, 6), (4, 8)):
        program = build(name, *counts)
        lowered = lower(program, channel=channel)
        assert lowered.compute_only() == program
        assert not hangs(lowered.format(), channel)
        assert lower(lowered, channel=channel) == lowered


def test_two_copies_of_a_stage_are_lowered_for_the_strictest_channel() -> None:
    for name in ("chimera", "dualpipe"):
        program = build(name, 4, 8)
        lowered = lower(program, channel="rank")
        assert lowered.compute_only() == program
        assert validate(lowered, channel="rank") == []
        assert not hangs(lowered.format(), "rank")


def test_frozen_stages_are_lowered_for_the_strictest_channel() -> None:
    for trainable in ([False, True, False, True], [False, False, True, True]):
        program = prune(build("1f1b", 4, 5), trainable)
        lowered = lower(program, channel="rank")
        assert lowered.compute_only() == program
        assert not hangs(lowered.format(), "rank")


def test_what_hangs_is_neither_lowered_nor_exported() -> None:
    early = Program.parse(EARLY)
    assert lower(early) is early
    with refused(InvalidProgram, "0SEND_F0 of rank 0 waits behind its 0RECV_B0"):
        lower(early, channel="rank")
    with refused(ProgramError, r"would hang in PyTorch: .* waits behind its 0RECV_B0"):
        for_torch(early, communication=True)
    assert for_torch(early) == "0F0,0B0\n1F0,1B0\n"
    safe = for_torch(early.compute_only(), communication=True)
    assert not hangs(safe, "rank")


def test_an_unknown_channel_is_refused() -> None:
    for use in (validate, lower):
        with refused(ProgramError, "unknown channel 'ranks'", expected="edge, pair or rank", fix="rank"):
            use(Program.parse("0F0,0B0"), channel="ranks")


def test_without_messages_spelled_out_the_channel_makes_no_difference() -> None:
    stuck = Program.parse("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    assert len({str(validate(stuck, channel=channel)) for channel in Queues}) == 1


def _perturbed(program: Program, rng: random.Random) -> Program:
    """Move a few actions of a program by a few places, and wait for some of its sends."""
    rows = [list(row) for row in program.rows]
    if rng.random() < 0.3:
        for row in rows:
            for send in [action for action in row if action.op in SEND_OPS]:
                wait = send._replace(op=Op.WAIT_SEND_F if send.op is Op.SEND_F else Op.WAIT_SEND_B)
                row.insert(rng.randint(row.index(send) + 1, len(row)), wait)
    if rng.random() < 0.3:
        for _ in range(rng.randrange(1, 12)):
            _swap_peers(program, rows, rng)
        return Program.of(rows)
    for _ in range(rng.randrange(4)):
        row = rng.choice(rows)
        messages = [at for at, action in enumerate(row) if action.op in TRANSFER_OPS]
        at = rng.choice(messages) if messages and rng.random() < 0.8 else rng.randrange(len(row))
        action = row.pop(at)
        row.insert(min(max(at + rng.randint(-4, 4), 0), len(row)), action)
    return Program.of(rows)


def _swap_peers(program: Program, rows: list[list[Action]], rng: random.Random) -> None:
    """Swap two neighbours in a rank's messages that have different peers: no pair of ranks sees a difference."""
    rank = rng.randrange(len(rows))
    messages = [(at, action) for at, action in enumerate(rows[rank]) if action.op in TRANSFER_OPS]
    pairs = [
        (number, other)
        for (number, first), (other, second) in pairwise(messages)
        if _peer(program, first) != _peer(program, second)
    ]
    if pairs:
        number, other = rng.choice(pairs)
        if rows[rank][other].op in RECV_OPS:  # may be posted earlier
            rows[rank].insert(number, rows[rank].pop(other))
        elif rows[rank][number].op in SEND_OPS:  # may be posted later
            rows[rank].insert(other, rows[rank].pop(number))


def _peer(program: Program, action: Action) -> int:
    other = action.stage + (1 if action.op in (Op.SEND_F, Op.RECV_B) else -1)
    return program.placement.rank_of(other, action.microbatch or 0)


@pytest.mark.slow
def test_validator_and_model_agree_on_random_programs() -> None:
    rng = random.Random(15)
    verdicts: Counter[tuple[str, bool]] = Counter()
    where: Counter[tuple[bool, ...]] = Counter()
    waited = 0
    for _ in range(200):
        program = build(rng.choice(EXPORTED), rng.randint(2, 4), rng.randint(1, 4))
        damaged = _perturbed(lower(program, channel=rng.choice(CHANNELS), ahead=rng.randint(1, 3)), rng)
        text = damaged.format()
        found = [not validate(damaged, channel=channel) for channel in CHANNELS]
        assert found == [not hangs(text, channel) for channel in CHANNELS], text
        verdicts.update(zip(CHANNELS, found, strict=True))
        where[tuple(found)] += 1
        waited += any(action.op in WAIT_OPS for row in damaged.rows for action in row)
    assert min(verdicts[channel, ok] for channel in CHANNELS for ok in (True, False)) >= 25
    # Every step from one channel to the next stricter one must have made a difference somewhere.
    assert where[True, False, False] >= 20
    assert where[True, True, False] >= 3
    assert waited >= 50


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0B0,0WAIT_REDUCE_GRAD", "0WAIT_REDUCE_GRAD waits for 0REDUCE_GRAD, which does not come before it"),
        ("0F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0WAIT_REDUCE_GRAD", "waits again; it first waited at position 3"),
        (
            IN_TURN.replace("0B0\n", "0B0,0WAIT_SEND_F0\n"),
            "rank 1: 1WAIT_SEND_B0 is missing: nothing waits for 1SEND_B0 at position 3",
        ),
        (IN_TURN.replace("0F0,", "0WAIT_SEND_F0,0F0,"), "waits for 0SEND_F0, which does not come before it"),
        (
            IN_TURN.replace("0B0\n", "0B0,0WAIT_SEND_F0,1WAIT_SEND_B0\n"),
            "rank 0, position 5: 1WAIT_SEND_B0 waits for 1SEND_B0",
        ),
        (
            "0F0,0B0,0REDUCE_GRAD,0WAIT_SEND_F0",
            "0WAIT_REDUCE_GRAD is missing: nothing waits for 0REDUCE_GRAD at position 2",
        ),
        (
            "0F0,0B0,0REDUCE_GRAD,0UPDATE0,0F1,0B1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0UPDATE1",
            "0REDUCE_GRAD begins again before 0WAIT_REDUCE_GRAD",
        ),
    ],
)
def test_waits_that_do_not_fit(text: str, says: str) -> None:
    found = [str(violation) for violation in validate(Program.parse(text))]
    assert any(says in violation for violation in found), found


def test_a_wait_that_can_never_end_is_a_deadlock_on_every_channel() -> None:
    text = (
        "0F0,0SEND_F0,0WAIT_SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1WAIT_SEND_B1"
    )
    for channel in CHANNELS:
        (found,) = validate(Program.parse(text), channel=channel)
        assert hangs(text, channel)
        assert "1WAIT_SEND_B0" in found.reason


def test_two_copies_wait_for_each_others_exchange() -> None:
    down, up = "0F0,1F1,1B1,0B0", "0F1,1F0,1B0,0B1"
    first, second = "0REDUCE_GRAD,0WAIT_REDUCE_GRAD", "1REDUCE_GRAD,1WAIT_REDUCE_GRAD"
    crossed = Program.parse(f"{down},{first},{second}\n{up},{second},{first}")
    assert any("ranks wait for each other" in violation.reason for violation in validate(crossed))
    assert validate(Program.parse(f"{down},{first},{second}\n{up},{first},{second}")) == []


def test_waits_come_with_every_send_and_exchange_of_an_export_for_torch_2_15() -> None:
    program = build("zb-v", 3, 4)
    older, newer = (Program.parse(for_torch(program, communication=True, version=key)) for key in ("2.14.1", "2.15.0"))
    assert not any(action.op in WAIT_OPS for row in older.rows for action in row)
    for old, new in zip(older.rows, newer.rows, strict=True):
        assert [action for action in new if action.op not in WAIT_OPS] == list(old)
        begun = [action for action in old if action.op in SEND_OPS or action.op is Op.REDUCE_GRAD]
        waits = [Action.parse(str(action).replace(action.op, f"WAIT_{action.op}")) for action in begun]
        assert sorted(map(str, waits)) == sorted(str(action) for action in new if action.op in WAIT_OPS)
    # What is written for one version can be written for the other, and is the same for both without communication.
    assert for_torch(newer, communication=True) == older.format() + "\n"
    assert for_torch(newer, communication=True, version="2.15") == newer.format() + "\n"
    assert for_torch(newer) == for_torch(older) == for_torch(program, version="2.15")


@pytest.mark.parametrize("version", ["", "2", "two", "2.x", "v2.15"])
def test_what_is_no_version_is_refused(version: str) -> None:
    with refused(ProgramError, "is not a PyTorch version"):
        for_torch(build("1f1b", 2, 2), communication=True, version=version)
