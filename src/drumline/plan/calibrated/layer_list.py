"""What a layer of the plain model launches, forward and backward, as PyTorch's autograd runs it.

Letters for sizes: T tokens; hidden, q, kv, f numbers of a token: in the residual stream, all queries, all keys, and the
feed-forward block. A product is (rows, columns, depth of the sum). Names of tensors on the tape::

    x ── norm ── n1 ── q, k, v ── rotate ── qr, kr ── attention ── o ── a ── add ── h
    └──────────────────────────────────────────────────────────────────────────┘
    h ── norm ── n2 ── g, u ── s ── p ── d ── add ── y
    └───────────────────────────────────────────┘

With recomputation, the forward keeps x alone. The backward runs it again up to p: what comes after is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from drumline.plan.calibrated.step_tape import StepTape
from drumline.plan.cluster.transformer import Transformer

_SAVED = ("n1", "r1", "qr", "kr", "v", "o", "lse", "h", "n2", "r2", "g", "s", "u", "p")


@dataclass(frozen=True, slots=True)
class LayerList:
    """The list for one shape of layers. `fused_norms` is true where a norm is one kernel, as on GPUs."""

    shape: Transformer
    rows: int
    width: int  # bytes of a number
    fused_norms: bool

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        return self.rows * self.shape.sequence

    @property
    def queries(self) -> int:
        """The numbers of a token's queries."""
        return self.shape.num_heads * self.shape.head_width

    @property
    def keys(self) -> int:
        """The numbers of a token's keys."""
        return self.shape.num_key_value_heads * self.shape.head_width

    @property
    def repeats(self) -> bool:
        """Whether keys and values are repeated for the heads that share them: fused float32 attention needs it."""
        return self.width == 4 and self.keys < self.queries

    @property
    def attention(self) -> tuple[int, ...]:
        """The sizes of attention: rows, tokens, heads, heads of keys, width of a head."""
        shape = self.shape
        keys = shape.num_heads if self.repeats else shape.num_key_value_heads
        return self.rows, shape.sequence, shape.num_heads, keys, shape.head_width

    def bytes(self, numbers: int) -> int:
        """Return the bytes of so many numbers for each token."""
        return self.tokens * numbers * self.width

    def norm(self, tape: StepTape, out: str, root: str, *, keep: bool = True, again: bool = False) -> None:
        """Normalise the residual stream; `again` where something else holds its input, too."""
        size = self.bytes(self.shape.hidden)
        tape.new(**{root: 4 * self.tokens, out: size})
        if not self.fused_norms:
            wide = 4 * self.tokens * self.shape.hidden  # in bf16 it keeps its input as float32, and not as it was
            tape.new(**{f"{root}-wide": wide if self.width == 4 else 2 * wide - (0 if again else size)})
        tape.run("norm", self.tokens, self.shape.hidden)
        if not keep:
            tape.free(root)
            if not self.fused_norms:
                tape.free(f"{root}-wide")

    def norm_backward(self, tape: StepTape, gradient: str, root: str, towards: str) -> None:
        """Take a gradient back through a norm; frees it and what the norm kept, but not its input."""
        size = self.bytes(self.shape.hidden)
        if not self.fused_norms:  # a dozen kernels, with up to three more copies in float32
            tape.new(**{f"{root}-work": 3 * 4 * self.tokens * self.shape.hidden})
            tape.free(f"{root}-work", f"{root}-wide")
        tape.new(**{towards: size})
        self.weight(tape, root, self.shape.hidden)
        tape.run("norm-backward", self.tokens, self.shape.hidden)
        tape.free(gradient, root)

    def weight(self, tape: StepTape, name: str, numbers: int) -> None:
        """Keep a weight's gradient, in a step's end."""
        count = 0
        while tape.holds(f"grad-{name}-{count}"):
            count += 1
        tape.new(**{f"grad-{name}-{count}": numbers * self.width})

    def _linear(self, tape: StepTape, out: str, columns: int, depth: int) -> None:
        tape.new(**{out: self.bytes(columns)})
        tape.run("product", self.tokens, columns, depth)

    def _linear_backward(
        self, tape: StepTape, name: str, gradient: str, towards: str, columns: int, depth: int
    ) -> None:
        """Make the weight's gradient, then that of the input; the gradient of the output stays."""
        self.weight(tape, name, columns * depth)
        tape.run("product-weight", columns, depth, self.tokens)
        tape.new(**{towards: self.bytes(depth)})
        tape.run("product-input", self.tokens, depth, columns)

    def _rotate(self, tape: StepTape, name: str, out: str, numbers: int) -> None:
        size, count = self.bytes(numbers), self.tokens * numbers
        tape.new(cosine=size)
        tape.run("scale", count)
        tape.new(half=size // 2)
        tape.run("neg", count // 2)
        tape.new(turned=size)
        tape.run("cat", count)
        tape.free("half")
        tape.new(sine=size)
        tape.run("scale", count)
        tape.free("turned")
        tape.new(**{out: size})
        tape.run("add", count)
        tape.free("sine", "cosine", name)

    def _rotate_backward(self, tape: StepTape, gradient: str, towards: str, numbers: int) -> None:
        size, count = self.bytes(numbers), self.tokens * numbers
        tape.new(sine=size)
        tape.run("scale", count)
        tape.new(left=size)
        tape.run("fill", count)
        tape.run("copy", count // 2)
        tape.new(half=size // 2)
        tape.run("neg", count // 2)
        tape.free("sine")
        tape.new(right=size)
        tape.run("fill", count)
        tape.run("copy", count // 2)
        tape.free("half")
        tape.run("add", count)
        tape.free("right")
        tape.new(cosine=size)
        tape.run("scale", count)
        tape.free(gradient)
        tape.run("add", count)
        tape.free("cosine")
        tape.rename(left=towards)

    def forward(self, tape: StepTape, x: str, y: str, *, keep: bool, stop: bool = False) -> None:
        """Run the layer from `x` to `y`. `keep` holds what the backward needs; `stop` ends with the last of that."""
        shape, q, kv = self.shape, self.queries, self.keys
        self.norm(tape, "n1", "r1", keep=keep, again=stop or not keep)
        for name, columns in (("q", q), ("k", kv), ("v", kv)):
            self._linear(tape, name, columns, shape.hidden)
        self._rotate(tape, "q", "qr", q)
        self._rotate(tape, "k", "kr", kv)
        if self.repeats:
            for wide in ("kw", "vw"):
                tape.new(**{wide: self.bytes(q)})
                tape.run("repeat", self.tokens * q)
            tape.free("kr", "v")
            tape.rename(kw="kr", vw="v")
        tape.new(o=self.bytes(q), lse=4 * self.tokens * shape.num_heads)
        tape.run("attention", *self.attention)
        if not keep:
            tape.free("lse")
        self._linear(tape, "a", shape.hidden, q)
        if not keep:
            tape.free("n1", "qr", "kr", "v", "o")
        tape.new(h=self.bytes(shape.hidden))
        tape.run("add", self.tokens * shape.hidden)
        tape.free("a")
        self._feedforward(tape, y, keep=keep, stop=stop)

    def _feedforward(self, tape: StepTape, y: str, *, keep: bool, stop: bool) -> None:
        shape, numbers = self.shape, self.tokens * self.shape.feedforward
        self.norm(tape, "n2", "r2", keep=keep)
        self._linear(tape, "g", shape.feedforward, shape.hidden)
        tape.new(s=self.bytes(shape.feedforward))
        tape.run("silu", numbers)
        if not keep:
            tape.free("g")
        self._linear(tape, "u", shape.feedforward, shape.hidden)
        tape.new(p=self.bytes(shape.feedforward))
        tape.run("mul", numbers)
        if not keep:
            tape.free("s", "u")
        if stop:
            return
        self._linear(tape, "d", shape.hidden, shape.feedforward)
        if not keep:
            tape.free("p", "n2")
        tape.new(**{y: self.bytes(shape.hidden)})
        tape.run("add", self.tokens * shape.hidden)
        tape.free("d")
        if not keep:
            tape.free("h")

    def keep_for(self, tape: StepTape, number: int) -> None:
        """Name what a layer keeps after it, so that the next one can run."""
        tape.rename(**{name: f"{name}.{number}" for name in self._kept_names()})

    def take_back(self, tape: StepTape, number: int) -> None:
        """Undo `keep_for`."""
        tape.rename(**{f"{name}.{number}": name for name in self._kept_names()})

    def _kept_names(self) -> tuple[str, ...]:
        return _SAVED if self.fused_norms else (*_SAVED, "r1-wide", "r2-wide")

    def backward(self, tape: StepTape, gradient: str, x: str, towards: str) -> None:
        """Take a gradient back through the layer; frees it, what the layer kept, and `x`, its input."""
        shape, q, kv = self.shape, self.queries, self.keys
        numbers, hidden = self.tokens * shape.feedforward, self.tokens * shape.hidden
        self._linear_backward(tape, "down", gradient, "dp", shape.hidden, shape.feedforward)
        tape.free("p")
        tape.new(ds=self.bytes(shape.feedforward))
        tape.run("mul", numbers)
        tape.new(du=self.bytes(shape.feedforward))
        tape.run("mul", numbers)
        tape.free("dp", "s", "u")
        self._linear_backward(tape, "up", "du", "dn-up", shape.feedforward, shape.hidden)
        tape.free("du")
        tape.new(dg=self.bytes(shape.feedforward))
        tape.run("silu-backward", numbers)
        tape.free("ds", "g")
        self._linear_backward(tape, "gate", "dg", "dn-gate", shape.feedforward, shape.hidden)
        tape.free("dg", "n2")
        tape.new(dn2=self.bytes(shape.hidden))
        tape.run("add", hidden)
        tape.free("dn-up", "dn-gate")
        self.norm_backward(tape, "dn2", "r2", "dh")
        tape.free("h")
        tape.run("add", hidden)
        tape.free("dh")
        self._linear_backward(tape, "out", gradient, "do", shape.hidden, q)
        wide = q if self.repeats else kv
        tape.new(dq=self.bytes(q), dk=self.bytes(wide), dv=self.bytes(wide))
        tape.run("attention-backward", *self.attention)
        tape.free("do", "o", "lse", "qr", "kr", "v")
        if self.repeats:
            for name in ("dv", "dk"):
                tape.new(**{f"{name}-sum": self.bytes(kv)})
                tape.run("repeat-backward", self.tokens * q)
                tape.free(name)
                tape.rename(**{f"{name}-sum": name})
        self._rotate_backward(tape, "dk", "dkr", kv)
        self._rotate_backward(tape, "dq", "dqr", q)
        if self.repeats:
            self._packed(tape, "dv", kv)
        self._linear_backward(tape, "values", "dv", "dn-v", kv, shape.hidden)
        tape.free("dv")
        self._packed(tape, "dkr", kv)
        self._linear_backward(tape, "keys", "dkr", "dn-k", kv, shape.hidden)
        tape.free("dkr")
        tape.new(dn1=self.bytes(shape.hidden))
        tape.run("add", hidden)
        tape.free("dn-v", "dn-k")
        self._packed(tape, "dqr", q)
        self._linear_backward(tape, "queries", "dqr", "dn-q", q, shape.hidden)
        tape.free("dqr", "n1")
        tape.run("add", hidden)
        tape.free("dn-q")
        self.norm_backward(tape, "dn1", "r1", "dx")
        tape.free(x)
        tape.run("add", hidden)
        tape.free("dx")
        tape.rename(**{gradient: towards})

    def _packed(self, tape: StepTape, name: str, numbers: int) -> None:
        """Copy a gradient from the order of heads into that of tokens."""
        tape.new(packed=self.bytes(numbers))
        tape.run("copy", self.tokens * numbers)
        tape.free(name)
        tape.rename(packed=name)
