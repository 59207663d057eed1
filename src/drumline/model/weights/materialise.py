"""Give memory and values to the blocks of one rank, and to nothing else.

A model built under `torch.device("meta")` has shapes and no memory. What this rank holds gets memory, and values from
weights files or from the modules' own initialisers. Everything else stays on the meta device: all ranks know the whole
model's names and shapes, so all of them raise the same error if files and model disagree.

The names in files are usually those in the model. A file may contain a model inside another (`layers.0` for
`model.layers.0`) or the other way round, so one prefix may be added or removed. Hugging Face models bring their own
rules for files older than the model's code: other names, or several tensors that are merged into one, such as a layer's
experts.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError, counted, nearest
from drumline.model.block import Block
from drumline.model.catalogue import Catalogue, Entry, with_memory
from drumline.model.quantised.loading import packed_value, stored_names
from drumline.model.quantised.packed import is_packed, settle
from drumline.model.weights.adapters import adapter_entries, base_model, base_names, draw_adapters, has_adapters
from drumline.model.weights.files import StoredTensor, Weights
from drumline.model.weights.initialise import initialise


@dataclass(frozen=True, slots=True, eq=False)
class Conversion:
    """Several tensors of files that are converted to one or more of the model's, all at once."""

    names: tuple[str, ...]
    make: Callable[[], Mapping[str, Tensor]]

    def renamed(self, places: Mapping[str, Sequence[str]]) -> Conversion:
        """Return the conversion to tensors that have other names in the model."""

        def make() -> Mapping[str, Tensor]:
            return {place: tensor for name, tensor in self.make().items() for place in places[name]}

        return Conversion(tuple(place for name in self.names for place in places[name]), make)


# The source of each tensor of the model, by its name in the model.
Sources = dict[str, StoredTensor | Conversion]


def sources_of(
    stored: Mapping[str, StoredTensor], names: Collection[str], root: nn.Module | None
) -> tuple[Sources, list[StoredTensor]]:
    """Return the sources of the model's tensors with these names, and file tensors without a place in the model."""
    if root is not None and has_adapters(root):
        places = base_names(root, names)
        direct = {name: tensor for name, tensor in stored.items() if name in names and name not in places}
        others = {name: tensor for name, tensor in stored.items() if name not in direct}
        sources, left = _of_base(others, places, base_model(root))
        return {**sources, **direct}, left
    return _of_plain(stored, names, root)


def _of_base(
    stored: Mapping[str, StoredTensor], places: Mapping[str, Sequence[str]], base: nn.Module
) -> tuple[Sources, list[StoredTensor]]:
    """Return the sources of an adapted model by its own names; files have the names of its base."""
    copies, left = _of_plain(stored, places, base)
    renamed = {source: source.renamed(places) for source in copies.values() if isinstance(source, Conversion)}
    sources: Sources = {}
    for name, source in copies.items():
        sources.update(dict.fromkeys(places[name], renamed[source] if isinstance(source, Conversion) else source))
    return sources, left


def _of_plain(
    stored: Mapping[str, StoredTensor], names: Collection[str], root: nn.Module | None
) -> tuple[Sources, list[StoredTensor]]:
    """Return the same of a model without adapters."""
    rules = _rules(root)
    if rules is not None:
        sources, left = rules.sort(stored, names)
    else:
        prefix = getattr(root, "base_model_prefix", "")
        sources, left = _prefixed(stored, names, [prefix] if isinstance(prefix, str) and prefix else None)
    return sources, [stored[name] for name in left]


