"""Inject every fault into real runs of `drumline train`, and print a table of what became of them.

    PYTHONPATH=src:tests python tests/faults/run.py [--short] [--only NAME ...] [--list] [--show] [--json FILE]

Each fault must end in bounded time, be told in words that name it, leave no process behind, and after a resume on the
same ranks come to the results of an uninterrupted run, bit for bit. If one fails, the others run all the same.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from faults.cases import Fault, all_faults
from faults.lab import Lab, References, Row, Skip, temporary
from faults.started import STARTED

_LINES_OF_OUTPUT = 120


def main(words: Sequence[str] | None = None) -> int:
    """Run what the words name; returns 1 if a fault failed."""
    args = _parser().parse_args(words)
    faults = all_faults()
    unknown = [name for name in args.only if name not in faults]
    if unknown:
        print(f"no such fault: {', '.join(unknown)}; --list names all", file=sys.stderr)
        return 2
    chosen = [fault for fault in faults.values() if not args.only or fault.name in args.only]
    chosen = [fault for fault in chosen if fault.short or not args.short]
    if args.list:
        print("\n".join(f"{fault.name:24} {'short' if fault.short else '     '}  {fault.what}" for fault in chosen))
        return 0
    began = time.perf_counter()
    rows, worst = _all_of(chosen, jobs=args.jobs, show=args.show)
    seconds = time.perf_counter() - began
    print(table(rows))
    bad = [row for row in rows if row.result == "FAIL"]
    skipped = [row for row in rows if row.result == "skip"]
    print(
        f"{len(rows)} faults in {seconds:.0f} s: {len(rows) - len(bad) - len(skipped)} as they should be, "
        f"{len(bad)} failed, {len(skipped)} skipped. Uninterrupted runs are within {worst:.0e} of plain PyTorch."
    )
    if args.json:
        found = {"seconds": seconds, "distance_from_plain": worst, "faults": [_plain(row) for row in rows]}
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 1 if bad else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Inject faults into real runs of drumline train.")
    parser.add_argument("--short", action="store_true", help="only those that CI runs")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="only these")
    parser.add_argument("--list", action="store_true", help="print their names, and inject nothing")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="faults at a time (default 2)")
    parser.add_argument("--show", action="store_true", help="print what the runs print, also if all is well")
    parser.add_argument("--json", metavar="FILE", help="write the table as JSON")
    return parser


def _all_of(chosen: Sequence[Fault], *, jobs: int, show: bool) -> tuple[list[Row], float]:
    """Run the faults, those that wait first; return their rows in the order of the list."""
    order = sorted(chosen, key=lambda fault: not fault.waits)
    lock, done = threading.Lock(), 0
    with temporary() as folder, ThreadPoolExecutor(jobs) as pool, ended_if_interrupted(pool):
        references = References(folder)

        def run(fault: Fault) -> Row:
            nonlocal done
            row = inject(fault, folder, references)
            with lock:
                done += 1
                print(f"[{done}/{len(chosen)}] {line(row)}", flush=True)
                if row.result == "FAIL" or show:
                    print("\n".join(f"    {text}" for text in row.output.splitlines()[-_LINES_OF_OUTPUT:]), flush=True)
            return row

        rows = dict(zip((fault.name for fault in order), pool.map(run, order), strict=True))
    assert not folder.exists(), f"{folder} is left behind"
    return [rows[fault.name] for fault in chosen], references.worst


@contextmanager
def ended_if_interrupted(pool: ThreadPoolExecutor) -> Iterator[None]:
    """End all commands on Ctrl-C and SIGTERM, so that no thread waits for them."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        for started in list(STARTED):
            started.end()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def inject(fault: Fault, folder: Path, references: References) -> Row:
    """Run one fault, whatever comes of it."""
    row, began = Row(fault.name, fault.what), time.perf_counter()
    mine = folder / fault.name
    mine.mkdir()
    try:
        with Lab(row, mine, references) as lab:
            fault.run(lab)
    except Skip as reason:
        row.result, row.outcome = "skip", str(reason)
    except AssertionError as error:
        row.result, row.outcome = "FAIL", str(error)
    except Exception:
        row.result, row.outcome = "FAIL", traceback.format_exc()
    row.seconds = time.perf_counter() - began
    return row


def line(row: Row) -> str:
    """Return a row as a line of progress."""
    return f"{row.result:4} {row.name}: {row.outcome}  ({row.seconds:.0f} s)"


def table(rows: Sequence[Row]) -> str:
    """Return all rows below their headings.

    >>> print(table([Row("kill", "SIGKILL of rank 1", 0.31, 5.2, 1, "equal bit for bit")]))
    fault              detected  recovered  steps lost  outcome
    -----------------  --------  ---------  ----------  -----------------
    SIGKILL of rank 1     0.3 s      5.2 s           1  equal bit for bit
    """
    heads = ("fault", "detected", "recovered", "steps lost", "outcome")
    cells = [_cells(row) for row in rows]
    widths = [max(len(cell[at]) for cell in [heads, *cells]) for at in range(len(heads))]
    widths[-1] = len(heads[-1]) if not rows else max(len(cell[-1]) for cell in cells)

    def drawn(row: Sequence[str]) -> str:
        left = [f"{text:{'<' if at in (0, 4) else '>'}{widths[at]}}" for at, text in enumerate(row)]
        return "  ".join(left).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([drawn(heads), rule, *map(drawn, cells)])


def _cells(row: Row) -> tuple[str, ...]:
    def seconds(value: float | None) -> str:
        return "" if value is None else f"{value:.1f} s"

    first = (row.outcome.splitlines() or [""])[0]
    outcome = first if row.result == "ok" else f"{row.result}: {first}"
    return row.what, seconds(row.detected), seconds(row.recovered), "" if row.lost is None else str(row.lost), outcome


def _plain(row: Row) -> dict[str, object]:
    found = asdict(row)
    return found if row.result == "FAIL" else {name: value for name, value in found.items() if name != "output"}


if __name__ == "__main__":
    sys.exit(main())
