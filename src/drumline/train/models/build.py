"""The model of a training run, whatever its kind, with its loss and its tokenizer."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError, UsageError
from drumline.engine.state.materialise import materialise
from drumline.train.config.placed import concerning
from drumline.train.config.relations import check_made, heads_share_keys, plan_is_expressed
from drumline.train.config.settings import TrainSettings
from drumline.train.models.built import DTYPES, IGNORED, Built, Tokenizer
from drumline.train.models.gpt import GPT, GPTSizes
from drumline.train.models.hf import hf_model
from drumline.train.models.mlp import mlp
from drumline.train.models.tokenizers import ByteTokenizer, tokenizer_named
from drumline.train.models.user_function import built_by_user, call_with, named_function, users_code


def build_model(settings: TrainSettings, *, device: str = "cpu") -> Built:
    """Return the model with its loss and tokenizer; on "meta" without memory, for a pipeline that fills its own stages.

    On "cpu" it has the values that `Pipeline(model, weights=built.weights, seed=settings.run.seed)` gives to one on
    "meta", to the last bit. Functions of users seed themselves: they run under `torch.manual_seed(settings.run.seed)`.

    >>> from drumline.train.config.settings import ModelSettings
    >>> built = build_model(TrainSettings(model=ModelSettings(num_layers=2, hidden=32, num_heads=2)), device="meta")
    >>> built.model.embedding.tokens, sorted(built.takes)
    (Embedding(257, 32), ['document_ids'])
    """
    kind = settings.model.kind
    check_made(settings, ("model", "batch", "precision"), (heads_share_keys, plan_is_expressed))
    if device not in ("cpu", "meta"):
        raise UsageError(f"device is {device!r:.60}", expected='"cpu" or "meta"')
    if kind == "function":
        return _by_function(settings, device)
    model = {"gpt": _gpt, "mlp": _mlp, "hf": _hf}[kind](settings)
    if device == "meta":
        return model
    materialise(model.model, model.weights, device="cpu", seed=settings.run.seed)
    return replace(model, weights=None)


def count_parameters(model: nn.Module) -> int:
    """Return how many numbers are trained, tied ones counted once.

    >>> count_parameters(nn.Linear(3, 2))
    8
    """
    return sum(param.numel() for param in model.parameters())


def next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss over the targets that count."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def outlined(settings: TrainSettings) -> Built:
    """Return a built-in model without its modules, of which data need nothing: making them takes a second.

    >>> outlined(TrainSettings()).model.sizes.vocabulary
    257
    """
    model: Any = nn.Module()
    if settings.model.kind == "mlp":
        return Built(model, nn.functional.cross_entropy, inputs="input")
    model.sizes, tokenizer = _gpt_sizes(settings)
    return Built(model, next_token_loss, tokenizer, takes=frozenset({"document_ids"}))


def _gpt_sizes(settings: TrainSettings) -> tuple[GPTSizes, Tokenizer | None]:
    """Return the numbers of a GPT, and its tokenizer."""
    tokenizer = _tokenizer(settings)
    vocabulary = settings.model.vocabulary
    if vocabulary is None:
        if tokenizer is None:
            fix = "set model.vocabulary, or name the tokenizer of the tokens in data.tokenizer"
            raise UsageError(
                "model.vocabulary is not set, and token files do not say how many tokens there are", fix=fix
            )
        vocabulary = tokenizer.vocabulary
    _check_vocabulary(vocabulary, tokenizer)
    names = {field.name for field in fields(GPTSizes)} - {"vocabulary", "sequence"}
    numbers = {name: getattr(settings.model, name) for name in names}
    return GPTSizes(vocabulary=vocabulary, sequence=settings.batch.sequence, **numbers), tokenizer


def _gpt(settings: TrainSettings) -> Built:
    sizes, tokenizer = _gpt_sizes(settings)
    with torch.device("meta"):
        model = GPT(sizes).to(DTYPES[settings.precision.weights])
    return Built(model, next_token_loss, tokenizer, takes=frozenset({"document_ids"}))


def _mlp(settings: TrainSettings) -> Built:
    sizes = settings.model
    with torch.device("meta"):
        model = mlp(sizes.num_layers, sizes.hidden, sizes.inputs, sizes.outputs)
    return Built(model.to(DTYPES[settings.precision.weights]), nn.functional.cross_entropy, inputs="input")


def _hf(settings: TrainSettings) -> Built:
    named = settings.data.tokenizer
    with concerning("data.tokenizer"):
        tokenizer = tokenizer_named(named) if named else None
    with concerning("model.path"):
        built = hf_model(
            settings.model.path,
            pretrained=settings.model.pretrained,
            sequence=settings.batch.sequence,
            packed=settings.lengths.how == "packed",
            dtype=DTYPES[settings.precision.weights],
            tokenizer=tokenizer,
        )
    if built.tokenizer is None and settings.data.kind != "tokens":
        built = replace(built, tokenizer=ByteTokenizer())
    config = built.model.config
    stands_in = built.tokenizer if isinstance(built.tokenizer, ByteTokenizer) and not named else None
    size = int(getattr(config, "vocab_size"))  # noqa: B009 - typed as a module
    if stands_in is not None and stands_in.vocabulary > size:
        raise ModelError(
            f"{settings.model.path} has no tokenizer, and the one of bytes has {stands_in.vocabulary} tokens, the model"
            f" {size}",
            expected="the tokenizer that the model was trained with",
            fix="copy its files into that folder, or name their folder in data.tokenizer",
        )
    _check_vocabulary(size, built.tokenizer)
    return built


def _by_function(settings: TrainSettings, device: str) -> Built:
    name = settings.model.function
    function = named_function(name, key="model.function")
    tokenizer = _tokenizer(settings) if settings.data.kind in ("text", "instructions") else None
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(settings.run.seed)
        offered = {"settings": settings, "tokenizer": tokenizer}
        with users_code(name):
            returned = call_with(function, offered, settings.model.arguments, key="model")
        built_model = built_by_user(returned, name=name)
    return built_model if built_model.tokenizer is not None else replace(built_model, tokenizer=tokenizer)


def _tokenizer(settings: TrainSettings) -> Tokenizer | None:
    if settings.data.tokenizer:
        with concerning("data.tokenizer"):
            return tokenizer_named(settings.data.tokenizer)
    return None if settings.data.kind == "tokens" else ByteTokenizer()


def _check_vocabulary(vocabulary: int, tokenizer: Tokenizer | None) -> None:
    if tokenizer is not None and tokenizer.vocabulary > vocabulary:
        raise ModelError(
            f"the tokenizer has {tokenizer.vocabulary} tokens, and the model {vocabulary}",
            expected="a model with at least as many",
            fix="raise model.vocabulary, or choose another tokenizer in data.tokenizer",
        )
