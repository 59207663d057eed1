"""A pipeline that runs in the simulator: ranks and links slow down by a script, and a `Decider` sees every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from drumline.adapt.decide import Decider
from drumline.adapt.proposal import Arrangement, Proposal
from drumline.adapt.rebalance import Layers
from drumline.adapt.repair import repaired
from drumline.adapt.settings import Adapt
from drumline.core.costs import Costs
from drumline.core.measured.measured import Measured
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from drumline.plan.device.blocks import OpTimes, Profile, ProfiledBlock
from drumline.schedules import generate
from simulated_runs import records_of

BLOCK = 1e-3  # seconds of a block's forward; its backward takes twice as long


def profile(num_blocks: int, factors: dict[int, float] | None = None, *, weight: int = 4000) -> Profile:
    """Return blocks that all take the same, but for factors of some."""
    layers = []
    for at in range(num_blocks):
        item = BLOCK * (factors or {}).get(at, 1.0)
        layers.append(ProfiledBlock(str(at), OpTimes(item, 2 * item, item, item), 1000, 500, 100, weight, weight, 100))
    return Profile(tuple(layers), OpTimes(0.0, 0.0, 0.0, 0.0), "cpu", 1)


class AtOnce:
    """A search that has ended when it begins."""

    def __init__(self, *given: Any, seconds: float) -> None:
        self._found = repaired(*given, seconds=seconds)

    def result(self) -> Any:
        return self._found

    def stop(self) -> None:
        pass


@dataclass
class Virtual:
    """Runs steps; `slowness(step)` returns every rank's factor, `latency(step)` the seconds of a message.

    `truth` is what blocks take, if that is not what was timed.
    """

    program: Program
    counts: tuple[int, ...]
    slowness: Callable[[int], list[float]] = lambda step: [1.0, 1.0]
    latency: Callable[[int], float] = lambda step: 1e-5
    settings: Adapt = field(default_factory=Adapt)
    timed: Profile | None = None
    truth: Profile | None = None
    build: Callable[[int], Program | None] | None = None
    fixed: Callable[[int], float] = lambda step: 0.0  # seconds of every action, whatever its size
    unseen: Callable[[Program], float] = lambda program: 0.0  # seconds after every action that no record shows
    rows: int = 0
    proposals: list[Proposal] = field(default_factory=list)
    steps: list[Measured] = field(default_factory=list)
    now: tuple[int, ...] = ()  # the cut of the step that runs
    num_microbatches: int = 0  # its number

    def run(self, num_steps: int) -> Virtual:
        """Run so many steps, and take up what is proposed."""
        timed = self.timed or profile(sum(self.counts))
        now = Arrangement(self.program, self.counts)
        layers = Layers(timed, self.program, max_bytes=self.settings.max_bytes)
        decider = Decider(self.settings, now, layers=layers, build=self.build, search=AtOnce)
        first = self.program.num_microbatches
        for step in range(num_steps):
            now = decider.now
            self.now, self.num_microbatches = now.counts, now.program.num_microbatches
            layers = Layers(self.truth or timed, now.program)
            share = first / now.program.num_microbatches
            costs = layers.costs(now.counts)
            each: dict[str, Any] = {}
            unseen = self.unseen(now.program)
            for name in ("forward", "backward", "backward_input", "backward_weight"):
                homes = now.program.placement.homes
                plain = costs.per_stage(name, now.program.num_stages)
                slow = self.slowness(step)
                added = self.fixed(step) + unseen
                each[name] = [value * share * slow[home] + added for value, home in zip(plain, homes, strict=True)]
            costs = Costs(**each, comm=self.latency(step))
            measured = Measured(now.program, tuple(records_of(simulate(now.program, costs), step, overhead=unseen)))
            self.steps.append(measured)
            proposal = decider.see(measured, self.rows)
            if proposal is not None:
                self.proposals.append(proposal)
                decider.took(proposal, proposal.after, seconds=0.01, num_bytes=1000)
        self.decider = decider
        return self


def one_f_one_b(num_microbatches: int = 32, num_ranks: int = 2, name: str = "1f1b") -> Program:
    return generate(name, num_ranks=num_ranks, num_microbatches=num_microbatches)


def settings(**given: Any) -> Adapt:
    return replace(Adapt(seconds=1.0), **given)
