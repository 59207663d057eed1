"""What a layer does for one microbatch on one device of a layout: a list of operations, made once.

Everything else sums over that list: seconds (`kernels.py`), bytes kept until the backward (`device_memory.py`),
bytes sent (`loads.py`). With t tensor-parallel ranks, each product's weight is divided by t, alternately along its
columns and its rows, so that only the layer's two blocks end with an exchange:

    norm │ qkv (columns) │ attention │ out (rows) │ exchange │ dropout, sum
    norm │ up (columns)  │ gelu      │ down (rows) │ exchange │ dropout, sum

Without sequence parallelism the exchange is an all-reduce, and every rank does the work on both sides of the divided
products for all tokens. With it, the exchange is a reduce-scatter there and an all-gather before the next product: the
same number of bytes, but norms, dropouts and sums are also divided by t.

What is kept follows arXiv 2205.05198, written out by operation so that it extends to other models. Per token and layer
a device keeps, in bytes, with h the hidden width, a heads and s the sequence,

    10h + 24h/t + 5as/t        every rank keeps all activations between the blocks, and its part of those inside
    34h/t + 5as/t              with sequence parallelism, it keeps only its part of both
    34h/t                      with the scores (5as/t) recomputed, or never stored
    2h                         with everything recomputed: the input of a layer

Latent attention keeps its n latent numbers before and after their norms. For every head it keeps queries and keys of
width k, values and outputs of width v: 4n + 4a(k + v)/t instead of 8h/t. If the projections up to the heads are
recomputed, 2r + 4n + 2av/t: all heads share a key of width r, and queries, keys and values are not kept.

With FP8, the products with a layer's weights take 8-bit inputs: attention's projections, feed-forward blocks, experts.
Attention itself, the router, the embedding and the head stay in 16 bits, and so do all messages. Inputs of products
that are kept in 8 bits take half; fused attention keeps its output in 16 bits besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from drumline.plan.cluster.layout import EVERY_SECOND, PARTS, WHOLE, Layout, Share
from drumline.plan.cluster.transformer import ExpertShape, Transformer

WORD = 2  # bytes of a 16-bit number
# Bytes per number, forward and backward, if every operation is a kernel of its own. A norm without biases: to 32 bits
# (6), square (8), mean (4), scale (8), back (6), times the weight (4); backward reads and writes twice as much.
# Positions: to 32 bits, turned, back (20). A gate: the activation function (4), times the other (6); backward 6 and 12.
EAGER_NORM = (36.0, 72.0)
EAGER_ROTATION = 20.0
EAGER_GATE = (10.0, 18.0)


class Product(NamedTuple):
    """`times` products in parallel: tokens as rows, outputs as columns, inputs as depth; `fp8` if 8 bits suffice."""

    rows: float
    columns: float
    depth: float
    times: float = 1.0
    fp8: bool = True


class AxisMessage(NamedTuple):
    """What `num_devices`, `stride` apart on an axis, exchange: `size` bytes in total; each sends `sent`, alone nothing.

    It travels so many times `forward` and `backward`, and `waited` times more in backward with nothing to hide behind.
    """

    axis: str
    num_devices: int
    stride: int
    size: float
    sent: float
    forward: int
    backward: int
    waited: int = 0


class Operation(NamedTuple):
    """A part of a layer, by the name that recomputation knows it by; pairs are of the forward and of the backward.

    It multiplies `products` with weights and `scores` without, runs `flops` of fused attention in one kernel, and reads
    and writes `bytes` in `num_kernels` more. Until the backward it leaves `kept_bytes`, unless it is recomputed or lies
    `within` something that is. `output` is how many numbers a recomputation casts to 8 bits again. `by_second` is for
    recomputation of every second product: the share of its products that run again, and the bytes that stay.
    """

    name: str
    products: Sequence[Product] = ()
    scores: Sequence[Product] = ()
    flops: tuple[float, float] = (0.0, 0.0)
    bytes: tuple[float, float] = (0.0, 0.0)
    num_kernels: int = 0
    message: AxisMessage | None = None
    kept_bytes: float = 0.0
    within: str = ""
    output: float = 0.0
    by_second: tuple[float, float] | None = None

    def again(self, recomputed: Sequence[str]) -> float:
        """Return the share of its products that is computed again where these operations are.

        >>> up = Operation("feed-forward", by_second=(0.5, 8.0))
        >>> up.again(("norms",)), up.again(("norms", "every second product")), up.again(("feed-forward",))
        (0.0, 0.5, 1.0)
        """
        if self.repeats(recomputed):
            return 1.0
        return self.by_second[0] if self.by_second is not None and EVERY_SECOND in recomputed else 0.0

    def stays(self, recomputed: Sequence[str]) -> float:
        """Return the bytes that it keeps until the backward.

        >>> Operation("out", kept_bytes=2.0).stays(("norms",)), Operation("out", kept_bytes=2.0).stays(("out",))
        (2.0, 0.0)
        """
        if self.repeats(recomputed) or self.within in recomputed:
            return 0.0
        return self.by_second[1] if self.by_second is not None and EVERY_SECOND in recomputed else self.kept_bytes

    def repeats(self, recomputed: Sequence[str]) -> bool:
        """Whether it is computed again where these operations are.

        >>> Operation("input-norms").repeats(("norms", "activation")), Operation("norms").repeats(("input-norms",))
        (True, False)
        """
        return self.name in recomputed or PARTS.get(self.name) in recomputed


class Layer(NamedTuple):
    """A layer on one device: its operations, the bytes of its input, and the parameters that the device holds.

    All tokens use `parameters`; `expert_parameters` are those of experts that tokens are sent to. `known` remembers
    what it keeps.
    """

    operations: tuple[Operation, ...]
    input_bytes: float
    parameters: float
    expert_parameters: float = 0.0
    known: dict[tuple[str, ...], float] | None = None

    def kept_bytes(self, recomputed: tuple[str, ...]) -> float:
        """Return the bytes that it keeps for one microbatch, if these operations are computed again.

        >>> layer = Layer((Operation("out", kept_bytes=2.0), Operation("norms", kept_bytes=1.0)), 4.0, 0.0, known={})
        >>> layer.kept_bytes(()), layer.kept_bytes(("norms",)), layer.kept_bytes(("full",))
        (3.0, 2.0, 4.0)
        """
        if recomputed == WHOLE:
            return self.input_bytes
        known = {} if self.known is None else self.known
        if recomputed not in known:
            known[recomputed] = sum(operation.stays(recomputed) for operation in self.operations)
        return known[recomputed]


@lru_cache(maxsize=4096)
def layers_of(transformer: Transformer, share: Share) -> tuple[Layer, Layer]:
    """Return what a dense layer and a layer with experts do on one device.

    >>> gpt = Transformer("tiny", 1, hidden=64, num_heads=4, vocabulary=10, sequence=8)
    >>> [operation.name for operation in layers_of(gpt, Layout(batch=1).share)[0].operations]
    ['input-norms', 'sums', 'heads', 'attention', 'out', 'norms', 'feed-forward', 'activation']
    """
    return _layers(transformer, share.whatever_recomputed)


@lru_cache(maxsize=4096)
def _layers(transformer: Transformer, share: Share) -> tuple[Layer, Layer]:
    whole = transformer.whole_parameters
    every = (transformer.dense_layer_parameters, transformer.shared_parameters)
    dense, shared = ((count - whole) / share.tensor + whole for count in every)
    routed = transformer.expert_parameters / share.tensor
    size = WORD * wide_of(transformer, share)
    first = (*_between(transformer, share), *_projections(transformer, share), *_attention(transformer, share))
    layer = Layer(
        (*first, _norm("norms", transformer, share), *_feedforward(transformer, share)), size, dense, known={}
    )
    if (experts := transformer.experts) is None:
        return layer, layer
    routed *= experts.num_experts / share.expert
    norm = _norm("expert-norms", transformer, share)
    return layer, Layer((*first, norm, *_routed(transformer, share, experts)), size, shared, routed, {})


def fp8_weights(transformer: Transformer, layout: Layout, *, experts: bool) -> float:
    """Return how many weights of a layer a device casts to 8 bits.

    >>> gpt = Transformer("tiny", 1, hidden=64, num_heads=4, vocabulary=10, sequence=8)
    >>> fp8_weights(gpt, Layout(batch=1, tensor=2), experts=False) == 12 * 64**2 / 2
    True
    """
    operations = layers_of(transformer, layout.share)[experts].operations
    return sum(p.columns * p.depth * p.times for op in operations for p in op.products if p.fp8)


def product_weights(layer: Layer, *, experts: bool) -> list[tuple[float, float, float]]:
    """Return the inputs, the outputs and the number of all products with weights: of its experts, or of the rest.

    >>> gpt = Transformer("tiny", 1, hidden=64, num_heads=4, vocabulary=10, sequence=8)
    >>> product_weights(layers_of(gpt, Layout(batch=1).share)[0], experts=False)
    [(64, 192.0, 1.0), (64.0, 64, 1.0), (64, 256.0, 1.0), (256.0, 64, 1.0)]
    """
    operations = (operation for operation in layer.operations if (operation.name == "experts") is experts)
    return [(p.depth, p.columns, p.times) for operation in operations for p in operation.products]


def tokens_of(transformer: Transformer, share: Layout | Share) -> float:
    """Return how many tokens of a microbatch a device processes."""
    return share.microbatch * transformer.sequence / share.context


def wide_of(transformer: Transformer, share: Layout | Share) -> float:
    """Return how many numbers of a microbatch a device has between a layer's blocks."""
    along = share.tensor if share.sequence_parallel else 1
    return tokens_of(transformer, share) * transformer.hidden / along


