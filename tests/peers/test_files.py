"""Files that PyTorch writes load here, and files for PyTorch load there."""

from __future__ import annotations

from pathlib import Path

import pytest

import torch_peer as peer
from drumline.core.action import Action, Op
from drumline.core.costs import Costs
from drumline.core.errors import ProgramError
from drumline.core.lower.torch_text import for_torch, titan_schedule
from drumline.core.placement import Placement
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.simulate.simulate import simulate
from drumline.core.timeline.idle import Limit
from drumline.plan.search.search import search
from names import NAMES, build
from refused import refused

pytestmark = pytest.mark.torch

REFUSED = {
    "dualpipe": "two ranks",
    "chimera": "two ranks",
    "pipedream": "several optimizer steps",
    "pipedream-2bw": "several optimizer steps",
    "forward-only": "no backward",
}
COUNTS = [(2, 4), (4, 8), (3, 6)]


@pytest.mark.parametrize("name", list(peer.MULTI))
@pytest.mark.parametrize("communication", [False, True], ids=["compute-only", "with-communication"])
def test_what_torch_writes_loads_checks_and_simulates(name: str, communication: bool, tmp_path: Path) -> None:
    for ranks, microbatches in COUNTS:
        made = peer.multi(name, ranks, microbatches)
        assert made is not None
        path = tmp_path / f"{name}-{ranks}-{microbatches}.csv"
        made._dump_csv(str(path), format="compute_comms" if communication else "compute_only")
        program = Program.load(path)
        assert program.has_communication == (communication and ranks > 1)
        # PyTorch's own order of messages never hangs, on whatever channel.
        assert validate(program, channel="rank") == [], path.name
        timeline = simulate(program)
        assert timeline.makespan == simulate(program.compute_only()).makespan
        if name == "dualpipe-v":
            assert any(action.parts for row in program.rows for action in row)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
@pytest.mark.parametrize("communication", [False, True], ids=["compute-only", "with-communication"])
def test_what_we_export_torch_loads(name: str, communication: bool, tmp_path: Path) -> None:
    for ranks, microbatches in [*COUNTS, (4, 2)]:
        program = build(name, ranks, microbatches)
        path = tmp_path / "program.csv"
        path.write_text(for_torch(program, communication=communication))
        runtime = peer.load_csv(path, program, communication=communication)
        loaded = [
            [Action.parse(str(action)) for action in runtime.pipeline_order_with_comms[rank]] for rank in range(ranks)
        ]
        torch_added = Program.of(loaded)
        assert [[action for action in row if action.is_compute] for row in torch_added.rows] == [
            [action for action in row if action.is_compute] for row in program.rows
        ]
        assert validate(torch_added, channel="rank") == []
        # Without its REDUCE_GRAD torch would leave every gradient M times too large, without a word.
        reduced = sorted(action.stage for row in loaded for action in row if action.op is Op.REDUCE_GRAD)
        assert reduced == list(range(program.num_stages))


@pytest.mark.parametrize("placement", [Placement.linear(4), Placement.v(2)], ids=lambda value: value.name)
def test_what_is_searched_torch_loads(placement: Placement, tmp_path: Path) -> None:
    costs = Costs(forward=[1, 1, 1, 1.6], backward_input=[1, 1, 1, 1.6], backward_weight=[1, 1, 1, 1.6])
    found = search(costs, placement, num_microbatches=6, limit=Limit(max_activations=3), tries=200)
    path = tmp_path / "searched.csv"
    path.write_text(for_torch(found.program))
    runtime = peer.load_csv(path, found.program, communication=False)
    for rank, row in enumerate(found.program.rows):
        loaded = [Action.parse(str(action)) for action in runtime.pipeline_order_with_comms[rank]]
        assert [action for action in loaded if action.is_compute] == list(row)


@pytest.mark.parametrize(("name", "why"), REFUSED.items())
def test_what_torch_cannot_run_is_refused_with_the_reason(name: str, why: str) -> None:
    with refused(ProgramError, why):
        for_torch(build(name, 4, 8))


def test_torchtitan_gets_the_matching_placement() -> None:
    expected = {"zb-h1": "1F1B", "interleaved-zb": "Interleaved1F1B", "v-half": "ZBVZeroBubble"}
    assert {name: titan_schedule(build(name, 4, 8)) for name in expected} == expected
    for program in (build("chimera", 4, 8), build("hanayo", 4, 8, 4)):
        with refused(ProgramError, "torchtitan has no schedule"):
            titan_schedule(program)
