"""Models drawn by chance are exported and asked: none may answer otherwise than PyTorch.

python benchmarks/serve_fuzz.py --models 200
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from served.model_fuzz import drawn_model, exported_or_refused, wrong_answers


def main() -> int:
    """Draw models, export them, and print those that are served wrongly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first model")
    parser.add_argument("--requests", type=int, default=60, help="requests to each exported model")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began, outcomes, why = time.time(), Counter[str](), Counter[str]()
    wrong: dict[int, list[str]] = {}
    for seed in range(args.first, args.first + args.models):
        model = drawn_model(seed)
        with tempfile.TemporaryDirectory() as folder:
            manifest = exported_or_refused(model, Path(folder, "served"), seed)
            if isinstance(manifest, str):
                outcomes["refused"] += 1
                why[manifest[:60]] += 1
                print(f"{seed}: {model}: refused: {manifest[:150]}", flush=True)
                continue
            sizes = {name: str(size) for name, size in manifest.dimensions.items()}
            print(f"{seed}: {model}: exported, {sizes}", flush=True)
            if found := wrong_answers(model, Path(folder, "served"), manifest, seed, requests=args.requests):
                wrong[seed] = found
                print(f"{seed}: WRONG {len(found)}: {found[0][:300]}", flush=True)
            outcomes["served wrongly" if found else "served"] += 1
    print(f"{args.models} models in {time.time() - began:.0f} s: {dict(outcomes)}")
    for text, count in why.most_common():
        print(f"  {count:4} {text}")
    if args.json:
        table = {"models": args.models, "outcomes": dict(outcomes), "refusals": dict(why)}
        args.json.write_text(json.dumps(table, indent=2) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
