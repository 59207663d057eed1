"""Slices of sequences: the gradients of one process, whatever the model, the schedule and the slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from drumline.core.errors import BatchError, DrumlineError, ModelError, ProgramError, ScheduleError
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.slices.row_bytes import peak_bytes
from drumline.features.slices.attention import SliceMemory, attend
from drumline.features.slices.kernels import FLASH, ON_CPU, PLAIN, kernel_for
from drumline.schedules import generate
from drumline.schedules.slices import sliced
from extras import needed
from matrices import chosen, left, long, mainly
from refused import refused
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.features("slices")]
transformers: Any = needed("transformers", extra="hf")

WORDS, WIDTH, LENGTH, ROWS = 32, 16, 24, 4
Division = int | Sequence[int]
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": LENGTH, "use_cache": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "n_inner": 2 * WIDTH}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "GPT2": {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "Qwen2": {"num_key_value_heads": 2},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": None},
    "Gemma": {"num_key_value_heads": 1, "head_dim": 8},
    "Phi": {"num_key_value_heads": 4},
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH, "dropout": 0.0},
}
SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1")
DIVISIONS: tuple[Division, ...] = (2, 3, 8, (10, 9, 5))
BOUNDS = {torch.float32: 5e-6, torch.float64: 1e-10}


class OwnNorm(nn.Module):
    """The norm of Gemma in the dtype of its input: its own adds up gradients of its weight in float32."""

    eps: float
    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        size: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return size * (1.0 + self.weight)


def made(family: str, dtype: torch.dtype = torch.float64, **settings: Any) -> nn.Module:
    """Return a small model of a family, the same each time; large weights, so that attention matters."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES.get(family, {}), **settings})
    config._attn_implementation = settings.get("attn_implementation", "sdpa")
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    make: Callable[..., nn.Module] = getattr(transformers, f"{family}{head}")
    model = make(config).to(dtype).train()
    for module in model.modules():
        if isinstance(module, transformers.models.gemma.modeling_gemma.GemmaRMSNorm):
            module.__class__ = OwnNorm
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(4.0)
    return model


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def batch() -> tuple[Tensor, Tensor]:
    """Return tokens and the tokens after them; labels that do not count are spread unevenly."""
    text = torch.randint(3, WORDS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    target = text[:, 1:].clone()
    target[0, 2:7] = target[1, -4:] = -100
    return text[:, :-1], target


def plain(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients of one process, which has whole sequences."""
    x, target = batch()
    loss = loss_fn(model(input_ids=x), target)
    torch.autograd.backward(loss)
    return loss.detach(), {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def piped(model: nn.Module, slices: Division, **settings: Any) -> dl.Pipeline:
    how: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": 2, "balance": "parameters", "record": False}
    if "mesh" not in settings:
        how |= {"num_ranks": 2, "transport": "in-process"}
    return dl.Pipeline(model, loss_fn=loss_fn, slices=slices, **{**how, **settings})


def stepped(model: nn.Module, slices: Division, **settings: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradients of this process after a second step, which follows an update of size 0."""
    x, target = batch()
    with piped(model, slices, **settings) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.0)
        assert pipe.step(input_ids=x, target=target).loss is not None
        optimizer.step()
        optimizer.zero_grad()
        loss = pipe.step(input_ids=x, target=target).loss
        assert loss is not None
        return loss, {name: param.grad.clone() for name, param in pipe.named_parameters() if param.grad is not None}


def compare(found: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]], bound: float) -> None:
    assert found[0].item() == pytest.approx(wanted[0].item(), rel=bound)
    assert found[1].keys() == wanted[1].keys()
    largest = max(float(gradient.abs().max()) for gradient in wanted[1].values())
    for name, gradient in some(wanted[1].items()):
        assert float((found[1][name] - gradient).abs().max()) <= bound * max(largest, 1.0), name


