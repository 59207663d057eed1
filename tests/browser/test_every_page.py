"""Every kind of page that Drumline writes, and its documentation, in a real Chromium, wide and narrow, light and dark.

None may be wider than its window, hide text or marks in too little contrast, or keep anything from the keyboard.
`measure.js` looks at what is drawn; this file makes the pages, and says what may be found.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from browser.windows import Window, Windows
from cluster_models import GIB, Rough, small_cluster, small_transformer
from demo_outcomes import demo_outcomes, run_of
from drumline.cli.main import main
from drumline.core.costs import Costs
from drumline.core.measured.run import read_run
from drumline.core.simulate.simulate import simulate
from drumline.plan.layouts.explain import explain
from drumline.plan.layouts.pins import Pins
from drumline.plan.layouts.planner import plan
from drumline.plan.search.pareto import pareto
from drumline.report.compare import compare, compare_page
from drumline.report.draw.html import page
from drumline.report.draw.pareto import pareto_page
from drumline.report.explore_server import ExploreServer
from drumline.report.plan.page import plan_page
from drumline.report.plan.profiles import profile_page
from drumline.report.run.page import run_page
from drumline.report.run.report import reports_of
from drumline.schedules import generate
from extras import needed
from kineto_traces import written
from matrices import ALL, left
from profiles import SOME, model_profile
from some import some

MEASURE = (Path(__file__).parent / "measure.js").read_text()
# A page in both themes, each at one width; in `make matrices` all four. Every other one changes least.
LOOKS = ((390, ("dark", "light")[: 2 if ALL else 1]), (1280, ("light", "dark")[: 2 if ALL else 1]))
TEXT, LARGE_TEXT, MARK = 4.5, 3.0, 3.0
TALLEST, TALLEST_DOCUMENT = 8000, 3000  # of a document, the beginning


def shown(folder: Path) -> str:
    program = generate("1f1b", num_ranks=4, num_microbatches=8)
    return page([simulate(program, Costs(comm=0.25, activation_bytes=2**28))])


def compared(folder: Path) -> str:
    return compare_page(compare(2, num_microbatches=4), num_ranks=2, num_microbatches=4)


def one_run(folder: Path) -> str:
    return run_page(reports_of([run_of(folder, "alone", "1f1b")]))


def several_runs(folder: Path) -> str:
    runs = [run_of(folder, f"gpt-2-small-on-two-ranks-{name}", name) for name in ("1f1b", "gpipe", "zb-h1")]
    return run_page(reports_of(runs))


def changed_run(folder: Path) -> str:
    """Return the report of a run whose cut was changed while it ran, and its schedule tried."""
    why = "rank 1 takes 31% longer than rank 0 since step 1"
    lines = [
        {"step": 1, "kind": "cut", "why": why, "before": "4 | 4 blocks", "seconds": 0.03, "predicted": 0.024},
        {"step": 2, "kind": "move", "balance_before": [4, 4], "balance_after": [5, 3], "bytes_moved": 2**26}
        | {"seconds": {"send": 0.25, "rebuild": 0.5}},
        {"step": 3, "kind": "cut", "of": 1, "predicted": 0.024, "real": 0.025, "without": 0.03, "kept": True},
        {"step": 3, "kind": "program", "before": "1f1b", "after": "zb-h1", "seconds": 0.025, "trial": True},
    ]
    run = run_of(folder, "changed", "1f1b")
    (run.path / "decisions.jsonl").write_text("".join(json.dumps({"run": "abc", **line}) + "\n" for line in lines))
    return run_page(reports_of([read_run(run.path)]))


def demo(folder: Path) -> str:
    """Return a report of several runs, with what the demo says above it."""
    pytest.importorskip("torch")
    from drumline.train.demo_panel import opening

    outcomes = demo_outcomes(folder)
    title = "Demo: one model trained with 4 schedules"
    return run_page(reports_of([outcome.run for outcome in outcomes]), title=title, opening=opening(outcomes))


def profiled(folder: Path) -> str:
    return profile_page(model_profile([0.01, 0.03, 0.01, 0.02], overheads=SOME, held=2**20, weights=2**20))


def planned_from_profile(folder: Path) -> str:
    file = folder / "profile.json"
    model_profile([0.01, 0.03, 0.01, 0.02], overheads=SOME, held=2**20, weights=2**20).save(file)
    return written_by(folder, "plan", str(file), "--ranks", "2", "--batch", "8", "--seconds", "0")


def written_by(folder: Path, *words: str) -> str:
    """Return the page that a command writes."""
    assert main([*words, "--out", str(folder / f"{words[0]}.html")]) == 0
    return (folder / f"{words[0]}.html").read_text()


def planned_for_cluster(folder: Path) -> str:
    machines = small_cluster(memory=1.2 * GIB)
    told = explain(plan(small_transformer(), machines, batch=32, surveyed=Rough().surveyed, pins=Pins(pipeline=2)))
    assert told.reasons is not None
    return plan_page(told, told.reasons)


def analyzed(folder: Path) -> str:
    timeline = simulate(
        generate("1f1b", num_ranks=3, num_microbatches=4), Costs(forward=[1, 2, 1], backward=[2, 4, 2], comm=0.25)
    )
    return written_by(folder, "analyze", str(written(timeline, folder / "traces", num_steps=2)))


def weighed(folder: Path) -> str:
    return pareto_page(pareto(Costs(), 2, num_microbatches=4, placement="linear", seconds=30, tries=1))


def loaded(folder: Path) -> str:
    """Return the page of a load in which some requests failed."""
    needed("grpc", "serve")
    from drumline.serve.load.generator import Result
    from drumline.serve.load.page import load_page

    few = Result(1, seconds=2.0, rows=200, latencies=[0.01] * 200, queues=[0.001], pipes=[0.009], computes=[0.008])
    many = Result(rate=800.0, seconds=2.0, rows=1500, latencies=[0.02, 0.4] * 750, queues=[0.3], pipes=[0.1])
    many.codes.update({"OK": 1500, "RESOURCE_EXHAUSTED": 96, "UNAVAILABLE": 4})
    many.whys["UNAVAILABLE"] = "stage 1: it hung and was ended (its event loop has not turned for 9 s), at work on this"
    few.codes.update({"OK": 200})
    return load_page([few, many], service="127.0.0.1:8001")


KINDS: dict[str, Callable[[Path], str]] = {
    "show": shown,
    "compare": compared,
    "report of one run": one_run,
    "report of several runs": several_runs,
    "report of a run that was changed": changed_run,
    "demo": demo,
    "profile": profiled,
    "plan of a profile": planned_from_profile,
    "plan of a cluster": planned_for_cluster,
    "analyze": analyzed,
    "pareto": weighed,
    "load": loaded,
}


DOCS = Path(__file__).parents[2] / "docs"
# Of the documentation: lists of links, wide tables beside commands, docstrings, output with pictures.
DOCUMENTS = ("index", "cli", "api", "cluster")
LATER = ("compare", "report of a run that was changed", "plan of a profile")  # others have all of their parts
EVERY = [*(name for name in KINDS if name not in LATER), "explore"]
EVERY += left(*LATER, *(f"docs: {name}" for name in DOCUMENTS))
# Pages of several runs, where each run has its colour, and where some have.
PLACES = {"contents", "timeline", "table", "steps", "legend", "details"}
SEVERAL: dict[str, set[str]] = {"report of several runs": set(), "demo": {"chart", "bars"}}
# What a page is, as its title says; and who writes it: no other module of the tool writes pages.
PAGES = {
    "show": (
        "1f1b: 4 ranks, 8 microbatches",
        {"cli/show.py", "cli/simulate.py", "cli/search.py", "cli/search_slices.py", "report/explore.py"},
    ),
    "compare": ("Comparison of 17 schedules", {"report/compare.py"}),
    "report of one run": ("Run alone: 1f1b", {"report/run/page.py"}),
    "report of several runs": ("Comparison of 3 runs: 1f1b, gpipe, zb-h1", {"report/run/page.py"}),
    "report of a run that was changed": ("Run changed: 1f1b", {"report/run/page.py"}),
    "demo": ("Demo: one model trained with 4 schedules", {"report/run/page.py"}),
    "profile": ("Profile of made up", {"report/plan/profiles.py"}),
    "plan of a profile": ("Plan for made up on 2 ranks", {"cli/plan_profile.py"}),
    "plan of a cluster": ("Plan for small on 8 x toy", {"report/plan/page.py"}),
    "analyze": ("Recorded trace: 1f1b", {"cli/analyze.py"}),
    "pareto": ("2 ranks, 4 microbatches: bubble against memory", {"report/draw/pareto.py"}),
    "load": ("Load test of 127.0.0.1:8001", {"serve/load/page.py"}),
    "explore": ("Schedule explorer: 1f1b against zb-h1", {"report/explore.py"}),
}
WALKED = ("show", "explore", "report of one run", "plan of a cluster")  # by Tab from end to end


def built(folder: Path) -> Path:
    """Return the folder of the built documentation: that of `make docs` if it is up to date, or a build of its own."""
    made = DOCS / "_build"
    sources = [(DOCS / f"{name}.md", made / "_sources" / f"{name}.md.txt") for name in DOCUMENTS]
    if all(copy.exists() and copy.read_bytes() == source.read_bytes() for source, copy in sources):
        return made
    command = [sys.executable, "-m", "sphinx", "--quiet", str(DOCS), str(folder / "docs")]
    subprocess.run(command, check=True, timeout=250)
    return folder / "docs"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Make each page once, when it is asked for, and say where it is."""
    folder = tmp_path_factory.mktemp("pages")
    with ExploreServer(0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        made = {"explore": f"{server.address}?schedule=1f1b&against=zb-h1"}

        def address(kind: str) -> str:
            if kind.startswith("docs: ") and kind not in made:
                docs = built(folder)
                made.update({f"docs: {name}": (docs / f"{name}.html").as_uri() for name in DOCUMENTS})
            if kind not in made:
                file = folder / f"{kind.replace(' ', '-')}.html"
                file.write_text(KINDS[kind](folder), encoding="utf-8")
                made[kind] = file.as_uri()
            return made[kind]

        yield address
        server.shutdown()
        thread.join(timeout=10)


def opened(windows: Windows, address: str, ready: str) -> Window:
    """Open a page, unfolded and ready to be measured."""
    width, (theme, *_) = LOOKS[0]
    size = {"width": width, "height": 900}
    window = windows.open(address, viewport=size, color_scheme=theme, reduced_motion="reduce")
    if window.page.locator(".toolbar").count():
        window.page.wait_for_selector(ready)
    window.page.evaluate("for (const one of document.querySelectorAll('main details')) one.open = true")
    window.page.evaluate(MEASURE)
    return window


def unseen(page: Any, tallest: int) -> Iterator[tuple[Any, ...]]:
    """Yield what is cut off or too faint: in windows of both widths, all of it in view, in both themes."""
    for width, themes in LOOKS:
        page.set_viewport_size({"width": width, "height": tallest})
        for theme in themes:
            page.emulate_media(color_scheme=theme)
            page.evaluate("measure.drawn()")
            layout = str(theme == themes[0]).lower()  # which the other theme does not change
            told = page.evaluate(f"measure.all({TEXT}, {LARGE_TEXT}, {MARK}, {layout})")
            assert told["paper"] == theme
            assert told["texts"]["measured"] > 0
            yield from (
                (width, theme, report) for report in (*told["texts"]["low"], *told["marks"]["low"], *told["beyond"])
            )
            if told["wide"] > width:
                yield width, theme, "the page is wider than its window", told["wide"]


def unreached(page: Any, *, walked: bool, ours: bool) -> Iterator[tuple[Any, ...]]:
    """Yield what the keyboard does not reach, does not leave, or reaches out of order or without a ring that is seen.

    The browser moves the focus on with Tab unless a script takes the key: where no script does, asking each is enough.
    Of `ours`, yield what is cut off by its own box, too.
    """
    for width, themes in LOOKS:
        page.set_viewport_size({"width": width, "height": 900})
        for theme in themes:
            page.emulate_media(color_scheme=theme)
            page.keyboard.press("Tab")  # from here on, the browser shows the focus as it does for the keyboard
            page.evaluate("measure.drawn()")
            names = page.evaluate("measure.listen()")
            first = theme == themes[0]
            reached = (
                walk(page, len(names))
                if walked and first and (ALL or width == 1280)
                else page.evaluate("measure.visited()")
            )
            numbers = {entry["reach"] for entry in reached}
            yield from ((width, "no Tab", name) for at, name in enumerate(names) if str(at) not in numbers)
            yield from (
                (width, theme, "no ring", value)
                for value in some(reached)
                if value["ring"] < MARK or value.get("trapped") or (ours and value["covered"])
            )
            if ours and first:
                yield from ((width, told) for told in page.evaluate("measure.disordered()"))
                yield from ((width, told) for told in page.evaluate(f"measure.cut({str(width >= 1280).lower()})"))


def walk(page: Any, count: int) -> list[dict[str, Any]]:
    """Press Tab until all of `count` things had the focus, or long after; what scrolls takes the keyboard, too."""
    reached: list[dict[str, Any]] = []
    for presses in (count, 5, 5, 10):
        for _ in range(presses):
            page.keyboard.press("Tab")
        reached = page.evaluate("measure.reached()")
        if len({entry["reach"] for entry in reached if entry["reach"]}) == count:
            break
    return reached


def unopened(page: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that do not open and close what is folded."""
    for fold in page.locator("main summary").all()[:1]:
        fold.focus()
        for key in ("Enter", "Space"):
            before = fold.evaluate("(node) => node.parentElement.open")
            page.keyboard.press(key)
            if fold.evaluate("(node) => node.parentElement.open") == before:
                yield key, "does not fold"


@pytest.mark.matrix
@pytest.mark.parametrize("kind", EVERY)
def test_all_of_a_page_is_seen_and_reached(windows: Windows, pages: Callable[[str], str], kind: str) -> None:
    window = opened(windows, pages(kind), "html[data-answered]" if kind == "explore" else "html[data-painted-ms]")
    page, is_document = window.page, kind.startswith("docs: ")
    troubles = [
        *unseen(page, TALLEST_DOCUMENT if is_document else TALLEST),
        *unreached(page, walked=kind in WALKED, ours=not is_document),
        *unopened(page),
        *(discoloured(page, SEVERAL[kind]) if kind in SEVERAL else ()),
    ]
    if kind in PAGES:
        assert page.locator("h1").inner_text().startswith(PAGES[kind][0])
    assert troubles == []
    assert window.troubles == []


def discoloured(page: Any, more: set[str]) -> Iterator[tuple[Any, ...]]:
    """Yield runs that have several colours, or the one of another run, or none where they should have theirs."""
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        page.evaluate("measure.drawn()")
        told = page.evaluate("measure.runs()")
        names = list(dict.fromkeys(name for name, _, _ in told))
        colours = {name: {colour for run, _, colour in told if run == name} for name in names}
        yield from ((theme, name, *sorted(found)) for name, found in colours.items() if len(found) != 1)
        yield from (
            (theme, name, other, "have the same colour")
            for at, name in enumerate(names)
            for other in names[:at]
            if colours[name] & colours[other]
        )
        yield from (
            (theme, name, "has no colour in", place)
            for name in names or ["every run"]
            for place in sorted(PLACES - {place for run, place, _ in told if run == name})
        )
        yield from ((theme, "no run has its colour in", place) for place in more - {place for _, place, _ in told})


def test_every_module_that_writes_pages_is_among_them() -> None:
    source = Path(main.__code__.co_filename).parents[1]
    writes = re.compile(r"\b(?:page_with|plain_page|picture)\(|(?<=import )page\b(?=\n|, picture)")
    writers = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if path.name != "html.py" and writes.search(path.read_text(encoding="utf-8"))
    }
    assert writers == {writer for _, names in PAGES.values() for writer in names}
    assert set(PAGES) == {*KINDS, "explore"}
