"""Load models: from a user's function, `FILE.py:NAME`, or from the config.json of a Hugging Face model.

The function returns (model, loss_fn, batch, target). A configuration gives random weights and random text.

A module that is not a chain of blocks gets a dict as keyword arguments and a tuple as positional arguments. If it
computes its own loss, as Hugging Face models do, loss_fn and target are None.

Every rank loads the file itself, as `python FILE.py` would: the file can import modules next to it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from drumline.core.errors import DrumlineError, ModelError, UsageError, installing, nearest
from drumline.core.files import FileKind, is_regular, read_object
from drumline.engine.model.blocks import is_chain
from drumline.model.block import Model, blocks_of

Maker = Callable[[], Any]

_EXPECTED = "FILE.py:NAME, a function that returns (model, loss_fn, batch, target)"
_EXPECTED_CONFIG = "the config.json of a Hugging Face causal language model"
_KIND = FileKind("config", ModelError, _EXPECTED_CONFIG)
_LENGTH = 512  # default tokens per row


class Material(NamedTuple):
    """Everything that a step needs."""

    model: Model
    loss_fn: Callable[..., Tensor] | None  # None for a model that computes its own loss
    batch: Any
    target: Any


def material_from(source: str | Maker) -> Material:
    """Return what the function returns; `source` is the function itself, or `FILE.py:NAME`.

    >>> material_from("no_such_file.py:make")
    Traceback (most recent call last):
    drumline.core.errors.ModelError: no_such_file.py: no such file; expected FILE.py:NAME, a function that returns ...
    """
    if not isinstance(source, str):
        return _material(source, getattr(source, "__name__", repr(source)))
    path, name = _parts(source)
    with _beside(path):
        module = _loaded(path)
        maker = getattr(module, name, None)
        if not callable(maker):
            keys = [key for key, attribute in vars(module).items() if callable(attribute) and not key.startswith("_")]
            keys = [key for key in keys if getattr(getattr(module, key), "__module__", "") == module.__name__]
            what = "is not a function" if hasattr(module, name) else "does not exist"
            raise ModelError(f"{path}: {name} {what}", expected=_EXPECTED, fix=nearest(name, keys) if keys else "")
        return _material(maker, f"{path}:{name}")


def check(source: str) -> None:
    """Refuse a source that is neither a configuration nor a function in a file, without running anything."""
    if is_config(source):
        _config(Path(source))
    else:
        _parts(source)


def _parts(source: str) -> tuple[Path, str]:
    file, _, name = source.rpartition(":")
    if not file or not name.isidentifier():
        raise ModelError(f"the model is {source!r}", expected=_EXPECTED)
    path = Path(file)
    if not is_regular(path):
        raise ModelError(f"{path}: {'not a file' if os.path.exists(path) else 'no such file'}", expected=_EXPECTED)
    return path, name


@contextmanager
def _beside(path: Path) -> Iterator[None]:
    """Let the file import modules next to it, as a script can."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _loaded(path: Path) -> ModuleType:
    name = f"_model_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ModelError(f"{path} is not a Python file", expected=_EXPECTED)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up classes there
    try:
        spec.loader.exec_module(module)
    except DrumlineError:
        raise
    except Exception as error:
        raise ModelError(
            f"{path} failed with {type(error).__name__}: {error}", fix="make sure that the file runs on its own"
        ) from error
    return module


def _material(maker: Maker, name: str) -> Material:
    try:
        returned = maker()
    except DrumlineError:
        raise
    except Exception as error:
        raise ModelError(
            f"{name} failed with {type(error).__name__}: {error}", expected="a function that runs without arguments"
        ) from error
    if not isinstance(returned, tuple | list) or len(returned) != len(Material._fields):
        what = f"{len(returned)} values" if isinstance(returned, tuple | list) else type(returned).__name__
        raise ModelError(f"{name} returned {what}", expected="(model, loss_fn, batch, target)")
    material = Material(*returned)
    if is_chain(material.model):
        blocks_of(material.model)  # raises if the model cannot be cut
    has_own_loss = material.loss_fn is None and not is_chain(material.model)  # a model that computes its own loss
    if not has_own_loss and not callable(material.loss_fn):
        raise ModelError(
            f"{name} returned a {type(material.loss_fn).__name__} as loss_fn",
            expected="(model, loss_fn, batch, target), with a function as loss_fn",
        )
    return material


def is_config(source: object) -> TypeGuard[str]:
    """Whether a source names a model by its configuration.

    >>> is_config("models/config.json"), is_config("model.py:make")
    (True, False)
    """
    return isinstance(source, str) and source.endswith(".json")


def material_from_config(path: str, *, rows: int, length: int | None = None) -> Material:
    """Return the model, on the host and with random weights, and a batch of `rows` rows of `length` tokens."""
    config = _config(Path(path))
    try:
        import transformers
    except ModuleNotFoundError:
        raise UsageError(
            "building a model from its config.json needs transformers, which is not installed", fix=installing("hf")
        ) from None
    try:
        known = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
        model = transformers.AutoModelForCausalLM.from_config(known)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: {str(error).splitlines()[0]}", expected=_EXPECTED_CONFIG) from None
    most = getattr(known, "max_position_embeddings", None) or _LENGTH
    length = min(_LENGTH, most) if length is None else length
    if not 1 <= length <= most:
        raise UsageError(f"rows of {length} tokens", expected=f"1 to {most}, the model's number of positions")
    ids = torch.randint(known.vocab_size, (rows, length))
    return Material(model.train(), None, {"input_ids": ids, "labels": ids}, None)


def _config(path: Path) -> dict[str, Any]:
    config = read_object(path, _KIND)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} has no model_type", expected=_EXPECTED_CONFIG)
    return config
