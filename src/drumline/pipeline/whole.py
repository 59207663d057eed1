"""States of the whole model and of its optimizer, of which every rank holds a part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

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


def whole_state(
    pipe: Pipeline, state: Mapping[str, Any], names: list[list[Any]] | None, *, is_wanted: bool
) -> dict[str, Any]:
    """Return the state of an optimizer over the whole model by position, as one process would have it.

    `names` are those of the whole model's parameters, by group; None where the state has positions already. Call it on
    every rank; only those that want it keep what others send.
    """
    names = names or [group["params"] for group in state["param_groups"]]
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


def named_state(state: Mapping[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """Return the state of an optimizer over the whole model by name, as `pipe.optimizer` takes it.

    >>> named_state({"state": {1: {"step": 4}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}, [["weight", "bias"]])
    {'state': {'bias': {'step': 4}}, 'param_groups': [{'lr': 0.1, 'params': ['weight', 'bias']}]}
    """
    order = list(chain(*names))
    groups = [{**group, "params": each} for group, each in zip(state["param_groups"], names, strict=True)]
    return {"state": {order[position]: entry for position, entry in state["state"].items()}, "param_groups": groups}
