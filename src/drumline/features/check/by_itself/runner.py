"""Who runs the model by itself: this process, or all ranks together, each its own blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from drumline.channel.lines.slices import slice_of
from drumline.engine.ranks.crew import Crew
from drumline.engine.stages.engine import Engine
from drumline.engine.unsplit.plain import Plain
from drumline.features.check.by_itself.places import Home, Places
from drumline.features.check.by_itself.reference import Reference
from drumline.features.check.by_itself.remote_model import Relay
from drumline.features.check.by_itself.row import BlockRow
from drumline.model.weights.tied import Ties

Named = Mapping[str, nn.Parameter]


@dataclass(frozen=True, slots=True)
class Runner:
    """A model that runs by itself, and its parameters by name; `relay` if other ranks run some of its blocks.

    Of what several ranks hold, each sees its own uses alone of what is `in_parts`, and is `unsure` of which uses it
    sees of some.
    """

    model: Plain
    named: Named
    relay: Relay | None = None
    in_parts: frozenset[str] = frozenset()
    unsure: frozenset[str] = frozenset()


def together(
    reference: Reference, crew: Crew, engine: Engine, held_parameters: Named, places: Sequence[Places]
) -> Runner | None:
    """Have the model run by ranks that have only their own blocks of it; None if it was let go.

    `held_parameters` are the parameters of this process, and `places` the places of all ranks' blocks.
    """
    assembly, blocks = engine.assembly, engine.blocks()
    order = [
        (name, frozenset(at for at, here in enumerate(places) if name in here.blocks))
        for name in reference.places.blocks
    ]
    in_parts, unsure = _shared(assembly.ties, reference, order, places)
    placed = reference.places, Home.of(blocks), assembly.device, assembly.randomness
    if reference.is_chain:
        relay, here = Relay(crew, None, *placed), Places.of(blocks)
        row = BlockRow(relay, order, [block for block in blocks if block.name in here.blocks])
        return Runner(row, held_parameters, relay, in_parts, unsure)
    plain = reference.relayed()
    missing = any(crew.collect("check model", plain is None))
    if plain is None or missing:
        return None
    assert isinstance(plain.model, nn.Module)
    relay = Relay(crew, plain.model, *placed)
    # Of what lines have parts of, the model has the whole meanwhile.
    undivided = {name: param for name, param in held_parameters.items() if slice_of(param) is None}
    return Runner(plain, plain.named_parameters() | undivided, relay, in_parts, unsure)


def _shared(
    ties: Ties, reference: Reference, order: Sequence[tuple[str, frozenset[int]]], places: Sequence[Places]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return of what several ranks hold what each sees in parts, and what they are unsure of."""
    homes = Counter({name: len(ranks) for name, ranks in order})
    in_parts, unsure = set[str](), set[str]()
    for tensor in ties.tensors:
        used = {home for home in homes for name in tensor.names if name.startswith(f"{home}.")}
        is_between = any(name in reference.places.between for name in tensor.names)
        holders = [here.blocks for here in places if used & set(here.blocks)]
        if all(used <= set(holder) for holder in holders):
            continue  # who has it sees all of its uses
        if is_between or any(homes[name] > 1 for name in used):
            unsure.update(tensor.names)
        else:
            in_parts.update(tensor.names)
    return frozenset(in_parts), frozenset(unsure)