def keys_of(transformer: Transformer, share: Layout | Share) -> float:
    """Return the width of keys and values on one tensor-parallel rank; if there are more ranks than heads, copies."""
    each = transformer.head_width + transformer.value_width
    return each * max(transformer.num_key_value_heads / share.tensor, 1.0)


def ring_bytes(transformer: Transformer, share: Layout | Share) -> float:
    """Return the bytes of keys and values of a microbatch's whole sequences, on one tensor-parallel rank."""
    return WORD * share.microbatch * transformer.sequence * keys_of(transformer, share)


def routed_bytes(transformer: Transformer, share: Layout | Share) -> float:
    """Return the bytes that a device sends to experts elsewhere, for one layer and direction."""
    if transformer.experts is None:
        return 0.0
    copies = WORD * transformer.experts.per_token * wide_of(transformer, share)
    return copies * (share.expert - 1) / share.expert


def _input_bytes(share: Share) -> float:
    """Return the bytes of a number that a product with weights keeps for the weights' gradient."""
    return 1.0 if share.practice.fp8 and share.practice.keeps_fp8_inputs else 2.0


def _between(transformer: Transformer, share: Share) -> list[Operation]:
    """Return what is between the blocks but for the second norm: one norm, and two sums with the residual.

    A sum reads two and writes one, and a mask of dropout is half a number. Latents have norms of their own, of which
    every tensor-parallel rank does all, in the kernels of what is around them.
    """
    wide, masks = wide_of(transformer, share), 1.0 if transformer.dropout else 0.0
    norms = [_norm("input-norms", transformer, share)]
    if transformer.latent is not None:
        latents = tokens_of(transformer, share) * transformer.latent.narrow
        norms.append(_normed("latent-norms", share, latents, latents, num_kernels=0))
    return [
        *norms,
        Operation(
            "sums",
            bytes=(WORD * (6 + masks) * wide, WORD * (6 + masks) * wide),
            num_kernels=6,
            message=exchange(transformer, share),
            kept_bytes=(4.0 + 2.0 * masks) * wide,
            # The layer's input stays, and the output of the last product, which is not needed.
            by_second=(0.5, 4.0 * wide),
        ),
    ]


