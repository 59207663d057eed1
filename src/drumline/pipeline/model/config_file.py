"""A Hugging Face causal language model from its config.json alone, with random weights and a batch of random text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from drumline.core.errors import ModelError, UsageError
from drumline.core.files import Kind, read_object
from drumline.pipeline.model.file import Material

_EXPECTED = "the config.json of a causal language model of Hugging Face's"
_KIND = Kind("config", ModelError, _EXPECTED)
_LENGTH = 512  # of a row, in tokens, unless asked for


def is_config(source: object) -> bool:
    """Whether a model is named by its configuration.

    >>> is_config("models/config.json"), is_config("model.py:make")
    (True, False)
    """
    return isinstance(source, str) and source.endswith(".json")


def material_from_config(path: str, *, rows: int, length: int | None = None) -> Material:
    """Return the model, on the host and with random weights, and a batch of so many rows of `length` tokens."""
    config = _config(Path(path))
    transformers = _transformers()
    try:
        known = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
        model = transformers.AutoModelForCausalLM.from_config(known)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: {str(error).splitlines()[0]}", expected=_EXPECTED) from None
    most = getattr(known, "max_position_embeddings", None) or _LENGTH
    length = min(_LENGTH, most) if length is None else length
    if not 1 <= length <= most:
        raise UsageError(f"rows of {length} tokens", expected=f"1 to {most}, which the model has places for")
    ids = torch.randint(known.vocab_size, (rows, length))
    return Material(model.train(), None, {"input_ids": ids, "labels": ids}, None)


def check_config(path: str) -> None:
    """Refuse what is no configuration, without making the model."""
    _config(Path(path))


def _config(path: Path) -> dict[str, Any]:
    config = read_object(path, _KIND)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} names no model_type", expected=_EXPECTED)
    return config


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError:
        raise UsageError(
            "a model from its config.json, and transformers is not installed", fix='pip install "drumline[hf]"'
        ) from None
    return transformers
