"""Which layers of a model are divided over tp, and how: a plan applied to its modules, or refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from drumline.channel.lines.slices import Slice
from drumline.core.errors import ModelError
from drumline.features.mesh.passing import AXIS
from drumline.model.block import Block
from drumline.model.blocks.pieces import Piece
from drumline.model.layers.styles import (
    Colwise,
    PlainStyle,
    Rowwise,
    Style,
    StylePlan,
)

# Attributes by which modules know how many heads they have; each line has some of them.
_COUNTS = (
    "num_heads", "n_head", "n_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_kv_head",
    "n_kv_heads", "n_local_heads", "n_local_kv_heads",
)  # fmt: skip
_ALIGNED = 16  # bytes
_WIDTHS = ("head_dim", "head_size", "head_width", "attention_head_size")


@dataclass(frozen=True, slots=True, eq=False)
class DividedModule:
    """A module that a plan names: its names, its style, the module around it, and styles of its own parameters."""

    name: str
    module: nn.Module
    style: Style
    parent: nn.Module
    own_styles: tuple[tuple[str, Colwise | Rowwise], ...] = ()

    @property
    def makes_part(self) -> bool:
        """Whether a layer leaves each line a part of its outputs."""
        return isinstance(self.style, Colwise) and not self.style.gather

    @property
    def takes_part(self) -> bool:
        """Whether a layer takes a part of its inputs on each line."""
        return isinstance(self.style, Rowwise) and not self.style.split

    @property
    def slices(self) -> dict[str, Slice]:
        """Which of the module's parameters are divided, and how.

        >>> DividedModule("q", nn.Linear(2, 2), Rowwise(), nn.Module()).slices
        {'weight': Slice(axis='tp', dim=1, parts=1)}
        """
        if self.own_styles:
            return {key: _slice_of_stack(self.module._parameters[key], style) for key, style in self.own_styles}
        if isinstance(self.style, Colwise) and isinstance(self.module, nn.Embedding):
            return {"weight": Slice(AXIS, 1, self.style.parts)}
        if isinstance(self.style, Colwise):
            part = Slice(AXIS, 0, self.style.parts)
            return {"weight": part} if self.module._parameters.get("bias") is None else {"weight": part, "bias": part}
        if isinstance(self.style, Rowwise):
            return {"weight": Slice(AXIS, 1, self.style.parts)}
        return {"weight": Slice(AXIS, 0)} if self.style is PlainStyle.VOCABULARY else {}


def _slice_of_stack(stack: nn.Parameter | None, style: Colwise | Rowwise) -> Slice:
    """Return how a stack of matrices is divided: each of them like a layer's weight.

    >>> _slice_of_stack(nn.Conv1d(6, 4, 2).weight, Colwise(parts=2))
    Slice(axis='tp', dim=1, parts=2)
    """
    assert stack is not None
    return Slice(AXIS, stack.dim() - (2 if isinstance(style, Colwise) else 1), style.parts)


def divided_by(plan: StylePlan, blocks: Sequence[Block], size: int) -> list[DividedModule]:
    """Return the modules of a model's blocks that a plan divides by `size`; refuse what cannot be divided.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    >>> plan = StylePlan((("0", Colwise()), ("2", Rowwise())))
    >>> [value.name for value in divided_by(plan, [Block(name, module) for name, module in model.named_children()], 2)]
    ['0', '2']
    >>> divided_by(plan, [Block("0", nn.Linear(4, 9)), Block("2", nn.Linear(9, 4))], 2)
    Traceback (most recent call last):
    drumline.core.errors.ModelError: 0.weight of shape (9, 4) is divided by 2 (tp) along dimension 0; expected a ...
    """
    named = list(_named(blocks))
    plan.check(
        [*(name for name, _, _ in named), *(f"{name}.{key}" for name, layer, _ in named for key in layer._parameters)]
    )
    modules: dict[nn.Module, DividedModule] = {}
    for name, module, parent in named:
        style = plan.style_of(name)
        if style is not None and module not in modules:
            own_styles = _own_styles(plan, name, module) if style is PlainStyle.STACKED else ()
            modules[module] = DividedModule(name, module, _fitting(name, module, style), parent, own_styles)
    for divided_module in _tied(named, modules):
        modules[divided_module.module] = divided_module
    chosen = [divided_module for divided_module in modules.values() if divided_module.style is not PlainStyle.WHOLE]
    kept_modules = [
        divided_module for divided_module in chosen if not (plan.is_own and _is_left_whole(divided_module, size))
    ]
    for divided_module in kept_modules:
        _check(divided_module, size)
    _refuse_between(blocks, kept_modules)
    _refuse_nothing(kept_modules)
    return kept_modules


def _named(blocks: Sequence[Block]) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield every module of the blocks by its name in the unsplit model, with the module around it."""
    for block in blocks:
        prefix = block.name if block.prefix is None else block.prefix
        there = dict(block.module.named_modules(prefix=prefix, remove_duplicate=False))
        for name, module in there.items():
            yield name, module, there.get(name.rpartition(".")[0], block.module)


