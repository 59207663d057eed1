"""Models that decide by integer inputs, or pick rows by a mask, between blocks: as a plain loop over microbatches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from drumline.core.errors import ModelError
from drumline.pipeline.pipeline import Pipeline
from matrices import mainly, matrix
from refused import refused

pytestmark = pytest.mark.torch

ROWS, LENGTH, WORDS, WIDTH, MICROBATCHES, STEPS = 8, 6, 11, 16, 4, 3
Batch = dict[str, Any]


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, WORDS)

    def hidden(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Tagger(Body):
    """Packs what it embeds by the lengths of sentences, as taggers and speech models do."""

    def __init__(self, *, layers: int = 1, whole: bool = False) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, layers, batch_first=True, bidirectional=True)
        self.whole = LENGTH if whole else None

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Any:
        packed = pack_padded_sequence(self.hidden(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        made, _ = self.lstm(packed)
        x, _ = pad_packed_sequence(made, batch_first=True, total_length=self.whole)
        logits = self.head(x)
        wanted = labels[:, : logits.shape[1]]
        return {"loss": functional.cross_entropy(logits.reshape(-1, WORDS), wanted.reshape(-1)), "logits": logits}


class Reads(nn.Module):
    """The way out: a block that packs, runs and pads."""

    def __init__(self, lstm: nn.Module, *, padded: bool) -> None:
        super().__init__()
        self.lstm, self.padded = lstm, padded

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        made, _ = self.lstm(packed)
        return pad_packed_sequence(made, batch_first=True, total_length=x.shape[1] if self.padded else None)[0]


class PacksInside(Body):
    def __init__(self, *, padded: bool = True) -> None:
        super().__init__()
        self.read = Reads(nn.LSTM(WIDTH, WIDTH, batch_first=True), padded=padded)

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.read(self.hidden(ids), lengths))
        wanted = labels[:, : logits.shape[1]]
        return {"loss": functional.cross_entropy(logits.reshape(-1, WORDS), wanted.reshape(-1))}


class Checks(Body):
    """Refuses labels that it does not know, and decides whether there is a second loss."""

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Any:
        if labels.max() >= WORDS:
            raise ValueError("unknown labels")
        x = self.hidden(ids)
        if (lengths > 3).any().item():
            x = x * 2
        logits = self.head(x)
        return {"loss": functional.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1))}


class Cuts(Body):
    """Goes as far as the longest sentence."""

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Any:
        longest = int(lengths.max())
        logits = self.head(self.hidden(ids[:, :longest]))
        return {"loss": functional.cross_entropy(logits.reshape(-1, WORDS), labels[:, :longest].reshape(-1))}


class Picks(Body):
    """Computes its loss on the words that a mask picks."""

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Any:
        mask = torch.arange(LENGTH)[None] < lengths[:, None]
        scores = self.head(self.hidden(ids))[..., 0]
        wanted = (labels > 4).float()
        return {"loss": functional.binary_cross_entropy_with_logits(scores[mask], wanted[mask])}


class PicksAndMeans(Picks):
    """Takes the mean of what a mask picks, without a target that is picked alike."""

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Any:
        mask = torch.arange(LENGTH)[None] < lengths[:, None]
        return {"loss": self.head(self.hidden(ids))[mask].square().mean()}


class PicksFilled(Picks):
    """Selects labels that are not filled in, as losses of speech models do."""

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Any:
        x = self.head(self.hidden(ids))
        counts = labels >= 0
        chosen = x[counts]
        return {"loss": functional.cross_entropy(chosen.view(-1, WORDS), labels.masked_select(counts))}


class ReadsWhole(Body):
    """Reads integers whole."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.read = read

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.hidden(ids) * float(self.read(lengths)))
        return {"loss": functional.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1))}


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "pack_padded_sequence": (Tagger, "labels"),
    "pack_padded_sequence of two layers, padded to the whole": (lambda: Tagger(layers=2, whole=True), "labels"),
    "packed inside of a block": (PacksInside, "labels"),
    "a check that raises, and a decision": (Checks, "labels"),
    "the longest sentence": (Cuts, "labels"),
    "rows picked with their targets": (Picks, "words"),
    "rows picked alone": (PicksAndMeans, "words"),
    "labels that are not filled in": (PicksFilled, "labels"),
    "numpy": (lambda: ReadsWhole(lambda lengths: lengths.numpy().max()), "labels"),
    "unique": (lambda: ReadsWhole(lambda lengths: len(torch.unique(lengths))), "labels"),
    "tolist": (lambda: ReadsWhole(lambda lengths: sum(lengths.tolist())), "labels"),
}


