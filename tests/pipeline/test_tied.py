"""Weights that several blocks share: one process's gradients, and copies that are equal to the last bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.errors import ModelError
from drumline.core.program import Program
from drumline.pipeline.pipeline import Pipeline
from drumline.verification.verify import verify
from matrices import matrix, some_of
from refused import refused, saying
from some import some
from tied_models import MODELS, WIDTH, everywhere, language_model, loss_fn, repeated, tokens
from torch_models import Reference, data, programs

pytestmark = pytest.mark.torch
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe", "dualpipe-v", "chimera")


def pipeline(model: Any, program: Program | str = "1f1b", *, num_ranks: int = 2, **settings: Any) -> Pipeline:
    given: dict[str, Any] = {"loss_fn": loss_fn, "num_microbatches": None if isinstance(program, Program) else 4}
    return Pipeline(model, schedule=program, num_ranks=num_ranks, **{**given, **settings})


def copies_of(pipe: Pipeline) -> dict[str, list[nn.Parameter]]:
    """Return the copies of every parameter that several ranks hold."""
    found: dict[str, list[nn.Parameter]] = {}
    for entry in everywhere(pipe):
        for name, parameter in entry.items():
            found.setdefault(name, []).append(parameter)
    return {name: copies for name, copies in found.items() if len(copies) > 1}


@matrix("name, kind, num_ranks", SCHEDULES, MODELS, (2, 4, 1), times=1)
def test_gradients_are_those_of_one_process_and_copies_stay_equal(name: str, kind: str, num_ranks: int) -> None:
    tried, make = 0, MODELS[kind]
    for program in programs(name, num_ranks, (3, 8)):
        model = make(dropout=0.2)
        reference = Reference(model, program, loss_fn)
        pipe = pipeline(model, program, num_ranks=num_ranks)
        assert [text for text, _ in sorted(pipe.named_parameters())] == sorted(dict(model.named_parameters()))
        copies = copies_of(pipe)
        assert len(copies) == sum(part.is_copied and part.is_parameter for part in pipe._engine.assembly.ties.tensors)
        # Every rank has an optimizer of its own, as ranks of their own would.
        each = [torch.optim.AdamW(entry.values(), lr=1e-2) for entry in everywhere(pipe)]
        theirs = torch.optim.AdamW(reference.model.parameters(), lr=1e-2)
        for step in range(3):
            batch, target = tokens(9, seed=step)
            result = pipe.step(batch, target=target)
            with torch.no_grad():  # rounding must not build up
                for parameter_name, parameter in reference.model.named_parameters():
                    parameter.copy_(dict(pipe.named_parameters())[parameter_name])
            assert torch.equal(result.loss, reference.step(batch, target))  # type: ignore[arg-type]
            reference.compare(pipe, exact=False)
            for parameter_name, (first, *others) in copies.items():
                assert all(some(other is not first for other in others)), "one object on two ranks proves nothing"
                assert all(some(torch.equal(first.grad, other.grad) for other in others)), parameter_name  # type: ignore[arg-type]
            for optimizer in (*each, theirs):
                optimizer.step()
                optimizer.zero_grad()
            for parameter_name, (first, *others) in copies.items():
                assert all(some(torch.equal(first, other) for other in others)), f"{parameter_name} drifted apart"
        tried += 1
    assert tried or (name in ("dualpipe", "chimera") and num_ranks == 1)


@pytest.mark.parametrize(
    ("name", "num_ranks", "held"),
    [
        ("1f1b", 1, {"0.weight": 1}),
        ("1f1b", 2, {"0.weight": 2}),
        ("zb-v", 2, {"0.weight": 1}),  # the first and the last stage are one rank's
        ("dualpipe-v", 4, {"0.weight": 1}),
        ("dualpipe", 4, {"0.weight": 2}),
        ("interleaved-1f1b", 4, {"0.weight": 2}),
    ],
)
def test_ranks_that_hold_it_twice_hold_it_once(name: str, num_ranks: int, held: dict[str, int]) -> None:
    (program,) = programs(name, num_ranks, (8,))
    pipe = pipeline(language_model(), program, num_ranks=num_ranks)
    for key, count in held.items():
        assert len({id(rank[key]) for rank in everywhere(pipe) if key in rank}) == count


class Untied(Reference):
    """A reference in which every stage has its own weight; what several ranks hold is added by rank."""

    def __init__(self, model: nn.Sequential, program: Program) -> None:
        apart = nn.Sequential(*(copy.deepcopy(block) for block in model))
        super().__init__(apart, program, loss_fn)

    def gradient(self, *names: str) -> Tensor:
        found = dict(self.model.named_parameters())
        total: Tensor | None = None
        for gradient in (found[name].grad for name in names):
            assert gradient is not None
            total = gradient if total is None else total + gradient
        assert total is not None
        return total


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_sums_in_the_same_order_have_the_same_bits(name: str, num_ranks: int) -> None:
    (program,) = programs(name, num_ranks, (8,))
    model = language_model()
    reference = Untied(model, program)
    pipe = pipeline(model, program, num_ranks=num_ranks)
    batch, target = tokens(11)
    pipe.step(batch, target=target)
    reference.step(batch, target)
    gradients = {text: parameter.grad for text, parameter in pipe.named_parameters()}
    assert torch.equal(gradients.pop("0.weight"), reference.gradient("0.weight", "7.weight"))  # type: ignore[arg-type]
    assert all(torch.equal(value, reference.gradient(k)) for k, value in gradients.items())  # type: ignore[arg-type]


@pytest.mark.matrix
@pytest.mark.parametrize("name", some_of(["1f1b", "zb-h1", "zb-v", "dualpipe", "chimera"], ["zb-v", "dualpipe"]))
@pytest.mark.parametrize(
    "settings", [{"checkpoint": "full"}, {"checkpoint": ["1", "7"]}, {"merge_weight_gradients": True}]
)
def test_recomputation_and_merged_products_leave_the_gradients_right(name: str, settings: dict[str, Any]) -> None:
    (program,) = programs(name, 2, (4,))
    for make in MODELS.values():
        model = make(dropout=0.2)
        reference = Reference(model, program, loss_fn)
        pipe = pipeline(model, program, **settings)
        batch, target = tokens(9)
        pipe.step(batch, target=target)
        reference.step(batch, target)
        reference.compare(pipe, exact=False)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_gradients_of_several_steps_add_up(name: str) -> None:
    (program,) = programs(name, 2, (4,))
    for make in MODELS.values():
        model = make()
        reference = Reference(model, program, loss_fn)
        pipe = pipeline(model, program)
        for step in range(3):
            batch, target = tokens(8, seed=step)
            pipe.step(batch, target=target)
            reference.step(batch, target)
        reference.compare(pipe, exact=False)
        pipe.zero_grad()
        assert all(param.grad is None for param in model.parameters())


@pytest.mark.features("precision")
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe"])
@pytest.mark.parametrize("settings", [{"precision": "bf16"}, {"precision": "fp16"}, {"master_weights": True}])
def test_low_precision_leaves_sums_and_copies_right(name: str, settings: dict[str, Any]) -> None:
    found = []
    for num_ranks in (1, 2):
        model = language_model()
        if "master_weights" in settings:
            model.bfloat16()
        pipe = pipeline(model, name if num_ranks > 1 else "gpipe", num_ranks=num_ranks, **settings)
        if pipe.scaler is not None:
            pipe.scaler.scale = 64.0  # nothing overflows
        for step in range(2):  # gradients of the first are put aside in the second
            batch, target = tokens(8, seed=step)
            pipe.step(batch, target=target)
        found.append({text: parameter.grad for text, parameter in pipe.named_parameters()})
        copied = copies_of(pipe)
        assert bool(copied) is (num_ranks > 1)
        for copies in copied.values():
            assert copies[0].grad is not None
            assert all(some(param.grad is not None and param.grad.dtype is copies[0].grad.dtype for param in copies))
    for text, expected in some(found[0].items()):
        assert expected is not None
        assert expected.dtype is torch.float32
        assert (found[1][text] - expected).norm() <= 1e-6 * expected.norm(), text  # type: ignore[operator]


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "zb-v"])
def test_the_clipping_norm_counts_a_tied_weight_once(name: str) -> None:
    (program,) = programs(name, 2, (4,))
    for make in MODELS.values():
        model = make()
        reference = Reference(model, program, loss_fn)
        pipe = pipeline(model, program)
        batch, target = tokens(8)
        pipe.step(batch, target=target)
        reference.step(batch, target)
        norm = pipe.clip_grad_norm_(0.01)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.model.parameters(), 0.01))
        reference.compare(pipe, exact=False, tolerance=2e-6)


class Whole(nn.Module):
    """A model that is no chain: the head comes before the embedding in its list, and a layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.embedding = nn.Linear(WIDTH, 13), nn.Embedding(13, WIDTH)
        self.head.weight = self.embedding.weight
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)])
        self.layers.append(self.layers[1])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        made: Tensor = self.head(x)
        return made


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "dualpipe"])
def test_a_model_that_is_no_chain_may_be_tied_too(name: str) -> None:
    torch.manual_seed(1)
    model = Whole()
    whole, (batch, target) = copy.deepcopy(model), tokens(8)
    pipe = pipeline(model, name, example=batch, balance="even")
    assert [text for text, _ in sorted(pipe.named_parameters())] == sorted(dict(model.named_parameters()))
    for _ in range(2):
        pipe.step(batch, target=target)
        loss_fn(whole(batch), target).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(pipe.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(whole.parameters(), 0.1))
    for text, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(text).grad)
    other = Whole().state_dict()
    pipe.load_state_dict({key: value for key, value in other.items() if key not in ("head.weight", "layers.1.weight")})
    assert torch.equal(model.get_parameter("layers.1.weight"), other["layers.5.weight"])
    assert torch.equal(model.head.weight, other["embedding.weight"])


