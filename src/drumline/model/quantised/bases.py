"""Replace the linear layers of a model by quantised, frozen ones: where it has memory, or on the meta device.

On the meta device a layer gets its final form without memory. Its weight has the parts, shapes and types of a quantised
one, and stores how it is made (`Recipe`). Whoever reads its value later, from a file or an initialiser, packs it by
`pack`, one weight after the other.

    nn.Linear, bfloat16, meta ──quantise(model, "nf4")──► Linear4bit, uint8 codes and scales, meta
                                                               │  Pipeline(model, weights=folder)
    file: bfloat16 ── one weight at a time ──► pack ───────────┴──► the same with memory, on the rank that holds it
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError, NotInstalled, installing, nearest
from drumline.model.quantised.hushed import hushed
from drumline.model.quantised.packed import is_packed, settle

_RECIPE = "recipe"
_FOUR_BITS, _EIGHT_BITS = ("nf4", "fp4"), "llm-int8"
_THRESHOLD = 6.0  # as transformers has it: columns of activations with a larger value are multiplied in half precision


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a weight is quantised: by the name of a base, or by a configuration of torchao; `dtype` is the weight's own.

    Sizes of blocks, nesting and storage are those of 4-bit bases.
    """

    base: str
    config: Any = None
    dtype: torch.dtype | None = None
    block_size: int = 64
    is_nested: bool = True
    storage: torch.dtype = torch.uint8

    def pack(self, weight: Tensor) -> nn.Parameter:
        """Return a full-precision weight as a quantised, frozen parameter on the same device."""
        plain = weight.detach() if self.dtype is None else weight.detach().to(self.dtype)
        packed = self._packed(plain)
        packed.requires_grad_(False)
        packed.__dict__[_RECIPE] = self
        return packed

    def _packed(self, weight: Tensor) -> nn.Parameter:
        new_weight: Any
        if self.base in _FOUR_BITS:
            new_weight = (
                _library("bitsandbytes")
                .nn.Params4bit(
                    weight,
                    requires_grad=False,
                    blocksize=self.block_size,
                    compress_statistics=self.is_nested,
                    quant_type=self.base,
                    quant_storage=self.storage,
                )
                ._quantize(weight.device)
            )
        elif self.base == _EIGHT_BITS:
            kind = _library("bitsandbytes").nn.Int8Params
            new_weight = kind(weight, requires_grad=False, has_fp16_weights=False)._quantize(weight.device)
        else:
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            layer.weight = nn.Parameter(weight, requires_grad=False)
            _library("torchao.quantization").quantize_(layer, self.config)
            new_weight = layer.weight
        parameter: nn.Parameter = new_weight
        return parameter


# Attributes of a model by which PEFT chooses its layers for such weights.
_FLAGS = {"nf4": "is_loaded_in_4bit", "llm-int8": "is_loaded_in_8bit"}
BASES: dict[str, str] = {
    "int8": "8-bit weights with one scale a row, by torchao; products in the model's own precision",
    "float8": "float8 weights with one scale a row, by torchao; products in the model's own precision",
    "nf4": "4-bit weights (NormalFloat, double quantisation) by bitsandbytes, as in QLoRA",
    "llm-int8": "8-bit weights by bitsandbytes; on accelerators, products of 8-bit activations (LLM.int8)",
}


def recipe_of(base: Any) -> Recipe:
    """Return the recipe of a base: a name of `BASES`, or a configuration that torchao's `quantize_` takes.

    >>> recipe_of("nf5")
    Traceback (most recent call last):
    drumline.core.errors.ModelError: base is 'nf5'; expected int8, float8, nf4, llm-int8, or a configuration of ...
    """
    if isinstance(base, str):
        if base not in BASES:
            expected = f"{', '.join(BASES)}, or a configuration of torchao's quantize_"
            raise ModelError(f"base is {base!r:.60}", expected=expected, fix=nearest(base, BASES))
        if base in _FLAGS:
            _library("bitsandbytes")
            return Recipe(base)
        torchao = _library("torchao.quantization")
        return Recipe(base, torchao.Int8WeightOnlyConfig() if base == "int8" else torchao.Float8WeightOnlyConfig())
    torchao = sys.modules.get("torchao")
    if torchao is None or not isinstance(base, torchao.core.config.AOBaseConfig):
        expected = f"{', '.join(BASES)}, or a configuration of torchao's quantize_"
        raise ModelError(f"base is a {type(base).__name__}", expected=expected)
    return Recipe(type(base).__name__, base)


