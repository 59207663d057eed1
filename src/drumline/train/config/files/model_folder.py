"""What is broken in a Hugging Face model's folder, as far as its files tell without transformers and PyTorch."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drumline.core.files import unreadable

_LARGEST = 2**27  # bytes of a JSON file
_INDEX = "model.safetensors.index.json"
_SAFE = "model.safetensors"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
_KNOWN = ("auto_mappings.py", "configuration_auto.py")  # where transformers lists its models


class _Broken(Exception):
    """A file that is not what it should be."""


def problems_of(path: str, config: str, *, weights: bool) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the folder of a model, each with what was expected."""
    try:
        content = _object(config)
    except _Broken as broken:
        yield str(broken), "the model's configuration, as transformers writes it"
        return
    kind = content.get("model_type")
    if not isinstance(kind, str) or not kind:
        yield f"{config}: there is no model_type", "the model's configuration, as transformers writes it"
    elif not _is_known(kind):
        expected = "a model that this version of transformers knows; code that comes with a model is never run"
        yield f"{config}: model_type is {kind!r:.60}, which transformers does not know", expected
    if not os.path.isdir(path):
        return
    for name in _TOKENIZER:
        if (file := os.path.join(path, name)) and os.path.exists(file):
            try:
                _object(file)
            except _Broken as broken:
                yield str(broken), "JSON, as transformers writes it"
    if weights:
        try:
            for file in _weights(path):
                _check_header(file)
        except _Broken as broken:
            yield str(broken), "weights as safetensors writes them; set model.pretrained = false to train without"


def _object(path: str) -> dict[str, Any]:
    if why := unreadable(path):
        raise _Broken(f"{path}: {why}")
    if os.path.getsize(path) > _LARGEST:
        raise _Broken(f"{path}: has more than {_LARGEST // 2**20} MiB")
    try:
        content = json.loads(Path(path).read_bytes())
    except json.JSONDecodeError as error:
        raise _Broken(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
    except (UnicodeDecodeError, RecursionError):
        raise _Broken(f"{path}: not JSON in UTF-8") from None
    if not isinstance(content, dict):
        raise _Broken(f"{path}: a {type(content).__name__} instead of an object")
    return content


def _is_known(kind: str) -> bool:
    """Whether the lists of transformers have a model; they are read as text, for importing them takes seconds."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return True  # whoever builds the model says what to install
    folder = Path(spec.origin).parent / "models" / "auto"
    texts = [(folder / name).read_text(encoding="utf-8") for name in _KNOWN if (folder / name).is_file()]
    return not texts or any(f'"{kind}"' in text or f"'{kind}'" in text for text in texts)


def _weights(folder: str) -> Iterator[str]:
    """Yield the files of weights that will be read; of other formats than safetensors none."""
    index = os.path.join(folder, _INDEX)
    if os.path.exists(index):
        named = _object(index).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
            raise _Broken(f"{index}: there is no weight_map")
        yield from (os.path.join(folder, file) for file in dict.fromkeys(named.values()))
    elif os.path.exists(single := os.path.join(folder, _SAFE)):
        yield single


def _check_header(path: str) -> None:
    if why := unreadable(path):
        raise _Broken(f"{path}: {why}")
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length > min(size - 8, 100_000_000):
            raise _Broken(f"{path}: not a file of safetensors")
        try:
            tensors = json.loads(file.read(length))
            ends = [int(tensor["data_offsets"][1]) for name, tensor in tensors.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            raise _Broken(f"{path}: not a file of safetensors") from None
    if size - 8 - length != max(ends, default=0):
        raise _Broken(f"{path}: has {size:,} bytes, and its tensors need {8 + length + max(ends, default=0):,}")
