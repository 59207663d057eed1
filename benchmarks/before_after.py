"""Two checkouts of Drumline against each other, in turns, on this machine: whether a change made anything slower.

    python benchmarks/before_after.py BEFORE [AFTER] [--rounds 7] [--only "step*"] [--processor] [--json FILE]

BEFORE and AFTER are folders with a checkout each; AFTER is this one unless given. Every figure is taken in a fresh
process of each checkout, one after the other, round after round. Printed: medians, the ratio after / before of the same
round with its quartiles, and whether that is slower by more than the spread.

    import             `import drumline`
    simulate, cold     `drumline simulate 1f1b --ranks 8 --microbatches 64`
    simulate           seconds to compile and time a program of 4,096 actions, and one of 24,576
    makespan           seconds to time a program of 64,000 actions, compiled before, under new costs
    search             seconds of a search that ends by its own budget of timed actions
    plan               seconds of `drumline plan` for a 70B model on 64 GPUs, with all of its explanation
    step               seconds of a step of two ranks in one process, for schedules with whole and split backwards;
                       with blocks of an own class, which may keep state and do not
    action             seconds that two processes add to every action beyond what the simulator says is possible, as in
                       `benchmarks/runtime_cpu.py`
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

HEAD = "import statistics, sys, time\nmoment = time.{clock}\n"
TAIL = "\nprint(statistics.median(taken))\n"
IMPORT = "began = moment()\nimport drumline\ntaken = [moment() - began]"
COLD = """
import subprocess
words = ["simulate", "1f1b", "--ranks", "8", "--microbatches", "64", "--json"]
began = moment()
subprocess.run([sys.executable, "-m", "drumline.cli.main", *words], stdout=subprocess.DEVNULL, check=True)
taken = [moment() - began]
"""
SIMULATE = """
import drumline as dl
taken = []
for _ in range(7):
    program = dl.generate({name!r}, num_ranks={ranks}, num_microbatches={microbatches})
    began = moment()
    assert dl.simulate(program, dl.Costs(forward=1.0, comm=0.01)).makespan > 0
    taken.append(moment() - began)
"""
MAKESPAN = """
import drumline as dl
program = dl.generate({name!r}, num_ranks={ranks}, num_microbatches={microbatches})
taken = []
for turn in range(11):
    costs = dl.Costs(forward=1.0 + turn / 7, backward_input=1.1, comm=0.01)
    began = moment()
    assert dl.simulate(program, costs).makespan > 0
    taken.append(moment() - began)
"""
SEARCH = """
import drumline as dl
began = moment()
costs = dl.Costs(forward=1.0, backward_input=1.1, backward_weight=0.8, comm=0.05)
dl.search(costs, dl.Placement.linear(4), num_microbatches=10, limit=dl.Limit(max_activations=4), seconds=20)
taken = [moment() - began]
"""
PLAN = """
import contextlib, io
from drumline.cli.main import main
began = moment()
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main("plan llama-3-70b --hardware h100 --gpus 64 --batch 128 --json".split())
taken = [moment() - began]
"""
# 150 steps, of which the first 30 are not counted.
_TURNS = """batch, target = torch.randn(64, 64), torch.randn(64, 64)
taken = []
for turn in range(150):
    began = moment()
    pipe.step(batch, target=target)
    if turn >= 30:
        taken.append(moment() - began)
    pipe.zero_grad()
"""
STEP = (
    """
import torch
import drumline as dl
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(8)))
pipe = dl.Pipeline(model, loss_fn=torch.nn.functional.mse_loss, schedule={name!r}, num_ranks=2, num_microbatches=8)
"""
    + _TURNS
)
OWN = (
    """
import torch
import drumline as dl
torch.set_num_threads(1)
torch.manual_seed(0)
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.scale, self.sizes, self.names = 0.5, [1, 2, 3], {{"act": "gelu"}}
    def forward(self, x):
        return x + torch.nn.functional.gelu(self.layer(x)) * self.scale * self.sizes[0]
