"""What the runtime refuses that no good model or batch asks for, each with what it names."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from drumline.channel.distributed import DistributedChannel, _DistributedEdge, _SentMessage
from drumline.channel.lines.slices import Slice
from drumline.channel.shared_memory import SharedMemoryChannel
from drumline.core.action import Action
from drumline.core.errors import DrumlineError
from drumline.core.program import Program
from drumline.features.mesh.tensor.divide import DividedModule, _check, _fitting, _own_styles
from drumline.features.mesh.tensor.exchanges import LayerExchanges, rotary_width
from drumline.features.mesh.tensor.layers import TensorParallel
from drumline.features.mesh.tensor.sequence import SequenceLayers, _changed
from drumline.features.stream.rows import StreamRows
from drumline.model.block import Block
from drumline.model.layers.moe import MoE
from drumline.model.layers.styles import Colwise, PlainStyle, Rowwise, StylePlan, style_named
from drumline.model.loss.counts import weighed
from drumline.runtime.backward import compiled
from drumline.runtime.batch import cut as cut_batch
from drumline.runtime.batch import num_rows
from refused import refused, saying

pytestmark = [pytest.mark.torch, pytest.mark.features("mesh", "stream")]

CPU = torch.device("cpu")
ONES = torch.ones(4, 3)


class Part(nn.Module):
    """A divided module, with a parameter besides its layers if asked for."""

    def __init__(self, *, scaled: bool = False, heads: int = 2) -> None:
        super().__init__()
        self.up, self.down, self.num_heads = nn.Linear(8, 8), nn.Linear(8, 8), heads
        self.scale = nn.Parameter(torch.ones(1)) if scaled else None


def sequenced(inside: nn.Module, *styles: Any) -> SequenceLayers:
    layer = nn.Module()
    layer.part = inside
    found = [
        DividedModule(f"part.{at}", child, style, inside)
        for at, (child, style) in enumerate(zip(inside.children(), styles, strict=False))
    ]
    return SequenceLayers(SimpleNamespace(), found, [Block("layer", layer)])  # type: ignore[arg-type]


def divided(module: nn.Module, style: Any, parent: nn.Module | None = None) -> DividedModule:
    return DividedModule("one", module, style, Part() if parent is None else parent)


def parametrized() -> nn.Module:
    made: nn.Module = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    return made


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: cut_batch({"a": ONES, "b": torch.ones(4, 1)}, 2, split={"b": 1}),
            saying(r"the shape \(4, 1\), and split says that its rows are its dimension 1", expected="4 rows there"),
        ),
        (lambda: cut_batch({"a": ONES, "b": ONES}, 2, split={"b": 2}), saying("dimension 2, which it lacks")),
        (lambda: cut_batch((ONES,), 2, split={5: 0}), saying("split names argument 5", expected="one of 0")),
        (lambda: num_rows({"a": 3}), saying("the batch contains no tensor")),
        (
            lambda: weighed([[0.0], [0.0]], [1, 1]),
            saying(r"loss weights are \[0.0, 0.0\]", expected="not all of them 0"),
        ),
        (lambda: weighed([[1.0], [-2.0]], [1, 1]), saying(r"loss weights are \[1.0, -2.0\]")),
        (lambda: MoE(8, 16, 4, top_k=0), saying("top_k is 0", expected="1 to 4")),
        (lambda: MoE(8, 16, 4, top_k=5), saying("top_k is 5", expected="1 to 4")),
        (lambda: MoE(8, 16, 4, capacity=0.0), saying("capacity is 0.0", expected="above 0")),
        (
            lambda: MoE(8, 16, 4)(torch.ones(2, 7)),
            saying(r"gets a tensor of shape \(2, 7\)", expected="^8 "),
        ),
        (
            lambda: Slice("tp", 0, parts=2).local(torch.ones(6), 0, 2),
            saying(r"\(6,\) is divided by 2 \(tp\) along dimension 0"),
        ),
        (lambda: SharedMemoryChannel(0, 1, num_slots=0), saying("num_slots is 0", expected="1 to 256")),
        (lambda: SharedMemoryChannel(0, 1, num_slots=257), saying("num_slots is 257", expected="1 to 256")),
        (lambda: style_named("*", "ep_router"), saying(fix="leave experts out")),
        (lambda: style_named("*", "colwize"), saying(fix=r"did you mean colwise\?")),
        (
            lambda: style_named("*", Colwise(parts=0)),
            saying(r"gives '\*' parts=0", expected="an integer of at least 1"),
        ),
        (lambda: style_named("*", Colwise(parts=True)), saying("parts=True")),
        (lambda: style_named("*", 3), saying(r"gives '\*' the style 3")),
        (lambda: StylePlan.of({}, None), saying(r"tensor_parallel is \{\}", expected="a dict")),
        (lambda: StylePlan.of({3: "colwise"}, None), saying(r"tensor_parallel is \{3: 'colwise'\}")),
        (lambda: StylePlan.of("colwise", None), saying("tensor_parallel is 'colwise'")),
        (lambda: _fitting("e", nn.Embedding(4, 4), Colwise()), saying("divides the embedding e by columns")),
        (
            lambda: _fitting("e", nn.Embedding(4, 4, max_norm=1.0), PlainStyle.VOCABULARY),
            saying("the embedding e, which has max_norm"),
        ),
        (
            lambda: _fitting("e", nn.Embedding(4, 4, sparse=True), PlainStyle.VOCABULARY),
            saying("the embedding e, which has max_norm"),
        ),
        (lambda: _fitting("n", nn.LayerNorm(4), Colwise()), saying("divides n, a LayerNorm, as")),
        (lambda: _fitting("n", nn.Linear(4, 4), PlainStyle.VOCABULARY), saying("divides n, a Linear, as")),
        (
            lambda: _fitting("n", parametrized(), Colwise()),
            saying(r"whose weight is computed from others \(a parametrization\)"),
        ),
        (
            lambda: _own_styles(StylePlan(()), "n", nn.Linear(4, 4)),
            saying("n as stacked experts, and gives n.weight no style"),
        ),
        (
            lambda: _check(divided(nn.Linear(4, 6), Colwise()), 4),
            saying(r"one.weight of shape \(6, 4\) is divided by 4 \(tp\)"),
        ),
        (
            lambda: _check(divided(nn.Linear(4, 4), Colwise(), nn.MultiheadAttention(4, 2)), 2),
            saying("inside an nn.MultiheadAttention, which uses its weights itself"),
        ),
        (
            lambda: _check(divided(nn.Linear(8, 8), Colwise(), Part(heads=3)), 2),
            saying("Part.num_heads is 3, and tp is 2"),
        ),
        (
            lambda: rotary_width(divided(nn.Linear(4, 4), Colwise())),
            saying("style latent, and Part has no qk_rope_head_dim"),
        ),
        (
            lambda: sequenced(Part(), PlainStyle.STACKED),
            saying("tp divides the experts part.0, which would see a part of the rows"),
        ),
        (
            lambda: sequenced(Part(), Colwise()),
            saying("no block has its colwise and rowwise layers in a separate module"),
        ),
        (
            lambda: sequenced(Part(scaled=True), Colwise(), Rowwise()),
            saying("Part has scale besides its divided layers"),
        ),
        (lambda: _changed((1,), {"a": 2}, None), saying("a layer takes no tensor")),
        (lambda: _changed((ONES,), {}, None), saying(r"a layer takes a tensor of shape \(4, 3\)")),
        (
            lambda: _changed((torch.ones(2, 2, 2).long(),), {}, None),
            saying(r"a layer takes a tensor of shape \(2, 2, 2\)"),
        ),
    ],
)
def test_what_cannot_be_run_is_refused(make: Callable[[], Any], said: dict[str, str]) -> None:
    with refused(DrumlineError, **said):
        make()


def test_layers_that_may_be_in_parts_are_taken() -> None:
    taken = sequenced(Part(), Colwise(), Rowwise())
    assert [type(region) for region in taken.regions] == [Part]
    args, kwargs = _changed((1, torch.ones(2, 2, 2)), {"a": 2}, lambda value: value.shape)
    assert (args, kwargs) == ((1, (2, 2, 2)), {"a": 2})
    args, kwargs = _changed((), {"mask": ONES, "hidden_states": torch.ones(2, 2, 2)}, lambda value: value.shape)
    assert kwargs["hidden_states"] == (2, 2, 2)
    assert _fitting("e", nn.Embedding(4, 4), PlainStyle.WHOLE) == PlainStyle.WHOLE
    _check(divided(nn.Linear(4, 8), Colwise(), Part(heads=4)), 4)


@pytest.mark.parametrize(
    ("module", "style", "attribute", "here"),
    [
        (nn.Linear(6, 8), Colwise(), "out_features", 4),
        (nn.Linear(8, 6), Rowwise(), "in_features", 4),
        (nn.Embedding(5, 8), Colwise(gather=True), "embedding_dim", 4),
    ],
)
def test_divided_layers_tell_the_sizes_that_they_have(module: nn.Module, style: Any, attribute: str, here: int) -> None:
    value: Any = TensorParallel.__new__(TensorParallel)
    value.axes, value._entries = SimpleNamespace(size=lambda _: 2, place=lambda _: 0), []
    value.exchanges = LayerExchanges(value.axes, ())
    value._attach(DividedModule("one", module, style, nn.Module()), lambda hook: hook)
    assert getattr(module, attribute) == here
    assert value._entries[0][1:] == (attribute, 8)


def test_a_row_of_several_stages_is_no_stream() -> None:
    def build(steps: int) -> Program:
        row = ",".join(f"{stage}F{at},{stage}B{at}" for at in range(steps) for stage in (0, 1))
        return Program.parse(row)

    with refused(DrumlineError, "rank 0's row of .* has several stages", expected="one stage per rank"):
        StreamRows.of(build, 1)


def test_a_missing_header_or_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpp_builder: Any = SimpleNamespace(get_cpp_compiler=lambda: "g++")
    monkeypatch.setitem(sys.modules, "torch._inductor.cpp_builder", cpp_builder)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert compiled.missing_tool(CPU) == f"Python's headers ({tmp_path / 'Python.h'})"
    (tmp_path / "Python.h").touch()
    assert compiled.missing_tool(CPU) == ""

    def none() -> str:
        raise RuntimeError("no compiler")

    cpp_builder.get_cpp_compiler = none
    assert compiled.missing_tool(CPU) == "a C++ compiler (g++, or what CXX names)"


def test_a_message_that_has_arrived_is_forgotten_when_the_next_is_sent() -> None:
    """Otherwise the memory of all messages of a step stays until somebody looks."""
    layout = SimpleNamespace(room=8, number=0, packed=lambda tensors, at: torch.zeros(8, dtype=torch.uint8))
    channel: Any = DistributedChannel.__new__(DistributedChannel)
    channel._edges, channel._layouts = {1: _DistributedEdge()}, {1: SimpleNamespace(find=lambda tensors, form: layout)}
    channel._at, channel._small_bytes, channel._by_host = CPU, 64, False  # as with NCCL
    ended, open_ = (SimpleNamespace(is_completed=lambda item=flag: item) for flag in (True, False))
    flat = torch.zeros(1)
    channel._edges[1].under_way |= {7: _SentMessage(b"a", flat, ended), 8: _SentMessage(b"b", flat, open_)}  # type: ignore[arg-type]
    names = {"now": lambda: 0, "_key": lambda receive: b"k" * 8, "send_packet": lambda *_: None}
    for name, value in (names | {"_tell_layout": lambda *_: None}).items():
        channel.__dict__[name] = value
    channel.send(Action.parse("1RECV_F0"), 1, [ONES], None)
    assert list(channel._edges[1].under_way) == [8]
