"""Writes the proven optima of the drawn instances, by OR-Tools' CP-SAT (the extra `plan`).

    python benchmarks/search_oracle.py [--count 200] [--seconds 60] [--out benchmarks/optima.json]

The file is what the tests and `benchmarks/search.py` hold the search against; instances without a proof are left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from search_exact import optimum
from search_instances import drawn

OPTIMA = Path(__file__).with_name("optima.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=OPTIMA)
    args = parser.parse_args()
    found: dict[str, float] = {}
    seed = 0
    while len(found) < args.count:
        proven = optimum(drawn(seed), seconds=args.seconds)
        if proven.is_proven:
            found[str(seed)] = proven.value
        else:
            print(f"seed {seed}: {proven.bound:g} to {proven.value:g}, not proven")
        seed += 1
    args.out.write_text(json.dumps({"makespan": found}, indent=1) + "\n", encoding="utf-8")
    print(f"{len(found)} optima, wrote {args.out}")


if __name__ == "__main__":
    main()