def test_the_users_model_stays_tied_and_goes_into_another_pipeline() -> None:
    model = language_model()
    batch, target = tokens(8)
    found: list[Any] = []
    for _ in range(2):
        pipe = pipeline(model)
        pipe.step(batch, target=target)
        assert model[7].weight is model[0].weight
        found.append(model.get_parameter("0.weight").grad)
        model.zero_grad()
    assert torch.equal(found[0], found[1])


def test_what_the_user_does_to_the_model_reaches_every_copy() -> None:
    for name in ("1f1b", "dualpipe"):
        (program,) = programs(name, 2, (4,))
        model = repeated(dropout=0.5)
        pipe = pipeline(model, program)
        batch, target = tokens(8)
        pipe.step(batch, target=target)
        pipe.zero_grad()
        model.eval()
        weight = model.get_parameter("1.0.weight").requires_grad_(False)
        model.get_parameter("1.0.bias").register_hook(lambda gradient: 3 * gradient)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            weight.mul_(2)
        reference = Reference(model, program, loss_fn)
        reference.randomness.step = 1
        reference.model.get_parameter("1.0.bias").register_hook(lambda gradient: 3 * gradient)  # type: ignore[no-untyped-call]
        pipe.step(batch, target=target)
        expected = dict(reference.model.named_parameters())
        reference.step(batch, target)
        assert weight.grad is None
        for parameter_name, parameter in pipe.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(parameter.grad, expected[parameter_name].grad)


