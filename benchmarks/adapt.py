"""What adapting does for a pipeline of two ranks while one rank or the link gets slow: bubble, pause, throughput.

    PYTHONPATH=tests python benchmarks/adapt.py [--cases slowing sudden half noisy link number] [--runs 3] [--blocks 24]
    PYTHONPATH=tests python benchmarks/adapt.py --rest 5 --rows 24    # on a machine that does other work, too

Rank 1 is slowed by real extra compute in everything that it computes, wherever layers are: some of its blocks' products
run again, at 1.05 times one in twenty. 1f1b, 32 microbatches, one thread a rank.

slowing    1% a step up to 1.5 times; every step is the median of several runs
sudden     1.5 times from step 50 on, until step 100: moved, and moved back
half       the same by rebalance="half", which moves half of the slow rank's layers
noisy      one step takes three times as long: nothing moves
link       every message takes 20 ms longer from step 25 on (gloo): another program. Two namespaces are joined by a
           relay that holds packets; where these cannot be made, the receiver holds messages
number     every action gets a fixed cost midway: another number of microbatches, against every static one

With --rest, a block also rests for so many microseconds a row in F, and twice as many in B; what is slow rests longer
instead of computing more. Resting takes as long whatever else the machine does, so a comparison of two trees needs no
quiet machine. Ranks, messages, moves and decisions are as real as before.

A step's bubble counts the pause of a move before it. `beside` is the throughput beside the best static cut at that
slowness, measured in the same session. Pictures go to --out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import drumline as dl

SLOW = 1.5
DELAY = 0.02
_WIDTH = 384
_STRIDE = 0.618  # of a product owed, from block to block


class Burn(torch.autograd.Function):
    """Returns its input, and computes a block's products once more: one in F, two in B."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Return x."""
        ctx.save_for_backward(x.detach(), weight)
        burn(x.detach(), weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x."""
        x, weight = ctx.saved_tensors
        burn(x, weight)
        burn(x, weight)
        return gradients[0], None


def burn(x: Tensor, weight: Tensor) -> None:
    with torch.no_grad():
        torch.nn.functional.gelu(x @ weight)


class Rest(torch.autograd.Function):
    """Returns its input after so many seconds, and its gradient after twice as many."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        """Return x."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x."""
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Slowed(nn.Module):
    """A block whose process may be slow: `slow` is a factor of everything, `fixed` are products of every call.

    At 1.05, every twentieth call does its work twice. Products of few rows would take as long as products of many.
    Each block counts what it owes, and begins elsewhere than the others, so that they do not pay in the same call.
    """

    slow, fixed, rest = 1.0, 0, 0.0

    def __init__(self, width: int, owed: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.owed = owed

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        kind = type(self)
        if kind.rest:
            made = nn.functional.gelu(self.linear(x))
            return Rest.apply(made, kind.rest * (kind.slow * len(x) + 16 * kind.fixed))  # type: ignore[no-untyped-call,no-any-return]
        for _ in range(kind.fixed):
            burn(x.detach()[:16], self.linear.weight.detach())
        made = nn.functional.gelu(self.linear(x))
        self.owed += kind.slow - 1.0
        while self.owed >= 1.0:
            made = Burn.apply(made, self.linear.weight.detach())  # type: ignore[no-untyped-call]
            self.owed -= 1.0
        return made


def model_of(blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Slowed(_WIDTH, (at * _STRIDE) % 1.0) for at in range(blocks)))


def prepare(given: dict[str, Any]) -> None:
    """Let this rank's blocks take what the user asked for."""
    torch.set_num_threads(1)
    Slowed.rest = given["rest"] * 1e-6


def hold_messages(seconds: Callable[[], float]) -> None:
    """Let the receiver see a message only so long after it was made, whatever carried it."""
    from drumline.channel.distributed import DistributedChannel

    held: dict[Any, Any] = {}
    take, block = DistributedChannel.take, DistributedChannel.block

    def late(self: Any, receive: Any, source: int) -> Any:
        delivery = held.pop((receive, source), None) or take(self, receive, source)
        if delivery is None:
            return None
        due = delivery.made_ns + int(seconds() * 1e9)
        if time.perf_counter_ns() < due:
            held[receive, source] = delivery
            return None
        delivery.arrived_ns = max(delivery.arrived_ns, due)
        return delivery

    def wait(self: Any, what: Any, deadline_ns: int) -> None:
        delivery = held.get((what.receive, what.source))
        if delivery is None:
            block(self, what, deadline_ns)
        else:
            time.sleep(max(delivery.made_ns + int(seconds() * 1e9) - time.perf_counter_ns(), 0) / 1e9)

    setattr(DistributedChannel, "take", late)  # noqa: B010 - the link is slowed from outside
    setattr(DistributedChannel, "block", wait)  # noqa: B010


def stepped(pipe: dl.Pipeline, x: Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Run a step with its update; return what it took, and what was changed before it."""
    moves, program = len(pipe.moves), pipe.program
    begun = time.perf_counter()
    pipe.step(x, target=x)
    pipe.settle()
    optimizer.step()
    optimizer.zero_grad()
    pipe.settle()
    seconds = time.perf_counter() - begun
    timeline = pipe.timeline()
    moved = pipe.moves[-1] if len(pipe.moves) > moves else None
    pause = 0.0 if moved is None else moved.total_seconds
    whole = timeline.makespan + pause
    return {
        "seconds": seconds,
        "makespan": timeline.makespan,
        "pause": pause,
        "bubble": 1.0 - sum(timeline.busy) / (timeline.num_ranks * whole),
        "loads": list(timeline.busy),
        "balance": None if moved is None else list(moved.balance_after),
        "bytes": 0 if moved is None else moved.bytes_moved,
        "send_seconds": 0.0 if moved is None else moved.seconds.get("send", 0.0),
        "program": pipe.program.name if pipe.program is not program else None,
        "microbatches": pipe.program.num_microbatches,
    }


def rank_slowed(case: str, steps: int, given: dict[str, Any], record: str | None) -> list[dict[str, Any]]:
    """Run a case on this rank, and return its steps."""
    prepare(given)
    rows, microbatches = given["rows"], given["microbatches"]
    x = torch.randn(rows * microbatches, _WIDTH, generator=torch.Generator().manual_seed(1))
    found = []
    half = given["blocks"] // 2
    settings: dict[str, Any] = {"balance": [half, given["blocks"] - half], "num_microbatches": microbatches}
    adapt = {"program": False, "within": 200, "rebalance": "half" if case == "half" else "solve"}
    with dl.Pipeline(
        model_of(given["blocks"]),
        loss_fn=nn.functional.mse_loss,
        check_model=False,
        adapt=adapt,
        record=True if record is None else record,
        **settings,
    ) as pipe:
        optimizer = pipe.optimizer(torch.optim.Adam, lr=1e-4)
        for step in range(steps):
            Slowed.slow = slowness(case, step, given) if pipe.rank == 1 else 1.0
            found.append(stepped(pipe, x, optimizer) | {"slow": slowness(case, step, given)})
    return found


def slowness(case: str, step: int, given: dict[str, Any]) -> float:
    """Return how much slower rank 1 is in a step."""
    if case == "slowing":
        return float(min(1.0 + 0.01 * max(step - given["since"] // 5, 0), SLOW))
    if case in ("sudden", "half"):
        return SLOW if given["since"] <= step < 2 * given["since"] else 1.0
    return 3.0 if case == "noisy" and step == given["since"] // 2 else 1.0


def static_cuts(given: dict[str, Any], steps: int) -> dict[int, float]:
    """Return the median step of every cut near the best one, while rank 1 is slow; cuts take turns."""
    prepare(given)
    rows, microbatches, blocks = given["rows"], given["microbatches"], given["blocks"]
    x = torch.randn(rows * microbatches, _WIDTH, generator=torch.Generator().manual_seed(1))
    middle = round(blocks * SLOW / (1 + SLOW))
    Slowed.slow = SLOW if torch.distributed.get_rank() == 1 else 1.0
    cuts = [at for at in range(middle - 2, middle + 3) if 0 < at < blocks]
    pipes, taken = {}, dict[int, list[float]]()
    for at in cuts:
        pipe = dl.Pipeline(
            model_of(blocks),
            loss_fn=nn.functional.mse_loss,
            check_model=False,
            balance=[at, blocks - at],
            num_microbatches=microbatches,
        )
        pipes[at], taken[at] = (pipe, pipe.optimizer(torch.optim.Adam, lr=1e-4)), []
    for step in range(steps + 1):
        for at, (pipe, optimizer) in pipes.items():
            entry = stepped(pipe, x, optimizer)
            taken[at] += [entry["seconds"]] if step else []
    for pipe, _ in pipes.values():
        pipe.close()
    return {at: median(each) for at, each in taken.items()}


def channel_rate(num_bytes: int) -> float:
    """Return the bytes a second at which the pipeline's channel carries one large tensor from rank 0 to rank 1."""
    from drumline.channel.transfer import TensorShape, transferred

    torch.set_num_threads(1)
    sent, taken = torch.ones(num_bytes // 4), list[float]()
    with dl.Pipeline(model_of(2), loss_fn=nn.functional.mse_loss, num_microbatches=2, check_model=False) as pipe:
        pipe.step(torch.ones(2, _WIDTH), target=torch.ones(2, _WIDTH))
        crew, arrived = pipe._run.crew, dict[int, list[Tensor]]()
        crew.connect([(0, 1)])
        for _ in range(6):
            pipe.gather(None)
            begun = time.perf_counter()
            away = {1: [sent]} if pipe.rank == 0 else {}
            coming = {0: [TensorShape.of(sent)]} if pipe.rank == 1 else {}
            crew.drive([transferred(crew.channels[0], away, coming, sent.device, arrived)])
            pipe.gather(None)
            taken.append(time.perf_counter() - begun)
    return num_bytes / median(taken[1:])


def slow_link(steps: int, given: dict[str, Any], record: str | None, link: Any) -> dict[str, Any]:
    """Run with a link that gets slow; return the steps, and the optimum for its delay."""
    import os

    prepare(given)
    now, rank = [0.0], int(os.environ["RANK"])
    if link is None:
        hold_messages(lambda: now[0])
    else:
        torch.distributed.destroy_process_group()
        for name in ("GLOO_SOCKET_IFNAME", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        os.environ.update({"MASTER_ADDR": link.hosts.addresses[0], "MASTER_PORT": "29507"})
        link.hosts.enter(rank)
    microbatches = given["microbatches"] // 2
    # Messages of 24 KiB travel in one packet with their header.
    x = torch.randn(16 * microbatches, _WIDTH, generator=torch.Generator().manual_seed(1))
    blocks = 4 * given["blocks"]
    found, told = [], {}
    with dl.Pipeline(
        model_of(blocks),
        loss_fn=nn.functional.mse_loss,
        check_model=False,
        schedule="zb-h1",
        balance=[blocks // 2, blocks - blocks // 2],
        num_microbatches=microbatches,
        transport="gloo",
        adapt={"rebalance": "keep", "max_activations": 8},
        record=True if record is None else record,
    ) as pipe:
        optimizer = pipe.optimizer(torch.optim.Adam, lr=1e-4)
        seen = []
        for step in range(steps):
            now[0] = DELAY if step >= given["since"] // 2 else 0.0
            if link is not None and rank == 0:
                link.hold(now[0])
            found.append(stepped(pipe, x, optimizer))
            seen.append(pipe.timeline())
        if pipe.rank == 0:
            told = optimum(seen[-5:], pipe.program, microbatches)
    return {"steps": found, **told}


def optimum(seen: list[Any], program: dl.Program, microbatches: int) -> dict[str, float]:
    """Return the shortest step that a search finds for what was measured, and what none can go below."""
    from drumline.core.measured.costs import costs_of

    costs = costs_of(seen, quickest=True)
    limit = dl.Limit(max_activations=8)
    best = dl.search(costs, program.placement, num_microbatches=microbatches, limit=limit, seconds=10.0)
    delay = max(edge.latency for edge in costs.edges.values())
    return {"optimum": best.value, "bound": float(best.bound.value), "delay": delay}


def number_of_microbatches(steps: int, given: dict[str, Any], fixed: int | None) -> list[dict[str, Any]]:
    """Run with a fixed cost of every call from the middle on; adapt the number of microbatches unless it is given."""
    prepare(given)
    batch = given["rows"] * given["microbatches"] // 4
    x = torch.randn(batch, _WIDTH, generator=torch.Generator().manual_seed(1))
    blocks = max(given["blocks"] // 3, 4)
    found = []
    with dl.Pipeline(
        model_of(blocks),
        loss_fn=nn.functional.mse_loss,
        check_model=False,
        balance=[blocks // 2, blocks - blocks // 2],
        num_microbatches=fixed or 8,
        adapt=fixed is None and {"program": False, "rebalance": "keep", "microbatches": "batch", "max_activations": 16},
    ) as pipe:
        optimizer = pipe.optimizer(torch.optim.Adam, lr=1e-4)
        for step in range(steps):
            Slowed.fixed = 0 if step < steps // 2 else 12
            found.append(stepped(pipe, x, optimizer))
    return found


# ---- what is printed -------------------------------------------------------------------------------------------------


def merged(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return every step as the median of several runs; changes are those of the first."""
    each = []
    for steps in zip(*runs, strict=True):
        middle = {name: median(step[name] for step in steps) for name in ("seconds", "makespan", "bubble", "pause")}
        each.append(steps[0] | middle)
    return each


def show(case: str, steps: list[dict[str, Any]], first: int) -> dict[str, Any]:
    """Print a case, and return its figures."""
    changes = [(at, step) for at, step in enumerate(steps) if step["balance"] or step["program"]]
    worst = max(step["bubble"] for step in steps[first:])
    print(f"{case}: {len(steps)} steps, median {median(step['makespan'] for step in steps) * 1e3:.0f} ms")
    print(f"  largest bubble from step {first} on {worst:.1%}, least utilisation {1 - worst:.1%}")
    longest = max(step["seconds"] for step in steps[first:]) / median(step["seconds"] for step in steps[first:])
    print(f"  longest step {longest:.2f} of the median")
    for at, entry in changes:
        moved = f"to {entry['balance']}" if entry["balance"] else f"to {entry['program']}"
        rate = entry["bytes"] / entry["send_seconds"] if entry["send_seconds"] else 0.0
        print(
            f"  before step {at}: {moved}, pause {entry['pause'] * 1e3:.1f} ms, {entry['bytes'] / 2**20:.1f} MiB,"
            f" {rate / 2**20:.0f} MiB/s"
        )
    return {"case": case, "worst_bubble": worst, "longest": longest, "changes": [at for at, _ in changes]}


def draw(case: str, steps: list[dict[str, Any]]) -> str:
    """Return a chart of a case: bubble by step, what is slow, and where something was changed."""
    from drumline.report.draw.chart import Series, chart

    series = [Series("bubble, %", [(at, 100 * step["bubble"]) for at, step in enumerate(steps)])]
    if "slow" in steps[0]:
        slower = [(at, 100 * (step["slow"] - 1)) for at, step in enumerate(steps)]
        series.append(Series("how much slower rank 1 is, %", slower, dashed=True))
    changed = [(at, 100 * step["bubble"]) for at, step in enumerate(steps) if step["balance"] or step["program"]]
    if changed:
        series.append(Series("first step after a change", changed, marks=True))
    return chart(series, title=f"{case}: bubble by step", x_label="step", y_label="%", height=260)


@contextmanager
def link_between_hosts() -> Iterator[Any]:
    """Play two hosts with a relay between them, if that is possible here; else give None."""
    try:
        from held_link import held_link
        from hosts.namespaces import why_not
    except ImportError:
        yield None
        return
    if why_not():
        yield None
        return
    with held_link() as link:
        yield link


def ranked(run: Any, *given: Any) -> Any:
    return dl.launch(run, *given, num_ranks=2)[0]


def measured(case: str, args: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
    """Run one case, print it, and return its figures."""
    since = given["since"]
    folder = None if args.out is None else str(args.out / case)
    if case in ("slowing", "sudden", "half", "noisy"):
        steps = {"slowing": since // 5 + 60, "noisy": since}.get(case, 2 * since + 20)
        runs = args.runs if case == "slowing" else 1
        every = [ranked(rank_slowed, case, steps, given, folder if not run else None) for run in range(runs)]
        found = merged(every)
        told = show(case, found, 3 if case == "slowing" else next(
            (at for at, entry in enumerate(found) if entry["balance"]), 3))  # fmt: skip
        if case in ("sudden", "half"):
            if sizes := [entry["bytes"] for entry in found if entry["bytes"]]:
                rate = ranked(channel_rate, sizes[0])
                shares = [entry["bytes"] / entry["send_seconds"] / rate for entry in found if entry["send_seconds"]]
                told["share_of_rate"] = shares
                print(f"  the channel carries {rate / 2**20:.0f} MiB/s; moves reach"
                      f" {', '.join(f'{share:.0%}' for share in shares)} of that")  # fmt: skip
            for what, begin, end in (("away", since, 2 * since), ("back", 2 * since, steps)):
                moves = [at for at in told["changes"] if begin <= at < end]
                told[what] = max(entry["bubble"] for entry in found[moves[0] if moves else begin : end])
                since_when = f"the move {what}" if moves else f"step {begin} on, without a move,"
                print(f"  largest bubble from {since_when} to step {end}: {told[what]:.1%}")
            each = ranked(static_cuts, given, 6)
            after = [entry["seconds"] for entry in found[since + 12 : 2 * since]]
            best = min(each, key=each.__getitem__)
            told |= {"detected_after": told["changes"][0] - since if told["changes"] else None,
                     "beside": each[best] / median(after)}  # fmt: skip
            how_soon = f"moved {told['detected_after']} steps after the change" if told["changes"] else "nothing moved"
            print(f"  {how_soon}; best static cut {best} blocks on rank 0:")
            print(f"  throughput beside it {told['beside']:.1%}")
        return {**told, "steps": found}
    if case == "link":
        with link_between_hosts() as link:
            told = ranked(slow_link, since + 20, given, folder, link)
        how = "the receiver holds messages" if link is None else "a relay holds packets"
        figures = {**show(case, told["steps"], since // 2), "how": how}
        print(f"  {how}; a message takes {told['delay'] * 1e3:.1f} ms")
        last = median(step["makespan"] for step in told["steps"][-5:])
        print(f"  last steps {last * 1e3:.1f} ms, {last / told['optimum']:.3f} of the simulated optimum")
        return {**figures, **told, "beside_optimum": last / told["optimum"]}
    steps = 2 * since
    adapted = ranked(number_of_microbatches, steps, given, None)
    static = {number: ranked(number_of_microbatches, steps, given, number) for number in (1, 2, 3, 4, 6, 8, 12, 16, 32)}
    halves = {}
    for name, (begin, end) in {"first": (since - 15, since), "second": (steps - 15, steps)}.items():
        each = {number: median(step["seconds"] for step in run[begin:end]) for number, run in static.items()}
        best = min(each, key=each.__getitem__)
        mine = median(step["seconds"] for step in adapted[begin:end])
        halves[name] = mine / each[best]
        print(f"number, {name} half: {adapted[end - 1]['microbatches']} microbatches, best static {best};"
              f" {mine / each[best]:.3f} of its step")  # fmt: skip
    for at, value in enumerate(adapted[1:], start=1):
        if value["microbatches"] != adapted[at - 1]["microbatches"]:
            value["program"] = f"{value['microbatches']} microbatches"
            print(f"  before step {at}: {value['program']}")
    return {"case": case, "beside_best": halves, "steps": adapted}


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = ["slowing", "sudden", "half", "noisy", "link", "number"]
    parser.add_argument("--cases", nargs="*", default=cases, choices=cases)
    for name, value in {"blocks": 24, "rows": 64, "microbatches": 32, "since": 50, "runs": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rest", type=float, default=0.0, help="microseconds that a block rests for each row")
    parser.add_argument("--out", type=Path, help="folder for pictures and runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    given = {name: getattr(args, name) for name in ("blocks", "rows", "microbatches", "since", "rest")}
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    results = {case: measured(case, args, given) for case in args.cases}
    if args.out is not None:
        for case, told in results.items():
            (args.out / f"adapt-{case}.svg").write_text(draw(case, told["steps"]), encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