CASES = chosen(FAMILIES, SCHEDULES, DIVISIONS, BOUNDS, times=1)
LATER = ("Qwen2", "Mistral", "GPTNeoX")  # like Llama in what slices have to do with


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "schedule", "slices", "dtype"),
    [*(case for case in CASES if case[0] not in LATER), *left(*(case for case in CASES if case[0] in LATER))],
)
def test_gradients_are_those_of_one_process(family: str, schedule: str, slices: Division, dtype: torch.dtype) -> None:
    deep = deep_enough(family, schedule)
    wanted = plain(made(family, dtype, **deep))
    found = stepped(made(family, dtype, **deep), slices, schedule=schedule)
    compare(found, wanted, BOUNDS[dtype])


def deep_enough(family: str, schedule: str) -> dict[str, int]:
    """Return how many layers a model has, if a schedule needs more than two."""
    return {"n_layer" if family == "GPT2" else "num_hidden_layers": 4} if schedule == "interleaved-1f1b" else {}


def _of_ranks(cases: Sequence[tuple[str, str, Division, torch.dtype]]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return loss and gradients of a rank's own stages in each case."""
    own = {"num_ranks": None, "transport": "auto", "timeout": 120.0}
    return [
        stepped(made(family, dtype, **deep_enough(family, schedule)), slices, schedule=schedule, **own)
        for family, schedule, slices, dtype in cases
    ]


@long
def test_two_ranks_give_the_gradients_of_one_process() -> None:
    ranks = dl.launch(_of_ranks, CASES, num_ranks=2)
    for at, (family, schedule, _, dtype) in enumerate(some(CASES)):
        wanted = plain(made(family, dtype, **deep_enough(family, schedule)))
        gradients: dict[str, Tensor] = {}
        for _, own in (rank[at] for rank in ranks):  # what both hold is summed there
            gradients |= own
        compare((ranks[0][at][0], gradients), wanted, BOUNDS[dtype])


DROPOUT: dict[str, dict[str, Any]] = {
    "GPT2": {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.3},
    "OPT": {"dropout": 0.2, "attention_dropout": 0.3},
}


@pytest.mark.slow
@mainly("family", "OPT", "GPT2")
def test_dropout_draws_the_same_numbers_whatever_the_slices_and_when_recomputed(family: str) -> None:
    wanted = stepped(made(family, **DROPOUT[family]), 1, check_model=False)
    compare(stepped(made(family, **DROPOUT[family]), (10, 9, 5)), wanted, 1e-10)
    compare(stepped(made(family, **DROPOUT[family]), 4, checkpoint="full", schedule="zb-h1"), wanted, 1e-10)
    without = stepped(made(family), 1, check_model=False)
    largest = max(float((gradient - without[1][name]).abs().max()) for name, gradient in wanted[1].items())
    assert largest > 1e-4


@pytest.mark.slow
def test_frozen_parts_and_evaluations_leave_nothing_behind() -> None:
    model, whole = made("Llama"), made("Llama")
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(("model.embed_tokens", "model.layers.0.")))
    x, target = batch()
    wanted = plain(whole)[1]
    with piped(model, 4) as pipe:
        loss = pipe.eval_step(input_ids=x, target=target, outputs=False).loss
        assert loss is not None
        trained = pipe.step(input_ids=x, target=target).loss
        assert trained is not None
        assert trained.item() == pytest.approx(loss.item(), rel=1e-12)
        found = {name: param.grad for name, param in pipe.named_parameters() if param.grad is not None}
        assert found
        assert not any(name.startswith(("model.embed_tokens", "model.layers.0.")) for name in found)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-10, atol=1e-12)


@long
def test_blocks_are_timed_on_whole_sequences() -> None:
    x, target = batch()
    example = {"input_ids": x}
    with piped(made("Llama"), 4, balance="auto", example=example, example_target=target) as pipe:
        assert pipe.balance is not None
        assert pipe.step(input_ids=x, target=target).loss is not None


# ---- attention -----------------------------------------------------------------------------------------------------


