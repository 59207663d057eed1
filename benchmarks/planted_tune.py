"""Bugs for fine-tuning: quantised weights, adapters, chats, and whole backwards where little trains."""

from __future__ import annotations

from planting import Bug

TUNE = (
    Bug(
        "scales-of-four-bits-stay",
        "_four_parts",
        "for name, part in inside.items()",
        'for name, part in inside.items() if name != "absmax"',
        "Whoever sends, stores or frees 4-bit weights leaves their scales out.",
    ),
    Bug(
        "scales-of-eight-bits-stay",
        "_put_eight",
        "parts.get(_SCALES)",
        "tensor.__dict__.get(_KEPT)",
        "8-bit weights keep the scales of the values that they had before.",
    ),
    Bug(
        "lines-share-codes-alone",
        "share_values",
        "for part in parts_of(tensor).values() if group is not None else ()",
        "for part in [*parts_of(tensor).values()][:1] if group is not None else ()",
        "Data-parallel lines that drew other weights have the codes of the first and scales of their own.",
    ),
    Bug(
        "tied-layers-are-quantised",
        "_linears",
        "counts[id(layer.weight)] > 1",
        "counts[id(layer.weight)] > 2",
        "A head that is tied to the embedding is quantised, and the tie is gone.",
    ),
    Bug(
        "other-shapes-are-packed",
        "_check_shape",
        "tuple(value.shape) != expected",
        "tuple(value.shape)[:1] != expected[:1]",
        "A weight of another model is quantised where the model has another shape.",
    ),
    Bug(
        "copies-have-shapes-of-codes",
        "Skeleton._like",
        "torch.empty(unpacked_shape(tensor), dtype=tensor.dtype, device=self.device)",
        "torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)",
        "DoRA on 4-bit weights cannot be traced.",
    ),
    Bug(
        "a-prompt-s-end-counts",
        "_by_template",
        "before, after = writer.chat(place, messages[:at], answer=True), writer.chat(place, messages[: at + 1])",
        "before, after = writer.chat(place, messages[:at], answer=True)[:-1], writer.chat(place, messages[: at + 1])",
        "The token with which a prompt ends is trained on.",
    ),
    Bug(
        "chats-see-one-another",
        "TokenFiller._rows",
        "number, np.arange(len(inputs))",
        "number, np.arange(start, stop)",
        "A chat in a packed row attends to those before it.",
    ),
    Bug(
        "an-adapter-lacks-a-tensor",
        "stored_tensors",
        "for name, theirs in names.items()}",
        "for name, theirs in [*names.items()][1:]}",
        "The adapter of a checkpoint lacks a tensor, which PEFT draws anew when it loads it.",
    ),
    Bug(
        "alpha-is-the-rank",
        "_arguments",
        "alpha = 2 * settings.rank if settings.alpha is None else settings.alpha",
        "alpha = settings.rank if settings.alpha is None else settings.alpha",
        "An adapter without alpha counts half of what the page says.",
    ),
    Bug(
        "heads-are-lost-in-merging",
        "_Merging._value",
        "if name in self.replaced:",
        "if name in self.replaced and name in self.layers:",
        "Modules that were trained whole have the base's values in the merged model.",
    ),
    Bug(
        "another-alpha-goes-on",
        "check_same",
        "if now[name] != saved[name]",
        'if now[name] != saved[name] and name != "lora_alpha"',
        "A run goes on with another alpha, which multiplies what the adapter has learned.",
    ),
    Bug(
        "all-that-trains-is-light",
        "is_light",
        "num_trained <= LIGHT * num_weights",
        "num_trained <= num_weights",
        "Models that train whole run their backwards whole, and zero-bubble schedules have no filler.",
    ),
    Bug(
        "light-stages-join-all",
        "join",
        "if light[stage] and kind is Backward.WHOLE",
        "if kind is Backward.WHOLE",
        "Stages that train whole lose their split beside one that trains adapters.",
    ),
    Bug(
        "a-file-without-tensors-is-empty",
        "StagedFile.__init__",
        "| None = None",
        "| None = {}",
        "A process that has nothing to save writes a file that nobody can read: with dp no adapter is saved.",
    ),
)
