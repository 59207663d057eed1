"""The page as text: its data, its escaping, and that it asks for nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from drumline.core.costs import Costs
from drumline.core.program import Program
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.report.draw.html import json_for_script, page, viewer_script
from drumline.report.draw.scene import OPS, document, explanations, scene
from drumline.schedules import generate, schedules
from matrices import long
from some import some
from unpacking import unpacked


def timeline(name: str = "1f1b", *, costs: Costs | None = None) -> Simulation:
    return simulate(generate(name, num_ranks=4, num_microbatches=8), costs)


class Parts(HTMLParser):
    """Collects scripts, styles, and every attribute of every tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inner: list[tuple[str, str]] = []
        self.open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open = tag

    def handle_endtag(self, tag: str) -> None:
        self.open = ""

    def handle_data(self, data: str) -> None:
        self.inner.append((self.open, data))

    @property
    def scripts(self) -> list[str]:
        return [data for tag, data in self.inner if tag == "script"]


def data_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Parts(text).scripts[0])
    return found


def parts_of(columns: dict[str, str]) -> list[tuple[int, int, int]]:
    stage, op, microbatch = (map(int, unpacked(columns[name])) for name in ("stage", "op", "microbatch"))
    return list(zip(stage, op, microbatch, strict=True))


def starts(drawn: dict[str, Any], rank: int) -> list[float]:
    return [ticks / drawn["ticks_per_second"] for ticks in unpacked(drawn["rows"][rank]["start"])]


def spelled(drawn: dict[str, Any], rank: int) -> list[str]:
    row, ops = drawn["rows"][rank], list(OPS)
    texts = []
    seconds = dict(zip(unpacked(row["second"]["index"]), parts_of(row["second"]), strict=True))
    for index, part in enumerate(parts_of(row)):
        parts = [part, *([seconds[index]] if index in seconds else [])]
        words = [f"{stage}{ops[op].value}{'' if m < 0 else m}" for stage, op, m in parts]
        texts.append(f"({';'.join(words)})OVERLAP_F_B" if len(words) > 1 else words[0])
    return texts


@pytest.mark.parametrize("name", schedules())
def test_the_columns_spell_the_program(name: str) -> None:
    drawn = timeline(name)
    shown = scene(drawn)
    for rank, track in enumerate(drawn.tracks):
        assert spelled(shown, rank) == [str(action) for action in track.actions]
        assert starts(shown, rank) == pytest.approx(list(track.starts))
    assert shown["boxes"] == sum(len(track.actions) for track in drawn.tracks)


def test_idle_intervals_carry_words_only_where_the_cause_does_not_say_the_same() -> None:
    shown = document([timeline()])
    idle = [row["idle"] for row in shown["timelines"][0]["why"]["rows"]]
    assert (idle[0]["start"][0], idle[0]["seconds"][0], idle[0]["words"][0]) == (4, 6, "")
    assert shown["sentences"][shown["causes"][unpacked(idle[0]["cause"])[0]]] == "{before} waits for {needed}"
    assert idle[3]["words"][-1] == "the pipeline drains; 0B7 of rank 0 ends last"


def test_times_count_from_the_start_of_the_timeline() -> None:
    late = simulate(Program.parse("1F0,1B0\n0F0,0B0"))
    assert min(starts(scene(late), rank)[0] for rank in range(2)) == 0


def test_awkward_times_keep_nine_digits() -> None:
    drawn = timeline(costs=Costs(forward=np.pi, backward_input=np.e))
    np.testing.assert_allclose(starts(scene(drawn), 2), drawn.tracks[2].starts, rtol=0, atol=1e-8 * drawn.makespan)


def test_memory_steps_reach_the_peak_and_return() -> None:
    drawn = timeline()
    for rank, row in some(enumerate(scene(drawn)["why"]["rows"])):
        time, value = unpacked(row["memory"]["time"]), unpacked(row["memory"]["value"])
        assert max(value) == drawn.peak_activations[rank]
        assert value[-1] == 0
        assert time == sorted(set(time))


def test_queues_tell_only_of_edges_where_something_waited() -> None:
    queues = scene(timeline())["why"]["queues"]
    assert [(queue["source"], queue["target"]) for queue in queues] == [(0, 1), (1, 2), (2, 3)]
    assert unpacked(queues[0]["time"]) == [0, 4, 10]
    assert unpacked(queues[0]["value"]) == [0, 1, 0]


