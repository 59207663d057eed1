"""Memory and values for the blocks of one rank, and for nothing else.

A model built under `torch.device("meta")` has shapes and no memory. What this rank holds is given memory, and values
from files of weights or from the modules' own initialisers. Everything else stays on the meta device: all ranks know
the whole model's names and shapes, so that all of them see the same error where files and model disagree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError, counted, nearest
from drumline.runtime.blocks.cut import Block
from drumline.runtime.weights.catalogue import Catalogue, Entry, with_memory
from drumline.runtime.weights.files import Stored, Weights
from drumline.runtime.weights.initialise import initialise
from drumline.runtime.weights.renames import Conversion, Sources, sources_of

# Older files hold what modules compute themselves today.
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
    """Give memory and values to what stands in `mine`, some of the model's `blocks`, which were cut from `root`.

    With weights, tensors that have values already are given those of the files.
    """
    tensors = (one for block in mine for one in (*block.module.parameters(), *block.module.buffers()))
    if weights is None and not any(one.is_meta for one in tensors):
        return
    catalogue = Catalogue(blocks, root)
    entries = catalogue.of(mine)
    empty = [entry for entry in entries if entry.tensor.is_meta]
    _refuse_hidden(catalogue, mine)
    loaded: list[Entry] = []
    sources = Sources()
    if weights is not None:
        sources = sources_of(weights.tensors, _names(catalogue), root)
        _check(catalogue, catalogue.of(blocks), sources, weights)
        loaded = [entry for entry in entries if _name_in(sources, entry) is not None]
    before = [(entry, entry.tensor) for entry in empty]
    try:
        for entry in empty:
            entry.put(with_memory(entry.tensor, device))
        fresh = [entry for entry in empty if entry not in set(loaded)]
        initialise(catalogue, fresh, seed=seed, device=device, parents=weights is None)
        with torch.no_grad():
            _load(loaded, sources)
    except BaseException:
        for entry, tensor in before:
            entry.put(tensor)  # nothing is left that looks as if it had values
        raise
    finally:
        _renew_flat_weights(mine)


def _names(catalogue: Catalogue) -> dict[str, Entry]:
    return {name: entry for entry in catalogue.entries if entry.saved for name in entry.names}


def _name_in(sources: Sources, entry: Entry) -> str | None:
    """Return the first of an entry's names that the files have."""
    return next((name for name in entry.names if name in sources), None) if entry.saved else None


def _check(catalogue: Catalogue, needed: Sequence[Entry], sources: Sources, weights: Weights) -> None:
    """Refuse files that lack a tensor, hold one too many, or one of another shape or kind."""
    missing = [entry for entry in needed if entry.saved and _name_in(sources, entry) is None]
    missing = [entry for entry in missing if not any(map(weights.leaves_fresh, entry.names))]
    unused = [one for one in sources.unused if not _is_expected(one.name, catalogue, weights)]
    if missing:
        name = missing[0].name
        raise ModelError(
            f"{weights.path} has no tensor for the {missing[0].kind} {name}{_more(missing)}",
            expected="all of the model's",
            fix=nearest(name, [one.name for one in unused])
            if unused
            else f"to initialise it: weights=dl.Weights(..., fresh=[{name!r}])",
        )
    if unused:
        name = unused[0].name
        raise ModelError(
            f"the model has no place for the tensor {unused[0]}{_more(unused)}",
            expected="the files of this very model",
            fix=f"to leave it out: weights=dl.Weights(..., ignore=[{name!r}])",
        )
    for entry in needed:
        found = _name_in(sources, entry)
        if found is not None and found in sources.plain:
            _check_fit(entry, sources.plain[found], tuple(sources.plain[found].shape), sources.plain[found].dtype)


def _is_expected(name: str, catalogue: Catalogue, weights: Weights) -> bool:
    """Whether a tensor that the model has no place for is harmless: ignored, or computed by the model itself."""
    patterns = getattr(catalogue.root, "_keys_to_ignore_on_load_unexpected", None) or ()
    return (
        weights.ignores(name)
        or _COMPUTED.search(name) is not None
        or any(re.search(pattern, name) for pattern in patterns)
        or any(name in entry.names for entry in catalogue.entries if not entry.saved)
    )


def _check_fit(entry: Entry, source: Stored | str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if shape != tuple(entry.tensor.shape):
        raise ModelError(
            f"the tensor {source} has the shape {shape}",
            expected=f"{tuple(entry.tensor.shape)}, as {entry.name} has it",
        )
    wanted = entry.tensor.dtype
    if dtype != wanted and not (dtype.is_floating_point and wanted.is_floating_point and min(dtype.itemsize, 2) == 2):
        raise ModelError(f"the tensor {source} is of {dtype}", expected=f"{wanted}, as {entry.name} is")


def _more(others: Sequence[object]) -> str:
    return f" and {counted(len(others) - 1, 'other')}" if len(others) > 1 else ""


def _load(entries: Iterable[Entry], sources: Sources) -> None:
    """Read every entry's value; what is converted together is converted once."""
    together: dict[int, tuple[Conversion, list[tuple[str, Entry]]]] = {}
    for entry in entries:
        name = _name_in(sources, entry)
        assert name is not None
        if name in sources.plain:
            sources.plain[name].into(entry.tensor.detach())
            _check_same(entry, sources)
        else:
            conversion = sources.converted[name]
            together.setdefault(id(conversion), (conversion, []))[1].append((name, entry))
    for conversion, places in together.values():
        made = conversion.make()
        for name, entry in places:
            _check_fit(entry, name, tuple(made[name].shape), made[name].dtype)
            entry.tensor.detach().copy_(made[name])


def _check_same(entry: Entry, sources: Sources) -> None:
    """Refuse files that give one tensor different values under its two names."""
    found = [sources.plain[name] for name in entry.names if name in sources.plain]
    for other in found[1:]:
        alike = (other.file, other.start, other.shape) == (found[0].file, found[0].start, found[0].shape)
        if not alike and not torch.equal(other.read().to(entry.tensor.device, entry.tensor.dtype), entry.tensor):
            raise ModelError(
                f"the model has one tensor for {found[0].name} and {other.name}, and {other.file} has two that differ",
                fix="build the model with weights that are not tied",
            )


def _refuse_hidden(catalogue: Catalogue, blocks: Sequence[Block]) -> None:
    """Refuse tensors on the meta device that are neither parameters nor buffers: nothing can give them a value."""
    for block in blocks:
        for module in block.module.modules():
            for name, one in vars(module).items():
                if isinstance(one, Tensor) and one.is_meta:
                    raise ModelError(
                        f"{catalogue.modules[module]}.{name} of {type(module).__name__} is on the meta device, and "
                        "neither a parameter nor a buffer",
                        fix="register it as a buffer, or make it on the host: device='cpu'",
                    )


def _renew_flat_weights(blocks: Sequence[Block]) -> None:
    """Let recurrent layers, which keep a list of their parameters, see the new ones."""
    for block in blocks:
        for module in block.module.modules():
            if isinstance(module, nn.RNNBase):
                module._init_flat_weights()
