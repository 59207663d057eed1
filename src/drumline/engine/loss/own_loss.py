"""Models that compute their own loss, as Hugging Face models do when they get `labels`."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from drumline.core.errors import DrumlineError, ModelError
from drumline.engine.loss.targets import size_of
from drumline.engine.model.blocks import evaluating
from drumline.model.blocks.script import OwnLossParts, Script, loss_of
from drumline.model.follow.inputs import InputKind, Inputs
from drumline.model.loss.calls import name_of
from drumline.model.loss.counts import Across, Count, Weighing, labels_counted, mixed_by, weighed
from drumline.model.loss.terms import Walk
from drumline.runtime.batch import num_rows

_PROBE = 37  # rows of the probe batch: a prime, so that no other size is a multiple of it by chance
_WEIGHT = "loss_weight=, the weight of a microbatch: lambda inputs: len(inputs.kwargs['input_ids'])"


def own_loss(output: Any, *, needed: bool = True) -> Tensor | None:
    """Return the loss in a model's output, if there is one: its `loss`, or its only or first item.

    If it is needed but missing, raise an error.

    >>> own_loss({"loss": torch.tensor(2.0), "logits": torch.ones(3)})
    tensor(2.)
    """
    if isinstance(output, Mapping):
        found_loss = output.get("loss")
    elif isinstance(output, tuple | list) and not hasattr(output, "loss"):
        found_loss = output[0] if output else None
    else:
        found_loss = getattr(output, "loss", output)
    loss = found_loss if isinstance(found_loss, Tensor) and found_loss.dim() == 0 else None
    if loss is None and needed:
        raise ModelError(
            f"the model returned a {type(output).__name__} without a loss, and the pipeline has no loss_fn",
            expected="either loss_fn and target, or an output with a `loss`",
            fix="pass loss_fn= to Pipeline, or labels= to step",
        )
    return loss


class OwnWeight(TorchFunctionMode):
    """The weight of a microbatch in an unsplit model's loss, its own or a function: the number of labels it counts.

    It observes a plain run and no part of a pipeline, so that pipelines can be compared with it.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.counts: list[float] = []

    def __call__(self, inputs: Any, target: Any = None, *, by_size: bool = False) -> float:
        """Run the model once, without gradients, and return what its loss averages over: labels, or else rows.

        With `by_size`, for microbatches of different lengths, it is elements of the target instead of rows.

        It refuses a loss that adds means over different counts, because no single weight is right for it.
        """
        self.counts = []
        with evaluating([self.model]), self, torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = self._run(inputs)
            if self.loss_fn is not None:
                self.loss_fn(output, target)
        if len(set(self.counts)) > 1:
            raise ModelError(
                f"the model's loss adds means over {' and '.join(f'{count:g}' for count in self.counts)} labels",
                expected="means over one count",
            )
        if self.counts:
            return self.counts[0]
        return size_of(target) if by_size and target is not None else num_rows(inputs if target is None else target)

    def _run(self, inputs: Any) -> Any:
        if not isinstance(inputs, Inputs):
            return self.model(inputs)
        extra = {"use_cache": False} if "use_cache" in inspect.signature(self.model.forward).parameters else {}
        return self.model(*inputs.args, **{**extra, **inputs.kwargs})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the number of labels that a loss counts."""
        if func in (nn.functional.cross_entropy, nn.functional.nll_loss):
            arguments = inspect.signature(func).bind(*args, **(kwargs or {}))
            arguments.apply_defaults()
            target = arguments.arguments["target"]
            if arguments.arguments["reduction"] == "mean" and not target.is_floating_point():
                weight = arguments.arguments["weight"]
                self.counts.append(float(labels_counted(target, arguments.arguments["ignore_index"], weight)))
        return func(*args, **(kwargs or {}))


class OwnShares:
    """The shares of the microbatches if the model computes its own loss: by what that loss really counts."""

    def __init__(self, script: Script, piece: Any, num_last: int) -> None:
        self.script = script
        self.piece = piece  # the last piece, which holds class weights
        self.recut(num_last)
        self.across: Across | None = None  # what all lines of a mesh count together
        self._looked_at = False
        self._mixing_parts: set[int] = set()  # the parts that mix the rows of a microbatch
        self._degrees: list[int] = []  # of each part: to which power of the rows the numbers go that divide it

    def recut(self, num_last: int) -> None:
        """Have so many blocks in the last stage."""
        self._first = len(self.script.names) - num_last  # the first of them

    def __call__(self, microbatches: Sequence[Inputs], rows: Sequence[int], *, train: bool) -> Weighing:
        """Return the microbatches' shares of the loss, and factors for its parts if one share is not enough."""
        if len(microbatches) == 1 and self.across is None:
            return Weighing([1.0])
        kinds = [self.script.kind(microbatch, train=train) for microbatch in microbatches]
        losses_by_kind = [self.script.loss(kind) for kind, _ in kinds]
        losses = [parts for parts in losses_by_kind if parts is not None]
        if len(losses) < len(losses_by_kind):
            # No loss: the code that needs it raises.
            return weighed([[float(row)] for row in rows], rows, across=self.across)
        self._look(losses[0], kinds[0][0], rows[0])
        counts = [
            self._divided(loss, loss.counts.of(tensors, self.piece))
            for loss, (_, tensors) in zip(losses, kinds, strict=True)
        ]
        weighing = self._weighed(counts, rows, others=bool(losses[0].walk.others))
        if weighing.factors and min(losses[0].pieces) < self._first:
            raise ModelError(
                "the model's loss adds means over different counts, one of them in an earlier stage",
                expected="every part of the loss in the last stage",
                fix=f"cut the model elsewhere, or pass {_WEIGHT}",
            )
        return weighing

    def _weighed(self, counts: Sequence[Sequence[Any]], rows: Sequence[int], *, others: bool) -> Weighing:
        """Return the shares, using only the parts that are not computed for each microbatch separately."""
        mixers = self._mixing_parts
        if not mixers:
            return weighed(counts, rows, others=others, across=self.across)
        known = [[value for at, value in enumerate(row) if at not in mixers] for row in counts]
        weighing = weighed(known, rows, others=True, across=self.across)
        factors = {}
        for microbatch, factor in weighing.factors.items():
            each = iter(factor)
            factors[microbatch] = [1.0 if at in mixers else next(each) for at in range(len(counts[0]))]
        return Weighing(weighing.shares, factors)

    def _look(self, loss: OwnLossParts, kind: InputKind, rows: int) -> None:
        """Refuse, once, a loss that is not built from means and sums over rows; name its other parts."""
        if self._looked_at:
            return
        walk = loss.walk
        self._degrees = [0] * len(walk.terms)
        if not walk.terms:
            raise ModelError(
                f"the model's loss comes from {', '.join(walk.others[:3]) or 'nothing that was traced'}, so Drumline"
                " cannot tell how much each microbatch contributes",
                expected="a sum of means and sums over rows or tokens, divided by numbers or by counts of the inputs",
                fix=f"pass {_weight_of(kind)}; or pass loss_fn=",
            )
        has_numbers = walk.has_numbers or any(walk.numbers(term) for term in walk.terms)
        other = self._with_rows(kind, rows) if mixed_by(walk) or has_numbers else None
        mixers = self._mixers(loss, other) if mixed_by(walk) else {}
        if other is not None:
            self._degrees = self._degrees_of(walk, other, rows, mixers)
        pairs = [name for name, degree in mixers.values() if degree > 1]
        if pairs or len(mixers) == len(walk.terms):
            raise ModelError(
                f"the model's loss compares rows of the batch with each other, in {(pairs or [mixers[0][0]])[0]}",
                expected="a mean or sum over rows, so that the microbatches' losses combine to the batch's",
                fix=f"use num_microbatches=1; or, to compute it on each microbatch separately, pass {_WEIGHT}",
            )
        self._mixing_parts = set(mixers)
        if names := dict.fromkeys([*walk.others, *(name for name, _ in mixers.values())]):
            warnings.warn(
                f"a part of the model's loss, from {', '.join(names)}, is neither a mean nor a sum over rows: Drumline"
                " computes it on each microbatch and weights it by rows. Pass loss_weight= for other weights",
                stacklevel=2,
            )
        self._looked_at = True

    def _divided(self, loss: OwnLossParts, counts: list[Count | None]) -> list[Count | None]:
        """Return what the parts count, if they are divided or multiplied by numbers that grow with the rows.

        A sum divided by its rows is a mean over rows, and a mean multiplied by its rows is a sum.
        """
        tensors = list(counts)
        for at, degree in enumerate(self._degrees):
            term = loss.walk.terms[at]
            if degree == 1 and counts[at] is None:
                tensors[at] = 1 / abs(term.factor)
            elif degree == -1 and isinstance(counts[at], int):
                tensors[at] = None
            elif degree:
                raise ModelError(
                    f"the model's loss multiplies a mean by {term.factor:g}, which depends on the number of rows",
                    expected="a sum of means and sums over rows or tokens",
                    fix=f"write it without that number; or pass {_WEIGHT}",
                )
        return tensors

    def _with_rows(self, kind: InputKind, rows: int) -> OwnLossParts | None:
        """Trace the model's loss on a batch with more rows; None if that cannot be done."""
        metas = tuple(
            meta._replace(shape=torch.Size((_PROBE, *meta.shape[1:]))) if meta.shape[:1] == (rows,) else meta
            for meta in kind.metas
        )
        probe = kind._replace(metas=metas)
        try:
            return loss_of(self.script.graph(probe), probe, [0])
        except DrumlineError:
            return None

    def _degrees_of(self, walk: Walk, other: OwnLossParts, rows: int, mixers: Collection[int]) -> list[int]:
        """Return by which power of the rows each part is divided besides what its call says.

        Parts that mix rows are computed for each microbatch as they are.
        """
        degrees = []
        for at, (term, two) in enumerate(zip(walk.terms, other.walk.terms, strict=False)):
            if at in mixers:
                degrees.append(0)
                continue
            # A mean over elements has as many more of them as there are rows.
            ratio = abs(term.factor / two.factor)
            inside = [walk.numbers(term), other.walk.numbers(two)]
            if inside[0] != inside[1] and ratio == 1.0:
                raise ModelError(
                    "a number that depends on the rows goes into the model's loss, before it is added up",
                    expected="a sum of means and sums over rows or tokens",
                    fix=f"write it without that number; or pass {_WEIGHT}",
                )
            degree = 0 if rows == _PROBE else round(math.log(ratio) / math.log(_PROBE / rows))
            if abs(ratio - (_PROBE / rows) ** degree) > 1e-6 * ratio:
                raise ModelError(
                    f"the model's loss is multiplied by {term.factor:g} for {rows} rows, {two.factor:g} for {_PROBE}",
                    expected="a number that does not depend on the rows, or one divided by them",
                    fix=f"write it as a mean or a sum; or pass {_WEIGHT}",
                )
            degrees.append(degree)
        return [*degrees, *[0] * (len(walk.terms) - len(degrees))]

    def _mixers(self, loss: OwnLossParts, more: OwnLossParts | None) -> dict[int, tuple[str, int]]:
        """Return the parts that mix rows, found on a batch with more rows: the call and the degree of each.

        Degree 1 reduces rows to a few numbers, degree 2 compares each row with each.
        """
        walk, calls = loss.walk, loss.walk.graph.calls
        every = range(len(walk.terms))
        if more is None:
            return dict.fromkeys(every, ("an untraced path", 1))
        other = more.walk.graph
        if [name_of(call) for call in other.calls] != [name_of(call) for call in calls]:
            return dict.fromkeys(every, ("a path that depends on the number of rows", 1))
        degrees = [_degree(value.num_bytes) for value in other.values]
        mixers: dict[int, tuple[str, int]] = {}
        for part, term in enumerate(walk.terms):
            for at in walk.data_calls(term):
                degrees_made = [degrees[value] for _, value in calls[at].makes]
                data = [degrees[value] for value in calls[at].takes if not walk.is_known(value)]
                if any(number > 1 for number in degrees_made):
                    mixers[part] = (name_of(calls[at]), 2)
                elif 0 in degrees_made and any(data) and part not in mixers:
                    mixers[part] = (name_of(calls[at]), 1)
        return mixers


def _weight_of(kind: InputKind) -> str:
    """Return what to pass, with the name of an argument that the model gets."""
    names = kind.form[2][1] if isinstance(kind.form, tuple) and isinstance(kind.form[2], tuple) else ()
    return _WEIGHT.replace("input_ids", names[0]) if names else _WEIGHT


def _degree(num_bytes: int) -> int:
    """Return how many times a size contains the number of rows as a factor."""
    return 2 if num_bytes % _PROBE**2 == 0 else 1 if num_bytes % _PROBE == 0 else 0
