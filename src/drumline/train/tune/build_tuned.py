"""The model of a run with an adapter: the base on the meta device, frozen, and PEFT's layers in it.

    settings ──► base (models/build.py) ──► PEFT's layers ──► a pipeline that reads or draws its own stages alone

The pipeline gets the user's own model with the layers that PEFT has put into it, not what PEFT wraps around it. So
blocks, cuts and names are those of the model. Names in checkpoints are PEFT's.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drumline.core.errors import ModelError, nearest
from drumline.engine.state.materialise import materialise
from drumline.model.catalogue import named_tensors
from drumline.model.quantised.bases import quantise, quantised_names
from drumline.model.quantised.hushed import hushed
from drumline.model.weights.files import Weights
from drumline.train.config.adapter_settings import PLAIN_BASES, QUANTISED_BASES, AdapterSettings
from drumline.train.config.placed import concerning
from drumline.train.config.settings import TrainSettings
from drumline.train.models.build import build_model
from drumline.train.models.built import Adapter, Built
from drumline.train.tune.peft_config import is_pattern, peft, peft_config

TENSORS = "adapter_model.safetensors"


def build_tuned(settings: TrainSettings, *, device: str = "cpu") -> Built:
    """Return the model of a run as `build_model` does; with an adapter in it, and frozen beside it, where one is asked.

    >>> from drumline.train.config.settings import ModelSettings
    >>> sizes = ModelSettings(num_layers=2, hidden=32, num_heads=2)
    >>> build_tuned(TrainSettings(model=sizes), device="meta").adapter is None
    True
    """
    if not settings.adapter.is_on:
        return build_model(settings, device=device)
    built = adapted(build_model(_of_base(settings), device="meta"), settings)
    if device == "meta":
        return built
    materialise(built.model, built.weights, device="cpu", seed=settings.run.seed)
    return replace(built, weights=None)


def adapted(built: Built, settings: TrainSettings) -> Built:
    """Return a model on the meta device with an adapter in it; all else in it is frozen."""
    with concerning("adapter.method"):
        library = peft()
        config = peft_config(settings.adapter)
    if settings.adapter.base in QUANTISED_BASES:
        with concerning("adapter.base"):
            if not quantised_names(built.model):
                raise ModelError(
                    f"adapter.base is {settings.adapter.base!r}, and {settings.model.path} has no linear layer",
                    expected="layers of nn.Linear, which can be quantised",
                    fix='set adapter.base = "bf16"',
                )
            quantise(built.model, settings.adapter.base)
    if settings.adapter.base == "llm-int8" and getattr(config, "use_dora", False) and _is_on_cpu(settings):
        raise ModelError(
            'adapter.dora is true, and adapter.base is "llm-int8" on a CPU, where PEFT loses the scales of weights',
            expected="an accelerator, or another base",
            fix='set adapter.base = "int8"',
        )
    _check_names(built.model, settings.adapter)
    with concerning("adapter.targets"), torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = _wrapped(library, built.model, config)
    config.base_model_name_or_path = settings.model.path
    model: nn.Module = wrapped.get_base_model()
    weights = built.weights
    names = _names(library, wrapped)
    if settings.adapter.start:
        shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model)}
        weights = _started(weights, Path(settings.adapter.start), names, shapes)
    return replace(built, model=model, weights=weights, adapter=Adapter(names, _written(config)))


def _is_on_cpu(settings: TrainSettings) -> bool:
    return torch.device(settings.pipeline.device or "cpu").type == "cpu"


def _of_base(settings: TrainSettings) -> TrainSettings:
    """Return the settings with the numbers of the frozen model as those of its parameters."""
    base, precision = settings.adapter.base, settings.precision
    numbers = base if base in PLAIN_BASES else precision.compute if base else precision.weights
    return replace(settings, precision=replace(precision, weights=numbers))


def _check_names(model: nn.Module, adapter: AdapterSettings) -> None:
    """Refuse names that no module has: PEFT passes over them if others are found."""
    paths = [path for path, _ in model.named_modules()]
    holding = [
        path for path, module in model.named_modules() if next(module.parameters(recurse=False), None) is not None
    ]
    leaves = dict.fromkeys(path.rpartition(".")[2] for path in holding)
    for key in ("targets", "excluded", "modules_to_save"):
        names = getattr(adapter, key)
        if key != "modules_to_save" and len(names) == 1 and is_pattern(names[0]):
            continue
        for name in names:
            if not any(f".{path}".endswith(f".{name}") for path in paths):
                with concerning(f"adapter.{key}"):
                    raise ModelError(
                        f"no module of the model has the name {name!r:.80}",
                        expected="ends of names of modules",
                        fix=nearest(name[:80], leaves),
                    )


def _wrapped(library: Any, model: nn.Module, config: Any) -> Any:
    """Return what PEFT makes of a model; its errors are ours."""
    try:
        with hushed():  # PEFT imports libraries of quantised weights
            return library.get_peft_model(model, config)
    except (ValueError, TypeError) as error:
        leaves = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)}
        asked = config.target_modules
        named = sorted(asked) if isinstance(asked, set | list | tuple) else [asked] if isinstance(asked, str) else []
        missing = next((name for name in named if name not in leaves), "")
        raise ModelError(
            f"PEFT cannot put the adapter into the model: {(str(error).splitlines() or ['?'])[0][:240]}",
            expected=f"names of layers: {', '.join(sorted(leaves))[:200]}",
            fix=nearest(missing, leaves) if missing else "set adapter.targets",
        ) from None


def _names(library: Any, wrapped: Any) -> dict[str, str]:
    """Return PEFT's name of every tensor that it saves, by its name in the model."""
    model: nn.Module = wrapped.get_base_model()
    state = dict(named_tensors(wrapped))  # state_dict fails for packed weights without memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = library.get_peft_model_state_dict(wrapped, state_dict=state, save_embedding_layers=False)
    theirs = {id(tensor): name for name, tensor in saved.items()}
    ours = {id(tensor): name for name, tensor in reversed(named_tensors(model))}
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    names = {ours[at]: name for at, name in theirs.items() if at in ours}
    if lost := sorted(trained - set(names)):
        raise ModelError(
            f"PEFT would not save {lost[0]}, which is trained",
            expected="an adapter all of whose tensors are saved",
            fix="leave adapter.settings out",
        )
    return names


