"""Turn a user's model into the chain of blocks from which stages are cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import BatchError, ModelError
from drumline.engine.model.splits import found_split
from drumline.model.block import Block, Model, blocks_of
from drumline.model.blocks.pieces import pieces_of
from drumline.model.follow.inputs import Inputs
from drumline.model.patches import put_in
from drumline.model.values import moved
from drumline.model.watch.watch import has_hooks, refuse_hooks
from drumline.runtime.batch import Split
from drumline.runtime.batch import cut as cut_batch


def is_chain(model: Model) -> bool:
    """Whether the model is a list of blocks that each take the output of the previous one.

    >>> is_chain(nn.Sequential(nn.ReLU())), is_chain(nn.Linear(2, 2))
    (True, False)
    """
    if isinstance(model, nn.Sequential):
        # Hooks on the whole model run when it is called, so such a model is traced like any other.
        return type(model).forward is nn.Sequential.forward and not has_hooks(model)
    return isinstance(model, nn.ModuleList) or not isinstance(model, nn.Module)


def evaluating(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Put all parts of some modules into eval mode for a while."""
    parts = (part for module in modules for part in module.modules())
    return put_in((vars(part), "training", False) for part in parts if part.training)


def inputs_for(args: tuple[Any, ...], kwargs: dict[str, Any], *, is_chain: bool) -> Any:
    """Return the arguments of a step as the value that the first block takes.

    >>> inputs_for((1,), {"mask": None}, is_chain=False)
    Inputs(args=(1,), kwargs={'mask': None})
    """
    if not kwargs and (not args or (len(args) == 1 and args[0] is None)):
        return None
    if not is_chain:
        return Inputs(args, kwargs)
    if kwargs or len(args) > 1:
        argument_names = [*(f"argument {number}" for number in range(2, len(args) + 1)), *kwargs]
        raise BatchError(
            f"step got {', '.join(argument_names)}",
            expected="one batch, which the first block takes as its only argument, and target=",
            fix="combine several inputs into a tuple or a dict",
        )
    return args[0]


def example_inputs(model: Model, example: Any) -> Any:
    """Return an example in the form that `step` gets: a dict by name, a tuple in order."""
    if example is None or is_chain(model):
        return example
    if isinstance(example, Mapping):
        return Inputs((), dict(example))
    return Inputs(example if type(example) is tuple else (example,), {})


def blocks_for(
    model: Model,
    example: Any,
    device: torch.device,
    *,
    num_microbatches: int,
    cuts: Sequence[str] | None = None,
    split: Split | None = None,
) -> list[Block]:
    """Return the model's blocks; a model that is not a chain is traced on the first microbatch of the example.

    >>> [block.name for block in blocks_for(nn.Linear(2, 2), torch.ones(4, 2), torch.device("cpu"), num_microbatches=2)]
    Traceback (most recent call last):
    drumline.core.errors.ModelError: the model calls none of its modules; expected a model built from modules
    """
    if is_chain(model):
        return blocks_of(model)
    assert isinstance(model, nn.Module)
    named = [cuts] if isinstance(cuts, str) else list(cuts or ())
    inputs = example_inputs(model, example)
    if inputs is None:
        return _guessed(model, device, named)
    how = found_split(model, split)(inputs)
    microbatch = cut_batch(inputs, num_microbatches, what="the example", split=how)[0]
    return pieces_of(model, moved(microbatch, device), device=device, cuts=named)


def _guessed(model: nn.Module, device: torch.device, cuts: Sequence[str]) -> list[Block]:
    """Trace a model without an example, on the first guess that its forward accepts."""
    fix = "pass example=, a batch like those you pass to step: a dict by name, a tuple in order, or one tensor"
    first: ModelError | None = None
    for guess in guesses(model):
        try:
            return pieces_of(model, moved(Inputs((), guess), device), device=device, cuts=cuts)
        except ModelError as error:
            first = first or error
    kind = type(model).__name__
    if first is None:
        if isinstance(model, nn.Sequential):
            refuse_hooks(model)
        raise ModelError(
            f"the model is a {kind}, and Drumline has no example of its inputs",
            expected="an nn.Sequential, a list of blocks, or an example with which to trace the model's forward",
            fix=fix,
        )
    raise ModelError(
        f"there is no example of the inputs of {kind}, and its forward fails on those Drumline guesses: {first.error}",
        expected=first.expected,
        fix=fix,
    ) from first


Example = dict[str, Any]


def guesses(model: nn.Module) -> Iterator[Example]:
    """Yield inputs that the model may take, the most likely first; nothing unless it is a Hugging Face model."""
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
    vision = getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config
    return getattr(vision, "image_size", None)


def _pictures(config: Any) -> Tensor:
    size = _size(config) or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    vision = getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config
    return torch.zeros(2, getattr(vision, "num_channels", 3), height, width)


def _spectrogram(config: Any) -> Tensor:
    bins: int = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", None) or 80
    return torch.zeros(2, bins, 2 * getattr(config, "max_source_positions", 50))
