"""A model that is ready to be cut, with what training needs to know about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drumline.model.weights.files import Weights


class Tokenizer(Protocol):
    """Turns text into token numbers and back."""

    vocabulary: int
    end: int  # the token between documents

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Adapter:
    """What checkpoints hold of a model that is frozen but for an adapter, in PEFT's own format.

    `names` are the names that PEFT gives to the adapter's tensors, by those that they have in the model. `config` is
    what adapter_config.json says.
    """

    names: Mapping[str, str]
    config: bytes


@dataclass(frozen=True, slots=True)
class Built:
    """A model, its loss and its tokenizer.

    `loss_fn(output, target)` is a mean over the targets that are not IGNORED; None if the model returns its own loss.
    `inputs` is the name of the argument that takes tokens or points. `takes` names further arguments that the model
    understands: "position_ids", "document_ids" (of packed rows, to keep attention inside each document),
    "attention_mask". `weights` is a folder or file for `Pipeline(weights=...)`, where the model is on the meta device
    and has its values there; None where its own initialisers give them. `adapter` says what is trained of a model that
    is frozen otherwise.
    """

    model: nn.Module
    loss_fn: Callable[[Any, Tensor], Tensor] | None
    tokenizer: Tokenizer | None = None
    inputs: str = "tokens"
    takes: frozenset[str] = frozenset()
    weights: str | Weights | None = None
    adapter: Adapter | None = None


IGNORED = -100  # a target that does not count
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # by the names in configs