def _prefixed(
    stored: Mapping[str, StoredTensor], names: Collection[str], prefixes: Sequence[str] | None
) -> tuple[Sources, list[str]]:
    """Match names directly, then the remaining ones with one prefix added or removed; also return those left over."""
    sources: Sources = {name: tensor for name, tensor in stored.items() if name in names}
    left = [name for name in stored if name not in names]
    known = set(names) - set(sources)
    if not left or not known:
        return sources, left
    on = prefixes or [name.split(".")[0] for name in known]
    off = prefixes or [name.split(".")[0] for name in left]
    changes = [*((f"{name}.", "") for name in dict.fromkeys(on)), *(("", f"{name}.") for name in dict.fromkeys(off))]

    def changed(put_on: str, taken_off: str) -> dict[str, str]:
        renamed = {put_on + name.removeprefix(taken_off): name for name in left if name.startswith(taken_off)}
        return {name: old for name, old in renamed.items() if name in known}

    best = max((changed(*change) for change in changes), key=len, default={})
    sources.update({name: stored[old] for name, old in best.items()})
    return sources, [name for name in left if name not in set(best.values())]


@dataclass(frozen=True, slots=True)
class _Rules:
    """What transformers says about a model's files; its own functions rename and convert."""

    model: Any
    library: Any
    renamings: list[Any]
    converters: list[Any]

    def sort(self, stored: Mapping[str, StoredTensor], names: Collection[str]) -> tuple[Sources, list[str]]:
        """Find each tensor's place in the model, as transformers does; also return the names without one."""
        places = dict.fromkeys(names, True)
        plain: Sources = {}
        converted: Sources = {}
        left: list[str] = []
        groups: dict[str, tuple[Any, list[tuple[str, StoredTensor]]]] = {}
        for name in sorted(stored, key=self.library.dot_natural_key):
            target, pattern = self._target(name, places)
            if target not in places:
                left.append(name)
            elif pattern is None:
                plain.setdefault(target, stored[name])
            else:
                converter = next(rule for rule in self.converters if pattern in rule.source_patterns)
                groups.setdefault(target, (converter, []))[1].append((pattern, stored[name]))
        for target, (converter, parts) in groups.items():
            conversion = self._conversion(target, converter, parts)
            converted.update(dict.fromkeys(conversion.names, conversion))
        return converted | plain, left

    def _target(self, name: str, places: Mapping[str, bool]) -> tuple[str, str | None]:
        prefix = self.model.base_model_prefix
        rename = self.library.rename_source_key
        target, pattern = rename(name, self.renamings, self.converters, prefix, places)
        if target not in places and name in places:  # a rule would have changed it by mistake
            target, pattern = rename(name, [], [], prefix, places)
        return target, pattern

    def _conversion(self, target: str, converter: Any, sources: Sequence[tuple[str, StoredTensor]]) -> Conversion:
        first, *others = converter.target_patterns
        names = (target, *(target.replace(first, copied) for copied in others))

        def make() -> Mapping[str, Tensor]:
            copied = copy.deepcopy(converter)
            for pattern, stored in sources:
                copied.add_tensor(target, stored.name, pattern, stored.read)
            try:
                converted = copied.convert(target, model=self.model, config=self.model.config)
            except Exception as error:
                listed = ", ".join(str(stored) for _, stored in sources[:3])
                raise ModelError(f"cannot build {target!r} from {listed}, ...: {error}") from error
            return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in converted.items()}

        return Conversion(names, make)


def _rules(root: nn.Module | None) -> _Rules | None:
    """Return the rules of a Hugging Face model, if the library has any; such a model has already imported it."""
    library: Any = sys.modules.get("transformers")
    if library is None or not isinstance(root, library.PreTrainedModel):
        return None
    try:
        from transformers import core_model_loading
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before version 5
        return None
    mapping = get_model_conversion_mapping(root)
    return _Rules(
        root,
        core_model_loading,
        [renaming for renaming in mapping if isinstance(renaming, core_model_loading.WeightRenaming)],
        [transform for transform in mapping if isinstance(transform, core_model_loading.WeightConverter)],
    )


# Older files contain tensors that modules now compute themselves.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")


