"""What a whole step of the plain model launches and keeps: layers between the ends, then the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from drumline.plan.calibrated.layer_list import LayerList
from drumline.plan.calibrated.setting import LOSS_ROWS, StepSetting
from drumline.plan.calibrated.step_tape import StepTape, Work
from drumline.plan.cluster.transformer import Transformer

_LABEL = 8  # bytes of a token's number
_SINGLE = 4  # bytes of a float32
_TABLE = "embedding-table"


def step_tape(
    shape: Transformer,
    setting: StepSetting,
    *,
    fused_norms: bool = True,
    rounding: int = 1,
    alignment: int = 1,
    workspace: Callable[[Work], float] = lambda work: 0.0,
    update: bool = True,
) -> StepTape:
    """Return the tape of a step; `update` adds the optimizer. It starts with parameters and the optimizer's states.

    >>> shape = Transformer("m", 2, 64, 4, vocabulary=100, sequence=16, gated=True, tied=False, biased=False)
    >>> tape = step_tape(shape, StepSetting(rows=3, dtype="fp32"))
    >>> tape.works[Work("silu", "fp32", (3 * 16 * 256,))], tape.live == 4 * 4 * sum(parameter_sizes(shape))
    (2, False)
    """
    tape = StepTape(setting.dtype, rounding=rounding, alignment=alignment, workspace=workspace)
    _standing(tape, shape, setting)
    tape.standing = tape.live
    layer = LayerList(shape, setting.rows, setting.width, fused_norms)
    keep = setting.recompute == "none"
    tape.new(tokens=_LABEL * layer.tokens, target=_LABEL * layer.tokens, x0=layer.bytes(shape.hidden))
    tape.run("embedding", layer.tokens, shape.hidden, shape.vocabulary)
    streams = [f"x{number}" for number in range(shape.num_layers + 1)]
    for number, (x, y) in enumerate(pairwise(streams)):
        layer.forward(tape, x, y, keep=keep)
        if keep:
            layer.keep_for(tape, number)
    layer.norm(tape, "n", "rl")
    (_fused_loss if setting.loss == "fused" else _plain_loss)(tape, layer)
    layer.norm_backward(tape, "dn", "rl", "dy")
    tape.free(streams[-1])
    for number in reversed(range(shape.num_layers)):
        if keep:
            layer.take_back(tape, number)
        else:
            layer.forward(tape, streams[number], "", keep=True, stop=True)
        layer.backward(tape, "dy", streams[number], "dy")
    tape.new(**{"grad-embedding": shape.vocabulary * shape.hidden * setting.width})
    tape.run("embedding-backward", layer.tokens, shape.hidden, shape.vocabulary)
    if shape.tied:  # the head's gradient is there already
        tape.run("add", shape.vocabulary * shape.hidden)
        tape.free("grad-embedding")
    tape.free("dy")
    if update:
        _update(tape, shape, setting)
    return tape


def matrices(shape: Transformer) -> list[tuple[int, int]]:
    """Return the rows and columns of a layer's matrices.

    >>> matrices(Transformer("m", 1, 64, 4, vocabulary=100, sequence=16, num_key_value_heads=2, gated=True))
    [(64, 64), (32, 64), (32, 64), (64, 64), (256, 64), (256, 64), (64, 256)]
    """
    queries, keys = shape.num_heads * shape.head_width, shape.num_key_value_heads * shape.head_width
    hidden, inner = shape.hidden, shape.feedforward
    attention = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    return [*attention, (inner, hidden), (inner, hidden), (hidden, inner)]


def parameter_sizes(shape: Transformer) -> list[int]:
    """Return the numbers in every parameter, in the order of the model: last norm, embedding, layers, head.

    >>> shape = Transformer("m", 1, 64, 4, vocabulary=100, sequence=16, gated=True, tied=False)
    >>> len(parameter_sizes(shape)), parameter_sizes(shape)[:5]
    (12, [64, 6400, 64, 64, 4096])
    """
    layer = [shape.hidden] * 2 + [rows * columns for rows, columns in matrices(shape)]
    table = shape.vocabulary * shape.hidden
    return [shape.hidden, table, *layer * shape.num_layers, *([] if shape.tied else [table])]


def _standing(tape: StepTape, shape: Transformer, setting: StepSetting) -> None:
    """Add what is there from step to step: parameters, tables of positions, states of the optimizer."""
    sizes = parameter_sizes(shape)
    tables = 2 * setting.width * shape.sequence * shape.head_width
    tape.new(tables=tables)
    for at, size in enumerate(sizes):
        tape.new(**{f"parameter-{at}": size * setting.width})
    of_layer = len(matrices(shape)) + 2
    for at, size in enumerate(sizes):
        layer, place = divmod(at - 2, of_layer)
        by_muon = setting.optimizer == "muon" and 0 <= layer < shape.num_layers and place >= 2
        tape.new(**{f"state-{at}": size * setting.width})
        if not by_muon:
            tape.new(**{f"square-{at}": size * setting.width})
            if setting.optimizer in ("adamw", "muon"):  # the fused one counts its steps on the device
                tape.new(**{f"count-{at}": _SINGLE})


def _plain_loss(tape: StepTape, layer: LayerList) -> None:
    """Make all logits, in float32 too, and take the loss back through them."""
    shape, count = layer.shape, layer.tokens * layer.shape.vocabulary
    rows, columns = layer.tokens, shape.vocabulary
    logits, wide = layer.bytes(columns), _SINGLE * count
    tape.new(logits=logits)
    tape.run("product", rows, columns, shape.hidden)
    name = "logits"
    if layer.width < _SINGLE:
        tape.new(wide=wide)
        tape.run("cast-up", count)
        tape.free("logits")
        name = "wide"
    tape.new(shares=wide)
    tape.run("softmax", rows, columns, dtype="fp32")
    tape.new(loss=_SINGLE, weight=_SINGLE)
    tape.run("nll", rows, columns, dtype="fp32")
    tape.free(name)
    tape.new(seed=_SINGLE)
    tape.new(picked=wide)
    tape.run("nll-backward", rows, columns, dtype="fp32")
    tape.free("seed")
    tape.new(towards=wide)
    tape.run("softmax-backward", rows, columns, dtype="fp32")
    tape.free("shares", "picked")
    if layer.width < _SINGLE:
        tape.new(narrow=logits)
        tape.run("cast-down", count)
        tape.free("towards")
        tape.rename(narrow="towards")
    tape.new(**{"grad-head": columns * shape.hidden * layer.width})
    tape.run("product-weight", columns, shape.hidden, rows)
    tape.new(dn=layer.bytes(shape.hidden))
    tape.run("product-input", rows, shape.hidden, columns)
    tape.free("towards", "n", "loss", "weight")


def _fused_loss(tape: StepTape, layer: LayerList) -> None:
    """Make the logits of some tokens at a time, and both gradients from them."""
    shape = layer.shape
    head = shape.vocabulary * shape.hidden * layer.width
    tape.new(towards=layer.bytes(shape.hidden), into=head)
    tape.run("fill", shape.vocabulary * shape.hidden)
    tape.new(loss=_SINGLE)
    for first in range(0, layer.tokens, LOSS_ROWS):
        _piece(tape, layer, min(LOSS_ROWS, layer.tokens - first))
    tape.free("n")
    tape.new(seed=_SINGLE, dn=layer.bytes(shape.hidden))
    tape.run("times", layer.tokens * shape.hidden)
    tape.new(**{"grad-head": head})
    tape.run("times", shape.vocabulary * shape.hidden)
    tape.free("towards", "into", "seed", "loss")


def _piece(tape: StepTape, layer: LayerList, rows: int) -> None:
    hidden, columns = layer.shape.hidden, layer.shape.vocabulary
    count = rows * columns
    tape.new(logits=count * layer.width)
    tape.run("product", rows, columns, hidden)
    name = "logits"
    if layer.width < _SINGLE:
        tape.new(wide=_SINGLE * count)
        tape.run("cast-up", count)
        tape.free("logits")
        name = "wide"
    tape.new(shares=_SINGLE * count)
    tape.run("softmax", rows, columns, dtype="fp32")
    tape.free(name)
    tape.run("nll", rows, columns, dtype="fp32")
    tape.run("exp", count, dtype="fp32")
    tape.run("times", count, dtype="fp32")
    if layer.width < _SINGLE:
        tape.new(narrow=count * layer.width)
        tape.run("cast-down", count)
        tape.free("shares")
        tape.rename(narrow="shares")
    tape.run("product-input", rows, hidden, columns)
    tape.run("product-weight", columns, hidden, rows)
    tape.run("fill", columns * hidden)  # this product adds to what is there, which takes another pass
    tape.free("shares")


def _update(tape: StepTape, shape: Transformer, setting: StepSetting) -> None:
    """Add the optimizer's works, and what it holds meanwhile."""
    sizes = parameter_sizes(shape)
    if setting.optimizer == "adamw-loop":
        before = 0
        for size in sizes:
            _meanwhile(tape, "loop", (2 * size + before) * setting.width)  # the root of the one before is still there
            tape.run("adamw-loop", size)
            before = size
        return
    kind, numbers = setting.optimizer, sum(sizes)
    if kind == "muon":
        each = matrices(shape)
        for rows, columns in each:
            _meanwhile(tape, f"muon-{rows}-{columns}", _muon_bytes(rows, columns, setting.width))
            for _ in range(shape.num_layers):
                tape.run("muon", max(rows, columns), min(rows, columns))
        kind, numbers = "adamw", numbers - shape.num_layers * sum(rows * columns for rows, columns in each)
    if kind == "adamw-foreach":  # a list of roots, as large as all parameters
        _meanwhile(tape, kind, numbers * setting.width)
    tape.run(kind, numbers)


def _meanwhile(tape: StepTape, name: str, size: int) -> None:
    tape.new(**{name: size})
    tape.free(name)


def _muon_bytes(rows: int, columns: int, width: int) -> int:
    """Return what an update by Muon holds: the update, its matrix in bf16 twice, and two square ones."""
    return width * rows * columns + 2 * (2 * rows * columns + 2 * min(rows, columns) ** 2)
