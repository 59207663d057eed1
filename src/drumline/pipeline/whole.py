"""States of the whole model and of its optimizer, of which every rank holds a part."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drumline.core.errors import refuse
from drumline.pipeline.pipeline import Pipeline

Name = TypeVar("Name", str, tuple[Any, str])


def everywhere(pipe: Pipeline, tensors: Mapping[Name, Tensor]) -> Iterator[tuple[Name, Tensor]]:
    """Yield the tensors of all ranks by name, one after the other; call it on every rank and take all of them."""
    shapes = pipe.gather({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()})
    if len(shapes) == 1 or not dist.is_initialized():
        yield from tensors.items()
        return
    device = torch.device("cpu" if "gloo" in dist.get_backend() else pipe.device)
    owners = {name: rank for rank, each in reversed(list(enumerate(shapes))) for name in each}
    for name, rank in sorted(owners.items(), key=lambda pair: (pair[1], pair[0])):
        if rank == dist.get_rank():
            tensor = tensors[name].detach().to(device).contiguous()
        else:
            shape, dtype = shapes[rank][name]
            tensor = torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(tensor, src=rank)
        yield name, tensor


@torch.no_grad()
def refresh(pipe: Pipeline, model: nn.Module) -> None:
    """Give the model of every rank what other ranks have trained of it."""
    frozen = {name for name, param in model.named_parameters(remove_duplicate=False) if not param.requires_grad}
    whole = model.state_dict()
    changed: dict[str, Tensor] = {name: value for name, value in pipe.state_dict().items() if name not in frozen}
    for name, tensor in everywhere(pipe, changed):
        whole[name].copy_(tensor)


def need_folder(pipe: Pipeline, folder: str) -> None:
    """Refuse a folder that only some ranks can see; call it on every rank."""
    some = len(set(pipe.gather(os.path.isdir(folder)))) > 1
    refuse((some, f"some ranks cannot see {folder}", "a folder that all hosts share", "save to such a folder"))


def whole_state(pipe: Pipeline, model: nn.Module, optimizer: Any, *, is_wanted: bool) -> dict[str, Any]:
    """Return the state of an optimizer over the whole model by position, as one process would have it.

    Call it on every rank; only those that want it keep what others send.
    """
    state = optimizer.state_dict()
    names = _names_by_group(pipe, model, state) or [group["params"] for group in state["param_groups"]]
    positions = {name: position for position, name in enumerate(chain(*names))}
    merged: dict[Any, dict[str, Any]] = {}
    numbers = {
        name: {part: value for part, value in entry.items() if not isinstance(value, Tensor)}
        for name, entry in state["state"].items()
    }
    for name, entry in chain(*(each.items() for each in pipe.gather(numbers))):
        merged.setdefault(name, {}).update(entry)
    tensors = {
        (name, part): value
        for name, entry in state["state"].items()
        for part, value in entry.items()
        if isinstance(value, Tensor)
    }
    for (name, part), tensor in everywhere(pipe, tensors):
        if is_wanted:
            merged.setdefault(name, {})[part] = tensor.cpu()
    groups = [
        {**group, "params": [positions[name] for name in each]}
        for group, each in zip(state["param_groups"], names, strict=True)
    ]
    return {"state": {positions[name]: merged[name] for name in positions if name in merged}, "param_groups": groups}


def load_whole_state(pipe: Pipeline, model: nn.Module, optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load the state of an optimizer over the whole model by position; call it on every rank.

    >>> model = nn.Linear(2, 1)
    >>> pipe = Pipeline([model], num_microbatches=1)
    >>> optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    >>> other = torch.optim.SGD(model.parameters(), lr=0.5)
    >>> load_whole_state(pipe, nn.Sequential(model), optimizer, other.state_dict())
    >>> optimizer.param_groups[0]["lr"]
    0.5
    """
    if names := _names_by_group(pipe, model, optimizer.state_dict()):
        order = list(chain(*names))
        groups = [{**group, "params": each} for group, each in zip(state["param_groups"], names, strict=True)]
        state = {"state": {order[at]: entry for at, entry in state["state"].items()}, "param_groups": groups}
    optimizer.load_state_dict(state)


def _names_by_group(pipe: Pipeline, model: nn.Module, state: Mapping[str, Any]) -> list[list[str]]:
    """Return what each group has on all ranks, in the model's order; nothing if the state has positions."""
    shapes = pipe.parameter_shapes()
    refuse((
        any(tensor.shape != shapes.get(name, tensor.shape) for name, tensor in pipe.named_master_weights()),
        "lines of the mesh divide the optimizer's state", "a whole state on every line: zero=0",
        "go on from weights alone, or save with pipe.save",
    ))  # fmt: skip
    ranks = pipe.gather([group["params"] for group in state["param_groups"]])
    homes = {name: at for groups in ranks for at, names in enumerate(groups) for name in names}
    order = [name for name, _ in model.named_parameters() if name in homes]
    return [[name for name in order if homes[name] == at] for at in range(len(ranks[0]))] if order else []