def recipe_in(tensor: Tensor) -> Recipe | None:
    """Return how a packed weight is made, if that is known; of one of bitsandbytes it is, whoever built the layer."""
    recipe: Recipe | None = tensor.__dict__.get(_RECIPE)
    if recipe is not None or not is_packed(tensor):
        return recipe
    library: Any = sys.modules.get("bitsandbytes")
    if library is None:
        return None
    if isinstance(tensor, library.nn.Params4bit):
        return Recipe(
            tensor.quant_type,
            dtype=tensor.quant_state.dtype,
            block_size=tensor.blocksize,
            is_nested=tensor.compress_statistics,
            storage=tensor.quant_storage,
        )
    return Recipe(_EIGHT_BITS) if isinstance(tensor, library.nn.Int8Params) else None


def quantise(model: nn.Module, base: Any, *, skip: Sequence[str] = ()) -> nn.Module:
    """Replace a model's linear layers by quantised, frozen ones, in place, and return the model.

    `base` is a name of `BASES` or a configuration of torchao. Layers stay as they are if their name matches a pattern
    in `skip`, if they are the model's output embeddings, or if another module has their weight too. Put adapters on top
    afterwards; they train. A model on the meta device stays there, and gets quantised values when its weights are read.
    """
    recipe = recipe_of(base)
    for _, parent, key, layer in list(_linears(model, skip)):
        parent._modules[key] = _replaced(layer, replace(recipe, dtype=layer.weight.dtype))
    if recipe.base in _FLAGS:
        model.__dict__[_FLAGS[recipe.base]] = True
    return model


def quantised_names(model: nn.Module, skip: Sequence[str] = ()) -> list[str]:
    """Return the names of the linear layers that `quantise` replaces.

    >>> quantised_names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), skip=["2"])
    ['0']
    """
    return [path for path, _, _, _ in _linears(model, skip)]


def _linears(model: nn.Module, skip: Sequence[str]) -> Iterator[tuple[str, nn.Module, str, nn.Linear]]:
    """Yield the layers to replace: name, parent, key in the parent, layer."""
    if isinstance(skip, str):
        raise ModelError(f"skip is {skip!r}", expected="a list of names or patterns", fix=f"write [{skip!r}]")
    output = getattr(model, "get_output_embeddings", lambda: None)()
    counts: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    for above, parent in model.named_modules():
        for key, layer in parent._modules.items():
            path = f"{above}.{key}" if above else key
            if type(layer) is not nn.Linear or layer is output or counts[id(layer.weight)] > 1:
                continue
            if is_packed(layer.weight) or any(fnmatchcase(path, pattern) for pattern in skip):
                continue
            yield path, parent, key, layer


def _replaced(layer: nn.Linear, recipe: Recipe) -> nn.Linear:
    """Return a quantised layer with the values of another: another layer, or the same with another weight."""
    packed = recipe.pack(layer.weight)
    layer.requires_grad_(False)
    if recipe.base not in _FLAGS:
        layer.weight = packed
        return layer
    library = _library("bitsandbytes").nn
    linear4bit: Any
    sizes = layer.in_features, layer.out_features
    with torch.device("meta"):
        if recipe.base in _FOUR_BITS:
            linear4bit = library.Linear4bit(*sizes, bias=False, compute_dtype=recipe.dtype, quant_type=recipe.base)
        else:
            linear4bit = library.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=_THRESHOLD)
    linear4bit.weight = packed
    linear4bit.bias = layer.bias
    linear4bit.train(layer.training)
    settle([linear4bit])
    linear: nn.Linear = linear4bit
    return linear


@lru_cache
def _library(name: str) -> Any:
    """Return a package of the extra `tune`, imported when it is first used."""
    try:
        with torch.device("cpu"), hushed():
            library = importlib.import_module(name)
            if name == "bitsandbytes":  # it keeps a table where it first needs it, which could be the meta device
                library.functional.quantize_blockwise(torch.zeros(1))
            return library
    except ImportError as error:
        package = name.partition(".")[0]
        raise NotInstalled(f"quantised weights need {package}: {error}", fix=installing("tune")) from None