def materialise(
    blocks: Sequence[Block],
    mine: Sequence[Block],
    *,
    root: nn.Module | None,
    weights: Weights | None,
    device: torch.device,
    seed: int,
) -> None:
    """Give memory and values to the blocks in `mine`, some of the model's `blocks`, which were cut from `root`.

    With weights, tensors that already have values get those of the files.
    """
    tensors = (param for block in mine for param in (*block.module.parameters(), *block.module.buffers()))
    if weights is None and not any(value.is_meta for value in tensors):
        return
    settle(module for block in blocks for module in block.module.modules())
    catalogue = Catalogue(blocks, root)
    entries = catalogue.of(mine)
    empty = [entry for entry in entries if entry.tensor.is_meta]
    _refuse_hidden(catalogue, mine)
    sources: Sources = {}
    if weights is not None:
        names = {text for entry in catalogue.entries if entry.saved for text in _texts(entry)}
        sources, unused = sources_of(weights.tensors, names, root)
        _check(catalogue, catalogue.of(blocks), sources, unused, weights)
    loaded = [entry for entry in entries if _name_in(sources, entry) is not None]
    before = [(entry, entry.tensor) for entry in empty]
    try:
        for entry in (entry for entry in empty if not is_packed(entry.tensor)):
            entry.put(with_memory(entry.tensor, device))
        fresh = [entry for entry in empty if entry not in set(loaded)]
        drawn = adapter_entries(catalogue, fresh)
        others = [entry for entry in fresh if entry not in set(drawn)]
        initialise(catalogue, others, seed=seed, device=device, parents=weights is None, later=loaded)
        with torch.no_grad():
            _load(loaded, sources, device)
        draw_adapters(catalogue, drawn, seed=seed, device=device)
    except BaseException:
        for entry, tensor in before:
            entry.put(tensor)  # leave nothing that looks as if it had values
        raise
    finally:
        settle(module for block in mine for module in block.module.modules())
        _renew_flat_weights(mine)


def _name_in(sources: Sources, entry: Entry) -> str | None:
    """Return the first of an entry's names that the files have."""
    if not entry.saved:
        return None
    named = (name for name in entry.names for text in (name, *stored_names(entry.tensor, name)) if text in sources)
    return next(named, None)


def _texts(entry: Entry) -> list[str]:
    """Return all names that files may have for an entry, and for the parts of a packed one."""
    return [*entry.names, *(text for name in entry.names for text in stored_names(entry.tensor, name))]


def _check(
    catalogue: Catalogue, needed: Sequence[Entry], sources: Sources, unused: Sequence[StoredTensor], weights: Weights
) -> None:
    """Refuse files that lack a tensor, contain an extra one, or have another shape or dtype."""
    missing = [entry for entry in needed if entry.saved and _name_in(sources, entry) is None]
    drawn = set(adapter_entries(catalogue, missing))
    missing = [entry for entry in missing if entry not in drawn and not any(map(weights.leaves_fresh, entry.names))]
    unused = [tensor for tensor in unused if not _is_expected(tensor.name, catalogue, weights)]
    if missing:
        name = missing[0].name
        raise ModelError(
            f"{weights.path} has no tensor for the {missing[0].kind} {name}{_more(missing)}",
            expected="a tensor for every parameter and persistent buffer of the model",
            fix=nearest(name, [tensor.name for tensor in unused])
            if unused
            else f"to initialise it: weights=dl.Weights(..., fresh=[{name!r}])",
        )
    if unused:
        name = unused[0].name
        raise ModelError(
            f"the model has no place for the tensor {unused[0]}{_more(unused)}",
            expected="the weights files of this model",
            fix=f"to ignore it: weights=dl.Weights(..., ignore=[{name!r}])",
        )
    for entry in needed:
        source = sources.get(_name_in(sources, entry) or "")
        if isinstance(source, StoredTensor) and not is_packed(entry.tensor):
            _check_fit(entry, source, source.shape, source.dtype)


