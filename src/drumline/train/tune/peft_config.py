"""From the settings of an adapter to PEFT's own configuration, and from a saved adapter's folder to the same."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from drumline.core.errors import DrumlineError, ModelError, NotInstalled, UsageError, installing, nearest
from drumline.model.quantised.hushed import hushed
from drumline.train.config.adapter_settings import METHODS, AdapterSettings

CONFIG = "adapter_config.json"
_CLASSES = {"lora": "LoraConfig", "ia3": "IA3Config", "loha": "LoHaConfig", "lokr": "LoKrConfig"}
_ALL = "all-linear"
_STARTS = (True, "gaussian")  # values of init_lora_weights that need neither the base nor data
OWN = {
    "r": "rank", "lora_alpha": "alpha", "alpha": "alpha", "lora_dropout": "dropout", "module_dropout": "dropout",
    "target_modules": "targets", "exclude_modules": "excluded", "modules_to_save": "modules_to_save", "bias": "bias",
    "use_rslora": "rslora", "use_dora": "dora",
}  # fmt: skip
_REGULAR = set("^$*+?()[]{}|\\")


def is_pattern(name: str) -> bool:
    """Whether a single target is a regular expression of whole names.

    >>> is_pattern("q_proj"), is_pattern(".*q_proj")
    (False, True)
    """
    return bool(_REGULAR & set(name))


def peft() -> Any:
    """Return PEFT; refuse without it, saying how to install it."""
    try:
        with hushed():
            import peft
    except ImportError:
        raise NotInstalled("an adapter needs PEFT", fix=installing("tune")) from None
    return peft


def peft_config(settings: AdapterSettings) -> Any:
    """Return PEFT's configuration of an adapter."""
    config = _saved(settings) if settings.start else _new_config(settings)
    if getattr(config, "trainable_token_indices", None):
        raise UsageError(
            "the adapter trains single tokens of an embedding (trainable_token_indices)",
            expected="an adapter whose layers start by themselves: these start from rows of the base",
            fix='train the embedding whole: adapter.modules_to_save = ["embed_tokens"]',
        )
    return config


def _new_config(settings: AdapterSettings) -> Any:
    if settings.method not in _CLASSES:
        expected = ", ".join(METHODS)
        raise UsageError(f"adapter.method is {settings.method!r:.60}", expected=expected)
    kind = getattr(peft(), _CLASSES[settings.method])
    arguments = {**_arguments(settings), **_further(settings, kind)}
    try:
        return kind(task_type="CAUSAL_LM", **arguments)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"adapter.settings: PEFT's {kind.__name__} refuses them: {(str(error).splitlines() or ['?'])[0][:200]}",
            expected="arguments that go together",
            fix="name layers in adapter.targets" if "layers_to_transform" in settings.settings else "",
        ) from None


def _arguments(settings: AdapterSettings) -> dict[str, Any]:
    """Return what our own settings say, as PEFT calls it."""
    arguments: dict[str, Any] = {"modules_to_save": list(settings.modules_to_save) or None}
    if settings.excluded:
        arguments["exclude_modules"] = list(settings.excluded)
    targets = list(settings.targets)
    if len(targets) == 1 and is_pattern(targets[0]):
        arguments["target_modules"] = targets[0]
    elif targets or settings.method != "ia3":
        arguments["target_modules"] = targets or _ALL
    if settings.method == "ia3":
        return arguments
    alpha = 2 * settings.rank if settings.alpha is None else settings.alpha
    if settings.method == "lora":
        kinds = {"bias": settings.bias, "use_rslora": settings.rslora, "use_dora": settings.dora}
        return {"r": settings.rank, "lora_alpha": alpha, "lora_dropout": settings.dropout, **kinds, **arguments}
    return {"r": settings.rank, "alpha": alpha, "module_dropout": settings.dropout, **arguments}


def _further(settings: AdapterSettings, kind: Any) -> dict[str, Any]:
    """Return the user's further arguments; refuse those that PEFT does not know, and those that have a key here."""
    known = inspect.signature(kind).parameters
    for name, value in settings.settings.items():
        if name in OWN and name in known:
            raise UsageError(f"adapter.settings has {name}", expected=f"adapter.{OWN[name]}, which says the same")
        if name not in known:
            raise UsageError(
                f"adapter.settings has {name[:60]!r}, which PEFT's {kind.__name__} does not take",
                fix=nearest(name[:60], [text for text in known if text not in OWN]),
            )
        if name == "init_lora_weights" and value not in _STARTS:
            raise UsageError(
                f"adapter.settings has init_lora_weights = {value!r:.40}",
                expected='true or "gaussian": others are made of the whole base, or change it',
            )
    return dict(settings.settings)


def _saved(settings: AdapterSettings) -> Any:
    """Return the configuration of an adapter that was saved, to be trained on."""
    folder, expected = Path(settings.start), f"a folder with {CONFIG} and adapter_model.safetensors"
    if not (folder / CONFIG).is_file():
        raise UsageError(f"adapter.start is {settings.start!r:.120}, which has no {CONFIG}", expected=expected)
    try:
        config = peft().PeftConfig.from_pretrained(str(folder))
    except DrumlineError:
        raise
    except (OSError, ValueError, TypeError, KeyError) as error:
        first = (str(error).splitlines() or ["?"])[0][:200]
        raise ModelError(f"adapter.start: {folder / CONFIG} cannot be read: {first}", expected=expected) from None
    kind = str(getattr(config.peft_type, "value", config.peft_type)).lower()
    if kind not in METHODS:
        raise UsageError(f"adapter.start is an adapter of {kind!r:.60}", expected=", ".join(METHODS))
    if settings.method and kind != settings.method:
        raise UsageError(
            f"adapter.method is {settings.method!r}, and {settings.start} holds an adapter of {kind}",
            fix="leave adapter.method out: the folder decides",
        )
    config.inference_mode = False
    return config