def whole_attention(query: Tensor, key: Tensor, value: Tensor, noise: Tensor | None) -> Tensor:
    """Return causal attention by its formula."""
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    future = torch.ones(query.shape[-2], query.shape[-2], dtype=torch.bool).triu(1)
    weights = (query @ key.mT / 3.0).masked_fill(future, -torch.inf).softmax(-1)
    return (weights if noise is None else weights * noise) @ value


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("noisy", [False, True])
def test_slices_attend_as_whole_sequences_do(heads: int, noisy: bool) -> None:
    torch.manual_seed(0)
    parts = [5, 1, 4, 2]
    whole = [torch.randn(2, each, 12, 8, dtype=torch.float64, requires_grad=True) for each in (4, heads, heads)]
    noise = functional.dropout(torch.ones(2, 4, 12, 12, dtype=torch.float64), 0.3) if noisy else None
    wanted = whole_attention(whole[0], whole[1], whole[2], noise)
    towards = torch.randn_like(wanted)
    gradients = torch.autograd.grad(wanted, whole, towards)
    memory, outputs, inputs, start = SliceMemory(), [], [], 0
    for number, size in enumerate(parts):
        own = [tensor[:, :, start : start + size].detach().requires_grad_() for tensor in whole]
        seen = None if noise is None else noise[:, :, start : start + size, : start + size]
        outputs.append(attend(own[0], own[1], own[2], memory, number, scale=1 / 3.0, noise=seen))
        inputs.append(own)
        start += size
    torch.testing.assert_close(torch.cat(outputs, -2), wanted, rtol=1e-12, atol=1e-12)
    back = [
        torch.autograd.grad(output, own, towards_own)
        for output, own, towards_own in [*zip(outputs, inputs, torch.split(towards, parts, -2), strict=True)][::-1]
    ]
    for at, gradient in enumerate(gradients):
        found = torch.cat([each[at] for each in back[::-1]], -2)
        torch.testing.assert_close(found, gradient, rtol=1e-11, atol=1e-12)
    assert not memory.keys
    assert memory.owed is None


