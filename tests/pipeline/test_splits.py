"""How arguments are cut into microbatches, and what a step returns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.errors import BatchError, UsageError
from drumline.engine.model.splits import found_split
from drumline.model.follow.inputs import Inputs
from drumline.pipeline.pipeline import Pipeline
from drumline.runtime.batch import cut
from refused import refused

pytestmark = pytest.mark.torch

ROWS = 6


class Reader(nn.Module):
    """Takes text, positions, a factor, and pictures whose patches are packed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places, self.see = nn.Embedding(9, 4), nn.Embedding(8, 4), nn.Linear(3, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        factor: Any = 1.0,
        turned: Tensor | None = None,
        patches: Tensor | None = None,
    ) -> Tensor:
        x: Tensor = self.embed(ids)
        if positions is not None:
            x = x + self.places(positions)
        if turned is not None:
            x = x + turned.t()[..., None]
        if patches is not None:
            x = x + self.see(patches).unflatten(0, (len(ids), -1)).mean(1, keepdim=True)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * factor
        return x


IDS = torch.arange(ROWS * 5).reshape(ROWS, 5) % 9
PATCHES = torch.randn(ROWS * 3, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("given", "split"),
    [
        ({"positions": torch.arange(5)[None]}, None),
        ({"factor": torch.tensor(0.5)}, None),
        ({"factor": 0.5}, None),
        ({"factor": torch.rand(4, generator=torch.Generator().manual_seed(2))}, {"factor": None}),
        ({"turned": torch.rand(5, ROWS, generator=torch.Generator().manual_seed(3))}, {"turned": 1}),
        ({"patches": PATCHES}, {"patches": lambda given: [3] * len(given["ids"])}),
    ],
)
def test_arguments_that_are_not_cut_along_their_first_dimension(given: dict[str, Any], split: Any) -> None:
    model = Reader()
    reference = copy.deepcopy(model)
    batch = {"ids": IDS, **given}
    target = torch.zeros(ROWS, 5, 4)
    pipe = Pipeline(
        model,
        loss_fn=functional.mse_loss,
        num_ranks=2,
        num_microbatches=4,
        split=split,
        example=batch,
        example_target=target,
        balance="even",
    )
    result = pipe.step(**batch, target=target, outputs=True)
    wanted = reference(**batch)
    torch.autograd.backward(functional.mse_loss(wanted, target))
    assert torch.allclose(result.output, wanted, atol=1e-6)
    assert not result.output.requires_grad
    expected = dict(reference.named_parameters())
    for name, param in pipe.named_parameters():
        other = expected[name].grad
        assert (param.grad is None) == (other is None), name
        assert param.grad is None or torch.allclose(param.grad, other, atol=1e-6), name  # type: ignore[arg-type]
    assert torch.allclose(pipe.eval_step(**batch).output, wanted, atol=1e-6)


def test_splits_that_say_nothing_are_refused() -> None:
    settings: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_ranks": 2, "num_microbatches": 2}
    with refused(UsageError, "split is 'rows' for 'ids'", expected="a dimension"):
        Pipeline(Reader(), example=IDS, split={"ids": "rows"}, **settings)  # type: ignore[dict-item]
    with refused(UsageError, "split is 3", expected="a dict"):
        Pipeline(Reader(), example=IDS, split=3, **settings)  # type: ignore[arg-type]
    with refused(BatchError, r"tensors of shapes \(6, 5\), \(18, 3\)", fix=r"split=\{'name': 1\}"):
        Pipeline(Reader(), example={"ids": IDS, "patches": PATCHES}, **settings)
    with refused(BatchError, "split counts 12 in 6 rows", expected="6 counts"):
        Pipeline(
            Reader(), example={"ids": IDS, "patches": PATCHES}, split={"patches": lambda given: [2] * ROWS}, **settings
        )


def test_pictures_that_are_packed_go_to_the_rows_whose_text_has_places_for_them() -> None:
    class Config:
        image_token_id = 7

    model: Any = nn.Module()
    model.config = Config()
    ids = torch.tensor([[7, 7, 1], [1, 2, 3], [7, 2, 7]])
    grids = torch.tensor([[1, 1, 2], [1, 1, 1], [1, 1, 1]])
    pixels = torch.arange(4)
    batch = Inputs((), {"input_ids": ids, "image_grid_thw": grids, "pixel_values": pixels})
    parts = cut(batch, 3, split=found_split(model, None)(batch))
    assert [part.kwargs["pixel_values"].tolist() for part in parts] == [[0, 1], [], [2, 3]]
    assert [len(part.kwargs["image_grid_thw"]) for part in parts] == [1, 0, 2]


def test_outputs_are_returned_only_where_they_are_wanted() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    x, y = torch.randn(5, 3), torch.zeros(5, 2)
    wanted = copy.deepcopy(model)(x)
    pipe = Pipeline(model, loss_fn=functional.mse_loss, num_ranks=2, num_microbatches=2)
    assert pipe.step(x, target=y).output is None
    assert torch.allclose(pipe.step(x, target=y, outputs=True).output, wanted, atol=1e-6)
    assert pipe.eval_step(x, outputs=False).output is None
    full = Pipeline(model, loss_fn=functional.mse_loss, num_ranks=2, num_microbatches=2, checkpoint="full")
    assert torch.allclose(full.step(x, target=y, outputs=True).output, wanted, atol=1e-6)
