"""What makes a checkpoint of a Hugging Face model complete: its configuration, tokenizer, chat template and the like.

They are read once, when a run starts, and stand in every checkpoint from its first moment on. So transformers alone
loads any of them, whatever becomes of the run or of the folder that it started from. The configuration says in which
numbers the weights are stored: those that were trained.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from drumline.core.files import MIB
from drumline.train.config.settings import TrainSettings
from drumline.train.models.built import DTYPES
from drumline.train.models.chat_templates import PLAIN, template_named
from drumline.train.models.tokenizers import BYTES

_CONFIG = "config.json"
_TEMPLATES = "additional_chat_templates"
_TEMPLATE = "chat_template.jinja"
_LARGEST = 256 * MIB
# What transformers reads of a folder besides weights. Families have tokenizers of their own, so names are not listed.
_TOKENIZERS = (
    *("tokenizer*", "*token*.json", "vocab*", "merges*", "*.model", "*.model.v*", "*.tiktoken", "*.spm", "*.bpe"),
    *("tekken.json", "encoder.json", "normalizer.json", "dict*.txt", "*.codes", "chat_template*", "*.jinja"),
)
_TAKEN = (*_TOKENIZERS, "*.json", "*.py", "LICENSE*", "NOTICE*", "USE_POLICY*")
# Weights and their index are the checkpoint's own; an adapter's configuration would ask for weights that are not there.
_LEFT = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "*.index.json"),
    *("manifest.json", "adapter_*", "trainer_state.json", "*_results.json", ".*"),
)


def files_beside(settings: TrainSettings) -> dict[str, bytes]:
    """Return what belongs into every checkpoint of a run, by name; nothing for models that are not Hugging Face's.

    >>> files_beside(TrainSettings())
    {}
    """
    if settings.model.kind != "hf":
        return {}
    source, tokenizer = Path(settings.model.path), settings.data.tokenizer
    paths = {_CONFIG: source} if source.is_file() else dict(_taken(source))
    if tokenizer and tokenizer != BYTES:  # what the model has been trained with
        paths = {name: path for name, path in paths.items() if not _matches(name, _TOKENIZERS)}
        paths |= {name: path for name, path in _taken(Path(tokenizer)) if _matches(name, _TOKENIZERS)}
    if settings.adapter.is_on:  # the configuration is the base's, and so is what it says of weights
        paths = {name: path for name, path in paths.items() if _matches(name, _TOKENIZERS)}
    read = {name: content for name, path in paths.items() if (content := _read(path)) is not None}
    if template := template_named("" if settings.data.chat_template == PLAIN else settings.data.chat_template):
        read[_TEMPLATE] = template.encode()  # what the model is trained with
    if _CONFIG in read:
        read[_CONFIG] = _with_dtype(read[_CONFIG], str(DTYPES[settings.precision.weights]).removeprefix("torch."))
    return read


def _taken(folder: Path) -> Iterator[tuple[str, Path]]:
    templates = folder / _TEMPLATES
    for path in sorted([*folder.iterdir(), *(templates.iterdir() if templates.is_dir() else ())]):
        if path.is_file() and _matches(path.name, _TAKEN) and not _matches(path.name, _LEFT):
            yield str(path.relative_to(folder)), path


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name.rpartition("/")[2], pattern) for pattern in patterns)


def _read(path: Path) -> bytes | None:
    try:
        size = path.stat().st_size
        if size <= _LARGEST:
            return path.read_bytes()
        reason = f"it has {size:,} bytes"
    except OSError as error:
        reason = error.strerror or str(error)
    logging.getLogger("drumline").warning("checkpoints will be without %s: %s", path, reason)
    return None


def _with_dtype(config: bytes, dtype: str) -> bytes:
    """Return a configuration that says which numbers the weights are, where it says so at all.

    >>> _with_dtype(b'{"dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16"}}', "float32").decode().split()
    ['{', '"dtype":', '"float32",', '"text_config":', '{', '"torch_dtype":', '"float32"', '}', '}']
    """
    try:
        table = json.loads(config)
    except ValueError:
        return config
    changed = _table_with_dtype(table, dtype)
    return config if changed == table else (json.dumps(changed, indent=2) + "\n").encode()


def _table_with_dtype(table: Any, dtype: str) -> Any:
    if not isinstance(table, dict):
        return table
    inner = {
        name: _table_with_dtype(e, dtype)
        for name, e in table.items()
        if name.endswith("_config") and "quant" not in name
    }
    own_dtypes = {name: dtype for name in ("dtype", "torch_dtype") if isinstance(table.get(name), str)}
    return {**table, **inner, **own_dtypes}