@pytest.mark.parametrize("shape", [(3,), (2, 2, 2), ()])
def test_attention_has_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    whole = [torch.randn(*shape, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    wanted = functional.scaled_dot_product_attention(whole[0], whole[1], whole[2], is_causal=True)
    gradients = torch.autograd.grad(wanted.square().sum(), whole)
    parts = [[part.detach().requires_grad_() for part in torch.split(tensor, [2, 4, 3], -2)] for tensor in whole]
    memory = SliceMemory()
    outputs = [attend(q, k, v, memory, number) for number, (q, k, v) in enumerate(zip(*parts, strict=True))]
    torch.testing.assert_close(torch.cat(outputs, -2), wanted, rtol=1e-12, atol=1e-12)
    back = [
        torch.autograd.grad(output.square().sum(), own)
        for output, own in [*zip(outputs, zip(*parts, strict=True), strict=True)][::-1]
    ]
    for at, gradient in enumerate(gradients):
        torch.testing.assert_close(torch.cat([each[at] for each in back[::-1]], -2), gradient, rtol=1e-11, atol=1e-12)


def test_a_kernel_is_chosen_by_what_it_can_take() -> None:
    query, value = torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 4)
    assert kernel_for(query, query, query, has_noise=False) is ON_CPU
    assert kernel_for(query, query, value, has_noise=False) is PLAIN
    assert FLASH not in (ON_CPU, PLAIN)


# ---- orders --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_order_of_slices_is_proven_and_runs_backwards_in_reverse(name: str) -> None:
    for ranks, count, slices in ((2, 1, 3), (4, 2, 8), (3, 3, 2)):
        program = generate(name, num_ranks=ranks, num_microbatches=count, slices=slices)
        assert not validate(program)
        for row in some(program.rows):
            for stage in some({action.stage for action in row}):
                backs = [a.microbatch for a in row if a.stage == stage and str(a.op) in "BI"]
                wanted = [m * slices + s for m in range(count) for s in reversed(range(slices))]
                assert backs == wanted


def test_1f1b_in_slices_is_the_order_that_the_module_draws() -> None:
    row = generate("1f1b", num_ranks=2, num_microbatches=2, slices=3).rows[0]
    units = ",".join(f"{action.op}{int(action.microbatch or 0)}" for action in row)
    assert units == "F0,F1,F2,F3,B2,F4,B1,F5,B0,B5,B4,B3"


def test_orders_that_cannot_be_sliced_are_refused() -> None:
    with refused(ScheduleError, "5 units for 2 slices"):
        sliced(generate("1f1b", num_ranks=2, num_microbatches=5), 2)
    with refused(ScheduleError, "has 0UPDATE0", fix="1f1b"):
        sliced(Program.parse("0F0,0B0,0UPDATE0,0F1,0B1"), 2)


def test_a_program_whose_slices_go_back_too_early_is_refused() -> None:
    early = generate("gpipe", num_ranks=2, num_microbatches=8)
    with refused(ProgramError, "0B0.0 runs before 0B0.1: slices of a microbatch go backward in reverse"):
        piped(made("Llama"), 4, schedule=Program(early.rows, num_slices=4))
    with refused(ProgramError, "runs each microbatch in 1 slice"):
        piped(made("Llama"), 4, schedule=early)
    assert piped(made("Llama"), 4, schedule=sliced(early, 4)).program.num_units == 8


@pytest.mark.features("record")
@pytest.mark.slow
def test_weighed_bytes_are_those_that_the_row_says() -> None:
    x, target = batch()
    held = {}
    for slices in (1, 4):
        with piped(made("Llama"), slices, record=True, weigh=True, check_model=False) as pipe:
            for _ in range(2):
                assert pipe.step(input_ids=x, target=target).loss is not None
            stash = pipe.timeline().stash
            assert stash is not None
            held[slices] = [max(rank) for rank in stash], pipe.program.compute_only()
    for rank, microbatches in enumerate((2, 1)):
        unit = held[1][0][rank] / microbatches / 4
        owed = 2 * (ROWS // 2) * LENGTH * (WIDTH // 2) * 8  # keys and values of one layer, two of four heads
        wanted = peak_bytes(held[4][1].rows[rank], 4, unit, owed)
        assert held[4][0][rank] == pytest.approx(wanted, rel=0.05)
        assert held[4][0][rank] > peak_bytes(held[4][1].rows[rank], 4, unit, owed / 2)
    assert held[4][0][0] < 0.75 * held[1][0][0]


# ---- what is refused -----------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """A model of one block that does something along the sequence."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(WORDS, WIDTH), mix, nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, positions: Tensor) -> dict[str, Tensor]:
        h: Tensor = self.embedding(tokens)
        return {"logits": self.head(self.mix(h))}


def _merged(h: Tensor) -> Tensor:
    return h.view(*h.shape[:2], 2, -1).transpose(1, 2).flatten(0, 1)


def _attends(h: Tensor, **how: Any) -> Tensor:
    q = h[:, None]
    return functional.scaled_dot_product_attention(q, q, q, **how)[:, 0]


def _mask(h: Tensor) -> Tensor:
    return torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).tril()


MIXES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a convolution": (lambda h: functional.conv1d(h.mT, torch.ones(WIDTH, 1, 1), groups=WIDTH).mT, "a convolution"),
    "a sum": (lambda h: h.cumsum(1), "`cumsum` over a sequence"),
    "a turn": (lambda h: torch.roll(h, 1, 1), "`roll` over a sequence"),
    "noise": (lambda h: h + torch.randn_like(h), "`randn_like` over a sequence"),
    "a mask": (lambda h: _attends(h, attn_mask=_mask(h)), "gets a mask"),
    "later tokens": (_attends, "is not causal attention"),
    "a softmax": (lambda h: (h[:, None] @ h[:, None].mT).softmax(-1)[:, 0] @ h, "a softmax of its own"),
    "a softmax of merged heads": (lambda h: torch.softmax(_merged(h) @ _merged(h).mT, -1).sum() * h, "a softmax of"),
    "a part of the sequence": (
        lambda h: _attends(h.view(len(h), -1, 2, WIDTH), is_causal=True).flatten(1, 2),
        "attention over 2 of 6 tokens",
    ),
    "pooling": (lambda h: h + functional.avg_pool1d(h.mT, 3, 1, 1).mT, "pooling"),
    "a maximum so far": (lambda h: h + h.cummax(1).values, "`cummax` over a sequence"),
}


