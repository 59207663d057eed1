"""Microbatches of unequal lengths and numbers of rows: the gradients of one process over the same microbatches."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from drumline.channel.launch.launch import launch
from drumline.core.errors import BatchError, MismatchError, ModelError, RankFailed
from drumline.engine.model.sources import Material
from drumline.engine.ranks.agreement import ArgumentPrint, agree_on_batch
from drumline.pipeline.pipeline import Pipeline
from drumline.runtime.batch import Microbatches, counted_in, cut, num_rows
from drumline.verification.verify import verify
from matrices import KINDS, long, matrix, some_of
from refused import refused, saying
from some import some
from torch_models import SYNCHRONOUS, TWO_WAYS, WIDTH, Reference, mlp, programs

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

REAL = ("1f1b", "zb-v", "dualpipe")  # the schedules that run on real ranks
LENGTHS = (3, 17, 5, 11, 4, 16, 9, 7)
IGNORED = -100


def unequal(count: int, *, seed: int = 0) -> tuple[Microbatches, Microbatches]:
    """Return microbatches of other lengths and other numbers of rows."""
    torch.manual_seed(seed)
    shapes = [(1 + (at + seed) % 3, LENGTHS[(at + seed) % len(LENGTHS)], WIDTH) for at in range(count)]
    return Microbatches(torch.randn(shape) for shape in shapes), Microbatches(torch.randn(shape) for shape in shapes)


@matrix(
    "name, num_ranks, checkpoint, merge",
    some_of(SYNCHRONOUS, KINDS),
    (2, 4, 3, 1),
    ("none", "full", ("1", "4")),
    (False, True),
    times=1,
)
def test_every_schedule_gives_the_gradients_of_one_process(
    name: str, num_ranks: int, checkpoint: Any, merge: bool
) -> None:
    for program in programs(name, num_ranks, (8,)):
        model = mlp(dropout=0.2)
        reference = Reference(model, program, functional.mse_loss, loss_weight=Tensor.numel)
        pipe = Pipeline(
            model,
            loss_fn=functional.mse_loss,
            schedule=program,
            num_ranks=num_ranks,
            checkpoint=checkpoint,
            merge_weight_gradients=merge,
        )
        for step in range(2):  # the second step's lengths come in another order
            batch, target = unequal(8, seed=step)
            loss = pipe.step(batch, target=target).loss
            assert loss is not None
            assert torch.equal(loss, reference.step(batch, target))
        reference.compare(pipe, exact=name not in TWO_WAYS and not merge, tolerance=3e-6)


class Speaker(nn.Module):
    """A model with two arguments: which of the places count is said beside the text."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 20)

    def forward(self, ids: Tensor, gate: dict[str, Tensor], scale: float = 1.0) -> Tensor:
        made: Tensor = self.head(functional.gelu(self.inner(self.embed(ids) * gate["of"][..., None]))) * scale
        return made


