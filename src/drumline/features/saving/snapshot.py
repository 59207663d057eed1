"""What a process contributes to a checkpoint, as tensors by name and as plain data; and the way back.

    model      NAME                          parameters and buffers whose home is a rank of this process
    training   masters/NAME                  float32 copies of parameters of lower precision
               optimizer.0/NAME/exp_avg      state of the first optimizer that `pipe.optimizer` made
               random.RANK/torch             where the process's own generators are
               due.RANK.STEP.LAST/NAME/...   gradients of updates that a schedule without a flush has yet to make

Random numbers inside blocks follow from the seed and the step's number alone, so the number is all they need.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from drumline.core.errors import ModelError, RecordError
from drumline.engine.updates.optimizer_state import PLAIN, plain
from drumline.model.quantised.state import flattened


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A process's share: its tensors, and what is no tensor."""

    model: dict[str, Tensor]
    training: dict[str, Tensor]
    plain: dict[str, Any]


def model_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a state dict's tensors; anything else in it cannot be stored without pickling."""
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ModelError(
                f"the model's state has {name!r}, a {type(value).__name__}",
                expected="tensors alone: checkpoints are read back without unpickling",
                fix="make it a buffer, or save it yourself and leave it out of state_dict",
            )
    return flattened(state)


def optimizer_share(number: int, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an optimizer's tensors, and its groups and numbers as plain data."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for name, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{number}/{name}/{key}"] = value.detach()
            else:
                numbers.setdefault(name, {})[key] = plain(value, f"{name}'s {key}")
    groups = [{key: plain(value, key) for key, value in group.items()} for group in state["param_groups"]]
    return tensors, {"kind": type(optimizer).__name__, "groups": groups, "numbers": numbers}


def joined_groups(shares: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one optimizer's plain data from all processes'.

    >>> value = {"kind": "SGD", "groups": [{"lr": 0.1, "params": ["a"]}], "numbers": {}}
    >>> joined_groups([value, {**value, "groups": [{"lr": 0.1, "params": ["b"]}]}])["groups"]
    [{'lr': 0.1, 'params': ['a', 'b']}]
    """
    groups = [dict(group) for group in shares[0]["groups"]]
    for group, *others in zip(groups, *(share["groups"] for share in shares[1:]), strict=True):
        group["params"] = list(dict.fromkeys([*group["params"], *(name for o in others for name in o["params"])]))
    numbers = {name: value for share in shares for name, value in share["numbers"].items()}
    return {"kind": shares[0]["kind"], "groups": groups, "numbers": numbers}


def restore_optimizer(
    optimizer: Optimizer, plain: Mapping[str, Any], entries: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Give an optimizer its state back: `entries` are its parameters' tensors, by name and key."""
    state: dict[str, dict[str, Any]] = {name: dict(entry) for name, entry in entries.items()}
    for name, numbers in plain["numbers"].items():
        state.setdefault(name, {}).update(numbers)
    groups = [dict(group) for group in plain["groups"]]
    for group, own_group in zip(groups, optimizer.param_groups, strict=False):
        for key in own_group.keys() - group.keys():
            group[key] = own_group[key]
        for key, value in group.items():
            now = own_group.get(key)
            if isinstance(value, list) and isinstance(now, tuple):
                group[key] = tuple(value)
            elif isinstance(now, Tensor):
                group[key] = torch.full_like(now, value)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def check_groups(optimizer: Optimizer, plain: Mapping[str, Any]) -> None:
    """Raise if an optimizer's stored settings are of another kind than its own."""
    for number, (group, own_group) in enumerate(zip(plain["groups"], optimizer.param_groups, strict=False)):
        for key in (group.keys() & own_group.keys()) - {"params"}:
            if not fits(group[key], own_group[key]):
                raise RecordError(
                    f"{key} of the optimizer's group {number} is {group[key]!r:.60}",
                    expected=f"something like {own_group[key]!r:.60}, as {type(optimizer).__name__} has it",
                    fix="use another checkpoint",
                )


def fits(stored: Any, own_value: Any) -> bool:
    """Whether a stored setting may take the place of an optimizer's own.

    >>> fits([0.8, 0.9], (0.9, 0.95)), fits("x", 0.1), fits(None, 0.1), fits(None, True), fits([0.8], (0.9, 0.95))
    (True, False, False, True, False)
    """
    if isinstance(own_value, bool):
        return stored is None or isinstance(stored, bool)
    if isinstance(own_value, int | float) or (isinstance(own_value, Tensor) and own_value.numel() == 1):
        return isinstance(stored, int | float) and not isinstance(stored, bool)
    if isinstance(own_value, tuple | list):
        return isinstance(stored, list) and len(stored) == len(own_value) and all(map(fits, stored, own_value))
    if isinstance(own_value, str):
        return stored is None or isinstance(stored, str)
    return isinstance(stored, PLAIN) if own_value is None else True


def generators(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return where this process's own random generators are."""
    tensors = {"torch": torch.get_rng_state()}
    if device.type != "cpu":
        tensors[device.type] = torch.get_device_module(device).get_rng_state(device)
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    tensors["numpy"] = torch.from_numpy(np.asarray(keys, dtype=np.int64).copy())
    tensors["python"] = torch.tensor(numbers, dtype=torch.int64)
    return tensors, {"python": [version, gauss], "numpy": [str(kind), *map(float, rest)]}


def check_generators(tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    """Raise if generators cannot continue from what is stored; those of the process stay as they are."""
    try:
        _set_states(torch.Generator(), random.Random(), np.random.RandomState(0), tensors, plain)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise RecordError(
            f"the state of a random generator is damaged: {type(error).__name__}: {error}", fix="use another checkpoint"
        ) from None


def _set_states(
    torchs: torch.Generator, pythons: Any, numpys: Any, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]
) -> None:
    torchs.set_state(tensors["torch"])
    version, gauss = plain["python"]
    pythons.setstate((version, tuple(tensors["python"].tolist()), None if gauss is None else float(gauss)))
    kind, position, has_gauss, cached = plain["numpy"]
    keys = tensors["numpy"].numpy().astype(np.uint32)
    numpys.set_state((kind, keys, int(position), int(has_gauss), float(cached)))


def restore_generators(tensors: Mapping[str, Tensor], plain: Mapping[str, Any], device: torch.device) -> None:
    """Let the generators continue from where they were."""
    _set_states(torch.default_generator, random, np.random, tensors, plain)
    if device.type in tensors:
        torch.get_device_module(device).set_rng_state(tensors[device.type], device)


def by_parameter(prefix: str, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Return tensors named PREFIX/NAME/KEY by name and key.

    >>> by_parameter("optimizer.0", [("optimizer.0/a.weight/step", torch.zeros(()))])
    {'a.weight': {'step': tensor(0.)}}
    """
    states: dict[str, dict[str, Tensor]] = {}
    for full, tensor in tensors:
        if full.startswith(f"{prefix}/"):
            name, _, key = full.removeprefix(f"{prefix}/").rpartition("/")
            states.setdefault(name, {})[key] = tensor
    return states