@pytest.mark.parametrize("kind", MIXES)
def test_what_sees_other_tokens_otherwise_is_refused_by_name(kind: str) -> None:
    mix, what = MIXES[kind]
    x, target = batch()
    with (
        piped(Tokens(mix), 4, num_ranks=1, balance="even", example={"tokens": x, "positions": x}) as pipe,
        refused(ModelError, what, fix="slices=1"),
    ):
        pipe.step(tokens=x, target=target)


def test_models_whose_sequences_cannot_be_divided_are_refused_before_the_start() -> None:
    with refused(ModelError, "takes no position_ids", fix="positions"):
        piped(nn.Linear(2, 2), 2)
    with refused(ModelError, "by 'eager'", fix="slices=1"):
        piped(made("Llama", attn_implementation="eager"), 2)
    config = transformers.RecurrentGemmaConfig(**{**SIZES, "num_hidden_layers": 1, "lru_width": WIDTH})
    with refused(ModelError, "RecurrentBlock. carries a state", fix="slices=1"):
        piped(transformers.RecurrentGemmaForCausalLM(config), 2)
    few = transformers.MiniMaxConfig(**{**SIZES, "num_local_experts": 2, "num_key_value_heads": 2})
    with refused(ModelError, "LightningAttention. carries a state", fix="slices=1"):
        piped(transformers.MiniMaxForCausalLM(few), 2)


