"""The standalone SVG: well-formed, complete, escaped, and in colours that stay apart."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import numpy.typing as npt
import pytest

from drumline.core.action import TIMED_OPS, Op
from drumline.core.costs import Costs
from drumline.core.program import Program
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.core.timeline.idle import Cause
from drumline.report.draw.palette import IDLE, PAPER, SHADES, TRACK
from drumline.report.draw.sheet import hatched
from drumline.report.draw.svg import svg
from drumline.schedules import generate, schedules
from some import some

NAMESPACE = "{http://www.w3.org/2000/svg}"


def timeline(name: str = "1f1b", *, costs: Costs | None = None) -> Simulation:
    return simulate(generate(name, num_ranks=4, num_microbatches=8), costs)


def named(name: str) -> Simulation:
    return simulate(Program(timeline().program.rows, name=name))


def texts(picture: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(picture).iter(f"{NAMESPACE}text")]


@pytest.mark.parametrize("name", schedules())
def test_every_timed_action_is_one_box(name: str) -> None:
    drawn = timeline(name)
    boxes = [node for node in ElementTree.fromstring(svg(drawn)).iter(f"{NAMESPACE}g") if node.get("class") == "box"]
    assert len(boxes) == sum(action.op in TIMED_OPS for row in drawn.program.rows for action in row)


def test_boxes_of_a_rank_stand_where_its_times_are() -> None:
    drawn = timeline()
    first = [
        next(node.iter(f"{NAMESPACE}rect"))
        for node in ElementTree.fromstring(svg(drawn)).iter(f"{NAMESPACE}g")
        if node.get("class") == "box"
    ][: len(drawn.tracks[0].actions)]
    left = [float(node.get("x", "nan")) for node in first]
    scale = (left[-1] - left[0]) / drawn.tracks[0].starts[-1]
    np.testing.assert_allclose(left, [left[0] + scale * start for start in drawn.tracks[0].starts], atol=0.02)


def test_an_overlapped_pair_shows_both_halves() -> None:
    pair = simulate(Program.parse("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2"))
    box = [n for n in ElementTree.fromstring(svg(pair)).iter(f"{NAMESPACE}g") if n.get("class") == "box"][2]
    assert [node.text for node in box.iter(f"{NAMESPACE}text")] == ["2", "0"]
    assert len(list(box.iter(f"{NAMESPACE}rect"))) == 2


def test_idle_share_and_peak_stand_behind_every_rank() -> None:
    shown = texts(svg(timeline()))
    assert shown.count("27.3%") == 4
    after = [shown[shown.index(f"rank {rank}") + 2] for rank in range(4)]
    assert after == ["4", "3", "2", "1"]


def test_peak_is_in_bytes_where_they_are_known() -> None:
    assert "1 GiB" in texts(svg(timeline(costs=Costs(activation_bytes=2**28))))


def test_legend_names_exactly_the_ops_that_occur() -> None:
    shown = texts(svg(timeline("zb-h1")))
    assert {"forward", "input gradient", "weight gradient"} <= set(shown)
    assert "backward" not in shown


@pytest.mark.parametrize("width", [1, 320, 500, 1600])
def test_nothing_is_drawn_beyond_the_sheet(width: int) -> None:
    root = ElementTree.fromstring(svg(timeline("dualpipe"), width=width))
    sheet = float(root.get("width", "0"))
    assert sheet == max(width, 320)
    for node in some(root.iter(f"{NAMESPACE}rect")):
        if not node.get("width", "").endswith("%"):
            assert float(node.get("x", "0")) + float(node.get("width", "0")) <= sheet


def test_names_are_escaped_and_control_characters_dropped() -> None:
    picture = svg(named('<script>alert("1")</script>\x00\x1b & "'))
    root = ElementTree.fromstring(picture)
    assert not list(root.iter(f"{NAMESPACE}script"))
    assert '<script>alert("1")</script> & "' in texts(picture)
    assert "<b>" in texts(svg(timeline(), title="<b>"))


def test_the_only_address_is_the_namespace() -> None:
    assert svg(timeline()).count("http") == 1


def test_the_same_timeline_gives_the_same_bytes() -> None:
    assert svg(timeline("zb-v")) == svg(timeline("zb-v"))


def test_a_program_of_nothing_is_still_a_picture() -> None:
    ElementTree.fromstring(svg(simulate(Program.of([[], []]))))


# Machado, Oliveira and Fernandes (2009), full severity, on linear RGB.
VISION: dict[str, npt.NDArray[np.float64]] = {
    "normal": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def linear(colour: str) -> npt.NDArray[np.float64]:
    rgb = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISION)
def test_ops_differ_visibly_for_every_kind_of_sight(vision: str) -> None:
    ops = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.UPDATE)
    for op, other in some(itertools.combinations(ops, 2)):
        for a, b in some(itertools.product(SHADES[op][:2], SHADES[other][:2])):
            distance = np.linalg.norm(lab(VISION[vision] @ linear(a)) - lab(VISION[vision] @ linear(b)))
            assert distance > 10, (op, other, distance)


@pytest.mark.parametrize("op", SHADES)
def test_numbers_are_readable_on_their_boxes(op: Op) -> None:
    luminance = [float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in SHADES[op]]
    *fills, _, ink = luminance
    for fill in some(fills):
        assert (max(fill, ink) + 0.05) / (min(fill, ink) + 0.05) >= 4.5


def contrast(name: str, other: str) -> float:
    dark, light = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (name, other))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("cause", Cause)
def test_idle_time_stands_out_from_its_background(cause: Cause) -> None:
    light, dark, *_ = IDLE[cause]
    for paper in some((PAPER, TRACK)):
        assert contrast(light, paper) >= 3
    for paper in some(("#12161b", "#1c2228")):
        assert contrast(dark, paper) >= 3


@pytest.mark.parametrize("vision", VISION)
def test_causes_differ_in_their_lines_or_visibly_in_their_colour(vision: str) -> None:
    for hatch, other in some(itertools.combinations(IDLE.values(), 2)):
        if hatch.lines != other.lines:
            continue
        for a, b in some(((hatch.light, other.light), (hatch.dark, other.dark))):
            distance = np.linalg.norm(lab(VISION[vision] @ linear(a)) - lab(VISION[vision] @ linear(b)))
            assert distance > 10, (hatch, other, distance)


def test_idle_time_is_hatched_by_its_cause() -> None:
    tree = ElementTree.fromstring(svg(timeline("1f1b")))
    drawn = {item.get("class"): item.get("stroke") for item in tree.iter(f"{NAMESPACE}path") if item.get("class")}
    assert drawn == {f"idle {cause}": IDLE[cause].light for cause in (Cause.FILL, Cause.DRAIN, Cause.WAIT)}


def test_lines_stay_inside_of_what_they_hatch() -> None:
    for lines in some(("/", "\\", "|", "-", "/\\", "|-")):
        numbers = [float(value) for value in re.findall(r"[MLHV ]([\d.]+)", hatched(10, 20, 31, 17, lines))]
        assert numbers
        assert min(numbers) >= 10
        assert max(numbers) <= 41