def by_tokens(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def spoken(lengths: tuple[int, ...] = (3, 17, 5, 9), seed: int = 0) -> tuple[Microbatches, Any, Microbatches]:
    torch.manual_seed(seed)
    ids = [torch.randint(20, (2, length)) for length in lengths]
    targets = [number.roll(-1, 1) for number in ids]
    for at, target in enumerate(targets):
        target[at % 2, max(1, target.shape[1] - 2 * at) :] = IGNORED
    targets[2][:] = IGNORED  # nothing counts
    return Microbatches(ids), {"of": Microbatches(torch.rand(number.shape) for number in ids)}, Microbatches(targets)


def whole_loss(model: nn.Module, ids: Any, gate: Any, target: Any, **more: Any) -> Tensor:
    made = [model(number, {"of": part}, **more).flatten(0, 1) for number, part in zip(ids, gate["of"], strict=True)]
    return functional.cross_entropy(torch.cat(made), torch.cat([value.flatten() for value in target]))


@pytest.mark.features("check")
@pytest.mark.parametrize("settings", [{}, {"schedule": "zb-h1"}, {"schedule": "zb-v", "checkpoint": "full"}])
def test_a_model_that_is_followed_gets_nested_arguments_and_counts_its_labels(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, (ids, gate, target) = Speaker(), spoken()
    if settings.get("schedule") == "zb-v":
        model.more = nn.Identity()  # nothing calls it
    plain = copy.deepcopy(model)
    stages: dict[str, Any] = {"num_ranks": 2 if settings.get("schedule") != "zb-v" else 1}
    pipe = Pipeline(
        model,
        loss_fn=by_tokens,
        num_microbatches=4,
        example=as_given(ids[0], gate["of"][0]),
        unused="ignore",
        **stages,
        **settings,
    )
    result = pipe.step(ids, gate, target=target, scale=0.5)
    assert pipe.checked is not None
    assert not pipe.checked.wrong
    expected = whole_loss(plain, ids, gate, target, scale=0.5)
    torch.autograd.backward(expected)
    torch.testing.assert_close(result.loss, expected.detach())
    wanted = dict(plain.named_parameters())
    for name, param in some(pipe.named_parameters()):
        torch.testing.assert_close(param.grad, wanted[name].grad)
    made = pipe.eval_step(ids, gate, target=target, scale=0.5)
    assert isinstance(made.output, Microbatches)
    assert [value.shape[1] for value in made.output] == [3, 17, 5, 9]
    torch.testing.assert_close(made.loss, expected.detach())


def as_given(ids: Tensor, gate: Tensor) -> Any:
    """Return an example as a step will get it."""
    return Microbatches([ids] * 4), {"of": Microbatches([gate] * 4)}


def test_tensors_beside_are_cut_to_the_same_rows_and_single_rows_are_given_whole() -> None:
    batch = {
        "x": Microbatches([torch.zeros(2, 7), torch.zeros(1, 3), torch.zeros(3, 5)]),
        "label": torch.arange(6),
        "positions": torch.ones(1, 9),
        "patches": torch.arange(9),
        "scale": 2.0,
    }
    cuts = cut(batch, 3, split={"patches": lambda given: [1, 2, 3, 1, 1, 1]})
    assert [item["label"].tolist() for item in cuts] == [[0, 1], [2], [3, 4, 5]]
    assert [item["patches"].tolist() for item in cuts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [tuple(item["x"].shape) for item in cuts] == [(2, 7), (1, 3), (3, 5)]
    assert all(item["positions"].shape == (1, 9) and item["scale"] == 2.0 for item in some(cuts))
    assert num_rows(batch) == 6
    ids = Microbatches([torch.zeros(2, 7, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long)])
    assert counted_in(ids) == (3, 17)
    assert pickle.loads(pickle.dumps(Microbatches([1, "a"]))) == (1, "a")


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (lambda: Microbatches([]), saying("Microbatches got no values")),
        (lambda: Microbatches(torch.ones(4, 2)), saying(r"got a tensor of the shape \(4, 2\)")),
        (
            lambda: Microbatches([torch.ones(1, 2)] * 2),
            saying("has 2 values in Microbatches", expected="one for each of the"),
        ),
        (
            lambda: Microbatches([torch.ones(1, 2), None, None]),
            saying("float32 tensor of 2 dim.* 0 and NoneType in"),
        ),
        (
            lambda: Microbatches([torch.ones(1), torch.ones(1), torch.ones(1).long()]),
            saying("int64 .* in microbatch 2"),
        ),
        (lambda: Microbatches([torch.ones(1, 2)] * 2 + [torch.ones(1, 0)]), saying(r"\(1, 0\) in microbatch 2")),
        (lambda: Microbatches([Microbatches([1, 2])] * 3), saying("Microbatches inside of Microbatches")),
        (
            lambda: (Microbatches([torch.ones(2, 2)] * 3), torch.ones(5)),
            saying(r"\(5,\) beside Microbatches of 6 rows"),
        ),
    ],
)
def test_wrong_counts_kinds_and_empty_microbatches_are_refused(batch: Any, said: dict[str, str]) -> None:
    with refused(BatchError, **said):
        cut(batch(), 3)


def test_batch_and_target_are_both_given_apart_or_neither() -> None:
    pipe = Pipeline(mlp(), loss_fn=functional.mse_loss, num_microbatches=4, num_ranks=2)
    batch, target = unequal(4)
    with refused(BatchError, "the batch is given as Microbatches and the target is not"):
        pipe.step(batch, target=torch.ones(4, 6))
    with refused(BatchError, "the target is given as Microbatches and the batch is not"):
        pipe.step(torch.ones(4, 6), target=target)
    apart, whole = ArgumentPrint.of(batch, None), ArgumentPrint.of(None, torch.ones(4, 6))
    with refused(MismatchError, "rank 0 got Microbatches and rank 1 a batch or target to be cut"):
        agree_on_batch([apart, whole], 3)
    with refused(MismatchError, "ranks 0 and 1 got different batches"):
        agree_on_batch([apart, ArgumentPrint.of(unequal(4, seed=1)[0], None)], 3)


def rows_alone(output: Tensor, target: Tensor) -> Tensor:
    return (output.mean((1, 2)) - target).square().mean()


def in_numbers(output: Tensor, target: Tensor) -> Tensor:
    rows, length, width = output.shape
    return functional.cross_entropy(output.reshape(rows * length, width), target.reshape(rows * length))


def test_losses_that_count_by_rows_are_weighed_by_rows_and_those_that_cannot_be_are_refused() -> None:
    x, _ = unequal(4)
    y = Microbatches(torch.randn(len(value)) for value in x)
    model = mlp()
    plain = copy.deepcopy(model)
    pipe = Pipeline(model, loss_fn=rows_alone, num_microbatches=4, num_ranks=2)
    made = torch.cat([plain(value).mean((1, 2)) for value in x])
    torch.testing.assert_close(pipe.step(x, target=y).loss, (made - torch.cat(y)).square().mean())
    labels = Microbatches(torch.randint(WIDTH, value.shape[:2]) for value in x)
    pipe = Pipeline(mlp(), loss_fn=in_numbers, num_microbatches=4, num_ranks=2)
    with refused(ModelError, "takes shapes as numbers", fix="pass loss_weight="):
        pipe.step(x, target=labels)
    pipe = Pipeline(mlp(), loss_fn=lambda out, target: out.square().mean(), num_microbatches=4, num_ranks=2)
    with refused(ModelError, "averages over something that does not grow with its target"):
        pipe.step(x, target=y)


def unequal_material() -> Material:
    batch, target = unequal(4)
    return Material(mlp(), functional.mse_loss, batch, target)


@pytest.mark.features("check", "record")
def test_verify_compares_unequal_microbatches() -> None:
    found = verify("zb-h1", num_ranks=2, num_microbatches=4, model=unequal_material, transport="in-process")
    assert found.identical


def over(transport: str) -> int:
    """Run schedules of every kind with lengths that change from step to step; return how many steps ran."""
    count = 0
    for name in REAL if transport == "shared-memory" else REAL[:2]:
        (program,) = programs(name, 2, (8,))
        model = mlp(dropout=0.2)
        reference = Reference(model, program, functional.mse_loss, loss_weight=Tensor.numel)
        with Pipeline(model, loss_fn=functional.mse_loss, schedule=program, transport=transport, ahead=3) as pipe:
            first, last = (pipe.rank in pipe.program.placement.ranks_of(at) for at in (0, program.num_stages - 1))
            for step in range(2):
                batch, target = unequal(8, seed=step)
                loss = pipe.step(batch if first else None, target=target if last else None).loss
                assert loss is not None
                assert torch.equal(loss, reference.step(batch, target))
                count += 1
            reference.compare(pipe, exact=name not in TWO_WAYS)
            output = pipe.eval_step(batch if first else None).output
            assert output is None or {value.shape[1] for value in output} <= set(LENGTHS)
    return count


def in_another_order() -> str:
    """Run steps whose order is chosen, with the batch and the target where they are needed; return what goes wrong."""
    (program,) = programs("1f1b", 2, (8,))
    model = mlp()
    reference = Reference(model, program, functional.mse_loss, loss_weight=Tensor.numel)
    with Pipeline(model, loss_fn=functional.mse_loss, schedule=program, arrange=True) as pipe:
        batch, target = unequal(8)
        loss = pipe.step(batch if pipe.rank == 0 else None, target=target if pipe.rank else None).loss
        torch.testing.assert_close(loss, reference.step(batch, target))
        reference.compare(pipe, exact=False)
        assert pipe.search([(1, length) for length in LENGTHS], seconds=0.1).bound > 0
        try:  # the last stage's rank sees other lengths than the first's
            pipe.step(batch if pipe.rank == 0 else None, target=in_another_way(target) if pipe.rank else None)
            pipe.settle()
        except (MismatchError, RankFailed, ValueError, RuntimeError) as error:
            return str(error)
    return "nothing"


def in_another_way(target: Microbatches) -> Microbatches:
    return Microbatches(reversed([value[:, :1] for value in target]))


def both_transports() -> list[Any]:
    return [*(over(transport) for transport in ("shared-memory", "gloo")), in_another_order()]


@long
@pytest.mark.matrix
def test_real_ranks_exchange_messages_of_unequal_lengths() -> None:
    for by_memory, by_gloo, said in launch(both_transports, num_ranks=2):
        assert (by_memory, by_gloo) == (2 * len(REAL), 4)
        assert said != "nothing"


def test_microbatches_are_part_of_the_public_names() -> None:
    assert dl.Microbatches is Microbatches