def _norm(name: str, transformer: Transformer, share: Share) -> Operation:
    """Return the norm before a block."""
    wide, output = wide_of(transformer, share), tokens_of(transformer, share) * transformer.hidden
    return _normed(name, share, wide, output, num_kernels=1)


def _normed(name: str, share: Share, numbers: float, output: float, *, num_kernels: int) -> Operation:
    """Return a norm: it reads and writes, and backward reads two and writes one.

    Its output is kept, which is the input of products. Its input is kept by the sum before it.
    """
    moved = (WORD * 2 * numbers, WORD * 3 * numbers)
    if share.practice.eager:
        moved = (EAGER_NORM[0] * numbers, EAGER_NORM[1] * numbers)
    stays = _input_bytes(share) * numbers
    return Operation(name, bytes=moved, num_kernels=num_kernels, kept_bytes=stays, output=output)


def exchange(transformer: Transformer, share: Share) -> AxisMessage:
    """Return the exchange at the end of each of a layer's two blocks.

    In backward, each block exchanges the gradient of its input. Nothing else in the block waits for it, so it can be
    hidden. With sequence parallelism a block also begins with a gather that cannot be hidden, and gathers its stored
    input, which can.
    """
    ranks, size = share.tensor, WORD * tokens_of(transformer, share) * transformer.hidden
    waited = 1 if share.sequence_parallel else 0
    return AxisMessage("tensor", ranks, 1, size, 2 * size * (ranks - 1) / ranks, forward=2, backward=2, waited=waited)