def _written(config: Any) -> bytes:
    """Return a configuration as PEFT writes it for an adapter that is loaded to be used."""
    table = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    table["inference_mode"] = True
    return (json.dumps(table, indent=2, sort_keys=True, default=str) + "\n").encode()


def _started(
    weights: str | Weights | None, folder: Path, names: dict[str, str], shapes: dict[str, tuple[int, ...]]
) -> Weights:
    """Return the base's files together with those of an adapter, under the names that both have in the model."""
    if not (folder / TENSORS).is_file():
        raise ModelError(f"adapter.start: {folder} has no {TENSORS}", expected="an adapter as PEFT saves it")
    if weights is None:
        raise ModelError(
            f"adapter.start is {folder}, and the model has no weights",
            expected="the weights that the adapter was trained with",
            fix="set model.pretrained = true and name the model's folder in model.path",
        )
    stored, theirs = Weights(weights) if isinstance(weights, str) else weights, Weights(folder / TENSORS)
    for name, theirs_name in names.items():
        if theirs_name not in theirs.tensors:
            raise ModelError(
                f"adapter.start: {folder / TENSORS} has no {theirs_name!r}",
                expected="a tensor for every part of the adapter",
                fix=nearest(theirs_name, theirs.tensors),
            )
        if (shape := theirs.tensors[theirs_name].shape) != shapes[name]:
            raise ModelError(
                f"adapter.start: {theirs_name!r} of {folder / TENSORS} has shape {shape}",
                expected=f"{shapes[name]}, which fits the model",
                fix="pass --model with the base that the adapter was trained beside",
            )
        stored.tensors[name] = theirs.tensors[theirs_name]
    return stored
