"""Machines and layouts as JSON: read, written back, and refused by name."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.core.errors import PlanError
from drumline.plan.cluster.hardware import MACHINES, cluster, load, machine
from drumline.plan.cluster.layout import RECOMPUTE, Layout
from drumline.plan.cluster.practice import Practice
from refused import refused, saying
from train_configs import layout_of

MINE = {
    "name": "mine",
    "flops_per_second": 1e14,
    "memory_bytes": 2e10,
    "memory_bytes_per_second": 1e12,
    "node_bytes_per_second": 5e10,
    "network_bytes_per_second": 1e10,
}
COUNTS = st.integers(1, 64)
LAYOUTS = st.builds(
    Layout,
    batch=COUNTS,
    tensor=COUNTS,
    zero=st.integers(0, 3),
    sequence_parallel=st.booleans(),
    recompute=st.sampled_from(RECOMPUTE),
    counts=st.lists(COUNTS, max_size=4).map(tuple),
    practice=st.builds(Practice, flash_attention=st.booleans(), accumulation_bytes=st.integers(0, 20)),
)


@given(LAYOUTS)
def test_every_layout_survives_json(layout: Layout) -> None:
    assert layout_of(json.loads(json.dumps(asdict(layout)))) == layout


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_survives_json(name: str) -> None:
    table = json.loads(json.dumps(asdict(MACHINES[name])))
    assert machine({**table.pop("device"), **table}) == MACHINES[name]


def test_a_machine_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**MINE, "devices_per_node": 4, "reach": {"memory": 0.9}}), encoding="utf-8")
    assert cluster(str(path), 16).devices_per_node == 4
    assert load(path).device.reach == replace(MACHINES["a100-80"].device.reach, memory=0.9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"flops_per_sec": 1},
            saying("unknown key 'flops_per_sec' in the machine", fix=r"did you mean flops_per_second\?"),
        ),
        ({"memory_bytes": "80 GB"}, saying("memory_bytes of the machine is '80 GB'", expected="a number")),
        ({"memory_bytes": True}, saying("memory_bytes of the machine is True", expected="a number")),
        ({"memory_bytes": -1}, saying("memory_bytes of mine is -1", expected="a number above 0")),
        ({"memory_bytes": float("nan")}, saying("memory_bytes of mine is nan")),
        ({"reach": {"product": 1.5}}, saying("the reach of product is 1.5", expected="above 0 and up to 1")),
        (
            {"reach": {"prodcut": 0.5}},
            saying("unknown key 'prodcut' in the machine's reach", fix=r"did you mean product\?"),
        ),
        (
            {"memory_bytes": 1e-320},
            saying("memory_bytes of the machine is 9.99989e-321", expected="a number from 1 to 1e.30"),
        ),
        ({"node_reach": 1e-300}, saying("node_reach of the machine is 1e-300", expected="a number from 1e-06 to 1")),
        ({"devices_per_node": 0}, saying("devices_per_node is 0", expected="1 or more")),
        ({"network_bytes_per_second": 0}, saying("a link carries 0.0 bytes per second", expected="more than 0")),
    ],
)
def test_a_machine_that_cannot_be_is_refused(change: dict[str, object], message: dict[str, str]) -> None:
    with refused(PlanError, **message):
        machine({**MINE, **change}).cluster(8)


@pytest.mark.parametrize("missing", MINE)
def test_a_machine_needs_its_numbers(missing: str) -> None:
    with refused(PlanError, f"the machine has no {missing}$", expected=r"a number|text"):
        machine({name: value for name, value in MINE.items() if name != missing})


def test_a_file_that_is_no_machine_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{", encoding="utf-8")
    for place in (path, tmp_path / "absent.json"):
        with refused(PlanError, place.name, expected="a machine"):
            load(place)
    path.write_text("[]", encoding="utf-8")
    with refused(PlanError, "the JSON holds a list, not an object"):
        load(path)


def test_unknown_hardware_is_refused_with_the_nearest() -> None:
    with refused(PlanError, "unknown hardware 'a100-800'", fix=r"did you mean a100-80\?"):
        cluster("a100-800", 8)
    with refused(PlanError, "unknown hardware 'zzz'", fix="choose one of a100-40, a100-80"):
        cluster("zzz", 8)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], saying("the layout is a list", expected="an object")),
        ({}, saying("batch of the layout is missing", expected="a whole number")),
        ({"batch": 8.5}, saying("batch of the layout is 8.5", expected="a whole number")),
        (
            {"batch": 8, "sequence_parallel": 1},
            saying("sequence_parallel of the layout is 1", expected="true or false"),
        ),
        ({"batch": 8, "counts": [1, "2"]}, saying("counts of the layout hold '2'", expected="whole numbers")),
        (
            {"batch": 8, "practice": {"flash": True}},
            saying("unknown key 'flash' of a layout's practice", fix="did you mean flash"),
        ),
    ],
)
def test_an_object_that_is_no_layout_is_refused(table: object, message: dict[str, str]) -> None:
    with refused(PlanError, **message):
        layout_of(table)
