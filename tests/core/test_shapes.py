"""Every field of the costs against every shape that it does not take."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import pytest

from drumline.core.costs import SHAPES, Costs, Edge
from drumline.core.errors import CostsError
from drumline.core.placement import Placement
from drumline.core.prove.validate import validate
from drumline.core.simulate.simulate import makespans, simulate
from drumline.core.timeline.idle import Limit
from drumline.plan.search.bounds.instance import Instance
from drumline.report.compare import compare
from drumline.schedules import generate
from refused import refused, saying

SECONDS_AND_BYTES = [
    "forward",
    "backward_input",
    "backward_weight",
    "backward",
    "overlapped",
    "update",
    "reduce",
    "pack",
    "message_bytes",
    "activation_bytes",
    "held_until_weight_bytes",
    "checkpoint_bytes",
    "key_value_bytes",
    "weight_bytes",
    "gradient_bytes",
    "optimizer_bytes",
]
LISTS = [*SECONDS_AND_BYTES, "microbatch_factor", "recompute"]
SINGLE = ["comm", "bytes_per_second", "overlap", "attention"]
BY_SLICE = ["slice_lengths", "slice_factor"]
EVERY = [*LISTS, *BY_SLICE, *SINGLE]
OPTIONAL = ["backward", "overlapped", "activation_bytes", "held_until_weight_bytes", "slice_factor"]
NEED_ACTIVATIONS = ("held_until_weight_bytes", "key_value_bytes")

# Values that no field takes; None and bools are told apart below.
NOWHERE: list[Any] = [[], (), [[1, 1]], [[True]], [None, None], "1", "", ["1", "1"], {}, {"0": 1}, -1, [1, -1], b"ab"]
NOWHERE += [math.nan, [1.0, math.nan], -math.inf, [math.inf, 1], 1e300, 10**5000, 1 + 1j]


@pytest.mark.parametrize(
    ("value", "wrong"),
    [([[1, 1], [1]], "slice_factor has lists of several lengths"), ([[1, 1], 1], "slice_factor has lists of several"),
     ([[1, 1], [1, "1"]], "slice_factor is '1'"), ([[[1]]], "slice_factor is "), ([[]], "slice_factor is an empty")],
)  # fmt: skip
def test_what_lists_of_stages_do_not_take_is_refused(value: Any, wrong: str) -> None:
    with refused(CostsError, wrong):
        Costs(slice_factor=value)
    with refused(CostsError, "slice_factor has 3 values", expected="one number, or one for each of the 2 stages"):
        Costs(slice_factor=[[1, 1]] * 3).check_counts(2, 4, 2)
    with refused(CostsError, "slice_factor has 2 values", expected="one number, or one for each of the 4 slices"):
        Costs(slice_factor=[[1, 1]] * 2).check_counts(2, 4, 4)


def given(name: str, value: Any) -> dict[str, Any]:
    """Return the field beside what it needs."""
    return {name: value} | ({"activation_bytes": 1} if name in NEED_ACTIVATIONS else {})


def test_every_field_has_a_shape() -> None:
    assert {*SHAPES, "edges"} == {field.name for field in fields(Costs)} == {*EVERY, "edges"}


@pytest.mark.parametrize("value", NOWHERE, ids=lambda value: f"{value!r:.20}" if value != 10**5000 else "huge")
@pytest.mark.parametrize("name", EVERY)
def test_what_no_field_takes_is_refused_with_the_field(name: str, value: Any) -> None:
    if name == "slice_factor" and value == [[1, 1]]:
        value = [[1, 1], [1, -1]]  # one list per stage is known
    with refused(CostsError, rf"^{name} is "):
        Costs(**given(name, value))
    try:
        text = json.dumps(given(name, value))
    except (TypeError, ValueError):
        return  # JSON cannot spell it
    with refused(CostsError, rf"^{name} is "):
        Costs.from_json(text)


@pytest.mark.parametrize("name", EVERY)
def test_flags_are_true_or_false_and_numbers_are_neither(name: str) -> None:
    wrong: list[Any] = [1, 0, 1.0] if SHAPES[name].flag else [True, False]
    wrong += [[item] * 2 for item in wrong]
    for value in wrong:
        with refused(CostsError, f"^{name} is "):
            Costs(**given(name, value))
        with refused(CostsError, f"^{name} is "):
            Costs.from_json(json.dumps(given(name, value)))


@pytest.mark.parametrize("name", EVERY)
def test_only_what_has_another_default_may_be_none(name: str) -> None:
    if name in OPTIONAL:
        assert getattr(Costs.from_json(json.dumps(given(name, None))), name) is None
    else:
        with refused(CostsError, f"^{name} is None"):
            Costs(**given(name, None))
    if name not in SINGLE:
        with refused(CostsError, f"^{name} is None"):
            Costs(**given(name, [True if name == "recompute" else 1, None]))


@pytest.mark.parametrize("name", SINGLE)
def test_what_is_not_per_stage_takes_no_list(name: str) -> None:
    with refused(CostsError, f"^{name} is a list"):
        Costs(**given(name, [True] * 3 if name == "overlap" else [0, 0, 0.5]))


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("length", [1, 3, 5])
def test_a_list_of_another_length_is_refused_also_where_nothing_reads_it(name: str, length: int) -> None:
    program = generate("1f1b", num_ranks=4, num_microbatches=4)
    costs = Costs(**given(name, [name == "recompute" or 1] * length))
    says = saying(f"^{name} has {length} values", expected="each of the 4")
    with refused(CostsError, **says):
        simulate(program, costs)
    with refused(CostsError, **says):
        makespans(program, [Costs(), costs])
    with refused(CostsError, **says):
        validate(program, limit=Limit(max_activations=4), costs=costs)
    with refused(CostsError, **says):
        Instance(costs, Placement.linear(4), 4)
    fits = Costs(**given(name, [name == "recompute" or 1] * 4))
    assert simulate(program, fits).makespan > 0


@pytest.mark.parametrize("name", BY_SLICE)
def test_slices_have_a_value_each(name: str) -> None:
    program = generate("1f1b", num_ranks=2, num_microbatches=2, slices=4)
    for length in (1, 3, 5):
        with refused(CostsError, f"^{name} has {length} values", expected="each of the 4 slices"):
            simulate(program, Costs(**given(name, [1] * length)))
    assert simulate(program, Costs(**given(name, [1] * 4))).makespan > 0


@pytest.mark.parametrize(
    ("given_costs", "what"),
    [
        ({"attention": 1.5}, "attention is 1.5"),
        ({"slice_lengths": [2, 0]}, "slice_lengths is"),
        ({"key_value_bytes": 1}, "needs activ"),
    ],
)
def test_shares_of_slices_are_possible(given_costs: dict[str, Any], what: str) -> None:
    with refused(CostsError, what):
        Costs(**given_costs)


def test_a_comparison_takes_a_factor_for_every_microbatch_and_no_fewer() -> None:
    with refused(CostsError, "^microbatch_factor has 2 values", expected="the 4 microbatches"):
        compare(2, num_microbatches=4, costs=Costs(microbatch_factor=[1, 2]))


@pytest.mark.parametrize(
    "edges",
    [None, [], [(0, 1)], {0: Edge()}, {(0, 1, 2): Edge()}, {(0, True): Edge()}, {(-1, 0): Edge()}, {(0, 1): 0.5}],
    ids=repr,
)
def test_edges_are_links_by_pairs_of_ranks(edges: Any) -> None:
    with refused(CostsError, r"^edges "):
        Costs(edges=edges)


@pytest.mark.parametrize(
    "edges",
    [
        None,
        5,
        {"from": 0, "to": 1},
        [[0, 1]],
        [{"from": True, "to": 0}],
        [{"from": 0, "to": 1.0}],
        [{"from": 0, "to": 1}, {"from": 0, "to": 1, "latency": 1}],
    ],
    ids=repr,
)
def test_edges_in_a_file_are_a_list_of_single_links(edges: Any) -> None:
    with refused(CostsError, r"^edges "):
        Costs.from_json(json.dumps({"edges": edges}))


@pytest.mark.parametrize("value", [None, [], [0.5], "1", True, math.nan, -1.0])
@pytest.mark.parametrize("name", ["latency", "bytes_per_second"])
def test_a_link_has_single_numbers(name: str, value: Any) -> None:
    with refused(CostsError, f"^{name} of edge 0->1 is "):
        Costs(edges={(0, 1): Edge(**{name: value})})
    says = f"^{name} is nan" if value is math.nan else f"^{name} of edge 0->1 is "
    with refused(CostsError, says):
        Costs.from_json(json.dumps({"edges": [{"from": 0, "to": 1, name: value}]}))


def test_a_number_of_too_many_digits_is_refused() -> None:
    with refused(CostsError, r"^the JSON contains a number with thousands of digits"):
        Costs.from_json('{"forward": ' + "1" * 5000 + "}")