def _projections(transformer: Transformer, share: Share) -> list[Operation]:
    """Return the projections to queries, keys and values, which are then rearranged.

    Latent attention projects down first. Every tensor-parallel rank does that for all tokens, with whole weights; the
    heads, and so the projections up to them and the output, are divided. Latents are kept as they enter their norms.
    """
    tokens, hidden = tokens_of(transformer, share), transformer.hidden
    width = transformer.num_heads * transformer.head_width / share.tensor + keys_of(transformer, share)
    rearranged = (WORD * 2 * tokens * width, WORD * 2 * tokens * width)
    if share.practice.eager and not transformer.learned_positions:
        rearranged = (EAGER_ROTATION * tokens * width, EAGER_ROTATION * tokens * width)
    if (latent := transformer.latent) is None:
        product = Product(tokens, width, hidden)
        keys = keys_of(transformer, share) / 2  # the second product of a layer gives keys
        saved = (keys / width, WORD * tokens * (width - keys))
        size = WORD * tokens * width
        return [Operation("heads", [product], bytes=rearranged, num_kernels=2, kept_bytes=size, by_second=saved)]
    down = [Product(tokens, outputs, inputs) for inputs, outputs in latent.down(hidden)]
    up = [Product(tokens, transformer.num_heads / share.tensor * each, inputs) for inputs, each in latent.up(hidden)]
    kept_bytes = WORD * tokens * (width - latent.rotary_head)
    return [
        Operation("latents", down, kept_bytes=WORD * tokens * (latent.narrow + latent.rotary_head)),
        Operation("projections", up, bytes=rearranged, num_kernels=2, kept_bytes=kept_bytes),
    ]


def _attention(transformer: Transformer, share: Share) -> list[Operation]:
    """Return attention itself, and the product after it.

    Scores are sums over the width of keys, outputs over that of values. Fused, backward computes the scores again, the
    gradients of queries and keys (three products as wide as keys), of scores and values (two as wide as values).
    """
    tokens, word = tokens_of(transformer, share), _input_bytes(share)
    heads, num_scored = transformer.num_heads / share.tensor, share.microbatch * transformer.num_heads / share.tensor
    rows, columns = transformer.sequence / share.context, transformer.sequence
    keys, values = transformer.head_width, transformer.value_width
    width = tokens * heads * values
    out = Product(tokens, transformer.hidden, heads * values)
    if share.practice.flash_attention:
        flops = 2.0 * num_scored * rows * columns * (keys + values) / 2
        back = (3 * keys + 2 * values) / (keys + values) * flops
        attention = Operation(
            "attention",
            flops=(flops, back),
            # One more: the first and the last piece of a sequence, so that all context-parallel ranks do as much.
            num_kernels=0 if share.context == 1 else 1,
            message=_ring(transformer, share),
            # The output, which the product after it may keep in 8 bits besides, and a 32-bit sum of exponentials a row.
            kept_bytes=(2.0 if word == 2.0 else 2.0 + word) * width + 4.0 * tokens * heads,
            output=width,
        )
        return [attention, Operation("out", [out], by_second=(1.0, 0.0))]
    size, masked = WORD * num_scored * rows * columns, 2.5 if transformer.dropout else 0.0
    attention = Operation(
        "attention",
        scores=[Product(rows, columns, keys, num_scored), Product(rows, values, columns, num_scored)],
        bytes=((2 + masked) * size, (3 + masked) * size),
        message=_ring(transformer, share),
        kept_bytes=(5.0 if transformer.dropout else 2.0) * tokens * heads * transformer.sequence,
        output=width,
    )
    return [attention, Operation("out", [out], kept_bytes=word * width)]


