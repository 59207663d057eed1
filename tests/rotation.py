"""Runs that save, rewind, are damaged and crash, drawn at random; with a model of what must be found afterwards.

The model is a tree: every checkpoint knows the one that its state came from. The line of a run is the way from the
checkpoint that was saved last up to the root. One thing must hold, whenever a process dies:

    a whole checkpoint of the line is found, the newest one, as long as damage has left one

A crash is tried at every change of a name in the folder: what lies there just before it is what a dead process leaves.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from drumline.core.errors import RecordError
from drumline.pipeline.pipeline import Pipeline

KEEPS = (None, 1, 1, 2, 2, 3, 5)


@dataclass(eq=False)
class Node:
    """A checkpoint: the step it has, and the one that its state came from."""

    number: int
    step: int
    before: Node | None
    is_whole: bool = True

    def line(self) -> Iterator[Node]:
        """Yield this one and those before it."""
        before: Node | None = self
        while before is not None:
            yield before
            before = before.before


def flip(checkpoint: Path) -> None:
    path = next(checkpoint.glob("model-*.safetensors"))
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 8
    path.unlink()  # a crash's copy of the folder shares its files
    path.write_bytes(raw)


def shorten(checkpoint: Path) -> None:
    path = next(checkpoint.glob("training-*.safetensors"))
    raw = path.read_bytes()
    path.unlink()
    path.write_bytes(raw[:-1])


def lose(checkpoint: Path) -> None:
    next(checkpoint.glob("training-*.safetensors")).unlink()


def lose_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def spoil_manifest(checkpoint: Path) -> None:
    raw = (checkpoint / "manifest.json").read_text()
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "manifest.json").write_text(raw.replace('"num_trained": ', '"num_trained": 1'))


def empty(checkpoint: Path) -> None:
    for path in checkpoint.iterdir():
        path.unlink()


DAMAGE: tuple[Callable[[Path], None], ...] = (flip, shorten, lose, lose_manifest, spoil_manifest, empty)


def small_pipeline() -> Pipeline:
    """Return a pipeline whose checkpoints are small."""
    pipe = Pipeline([nn.Linear(1, 1)], loss_fn=nn.functional.mse_loss, num_microbatches=1, device="cpu")
    pipe.optimizer(torch.optim.SGD, lr=0.1)
    return pipe


@dataclass
class Life:
    """One folder, what a run does with it, and what must be true of it."""

    folder: Path
    draw: random.Random
    pipe: Pipeline
    reader: Pipeline
    nodes: list[Node] = field(default_factory=list)
    head: Node | None = None  # what the pipeline's state came from
    last: Node | None = None  # what was saved last
    crashes: int = 0
    told: list[str] = field(default_factory=list)  # for whoever has to read a failure

    def there(self) -> dict[int, Path]:
        """Return the checkpoints that the folder shows, by step."""
        return {int(path.name[5:]): path for path in self.folder.glob("step-*")}

    def at(self, step: int) -> Node | None:
        """Return the checkpoint that has a step's name: the one that was saved under it last."""
        return next((node for node in reversed(self.nodes) if node.step == step), None)

    def newest(self, tip: Node | None, there: set[int]) -> Node | None:
        """Return the newest whole checkpoint of a line."""
        ways = tip.line() if tip is not None else iter(())
        return next((way for way in ways if way.is_whole and way.step in there and self.at(way.step) is way), None)

    def save(self) -> None:
        """Save a later step, or now and then the same or an earlier one; try a crash at every change of a name."""
        before = self.head.step if self.head is not None else 0
        step = max(0, before + self.draw.choice((1, 1, 2, 2, 3, 0, -1)))
        keep = self.draw.choice(KEEPS)
        was = self.last, set(self.there())
        # To save an earlier step is to go back by hand: what is beyond it did not lead here.
        ways = self.head.line() if self.head is not None else iter(())
        above = next((way for way in ways if way.step < step), None)
        node = Node(len(self.nodes), step, above)
        self.told.append(f"save {step} keep {keep} as {node.number} after {above and above.number}")
        same = self.head if self.head is not None and self.head.step == step else above
        with self.crashing(node, [above, same], was):
            path = self.pipe.save(self.folder, step=step, keep=keep, extra={"node": node.number}, wait=True).path
        self.nodes.append(node)
        self.head = self.last = node
        assert path.is_dir(), f"wait() returned {path}, which is not there"
        mine = [source for source in node.line() if source.step in self.there() and self.at(source.step) is source]
        assert keep is None or sum(source.is_whole for source in mine) <= keep, "more are kept than were asked for"
        self.found(self.folder, {node})

    @contextmanager
    def crashing(self, node: Node, above: list[Node | None], was: tuple[Node | None, set[int]]) -> Iterator[None]:
        """Look, at every change of a name, whether what is there is enough to go on with."""
        tries = self.draw.random() < 0.2
        copies: list[Path] = []

        def watched(change: Callable[..., Any]) -> Callable[..., Any]:
            def changed(*args: Any, **more: Any) -> Any:
                if tries:
                    copies.append(self.folder.with_name(f"crash-{len(copies)}"))
                    shutil.copytree(self.folder, copies[-1], copy_function=os.link)
                return change(*args, **more)

            return changed

        with (
            patch("os.rename", watched(os.rename)),
            patch("os.replace", watched(os.replace)),
            patch("shutil.rmtree", watched(shutil.rmtree)),
        ):
            yield
        last, there = was
        for copy in copies:
            self.crashes += 1
            self.found(copy, {node, *(self.newest(tip, there) for tip in [last, *above])})
            shutil.rmtree(copy)

    def found(self, folder: Path, expected: set[Any]) -> Node | None:
        """Load what a folder holds; it must be among what is expected, where None is nothing."""
        try:
            loaded = self.reader.load(folder, missing_ok=True)
        except RecordError:
            loaded = None
        number = None if loaded is None else loaded.extra["node"]
        assert number in {value and value.number for value in expected}, f"{number} was found in {folder}"
        return None if loaded is None else next((node for node in self.nodes if node.number == number), None)

    def damage(self) -> None:
        """Damage a checkpoint, whichever it is."""
        if there := self.there():
            step = self.draw.choice(sorted(there))
            how, node = self.draw.choice(DAMAGE), self.at(step)
            if node is not None and node.is_whole:
                self.told.append(f"damage {node.number} at {step}: {how.__name__}")
                how(there[step])
                node.is_whole = False

    def rewind(self) -> None:
        """Load a checkpoint by its name: one that is whole, of whatever line."""
        whole = [source for step in self.there() if (source := self.at(step)) is not None and source.is_whole]
        if whole:
            node = self.draw.choice(sorted(whole, key=lambda child: child.number))
            self.told.append(f"load {node.number}")
            assert self.pipe.load(self.there()[node.step]).extra["node"] == node.number
            self.head = node

    def resume(self) -> None:
        """Start again, and load what the folder gives."""
        expected = self.newest(self.last, set(self.there()))
        self.told.append(f"resume from {expected and expected.number}")
        self.found(self.folder, {expected})
        if expected is not None:
            self.pipe = small_pipeline()
            assert self.pipe.load(self.folder).extra["node"] == expected.number
            self.head = expected


def live(folder: Path, seed: int, reader: Pipeline, *, num_acts: int = 14) -> Life:
    """Let one run live; raises with what it did if it is not found again. `reader` only loads."""
    folder.mkdir()
    life = Life(folder / "checkpoints", random.Random(seed), small_pipeline(), reader)
    try:
        for _ in range(num_acts):
            life.draw.choice((life.save, life.save, life.save, life.damage, life.rewind, life.resume))()
        life.resume()
    except (AssertionError, RecordError) as error:
        raise AssertionError(f"seed {seed}: {error}\n  " + "\n  ".join(life.told)) from error
    shutil.rmtree(folder)
    return life
