"""A transformer as numbers; they determine what a layer multiplies, keeps and sends.

Its `Details` identify the exact model, but affect neither seconds nor bytes. Launching a plan needs them: given
only the sizes, a framework would train a different model.

This file also counts the parameters of each part, and the operations of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from drumline.core.errors import PlanError, nearest
from drumline.plan.cluster.frozen_base import FrozenBase
from drumline.plan.cluster.hardware import HashedOnce


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention through narrow projections (MLA): their widths, and those of a head with and without positions.

    A token is projected down to a latent for queries and one for keys and values. Each is normalised, and projected up
    to all heads. Positions enter through a part of each head's query and through one key that all heads share.
    `queries` is 0 if queries are projected directly.

    >>> LatentAttention(queries=1536, keys_values=512, head=128, rotary_head=64, value_head=128).scored
    192
    """

    queries: int
    keys_values: int
    head: int
    rotary_head: int
    value_head: int

    def __post_init__(self) -> None:
        if self.queries < 0 or min(self.keys_values, self.head, self.rotary_head, self.value_head) < 1:
            raise PlanError(
                f"latent attention has the widths {self.queries}, {self.keys_values}, {self.head}, "
                f"{self.rotary_head}, {self.value_head}",
                expected="widths of 1 or more; 0 for queries that are projected directly",
            )

    @property
    def scored(self) -> int:
        """The width of a head's queries and keys."""
        return self.head + self.rotary_head

    @property
    def narrow(self) -> int:
        """The numbers of a token that are normalised and projected up: both latents."""
        return self.queries + self.keys_values

    def down(self, hidden: int) -> list[tuple[int, int]]:
        """Return the inputs and outputs of every projection to a latent, the shared key's with that of keys and values.

        >>> LatentAttention(1536, 512, 128, 64, 128).down(7168)
        [(7168, 1536), (7168, 576)]
        """
        queries = [(hidden, self.queries)] if self.queries else []
        return [*queries, (hidden, self.keys_values + self.rotary_head)]

    def up(self, hidden: int) -> list[tuple[int, int]]:
        """Return the inputs of every projection to the heads, with the outputs of one head: queries, keys and values.

        >>> LatentAttention(1536, 512, 128, 64, 128).up(7168)
        [(1536, 192), (512, 256)]
        """
        return [(self.queries or hidden, self.scored), (self.keys_values, self.head + self.value_head)]

    def __str__(self) -> str:
        narrow = f"queries through {self.queries}, " if self.queries else ""
        return (
            f"latent attention ({narrow}keys and values through {self.keys_values}; heads of {self.head} + "
            f"{self.rotary_head} rotary, values of {self.value_head})"
        )


@dataclass(frozen=True, slots=True)
class Details:
    """Attention, positions and biases, beyond sizes; `others` has a phrase for everything without a field here.

    `rotary_base` is 0 if unknown. `alibi` models have neither learned nor rotary positions. `qk_norm` models normalise
    queries and keys of every head; `qkv_bias` models add a bias only to queries, keys and values. `norm` is the kind of
    all norms (`NORMS`), empty if unknown, and `norm_epsilon` what they add, 0 if unknown. `activation` is empty for the
    usual one: SiLU in gated layers, GELU in others; "relu2" is the square of ReLU.
    """

    alibi: bool = False
    rotary_base: float = 0.0
    qk_norm: bool = False
    qkv_bias: bool = False
    norm: str = ""
    norm_epsilon: float = 0.0
    activation: str = ""
    others: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, known in (("norm", NORMS), ("activation", ACTIVATIONS)):
            if (value := getattr(self, name)) and value not in known:
                raise PlanError(f"{name} is {value!r}", fix=nearest(value, known))