def test_evaluation_sees_the_newest_weights_in_every_copy() -> None:
    for name in ("1f1b", "zb-v", "dualpipe"):
        model = language_model()
        pipe = pipeline(model, name)
        batch, target = tokens(8)
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.5)
        pipe.step(batch, target=target)
        optimizer.step()
        torch.testing.assert_close(pipe.eval_step(batch).output, model(batch).detach())


class Gate(nn.Module):
    """Holds a layer, and uses it or not."""

    def __init__(self, held: nn.Module, *, uses: bool) -> None:
        super().__init__()
        self.held, self.uses = held, uses

    def forward(self, x: Tensor) -> Tensor:
        return self.held(x) if self.uses else 2 * x


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe"])
def test_a_weight_that_one_owner_reaches_is_reached(name: str) -> None:
    (program,) = programs(name, 2, (4,))
    for first, second in ((True, False), (False, True), (False, False)):
        held = nn.Linear(WIDTH, WIDTH)
        plain = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        model = nn.Sequential(next(plain), Gate(held, uses=first), Gate(held, uses=second), next(plain))
        reference = Reference(model, program, functional.mse_loss)
        pipe = pipeline(model, program, loss_fn=functional.mse_loss, unused="raise")
        batch, target = data(8)
        for _ in range(2):
            pipe.step(batch, target=target)
            if not first and not second:
                with refused(ModelError, r"no loss reaches 1\.held\.bias, 1\.held\.weight"):
                    pipe.settle()
                break
            reference.step(batch, target)
            reference.compare(pipe, exact=False)
            for gradients in some([param.grad for param in copies] for copies in copies_of(pipe).values()):
                assert len({id(gradient) for gradient in gradients}) == len(gradients), "two copies have one gradient"


