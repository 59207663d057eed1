"""Write a model with an adapter merged into it, as a plain model's folder: layer by layer, with one layer in memory.

    files of the base ──► a tensor that the adapter leaves alone ─────────────────────────► copied
                     └──► a layer with an adapter: both read, merged by PEFT's own layer ──► written, forgotten
    files of the adapter ► what was trained whole (modules_to_save, biases) ───────────────► written in its place

The numbers are those of the base's files. An adapter that was trained with a quantised base is merged into the full
weights. This loses what it learned about their rounding, so the result computes nearly, not exactly, the same.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drumline.checkpoint.folder import checkpoints
from drumline.core.errors import ModelError, RunError, UsageError
from drumline.model.block import Block
from drumline.model.catalogue import named_tensors
from drumline.model.weights.adapters import adapter_layers, adapter_tensors, base_name
from drumline.model.weights.files import StoredTensor, Weights
from drumline.model.weights.materialise import materialise
from drumline.train.config.settings import TrainSettings
from drumline.train.models.companion_files import files_beside
from drumline.train.tune.adapter_files import stored_tensors
from drumline.train.tune.build_tuned import build_tuned
from drumline.train.tune.tensor_file import write_tensors

MERGED = "merged"
INDEX = "model.safetensors.index.json"
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def merge_last(settings: TrainSettings) -> Path:
    """Merge the adapter of a run's newest checkpoint, into the folder `merged` of the run; an older one is replaced."""
    run = Path(settings.folder)
    paths = checkpoints(run / "checkpoints")
    if not paths:
        raise RunError(f"adapter.merge: {run} has no checkpoint", expected="an adapter that was saved")
    fresh, out = run / ".merged.new", run / MERGED
    shutil.rmtree(fresh, ignore_errors=True)
    merge(settings, paths[0], fresh)
    shutil.rmtree(out, ignore_errors=True)
    return fresh.rename(out)


def merge(settings: TrainSettings, checkpoint: Path, out: Path) -> Path:
    """Write the model of a run with the adapter of one of its checkpoints merged into it, and return its folder.

    The folder appears once it is whole; one that is there is refused.
    """
    if out.exists():
        raise UsageError(f"{out} is there already", expected="a folder to write the merged model to", fix="remove it")
    merging = _Merging(settings, checkpoint)
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        merging.write(part)
        part.rename(out)
    finally:
        with suppress(OSError):
            shutil.rmtree(part)
    return out


class _Merging:
    """One model that is merged: the files of its base, those of the adapter, and the model without memory."""

    def __init__(self, settings: TrainSettings, checkpoint: Path) -> None:
        self.base = Weights(settings.model.path)
        numbers = _DTYPES[_most_frequent(self.base)]
        adapter = replace(settings.adapter, base=numbers, start="")
        if settings.adapter.start:
            adapter = replace(adapter, start=str(checkpoint))
        self.settings = replace(settings, adapter=adapter, precision=replace(settings.precision, weights=numbers))
        built = build_tuned(self.settings, device="meta")
        assert built.adapter is not None, "settings of an adapter"
        self.model = built.model
        stored = stored_tensors(checkpoint, built.adapter.names)
        self.trained = {name: stored[theirs] for name, theirs in built.adapter.names.items()}
        self.weights = Weights(settings.model.path)
        self.weights.tensors.update(self.trained)
        self.layers = dict(self._layers())
        self.replaced = dict(self._replaced())
        for name in (*self.layers, *self.replaced):
            if name not in self.base.tensors:
                raise ModelError(
                    f"the adapter changes {name}, which {settings.model.path} does not hold by itself",
                    expected="a model that is saved with the names and shapes that it has in memory, and unties",
                    fix="load the adapter instead: PeftModel.from_pretrained(base, checkpoint)",
                )

    def write(self, folder: Path) -> None:
        """Write the files of weights, their index, configuration and tokenizer."""
        files = sorted({tensor.file for tensor in self.base.tensors.values()})
        where, size = {}, 0
        for number, file in enumerate(files, start=1):
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            inside = {key: tensor for key, tensor in self.base.tensors.items() if tensor.file == file}
            layout = {key: (tensor.dtype, tensor.shape) for key, tensor in inside.items()}
            size += write_tensors(folder / name, layout, self._value)
            where.update(dict.fromkeys(inside, name))
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        plain = replace(self.settings, adapter=replace(self.settings.adapter, method="", start=""))
        for name, content in files_beside(plain).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    def _value(self, name: str) -> Tensor:
        """Return the value of a tensor in the merged model."""
        if name in self.replaced:
            return self.replaced[name].read()
        return self.base.tensors[name].read() if name not in self.layers else self._merged(name)

    def _merged(self, name: str) -> Tensor:
        """Return the weight or bias of a layer with its adapter merged into it."""
        path, layer, key = self.layers[name]
        block = Block(path, layer, path)
        whole = [Block("", self.model, "")]
        how: dict[str, Any] = {"root": self.model, "weights": self.weights, "device": torch.device("cpu")}
        materialise(whole, [block], seed=self.settings.run.seed, **how)
        with torch.no_grad():
            layer.merge(safe_merge=True)
        merged: Tensor = getattr(layer.get_base_layer(), key)
        tensor = merged.detach().clone()
        layer.merged_adapters.clear()
        layer.to("meta")
        return tensor

    def _layers(self) -> Iterator[tuple[str, tuple[str, Any, str]]]:
        """Yield the layers that have adapters: path, layer and key of every tensor of their base, by its name there."""
        paths = {module: path for path, module in self.model.named_modules()}
        for layer in adapter_layers(paths):
            base: nn.Module = layer.get_base_layer()
            for key, _ in base.named_parameters(recurse=False):
                yield base_name(f"{paths[layer]}.base_layer.{key}"), (paths[layer], layer, key)

    def _replaced(self) -> Iterator[tuple[str, StoredTensor]]:
        """Yield what was trained whole, by its name in the base."""
        own_ids = {id(tensor) for _, layer, _ in self.layers.values() for tensor in adapter_tensors(layer)}
        for name, tensor in named_tensors(self.model):
            if name in self.trained and id(tensor) not in own_ids:
                yield base_name(name), self.trained[name]


def _most_frequent(weights: Weights) -> torch.dtype:
    """Return the numbers that most tensors of a base have; others are read as these."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in weights.tensors.values():
        if tensor.dtype in _DTYPES:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + torch.Size(tensor.shape).numel()
    if not sizes:
        raise ModelError(
            f"{weights.path} holds no weights in float32, bfloat16 or float16",
            expected="a base that is not quantised, into which an adapter can be merged",
        )
    return max(sizes, key=lambda dtype: sizes[dtype])