def _own_styles(plan: StylePlan, name: str, module: nn.Module) -> tuple[tuple[str, Colwise | Rowwise], ...]:
    """Return the styles of the parameters that a module uses itself; refuse one that would be added up unseen."""
    styles = []
    for key in (key for key, param in module._parameters.items() if param is not None):
        style = plan.style_of(f"{name}.{key}")
        if not isinstance(style, Colwise | Rowwise):
            raise ModelError(
                f"tensor_parallel divides {name} as stacked experts, and gives {name}.{key} no style",
                expected="colwise or rowwise for each of its parameters: the lines' outputs are added up",
                fix=f'name it: {{"{name}.{key}": "colwise"}}, or leave {name} whole',
            )
        styles.append((key, style))
    return tuple(styles)


def _fitting(name: str, module: nn.Module, style: Style) -> Style:
    """Return the style for a module's kind; refuse kinds that cannot be divided."""
    if isinstance(style, PlainStyle) and style is not PlainStyle.VOCABULARY:
        return style
    if isinstance(module, nn.Embedding):
        if isinstance(style, Colwise) and not style.gather:
            raise ModelError(
                f"tensor_parallel divides the embedding {name} by columns",
                expected='"embedding", by rows, or "colwise_gather"',
            )
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise ModelError(
                f"tensor_parallel divides the embedding {name}, which has max_norm, scale_grad_by_freq or sparse",
                expected="a plain embedding",
                fix=f'keep it whole: {{{name!r}: "whole"}}',
            )
        return style if isinstance(style, Colwise) else PlainStyle.VOCABULARY
    if not isinstance(module, nn.Linear) or style is PlainStyle.VOCABULARY:
        raise ModelError(
            f"tensor_parallel divides {name}, a {type(module).__name__}, as {style}",
            expected="nn.Linear for colwise and rowwise, nn.Embedding for embedding",
            fix=f'keep it whole: {{{name!r}: "whole"}}, or write it with nn.Linear',
        )
    if module._parameters.get("weight") is None:
        raise ModelError(
            f"tensor_parallel divides {name}, whose weight is computed from others (a parametrization)",
            expected="a plain parameter",
        )
    return style


def _tied(
    named: Sequence[tuple[str, nn.Module, nn.Module]], modules: dict[nn.Module, DividedModule]
) -> Iterator[DividedModule]:
    """Yield modules that share a divided weight without being named: an embedding and its head are divided alike."""
    weights = {id(layer.module.weight): layer for layer in modules.values() if "weight" in layer.slices}
    for name, module, parent in named:
        first = weights.get(id(module._parameters.get("weight")))
        if first is None or first.module is module:
            continue
        own_module = modules.get(module)
        if own_module is None and isinstance(module, nn.Embedding | nn.Linear):
            style: Style = PlainStyle.VOCABULARY if isinstance(module, nn.Embedding) else Colwise(gather=True)
            own_module = DividedModule(name, module, _fitting(name, module, style), parent)
            yield own_module
        if own_module is None or own_module.slices.get("weight") != first.slices["weight"]:
            raise ModelError(
                f"tensor_parallel divides {first.name}.weight and {name}.weight differently, and they are one tensor",
                expected="the same rows of both",
                fix=f'name both: {{{first.name!r}: "colwise_gather", {name!r}: "embedding"}}, or neither',
            )


def _is_left_whole(module: DividedModule, size: int) -> bool:
    """Whether a layer of a model's own plan stays whole because its vocabulary cannot be divided."""
    whole_output = module.style is PlainStyle.VOCABULARY or (isinstance(module.style, Colwise) and module.style.gather)
    return whole_output and any(_length(module, key) % size for key in module.slices)


