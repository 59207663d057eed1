"""Expert parallelism: each line along ep holds some of the experts, and tokens travel to where theirs are.

    tokens ──► sorted by expert ──► counts, then rows to all lines ──► experts of this line ──► back ──► weighted sum

Every line has other tokens. The exchanges are hooks of the experts' module, outside of its forward. So its weight
gradients need none of them: in a split backward, I runs the reverse exchanges once, and W exchanges nothing. The
gradient of an expert is complete where the expert is: its tokens of all lines went through it.

Any module with this interface can be divided. Its parameters stack all experts along their first dimension. Its forward
takes tokens (T, h), the chosen experts (T, k) and their weights (T, k). The models of transformers have it too.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drumline.channel.lines.axes import Axes
from drumline.channel.lines.slices import Slice
from drumline.core.errors import ModelError
from drumline.features.mesh.parts import HeldParts, HookOf, as_it_is, hook_of
from drumline.model.block import Block
from drumline.model.layers.moe import Experts
from drumline.model.layers.routing import SortedPairs, is_traced
from drumline.runtime.execute.overlap import hand_over

AXIS = "ep"
_TAKES = ["hidden_states", "top_k_index", "top_k_weights"]  # what experts of transformers take


class _Exchanged(torch.autograd.Function):
    """Rows to all lines, those for each one after the other; the gradients of rows go back where these came from."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, axes: Axes, sent: list[int], got: list[int]) -> Tensor:
        ctx.arguments = axes, sent, got
        return _exchange(rows, axes, sent, got, "tokens")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        axes, sent, got = ctx.arguments
        return _exchange(gradient, axes, got, sent, "gradients of tokens"), None, None, None


def _exchange(rows: Tensor, axes: Axes, sent: list[int], got: list[int], what: str, hands_over: bool = True) -> Tensor:
    """Send so many rows to each line along the axis, and return the rows that these send here; all call it alike."""
    rows_got = rows.new_empty((sum(got), *rows.shape[1:]))
    work = dist.all_to_all_single(rows_got, rows.contiguous(), got, sent, group=axes.group(AXIS), async_op=True)
    assert work is not None
    if hands_over:
        hand_over()
    axes.wait(work, f"the exchange of {what} between experts", [AXIS])
    return rows_got


@dataclass(frozen=True, slots=True)
class _ForwardState:
    """What is known between the beginning and the end of a forward."""

    pairs: SortedPairs
    weights: Tensor
    sent: list[int]
    got: list[int]
    dtype: torch.dtype


