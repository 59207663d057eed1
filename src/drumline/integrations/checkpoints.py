"""The optimizer, the weights and the files of a trainer on a pipeline.

Checkpoints are those that the Trainer writes in one process, so that they resume on any number of ranks, or on none.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from drumline.integrations.refused import refuse
from drumline.integrations.replica import seen_as
from drumline.pipeline.whole import named_state, refresh, whole_state

if TYPE_CHECKING:
    Base: Any  # the trainer's class that comes after the mixin
else:
    Base = object


class TrainerFiles(Base):  # type: ignore[misc]
    """What `PipelineTrainer` does about the optimizer, and to save and load."""

    optimizer: Any
    _owns_optimizer = False  # whether the optimizer is one that create_optimizer has made

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Make the optimizer that the arguments name, over this rank's parameters."""
        if self.optimizer is None:
            kind, settings = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            is_class = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
            whole = settings.keys() & {"params", "model", "optimizer_dict"} or "bitsandbytes" in kind.__module__
            refuse((
                not is_class or whole, f"optim is {self.args.optim!s:.60}, which looks at the whole model",
                "an optimizer that updates each parameter by itself", 'set optim="adamw_torch", or pass optimizers=',
            ))  # fmt: skip
            optimizer = self.pipeline.optimizer(kind, **settings)
            names = {id(tensor): name for name, tensor in self.pipeline.named_master_weights()}
            decayed = set(self._groups()[0])
            (group,) = optimizer.param_groups
            parts: tuple[list[Any], list[Any]] = ([], [])
            for param in group["params"]:
                parts[names[id(param)] not in decayed].append(param)
            weights = (self.args.weight_decay, 0.0)
            optimizer.param_groups[:] = [
                {**group, "params": part, "weight_decay": weight} for part, weight in zip(parts, weights, strict=True)
            ]
            self.optimizer, self._owns_optimizer = optimizer, True
        return self.optimizer

    def _groups(self) -> list[list[str]]:
        """Return the names of the parameters that decay, and of those that do not, of the whole model."""
        decay = set(self.get_decay_parameter_names(self.model))
        names = [name for name, param in self.model.named_parameters() if param.requires_grad]
        return [[name for name in names if name in decay], [name for name in names if name not in decay]]

    def train(self, *args: Any, **named: Any) -> Any:
        """Train; afterwards the model has all trained weights on every rank."""
        try:
            result = super().train(*args, **named)
        finally:
            self.callback_handler.model = self.model
        refresh(self.pipeline, self.model)
        return result

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save what all ranks have trained; one rank writes, and the others wait for it."""
        refresh(self.pipeline, self.model)
        super().save_model(output_dir, _internal_call)
        self.pipeline.gather("saved")

    def _load_best_model(self) -> None:
        folder = self.state.best_model_checkpoint
        some = len(set(self.pipeline.gather(os.path.isdir(folder)))) > 1
        refuse((some, f"some ranks cannot see {folder}", "a folder that all hosts share", "save to such a folder"))
        super()._load_best_model()
        self.pipeline.load_state_dict(self.model.state_dict())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = self.optimizer
        names = self._groups() if self._owns_optimizer else None
        state = whole_state(self.pipeline, optimizer.state_dict(), names, is_wanted=self.args.should_save)
        self.optimizer = SimpleNamespace(state_dict=lambda: state)
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer = optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self.pipeline.load_state_dict(self.model.state_dict())  # which the trainer has loaded before
        optimizer = self.optimizer

        def load(state: Any) -> None:
            zero = self._settings.get("zero")
            refuse((
                zero, f"{checkpoint} has an optimizer's state, which zero would divide", "zero=0",
                "resume without zero, or from a checkpoint of weights alone",
            ))  # fmt: skip
            optimizer.load_state_dict(named_state(state, self._groups()) if self._owns_optimizer else state)

        self.optimizer = SimpleNamespace(load_state_dict=load)
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        finally:
            self.optimizer = optimizer
        self.pipeline.count_from(self.state.global_step)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random states of every rank."""
        if self.args.process_index == 0:
            super()._save_rng_state(output_dir)  # what a run in one process reads
        with seen_as(num_processes=2):
            super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        with seen_as(num_processes=2):
            super()._load_rng_state(checkpoint)