class Lookup(nn.Module):
    """Adds a sparse embedding of the tokens, which travel along."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, value: Any) -> Any:
        ids, x = value if isinstance(value, tuple) else (value, 0)
        return ids, torch.tanh(x + self.table(ids))


class Out(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 13)

    def forward(self, value: Any) -> Tensor:
        return self.layer(value[1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe"])
def test_sparse_gradients_stay_sparse_unless_another_is_dense(name: str) -> None:
    (program,) = programs(name, 2, (4,))
    for dense in (False, True):
        table, last = nn.Embedding(13, WIDTH, sparse=True), Out()
        if dense:
            last.layer.weight = table.weight
        model = nn.Sequential(Lookup(table), Lookup(nn.Embedding(13, WIDTH)), Lookup(table), last)
        reference = Reference(model, program, loss_fn)
        pipe = pipeline(model, program)
        batch, target = tokens(8)
        pipe.step(batch, target=target)
        reference.step(batch, target)
        expected = reference.model.get_parameter("0.table.weight").grad
        assert table.weight.grad is not None
        assert expected is not None
        assert table.weight.grad.is_sparse is not dense
        torch.testing.assert_close(table.weight.grad.to_dense(), expected.to_dense())
        pipe.settle()


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_the_state_has_every_name_of_the_models_and_is_taken_back_by_any(name: str) -> None:
    model, other = language_model(), language_model(seed=2)
    pipe = pipeline(model, name)
    stored = pipe.state_dict()
    assert sorted(stored) == sorted(model.state_dict())
    assert stored["0.weight"] is stored["7.weight"]
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in stored.items())
    for renamed in (False, True):
        state = dict(other.state_dict())
        del state["0.weight" if renamed else "7.weight"]
        state["elsewhere"] = torch.zeros(3)
        pipe.load_state_dict(state)
        for rank in some(everywhere(pipe)):
            assert all(some(torch.equal(param, other.get_parameter(one_name)) for one_name, param in rank.items()))
        pipe.load_state_dict(stored)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"0.weight": None, "7.weight": None}, saying(r"the state has no '0\.weight'", fix="did you mean")),
        ({"3.0.bias": None}, saying(r"no '3\.0\.bias'", fix=r"did you mean \d\.\d\.bias")),
        ({"3.0.bias": torch.zeros(5)}, saying(r"'3\.0\.bias' has shape \(5,\) in the state", expected=r"\(6,\)")),
        ({"7.weight": torch.zeros(13, 6)}, saying(r"'0\.weight' and '7\.weight' differ in the state")),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change: dict[str, Tensor | None], says: dict[str, str]) -> None:
    model = language_model()
    before = copy.deepcopy(model.state_dict())
    pipe = pipeline(model)
    changed = {**language_model(seed=2).state_dict(), **change}
    with refused(ModelError, **says):
        pipe.load_state_dict({name: value for name, value in changed.items() if value is not None})
    assert all(some(torch.equal(value, model.state_dict()[name]) for name, value in before.items()))


@pytest.mark.features("record")
def test_the_exchange_is_in_the_timeline_and_its_waiting_is_no_overhead() -> None:
    pipe = pipeline(language_model(), num_ranks=4)
    batch, target = tokens(8)
    pipe.step(batch, target=target)
    timeline = pipe.timeline()
    assert [(span.rank, str(span.action)) for span in timeline.exchanges] == [(0, "0REDUCE_GRAD"), (3, "0REDUCE_GRAD")]
    assert all(span.end > span.start for span in timeline.exchanges)
    waited = [wait for wait in timeline.waits if wait.rank == 3 and wait.action is None]
    assert [(str(interval.receive), interval.source) for interval in waited] == [("0REDUCE_GRAD", 0)]
    assert timeline.parts[3].wait >= waited[0].end - waited[0].start > 0
    assert not pipeline(nn.Sequential(*list(language_model())[:7]), num_ranks=2)._engine.assembly.ties.edges


def test_a_tie_that_was_broken_is_refused() -> None:
    model = language_model()
    pipe = pipeline(model, num_ranks=1)
    batch, target = tokens(8)
    pipe.step(batch, target=target)
    model[7].weight = nn.Parameter(model.get_parameter("0.weight").detach().clone())
    with refused(ModelError, r"0\.weight and 7\.weight were one tensor"):
        pipe.step(batch, target=target)


class Hidden(nn.Module):
    """A head that reaches its embedding behind the module's back; with a weight of its own, or without."""

    def __init__(self, embedding: nn.Embedding, *, own: bool) -> None:
        super().__init__()
        self.behind = [embedding]
        self.shift = nn.Parameter(torch.zeros(13)) if own else None

    def forward(self, x: Tensor) -> Tensor:
        made = x @ self.behind[0].weight.t()
        return made if self.shift is None else made + self.shift


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("own", [True, False])
def test_a_tie_behind_the_modules_back_is_refused(name: str, own: bool) -> None:
    batch, target = tokens(8)
    embedding = nn.Embedding(13, WIDTH)
    model = nn.Sequential(embedding, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Hidden(embedding, own=own))
    with refused(ModelError, r"uses a parameter of shape \(13, 6\) that it does not hold"):
        pipeline(model, name).step(batch, target=target)