def _is_expected(name: str, catalogue: Catalogue, weights: Weights) -> bool:
    """Whether a tensor without a place in the model is harmless: ignored, or computed by the model itself."""
    base = None if catalogue.root is None else base_model(catalogue.root)
    patterns = getattr(base, "_keys_to_ignore_on_load_unexpected", None) or ()
    return (
        weights.ignores(name)
        or _COMPUTED.search(name) is not None
        or any(re.search(pattern, name) for pattern in patterns)
        or any(name in entry.names for entry in catalogue.entries if not entry.saved)
    )


def _check_fit(entry: Entry, source: StoredTensor | str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if shape != tuple(entry.tensor.shape):
        raise ModelError(
            f"the tensor {source} has shape {shape}",
            expected=f"{tuple(entry.tensor.shape)}, the shape of {entry.name}",
        )
    wanted = entry.tensor.dtype
    if dtype != wanted and not (dtype.is_floating_point and wanted.is_floating_point and min(dtype.itemsize, 2) == 2):
        raise ModelError(f"the tensor {source} has dtype {dtype}", expected=f"{wanted}, the dtype of {entry.name}")


def _more(others: Sequence[object]) -> str:
    return f" and {counted(len(others) - 1, 'other')}" if len(others) > 1 else ""


def _load(entries: Iterable[Entry], sources: Sources, device: torch.device) -> None:
    """Read every entry's value; tensors that are converted together are converted once."""
    together: dict[Conversion, list[tuple[str, Entry]]] = {}
    for entry in entries:
        name = _name_in(sources, entry)
        assert name is not None
        if is_packed(entry.tensor):
            entry.put(packed_value(entry.tensor, name, sources, partial(_read, sources), device))
            continue
        source = sources[name]
        if isinstance(source, StoredTensor):
            source.into(entry.tensor.detach())
            _check_same(entry, sources)
        else:
            together.setdefault(source, []).append((name, entry))
    for conversion, places in together.items():
        converted = conversion.make()
        for name, entry in places:
            _check_fit(entry, name, tuple(converted[name].shape), converted[name].dtype)
            entry.tensor.detach().copy_(converted[name])


def _read(sources: Sources, name: str) -> Tensor:
    """Read one tensor, or convert those that it is made of."""
    source = sources[name]
    return source.read() if isinstance(source, StoredTensor) else source.make()[name]


def _check_same(entry: Entry, sources: Sources) -> None:
    """Refuse files that give one tensor different values under its two names."""
    copies = [source for name in entry.names if isinstance(source := sources.get(name), StoredTensor)]
    for other in copies[1:]:
        alike = (other.file, other.start, other.shape) == (copies[0].file, copies[0].start, copies[0].shape)
        if not alike and not torch.equal(other.read().to(entry.tensor.device, entry.tensor.dtype), entry.tensor):
            raise ModelError(
                f"the model has one tensor for {copies[0].name} and {other.name}, but {other.file} has two that differ",
                fix="build the model with untied weights",
            )


def _refuse_hidden(catalogue: Catalogue, blocks: Sequence[Block]) -> None:
    """Refuse tensors on the meta device that are neither parameters nor buffers: nothing can give them a value."""
    for block in blocks:
        for module in block.module.modules():
            for name, tensor in vars(module).items():
                if isinstance(tensor, Tensor) and tensor.is_meta:
                    raise ModelError(
                        f"{catalogue.modules[module]}.{name} of {type(module).__name__} is on the meta device, but is "
                        "neither a parameter nor a buffer",
                        fix="register it as a buffer, or create it on the host: device='cpu'",
                    )


def _renew_flat_weights(blocks: Sequence[Block]) -> None:
    """Let recurrent layers, which keep a list of their parameters, see the new ones."""
    for block in blocks:
        for module in block.module.modules():
            if isinstance(module, nn.RNNBase):
                module._init_flat_weights()
