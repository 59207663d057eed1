"""How a layer is divided over the axis tp, and the plans that say so by the layers' names.

    "layers.*.q_proj": "colwise"       each line has some rows of the weight, and makes some of the output's columns
    "layers.*.o_proj": "rowwise"       each line has some columns of the weight; the lines' outputs are added up

A plan is a dict from patterns (`fnmatch`) to styles. A style is a name, an object such as `Colwise(parts=3)`, or
torch's own `ColwiseParallel()` and `RowwiseParallel()`. Hugging Face models bring their own plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from drumline.core.errors import ModelError, UsageError, nearest


@dataclass(frozen=True, slots=True)
class Colwise:
    """A linear layer of which each line has some output features.

    `parts`: how many matrices the weight fuses along its output, each divided separately: 3 for queries, keys and
    values in one. `gather`: whether all lines get the whole output.

    >>> Colwise(parts=3)
    Colwise(parts=3, gather=False)
    """

    parts: int = 1
    gather: bool = False


@dataclass(frozen=True, slots=True)
class Rowwise:
    """A linear layer of which each line has some input features; all lines get the whole output, the sum of theirs.

    `split`: whether the input comes whole and each line takes its own features of it.

    >>> Rowwise(split=True)
    Rowwise(parts=1, split=True)
    """

    parts: int = 1
    split: bool = False


class PlainStyle(StrEnum):
    """A style that has no numbers.

    VOCABULARY: an embedding of which each line has some rows; all lines get the whole output.
    PARTIAL: a module that every line holds whole and applies to its own part, such as a norm of each head's queries.
    Its gradients are summed over the lines.
    STACKED: a module that uses its own weights, such as stacked experts; the plan gives each of its parameters a style.
    Its inputs are whole, and all lines get the whole output, the sum of theirs.
    LATENT: a whole layer whose last outputs go to this line's heads directly: the rotary keys of latent attention.
    Their gradient is summed over the lines; that of the other outputs is whole, as a layer by columns follows.
    WHOLE: a module that stays as it is, although a later pattern matches it.
    ONCE: a module inside stacked experts that keeps what it gets: its lines' outputs add up to one.
    """

    VOCABULARY = "embedding"
    PARTIAL = "partial"
    STACKED = "experts"
    LATENT = "latent"
    WHOLE = "whole"
    ONCE = "once"


Style = Colwise | Rowwise | PlainStyle

STYLES: dict[str, Style] = {
    "colwise": Colwise(),
    "colwise_gather": Colwise(gather=True),
    "rowwise": Rowwise(),
    "rowwise_split": Rowwise(split=True),
    **{style.value: style for style in PlainStyle if style is not PlainStyle.ONCE},
}
# What transformers calls them.
_THEIRS: dict[str, Style] = {
    "colwise_rep": Colwise(gather=True),
    "colwise_gather_output": Colwise(gather=True),
    "rowwise_rep": Rowwise(split=True),
    "rowwise_split_input": Rowwise(split=True),
    "packed_colwise": Colwise(parts=2),
    "packed_rowwise": Rowwise(parts=2),
    "embedding_rowwise": PlainStyle.VOCABULARY,
    "replicated_with_grad_allreduce": PlainStyle.PARTIAL,
    "replicate": PlainStyle.WHOLE,
    "embedding_colwise": Colwise(gather=True),
    "moe_tp_experts": PlainStyle.STACKED,
    "all_reduce": PlainStyle.STACKED,
    "moe_identity_expert": PlainStyle.ONCE,
    "mla_kv_a_proj": PlainStyle.LATENT,
}
_OF_EXPERTS = (PlainStyle.STACKED, PlainStyle.ONCE)
_EXPECTED = f"one of {', '.join(STYLES)}, dl.Colwise(...), dl.Rowwise(...), or torch's ColwiseParallel, RowwiseParallel"
_FIX = "pass tensor_parallel={PATTERN: STYLE, ...}, such as {'*.q_proj': 'colwise', '*.o_proj': 'rowwise'}"


def style_named(pattern: str, style: Any) -> Style:
    """Return the style that a plan gives to a pattern.

    >>> style_named("*.q_proj", "colwise"), style_named("lm_head", "colwise_rep")
    (Colwise(parts=1, gather=False), Colwise(parts=1, gather=True))
    >>> style_named("*.q_proj", "colwize")
    Traceback (most recent call last):
    drumline.core.errors.UsageError: tensor_parallel gives '*.q_proj' the style 'colwize'; expected ...
    """
    if isinstance(style, str) and not isinstance(style, PlainStyle):
        colwise = STYLES.get(style) or _THEIRS.get(style)
        if colwise is None:
            raise UsageError(
                f"tensor_parallel gives {pattern!r} the style {style!r}", expected=_EXPECTED, fix=_hint(style)
            )
        return colwise
    if isinstance(style, Style):
        parts = getattr(style, "parts", 1)
        if not isinstance(parts, int) or isinstance(parts, bool) or parts < 1:
            raise UsageError(f"tensor_parallel gives {pattern!r} parts={parts!r}", expected="an integer of at least 1")
        return style
    return _of_torch(pattern, style)


def _hint(style: str) -> str:
    if "ep_" in style or "gemm" in style:
        return "leave experts out of the plan: the axis ep divides them"
    return nearest(style, STYLES)


def _of_torch(pattern: str, style: Any) -> Style:
    """Translate an object of torch.distributed.tensor.parallel."""
    kind = type(style).__name__
    if kind not in ("ColwiseParallel", "RowwiseParallel"):
        raise UsageError(f"tensor_parallel gives {pattern!r} the style {style!r:.60}", expected=_EXPECTED)
    takes, makes = (_layout(getattr(style, name, None)) for name in ("input_layouts", "output_layouts"))
    styles: dict[tuple[str, str, str], Style] = {
        ("ColwiseParallel", "R", "S(-1)"): Colwise(),
        ("ColwiseParallel", "R", "R"): Colwise(gather=True),
        ("RowwiseParallel", "S(-1)", "R"): Rowwise(),
        ("RowwiseParallel", "R", "R"): Rowwise(split=True),
    }
    if (kind, takes, makes) not in styles:
        raise UsageError(
            f"tensor_parallel gives {pattern!r} a {kind} from {takes} to {makes}",
            expected="a whole input or output, or one divided along its last dimension",
            fix="for sequences divided over tp, pass sequence_parallel=True",
        )
    return styles[kind, takes, makes]


def _layout(placements: Any) -> str:
    placement = placements[0] if isinstance(placements, tuple | list) and len(placements) == 1 else placements
    dim = getattr(placement, "dim", None)
    return "R" if type(placement).__name__ == "Replicate" else f"S({dim})" if isinstance(dim, int) else repr(placement)


@dataclass(frozen=True, slots=True)
class StylePlan:
    """Styles by pattern, in order: the first that matches a module's name counts. `is_own` if the model brings it."""

    styles: tuple[tuple[str, Style], ...]
    is_own: bool = False

    @staticmethod
    def of(plan: Any, model: Any) -> StylePlan:
        """Return the plan that the user gives or the model brings.

        >>> from torch import nn
        >>> StylePlan.of(None, nn.Linear(2, 2))
        Traceback (most recent call last):
        drumline.core.errors.ModelError: the mesh has an axis tp, and Linear has no tensor_parallel_plan; ...
        """
        if plan is None:
            own_plan = getattr(model, "tensor_parallel_plan", None) or _hugging_face_plan(model)
            if not own_plan:
                raise ModelError(
                    f"the mesh has an axis tp, and {type(model).__name__} has no tensor_parallel_plan",
                    expected="a plan that says which layers to divide, and how",
                    fix=_FIX,
                )
            return StylePlan(tuple((name, style_named(name, style)) for name, style in own_plan.items()), is_own=True)
        if not isinstance(plan, Mapping) or not plan or not all(isinstance(style, str) for style in plan):
            raise UsageError(f"tensor_parallel is {plan!r:.80}", expected="a dict from patterns to styles", fix=_FIX)
        return StylePlan(tuple((value, style_named(value, style)) for value, style in plan.items()))

    def style_of(self, name: str) -> Style | None:
        """Return the style of the module with a name, None if no pattern matches.

        >>> StylePlan((("layers.*.up", Colwise()),)).style_of("layers.3.up")
        Colwise(parts=1, gather=False)
        """
        return next((style for pattern, style in self.styles if self._matches(name, pattern)), None)

    def _matches(self, name: str, pattern: str) -> bool:
        if not self.is_own:
            return fnmatchcase(name, pattern)
        # In a model's own plan a star stands for a layer's number.
        return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None

    def without_experts(self) -> StylePlan:
        """Return the plan without stacked experts, which the axis ep divides."""
        return StylePlan(tuple(pair for pair in self.styles if pair[1] not in _OF_EXPERTS), self.is_own)

    def check(self, names: Iterable[str]) -> None:
        """Refuse a user's pattern that matches no module and no parameter."""
        known = [name for name in names if name]
        for pattern, _ in () if self.is_own else self.styles:
            if not any(self._matches(name, pattern) for name in known):
                raise UsageError(
                    f"tensor_parallel names {pattern!r}, and no module of the model matches it",
                    expected="the name of a module, or a pattern like 'layers.*.q_proj'",
                    fix=f"the model's modules are named like {', '.join(known[-3:])}" if known else "",
                )


def _hugging_face_plan(model: Any) -> Mapping[str, Any] | None:
    """Return the plan of a Hugging Face model, for all of its modules that are plain layers.

    Where the plan leaves out the embedding of tokens, as plans of earlier transformers do, it is divided all the same.
    """
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping) or not hasattr(model, "config"):
        return None
    base = getattr(model, "base_model", model)
    if not plan or not isinstance(getattr(base, "embed_tokens", None), nn.Embedding):
        return plan
    name = "embed_tokens" if base is model else f"{model.base_model_prefix}.embed_tokens"
    return {**plan, name: plan.get(name, "embedding_rowwise")}
