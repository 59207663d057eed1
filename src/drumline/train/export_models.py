"""Models to export: of a finished run, a config, a folder of Hugging Face, or a user's function.

Each comes on the CPU, in float32 and eval mode, with a function that makes inputs of any size.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drumline.checkpoint.reader import Checkpoint
from drumline.checkpoint.shelf import Shelf
from drumline.core.errors import ModelError, RecordError, UsageError
from drumline.train.config.files.settings_file import read_settings
from drumline.train.config.functions import is_function
from drumline.train.config.run_names import safe_name
from drumline.train.config.settings import BatchSettings, DataSettings, ModelSettings, TrainSettings
from drumline.train.config.write import KEPT
from drumline.train.data.build import build_data, vocabulary_of
from drumline.train.data.example import example_of
from drumline.train.loop.checkpoints import checkpoints_of
from drumline.train.models.build import build_model
from drumline.train.models.built import Built
from drumline.train.models.hf import config_of
from drumline.train.models.user_function import named_function, users_code
from drumline.train.tune.merge import MERGED

LENGTH = "length"
EXPORTED = "manifest.json"
LONGEST = 2048  # tokens a row that clients may send to a model which says nothing about it
_LONGEST = ("max_position_embeddings", "n_positions")
_EXPECTED = "the folder of a run, a folder or config of Hugging Face, a config.toml, or file.py:function"
_SOURCES = "a run that saved a checkpoint"


@dataclass(frozen=True, slots=True)
class FinishedModel:
    """A model: its name, itself, inputs of so many rows and so long, and the largest size of dimensions."""

    name: str
    model: nn.Module
    example: Callable[[int, int], dict[str, Tensor]]
    most: Mapping[str, int]


def finished_model(source: str, *, seed: int = 0, max_length: int | None = None) -> FinishedModel:
    """Return the model that a source names; `max_length` is the most tokens per row that it shall take.

    >>> finished_model("no-such-run")
    Traceback (most recent call last):
    drumline.core.errors.UsageError: no such model: no-such-run; expected the folder of a run, ...
    """
    if max_length is not None and max_length < 1:
        raise UsageError(f"--max-length is {max_length}", expected="1 token or more")
    path = Path(source)
    if is_function(source) and not path.exists():
        return _of_function(source, seed, max_length or LONGEST)
    return _with_most(_of_path(source, path), max_length)


def _with_most(model: FinishedModel, max_length: int | None) -> FinishedModel:
    """Return a model that takes fewer tokens than it could."""
    if max_length is None or LENGTH not in model.most:
        return model
    if max_length > model.most[LENGTH]:
        raise UsageError(f"--max-length is {max_length}", expected=f"up to the model's {model.most[LENGTH]} positions")
    return replace(model, most={**model.most, LENGTH: max_length})


def _of_path(source: str, path: Path) -> FinishedModel:
    if path.suffix == ".toml" and path.is_file():
        return _of_settings(read_settings(source), path.stem)
    if (path / KEPT).is_file():
        return _of_run(path)
    if (path / "config.json").is_file() or (path.suffix == ".json" and path.is_file()):
        longest = _positions(config_of(source))
        settings = TrainSettings(
            model=ModelSettings(kind="hf", path=source),
            data=DataSettings(kind="tokens"),  # no tokenizer is needed
            batch=BatchSettings(sequence=min(longest or 256, 256)),
        )
        return _of_settings(settings, path.stem if path.suffix else path.resolve().name)
    if path.is_dir():
        _refuse_folder(path)
    raise UsageError(f"no such model: {source[:200]}", expected=_EXPECTED)


def _refuse_folder(path: Path) -> None:
    """Refuse a folder of ours that is no run; say which folder to name instead."""
    if (run := next((parent for parent in path.resolve().parents[:2] if (parent / KEPT).is_file()), None)) is not None:
        raise UsageError(f"{path} is a part of a run", expected="the run's folder", fix=f"name {run}")
    if (path / EXPORTED).is_file() and any(path.glob("stage*/model.onnx")):
        raise UsageError(f"{path} is exported already", fix=f"serve it: drumline serve {path}")
    if checkpoints_of(path):
        raise UsageError(f"{path} has checkpoints and no {KEPT}", expected="a run of this version of `drumline train`")


def _of_run(folder: Path) -> FinishedModel:
    settings = read_settings(folder / KEPT)
    saved = checkpoints_of(folder)
    if saved is None:
        raise UsageError(f"{folder} holds no checkpoint", expected=_SOURCES, fix="train with --save-every N")
    if settings.adapter.is_on:
        _refuse_adapter(folder)
    if settings.model.kind == "hf":
        settings = replace(settings, model=replace(settings.model, pretrained=False))
    model = _of_settings(settings, folder.resolve().name)
    _load_newest(model.model, saved)
    return model


def _refuse_adapter(folder: Path) -> None:
    """Refuse a run whose checkpoints hold an adapter alone; say how its merged model is exported."""
    merged = folder / MERGED
    fix = f"name {merged}"
    if not merged.is_dir():
        fix = f"merge it, drumline train {folder / KEPT} --out {folder} --continue --merge, and name {merged}"
    raise UsageError(f"{folder} trained an adapter, without its base", expected="a whole model", fix=fix)


def _load_newest(model: nn.Module, folder: Path) -> None:
    """Give a model the weights of the newest whole checkpoint of a run."""
    skipped = []
    for path in Shelf().choose(folder).paths:
        try:
            return _load(model, Checkpoint(path))
        except RecordError as error:
            skipped.append(f"{path}: {error}")
            logging.getLogger("drumline").warning("passed over a damaged checkpoint: %s", skipped[-1])
    raise UsageError(f"{folder} holds no checkpoint that is whole", expected=_SOURCES, fix="; ".join(skipped))


def _load(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Give a model the weights of a checkpoint; every tensor must be there, tied ones under one of their names."""
    own_tensors = model.state_dict(keep_vars=True)
    tensors = checkpoint.model
    if odd := [name for name in tensors if name not in own_tensors]:
        raise ModelError(
            f"{checkpoint.path} has {odd[0]!r}, which the model lacks", expected="the model that was trained"
        )
    held_ids: set[int] = set()
    for name in tensors:
        tensor = own_tensors[name]
        value = tensors[name]
        if value.shape != tensor.shape:
            raise ModelError(
                f"{name!r} has shape {tuple(value.shape)} in {checkpoint.path} and {tuple(tensor.shape)} here"
            )
        tensor.data.copy_(value)
        held_ids.add(id(tensor))
    if missing := [name for name, item in own_tensors.items() if id(item) not in held_ids]:
        raise ModelError(f"{checkpoint.path} lacks {missing[0]!r}", expected="the model that was trained")