def _length(module: DividedModule, key: str) -> int:
    parameter = module.module._parameters[key]
    assert parameter is not None
    return parameter.shape[module.slices[key].dim]


def _check(module: DividedModule, size: int) -> None:
    """Refuse a layer that cannot be divided evenly, or only by cutting through heads."""
    if isinstance(module.parent, nn.MultiheadAttention):
        raise ModelError(
            f"tensor_parallel divides {module.name}, inside an nn.MultiheadAttention, which uses its weights itself",
            expected="an attention that calls its layers",
            fix="write it with nn.Linear and scaled_dot_product_attention",
        )
    for key, part in module.slices.items():
        if _length(module, key) % (size * part.parts):
            shape = tuple(getattr(module.module, key).shape)
            raise ModelError(
                f"{module.name}.{key} of shape {shape} is divided by {size} (tp) along dimension {part.dim}",
                expected=f"a multiple of {size * part.parts} there",
                fix="choose another size of tp, or keep the layer whole",
            )
    if module.style is PlainStyle.STACKED:
        _refuse_odd_experts(module, size)
    if isinstance(module.style, Colwise) and module.makes_part:
        width, features = head_width(module.parent), _length(module, "weight") // module.style.parts
        if width and features % width == 0 and features // size % width:
            raise ModelError(
                f"{module.name} has {features // width} heads of {width} features, and tp is {size}",
                expected=f"a number of heads that is a multiple of {size}",
                fix=f"choose a tp that divides {features // width}",
            )
        for name, count in head_counts(module.parent):
            if count % size:
                raise ModelError(
                    f"{type(module.parent).__name__}.{name} is {count}, and tp is {size}",
                    expected=f"a multiple of {size}",
                    fix=f"choose a tp that divides {count}",
                )


def _refuse_odd_experts(module: DividedModule, size: int) -> None:
    """Refuse experts of transformers whose parts torch's grouped products cannot take: rows of odd numbers of bytes."""
    if getattr(getattr(module.module, "config", None), "_experts_implementation", None) != "grouped_mm":
        return
    for key, part in module.slices.items():
        bytes_of_one = getattr(module.module, key).element_size()
        width = _length(module, key) // (size * part.parts)
        if width * bytes_of_one % _ALIGNED:
            raise ModelError(
                f"the experts {module.name} are {width * size} wide and tp is {size}: rows of a part have {width} "
                f"numbers of {bytes_of_one} bytes",
                expected=f"a multiple of {_ALIGNED} bytes, which torch's grouped products need",
                fix='call model.set_experts_implementation("eager") before, choose another tp, or divide experts by ep',
            )


def head_width(module: nn.Module) -> int:
    """Return how wide a module's heads are, 0 if it does not say."""
    for place in (module, getattr(module, "sizes", None)):
        for name in _WIDTHS:
            width = getattr(place, name, None)
            if isinstance(width, int) and width > 0:
                return width
    return 0


def head_counts(module: nn.Module) -> list[tuple[str, int]]:
    """Return the attributes by which a module knows its number of heads."""
    return [(name, value) for name in _COUNTS if type(value := vars(module).get(name)) is int]


def _refuse_between(blocks: Sequence[Block], modules: Sequence[DividedModule]) -> None:
    """Refuse layers between which a traced forward would see parts: its shapes are those of the whole model."""
    names: dict[int, str] = {}
    for block in blocks:
        if isinstance(block.module, Piece):
            shells: dict[str, Any] = dict(block.module.named_modules())
            names |= {id(shells[name]): name for name in block.module.callees if name in shells}
    for layer in modules:
        if id(layer.module) in names and (layer.takes_part or layer.makes_part):
            raise ModelError(
                f"tensor_parallel divides {layer.name}, a separate block, so the model's forward would see only a part",
                expected="colwise and rowwise layers inside one module, which the forward calls as a whole",
                fix='put both into one module, pass a list of blocks, or use "colwise_gather" and "rowwise_split"',
            )


def _refuse_nothing(modules: Sequence[DividedModule]) -> None:
    if not any(module.slices for module in modules):
        raise ModelError(
            "tensor_parallel divides no layer of this model",
            expected="at least one linear layer or embedding",
            fix="choose another axis of the mesh, such as dp",
        )
