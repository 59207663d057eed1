"""What overlapped pairs hide of the exchange of tokens between experts: PP2 x EP2 by dualpipe-v over gloo, on CPUs.

    python benchmarks/experts.py [--hidden 512] [--tokens 256] [--steps 24] [--balanced]

Steps alternate in one run: halves of a pair take turns at their exchanges, or run one after the other. `exposed` is the
time that a rank waits for exchanges of tokens in overlapped pairs, and `elsewhere` in the forwards and backwards of the
ramps, which no other half can hide; both are medians over steps. `step` is the time of the whole step. The last line is
the mean over ranks. With `--balanced` every expert gets as many tokens as any other: no rank then waits for one whose
experts have more to do, and what is left is the exchange itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

import drumline as dl
from drumline.runtime.axes.axes import Axes


class Layer(nn.Module):
    """A block whose experts add to x."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.moe = dl.MoE(hidden, 2 * hidden, num_experts=4, top_k=2)

    def forward(self, x: Tensor) -> Tensor:
        """Return x with what the experts made of it."""
        made: Tensor = x + self.moe(self.norm(x))
        return made


def balance(model: nn.Sequential, x: Tensor) -> None:
    """Let token number n go to experts n and n + 1, counted round: mark it in x, and let routers see the mark alone."""
    experts = 4
    marks = torch.eye(experts).repeat(x.shape[1] // experts, 1)
    x[..., :experts] = 30.0 * marks
    for layer in model:
        assert isinstance(layer, Layer)
        with torch.no_grad():
            layer.moe.router.weight.zero_()
            layer.moe.router.weight[:, :experts] = torch.eye(experts) + 0.5 * torch.eye(experts).roll(1, 0)


def run(hidden: int, tokens: int, steps: int, balanced: bool) -> dict[str, list[tuple[float, float, float]]]:
    """Return, of each kind, every step's seconds, and the seconds of waiting in its pairs and elsewhere."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(hidden) for _ in range(8)))
    found: dict[str, list[tuple[float, float, float]]] = {"one by one": [], "in turns": []}
    waited, running = [0.0, 0.0], list[Any]()
    plain = Axes.wait

    def wait(self: Axes, work: Any, what: str, names: Any) -> None:
        start = time.perf_counter()
        plain(self, work, what, names)
        action = running[0].current if running else None
        if list(names) == ["ep"] and action is not None:
            waited[len(action.work) == 1] += time.perf_counter() - start

    torch.manual_seed(int(os.environ["RANK"]) % 2)  # lines have batches of their own
    x = torch.randn(8, tokens, hidden)
    if balanced:
        balance(model, x)
    setattr(Axes, "wait", wait)  # noqa: B010 - measured from outside
    options: dict[str, Any] = {"mesh": {"pp": 2, "ep": 2}, "schedule": "dualpipe-v", "num_microbatches": 8}
    with dl.Pipeline(model, loss_fn=nn.functional.mse_loss, check_finite=False, **options) as pipe:
        running += pipe._engine.executors
        for step in range(steps + 2):
            kind = "in turns" if step % 2 else "one by one"
            pipe._engine.takes_turns = kind == "in turns"
            pipe.gather(step)
            waited[:], start = (0.0, 0.0), time.perf_counter()
            pipe.step(x, target=x)
            found[kind] += [(time.perf_counter() - start, waited[0], waited[1])] if step > 1 else []
    setattr(Axes, "wait", plain)  # noqa: B010
    return found


def main() -> None:
    """Print a table of all ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, value in (("hidden", 512), ("tokens", 256), ("steps", 24)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--balanced", action="store_true", help="as many tokens for every expert")
    given = vars(parser.parse_args())
    means: dict[str, list[float]] = {}
    for rank, found in enumerate(dl.launch(run, *given.values(), num_ranks=4)):
        for kind, each in found.items():
            step, exposed, elsewhere = (1e3 * statistics.median(one[at] for one in each) for at in range(3))
            spread = " to ".join(f"{1e3 * one[0]:.0f}" for one in (min(each), max(each)))
            times = f"step {step:7.1f} ms ({spread})  exposed {exposed:6.1f} ms  elsewhere {elsewhere:6.1f} ms"
            print(f"rank {rank}  {kind:10}  {times}")
            means.setdefault(kind, []).append(exposed)
    plain, turns = (statistics.fmean(means[kind]) for kind in ("one by one", "in turns"))
    print(f"in pairs: {plain:.1f} ms exposed, {turns:.1f} ms in turns: {1 - turns / plain:.0%} hidden")


if __name__ == "__main__":
    main()