def _ring(transformer: Transformer, share: Share) -> AxisMessage:
    """Return the message with keys and values.

    Forward gathers them from all context-parallel ranks. Backward gathers them again, and sums and scatters their
    gradients. Latent attention sends keys and values of all heads, as frameworks do, not the latents.
    """
    ranks, size = share.context, ring_bytes(transformer, share)
    return AxisMessage("context", ranks, share.tensor, size, size * (ranks - 1) / ranks, forward=1, backward=2)


def _feedforward(transformer: Transformer, share: Share) -> list[Operation]:
    """Return the feed-forward block of a dense layer."""
    tokens, width = tokens_of(transformer, share), transformer.feedforward / share.tensor
    # Gated, the gate's product is kept and the other is not; otherwise the product down runs again, for nothing.
    saved = (1 / 3 if transformer.gated else 1 / 2, WORD * tokens * width)
    products, size = _up_down(transformer, tokens, width), _up_bytes(transformer) * tokens * width
    return [
        Operation("feed-forward", products, kept_bytes=size, by_second=saved),
        _activation(
            transformer, tokens * width, kept_bytes=_input_bytes(share) * tokens * width, eager=share.practice.eager
        ),
    ]


def _routed(transformer: Transformer, share: Share, experts: ExpertShape) -> list[Operation]:
    """Return the feed-forward block of a layer with experts: those that tokens are sent to, shared ones, the router.

    Tokens are spread evenly. A token is copied for every expert that it goes to, there and back.
    """
    tokens, word, width = tokens_of(transformer, share), _input_bytes(share), experts.feedforward / share.tensor
    local = experts.num_experts / share.expert
    shared, routed = (tokens * count * width for count in (experts.num_shared, experts.per_token))
    inputs = tokens * experts.per_token * transformer.hidden / share.tensor
    copies = WORD * 2.0 * experts.per_token * wide_of(transformer, share)
    sent = routed_bytes(transformer, share)
    operations = [
        Operation(
            "experts",
            _up_down(transformer, tokens * experts.per_token / local, width, local),
            message=AxisMessage("expert", share.expert, share.tensor, sent, sent, forward=2, backward=2),
            kept_bytes=word * inputs + _up_bytes(transformer) * routed,
        ),
        Operation("copies", bytes=(copies, copies)),
        Operation("router", [Product(tokens, experts.num_experts, transformer.hidden, fp8=False)]),
        _activation(transformer, routed, word * routed, name="expert-activation", within="experts"),
    ]
    if experts.num_shared:
        products = _up_down(transformer, tokens, experts.num_shared * width)
        operations.append(Operation("feed-forward", products, kept_bytes=_up_bytes(transformer) * shared))
        operations.append(_activation(transformer, shared, word * shared, num_kernels=0))
    return operations


def _activation(
    transformer: Transformer,
    inner: float,
    kept_bytes: float,
    *,
    name: str = "activation",
    num_kernels: int = 2,
    within: str = "",
    eager: bool = False,
) -> Operation:
    reads = 2 if transformer.gated else 1
    passes = WORD * (reads + 1) * inner, WORD * (2 * reads + 1) * inner
    if eager and transformer.gated:
        passes = EAGER_GATE[0] * inner, EAGER_GATE[1] * inner
    return Operation(name, bytes=passes, num_kernels=num_kernels, kept_bytes=kept_bytes, within=within, output=inner)


def _up_down(transformer: Transformer, tokens: float, width: float, times: float = 1.0) -> list[Product]:
    up = (2 if transformer.gated else 1) * width
    return [Product(tokens, up, transformer.hidden, times), Product(tokens, transformer.hidden, width, times)]


def _up_bytes(transformer: Transformer) -> float:
    """Return the bytes kept of the inputs of the activation, per number of its output."""
    return 4.0 if transformer.gated else 2.0
