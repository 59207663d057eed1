"""The real channels between real processes: one launch per transport, one test per case and transport."""

from __future__ import annotations

import ast
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from matrices import left
from some import some
from warm_ranks import WarmRanks

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]  # starts processes, which takes long on a busy machine

NUM_RANKS = 3
SCRIPT = Path(__file__).with_name("channel_cases.py")


def names(variable: str) -> list[str]:
    """Return the functions that a tuple of the script lists, without running it."""
    for node in ast.parse(SCRIPT.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == variable:
            assert isinstance(node.value, ast.Tuple)
            return [elt.id for elt in node.value.elts if isinstance(elt, ast.Name)]
    raise AssertionError(variable)


@dataclass
class Launch:
    outcomes: list[dict[str, str]]
    stderrs: list[str]
    codes: list[int]


@pytest.fixture(scope="module", params=["shared-memory", "gloo", *left("gloo over TCP")])
def launch(request: pytest.FixtureRequest, warm_ranks: WarmRanks) -> Launch:
    """All ranks of one transport, after they have ended; the store is this process's, which no rank takes down."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    release, keep = os.pipe()
    code = f"import os; os.environ['RELEASE_FD'] = '{release}'; from channel.channel_cases import main; main"
    ranks = [
        warm_ranks.start(f"{code}({request.param!r}, {rank}, {NUM_RANKS}, {store.port})", pass_fds=[release])
        for rank in range(NUM_RANKS)
    ]
    os.close(release)
    try:
        texts = {rank: ranks[rank].communicate() for rank in (0, 2)}
        os.close(keep)  # only now may the child of the killed rank end
        keep = -1
        texts[1] = ranks[1].communicate()
    finally:
        if keep >= 0:
            os.close(keep)
        for process in ranks:
            process.kill()
            process.wait()
    outcomes: list[dict[str, str]] = []
    for rank in range(NUM_RANKS):
        assert texts[rank][0], texts[rank][1]
        lines = [json.loads(line) for line in texts[rank][0].splitlines()]
        outcomes.append({name: text for line in lines for name, text in line.items()})
    return Launch(
        outcomes, [texts[rank][1].decode() for rank in range(NUM_RANKS)], [process.returncode for process in ranks]
    )


@pytest.mark.parametrize("case", names("CASES"))
def test_every_rank_is_content_with(launch: Launch, case: str) -> None:
    for rank, outcome in some(enumerate(launch.outcomes)):
        assert outcome.get(case, "was not run") == "", f"rank {rank}: {outcome.get(case, outcome)}"


def told(launch: Launch, case: str) -> list[str]:
    return [outcome.get(case, "was not run") for outcome in launch.outcomes]


def test_what_was_never_taken_is_noticed_at_the_next_step(launch: Launch) -> None:
    notice = "rank 1 never received 1RECV_F3 of step 0 from rank 0"
    assert told(launch, "what_was_never_taken_is_noticed") == ["", notice, ""]


def test_a_wait_that_is_too_long_says_for_what_and_where_every_thread_stands(launch: Launch) -> None:
    first, second = told(launch, "a_wait_that_is_too_long_names_itself")[1].split("|")
    assert first.startswith("rank 1 at 1F0 waits for 0F3 of rank 0, for ")
    assert second.startswith("rank 1 waits for rank 0 to send 'nothing', for ")
    assert "in a_wait_that_is_too_long_names_itself" in launch.stderrs[1]
    assert "most recent call first" in launch.stderrs[1]


def test_an_abort_names_its_origin_to_those_who_wait_for_others(launch: Launch) -> None:
    origin = "2|rank 2 failed at 2F7: ZeroDivisionError: no such number"
    assert told(launch, "an_abort_names_its_origin") == [origin, origin, ""]


def test_an_orderly_end_fails_only_those_who_wait_for_more(launch: Launch) -> None:
    *ends, last = told(launch, "an_orderly_end_fails_only_those_who_wait")
    assert last == ""
    for rank, end in some(enumerate(ends)):
        waits = f"rank {rank} at 1F0 waits for 0F9 of rank 2"
        closed = f"2|rank 2 closed its channel while rank {rank} was still waiting for it: {waits}; call step"
        assert end.startswith(closed)


def test_a_killed_rank_is_named_and_leaves_nothing_behind(launch: Launch) -> None:
    death = "1|rank 1 died without reporting an error: it crashed or was killed"
    # Right before its death the rank had shared memory, but none with a name that would outlast it.
    assert told(launch, "a_killed_rank_is_named") == [death, "maps []", death]
    assert launch.codes == [0, -signal.SIGKILL, 0]
