"""The real channels between real processes: one launch per transport, one test per case and transport."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.torch

NUM_RANKS = 3
SCRIPT = Path(__file__).with_name("channel_cases.py")


def names(variable: str) -> list[str]:
    """Return the functions that a tuple of the script lists, without running it."""
    for node in ast.parse(SCRIPT.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == variable:
            assert isinstance(node.value, ast.Tuple)
            return [one.id for one in node.value.elts if isinstance(one, ast.Name)]
    raise AssertionError(variable)


@dataclass
class Launch:
    outcomes: list[dict[str, str]]
    stderrs: list[str]
    codes: list[int]


@pytest.fixture(scope="module", params=["shared-memory", "gloo", "gloo over TCP"])
def launch(request: pytest.FixtureRequest) -> Iterator[Launch]:
    """All ranks of one transport, after they have ended; the store is this process's, which no rank takes down."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    release, keep = os.pipe()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), request.param, str(rank), str(NUM_RANKS), str(store.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=(release,),
            env={**os.environ, "RELEASE_FD": str(release)},
        )
        for rank in range(NUM_RANKS)
    ]
    os.close(release)
    try:
        texts = {rank: ranks[rank].communicate(timeout=120) for rank in (0, 2)}
        os.close(keep)  # only now may the child of the killed rank end
        keep = -1
        texts[1] = ranks[1].communicate(timeout=120)
    finally:
        if keep >= 0:
            os.close(keep)
        for rank in ranks:
            rank.kill()
            rank.wait()
    outcomes = []
    for rank in range(NUM_RANKS):
        assert texts[rank][0], texts[rank][1]
        outcomes.append(json.loads(texts[rank][0].splitlines()[-1]))
    yield Launch(outcomes, [texts[rank][1] for rank in range(NUM_RANKS)], [rank.returncode for rank in ranks])


def told(launch: Launch, case: str) -> list[str]:
    return [outcome[case] for outcome in launch.outcomes if case in outcome]


@pytest.mark.parametrize("case", names("CASES"))
def test_a_channel_does_what_it_should(launch: Launch, case: str) -> None:
    # The killed rank's line came before its death: it tells of the memory, the two others of all cases.
    outcomes = told(launch, case)
    assert len(outcomes) == 2, [outcome for outcome in launch.outcomes]
    assert outcomes == ["", ""], "\n".join(outcomes)