NORMS = ("LayerNorm", "LayerNorm1P", "RMSNorm")  # 1P: its weight is 1 more than the parameter
ACTIVATIONS = ("relu2",)
PLAIN = Details()


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The experts of a layer: `num_experts`, of which each token uses `per_token`, and `num_shared` that all use."""

    num_experts: int
    per_token: int
    feedforward: int
    num_shared: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.num_experts:
            raise PlanError(f"a token uses {self.per_token} of {self.num_experts} experts", expected="1 to all of them")
        if self.feedforward < 1 or self.num_shared < 0:
            raise PlanError(
                f"experts have width {self.feedforward}, with {self.num_shared} shared",
                expected="a width of 1 or more, and a count of 0 or more",
            )


@dataclass(frozen=True, slots=True)
class Transformer(HashedOnce):
    """A decoder of `num_layers` equal layers between an embedding and a head.

    `head_width` is the width of a head's queries and keys. With `latent` attention it follows from the latter's widths,
    and every head has its own keys and values.

    `feedforward` is the inner width of the dense layers; `gated` layers multiply two such projections. With `experts`,
    the layers from `num_dense_layers` on have experts instead. `biased` layers add a bias after every product, and
    `dropout` keeps a mask everywhere it applies. `details` is what a framework must know besides sizes. With a
    `frozen_base`, nothing but adapters trains.

    >>> gpt = Transformer("175B", num_layers=96, hidden=12288, num_heads=96, vocabulary=51200, sequence=2048)
    >>> gpt.feedforward, gpt.head_width
    (49152, 128)
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    vocabulary: int
    sequence: int
    num_key_value_heads: int = 0
    feedforward: int = 0
    gated: bool = False
    tied: bool = True
    learned_positions: bool = True
    experts: ExpertShape | None = None
    num_dense_layers: int = 0
    head_width: int = 0
    biased: bool = True
    dropout: bool = True
    latent: LatentAttention | None = None
    details: Details = PLAIN
    frozen_base: FrozenBase | None = None

    __hash__ = HashedOnce.__hash__

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden", "num_heads", "vocabulary", "sequence"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} of {self.name} is {getattr(self, name)}", expected="1 or more")
        for name in ("num_key_value_heads", "feedforward", "head_width", "num_dense_layers"):
            if getattr(self, name) < 0:
                raise PlanError(f"{name} of {self.name} is {getattr(self, name)}", expected="0 or more")
        if not self.feedforward:
            object.__setattr__(self, "feedforward", 4 * self.hidden)
        if self.latent is not None:
            object.__setattr__(self, "num_key_value_heads", self.num_heads)
            object.__setattr__(self, "head_width", self.latent.scored)
        if not self.num_key_value_heads:
            object.__setattr__(self, "num_key_value_heads", self.num_heads)
        if self.num_heads % self.num_key_value_heads:
            raise PlanError(
                f"{self.num_heads} heads of {self.name} cannot share {self.num_key_value_heads} keys and values",
                expected="a number of key and value heads that divides the heads",
            )
        if not self.head_width:
            object.__setattr__(self, "head_width", max(self.hidden // self.num_heads, 1))
        if self.experts is None:
            object.__setattr__(self, "num_dense_layers", self.num_layers)
        elif self.num_dense_layers > self.num_layers:
            raise PlanError(
                f"{self.name} has {self.num_dense_layers} dense layers of {self.num_layers}", expected="at most all"
            )

    @property
    def value_width(self) -> int:
        """The width of a head's values."""
        return self.latent.value_head if self.latent else self.head_width

    @property
    def attention_weights(self) -> int:
        """The weights of attention that a token is multiplied with in a layer.

        DeepSeek-V3: 7168 x 1536 + 1536 x 128 x 192 for queries; 7168 x 576 + 512 x 128 x 256 for keys and values; 128 x
        128 x 7168 for the output.

        >>> latent = LatentAttention(queries=1536, keys_values=512, head=128, rotary_head=64, value_head=128)
        >>> Transformer("v3", 61, 7168, 128, vocabulary=129280, sequence=4096, latent=latent).attention_weights
        187105280
        """
        if (latent := self.latent) is not None:
            up = sum(number * each for number, each in latent.up(self.hidden))
            return self._weights_down + self.num_heads * (up + self.value_width * self.hidden)
        return self.hidden * (self.head_width + self.value_width) * (self.num_heads + self.num_key_value_heads)

    @property
    def attention_parameters(self) -> int:
        """The parameters of a layer's attention, including its normalisation."""
        outputs = self.num_heads * self.head_width + 2 * self.num_key_value_heads * self.head_width
        if (latent := self.latent) is not None:
            outputs = self.num_heads * sum(each for _, each in latent.up(self.hidden))
        divided = self.attention_weights - self._weights_down + (outputs + self.hidden if self.biased else 0)
        return divided + self._norm + self.whole_parameters

    @property
    def whole_parameters(self) -> int:
        """The parameters of a layer that no tensor-parallel rank divides: projections to latents, and their norms."""
        if self.latent is None:
            return 0
        biases = self.latent.narrow + self.latent.rotary_head if self.biased else 0
        return self._weights_down + biases + (2 if self.biased else 1) * self.latent.narrow

    @property
    def _weights_down(self) -> int:
        return sum(number * outputs for number, outputs in self.latent.down(self.hidden)) if self.latent else 0

    def feedforward_parameters(self, width: int) -> int:
        """Return the parameters of a feed-forward block of this inner width, without its normalisation."""
        biases = width + self.hidden if self.biased else 0
        return (3 if self.gated else 2) * self.hidden * width + biases

    @property
    def dense_layer_parameters(self) -> int:
        """The parameters of a layer without experts.

        >>> Transformer("gpt", 1, hidden=64, num_heads=4, vocabulary=10, sequence=8).dense_layer_parameters
        49984
        """
        return self.attention_parameters + self.feedforward_parameters(self.feedforward) + self._norm

    @property
    def shared_parameters(self) -> int:
        """The parameters of a layer with experts that every token uses: attention, router, shared experts; or 0."""
        if self.experts is None:
            return 0
        beside = self.hidden * self.experts.num_experts + self.experts.num_shared * self.expert_parameters
        return self.attention_parameters + self._norm + beside

    @property
    def expert_parameters(self) -> int:
        """The parameters of one expert, or 0."""
        return self.feedforward_parameters(self.experts.feedforward) if self.experts else 0

    @property
    def embedding_parameters(self) -> int:
        """The parameters before the first layer."""
        return self.hidden * (self.vocabulary + (self.sequence if self.learned_positions else 0))

    @property
    def head_parameters(self) -> int:
        """The parameters after the last layer; a tied table counts here only if it is a copy."""
        return self.hidden * self.vocabulary + self._norm

    @property
    def _norm(self) -> int:
        return (2 if self.biased else 1) * self.hidden


def model_flops(transformer: Transformer, batch: int, *, causal: bool = False) -> float:
    """Return the operations of a step: per weight and token two forward and four backward, plus attention.

    Attention counts as if every token attended to every other, as in most papers; `causal` counts only the half that
    is not masked. A frozen weight has two operations backward, and its share of adapters has all six.

    >>> gpt = Transformer("175B", num_layers=96, hidden=12288, num_heads=96, vocabulary=51200, sequence=2048)
    >>> h, l, s, v = 12288, 96, 2048, 51200
    >>> round(model_flops(gpt, 1) / (72 * s * l * h**2 * (1 + s / 6 / h + v / 12 / l / h)), 6)
    1.0
    """
    attention = attention_flops(transformer, batch) / (2 if causal else 1)
    tokens, layers = batch * transformer.sequence, layer_weights(transformer)
    head = transformer.hidden * transformer.vocabulary
    if (base := transformer.frozen_base) is not None:
        return 3 * attention + 2.0 * tokens * (2 * (layers + head) + 3 * base.trainable_share * layers)
    return 3 * (attention + 2.0 * tokens * (layers + head))


def attention_flops(transformer: Transformer, batch: int) -> float:
    """Return the operations of attention itself in one forward: scores, and their products with the values."""
    width = transformer.num_heads * (transformer.head_width + transformer.value_width)
    return 2.0 * batch * transformer.sequence**2 * width * transformer.num_layers


def layer_weights(transformer: Transformer) -> float:
    """Return the number of weights in all layers that a token is multiplied with."""
    inner = float(transformer.num_dense_layers * transformer.feedforward)
    if (experts := transformer.experts) is not None:
        each = (experts.per_token + experts.num_shared) * experts.feedforward
        inner += (transformer.num_layers - transformer.num_dense_layers) * each
    kinds = 3 if transformer.gated else 2
    return float(transformer.num_layers * transformer.attention_weights) + transformer.hidden * kinds * inner
