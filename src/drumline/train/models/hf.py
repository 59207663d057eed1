"""Causal language models of Hugging Face: from a local folder with or without weights, or from a config file.

Nothing is downloaded, and no code of the folder runs. The folder's own tokenizer is used where it has one.

Packed rows need a model that keeps documents apart when their positions start again at 0. No list says which families
do so, so Drumline tests a small copy of the model. It must compute the same for two documents in one row as for each
alone.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError, UsageError, installing
from drumline.model.quantised.hushed import hushed
from drumline.train.models.built import IGNORED, Built, Tokenizer
from drumline.train.models.tokenizers import FolderTokenizer, has_tokenizer

_LARGEST_PROBE = 20_000_000  # parameters; wider models are asked in a narrow copy
_NARROW = {
    "hidden_size": 64,
    "n_embd": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_APART = 1e-4
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "pytorch_model.bin.index.json")


def loss_of_logits(output: Any, target: Tensor) -> Tensor:
    """Return the mean loss of the targets that count, of a model that returns logits alone or among other things."""
    logits = output if isinstance(output, Tensor) else output["logits"] if isinstance(output, dict) else output[0]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), ignore_index=IGNORED)


def hf_model(
    path: str, *, pretrained: bool, sequence: int, packed: bool, dtype: torch.dtype, tokenizer: Tokenizer | None
) -> Built:
    """Return the model on the meta device, with the weights of its folder to be read stage by stage."""
    config = config_of(path)
    _check_numbers(path, config)
    _check_lengths(path, config, sequence)
    if packed and not keeps_documents_apart(config):
        raise ModelError(
            f'lengths.how is "packed", and a {config.model_type} model attends across the documents of a row',
            expected="a model that keeps documents apart by their position_ids, as Llama and Qwen do",
            fix='use lengths.how = "padded" or "buckets"',
        )
    with torch.device("meta"):
        model = _new_model(config, dtype)
    folder = Path(path) if Path(path).is_dir() else None
    if tokenizer is None and folder is not None and has_tokenizer(folder):
        tokenizer = FolderTokenizer(folder)
    weights = folder is not None and pretrained and any((folder / name).is_file() for name in _WEIGHTS)
    takes = frozenset({"attention_mask", *(["position_ids"] if packed else [])})
    return Built(
        model, loss_of_logits, tokenizer, inputs="input_ids", takes=takes, weights=str(folder) if weights else None
    )


def keeps_documents_apart(config: Any) -> bool:
    """Whether a small copy of a model computes the same for two documents in a row as for each alone."""
    lengths = [5, 3]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        tokens = torch.randint(3, 60, (2, sum(lengths)))
        places = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
        try:
            model = _new_model(_small(config), torch.float32).eval()
            alone = [model(input_ids=tensor, use_cache=False)[0] for tensor in torch.split(tokens, lengths, dim=1)]
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
            raise ModelError(
                f"whether a {config.model_type} model keeps packed documents apart cannot be checked, because a small"
                f" copy of it fails: {(str(error).splitlines() or ['?'])[0][:160]}",
                fix='use lengths.how = "padded" or "buckets"',
            ) from error
        try:
            row = model(input_ids=tokens, position_ids=places, use_cache=False)[0]
        except TypeError:
            return False  # takes no positions
    return bool((row - torch.cat(alone, dim=1)).abs().max() < _APART)


def _small(config: Any) -> Any:
    """Return a copy of few layers, of every kind that there is; wide ones are narrowed."""
    small = copy.deepcopy(config)
    kinds = list(vars(small).get("layer_types") or [])
    layers = max(2, 1 + max((kinds.index(kind) for kind in set(kinds)), default=0))
    for name in ("num_hidden_layers", "n_layer"):
        if hasattr(small, name):
            setattr(small, name, min(layers, getattr(small, name)))
    if kinds:
        small.layer_types = kinds[:layers]
    small.vocab_size = 64
    small.pad_token_id = None
    with torch.device("meta"):
        size = sum(param.numel() for param in _new_model(small, torch.float32).parameters())
    if size > _LARGEST_PROBE:
        for name, value in _NARROW.items():
            if isinstance(getattr(small, name, None), int):
                setattr(small, name, min(value, getattr(small, name)))
    return small


def config_of(path: str) -> Any:
    """Return the configuration of a model that a folder or file holds."""
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ModelError('model.kind "hf" needs transformers', fix=installing("hf")) from None
    place = Path(path)
    expected = "a folder with config.json, or a config file"
    if not path or not place.exists():
        raise UsageError(f"model.path is {path!r:.80}, and there is no such folder or file", expected=expected)
    if place.is_dir() and not (place / "config.json").is_file():
        raise UsageError(f"{path} has no config.json", expected=expected)
    try:
        config = AutoConfig.from_pretrained(str(place), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"the config of {path} cannot be read: {(str(error).splitlines() or ['?'])[0][:200]}",
            expected="a model that this version of transformers knows; code that comes with a model is never run",
        ) from None
    return config


def _new_model(config: Any, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        build: Any = AutoModelForCausalLM.from_config
        with hushed():  # transformers imports libraries of quantised weights
            model: Any = build(config, dtype=dtype, trust_remote_code=False)
    except ValueError as error:
        if "AutoModelForCausalLM" not in str(error):
            raise
        raise ModelError(
            f"a {config.model_type} model is no causal language model",
            expected="a model that AutoModelForCausalLM knows",
            fix='build it yourself: model.kind = "function"',
        ) from None
    # Models that expect to generate text do not look for documents in their positions.
    model.config.use_cache = False
    module: nn.Module = model
    return module


def _check_numbers(path: str, config: Any) -> None:
    """Refuse weights that are quantised already, which every library names and packs in its own way."""
    quantised = getattr(config, "quantization_config", None)
    if quantised is None:
        return
    table = quantised if isinstance(quantised, dict) else vars(quantised)
    raise ModelError(
        f"{path} holds weights that are quantised already, by {str(table.get('quant_method', '?'))[:40]!s}",
        expected="a model in full precision, whose layers are quantised as they are read",
        fix="name the folder of the model that they were made of, with --base nf4 or int8",
    )


def _check_lengths(path: str, config: Any, sequence: int) -> None:
    for name in ("max_position_embeddings", "n_positions"):
        longest = getattr(config, name, None)
        if isinstance(longest, int) and 0 < longest < sequence:
            raise ModelError(
                f"batch.sequence is {sequence}, and {path} says {name} = {longest}",
                expected=f"at most {longest} tokens in a row",
            )
