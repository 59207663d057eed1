"""States of the whole model and of its optimizer, of which every rank holds a part.

Checkpoints are those that the Trainer writes in one process, so that they resume on any number of ranks, or on none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drumline.pipeline.pipeline import Pipeline


def everywhere(pipe: Pipeline, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of all ranks by name, one after the other; call it on every rank and take all of them."""
    told = pipe.gather({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()})
    if len(told) == 1 or not dist.is_initialized():
        yield from tensors.items()
        return
    by_host = "gloo" in dist.get_backend()
    owners = {name: rank for rank, each in reversed(list(enumerate(told))) for name in each}
    for name, rank in sorted(owners.items(), key=lambda pair: (pair[1], pair[0])):
        shape, dtype = told[rank][name]
        place = torch.device("cpu") if by_host else torch.device(pipe.device)
        own = tensors[name].detach().to(place).contiguous() if rank == dist.get_rank() else None
        tensor = torch.empty(shape, dtype=dtype, device=place) if own is None else own
        dist.broadcast(tensor, src=rank)
        yield name, tensor


@torch.no_grad()
def refresh(pipe: Pipeline, model: nn.Module) -> None:
    """Give the model of every rank what other ranks have trained of it."""
    frozen = {name for name, param in model.named_parameters(remove_duplicate=False) if not param.requires_grad}
    held = model.state_dict()
    changed = {name: tensor for name, tensor in pipe.state_dict().items() if name not in frozen}
    for name, tensor in everywhere(pipe, changed):
        held[name].copy_(tensor)


def optimizer_state(pipe: Pipeline, own_state: Mapping[str, Any], groups: list[list[str]]) -> dict[str, Any]:
    """Return the state of an optimizer over the whole model, by position, as one process would have it."""
    by_name = isinstance(next((name for group in own_state["param_groups"] for name in group["params"]), ""), str)
    order = [name for group in groups for name in group] if by_name else range(10**9)
    own = own_state["state"]
    tensors = {f"{key}\n{part}": v for key, entry in own.items() for part, v in entry.items() if isinstance(v, Tensor)}
    merged: dict[str, dict[str, Any]] = {}
    for plain in pipe.gather(
        {str(key): {part: v for part, v in entry.items() if not isinstance(v, Tensor)} for key, entry in own.items()}
    ):
        for key, entry in plain.items():
            merged.setdefault(key, {}).update(entry)
    for key, tensor in everywhere(pipe, tensors):
        name, _, part = key.partition("\n")
        merged.setdefault(name, {})[part] = tensor.cpu()
    at = 0
    whole_groups = []
    for number, group in enumerate(own_state["param_groups"]):
        count = len(groups[number]) if by_name else len(group["params"])
        whole_groups.append({**group, "params": list(range(at, at + count))})
        at += count
    places = {name: place for place, name in enumerate(order)} if by_name else {}
    state = {places[name] if by_name else int(name): entry for name, entry in merged.items()}
    return {"state": dict(sorted(state.items())), "param_groups": whole_groups}


def own_state(state: Mapping[str, Any], groups: list[list[str]]) -> dict[str, Any]:
    """Return the state of an optimizer over the whole model by name, as `pipe.optimizer` takes it."""
    order = [name for group in groups for name in group]
    named = [{**group, "params": names} for group, names in zip(state["param_groups"], groups, strict=True)]
    return {"state": {order[at]: entry for at, entry in state["state"].items()}, "param_groups": named}