def _of_settings(settings: TrainSettings, name: str) -> FinishedModel:
    settings = replace(settings, precision=replace(settings.precision, weights="fp32"))
    built = build_model(settings)
    file_name = safe_name(settings.model.name or name)
    if settings.model.kind == "mlp":
        width = settings.model.inputs
        return FinishedModel(
            file_name, built.model.eval(), lambda rows, length: {built.inputs: torch.randn(rows, width)}, {}
        )
    if settings.model.kind == "function":
        return _with_data(file_name, built, settings)
    return FinishedModel(file_name, built.model.eval(), _tokens(settings, built), _most(built.model, settings))


def _tokens(settings: TrainSettings, built: Built) -> Callable[[int, int], dict[str, Tensor]]:
    vocabulary = vocabulary_of(settings, built)
    assert vocabulary is not None, "a built-in model and one of Hugging Face say it"
    return lambda rows, length: {built.inputs: torch.randint(vocabulary, (rows, length))}


def _most(model: nn.Module, settings: TrainSettings) -> dict[str, int]:
    """Return how long inputs may be: as many tokens as the model has positions."""
    return {LENGTH: _positions(getattr(model, "config", None)) or settings.batch.sequence}


def _positions(config: Any) -> int | None:
    known = (getattr(config, name, None) for name in _LONGEST)
    return next((value for value in known if isinstance(value, int) and value > 0), None)


