"""Measure every block of a chain as it will run: as a stage, on this device, with this microbatch size.

One run takes a microbatch through all blocks and back. Each block is a separate stage, timed by the actions' clock:

    F of block 0, 1, ..., n-1      B (or I) of block n-1, ..., 1, 0      W of block 0, ..., n-1

and then through a single stage with all blocks. Gradients are real, and each block finds the caches as the others left
them. n stages take longer than one by the cost of calls (`Profile.overhead`): the blocks of a stage pay it once. A
frozen block has no W, and a block with nothing trainable up to it has neither B nor I.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import BatchError, ModelError
from drumline.model.block import Block, Model, blocks_of
from drumline.model.catalogue import places_in
from drumline.model.kept_state.keeping import as_before
from drumline.model.patches import having_gradients
from drumline.model.quantised.packed import num_bytes
from drumline.model.randomness import Randomness
from drumline.model.watch.keeping import undisturbed
from drumline.plan.device.blocks import OpTimes, Profile, ProfiledBlock
from drumline.profile.chain import Chain, Ops
from drumline.runtime.clocks import clock_for
from drumline.runtime.draft import Clock
from drumline.runtime.recomputing import Buffers

_NUM_WARM_UPS = 3


def profile(
    model: Model | Sequence[Block],
    microbatch: Any,
    *,
    target: Any = None,
    loss_fn: Callable[..., Tensor | None] | None = None,
    num_runs: int = 10,
    max_seconds: float | None = None,
    seed: int = 0,
    clock: Clock | None = None,
    quick: bool = False,
) -> Profile:
    """Measure every block of `model` on its device, with one microbatch; the last block includes the loss.

    Parameters, gradients, buffers, attributes and random numbers are restored afterwards. The whole model and the
    activations of one microbatch must fit on the device. After `max_seconds`, no further run begins. `clock` replaces
    the device's own. If `quick`, every action is timed once, cold, and the cost of calls is not told apart.

    >>> sizes = profile(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), torch.randn(2, 4), num_runs=1)
    >>> [(layer.name, layer.weight_bytes, layer.output_bytes) for layer in sizes.layers]
    [('0', 160, 64), ('1', 0, 64)]
    """
    if num_runs < 1:
        raise ModelError(f"num_runs is {num_runs}", expected="1 or more")
    blocks = blocks_of(model)
    if loss_fn is not None and target is None:
        raise BatchError("there is a loss_fn but no target", fix="pass target=, as to Pipeline.step")
    device = _device_of(blocks)
    randomness, clock = Randomness(seed, device), clock or clock_for(device)
    with left_as_it_was(blocks, randomness):
        separate_blocks = [[block] for block in blocks]
        chains = [
            Chain(stages, randomness, loss_fn, split=split)
            for split in (False, True)
            for stages in (separate_blocks, [blocks])
        ]
        if quick:
            whole, halves = (chain.timed(microbatch, target, clock) for chain in chains[::2])
            runs = [[whole, [[sum(op)] for op in whole], halves, [[sum(op)] for op in halves]]]
        else:
            chains[0].timed(microbatch, target, clock)  # loads kernels and takes memory, which no later run does
            runs = _repeated(lambda: [link.timed(microbatch, target, clock) for link in chains], num_runs, max_seconds)
        sizes = chains[2].weigh(microbatch, target)
        again = Chain(separate_blocks, randomness, loss_fn, split=False, checkpointed=[block.name for block in blocks])
        leaves, more = again.leaves(microbatch, target, sizes)
    separate, at_once, separate_halves, halves_at_once = zip(*runs, strict=True)
    apart_ops, at_once_ops = (
        [[*pair, *other[1:], other[0]] for pair, other in zip(*both, strict=True)]
        for both in ((separate, separate_halves), (at_once, halves_at_once))
    )
    seconds, overhead = _told_apart(apart_ops, at_once_ops)
    spreads = _spreads(apart_ops)
    each = zip(blocks, seconds, sizes, tied(blocks), leaves, more, spreads, strict=True)
    return Profile(
        tuple(
            ProfiledBlock(
                block.name,
                times,
                kept_storages,
                later,
                received,
                *static_bytes(block.module),
                handed_on,
                tied,
                leaf,
                twice,
                spread,
            )
            for block, times, (kept_storages, later, received, handed_on), tied, leaf, twice, spread in each
        ),
        overhead,
        str(device),
        1 if quick else num_runs,
    )


def _device_of(blocks: Sequence[Block]) -> torch.device:
    """Return where the blocks are, if they have memory there."""
    modules = [block.module for block in blocks]
    tensors = (param for module in modules for param in (*module.parameters(), *module.buffers()))
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    if device.type == "meta":
        raise ModelError(
            "the model is on the meta device",
            expected="a model with memory, because profiling runs each block",
            fix="profile a smaller model with the same layers, or call dl.materialise(model) first",
        )
    return device


@contextmanager
def left_as_it_was(blocks: Sequence[Block], randomness: Randomness) -> Iterator[None]:
    """Restore what runs of blocks change: buffers, attributes, gradients, random numbers."""
    modules = [block.module for block in blocks]
    buffers = Buffers(modules)
    with (
        randomness.kept_aside(),
        as_before([layer for module in modules for layer in module.modules()], measuring=True),
        undisturbed(layer for module in modules for layer in module.modules()),
        buffers.as_they_were(buffers.save()),
        having_gradients([param for module in modules for param in module.parameters()]),
    ):
        yield


def _repeated(run: Callable[[], list[Ops]], num_runs: int, max_seconds: float | None) -> list[list[Ops]]:
    """Return the results of the runs after warm-up, fewer of both once `max_seconds` have passed; at least one."""
    begun = time.perf_counter()
    runs = [run()]
    while len(runs) < _NUM_WARM_UPS + num_runs:
        if max_seconds is not None and time.perf_counter() - begun > max_seconds:
            break
        runs.append(run())
    return runs[min(_NUM_WARM_UPS, len(runs) - 1) :]


def _told_apart(single_runs: Sequence[Ops], at_once: Sequence[Ops]) -> tuple[list[OpTimes], OpTimes]:
    """Return each block's own times, and what a call adds to any stage's; medians over runs."""
    blocks = [[median(each) for each in zip(*op, strict=True)] for op in zip(*single_runs, strict=True)]
    calls = [max(sum(seconds > 0 for seconds in op) - 1, 1) for op in blocks]  # a frozen block has none for I or W
    added = [
        max(0.0, median((sum(many) - pair) / more for many, (pair,) in zip(*both, strict=True)))
        for more, *both in zip(calls, zip(*single_runs, strict=True), zip(*at_once, strict=True), strict=True)
    ]
    own_seconds = ([max(0.0, seconds - more) for seconds in op] for op, more in zip(blocks, added, strict=True))
    return [OpTimes(*each) for each in zip(*own_seconds, strict=True)], OpTimes(*added)


def _spreads(single_runs: Sequence[Ops]) -> list[OpTimes]:
    """Return half the interquartile range of each block's times."""

    def spread(values: Sequence[float]) -> float:
        low, _, high = quantiles(values, n=4) if len(values) > 1 else (0.0, 0.0, 0.0)
        return (high - low) / 2

    each = [[spread(values) for values in zip(*op, strict=True)] for op in zip(*single_runs, strict=True)]
    return [OpTimes(*entry) for entry in zip(*each, strict=True)]


def static_bytes(module: nn.Module) -> tuple[int, int]:
    """Return the bytes of a block's weights and buffers, and of its gradients."""
    trained = sum(param.nbytes for param in module.parameters() if param.requires_grad)
    return sum(num_bytes(tensor) for tensor in chain(module.parameters(), module.buffers())), trained


def tied(blocks: Sequence[Block]) -> list[tuple[tuple[str, int, int], ...]]:
    """Return, for each block, the tensors that other blocks hold too: name, bytes of weight and of gradient."""
    uses: dict[int, dict[int, str]] = {}  # by tensor, then by block
    for number, block in enumerate(blocks):
        for place in places_in(block):
            uses.setdefault(id(place.tensor), {}).setdefault(number, place.name)
    tensors_by_block: list[list[tuple[str, int, int]]] = [[] for _ in blocks]
    for number, block in enumerate(blocks):
        for param in chain(block.module.parameters(), block.module.buffers()):
            if len(uses[id(param)]) > 1:
                name = next(iter(uses[id(param)].values()))
                tensors_by_block[number].append((name, num_bytes(param), param.nbytes if param.requires_grad else 0))
    return [tuple(each) for each in tensors_by_block]
