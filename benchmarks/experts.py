"""What overlapped pairs hide of the exchange of tokens between experts: PP2 x EP2 by dualpipe-v over gloo, on CPUs.

    python benchmarks/experts.py [--hidden 512] [--tokens 256] [--steps 24] [--balanced] [--bare]

Steps alternate in one run: halves of a pair take turns at their exchanges, or run one after the other. A rank waits for
one of two things, which the ranks of one host tell apart by their common clock:

    exposed   the exchange itself: from when both lines have started it until it has ended
    partner   the other line, which has not started it yet because it had more to compute

Both count exchanges in overlapped pairs. `ramps` is what is exposed in the forwards and backwards outside of them: no
other half can hide it. All are medians over steps, and the last lines are means over ranks. With `--balanced` every
expert gets as many tokens as any other. With `--bare` blocks have experts alone and no attention.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import drumline as dl
from drumline.channel.lines.axes import Axes

NUM_EXPERTS, NUM_HEADS = 4, 8
KINDS = ("one by one", "in turns")


class Layer(nn.Module):
    """A transformer block whose feedforward network is a mixture of experts."""

    def __init__(self, hidden: int, bare: bool) -> None:
        super().__init__()
        self.bare = bare
        self.norm = nn.LayerNorm(hidden)
        self.moe = dl.MoE(hidden, 2 * hidden, num_experts=NUM_EXPERTS, top_k=2)
        if not bare:
            self.norm_in, self.qkv = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden)
            self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return x with what attention and the experts made of it."""
        if not self.bare:
            x = x + self.attended(self.norm_in(x))
        made: Tensor = x + self.moe(self.norm(x))
        return made

    def attended(self, x: Tensor) -> Tensor:
        """Return what attention makes of x."""
        query, key, value = self.qkv(x).unflatten(-1, (3, NUM_HEADS, -1)).movedim(-3, 0).transpose(-3, -2)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        made: Tensor = self.out(seen.transpose(-3, -2).flatten(-2))
        return made


def balance(model: nn.Sequential, x: Tensor) -> None:
    """Let token number n go to experts n and n + 1, counted round: mark it in x, and let routers see the mark alone."""
    marks = torch.eye(NUM_EXPERTS).repeat(x.shape[1] // NUM_EXPERTS, 1)
    x[..., :NUM_EXPERTS] = 30.0 * marks
    for layer in model:
        assert isinstance(layer, Layer)
        with torch.no_grad():
            layer.moe.router.weight.zero_()
            layer.moe.router.weight[:, :NUM_EXPERTS] = torch.eye(NUM_EXPERTS) + 0.5 * torch.eye(NUM_EXPERTS).roll(1, 0)


@dataclass
class Exchange:
    """One exchange of a step: when this rank started it, waited for it and had it, in the seconds of a common clock."""

    started: float
    waited: float = 0.0
    ended: float = 0.0
    in_pair: bool = False


@dataclass(frozen=True)
class Step:
    """What a rank saw in one step."""

    kind: str
    seconds: float
    exchanges: list[Exchange]


def run(hidden: int, tokens: int, steps: int, balanced: bool, bare: bool) -> list[Step]:
    """Return what this rank saw in every step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(hidden, bare) for _ in range(8)))
    found, seen, of = list[Step](), list[Exchange](), dict[Any, Exchange]()
    running = list[Any]()
    plain_wait, plain_exchange = Axes.wait, dist.all_to_all_single

    def exchange(*given: Any, **options: Any) -> Any:
        seen.append(Exchange(time.perf_counter()))
        work = plain_exchange(*given, **options)
        of[work] = seen[-1]
        return work

    def wait(self: Axes, work: Any, what: str, names: Any) -> None:
        start = time.perf_counter()
        plain_wait(self, work, what, names)
        if work in of:
            item, action = of.pop(work), running[0].current
            item.waited, item.ended, item.in_pair = start, time.perf_counter(), len(action.work) > 1

    torch.manual_seed(int(os.environ["RANK"]) % 2)  # lines have batches of their own
    x = torch.randn(8, tokens, hidden)
    if balanced:
        balance(model, x)
    options: dict[str, Any] = {"mesh": {"pp": 2, "ep": 2}, "schedule": "dualpipe-v", "num_microbatches": 8}
    with dl.Pipeline(model, loss_fn=nn.functional.mse_loss, check_finite=False, **options) as pipe:
        pipe.step(x, target=x)
        running += pipe._engine.executors
        setattr(Axes, "wait", wait)  # noqa: B010 - measured from outside
        setattr(dist, "all_to_all_single", exchange)  # noqa: B010
        for number in range(steps + 2):
            kind = KINDS[number % 2]
            pipe._engine.take_turns(kind == "in turns")
            pipe.gather(number)
            seen.clear()
            start = time.perf_counter()
            pipe.step(x, target=x)
            found += [Step(kind, time.perf_counter() - start, list(seen))] if number > 1 else []
        setattr(Axes, "wait", plain_wait)  # noqa: B010
        setattr(dist, "all_to_all_single", plain_exchange)  # noqa: B010
    return found


def waits(own: Step, other: Step) -> tuple[float, float, float]:
    """Return the seconds exposed in pairs, waiting for the partner in pairs, and exposed elsewhere."""
    exposed = partner = ramps = 0.0
    for mine, its in zip(own.exchanges, other.exchanges, strict=True):
        itself = max(0.0, mine.ended - max(mine.waited, its.started))
        exposed += itself if mine.in_pair else 0.0
        partner += mine.ended - mine.waited - itself if mine.in_pair else 0.0
        ramps += 0.0 if mine.in_pair else itself
    return exposed, partner, ramps


def main() -> None:
    """Print a table of all ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, value in (("hidden", 512), ("tokens", 256), ("steps", 24)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--balanced", action="store_true", help="as many tokens for every expert")
    parser.add_argument("--bare", action="store_true", help="blocks of experts alone, without attention")
    of_ranks = dl.launch(run, *vars(parser.parse_args()).values(), num_ranks=4)
    means: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in KINDS}
    for rank, found in enumerate(of_ranks):
        both = list(zip(found, of_ranks[rank ^ 1], strict=True))  # the other line's rank of the same stages
        for kind in KINDS:
            seconds = [1e3 * own.seconds for own, _ in both if own.kind == kind]
            parts = zip(*(waits(*pair) for pair in both if pair[0].kind == kind), strict=True)
            exposed, partner, ramps = (1e3 * statistics.median(part) for part in parts)
            step = f"step {statistics.median(seconds):7.1f} ms ({min(seconds):.0f} to {max(seconds):.0f})"
            print(
                f"rank {rank}  {kind:10}  {step}  exposed {exposed:6.1f}  partner {partner:6.1f}  ramps {ramps:6.1f} ms"
            )
            means[kind].append((exposed, exposed + partner))
    for at, what in enumerate(("the exchange itself", "with waits for the partner")):
        plain, turns = (statistics.fmean(entry[at] for entry in means[kind]) for kind in KINDS)
        print(f"in pairs, {what}: {plain:.1f} ms exposed, {turns:.1f} ms in turns: {1 - turns / plain:.0%} hidden")


if __name__ == "__main__":
    main()
