"""From the names in files to the names in the model.

Usually they are the same. A file may hold a model inside of another (`layers.0` for `model.layers.0`) or the other way
round: one prefix may be put on or taken off. Hugging Face models come with rules of their own, for files older than
the model's code: other names, or several tensors that are made into one, as a layer's experts are.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.runtime.weights.files import Stored


@dataclass(frozen=True, slots=True)
class Conversion:
    """Several tensors of files that are made into one or more of the model's, all at once."""

    names: tuple[str, ...]
    make: Callable[[], Mapping[str, Tensor]]


@dataclass(slots=True)
class Sources:
    """Where each tensor of the model comes from; `unused` are those of the files that it has no place for."""

    plain: dict[str, Stored] = field(default_factory=dict)
    converted: dict[str, Conversion] = field(default_factory=dict)
    unused: list[Stored] = field(default_factory=list)

    def __contains__(self, name: str) -> bool:
        return name in self.plain or name in self.converted


def sources_of(stored: Mapping[str, Stored], names: Collection[str], root: nn.Module | None) -> Sources:
    """Return where the model's tensors of these names come from."""
    sources = Sources()
    rules = _rules(root)
    if rules is not None:
        left = rules.sort(stored, names, sources)
    else:
        prefix = getattr(root, "base_model_prefix", "")
        left = _prefixed(stored, names, sources, [prefix] if isinstance(prefix, str) and prefix else None)
    sources.unused = [stored[name] for name in left]
    return sources


def _prefixed(
    stored: Mapping[str, Stored], names: Collection[str], sources: Sources, prefixes: Sequence[str] | None
) -> list[str]:
    """Match names as they are, then those left over with one prefix put on or taken off; returns what is left."""
    sources.plain.update({name: one for name, one in stored.items() if name in names})
    left = [name for name in stored if name not in names]
    known = set(names) - set(sources.plain)
    if not left or not known:
        return left
    on = prefixes or [name.split(".")[0] for name in known]
    off = prefixes or [name.split(".")[0] for name in left]
    changes = [*((f"{one}.", "") for one in dict.fromkeys(on)), *(("", f"{one}.") for one in dict.fromkeys(off))]

    def changed(put_on: str, taken_off: str) -> dict[str, str]:
        renamed = {put_on + name.removeprefix(taken_off): name for name in left if name.startswith(taken_off)}
        return {name: old for name, old in renamed.items() if name in known}

    best = max((changed(*change) for change in changes), key=len, default={})
    sources.plain.update({name: stored[old] for name, old in best.items()})
    return [name for name in left if name not in set(best.values())]


@dataclass(frozen=True, slots=True)
class _Rules:
    """What transformers says about a model's files; its own functions rename and convert."""

    model: Any
    library: Any
    renamings: list[Any]
    converters: list[Any]

    def sort(self, stored: Mapping[str, Stored], names: Collection[str], sources: Sources) -> list[str]:
        """Find each tensor's place in the model, as transformers does; returns the names without one."""
        places = dict.fromkeys(names, True)
        left: list[str] = []
        groups: dict[str, tuple[Any, list[tuple[str, Stored]]]] = {}
        for name in sorted(stored, key=self.library.dot_natural_key):
            target, pattern = self._target(name, places)
            if target not in places:
                left.append(name)
            elif pattern is None:
                sources.plain.setdefault(target, stored[name])
            else:
                converter = next(one for one in self.converters if pattern in one.source_patterns)
                groups.setdefault(target, (converter, []))[1].append((pattern, stored[name]))
        for target, (converter, parts) in groups.items():
            conversion = self._conversion(target, converter, parts)
            sources.converted.update(dict.fromkeys(conversion.names, conversion))
        return left

    def _target(self, name: str, places: Mapping[str, bool]) -> tuple[str, str | None]:
        prefix = self.model.base_model_prefix
        rename = self.library.rename_source_key
        target, pattern = rename(name, self.renamings, self.converters, prefix, places)
        if target not in places and name in places:  # one that a rule would have changed by mistake
            target, pattern = rename(name, [], [], prefix, places)
        return target, pattern

    def _conversion(self, target: str, converter: Any, sources: Sequence[tuple[str, Stored]]) -> Conversion:
        first, *others = converter.target_patterns
        names = (target, *(target.replace(first, one) for one in others))

        def make() -> Mapping[str, Tensor]:
            one = copy.deepcopy(converter)
            for pattern, stored in sources:
                one.add_tensor(target, stored.name, pattern, stored.read)
            try:
                made = one.convert(target, model=self.model, config=self.model.config)
            except Exception as error:
                listed = ", ".join(str(stored) for _, stored in sources[:3])
                raise ModelError(f"{target!r} cannot be made from {listed}, ...: {error}") from error
            return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}

        return Conversion(names, make)


def _rules(root: nn.Module | None) -> _Rules | None:
    """Return the rules of a Hugging Face model, if the library has any; a model of it has imported it already."""
    library: Any = sys.modules.get("transformers")
    if library is None or not isinstance(root, library.PreTrainedModel):
        return None
    try:
        from transformers import core_model_loading
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before its fifth version
        return None
    mapping = get_model_conversion_mapping(root)
    return _Rules(
        root,
        core_model_loading,
        [one for one in mapping if isinstance(one, core_model_loading.WeightRenaming)],
        [one for one in mapping if isinstance(one, core_model_loading.WeightConverter)],
    )
