"""The trace against the rules of Chrome's event format as Perfetto's importer reads them."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.core.costs import Costs
from drumline.core.measured.measured import Measured
from drumline.core.measured.record import BETWEEN
from drumline.core.program import Program
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.report.draw.trace import trace, traces
from matrices import examples
from programs import NAMES, build, costs_for, programs
from records import PROGRAM, two_ranks


def parsed(timeline: Simulation) -> dict[str, Any]:
    document = json.loads(gzip.decompress(trace(timeline)))
    assert isinstance(document, dict)
    return document


def check(document: dict[str, Any]) -> None:
    """Raise AssertionError where the importer would drop or misread something."""
    events = document["traceEvents"]
    named: set[tuple[int, int]] = set()
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    flows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    counters: dict[tuple[int, str], list[float]] = defaultdict(list)
    seen_other = False
    for event in events:
        assert {"ph", "pid", "name"} <= event.keys()
        if event["ph"] == "M":
            assert not seen_other, "names come first"
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
            continue
        seen_other = True
        assert event["ts"] >= 0
        thread = (event["pid"], event["tid"])
        if event["ph"] == "X":
            assert event["dur"] > 0
            assert thread in named, event
            slices[thread].append((round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)))
        elif event["ph"] in ("s", "f"):
            assert event["ph"] not in flows[event["id"]]
            flows[event["id"]][event["ph"]] = event
        elif event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
            assert next(iter(event["args"].values())) >= 0
            counters[event["pid"], event["name"]].append(event["ts"])
        else:
            assert event["ph"] == "i"
            assert event["s"] == "t"
    for thread, listed in slices.items():
        listed.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(listed)), f"slices overlap on {thread}"
    for both in flows.values():
        assert both.keys() == {"s", "f"}
        assert both["f"]["bp"] == "e"
        assert both["s"]["ts"] <= both["f"]["ts"]
        for end in both.values():
            at = round(end["ts"] * 1000)
            bound = [low for low, high in slices[end["pid"], end["tid"]] if low <= at < high]
            assert bound, "a flow must begin and end inside a slice"
    for times in counters.values():
        assert times == sorted(times)


@pytest.mark.parametrize("name", NAMES)
def test_every_schedules_trace_keeps_the_rules(name: str) -> None:
    costs = Costs(comm=0.3, activation_bytes=10, message_bytes=4, bytes_per_second=9, reduce=1.5, update=0.5)
    timeline = simulate(build(name, 4, 6), costs)
    document = parsed(timeline)
    check(document)
    compute = [event for event in document["traceEvents"] if event["ph"] == "X" and event["tid"] == 1]
    assert len(compute) == sum(len(track.actions) for track in timeline.tracks)
    starts = [event for event in document["traceEvents"] if event["ph"] == "s"]
    assert len(starts) == len(timeline.transfers)


@settings(max_examples=examples(40))
@given(programs(max_ranks=4, max_microbatches=5), st.data())
def test_random_costs_keep_the_rules(program: Program, data: st.DataObject) -> None:
    check(parsed(simulate(program, data.draw(costs_for(program)))))


def test_messages_under_way_at_once_get_threads_of_their_own() -> None:
    document = parsed(simulate(Program.parse("0F0,0F1,0F2\n1F0,1F1,1F2"), Costs(comm=5)))
    names = {event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"}
    assert {"to rank 1", "to rank 1 (2)", "to rank 1 (3)"} <= names


def test_idle_slices_say_why() -> None:
    document = parsed(simulate(build("1f1b", 4, 8)))
    why = [event["args"]["why"] for event in document["traceEvents"] if event.get("cat") == "idle"]
    assert "rank 0 idle 6 from 4: 0B0 waits for 1B0 of rank 1" in why


def test_arrows_of_two_timelines_are_told_apart() -> None:
    simulation, other = simulate(build("1f1b", 2, 3), Costs(comm=0.3)), simulate(build("zb-v", 3, 2))
    document = json.loads(gzip.decompress(traces({"one": simulation, "other": other})))
    names = [event for event in document["traceEvents"] if event["ph"] == "M"]
    rest = [event for event in document["traceEvents"] if event["ph"] != "M"]
    check({"traceEvents": names + rest})
    arrows = [event for event in rest if event["ph"] == "s"]
    assert len({event["id"] for event in arrows}) == len(arrows) == len(simulation.transfers) + len(other.transfers)
    # An arrow begins and ends on ranks of the same timeline.
    ends = {event["id"]: event["pid"] for event in rest if event["ph"] == "f"}
    assert all((event["pid"] < 2) is (ends[event["id"]] < 2) for event in arrows)


def test_equal_timelines_give_equal_files() -> None:
    assert trace(simulate(build("zb-v", 3, 4))) == trace(simulate(build("zb-v", 3, 4)))


def test_a_measured_step_shows_what_came_before_it() -> None:
    waited = [BETWEEN.index("data"), 400, 900, BETWEEN.index("update"), 900, 990]
    records = tuple(replace(rank, between=waited) for rank in two_ranks(begin_ns=1000))
    document = json.loads(gzip.decompress(trace(Measured(PROGRAM, records))))
    between = [event for event in document["traceEvents"] if event.get("cat") == "between steps"]
    assert [event["name"] for event in between] == ["data", "update"] * 2
    assert min(event["ts"] for event in document["traceEvents"] if "ts" in event) == 0.0
    check(document)