@pytest.mark.parametrize("name", schedules())
def test_the_critical_path_points_at_its_boxes(name: str) -> None:
    drawn = timeline(name)
    path = scene(drawn)["why"]["critical"]
    places = zip(map(int, unpacked(path["rank"])), map(int, unpacked(path["index"])), strict=True)
    found = [(rank, drawn.tracks[rank].actions[index]) for rank, index in places]
    assert found == [(span.rank, span.action) for span in drawn.critical_path]


def test_needs_point_at_the_input() -> None:
    drawn = timeline()
    first, second, *_ = scene(drawn)["why"]["rows"]
    rank, index = int(unpacked(second["need_rank"])[0]), int(unpacked(second["need_index"])[0])
    assert str(drawn.tracks[rank].actions[index]) == "0F0"
    assert unpacked(first["need_rank"])[0] == -1


def test_ticks_are_as_coarse_as_the_times_allow() -> None:
    ticks = [scene(timeline(costs=Costs(forward=forward)))["ticks_per_second"] for forward in (2, 1.5, 0.25)]
    assert ticks == [1, 10, 100]


def test_a_picture_can_go_without_its_explanations() -> None:
    drawn = timeline()
    assert scene(drawn, explained=False) == {**scene(drawn), "why": None}
    assert scene(drawn)["why"] == explanations(drawn)


def test_a_page_holds_every_timeline_and_the_comparison() -> None:
    rows = [{"name": "1f1b", "bubble": 0.27, "peak_share": 4, "fits": False, "more": object()}]
    shown = data_of(page([timeline(), timeline("zb-v")], rows=rows, advice="Take zb-v."))
    assert [item["name"] for item in shown["timelines"]] == ["1f1b", "zb-v"]
    assert shown["points"] == [{"name": "1f1b", "bubble": 0.27, "peak_share": 4.0, "fits": False}]
    assert shown["advice"] == "Take zb-v."


def test_hostile_names_stay_text() -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u2028&\ud800"
    drawn = simulate(Program(timeline().program.rows, name=evil))
    row = {"name": evil, "bubble": 0.1, "peak_share": 1, "fits": True}
    text = page([drawn], title=evil, advice=evil, rows=[row])
    parts = Parts(text)
    assert [tag for tag, _ in parts.tags].count("script") == 2
    assert "img" not in {tag for tag, _ in parts.tags}
    assert data_of(text)["timelines"][0]["name"] == evil
    assert not re.search("[<>&\u2028\u2029]", parts.scripts[0])
    text.encode()


def test_the_page_refers_to_nothing_outside() -> None:
    text = page([timeline()])
    assert set(re.findall(r"https?://[^\"'\s]*", text)) == {"http://www.w3.org/2000/svg"}
    for tag, attributes in some(Parts(text).tags):
        assert "src" not in attributes, tag
        assert not (attributes.get("href") or "data:").startswith(("http", "//", "/"))
        assert not any(name.startswith("on") or name == "style" for name in attributes), (tag, attributes)
    assert "url(" not in text
    assert "import(" not in text


def test_the_policy_allows_only_what_is_in_the_page() -> None:
    text = page([timeline()])
    parts = Parts(text)
    policy = next(a["content"] for tag, a in parts.tags if tag == "meta" and "http-equiv" in a) or ""
    digest = base64.b64encode(hashlib.sha256(parts.scripts[1].encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy


def test_the_script_cannot_end_its_own_element() -> None:
    assert "</script" not in viewer_script().lower()
    assert "<!--" not in viewer_script()


def test_numbers_that_json_has_not_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        json_for_script(float("nan"))


def test_the_same_timelines_give_the_same_bytes() -> None:
    assert page([timeline("dualpipe")]) == page([timeline("dualpipe")])


@long
@pytest.mark.slow
def test_fifty_thousand_boxes_stay_below_two_megabytes() -> None:
    drawn = simulate(generate("1f1b", num_ranks=16, num_microbatches=1600))
    text = page([drawn])
    assert document([])["timelines"] == []
    assert data_of(text)["timelines"][0]["boxes"] == 51200
    assert len(text) < 2_000_000
