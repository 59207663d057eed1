"""Fuzzed: folders of a run, and of a profiler's traces."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from pathlib import Path
from typing import Any

from drumline.core.costs import Costs
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from drumline.report.kineto.analysis import analyze
from drumline.schedules import generate
from fuzz_case import Case, command, put
from fuzz_files import WORDS
from fuzz_mutations import damaged, json_text, rows_text
from kineto_traces import STYLES, written
from simulated_runs import even_blocks, per_stage, write_simulated_run


def run_case(folder: Path) -> Case:
    program = generate("1f1b", num_ranks=2, num_microbatches=3)
    split = generate("zb-h1", num_ranks=2, num_microbatches=2)
    times: dict[str, Any] = {"forward": 1e-3, "backward": 2e-3, "backward_input": 1e-3, "backward_weight": 1e-3}
    profiled = {"costs": None, "blocks": [{"name": str(at), **times} for at in range(4)]}
    base = [
        write_simulated_run(folder / "one", program, per_stage(1e-3, 2e-3), blocks=even_blocks(2, 2), weigh=64.0),
        write_simulated_run(
            folder / "two", split, per_stage(1e-3, 2e-3), blocks=even_blocks(2, 2), predicted=profiled, overhead=1e-5
        ),
    ]
    verbs: tuple[str, ...] = (
        "report {} --json",
        "report {} --format text",
        "report {} --format html",
        "report {} --format perfetto",
    )
    verbs += ("watch {} --once", "watch {} --once --json", "report {} --step 1 --json")

    def case(chance: random.Random) -> None:
        path = folder / "run"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(chance.choice(base), path)
        for _ in range(chance.choice((1, 1, 2))):
            _spoil(chance.choice(sorted(path.iterdir())), chance)
        verb = chance.choice(verbs).format(path).split()
        if verb[-1] == "perfetto":
            verb += ["--out", str(folder / "trace.json.gz")]
        command(*verb)

    return case


def _spoil(path: Path, chance: random.Random) -> None:
    """Change one file of a run."""
    text = path.read_text(errors="surrogateescape")
    try:
        if path.suffix == ".jsonl" and chance.random() < 0.9:
            lines = text.splitlines()
            at = chance.randrange(len(lines))
            lines[at] = json_text(json.loads(lines[at]), chance, compact=True)
            text = "\n".join(lines) + chance.choice(("\n", "\n", "\n", ""))
        elif path.suffix == ".json" and chance.random() < 0.9:
            text = json_text(json.loads(text), chance)
        elif path.suffix == ".csv":
            text = rows_text(text, chance, WORDS)
        else:
            path.unlink()
            return
    except (ValueError, IndexError):  # it was spoiled before
        return
    put(path, text, chance)


def trace_case(folder: Path) -> Case:
    program = generate("1f1b", num_ranks=2, num_microbatches=2)
    timeline = simulate(program, Costs(comm=0.1))
    base = [written(timeline, folder / f"seed-{style}", style=style, num_steps=2) for style in STYLES]
    base.append(written(timeline, folder / "seed-hosts", skews=(0.0, 5e4), hosts=("a", "b"), num_steps=2))
    verbs = ("analyze {} --json", "analyze {}", "analyze {} --format html", "analyze {} --format csv")

    def case(chance: random.Random) -> None:
        path = folder / "traces"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(chance.choice(base), path)
        chosen = chance.choice(sorted(path.iterdir()))
        table = json.loads(gzip.decompress(chosen.read_bytes()))
        text = json_text(table, chance)
        if chance.random() < 0.3:
            events = table["traceEvents"]
            events[chance.randrange(len(events))]["name"] = chance.choice(_LABELS)
            text = json.dumps(table)
        data = damaged(text.encode(errors="surrogatepass"), chance)
        chosen.write_bytes(damaged(gzip.compress(data, 1), chance))
        if chance.random() < 0.15:
            command(*chance.choice(verbs).format(path).split())
            return
        found = analyze([path])
        assert json.dumps(found.summary(), allow_nan=False)
        assert repr(found.timeline)
        assert Program.parse(found.timeline.ran.format()) == found.timeline.ran

    return case


_LABELS = (
    *("PP:0F0", "PP:9F9", "PP:0F999999999", "PP:999999999F0", "PP:1B0", "PP:0I0", "PP:0W0", "PP:(0F1;1B0)OVERLAP_F_B"),
    *("PP:1RECV_F0", "PP:0SEND_F7", "PP:0UPDATE5", "PP:0REDUCE_GRAD", "Forward 999999999", "Backward 0", "nccl:send"),
    *("ProfilerStep#" + "9" * 15, "ProfilerStep#" + "9" * 5000, "c10d::send", "gloo:recv", "record_param_comms"),
)
