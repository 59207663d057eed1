"""Tied weights on real ranks: every owner has the same bits, states travel, and all ranks learn of troubles."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.channel.launch.launch import launch
from drumline.core.errors import DrumlineError, ModelError
from drumline.pipeline.pipeline import Pipeline
from matrices import long, mainly
from tied_models import MODELS, WIDTH, language_model, loss_fn, tokens
from torch_models import Reference, data, programs

pytestmark = pytest.mark.torch
NUM_TOKENS = 1500  # too large a table for one packet
TIED = {"language model": ["0.weight"], "repeated": ["1.0.bias", "1.0.weight", "1.1.bias", "1.1.weight"]}


def trained(transport: str, num_ranks: int, names: tuple[str, ...]) -> dict[str, dict[str, Tensor]]:
    """Train every model for three steps with every schedule; return this rank's tied parameters."""
    found = {}
    for name in names:
        for kind, make in MODELS.items():
            (program,) = programs(name, num_ranks, (2 * num_ranks,))
            model = make(dropout=0.2)
            reference = Reference(model, program, loss_fn)
            with Pipeline(model, loss_fn=loss_fn, schedule=program, transport=transport) as pipe:
                ours = pipe.optimizer(torch.optim.AdamW, lr=1e-2)
                theirs = torch.optim.AdamW(reference.model.parameters(), lr=1e-2)
                for step in range(3):
                    batch, target = tokens(2 * num_ranks + 1, seed=step)
                    pipe.step(batch, target=target)
                    reference.step(batch, target)
                    pipe.clip_grad_norm_(0.5)
                    nn.utils.clip_grad_norm_(reference.model.parameters(), 0.5)
                    reference.compare(pipe, exact=False, tolerance=1e-5)  # of weights that have drifted a little
                    for optimizer in (ours, theirs):
                        optimizer.step()
                        optimizer.zero_grad()
                own = dict(pipe.named_parameters())
                assert len(own) == len({id(param) for param in own.values()})
                found[f"{name} {kind}"] = {text: own[text].detach() for text in TIED.get(kind, ()) if text in own}
    return found


@long
@mainly(
    ("transport", "num_ranks", "names"),
    ("gloo", 2, ("1f1b", "zb-h1", "zb-v", "dualpipe")),
    ("shared-memory", 2, ("1f1b", "dualpipe")),
    ("shared-memory", 4, ("zb-h1", "chimera")),
)
def test_all_owners_have_the_same_bits_after_three_steps(
    transport: str, num_ranks: int, names: tuple[str, ...]
) -> None:
    each = launch(trained, transport, num_ranks, names, num_ranks=num_ranks)
    for case in each[0]:
        owners: dict[str, list[Tensor]] = {}
        for found in each:
            for name, value in found[case].items():
                owners.setdefault(name, []).append(value)
        assert bool(owners) is not case.endswith("neighbours"), case  # of which none is held twice
        for name, (first, *others) in owners.items():
            assert others or case.startswith("zb-v language"), (case, name)
            assert all(torch.equal(first, other) for other in (first, *others)), (case, name)


def far_apart(transport: str) -> tuple[Tensor, Tensor]:
    """Exchange a large table between the first and the last of three ranks, between which nothing else goes."""
    (program,) = programs("1f1b", 3, (3,))
    model = language_model(num_tokens=NUM_TOKENS)
    reference = Reference(model, program, loss_fn)
    if int(os.environ["RANK"]) == 2:
        with torch.no_grad():
            model.get_parameter("0.weight").add_(1)  # the first owner's values count
    with Pipeline(model, loss_fn=loss_fn, schedule=program, transport=transport) as pipe:
        batch, target = tokens(6, num_tokens=NUM_TOKENS)
        pipe.step(batch, target=target)
        reference.step(batch, target)
        reference.compare(pipe, exact=False)
        weight = dict(pipe.named_parameters()).get("0.weight")
        exchanges = [(span.rank, str(span.action)) for span in pipe.timeline().exchanges]
        assert exchanges == [(0, "0REDUCE_GRAD"), (2, "0REDUCE_GRAD")]
        if weight is None:
            return torch.zeros(0), torch.zeros(0)
        assert weight.grad is not None
        return weight.detach(), weight.grad


@pytest.mark.features("record")
@mainly("transport", "shared-memory", "gloo")
def test_owners_that_are_no_neighbours_exchange_a_large_table(transport: str) -> None:
    (value, gradient), (nothing, _), (other, theirs) = launch(far_apart, transport, num_ranks=3)
    assert not nothing.numel()
    assert torch.equal(value, other)
    assert torch.equal(gradient, theirs)