def batch(step: int, rows: int = ROWS) -> Batch:
    """Return sentences of uneven lengths, those of other microbatches longer or shorter."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(WORDS, (rows, LENGTH), generator=generator)
    lengths = torch.tensor([1, 2, 6, 4, 3, 3, 5, 1]).roll(step)[:rows]
    filled = torch.arange(LENGTH)[None] >= lengths[:, None]
    return {"ids": ids, "lengths": lengths, "labels": ids.masked_fill(filled, -100)}


def counted(part: Batch, by: str) -> float:
    return float((part["labels"] >= 0).sum()) if by == "labels" else float(part["lengths"].sum())


def looped(model: nn.Module, given: Batch, by: str) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of a plain loop over microbatches, each weighted by what it counts."""
    model.zero_grad()
    parts = [{key: value.chunk(MICROBATCHES)[at] for key, value in given.items()} for at in range(MICROBATCHES)]
    weights = [counted(part, by) for part in parts]
    total = 0.0
    for part, weight in zip(parts, weights, strict=True):
        loss = model(**part)["loss"] * (weight / sum(weights))
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total, {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def pipeline(model: nn.Module, schedule: str = "1f1b", **more: Any) -> Pipeline:
    given = {"num_ranks": 2, "num_microbatches": MICROBATCHES, "balance": "even", "example": batch(0), **more}
    return Pipeline(model, schedule=schedule, **given)


def same_as_looped(model: nn.Module, schedule: str, by: str, steps: int = STEPS, **more: Any) -> None:
    mine = copy.deepcopy(model)
    with pipeline(mine, schedule, **more) as pipe:
        for step in range(steps):
            loss, wanted = looped(model, batch(step), by)
            pipe.zero_grad()
            result = pipe.step(**batch(step))
            pipe.settle()
            assert result.loss is not None
            assert float(result.loss) == pytest.approx(loss, rel=1e-5)
            found = {name: param.grad for name, param in pipe.named_parameters() if param.grad is not None}
            assert found.keys() == wanted.keys()
            for name, gradient in wanted.items():
                assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, (step, name)


@mainly("schedule", "1f1b", "gpipe")
@pytest.mark.parametrize("name", MODELS)
def test_they_are_a_plain_loop_over_the_microbatches(name: str, schedule: str) -> None:
    make, by = MODELS[name]
    torch.manual_seed(0)
    same_as_looped(make(), schedule, by)


def test_a_block_whose_shapes_depend_on_lengths_is_refused_with_what_to_pass() -> None:
    with refused(ModelError, "the shape of what 'read' returns depends on the integers", fix="total_length="):
        pipeline(PacksInside(padded=False))


def test_a_check_that_fails_in_a_later_step_raises_what_the_model_raises() -> None:
    with pipeline(Checks()) as pipe:
        pipe.step(**batch(0))
        wrong = batch(1)
        wrong["labels"][3, 0] = WORDS
        with refused(ModelError, "ValueError: unknown labels"):
            pipe.step(**wrong)


def test_other_lengths_of_batches_and_evaluation_decide_too() -> None:
    with pipeline(Cuts()) as pipe:
        pipe.step(**batch(0))
        pipe.step(**batch(1, rows=4))
        assert pipe.eval_step(**batch(2)).output["loss"].isfinite()


class AsksHowMany(Picks):
    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Any:
        x = self.head(self.hidden(ids))
        picked = x[x > 0]
        return {"loss": picked.sum() / picked.shape[0]}


class ReturnsPicked(Picks):
    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Any:
        x = self.head(self.hidden(ids))
        return {"loss": x.mean(), "chosen": x[labels >= 0]}


class DecidesByWords(Picks):
    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Any:
        x = self.head(self.hidden(ids))
        return {"loss": x.mean() if x.mean() > 0 else -x.mean()}


class PicksByScore(Picks):
    """A mean over as many elements as nobody knows before the model runs."""

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Any:
        x = self.head(self.hidden(ids))
        return {"loss": x[x > 0].mean()}


@pytest.mark.parametrize(
    ("make", "error", "fix"),
    [
        (AsksHowMany, "branches on the values of a tensor between its blocks", "into a block"),
        (ReturnsPicked, "returns rows that a mask picks", "return the mask and all rows"),
        (DecidesByWords, "branches on the values of a tensor between its blocks", "into a block"),
        (PicksByScore, "cannot tell how much each microbatch contributes", "loss_weight="),
    ],
)
def test_what_depends_on_values_of_blocks_is_refused(make: Callable[[], nn.Module], error: str, fix: str) -> None:
    with refused(ModelError, error, fix=fix), pipeline(make()) as pipe:
        pipe.step(**batch(0))


class PicksEarly(Body):
    """Picks rows, and uses them two blocks later."""

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Any:
        counts = labels >= 0
        x = self.embed(ids)[counts]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": functional.cross_entropy(self.head(x), labels[counts])}


def test_no_cut_parts_picked_rows_from_where_they_are_used() -> None:
    with refused(ModelError, "rows that a mask picks are used there"):
        pipeline(PicksEarly(), cuts=["layers.1"])


class Skips(nn.Module):
    """Runs a layer, or passes its input on by chance; it notes which."""

    def __init__(self, layer: nn.Module, chance: float) -> None:
        super().__init__()
        self.layer, self.chance = layer, chance
        self.skipped: list[bool] = []
        self.replayed: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.skipped.append(bool(self.training and torch.rand(()) < self.chance))
        skips = self.replayed.pop(0) if self.replayed else self.skipped[-1]
        made: Tensor = x if skips else self.layer(x)
        return made


class Drops(nn.Module):
    def __init__(self, chance: float = 0.5, *, wrapped: bool) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        self.layers: Any = nn.ModuleList([Skips(layer, chance) for layer in layers] if wrapped else layers)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.chance, self.wrapped = chance, wrapped

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            if self.wrapped or torch.rand(()) > self.chance:
                x = layer(x).tanh()
        return self.head(x)


def test_layers_skipped_between_blocks_are_refused_with_the_module_that_skips_them() -> None:
    with refused(ModelError, "branches on a random number", fix="wrap each layer in a module that skips it"):
        pipeline(Drops(wrapped=False), example=torch.randn(8, WIDTH), loss_fn=functional.mse_loss)


@matrix("seed, schedule", range(3), ["1f1b", "gpipe", "zb-h1"], times=1)
def test_layers_that_blocks_skip_at_random_are_a_plain_loop_with_the_same_draws(schedule: str, seed: int) -> None:
    torch.manual_seed(seed)  # whatever is drawn while it is traced
    model, x, y = Drops(wrapped=True), torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    mine = copy.deepcopy(model)
    drawn = []
    with pipeline(mine, schedule, example=x, loss_fn=functional.mse_loss, check_model=False, seed=seed) as pipe:
        pipe.step(x, target=y)  # the first step may run a block once more, to see what it returns
        for step in range(2):
            for layer in mine.layers:
                layer.skipped.clear()
            pipe.zero_grad()
            result = pipe.step(x + step, target=y)
            pipe.settle()
            model.zero_grad()
            assert len(mine.layers) == len(model.layers) == 4
            for layer, other in zip(model.layers, mine.layers, strict=True):
                layer.replayed[:] = other.skipped
                drawn += other.skipped
                assert len(other.skipped) == MICROBATCHES
            total = 0.0
            for part, wanted in zip((x + step).chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
                loss = functional.mse_loss(model(part), wanted) / MICROBATCHES
                torch.autograd.backward(loss)
                total += float(loss.detach())
            assert result.loss is not None
            assert float(result.loss) == pytest.approx(total, rel=1e-5)
            found = {name: param.grad for name, param in pipe.named_parameters()}
            for name, param in model.named_parameters():
                assert torch.allclose(_or_zeros(found[name], param), _or_zeros(param.grad, param), atol=1e-6), name
    assert set(drawn) == {True, False}


def _or_zeros(gradient: Tensor | None, param: Tensor) -> Tensor:
    return torch.zeros_like(param) if gradient is None else gradient


class Noisy(nn.Module):
    """Adds noise of its own generator."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.chance = torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x) + torch.randn(x.shape, generator=self.chance)
        return made


class NoisyBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Noisy(at) for at in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def test_generators_of_traced_blocks_draw_as_in_a_plain_loop() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)

    def made() -> NoisyBody:
        torch.manual_seed(1)
        return NoisyBody()

    model = made()
    with pipeline(made(), example=x, loss_fn=functional.mse_loss) as pipe:
        for _ in range(STEPS):
            pipe.zero_grad()
            pipe.step(x, target=y)
            pipe.settle()
            model.zero_grad()
            for part, wanted in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
                torch.autograd.backward(functional.mse_loss(model(part), wanted) / MICROBATCHES)
            found = {name: param.grad for name, param in pipe.named_parameters()}
            for name, param in model.named_parameters():
                gradient = found[name]
                assert gradient is not None
                assert param.grad is not None
                assert torch.allclose(gradient, param.grad, atol=1e-6), name


def test_a_model_that_keeps_what_a_forward_made_is_traced() -> None:
    class Keeps(Body):
        def __init__(self) -> None:
            super().__init__()
            self.kept: Tensor | None = None

        def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Any:
            return {
                "loss": functional.cross_entropy(self.head(self.hidden(ids)).reshape(-1, WORDS), labels.reshape(-1))
            }

    model = Keeps()
    model.kept = model.hidden(batch(0)["ids"])
    with pipeline(model) as pipe:
        assert pipe.step(**batch(0)).loss is not None


def test_many_kinds_of_values_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.model.blocks.script._MANY", 6)
    monkeypatch.setattr("drumline.model.blocks.script._MOST", 8)
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same_as_looped(Tagger(), "1f1b", "labels", steps=5)
    assert sum("the model was traced 6 times" in str(warning.message) for warning in caught) == 1
