"""The explore page in a real browser, and its server without one."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser.windows import Windows
from drumline.core.costs import Costs
from drumline.core.simulate.simulate import simulate
from drumline.report.draw.scene import document
from drumline.report.explore_server import ExploreServer
from drumline.schedules import generate


@pytest.fixture(scope="module")
def server() -> Iterator[ExploreServer]:
    with ExploreServer(0) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join(timeout=10)


ANSWERED = "html[data-answered]"


@pytest.fixture
def page(windows: Windows, server: ExploreServer) -> Iterator[Any]:
    opened = windows.open(server.address, ANSWERED)
    yield opened.page
    assert opened.troubles == []
    assert [url for url in opened.requests if leaves(url, server)] == []


def leaves(url: str, server: ExploreServer) -> bool:
    return not url.startswith((server.address, "data:", "blob:"))


def after(page: Any, act: Any) -> None:
    """Do something and wait until the page has shown the answer to it."""
    turn = int(page.evaluate("document.documentElement.dataset.answered"))
    act()
    # By asking: the page's policy forbids the evaluation that Playwright's own waiting does inside of it.
    for _ in range(8000):
        if int(page.evaluate("document.documentElement.dataset.answered")) > turn:
            return
        page.wait_for_timeout(25)
    raise AssertionError("the page did not answer within 200 seconds")


def figure(page: Any, name: str) -> str:
    return str(page.locator(f'[data-figure="{name}"] b').inner_text())


def slide(page: Any, name: str, value: float) -> None:
    after(page, lambda: page.locator(f"input[name={name}]").fill(str(value)))


def test_sliders_change_the_numbers_to_those_of_simulate(page: Any) -> None:
    after(page, lambda: page.select_option("select[name=schedule]", "interleaved-1f1b"))
    for name, value in (("ranks", 6), ("microbatches", 12), ("stages_per_rank", 3), ("forward", 1.5), ("comm", 0.25)):
        slide(page, name, value)
    program = generate("interleaved-1f1b", num_ranks=6, num_microbatches=12, stages_per_rank=3)
    timeline = simulate(program, Costs(forward=1.5, comm=0.25))
    assert float(figure(page, "makespan")) == pytest.approx(timeline.makespan)
    assert figure(page, "bubble") == f"{timeline.bubble:.2%}"
    assert figure(page, "span bubble") == f"{timeline.span_bubble:.2%}"
    assert figure(page, "peak activations") == str(max(timeline.peak_activations))
    assert page.evaluate("window.drumline.stats().boxes") == program.num_actions


def test_an_address_shared_is_the_same_picture(page: Any, windows: Windows) -> None:
    after(page, lambda: page.select_option("select[name=schedule]", "zb-v"))
    slide(page, "microbatches", 11)
    address, makespan = page.url, figure(page, "makespan")
    other = windows.open(address, ANSWERED).page
    assert figure(other, "makespan") == makespan
    assert other.locator("select[name=schedule]").input_value() == "zb-v"


def test_a_memory_limit_is_shown_where_it_is_broken(page: Any) -> None:
    after(page, lambda: page.select_option("select[name=schedule]", "gpipe"))
    slide(page, "max_activations", 5)
    assert "over the limit on rank 0, 1, 2, 3" in page.locator("#figures").inner_text()


def test_counts_that_a_schedule_refuses_are_explained_in_place(page: Any) -> None:
    slide(page, "ranks", 5)
    after(page, lambda: page.select_option("select[name=schedule]", "chimera"))
    assert "use 4 or 6" in page.locator("#trouble").inner_text()
    slide(page, "ranks", 6)
    assert page.locator("#trouble").is_hidden()


LARGE = "?schedule=1f1b&ranks=16&microbatches=100"


class Held:
    """Requests to one path, held back until they are let go."""

    def __init__(self, page: Any, path: str) -> None:
        self.page = page
        self.routes: list[Any] = []
        page.route(f"**/{path}?*", lambda route: self.routes.append(route))

    def wait(self, count: int) -> None:
        """Wait until that many requests have come."""
        for _ in range(8000):
            if len(self.routes) >= count:
                return
            self.page.wait_for_timeout(25)
        raise AssertionError(f"{len(self.routes)} requests came within 200 seconds, not {count}")


def said(page: Any, rank: int, time: float) -> str:
    page.evaluate("document.querySelector('.plot').scrollIntoView({ block: 'center' })")
    place = page.evaluate(f"drumline.place({rank}, {time})")
    page.mouse.move(0, 0)
    page.mouse.move(place["x"], place["y"])
    return str(page.locator("#tip").inner_text()) if page.locator("#tip").is_visible() else ""


def explained(page: Any) -> None:
    """Wait until the page explains the newest picture."""
    for _ in range(8000):
        data = page.evaluate("({ ...document.documentElement.dataset })")
        if data.get("explained") == data["answered"]:
            return
        page.wait_for_timeout(25)
    raise AssertionError("the page did not explain itself within 200 seconds")


def test_a_large_picture_comes_before_its_explanations_and_says_so(page: Any, server: ExploreServer) -> None:
    held = Held(page, "explanations")
    page.goto(f"{server.address}{LARGE}")
    page.wait_for_selector(ANSWERED)
    held.wait(1)
    timeline = simulate(generate("1f1b", num_ranks=16, num_microbatches=100))
    assert float(figure(page, "makespan")) == timeline.makespan
    assert page.evaluate("drumline.stats().drawn") == 3200
    assert "Still computing what it waited for." in said(page, 8, 8.5)
    page.keyboard.press("c")
    assert page.evaluate("drumline.stats().critical") == 0
    held.routes[0].continue_()
    explained(page)
    assert "Waited 8: the pipeline fills; 8F0 waits for 7F0 of rank 7." in page.locator("#tip").inner_text()
    assert "The pipeline fills" in said(page, 8, 4)
    assert page.evaluate("drumline.stats().critical") == len(timeline.critical_path)


def test_explanations_of_an_older_picture_are_dropped(page: Any, server: ExploreServer) -> None:
    held = Held(page, "explanations")
    page.goto(f"{server.address}{LARGE}")
    page.wait_for_selector(ANSWERED)
    held.wait(1)
    slide(page, "forward", 2)
    held.wait(2)
    held.routes[0].fulfill(json={"why": {"rows": [], "critical": {}, "queues": []}})
    page.wait_for_timeout(100)
    assert "Still computing what it waited for." in said(page, 8, 17)
    held.routes[1].continue_()
    explained(page)
    assert "Waited 16: the pipeline fills" in said(page, 8, 17)


def test_of_what_changes_during_an_answer_the_newest_is_asked(page: Any) -> None:
    held = Held(page, "answer")
    for value in (9, 10, 11, 12):
        page.locator("input[name=microbatches]").fill(str(value))
    held.wait(1)
    held.routes[0].continue_()
    held.wait(2)
    held.routes[1].continue_()
    explained(page)
    assert [route.request.url.partition("microbatches=")[2].partition("&")[0] for route in held.routes] == ["9", "12"]
    assert float(figure(page, "makespan")) == simulate(generate("zb-h1", num_ranks=4, num_microbatches=12)).makespan


def test_both_halves_of_an_answer_are_what_a_page_from_disk_holds(server: ExploreServer) -> None:
    first, second = (json.loads(ask(server, f"/{path}{LARGE}")[1]) for path in ("answer", "explanations"))
    timeline = simulate(generate("1f1b", num_ranks=16, num_microbatches=100))
    whole = json.loads(json.dumps(document([timeline], title="Schedule explorer: 1f1b")))
    assert first["document"]["timelines"][0]["why"] is None
    first["document"]["timelines"][0]["why"] = second["why"]
    assert first["document"] == whole


def give(page: Any, text: str) -> None:
    files: Any = [{"name": "own.csv", "mimeType": "text/csv", "buffer": text.encode()}]
    after(page, lambda: page.set_input_files("#file", files=files))


def test_a_broken_csv_shows_the_violation_and_not_a_blank_page(page: Any) -> None:
    give(page, "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    assert "ranks wait for each other" in page.locator("#trouble").inner_text()
    assert page.locator("#trouble mark").inner_text() == "0B0"
    give(page, "0F0,0Bx\n")
    assert "row 1, column 2" in page.locator("#trouble").inner_text()
    give(page, "0F0,0B0\n1F0,1B0\n")
    assert page.locator("#trouble").is_hidden()
    assert float(figure(page, "makespan")) == simulate(generate("1f1b", num_ranks=2, num_microbatches=1)).makespan
    after(page, lambda: page.locator("#forget").click())
    assert page.locator("select[name=schedule]").is_enabled()


def test_a_dropped_file_is_taken(page: Any) -> None:
    drop = """text => {
        const data = new DataTransfer();
        data.items.add(new File([text], "dropped.csv"));
        document.getElementById("drop").dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true }));
    }"""
    after(page, lambda: page.evaluate(drop, "0F0,0B0"))
    assert "dropped.csv" in page.locator("#own").inner_text()
    assert figure(page, "actions") == "2"


BEGINNINGS = {"csv": b"0F0", "torch": b"0F0", "svg": b"<svg", "html": b"<!doctype", "perfetto": b"\x1f\x8b"}


@pytest.mark.parametrize(("kind", "begins"), BEGINNINGS.items())
def test_files_can_be_taken_away(page: Any, kind: str, begins: bytes, tmp_path: Path) -> None:
    with page.expect_download() as waiting:
        page.locator(f"[data-kind={kind}]").click()
    waiting.value.save_as(tmp_path / "file")
    assert (tmp_path / "file").read_bytes().startswith(begins)


def test_a_phone_needs_no_sideways_scrolling(windows: Windows, server: ExploreServer) -> None:
    phone = windows.open(server.address, ANSWERED, viewport={"width": 390, "height": 844}).page
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390


def ask(server: ExploreServer, path: str, **options: Any) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.request(options.pop("method", "GET"), path, **options)
    try:
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_only_this_machine_is_answered(server: ExploreServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "/", headers={"Host": "evil.example"})[0] == 403


@pytest.mark.parametrize(
    "path",
    [
        "/answer?ranks=many",
        "/answer?nonsense=1",
        "/explanations?ranks=many",
        "/explanations?schedule=chimera&ranks=3",
        "/export?kind=exe",
        "/export?kind=torch&schedule=chimera",
    ],
)
def test_bad_questions_get_clear_answers(server: ExploreServer, path: str) -> None:
    status, body = ask(server, path)
    assert status == 422
    assert json.loads(body)["error"]["error"]


def test_other_paths_and_large_bodies_are_refused(server: ExploreServer) -> None:
    assert ask(server, "/etc/passwd")[0] == 404
    assert ask(server, "/answer", method="POST", body=b"x", headers={"Content-Length": str(2**40)})[0] == 413
    assert b"not UTF-8" in ask(server, "/answer", method="POST", body=b"\xff\xfe")[1]


def test_two_schedules_stand_over_each_other_and_end_together(page: Any, windows: Windows) -> None:
    after(page, lambda: page.select_option("select[name=schedule]", "1f1b"))
    after(page, lambda: page.select_option("select[name=against]", "zb-h1"))
    stats = page.evaluate("drumline.stats()")
    assert stats["timelines"] == 2
    assert page.locator("[data-figure=makespan] b").all_inner_texts() == ["33", "27"]
    left, right = (page.evaluate(f"drumline.place(0, {time}, {at})")["x"] for at, time in ((0, 33), (1, 27)))
    assert left == pytest.approx(right, abs=1)
    shared = windows.open(page.url, ANSWERED).page
    assert shared.locator("h1").inner_text() == "Schedule explorer: 1f1b against zb-h1"


def test_the_picture_comes_before_the_controls_and_stays_in_view(page: Any) -> None:
    picture, controls = page.locator("#charts").bounding_box(), page.locator("#controls").bounding_box()
    assert picture["x"] < controls["x"]
    assert picture["y"] < 600
    page.set_viewport_size({"width": 390, "height": 800})
    page.mouse.wheel(0, 300)
    page.wait_for_timeout(200)
    assert 0 <= page.locator("#charts").bounding_box()["y"] < 200