class Routed(nn.Module):
    """Leaves a loss of its own in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.aux = nn.Linear(WIDTH, WIDTH), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        made = torch.sigmoid(self.gate(x))
        self.aux = made.mean()
        return x * made


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-v"])
def test_a_loss_that_reads_what_a_block_of_another_stage_left_is_refused(name: str) -> None:
    blocks = [Routed() for _ in range(4)]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target) + torch.stack([block.aux for block in blocks]).sum()

    pipe = Pipeline(blocks, loss_fn=loss_fn, schedule=name, num_microbatches=4, num_ranks=2)
    batch = torch.randn(8, WIDTH)
    said = r"uses a parameter of shape \(6, 6\) that it does not hold|uses a tensor .* did not return"
    with refused(ModelError, said, fix="return (that tensor|it) from the block"):
        pipe.step(batch, target=batch)


class Counts(nn.Module):
    """Counts its forwards in a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.layer(x)  # type: ignore[no-any-return]


def test_buffers_that_forwards_change_are_refused_where_several_ranks_hold_them() -> None:
    batch, target = data(8)
    shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    with refused(ModelError, r"stages 0, 1 share running statistics, 0\.1\.running_mean"):
        pipeline(nn.Sequential(shared, nn.ReLU(), shared), loss_fn=functional.mse_loss)
    counts = Counts()
    for name, model in (
        ("1f1b", nn.Sequential(counts, nn.ReLU(), counts)),
        ("dualpipe", nn.Sequential(counts, nn.ReLU())),
    ):
        with refused(ModelError, r"changes the buffer '0\.count'"):
            pipeline(model, name, loss_fn=functional.mse_loss).step(batch, target=target)
    model = nn.Sequential(counts, nn.ReLU(), counts)
    pipeline(model, num_ranks=1, loss_fn=functional.mse_loss).step(batch, target=target)
    assert counts.count >= 8  # twice for each microbatch


@pytest.mark.features("record")
def test_verify_allows_for_another_order_of_sums() -> None:
    def material() -> Any:
        return language_model(), loss_fn, *tokens(9)

    for name in ("1f1b", "zb-v", "dualpipe"):
        found = verify(name, num_ranks=2, num_microbatches=4, model=material, transport="in-process")
        assert found.passes
        assert found.tolerance == 1e-6
        assert "7.weight" not in found.gradient_differences


class ScaledTwice(nn.Module):
    """Uses one parameter behind each of two layers, so that two stages have it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x) * self.scale) * self.scale


def test_a_parameter_between_blocks_of_two_ranks_is_frozen_and_freed_in_its_copy() -> None:
    torch.manual_seed(0)
    model, batch, target = ScaledTwice(), torch.randn(4, 6), torch.randn(4, 6)
    plain = copy.deepcopy(model)
    pipe = Pipeline(
        model,
        loss_fn=nn.functional.mse_loss,
        num_microbatches=2,
        num_ranks=2,
        transport="in-process",
        cuts=["last"],
        example=torch.zeros(4, 6),
    )
    for trains in (True, False, True):
        for either in (model, plain):
            either.zero_grad()
            either.scale.requires_grad_(trains)
        pipe.step(batch, target=target)
        torch.autograd.backward(nn.functional.mse_loss(plain(batch), target))
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad, other.grad)
        assert (model.scale.grad is not None) is trains