def outcome(run: Any) -> tuple[str, str]:
    try:
        run()
    except DrumlineError as error:
        return type(error).__name__, str(error)
    return "fine", ""


def untied(model: nn.Sequential) -> nn.Sequential:
    model[7].weight = nn.Parameter(model.get_parameter("0.weight").detach().clone())
    return model


def states(transport: str) -> dict[str, Any]:
    """Store, take back and meet troubles on two ranks."""
    rank = int(os.environ["RANK"])
    given: dict[str, Any] = {"loss_fn": loss_fn, "num_microbatches": 4, "transport": transport}
    batch, target = tokens(8)
    found: dict[str, Any] = {}
    with Pipeline(language_model(), schedule="1f1b", **given) as pipe:
        found["stored"] = {name: value.clone() for name, value in pipe.state_dict().items()}
        other = language_model(seed=2).state_dict()
        names = set(found["stored"])
        pipe.load_state_dict({name: value for name, value in other.items() if name in names})  # each its own alone
        found["loaded"] = {name: value.detach().clone() for name, value in pipe.named_parameters()}
        less = {name: value for name, value in other.items() if name != "6.0.bias"}
        found["missing"] = outcome(lambda: pipe.load_state_dict(less))
        found["unchanged"] = all(torch.equal(value, found["loaded"][name]) for name, value in pipe.named_parameters())
        pipe.step(batch, target=target)  # goes on
        pipe.settle()
        dict(pipe.named_parameters())["0.weight"].requires_grad_(rank == 0)
        found["frozen on one"] = outcome(lambda: pipe.step(batch, target=target))
    model = language_model()
    found["tied on one"] = outcome(lambda: Pipeline(untied(model) if rank else model, **given))
    return found


@mainly("transport", "shared-memory", "gloo")
def test_states_and_troubles_reach_every_owner(transport: str) -> None:
    first, second = launch(states, transport, num_ranks=2)
    model, other = language_model(), language_model(seed=2)
    stored = [*first["stored"], *second["stored"]]
    assert sorted(stored) == sorted(model.state_dict())
    assert "0.weight" in first["stored"]
    union = {**first["stored"], **second["stored"]}
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in union.items())
    for entry in (first, second):
        assert "0.weight" in entry["loaded"]
        assert all(torch.equal(value, other.get_parameter(name)) for name, value in entry["loaded"].items())
        kind, text = entry["missing"]
        assert (kind, "the state has no '6.0.bias'" in text) == (ModelError.__name__, True)
        assert entry["unchanged"]
        assert entry["frozen on one"][0] in ("MismatchError", "RankFailed")
        assert "0.weight is " in entry["frozen on one"][1]
        assert entry["tied on one"][0] == "MismatchError"
        assert "disagree on the set of tied tensors" in entry["tied on one"][1]


class Sparse(nn.Module):
    """Looks tokens up in a table with sparse gradients; they travel along."""

    def __init__(self, table: nn.Embedding, *, last: bool = False) -> None:
        super().__init__()
        self.table, self.last = table, last

    def forward(self, value: Any) -> Any:
        ids, x = value if isinstance(value, tuple) else (value, 0)
        made = torch.tanh(x + self.table(ids))
        return made if self.last else (ids, made)


def sparse(schedule: str) -> Tensor:
    torch.manual_seed(0)
    table = nn.Embedding(13, WIDTH, sparse=True)
    model = nn.Sequential(Sparse(table), Sparse(table, last=True))
    (program,) = programs(schedule, 2, (4,))
    reference = Reference(model, program, functional.mse_loss)
    batch, _ = tokens(8)
    target = data(8)[1][:, None, :].expand(8, 5, WIDTH)
    with Pipeline(model, loss_fn=functional.mse_loss, schedule=program) as pipe:
        pipe.step(batch, target=target)
        reference.step(batch, target)
        gradient, expected = table.weight.grad, reference.model.get_parameter("0.table.weight").grad
        assert gradient is not None
        assert expected is not None
        assert gradient.is_sparse
        torch.testing.assert_close(gradient.to_dense(), expected.to_dense())
        return gradient.to_dense()


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_sparse_gradients_travel(schedule: str) -> None:
    first, second = launch(sparse, schedule, num_ranks=2)
    assert torch.equal(first, second)
