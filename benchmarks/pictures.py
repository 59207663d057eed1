"""How fast pictures are: the page in Chromium, and the explore page's answers.

    python benchmarks/pictures.py [--json FILE] [--rounds N]

There is no peer that draws schedules of this size in a browser; the figures are ours alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import drumline as dl
from drumline.report import explore
from drumline.report.html import page
from drumline.report.table import table
from measure import machine

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
PAGES = [("1f1b", 16, 1600), ("1f1b", 16, 6400)]
ANSWERS = [("1f1b", 20, 500), ("zb-h1", 16, 416), ("zb-v", 16, 208), ("interleaved-1f1b", 16, 312), ("hanayo", 16, 312)]
ANSWERS += [("v-half", 16, 208), ("dualpipe", 16, 800)]


def measure_pages(rounds: int) -> list[dict[str, Any]]:
    """Return how long the page takes to draw, as the page itself measures it."""
    from playwright.sync_api import sync_playwright

    found = []
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for name, ranks, microbatches in PAGES:
            timeline = dl.simulate(dl.generate(name, num_ranks=ranks, num_microbatches=microbatches))
            start = time.perf_counter()
            text = page([timeline])
            made = time.perf_counter() - start
            path = Path(folder) / "page.html"
            path.write_text(text, encoding="utf-8")
            draws, painted, boxes = [], [], 0
            for _ in range(rounds):
                opened = browser.new_page(viewport={"width": 1280, "height": 900})
                opened.goto(path.as_uri())
                opened.wait_for_selector("html[data-painted-ms]")
                stats = opened.evaluate("window.drumline.stats()")
                boxes = stats["boxes"]
                draws.append(stats["first_draw_ms"])
                painted.append(stats["painted_ms"])
                opened.close()
            found.append(
                {
                    "boxes": boxes,
                    "first_draw_ms": statistics.median(draws),
                    "painted_ms": statistics.median(painted),
                    "made_ms": made * 1e3,
                    "megabytes": len(text) / 1e6,
                }
            )
        browser.close()
    return found


def measure_answers(rounds: int) -> list[dict[str, Any]]:
    """Return how long the core takes for one answer: with new counts, and with new costs only."""
    found = []
    for name, ranks, microbatches in ANSWERS:
        settings = explore.Settings(name, ranks, microbatches)
        counts: list[float] = []
        costs: list[float] = []
        actions = 0
        for turn in range(rounds):
            explore._generated.cache_clear()
            for times, one in ((counts, settings), (costs, replace(settings, forward=1.1 + turn / 10))):
                start = time.perf_counter()
                answer = explore.answer(one)
                json.dumps(answer, separators=(",", ":"))
                times.append((time.perf_counter() - start) * 1e3)
            actions = answer["summary"]["actions"]
        medians = {"new_counts_ms": statistics.median(counts), "new_costs_ms": statistics.median(costs)}
        found.append({"schedule": name, "actions": actions, **medians})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(f"{machine()}; medians of {args.rounds} rounds\n")
    answers = measure_answers(args.rounds)
    rows = [
        [one["schedule"], str(one["actions"]), f"{one['new_counts_ms']:.0f}", f"{one['new_costs_ms']:.0f}"]
        for one in answers
    ]
    print("explore, milliseconds for one answer as JSON")
    print(table(["schedule", "actions", "counts moved", "costs moved"], rows))
    pages: list[dict[str, Any]] = []
    if shutil.which("chromium"):
        pages = measure_pages(args.rounds)
        print("\nthe page in headless Chromium, software rendering, milliseconds")
        header = ["boxes", "first draw", "open to painted", "made in Python", "MB"]
        keys = ("first_draw_ms", "painted_ms", "made_ms")
        lines = [[str(one["boxes"]), *(f"{one[key]:.0f}" for key in keys), f"{one['megabytes']:.1f}"] for one in pages]
        print(table(header, lines))
    else:
        print("\nno Chromium: the page was not measured")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "answers": answers, "pages": pages}, indent=2) + "\n")
        print(f"\nwrote {args.json}")


if __name__ == "__main__":
    main()
