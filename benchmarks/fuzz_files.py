"""Fuzzed: files that one reader takes alone. Programs and their actions, costs, profiles, plans."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from drumline.core.action import Action
from drumline.core.costs import Costs, Edge
from drumline.core.lower.lower import lower
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.simulate.simulate import simulate
from drumline.plan.device.model_profile import ModelProfile
from drumline.plan.device.plan import Plan
from drumline.plan.device.planner import plan
from drumline.report.plan.profiles import profile_page, profile_svg, profile_text
from drumline.schedules import generate
from fuzz_case import Case, command, put
from fuzz_mutations import json_text, rows_text, word
from profiles import SOME, model_profile

WORDS = (
    *("0F0", "1B0", "0I1", "0W1", "9F9", "0F999999999", "999999999F0", "1SEND_F0", "0RECV_B0", "0UNSHARD", "1RESHARD"),
    *("0REDUCE_GRAD", "1UPDATE3", "(0F1;1B0)OVERLAP_F_B", "(0F0;0F0)OVERLAP_F_B", "", " ", "0F", "F0", "x", "0F00"),
)


def programs() -> list[Program]:
    named = (("1f1b", 2, 3), ("zb-h1", 2, 3), ("interleaved-1f1b", 2, 4), ("zb-v", 2, 4), ("dualpipe-v", 2, 4))
    made = [generate(name, num_ranks=ranks, num_microbatches=microbatches) for name, ranks, microbatches in named]
    return [*made, *(lower(program) for program in made[:2])]


def action_case(folder: Path) -> Case:
    seeds = ("2F0", "13B7", "2I0", "0W11", "2SEND_F0", "3RECV_B1", "2UNSHARD", "2REDUCE_GRAD", "2UPDATE5")

    def case(chance: random.Random) -> None:
        text = word(chance.choice((*seeds, "(0F5;1B2)OVERLAP_F_B")), chance)
        found = Action.parse(text)
        assert str(found) == text
        assert Action.parse(str(found)) == found
        assert repr(found)

    return case


def program_case(folder: Path) -> Case:
    seeds = [program.format() for program in programs()]

    def case(chance: random.Random) -> None:
        path = put(folder / "own.csv", rows_text(chance.choice(seeds), chance, WORDS), chance)
        found = Program.load(path)
        assert Program.parse(found.format()) == found
        assert repr(found)
        assert str(found)
        verb = chance.choice(("check", "simulate", "show", "simulate --json", "check --json", "show --format svg"))
        command(*verb.split()[:1], path, *verb.split()[1:])

    return case


def costs_case(folder: Path) -> Case:
    made = programs()
    edges = {(0, 1): Edge(0.5), (1, 0): Edge(0.1, 1e9)}
    seeds = [
        Costs(forward=[2, 1], backward_input=[2, 1], backward_weight=0.5, comm=0.1, edges=edges).to_json(),
        Costs(activation_bytes=[8, 4], held_until_weight_bytes=3, weight_bytes=5.0, gradient_bytes=1).to_json(),
        Costs(recompute=[True, False], checkpoint_bytes=1, activation_bytes=4, overlap=False, reduce=1).to_json(),
        Costs(microbatch_factor=[1, 2, 1.5], overlapped=3, message_bytes=[4, 0], bytes_per_second=1e6).to_json(),
    ]

    def case(chance: random.Random) -> None:
        path = put(folder / "costs.json", json_text(chance.choice(seeds), chance), chance)
        found = Costs.load(path)
        assert Costs.from_json(json.dumps(found.to_json(), allow_nan=False)) == found
        assert repr(found)
        program = chance.choice(made)
        counts = ("--ranks", program.num_ranks, "--microbatches", program.num_microbatches)
        if chance.random() < 0.3:
            command("simulate", program.name, *counts, "--costs", path, chance.choice(("--json", "--intervals")))
        timeline = simulate(program, found)
        assert timeline.makespan >= 0
        assert repr(timeline)
        assert timeline.peak_activations
        assert timeline.causes is not None

    return case


def _profiles() -> list[ModelProfile]:
    return [
        model_profile([1e-3, 2e-3, 1e-3, 1e-3], rows=(1, 2), overheads=SOME),
        model_profile([1e-3] * 4, rows=(2,), tape=0.1, frozen=1),
    ]


def profile_case(folder: Path) -> Case:
    seeds = [json.loads(profile.to_json()) for profile in _profiles()]
    shapes: dict[str, Any] = {"from": 0, "to": 1, "points": [[64, 1e-5], [4096, 2e-5]], "latency": 1e-5}
    seeds[0]["links"] = [{**shapes, "seconds_per_byte": 1e-9}]
    seeds[0]["sizes"][0]["profile"]["layers"][0]["tied"] = [["emb", 10, 10]]

    def case(chance: random.Random) -> None:
        path = put(folder / "profile.json", json_text(chance.choice(seeds), chance), chance)
        found = ModelProfile.load(path)
        assert ModelProfile.from_json(found.to_json()) == found
        assert repr(found)
        assert profile_text(found)
        assert profile_svg(found)
        assert profile_page(found).encode()
        if chance.random() < 0.2:
            words = ("--ranks", 2, "--batch", 4, "--schedules", "1f1b", "--seconds", 0)
            command("plan", path, *words, *chance.choice(((), ("--json",), ("--memory", "1GiB"))))

    return case


def plan_case(folder: Path) -> Case:
    limited = plan(_profiles()[0], num_ranks=2, batch=4, memory_bytes=10**6, schedules=("1f1b", "zb-h1"), seconds=0)
    plain = plan(_profiles()[1], num_ranks=2, batch=8, schedules=("gpipe",), seconds=0)
    seeds = [json.loads(planned.best.to_json()) for planned in (limited, plain)]

    def case(chance: random.Random) -> None:
        path = put(folder / "plan.json", json_text(chance.choice(seeds), chance), chance)
        found = Plan.load(path)
        assert Plan.from_json(found.to_json()) == found
        assert repr(found)
        assert str(found)
        json.dumps(found.summary(), allow_nan=False)
        assert found.pipeline_settings
        assert found.step_seconds == found.step_seconds
        assert found.bubble == found.bubble
        assert found.stages_per_rank >= 0
        assert [rank_bytes.stash + rank_bytes.total for rank_bytes in found.rank_bytes]
        if not validate(found.program):
            assert simulate(found.program).makespan > 0

    return case
