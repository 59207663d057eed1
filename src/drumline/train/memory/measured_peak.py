"""What a rank of a run has really held at its fullest moment, to hold the forecast against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor, nn
from torch.optim import Optimizer

from drumline.core.errors import RunError
from drumline.core.measured.measured import Measured
from drumline.model.quantised.packed import num_bytes
from drumline.pipeline.pipeline import Pipeline
from drumline.runtime.stage import Stage
from drumline.train.memory.forecast import RankMemory, moments_of


def peak_memory(
    pipe: Pipeline, optimizers: Sequence[Optimizer], timeline: Measured, *, accumulates: bool = False
) -> tuple[RankMemory, ...]:
    """Return what each rank of this process held at its fullest moment of a weighed step.

    Call it after an update and before the gradients are forgotten. `timeline` is that of a step that was weighed: the
    first of a recorded run, or any with `weigh=True`. What was received from other ranks is not weighed.
    """
    if timeline.stash is None:
        raise RunError(
            "memory was not measured in the step", fix="take the first step of a recorded run, or pass weigh=True"
        )
    state = _MemoryState(optimizers, pipe._updates.masters.of, pipe._updates.validation.is_on)
    return tuple(
        _rank(executor.rank, list(executor.stages.values()), state, timeline, accumulates)
        for executor in pipe._engine.executors
    )


@dataclass(frozen=True, slots=True)
class _MemoryState:
    optimizers: Sequence[Optimizer]
    updated: Callable[[nn.Parameter], nn.Parameter]  # what an optimizer updates for a parameter
    copies: bool = False  # whether all that an update changes is kept as it was before

    def of(self, parameter: nn.Parameter) -> Iterator[Tensor]:
        """Yield what is kept for a parameter."""
        if not parameter.requires_grad:
            return
        own_parameter = self.updated(parameter)
        if own_parameter is not parameter:
            yield own_parameter
        states = [
            optimizer.state[own_parameter].values() for optimizer in self.optimizers if own_parameter in optimizer.state
        ]
        state = [value for values in states for value in values if isinstance(value, Tensor)]
        yield from state
        if self.copies:
            yield from (own_parameter, *state)


def _rank(rank: int, stages: Sequence[Stage], state: _MemoryState, timeline: Measured, accumulates: bool) -> RankMemory:
    parameters = {id(param): param for stage in stages for block in stage.blocks for param in block.module.parameters()}
    buffers = {id(buffer): buffer for stage in stages for block in stage.blocks for buffer in block.module.buffers()}
    gradients = {stage.index: 0.0 for stage in stages}
    seen_ids: set[int] = set()
    for stage in stages:
        for param in (each for block in stage.blocks for each in block.module.parameters()):
            if param.grad is not None and id(param) not in seen_ids:
                seen_ids.add(id(param))
                gradients[stage.index] += param.grad.nbytes
    row, peaks = timeline.program.timed_rows[rank], timeline.records[rank].peaks
    grown = list(moments_of(row, gradients, accumulates=accumulates))
    at = max(range(len(row)), key=lambda at: grown[at] + peaks[at], default=0)
    return RankMemory(
        weights=float(_bytes(chain(parameters.values(), buffers.values()))),
        gradients=grown[at],
        optimizer=float(_bytes(kept_tensor for param in parameters.values() for kept_tensor in state.of(param))),
        activations=float(peaks[at]),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(map(num_bytes, tensors))
