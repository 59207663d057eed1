"""How fast pictures are in Chromium: the page from disk, and the explore page under its sliders.

    python benchmarks/pictures.py [--json FILE] [--rounds N]

There is no peer that draws schedules of this size in a browser; the figures are ours alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import drumline as dl
from drumline.report.draw.html import page
from drumline.report.draw.table import table
from drumline.schedules import schedules
from measure import machine

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
PAGES = [("1f1b", 16, 1600), ("1f1b", 16, 6400)]
RANKS, MAX_ACTIONS = 16, 20_000

# Times count to the frame after the one in which the page drew: by then it is on the screen.
MOVE = """([name, value]) => new Promise((done) => {
  const root = document.documentElement, before = { ...root.dataset };
  const input = document.querySelector(`input[name=${name}]`);
  const shown = (what) => new Promise((seen) => {
    const watch = new MutationObserver(() => {
      if (root.dataset[what] === before[what]) return;
      watch.disconnect();
      requestAnimationFrame(() => setTimeout(() => seen(performance.now() - start)));
    });
    watch.observe(root, { attributes: true });
  });
  Promise.all([shown("answered"), shown("explained")]).then(done);
  input.value = value;
  const start = performance.now();
  input.dispatchEvent(new Event("input", { bubbles: true }));
})"""

# Moves a view that shows four tenths of all, and counts how long each move takes to draw and to be on the screen.
PAN = """() => new Promise((done) => {
  const times = [], { extent } = drumline.stats().view;
  const step = (at) => {
    const start = performance.now();
    drumline.show(extent * (0.2 + 0.01 * at), extent * (0.6 + 0.01 * at));
    requestAnimationFrame(() => setTimeout(() => {
      times.push([performance.now() - start, drumline.stats().last_draw_ms]);
      if (at < 30) step(at + 1); else done(times);
    }));
  };
  step(0);
})"""


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
            frames: list[float] = []
            moves: list[float] = []
            for _ in range(rounds):
                opened = browser.new_page(viewport={"width": 1280, "height": 900})
                opened.goto(path.as_uri())
                opened.wait_for_selector("html[data-painted-ms]")
                stats = opened.evaluate("window.drumline.stats()")
                boxes = stats["boxes"]
                draws.append(stats["first_draw_ms"])
                painted.append(stats["painted_ms"])
                opened.wait_for_timeout(500)
                for frame, move in opened.evaluate(PAN):
                    frames.append(frame)
                    moves.append(move)
                opened.close()
            found.append(
                {
                    "boxes": boxes,
                    "first_draw_ms": statistics.median(draws),
                    "painted_ms": statistics.median(painted),
                    "pan_draw_ms": statistics.median(moves),
                    "pan_frame_ms": statistics.median(frames),
                    "worst_pan_frame_ms": max(frames),
                    "made_ms": made * 1e3,
                    "megabytes": len(text) / 1e6,
                }
            )
        browser.close()
    return found


def measure_answers(rounds: int) -> list[dict[str, Any]]:
    """Return how long the explore page takes from a slider's event to the picture, and to its explanations."""
    from playwright.sync_api import sync_playwright

    found = []
    with serving() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for name in schedules():
            microbatches, actions = largest(name)
            opened = browser.new_page(viewport={"width": 1280, "height": 900})
            opened.goto(f"{address}?schedule={name}&ranks={RANKS}&microbatches={microbatches}")
            opened.wait_for_selector("html[data-explained]")
            moves: dict[str, list[tuple[str, float]]] = {
                "counts": [("microbatches", microbatches - 1 - turn) for turn in range(rounds)],
                "costs": [("forward", 1 + 0.05 * (1 + turn)) for turn in range(rounds)],
            }
            entry: dict[str, Any] = {"schedule": name, "ranks": RANKS, "microbatches": microbatches, "actions": actions}
            for kind, values in moves.items():
                times = [moved(opened, *value) for value in values]
                entry[f"{kind}_picture_ms"] = statistics.median(picture for picture, _ in times)
                entry[f"{kind}_explained_ms"] = statistics.median(explained for _, explained in times)
            found.append(entry)
            opened.close()
        browser.close()
    return found


@contextmanager
def serving() -> Iterator[str]:
    """Run `drumline explore` in a process of its own, as a user does, and give its address."""
    command = [sys.executable, "-m", "drumline.cli.main", "explore", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[0]
        finally:
            server.terminate()


def largest(name: str) -> tuple[int, int]:
    """Return the most microbatches that keep a schedule within MAX_ACTIONS, and how many actions that makes."""
    low, high = RANKS, MAX_ACTIONS
    while high - low > 1:
        middle = (low + high) // 2
        if RANKS * middle <= MAX_ACTIONS and count(name, middle) <= MAX_ACTIONS:
            low = middle
        else:
            high = middle
    return low, count(name, low)


def count(name: str, microbatches: int) -> int:
    """Return how many actions a program has."""
    return dl.generate(name, num_ranks=RANKS, num_microbatches=microbatches).num_actions


def moved(page: Any, name: str, value: float) -> tuple[float, float]:
    """Move a slider and return the milliseconds until the picture, and until the explanations, are on the screen."""
    page.wait_for_timeout(300)  # a change by itself: during a drag explanations wait for its end
    picture, explained = page.evaluate(MOVE, [name, value])
    return picture, explained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(f"{machine()}; medians of {args.rounds} rounds\n")
    answers: list[dict[str, Any]] = []
    pages: list[dict[str, Any]] = []
    if shutil.which("chromium"):
        answers = measure_answers(args.rounds)
        print("explore in headless Chromium, milliseconds from a slider's event to what is on the screen")
        header = ["schedule", "actions", "counts: picture", "explained", "costs: picture", "explained"]
        keys = [f"{kind}_{what}_ms" for kind in ("counts", "costs") for what in ("picture", "explained")]
        print(
            table(
                header,
                [[item["schedule"], str(item["actions"]), *(f"{item[key]:.0f}" for key in keys)] for item in answers],
            )
        )
        pages = measure_pages(args.rounds)
        print("\nthe page in headless Chromium, software rendering, milliseconds")
        header = ["boxes", "first draw", "open to painted", "pan: draw", "frame", "worst", "made in Python", "MB"]
        keys = ["first_draw_ms", "painted_ms", "pan_draw_ms", "pan_frame_ms", "worst_pan_frame_ms", "made_ms"]
        lines = [[str(e["boxes"]), *(f"{e[key]:.0f}" for key in keys), f"{e['megabytes']:.1f}"] for e in pages]
        print(table(header, lines))
    else:
        print("no Chromium: nothing was measured")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "answers": answers, "pages": pages}, indent=2) + "\n")
        print(f"\nwrote {args.json}")


if __name__ == "__main__":
    main()
