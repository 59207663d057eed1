"""An adapter in PEFT's own format, in every checkpoint: written without the base, and without gathering anything.

    all ranks      model-0000N-of-0000M.safetensors   the adapter's tensors of their own stages
    process 0      adapter_model.safetensors          the same, copied out of these files one by one, by PEFT's names
                   adapter_config.json

`PeftModel.from_pretrained(base, checkpoint)` loads it, and so does transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from drumline.checkpoint.extra_files import Maker
from drumline.core.errors import RecordError
from drumline.model.weights.files import StoredTensor, Weights
from drumline.train.models.built import Adapter
from drumline.train.tune.build_tuned import TENSORS
from drumline.train.tune.peft_config import CONFIG
from drumline.train.tune.tensor_file import write_tensors


def adapter_files(adapter: Adapter) -> dict[str, bytes | Maker]:
    """Return the files that make a checkpoint an adapter of PEFT, by name."""

    def write(checkpoint: Path, file: Path) -> None:
        stored = stored_tensors(checkpoint, adapter.names)
        layout = {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()}
        write_tensors(file, layout, lambda name: stored[name].read())

    return {CONFIG: adapter.config, TENSORS: write}


def stored_tensors(checkpoint: Path, names: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Return where a checkpoint has the tensors of an adapter, by the names that PEFT gives them."""
    files = sorted(checkpoint.glob("model-*-of-*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in Weights(file).tensors.items()}
    if missing := sorted(name for name in names if name not in tensors):
        raise RecordError(f"{checkpoint} has no {missing[0]!r}", expected="all tensors of the adapter")
    return {theirs: tensors[name] for name, theirs in names.items()}
