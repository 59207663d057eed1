"""What must be there for an adapter: a method, a model to put it into, packages, and keys that the method has."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import fields

from drumline.core.errors import DrumlineError, installing
from drumline.train.config.adapter_settings import METHODS, AdapterSettings
from drumline.train.config.files.cards import card_named
from drumline.train.config.problems import Problem
from drumline.train.config.relations import PlacedSettings, relation

_PACKAGES = {"int8": "torchao", "float8": "torchao", "nf4": "bitsandbytes", "llm-int8": "bitsandbytes"}
# Which keys only some methods have.
_BELONG = {
    "rank": ("lora", "loha", "lokr"), "alpha": ("lora", "loha", "lokr"), "dropout": ("lora", "loha", "lokr"),
    "bias": ("lora",), "rslora": ("lora",), "dora": ("lora",),
}  # fmt: skip
_KEYS = tuple(f"adapter.{field.name}" for field in fields(AdapterSettings))


@relation(*_KEYS)
def _an_adapter_has_a_method(judged: PlacedSettings) -> Iterator[Problem]:
    adapter = judged.settings.adapter
    names = [field.name for field in fields(AdapterSettings) if not judged.is_default(f"adapter.{field.name}")]
    if names and not adapter.is_on:
        yield judged.problem(
            f"adapter.{names[0]}", "is given, but no adapter", f"adapter.method: {', '.join(METHODS)}",
            "add --adapter lora",
        )  # fmt: skip
        return
    for name in names:
        methods = _BELONG.get(name, METHODS)
        if adapter.method and adapter.method not in methods:
            yield judged.problem(
                f"adapter.{name}", f"is given, and an adapter of {adapter.method} has none", f"{' or '.join(methods)}",
                "leave it out",
            )  # fmt: skip
        elif adapter.start and name in (*_BELONG, "targets", "excluded", "modules_to_save", "settings"):
            yield judged.problem(
                f"adapter.{name}", "stands beside adapter.start", "what the adapter in that folder has", "leave it out"
            )


@relation("adapter.method", "adapter.start", "adapter.base", "model.kind")
def _an_adapter_fits_the_model(judged: PlacedSettings) -> Iterator[Problem]:
    adapter, kind = judged.settings.adapter, judged.settings.model.kind
    if not adapter.is_on:
        return
    key = "adapter.method" if adapter.method else "adapter.start"
    if kind != "hf":
        yield judged.problem(
            key, f'is given, and model.kind is "{kind}"', "a Hugging Face model, which has something to start from",
            "pass --model with the model's folder; a function may return a model with its own adapters",
        )  # fmt: skip
    for package, what in (("peft", key), (_PACKAGES.get(adapter.base, ""), "adapter.base")):
        if package and importlib.util.find_spec(package) is None:
            yield judged.problem(what, f"needs {package}, which is not installed", fix=installing("tune"))
    if adapter.start and not os.path.isfile(os.path.join(adapter.start, "adapter_config.json")):
        expected = "a folder with adapter_config.json and adapter_model.safetensors"
        yield judged.problem("adapter.start", f"{adapter.start[:120]}: there is no adapter_config.json", expected)


@relation("memory.card")
def _a_card_is_known(judged: PlacedSettings) -> Iterator[Problem]:
    if name := judged.settings.memory.card:
        try:
            card_named(name)
        except DrumlineError as error:
            yield judged.problem("memory.card", error.error.removeprefix("memory.card "), error.expected, error.fix)


@relation("adapter.merge", "checkpoint.at_end", "model.pretrained")
def _merging_needs_both(judged: PlacedSettings) -> Iterator[Problem]:
    settings = judged.settings
    if not settings.adapter.merge:
        return
    if not settings.checkpoint.at_end:
        yield judged.problem(
            "adapter.merge", "is true, and checkpoint.at_end is false", "a checkpoint of the adapter to merge",
            "leave checkpoint.at_end out",
        )  # fmt: skip
    if not settings.model.pretrained:
        yield judged.problem(
            "adapter.merge", "is true, and model.pretrained is false", "weights that the adapter is merged into",
            "leave model.pretrained out",
        )  # fmt: skip