class _Divided:
    """The exchanges around one module of experts, of which this line holds a part."""

    def __init__(self, axes: Axes, module: nn.Module, num_experts: int, hook_of: HookOf) -> None:
        self._axes, self._num_experts = axes, num_experts
        self.is_on = True  # while off, the module is as in one process
        self._call: _ForwardState | None = None
        module.register_forward_pre_hook(hook_of(module, self.before), with_kwargs=True)
        module.register_forward_hook(hook_of(module, self.after), prepend=True)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Replace the tokens of this line by those of all lines that chose its experts."""
        tokens, index, weights = taken(args, kwargs)
        if is_traced(tokens) or not self.is_on:
            return None
        size, num_own = self._axes.size(AXIS), self._num_experts // self._axes.size(AXIS)
        pairs = SortedPairs.of(index, self._num_experts)
        counts = torch.tensor(pairs.counts, device=tokens.device)
        # How many rows come from each line for each expert here. So few numbers are not worth a turn: see `turns`.
        there = _exchange(counts, self._axes, [num_own] * size, [num_own] * size, "counts", hands_over=False)
        got = there.view(size, num_own).sum(1).tolist()
        sent = counts.view(size, num_own).sum(1).tolist()
        rows: Tensor = _Exchanged.apply(pairs.rows(tokens), self._axes, sent, got)  # type: ignore[no-untyped-call]
        self._call = _ForwardState(pairs, weights, sent, got, tokens.dtype)
        chosen = torch.arange(num_own, device=tokens.device).repeat(size).repeat_interleave(there).unsqueeze(1)
        if not len(rows):  # without any, a module might leave the graph, and gradients would not be exchanged
            rows, chosen = nn.functional.pad(rows, (0, 0, 0, 1)), chosen.new_zeros(1, 1)
        return (rows, chosen.to(index.dtype), torch.ones_like(chosen, dtype=weights.dtype)), {}

    def after(self, module: nn.Module, args: Any, output: Tensor) -> Any:
        """Send the outputs back, and add up those of each token."""
        call, self._call = self._call, None
        if call is None:
            return None
        back: Tensor = _Exchanged.apply(output[: sum(call.got)], self._axes, call.got, call.sent)  # type: ignore[no-untyped-call]
        return call.pairs.combined(back, call.weights, call.dtype)


class ExpertParallel(HeldParts):
    """The experts of a model's blocks, divided over the lines along ep."""

    def __init__(self, axes: Axes, blocks: Sequence[Block]) -> None:
        super().__init__(axes)
        named = {module: name for block in blocks for name, module in block.module.named_modules(prefix=block.name)}
        self.names_of_experts = {module: name for module, name in named.items() if is_experts(module)}
        if not self.names_of_experts:
            raise ModelError(
                f"the mesh divides experts by {axes.size(AXIS)} (ep), and the model has none that can be divided",
                expected="dl.MoE, or a model of transformers whose experts are stacked in one tensor",
                fix='use another axis, such as {"dp": 2}',
            )
        for module, name in self.names_of_experts.items():
            if module.num_experts % axes.size(AXIS):
                raise ModelError(
                    f"{name} has {module.num_experts} experts, and the mesh divides them by {axes.size(AXIS)} (ep)",
                    expected=f"a multiple of {axes.size(AXIS)}",
                    fix="choose another size of ep",
                )

    @property
    def described(self) -> list[str]:
        """What is divided, as text, for the ranks to compare."""
        return list(self.names_of_experts.values())

    def divide(self, blocks: Sequence[Block], device: torch.device) -> None:
        """Replace the experts of these blocks by this line's part of them; all lines call it alike."""
        held_modules = {module for block in blocks for module in block.module.modules()}
        for module in (experts for experts in self.names_of_experts if experts in held_modules):
            for key, whole in module._parameters.items():
                if whole is not None:
                    local = module._parameters[key] = self._local(whole, Slice(AXIS, 0), device)
                    self._parts.append((module._parameters, key, local))
            self._complete(module, as_it_is)

    def divide_copies(self, copies: Mapping[nn.Module, nn.Module]) -> None:
        """Divide the copies of experts that other ranks hold, by the user's own, so that they can come here."""
        for module in (copies[experts] for experts in self.names_of_experts if experts in copies):
            for key, whole in module._parameters.items():
                if whole is not None:
                    module._parameters[key] = self._absent(whole, Slice(AXIS, 0))
            self._complete(module, hook_of)

    def _complete(self, module: nn.Module, hook_of: HookOf) -> None:
        """Give experts of which this line has a part their exchanges, and let them tell their number."""
        num_experts = int(vars(module)["num_experts"])
        vars(module)["num_experts"] = num_experts // self.axes.size(AXIS)
        divided = _Divided(self.axes, module, num_experts, hook_of)
        self._entries += [(vars(module), "num_experts", num_experts), (vars(divided), "is_on", False)]


def taken(args: Any, kwargs: Any) -> list[Tensor]:
    """Return what experts are called with: tokens, the chosen experts and their weights."""
    return [*args] + [kwargs[name] for name in _TAKES if name in kwargs]


def is_experts(module: nn.Module) -> bool:
    """Whether a module has stacked experts and takes tokens, the chosen experts and their weights.

    >>> is_experts(Experts(8, 16, 4)), is_experts(nn.Linear(8, 16))
    (True, False)
    """
    number = vars(module).get("num_experts")
    own_parameters = [param for param in module._parameters.values() if param is not None]
    if (
        not isinstance(number, int)
        or not own_parameters
        or any(param.dim() < 2 or param.shape[0] != number for param in own_parameters)
    ):
        return False
    takes = list(inspect.signature(type(module).forward).parameters)[1:]
    has_others = any(True for child in module.children() for _ in child.parameters())
    return not has_others and (isinstance(module, Experts) or takes == _TAKES)
