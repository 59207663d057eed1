"""A step's observers, and the options that a pipeline is made with."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from drumline.engine.core_options import CoreOptions
from drumline.engine.ranks.observer import Observer, Observers
from drumline.pipeline.options import Options
from drumline.pipeline.pipeline import Pipeline
from drumline.runtime.step import Step

pytestmark = pytest.mark.torch


class Listener(Observer):
    def __init__(self, name: str, heard: list[str]) -> None:
        self.name, self.heard = name, heard

    def at_call(self, step: Step) -> None:
        self.heard.append(f"{self.name} called {step.number}, {len(step.inputs)} inputs")

    def taken(self, step: Step) -> None:
        self.heard.append(f"{self.name} taken {step.number}, {len(step.inputs)} inputs of {len(step.batch)} rows")

    def begin(self, step: Step) -> None:
        self.heard.append(f"{self.name} begin {step.number}, {len(step.inputs)} inputs")

    def end(self, step: Step) -> None:
        self.heard.append(f"{self.name} end {step.number}, {len(step.losses)} losses")


def test_observers_hear_of_every_step_that_trains_and_end_in_the_opposite_order() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe = Pipeline(model, loss_fn=functional.mse_loss, num_microbatches=2, num_ranks=2)
    heard: list[str] = []
    pipe._run.observers = Observers([*pipe._run.observers.each, Listener("a", heard), Listener("b", heard)])
    x = torch.ones(4, 2)
    pipe.eval_step(x, target=x)
    pipe.step(x, target=x)
    assert heard == [
        *("a called 1, 0 inputs", "b called 1, 0 inputs"),
        *("a taken 1, 0 inputs of 4 rows", "b taken 1, 0 inputs of 4 rows"),
        *("a begin 1, 2 inputs", "b begin 1, 2 inputs"),
        *("b end 1, 2 losses", "a end 1, 2 losses"),
    ]


def test_a_pipeline_is_made_with_its_options_and_help_shows_them() -> None:
    shown = inspect.signature(Pipeline).parameters
    own = [field.name for field in fields(Options) if field.name in CoreOptions.__annotations__]
    assert len(own) > 20
    assert list(shown)[: len(own)] == own
    assert set(shown) == {field.name for field in fields(Options)}
    assert (shown["seed"].default, shown["seed"].kind.name) == (0, "KEYWORD_ONLY")
    unknown: Any = {"sed": 1}
    with pytest.raises(TypeError, match=r"^got an unexpected keyword argument 'sed'"):
        Pipeline(nn.ReLU(), **unknown)
