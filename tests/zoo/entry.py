"""What an animal of the zoo is, and the models that many of them are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from refused import saying

WIDTH = 6


@dataclass(frozen=True)
class Entry:
    """One animal: `change(model, step)` is called before every step, on the plain model too."""

    make: Callable[[], nn.Module]
    refused: dict[str, str] | None = None  # patterns of the refusal's fields; right if there are none
    change: Callable[[Any, int], None] | None = None
    ambient: Callable[[], Any] | None = None  # a context to train in
    settings: dict[str, Any] | None = None  # of the pipeline
    example: bool = True
    either: bool = False  # refused where there are more stages than it can be cut into, right elsewhere


ZOO: dict[str, Entry] = {}


def right(name: str, **more: Any) -> Callable[[Any], Any]:
    """Register a model that must be trained right."""

    def register(make: Any) -> Any:
        ZOO[name] = Entry(make, **more)
        return make

    return register


def refused(name: str, error: str = "", *, expected: str = "", fix: str = "", **more: Any) -> Callable[[Any], Any]:
    """Register a model that must be refused by an error whose fields match these patterns."""

    def register(make: Any) -> Any:
        ZOO[name] = Entry(make, saying(error, expected=expected, fix=fix), **more)
        return make

    return register


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Stack(nn.Module):
    """Six blocks in a row; subclasses do something between them."""

    def __init__(self, make: Callable[[], nn.Module] = linear, count: int = 6) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList([make() for _ in range(count)])

    def between(self, x: Tensor, at: int) -> Any:
        return x

    def forward(self, x: Tensor) -> Any:
        for at, block in enumerate(self.blocks):
            x = self.between(block(x), at)
        return x