def _with_data(name: str, built: Built, settings: TrainSettings) -> FinishedModel:
    """Return a user's model with inputs like those that it was trained on."""
    with closing(build_data(settings, built)) as data:
        batch = example_of(data, settings.num_microbatches).inputs[built.inputs]
    return FinishedModel(name, built.model.eval(), _resizing({built.inputs: batch}), {LENGTH: settings.batch.sequence})


def _of_function(source: str, seed: int, max_length: int) -> FinishedModel:
    """Return what a function makes: (model, example), or (model, loss_fn, batch, target) as for `drumline profile`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        function = named_function(source, key="MODEL")
        with users_code(source):
            returned = function()
    if not isinstance(returned, tuple) or len(returned) not in (2, 4) or not isinstance(returned[0], nn.Module):
        parts = ", ".join(type(value).__name__ for value in returned) if isinstance(returned, tuple) else ""
        raise UsageError(
            f"{source} returned {f'({parts})' if parts else type(returned).__name__}",
            expected="(model, example), or (model, loss_fn, batch, target)",
            fix="return these from the function",
        )
    model, example = returned[0], returned[1] if len(returned) == 2 else returned[2]
    named = dict(example) if isinstance(example, Mapping) else {_first_argument(model): example}
    _check_example(source, named)
    named = {name: value.float() if value.is_floating_point() else value for name, value in named.items()}
    model = model.float().eval()
    resizing = _resizing(named, is_fixed=not _takes_other_lengths(model, named))
    return FinishedModel(safe_name(source.rpartition(":")[2]), model, resizing, {LENGTH: max_length})


def _check_example(source: str, named: Mapping[str, Any]) -> None:
    """Refuse an example that is no tensors with rows."""
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor) or not tensor.dim():
            what = "a tensor without dimensions" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UsageError(
                f"{source} returned an example whose input {name!r} is {what}",
                expected="a tensor, or tensors by argument name, with rows in the first dimension",
                fix="return (model, {name: tensor}), and keep other settings in the model",
            )
    if not named or len({len(value) for value in named.values()}) != 1 or not len(next(iter(named.values()))):
        rows = ", ".join(f"{name} {len(value)}" for name, value in named.items()) or "no inputs"
        raise UsageError(
            f"{source} returned an example with {rows} rows",
            expected="at least one input, and the same rows, 1 or more, in each",
            fix="return a small batch of what clients will send",
        )


def _takes_other_lengths(model: nn.Module, named: Mapping[str, Tensor]) -> bool:
    """Return whether a model computes tokens of another length too, and not a fixed number of columns."""
    lengths = {tensor.shape[1] for tensor in named.values() if _is_tokens(tensor)}
    if len(lengths) != 1:
        return False
    length = lengths.pop()
    other = _resizing(named)(2, length - 1 if length > 1 else 2)
    try:
        with torch.no_grad():
            model(*other.values()) if isinstance(model, nn.Sequential) else model(**other)
    except Exception:  # whatever the model raises for a length that it does not take
        return False
    return True


def _first_argument(model: nn.Module) -> str:
    return next(iter(inspect.signature(model.forward).parameters), "input")


def _is_tokens(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point()


def _resizing(named: Mapping[str, Tensor], *, is_fixed: bool = False) -> Callable[[int, int], dict[str, Tensor]]:
    """Return a function that makes inputs of any size from an example; tokens may change their length, others not.

    Rows that repeat the example are smaller where they can be, so that no two rows are equal.
    """

    def resized(tensor: Tensor, rows: int, length: int) -> Tensor:
        number = torch.arange(rows)
        found_tensor = tensor[number % len(tensor)]
        if _is_tokens(tensor) and not is_fixed:
            found_tensor = found_tensor[:, torch.arange(length) % tensor.shape[1]]
        if tensor.is_floating_point():
            found_tensor = found_tensor / (1 + number // len(tensor)).view(-1, *[1] * (tensor.dim() - 1))
        return found_tensor.contiguous()

    return lambda rows, length: {name: resized(tensor, rows, length) for name, tensor in named.items()}