model = torch.nn.Sequential(*(Block() for _ in range(8)))
options = {{"checkpoint": {checkpoint!r}, "loss_fn": torch.nn.functional.mse_loss}}
pipe = dl.Pipeline(model, schedule={name!r}, num_ranks=2, num_microbatches=8, **options)
"""
    + _TURNS
)
ACTION = """
import os, socket, subprocess
if "RANK" not in os.environ:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    env = {{**os.environ, "RANK": "1", "LOCAL_RANK": "1"}}
    other = subprocess.Popen(sys.orig_argv, env=env, stdout=subprocess.DEVNULL)
    os.environ.update(RANK="0", LOCAL_RANK="0")
import torch
import drumline as dl
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(8)))
program = dl.generate({name!r}, num_ranks=2, num_microbatches=16)
pipe = dl.Pipeline(model, loss_fn=torch.nn.functional.mse_loss, schedule=program)
batch, target = torch.randn(256, 256), torch.randn(256, 256)
actions = max(len(row) for row in program.rows)
taken = []
for turn in range(120):
    pipe.step(batch, target=target)
    pipe.settle()
    if turn >= 40:
        timeline = pipe.timeline()
        taken.append((timeline.makespan - dl.simulate(program, timeline.measured_costs()).makespan) / actions)
    pipe.zero_grad()
pipe.close()
"""
FIGURES = {
    "import": IMPORT,
    "simulate, cold": COLD,
    "simulate 1f1b P8 M256": SIMULATE.format(name="1f1b", ranks=8, microbatches=256),
    "simulate zb-v P8 M512": SIMULATE.format(name="zb-v", ranks=8, microbatches=512),
    "makespan 1f1b P8 M4000": MAKESPAN.format(name="1f1b", ranks=8, microbatches=4000),
    "makespan zb-v P8 M1500": MAKESPAN.format(name="zb-v", ranks=8, microbatches=1500),
    "search P4 M10": SEARCH,
    "plan 70B on 64": PLAN,
    "step 1f1b D64": STEP.format(name="1f1b"),
    "step zb-h1 D64": STEP.format(name="zb-h1"),
    "step zb-v D64": STEP.format(name="zb-v"),
    "step 1f1b, own blocks": OWN.format(name="1f1b", checkpoint="none"),
    "step zb-h1, own blocks": OWN.format(name="zb-h1", checkpoint="none"),
    "step gpipe, own blocks recomputed": OWN.format(name="gpipe", checkpoint="full"),
    "step dualpipe, own blocks": OWN.format(name="dualpipe", checkpoint="none"),
    "action 1f1b D256": ACTION.format(name="1f1b"),
    "action zb-h1 D256": ACTION.format(name="zb-h1"),
    "action zb-v D256": ACTION.format(name="zb-v"),
}


def seconds(checkout: Path, code: str, clock: str) -> float:
    """Run some code in a fresh process of a checkout, and return the seconds that it says, by a clock of `time`."""
    env = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", HEAD.format(clock=clock) + code + TAIL]
    done = subprocess.run(command, env=env, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{checkout}: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout.split()[-1])


def verdict(ratios: list[float]) -> str:
    """Return whether the middle ratio is off by more than the spread."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    if low <= 1.0 <= high or abs(middle - 1.0) < 0.01:
        return "the same"
    return "slower" if middle > 1.0 else "faster"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path, nargs="?", default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", metavar="PATTERN", default="*", help='figures by name, as a shell would: "step*"')
    parser.add_argument("--processor", action="store_true", help="processor time of the measuring process alone")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    measured = {}
    print(f"{'':<24}{'before':>11}{'after':>11}   after / before")
    chosen = [name for name in FIGURES if fnmatch(name, args.only)]
    if not chosen:
        parser.error(f"no figure matches {args.only!r}; expected {', '.join(FIGURES)}")
    clock = "process_time" if args.processor else "perf_counter"
    for name in chosen:
        pairs = []
        for turn in range(args.rounds):
            sides = [args.before.resolve(), args.after.resolve()]
            taken = {side: seconds(side, FIGURES[name], clock) for side in (sides if turn % 2 else sides[::-1])}
            pairs.append([taken[side] for side in sides])
        ratios = [after / before for before, after in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        before, after = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
        print(
            f"{name:<24}{before:>8.3f} ms{after:>8.3f} ms   {middle:.3f} ({low:.3f} to {high:.3f}), {verdict(ratios)}",
            flush=True,
        )
        measured[name] = {"before": before, "after": after, "ratio": middle, "quartiles": [low, high]}
    if args.json:
        args.json.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
