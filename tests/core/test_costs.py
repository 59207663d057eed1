"""Costs: read from JSON, refused with the bad value, and completed from their halves."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.core.costs import Costs, Edge
from drumline.core.errors import CostsError
from refused import refused, saying


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not json", saying("not JSON")),
        ("[1, 2]", saying("the JSON holds a list, not an object")),
        ('{"foward": 1}', saying("unknown cost 'foward'", fix="did you mean forward")),
        ('{"forward": "fast"}', saying("forward is 'fast'")),
        ('{"forward": -1}', saying("forward is -1")),
        ('{"forward": [1, null]}', saying("forward is None")),
        ('{"forward": NaN}', saying("forward is nan")),
        ('{"forward": Infinity}', saying("forward is inf")),
        ('{"forward": true}', saying("forward is True")),
        ('{"forward": 1e308}', saying("forward is 1e")),
        ('{"activation_bytes": 1e300}', saying("activation_bytes is 1e")),
        ('{"held_until_weight_bytes": 5}', saying("needs activation_bytes")),
        ('{"forward": 1, "forward": 2}', saying("the name 'forward' appears twice")),
        ('{"edges": [{"from": 1, "to": 1}]}', saying("edges has a link 1->1")),
        ('{"bytes_per_second": 1e-300}', saying("bytes_per_second is 1e-300")),
        ('{"overlap": 1}', saying("overlap is 1")),
        ('{"bytes_per_second": 0}', saying("bytes_per_second is 0")),
        ('{"edges": [{"from": 0}]}', saying("edges contains")),
        ('{"edges": [{"from": 0, "to": -1}]}', saying("edges contains")),
        ('{"edges": [{"from": 0, "to": 1, "latency": -2}]}', saying("latency of edge 0->1 is -2")),
        ("[" * 100_000, saying("the JSON is nested deeper than 100 levels")),
        ('{"activation_bytes": [4, null]}', saying("activation_bytes is None", expected="a number, or one per stage")),
        ('{"bytes_per_second": [5, 5]}', saying("bytes_per_second is a list")),
        ('{"comm": []}', saying("comm is a list")),
    ],
)
def test_bad_costs_are_refused_with_the_value(text: str, says: dict[str, str]) -> None:
    with refused(CostsError, **says):
        Costs.from_json(text)


def test_costs_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"forward": [1, 2], "edges": [{"from": 0, "to": 1, "latency": 0.5, "bytes_per_second": 10}]}')
    costs = Costs.load(path)
    assert costs.edge(0, 1) == Edge(0.5, 10)
    assert costs.edge(1, 0) == Edge()
    with refused(CostsError, r"none\.json"):
        Costs.load(tmp_path / "none.json")
    path.write_text('{"fwd": 1}')
    with refused(CostsError, r"costs\.json: unknown cost 'fwd'"):
        Costs.load(path)


def test_a_whole_backward_is_both_halves_unless_given() -> None:
    assert Costs(backward_input=2, backward_weight=3).per_stage("backward", 2) == (5, 5)
    assert Costs(backward=4).per_stage("backward", 2) == (4, 4)
