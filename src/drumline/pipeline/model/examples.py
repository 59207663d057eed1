"""Examples for Hugging Face models of which nobody gave one: their own, and what their configuration asks for.

A model is followed on the first of them that its forward takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Example = dict[str, Any]


def guesses(model: nn.Module) -> Iterator[Example]:
    """Yield inputs that the model may take, the likeliest first; nothing for models that are not Hugging Face's."""
    config: Any = getattr(model, "config", None)
    known = getattr(model, "dummy_inputs", None)
    if not isinstance(known, Mapping) or config is None:
        return
    kind = getattr(model, "main_input_name", "input_ids")
    text = dict(known) if "input_ids" in known else {"input_ids": torch.tensor([[7, 6, 3, 1, 2], [1, 2, 3, 4, 5]])}
    is_decoder = getattr(config, "is_encoder_decoder", False)
    decoder: Example = {"decoder_input_ids": text["input_ids"][:2]} if is_decoder else {}
    if kind == "pixel_values":
        yield {"pixel_values": _pictures(config), **decoder}
    elif kind == "input_features":
        yield {"input_features": _spectrogram(config), **decoder}
        yield {"input_features": _spectrogram(config).transpose(1, 2).contiguous(), **decoder}
    elif kind == "input_values":
        bins = getattr(config, "num_mel_bins", None)
        shape = (2, 4000) if bins is None else (2, getattr(config, "max_length", 1024), bins)
        yield {"input_values": torch.zeros(shape), **decoder}
    else:
        yield dict(known)
        yield {"input_ids": text["input_ids"][:2], **decoder}
        if _size(config) is not None:
            yield {"input_ids": text["input_ids"][:2], "pixel_values": _pictures(config)}


def _size(config: Any) -> Any:
    seen = getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config
    return getattr(seen, "image_size", None)


def _pictures(config: Any) -> Tensor:
    size = _size(config) or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    seen = getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config
    return torch.zeros(2, getattr(seen, "num_channels", 3), height, width)


def _spectrogram(config: Any) -> Tensor:
    bins: int = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", None) or 80
    return torch.zeros(2, bins, 2 * getattr(config, "max_source_positions", 50))