CALLS: dict[str, tuple[Callable[[Tensor], dict[str, Any]], type[DrumlineError], str]] = {
    "lengths": (lambda x: {"input_ids": x[:, :-1]}, BatchError, "23 tokens for 4 slices"),
    "rows": (lambda x: {"input_ids": x[:1]}, BatchError, "1 rows for 2 microbatches"),
    "padding": (
        lambda x: {"input_ids": x, "attention_mask": torch.ones_like(x).triu()}, BatchError, "leaves out tokens"),
    "packed": (
        lambda x: {"input_ids": x, "position_ids": torch.arange(LENGTH).expand(ROWS, -1) % 5}, BatchError,
        "do not count up"),
    "apart": (lambda x: {"input_ids": dl.Microbatches(x.chunk(2))}, BatchError, "gets Microbatches"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CALLS)
def test_arguments_that_cannot_be_divided_are_refused(kind: str) -> None:
    call, error, what = CALLS[kind]
    x, target = batch()
    arguments = call(x)
    with piped(made("Llama"), 4) as pipe, refused(error, what):
        tokens = arguments["input_ids"]
        wanted = target if kind == "apart" else target[: len(tokens), : tokens.shape[1]]
        pipe.step(**arguments, target=wanted)


class Strict(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """A model that hands nothing on to its loss, which shifts labels."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, labels: Tensor | None = None) -> Any:
        return super().forward(input_ids=input_ids, position_ids=position_ids, labels=labels)


def test_labels_that_the_model_alone_can_shift_are_refused() -> None:
    model = made("Llama")
    model.__class__ = Strict
    x, _ = batch()
    with (
        dl.Pipeline(model, slices=4, num_microbatches=2, num_ranks=2, transport="in-process") as pipe,
        refused(BatchError, "the model shifts labels itself", fix="target= to step"),
    ):
        pipe.step(input_ids=x, labels=x)


@mainly("family", "Llama", *(family for family in FAMILIES if family != "Llama"))
def test_labels_are_shifted_before_sequences_are_divided(family: str) -> None:
    whole, (x, _) = made(family, torch.float32), batch()
    labels = x.clone()
    labels[0, 3:9] = labels[1, 20:] = -100
    loss = whole(input_ids=x, labels=labels).loss
    loss.backward()
    wanted = {name: param.grad for name, param in whole.named_parameters() if param.grad is not None}
    how: dict[str, Any] = {"num_microbatches": 2, "num_ranks": 2, "transport": "in-process", "balance": "parameters"}
    with dl.Pipeline(made(family, torch.float32), slices=(10, 9, 5), **how) as pipe:
        found = pipe.step(input_ids=x, labels=labels, attention_mask=torch.ones_like(x)).loss
        assert found is not None
        gradients = {name: param.grad for name, param in pipe.named_parameters() if param.grad is not None}
        compare((found, gradients), (loss.detach(), wanted), 5e-6)
        again = pipe.eval_step(input_ids=x, labels=labels, outputs=True)
        assert again.output["logits"].shape == (ROWS, LENGTH, WORDS)
        torch.testing.assert_close(again.output["logits"], whole.eval()(input_ids=x).logits)


TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": Tensor.flatten, "shorter": lambda target: target[:, :-1], "by row": lambda target: target[:, 0],
}  # fmt: skip


@pytest.mark.parametrize("kind", TARGETS)
def test_targets_without_a_place_for_each_token_are_refused(kind: str) -> None:
    x, target = batch()
    with piped(made("Llama"), 4) as pipe, refused(BatchError, "the target has the shape", fix="next token of each"):
        pipe.step(input_ids=x, target=TARGETS[kind](target))


def test_steps_have_other_lengths_and_positions_begin_elsewhere() -> None:
    model, whole, (x, target) = made("Llama"), made("Llama"), batch()
    with piped(model, 4) as pipe:
        for length in (24, 16, 20):
            places = torch.arange(3, 3 + length)[None]
            wanted = loss_fn(whole(input_ids=x[:, :length], position_ids=places), target[:, :length])
            call = {"input_ids": x[:, :length], "position_ids": places, "target": target[:, :length]}
            for loss in (pipe.step(**call).loss, pipe.eval_step(**call).loss):
                assert loss is not None
                assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)


def test_a_window_shorter_than_the_sequence_is_refused() -> None:
    x, target = batch()
    with piped(made("Mistral", sliding_window=8), 4) as pipe, refused(BatchError, "a window of 8", fix="slices=1"):
        pipe.step(input_ids=x, target=target)


ROTARY: dict[str, dict[str, Any]] = {
    "dynamic": {"max_position_embeddings": 16,
                "rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    "longrope": {"original_max_position_embeddings": 16,
                 "rope_scaling": {"rope_type": "longrope", "long_factor": [2.0, 3.0], "short_factor": [1.0, 1.0],
                                  "rope_theta": 1e4}},
}  # fmt: skip


@pytest.mark.parametrize("kind", ROTARY)
def test_rotary_positions_that_follow_the_length_are_refused(kind: str) -> None:
    x, target = batch()
    model, whole = (made("Llama" if kind == "dynamic" else "Phi3", **ROTARY[kind]) for _ in range(2))
    with piped(model, 4) as pipe:
        with refused(BatchError, "rotary positions turn otherwise in more than 16", fix="slices=1"):
            pipe.step(input_ids=x, target=target)
        short = x[:, :16], target[:, :16]
        wanted = loss_fn(whole(input_ids=short[0]), short[1])
        assert pipe.step(input_ids=short[0], target=short[1]).loss == pytest.approx(wanted.item(), rel=1e-12)


@pytest.mark.parametrize("reentrant", [True, False])
def test_blocks_that_run_their_forward_again_themselves_are_refused(reentrant: bool) -> None:
    x, target = batch()
    model: Any = made("Llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    with piped(model, 4, check_model=False) as pipe, refused(ModelError, "a checkpoint of its own", fix="disable"):
        pipe.step(input_ids=x, target=target)


@long
def test_lengths_of_slices_must_add_up() -> None:
    x, target = batch()
    with piped(made("Llama"), (8, 4)) as pipe, refused(BatchError, "24 tokens, and slices of 8, 4 have 12"):
        pipe.step(input_ids=x, target=target)
