"""The unsplit model: its own forward with the user's hooks, modes and attributes, and none of our pieces.

A pipeline seeds the random generators before each of its blocks. To draw the same numbers in the unsplit model, hooks
on the same modules seed them when the forward reaches them:

    model(x) ──► [seed "embed"] embed ──► [seed "layers.0"] layers.0 ──► ...

The hooks only seed. A model that is a list of blocks has no forward: its blocks run one after another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from drumline.engine.model.blocks import is_chain
from drumline.model.block import Block, Model, blocks_of
from drumline.model.randomness import Randomness, may_draw


class Plain:
    """A model and the names of the blocks before which a pipeline seeds.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    >>> x = torch.ones(3, 2)
    >>> with Plain(model, ["0", "1"]).seeding(0, Randomness(0, torch.device("cpu"))) as run:
    ...     bool((run(x) == run(x)).all())
    True
    """

    def __init__(self, model: Model, names: Sequence[str]) -> None:
        self.model = model
        self.names = list(names)
        self.is_chain = is_chain(model)  # as it was when it was cut
        self._starts: dict[nn.Module, dict[int, str]] = {}  # names of blocks, by module and number of the call
        if not isinstance(model, nn.Module) or isinstance(model, nn.ModuleList):
            return
        if self.is_chain:
            seen_counts: Counter[nn.Module] = Counter()
            for block in blocks_of(model):
                seen_counts[block.module] += 1
                self._starts.setdefault(block.module, {})[seen_counts[block.module]] = block.name
            return
        there = dict(model.named_modules(remove_duplicate=False))
        for name in names:
            base, _, number = name.partition("#")
            self._starts.setdefault(there[base], {})[int(number or 1)] = name

    @property
    def modules(self) -> list[nn.Module]:
        """All modules of the model."""
        if isinstance(self.model, nn.Module):
            return list(self.model.modules())
        return list(dict.fromkeys(module for block in blocks_of(self.model) for module in block.module.modules()))

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by all of their names."""
        if isinstance(self.model, nn.Module):
            return dict(self.model.named_parameters(remove_duplicate=False))
        named = (
            block.module.named_parameters(prefix=block.name, remove_duplicate=False) for block in blocks_of(self.model)
        )
        return {name: param for each in named for name, param in each}

    def _drawing(self) -> Collection[str]:
        """Return the blocks to seed: other threads share the generators, so those that draw nothing leave them alone.

        Of a model with its own forward all are seeded, since code between blocks may draw.
        """
        if not self.is_chain:
            return self.names
        return {block.name for block in blocks_of(self.model) if may_draw(block.module)}

    @contextmanager
    def seeding(self, microbatch: int, randomness: Randomness) -> Iterator[Callable[[Any], Any]]:
        """Yield a function that runs the model on a microbatch with seeded blocks, even if a backward reruns one."""
        running: list[nn.Module] = []
        calls: dict[nn.Module, list[str]] = {start: [] for start in self._starts}
        drawing = self._drawing()

        def enter(module: nn.Module, *_: Any) -> None:
            if not running:
                known = calls[module]
                if torch._C._current_graph_task_id() < 0:
                    known.append(self._starts[module].get(len(known) + 1, ""))
                    name = known[-1]
                else:
                    name = known.pop() if len(known) > 1 else known[0]
                if name and name != self.names[0] and name in drawing:
                    randomness.apply(microbatch, name)
            running.append(module)

        def leave(*_: Any) -> None:
            running.pop()

        def run(value: Any) -> Any:
            for each in calls.values():
                each.clear()
            return self.run(value, microbatch, randomness, drawing)

        with ExitStack() as stack:
            for module in self._starts:
                stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield run

    def run(self, value: Any, microbatch: int, randomness: Randomness, drawing: Collection[str]) -> Any:
        """Run the model, of which those blocks are seeded that may draw."""
        if not self._starts:
            return through(blocks_of(self.model), value, microbatch, randomness, drawing)
        assert isinstance(self.model, nn.Module)
        if self.names[0] in drawing:
            randomness.apply(microbatch, self.names[0])
        return self.model(value) if self.is_chain else self.model(*value.args, **value.kwargs)


def through(
    blocks: Iterable[Block], value: Any, microbatch: int, randomness: Randomness, drawing: Collection[str]
) -> Any:
    """Run blocks one after another, and seed before those that may draw."""
    for block in blocks:
        if block.name in drawing:
            randomness.apply(microbatch, block.name)
        value = block.module(value)
    return value
