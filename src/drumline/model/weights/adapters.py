"""Adapters of PEFT in a model on the meta device: the names of their base in weights files, and their first values.

    in the model                                        in the files of the base
    layers.0.q_proj.base_layer.weight                   layers.0.q_proj.weight
    layers.0.q_proj.lora_A.default.weight               none: drawn as PEFT draws it
    lm_head.original_module.weight                      lm_head.weight
    lm_head.modules_to_save.default.weight              lm_head.weight
    base_model.model.layers.0.norm.weight               layers.0.norm.weight

PEFT is recognised by what its modules have, and never imported: whoever has a model of it has imported it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.model.catalogue import Catalogue, Entry
from drumline.model.weights.seeded import Seeded

_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
_HEAD = "base_model.model."
_NORM = "lora_magnitude_vector"  # of DoRA: a function of the base's values


def has_adapters(root: nn.Module | None) -> bool:
    """Whether PEFT has put adapters into a model.

    >>> has_adapters(nn.Linear(2, 2))
    False
    """
    return root is not None and next(adapter_layers(root.modules()), None) is not None


def base_name(name: str) -> str:
    """Return the name that a tensor of an adapted model has in the model without adapters.

    >>> base_name("base_model.model.layers.0.q_proj.base_layer.weight"), base_name("head.modules_to_save.mine.bias")
    ('layers.0.q_proj.weight', 'head.bias')
    """
    return _WRAPPED.sub("", name.removeprefix(_HEAD))


def base_model(root: nn.Module) -> nn.Module:
    """Return the user's own model inside of what PEFT wraps around it; a model that it has only changed as it is."""
    inner = getattr(root, "get_base_model", None)
    module = inner() if callable(inner) and hasattr(root, "peft_config") else root
    return module if isinstance(module, nn.Module) else root


def without_adapters(model: Any, switched: ExitStack, *, instead: str = "ref") -> Any:
    """Return a model that shares all tensors with one of PEFT, and has no adapters, or only the one named `instead`.

    `switched` ends that; it must stay open as long as the model is used. What trains in the other model stays so.
    """
    tensors = [*model.parameters(), *model.buffers()]
    trained = [tensor.requires_grad for tensor in tensors]
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    if instead in twin.peft_config:
        twin.set_adapter(instead)
    else:
        switched.enter_context(twin.disable_adapter())
    for tensor, trains in zip(tensors, trained, strict=True):  # switching adapters decides that as well
        tensor.requires_grad_(trains)
    return twin


def base_names(root: nn.Module, names: Collection[str]) -> dict[str, list[str]]:
    """Return the tensors of an adapted model that files of its base have, by their names there."""
    paths = {module: path for path, module in root.named_modules()}
    drawn = {name for layer in adapter_layers(paths) for name in _slots(paths[layer], layer)}
    texts: dict[str, list[str]] = {}
    for name in names:
        if name not in drawn:
            texts.setdefault(base_name(name), []).append(name)
    return texts


def adapter_entries(catalogue: Catalogue, entries: Sequence[Entry]) -> list[Entry]:
    """Return those of the entries that adapters have of their own."""
    if not has_adapters(catalogue.root):
        return []
    drawn = {id(tensor) for layer in adapter_layers(catalogue.modules) for tensor in adapter_tensors(layer)}
    return [entry for entry in entries if id(entry.tensor) in drawn]


def draw_adapters(catalogue: Catalogue, entries: Sequence[Entry], *, seed: int, device: torch.device) -> None:
    """Give adapters the values that PEFT would give them; the base has its own by now.

    Every draw is seeded from (seed, layer name, number of earlier draws), so that any cut gives the same values.
    """
    wanted = {id(entry.tensor) for entry in entries}
    configs = _configs(catalogue.root)
    devices = [] if device.type == "cpu" else [device]
    with torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type):
        for layer in adapter_layers(catalogue.modules):
            if any(id(tensor) in wanted for tensor in adapter_tensors(layer)):
                for adapter in _adapters(layer):
                    name = f"{catalogue.modules[layer].removeprefix(_HEAD)}/{adapter}"
                    with Seeded(f"{seed}/{name}"):
                        _reset(layer, adapter, configs.get(adapter), name)
                    _norm(layer, adapter)


def adapter_layers(modules: Any) -> Iterator[Any]:
    """Yield the layers that PEFT has put in place of others."""
    for module in modules:
        if isinstance(getattr(module, "adapter_layer_names", None), tuple) and hasattr(module, "get_base_layer"):
            yield module


def adapter_tensors(layer: Any) -> Iterator[Tensor]:
    """Yield the tensors that a layer's adapters have."""
    for name in layer.adapter_layer_names:
        part = getattr(layer, name, None)
        if isinstance(part, nn.Module):
            yield from part.parameters()
            yield from part.buffers()


def _slots(path: str, layer: Any) -> Iterator[str]:
    """Yield the names of the tensors that a layer's adapters have."""
    own_ids = {id(tensor) for tensor in adapter_tensors(layer)}
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if id(tensor) in own_ids:
            yield f"{path}.{name}" if path else name


def _adapters(layer: Any) -> list[str]:
    """Return the names of a layer's adapters."""
    parts = (getattr(layer, name, None) for name in layer.adapter_layer_names)
    dicts = (part for part in parts if isinstance(part, nn.ModuleDict | nn.ParameterDict))
    return list(dict.fromkeys(str(key) for part in dicts for key in part))


def _configs(root: nn.Module | None) -> Mapping[str, Any]:
    """Return the configuration of every adapter by its name."""
    modules = () if root is None else root.modules()
    configs: Any = next((config for module in modules if (config := getattr(module, "peft_config", None))), {})
    return configs if isinstance(configs, Mapping) else {}


def _reset(layer: Any, adapter: str, config: Any, name: str) -> None:
    """Draw the values of one adapter in one layer by PEFT's own function."""
    if callable(getattr(layer, "reset_lora_parameters", None)):
        how = getattr(config, "init_lora_weights", True)
        if how not in (True, "gaussian"):
            raise ModelError(
                f"init_lora_weights is {how!r:.60}, for {name} of a model on the meta device",
                expected='True or "gaussian": others are made of the whole base, or of data',
                fix="build the model with memory, or leave init_lora_weights out",
            )
        layer.reset_lora_parameters(adapter, how)
        return
    for method in ("reset_ia3_parameters", "reset_adapter_parameters"):
        if callable(reset := getattr(layer, method, None)):
            reset(adapter)
            return
    raise ModelError(
        f"{name} is a {type(layer).__module__}.{type(layer).__name__}, which has no initialiser that is known here",
        expected="an adapter of LoRA, IA3, LoHa or LoKr in a model on the meta device",
        fix="build the model with memory instead of on the meta device",
    )


def _norm(layer: Any, adapter: str) -> None:
    """Give DoRA's vector the norms of the base, which it starts from."""
    norms = getattr(layer, _NORM, None)
    if not isinstance(norms, nn.ModuleDict) or adapter not in norms:
        return
    module: Any = norms[adapter]
    place: nn.Parameter = module.weight
    factors = {"lora_A": layer.lora_A[adapter].weight, "lora_B": layer.lora_B[adapter].weight}
    module.update_layer(base_layer=layer.get_base_layer(), scaling=layer.scaling[adapter], **factors)
    place.copy_(module.weight)
    module.weight = place
