"""Plan many random questions for releases of other frameworks, and give what is written to the releases' own classes.

    PYTHONPATH=tests python benchmarks/launch_files.py [--cases 200] [--seed 1] [--json FILE]

Each question is planned in full. Its file must start, pass our facts of the release and be taken by its config class
(`scripts/releases.py` installs them). The memory of the plan must be that of the recomputation that its file asks for.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

from drumline.core.errors import PlanError
from drumline.plan.launch.megatron import recomputed_there
from drumline.plan.launch.releases import flattened, release
from drumline.plan.layouts.planner import plan
from launch_plans import Question, questions, written
from real_configs import refused_by
from warm_ranks import WarmRanks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200, help="number of plans")
    parser.add_argument("--seed", type=int, default=1, help="random seed")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    args = parser.parse_args()
    files: dict[tuple[str, str], list[dict[str, Any]]] = {}
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for question in islice(questions(args.seed), 3 * args.cases):
        if counts["planned"] == args.cases:
            break
        wrong += _planned(question, files, counts)
    ranks = WarmRanks()
    for (framework, named), values in sorted(files.items()):
        said = refused_by(ranks, release(framework, named).package, framework, values)
        refused = [text for text in said if text]
        wrong += [f"{framework} {named}: {text}" for text in refused]
        print(f"{framework} {named}: {len(values)} files, {len(refused)} refused by its own class")
    ranks.close()
    print(f"{counts['planned']} plans, {counts['too small']} more did not fit; {len(wrong)} wrong")
    print("\n".join(wrong[:20]))
    if args.json:
        args.json.write_text(json.dumps({**counts, "wrong": wrong}, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(bool(wrong))


def _planned(question: Question, files: dict[tuple[str, str], list[dict[str, Any]]], counts: Counter[str]) -> list[str]:
    """Plan a question, add its file to those of its release, and return what is wrong with it."""
    transformer, machines, batch, pins = question
    try:
        found = plan(transformer, machines, batch=batch, pins=pins, top=1)
    except PlanError:
        counts["too small"] += 1
        return []
    counts["planned"] += 1
    layout, name = found.chosen.layout, f"{pins.framework} {pins.release} {transformer.name}: {found.chosen.mesh}"
    file, facts = written(question, layout), release(pins.framework, pins.release)
    files.setdefault((pins.framework, pins.release), []).append(file.values)
    wrong = [] if file.starts else [f"{name} does not start: {file.missing[0]}"]
    values = (
        file.values if pins.framework == "megatron" else {**flattened(file.values), "$WORLD_SIZE": machines.num_devices}
    )
    wrong += [f"{name}: our facts refuse {text}" for text in facts.refusals(values)]
    if pins.framework == "megatron" and (there := recomputed_there(transformer, layout, facts)) != layout.recompute:
        wrong.append(f"{name} counts the memory of {layout.recompute}, and runs {there}")
    return wrong


if __name__ == "__main__":
    main()
