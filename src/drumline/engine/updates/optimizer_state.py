"""An optimizer's state by the parameter names of the unsplit model, so that it fits any schedule and cut.

    torch    {"state": {0: {...}, 1: {...}}, "param_groups": [{"params": [0, 1], ...}]}
    here     {"state": {"0.weight": {...}, "0.bias": {...}}, "param_groups": [{"params": ["0.weight", "0.bias"], ...}]}

Each rank's state holds its own parameters. The "state" dicts of all ranks, merged, with any rank's "param_groups", are
the state of the whole model. From it, each rank takes what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from drumline.core.errors import ModelError, RecordError, RunError, nearest

NamedTensors = Callable[[], Iterable[tuple[str, Tensor]]]
PLAIN = (bool, int, float, str, type(None))  # what JSON has


class StateByName:
    """Translates the states of one optimizer; `named` yields the tensors it updates, by name.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    >>> StateByName(lambda: [("0.weight", weight)]).attach(optimizer)
    >>> weight.grad = torch.ones(2); optimizer.step()
    >>> optimizer.state_dict()["state"]
    {'0.weight': {'momentum_buffer': tensor([1., 1.])}}
    """

    def __init__(self, named: NamedTensors) -> None:
        self._named = named

    def attach(self, optimizer: Optimizer) -> None:
        """Make the optimizer's `state_dict` and `load_state_dict` use names."""
        optimizer.register_state_dict_post_hook(self._state_by_name)
        optimizer.register_load_state_dict_pre_hook(self._taken)

    def _names(self, optimizer: Optimizer) -> list[list[str]]:
        """Return the names of every group's parameters."""
        names = {id(tensor): name for name, tensor in self._named()}
        ids = [[id(param) for param in group["params"]] for group in optimizer.param_groups]
        if any(number not in names for group in ids for number in group):
            raise RunError(
                "an optimizer from pipe.optimizer holds a parameter that is not the pipeline's",
                expected="only the pipeline's parameters: the state is stored under their names",
                fix="create a separate optimizer for the other parameters",
            )
        return [[names[number] for number in group] for group in ids]

    def _state_by_name(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Convert a state by position to one by name."""
        names = self._names(optimizer)
        flat = [name for group in names for name in group]
        groups = [{**group, "params": own_names} for group, own_names in zip(state["param_groups"], names, strict=True)]
        by_name = {flat[key] if isinstance(key, int) else key: entry for key, entry in state["state"].items()}
        return {**state, "state": by_name, "param_groups": groups}

    def _taken(self, optimizer: Optimizer, state_by_name: dict[str, Any]) -> dict[str, Any]:
        """Convert a state by name to one by position in this optimizer, for its own parameters."""
        state, groups = _checked(state_by_name)
        homes = {name: group for group in groups for name in group["params"]}
        names = self._names(optimizer)
        known = state.keys() | homes.keys()
        for name in (name for group in names for name in group):
            if (state and name not in state and name not in homes) or (len(groups) > 1 and name not in homes):
                raise ModelError(
                    f"the optimizer's state has no {name!r}",
                    expected="an entry for every trainable parameter of this rank's stages",
                    fix=f"merge the states of all ranks that saved it; {nearest(name, sorted(known))}",
                )
        position = {name: at for at, name in enumerate(name for group in names for name in group)}
        groups_here = []
        for texts in names:
            theirs = {id(group): group for name in texts if (group := homes.get(name, groups[0]))}
            if len(theirs) > 1:
                raise ModelError(
                    f"{texts[0]!r} and other parameters of its group are in different groups of the optimizer's state",
                    expected="the same groups as in this optimizer",
                )
            settings = next(iter(theirs.values()), groups[0])
            groups_here.append({**settings, "params": [position[name] for name in texts]})
        state_by_position = {position[name]: entry for name, entry in state.items() if name in position}
        return {**state_by_name, "state": state_by_position, "param_groups": groups_here}


def plain(value: Any, what: str) -> Any:
    """Return a setting of an optimizer as JSON has it."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [plain(item, what) for item in value]
    if not isinstance(value, PLAIN):
        raise RecordError(
            f"the optimizer's {what} is a {type(value).__name__}", expected="a number, a text or a tensor"
        )
    return value


def _checked(state_by_name: Any) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """Refuse anything but a state by name."""
    state, groups = (
        state_by_name.get(name) if isinstance(state_by_name, Mapping) else None for name in ("state", "param_groups")
    )
    if not isinstance(state, Mapping) or not isinstance(groups, list) or not groups:
        raise ModelError(
            f"the optimizer's state is a {type(state_by_name).__name__} without state and param_groups",
            expected="the result of pipe.optimizer(...).state_dict()",
        )
    keys = [*state, *(param for group in groups for param in group.get("params", ()))]
    if any(not isinstance(key, str) for key in keys):
        raise ModelError(
            "the optimizer's state is indexed by position, which changes with the cut and schedule",
            expected="a state indexed by parameter name, as pipe.optimizer(...).state_dict() returns",
            fix="replace each position by the name that pipe.named_parameters() gave at that position",
        )
    return state, groups
