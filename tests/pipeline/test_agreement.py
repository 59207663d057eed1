"""Ranks that were not given the same, or do not do the same, are told so: at once, and with the right rank."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.channel.launch.launch import launch
from drumline.core.errors import DrumlineError, MismatchError, RankFailed, RunError, WaitTimeout
from drumline.engine.ranks import transports
from drumline.engine.ranks.agreement import (
    ArgumentPrint,
    TracedKinds,
    agree_on_batch,
    agree_on_followed,
    begun,
    code_of,
    first_difference,
    plan_of,
    samples_of,
)
from drumline.model.block import Block
from drumline.model.blocks.pieces import pieces_of
from drumline.model.follow.inputs import Inputs
from drumline.pipeline.pipeline import Pipeline
from matrices import long
from refused import refused

pytestmark = pytest.mark.torch

WIDTH = 6
KINDS = ["full", "sliding", "half", "quarter"]


class Rotated(nn.Module):
    """Goes through its kinds in an order that is another in every process, as that of a set of strings is."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.order = order

    def forward(self, x: Tensor) -> Any:
        turned = {kind: x * len(kind) + ord(kind[0]) * 0.01 for kind in self.order}
        for kind, layer in zip(KINDS, self.layers, strict=True):
            x = layer(x + turned[kind]).tanh()
        return x + turned["full"]


def data(rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def written(blocks: list[Block]) -> dict[str, list[str]]:
    plan = plan_of(blocks)
    assert plan is not None
    return plan.written


def test_pieces_of_ranks_that_went_through_a_set_in_different_orders_fit_together() -> None:
    torch.manual_seed(0)
    first = Rotated(KINDS)
    second = Rotated(KINDS[::-1])
    second.load_state_dict(first.state_dict())
    x, _ = data()
    ours, theirs = (pieces_of(model, Inputs((x,), {})) for model in (first, second))
    value: Any = Inputs((x,), {})
    for number in range(4):
        piece: Any = (ours if number % 2 else theirs)[number].module
        value = piece.seal(piece(value))
    assert torch.equal(value, first(x))
    assert written(ours) == written(theirs)


class Doubles(Rotated):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * len(self.order)


def test_another_graph_is_seen_in_what_was_written() -> None:
    x, _ = data()
    row, other = (pieces_of(Doubles(order), Inputs((x,), {})) for order in (KINDS, [*KINDS, "other"]))
    assert written(row) != written(other)


class Grown(Rotated):
    """Goes by its order only where it is given more rows than at first."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (len(self.order) if len(x) > 2 else 1)


def test_kinds_of_input_that_come_late_are_told_once_and_compared() -> None:
    x, _ = data()
    models = [Grown(KINDS), Grown(KINDS[::-1]), Grown([*KINDS, "other"])]
    each = [pieces_of(model, Inputs((x[:2],), {})) for model in models]
    followed = [TracedKinds(blocks) for blocks in each]
    assert [kinds.fresh() for kinds in followed] == [{}] * 3
    told = []
    for blocks, kinds in zip(each, followed, strict=True):
        for rows in (x[:2], x[:4], x[:4]):
            value: Any = Inputs((rows,), {})
            for block in blocks:
                value = block.module(value)
        told.append(kinds.fresh())
        assert kinds.fresh() == {}
    assert [len(entry) for entry in told] == [1] * 3
    agree_on_followed(told[:2], 1)
    agree_on_followed([told[0], {}, told[1]], 1)
    with refused(MismatchError, "step 1: ranks 1 and 2 traced the model to different graphs for new inputs"):
        agree_on_followed([{}, told[0], told[2]], 1)


class Changes(Rotated):
    """Changes a value in place, before it is used or afterwards."""

    def forward(self, x: Tensor) -> Any:
        x = self.layers[0](x)
        if self.order == KINDS:
            x.add_(1)
        made = x * 2
        if self.order != KINDS:
            x.add_(1)
        return self.layers[1](made + x)


def test_what_a_value_was_when_it_was_used_is_seen_in_what_was_written() -> None:
    x, _ = data()
    row, other = (pieces_of(Changes(order), Inputs((x,), {})) for order in (KINDS, KINDS[::-1]))
    assert written(row) != written(other)


def test_batches_differ_by_shape_or_by_numbers_and_none_is_no_batch() -> None:
    x, y = data()
    agree_on_batch(
        [ArgumentPrint.of((x,), None), ArgumentPrint.of(None, y), ArgumentPrint.of((x.clone(),), y), None], 0
    )
    with refused(MismatchError, "ranks 0 and 2 got different batches: same shapes, different values"):
        agree_on_batch([ArgumentPrint.of((x,), None), None, ArgumentPrint.of((x + 1,), None)], 0)
    with refused(MismatchError, "ranks 0 and 1 got different batches: same shapes, different values"):
        agree_on_batch([ArgumentPrint.of((x,), None), ArgumentPrint.of((torch.cat([x[:-1], x[-1:] + 1]),), None)], 0)
    with refused(MismatchError, r"different targets: float32\(8, 6\) and float32\(7, 6\)"):
        agree_on_batch([ArgumentPrint.of(None, y), ArgumentPrint.of(None, y[:7])], 0)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t(),
    "sliced": lambda x: x[:, 1:4],
    "every other": lambda x: x[::2],
    "expanded": lambda x: x[:, None, :].expand(8, 3, 6),
    "in bfloat16": lambda x: x.bfloat16().t(),
    "in float8": lambda x: x.to(torch.float8_e4m3fn).t(),
    "conjugated": lambda x: torch.complex(x, x).conj(),
    "permuted": lambda x: x.view(2, 4, 6).permute(2, 0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_count_however_memory_is_laid_out(layout: str) -> None:
    x, _ = data()
    tensor, other = LAYOUTS[layout](x), LAYOUTS[layout](x + 1)
    agree_on_batch([ArgumentPrint.of((tensor,), None), ArgumentPrint.of((tensor.contiguous().clone(),), None)], 0)
    with refused(MismatchError, "ranks 0 and 1 got different batches: same shapes, different values"):
        agree_on_batch([ArgumentPrint.of((tensor,), None), ArgumentPrint.of((other,), None)], 0)
    with refused(MismatchError, "ranks 0 and 1 got different targets: same shapes, different values"):
        agree_on_batch([ArgumentPrint.of(None, tensor.contiguous()), ArgumentPrint.of(None, other)], 0)


def test_every_part_of_a_tensor_is_looked_at() -> None:
    for number in (1, 2, 7, 8, 9, 15, 16, 17, 1000):
        for tensor in (torch.zeros(number), torch.zeros(number, 2)[:, 0]):
            looked = 0
            for start in range(8):
                other = tensor.clone() if tensor.is_contiguous() else torch.zeros(number, 2)[:, 0]
                other[number * start // 8 : max(number * start // 8 + 1, number * (start + 1) // 8)] = 1.0
                looked += ArgumentPrint.of(other, None) != ArgumentPrint.of(tensor, None)
            assert looked == 8, (number, tensor.stride())


def test_a_batch_is_what_it_was_before_the_step() -> None:
    x, _ = data()
    later = begun((x.t(),), None)
    before = ArgumentPrint.of((x.t().clone(),), None)
    x.mul_(2)
    assert later() == before


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_on_a_device_are_those_on_the_host(layout: str) -> None:
    x, _ = data()
    tensor = LAYOUTS[layout](x)
    there = LAYOUTS[layout](x.cuda())
    agree_on_batch([ArgumentPrint.of((tensor,), None), ArgumentPrint.of((there,), None)], 0)
    with refused(MismatchError, "same shapes, different values"):
        agree_on_batch([ArgumentPrint.of((tensor,), None), ArgumentPrint.of((LAYOUTS[layout](x.cuda() + 1),), None)], 0)


def test_code_and_settings_of_torchs_layers_tell_models_apart() -> None:
    assert code_of(Rotated(KINDS)) == code_of(Rotated(KINDS[::-1]))
    assert code_of(Rotated(KINDS)) != code_of(Doubles(KINDS))
    assert code_of([nn.ReLU()], functional.mse_loss) != code_of([nn.ReLU()], functional.l1_loss)
    entry, other = (dict(nn.Linear(3, 3, bias=False).named_parameters()) for _ in range(2))
    assert first_difference([samples_of(entry), samples_of(entry), samples_of(other)]) == (0, 2, "weight")


# ---- real ranks ------------------------------------------------------------------------------------------------------


def seen(run: Callable[[], Any]) -> tuple[str, str, float]:
    """Return the error that a rank raised, and after how long."""
    started = time.monotonic()
    try:
        run()
    except DrumlineError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", time.monotonic() - started


def model(seed: int = 0, order: list[str] | None = None) -> Rotated:
    torch.manual_seed(seed)
    return Rotated(order or KINDS)


def pipeline(made: nn.Module | None = None, **settings: Any) -> Pipeline:
    given: dict[str, Any] = {"num_microbatches": 4, "timeout": 60, "balance": "even", "loss_fn": functional.mse_loss}
    return Pipeline(made or model(), example=data()[0], **(given | settings))


def on_a_rank() -> dict[str, tuple[str, str, float]]:
    import torch.distributed as dist

    rank = dist.get_rank()
    x, y = data()
    found: dict[str, tuple[str, str, float]] = {}

    def stepped(pipe: Pipeline, batch: Tensor, target: Tensor) -> None:
        pipe.step(batch, target=target)
        pipe.settle()

    found["set"] = seen(lambda: stepped(pipeline(model(order=KINDS if rank else KINDS[::-1])), x, y))
    found["transport"] = seen(lambda: pipeline(transport="gloo" if rank else "shared-memory"))
    found["graph"] = seen(lambda: pipeline(Doubles(KINDS if rank else KINDS[:3] + ["full", "half", "quarter"])))
    found["code"] = seen(lambda: pipeline(loss_fn=functional.mse_loss if rank else functional.l1_loss))
    found["setting"] = seen(lambda: pipeline(merge_weight_gradients=bool(rank)))
    found["weights"] = seen(lambda: stepped(pipeline(model(seed=rank)), x, y))
    state = model(seed=5).state_dict()

    def loaded() -> None:
        pipe = pipeline(model(seed=rank))
        pipe.load_state_dict(state)
        stepped(pipe, x, y)

    found["loaded"] = seen(loaded)
    found["batch"] = seen(lambda: stepped(pipeline(check_model=False), x + rank, y))
    found["checked batch"] = seen(lambda: stepped(pipeline(), x + rank, y))
    found["checked target"] = seen(lambda: stepped(pipeline(), x, y + rank))
    found["turned"] = seen(lambda: stepped(pipeline(check_model=False), (x.t().contiguous() + rank).t(), y))
    found["strides"] = seen(lambda: stepped(pipeline(check_model=False), x.t().contiguous().t() if rank else x, y))

    def late() -> None:
        torch.manual_seed(0)
        pipe = pipeline(Grown([*KINDS, "other"] if rank else KINDS))
        stepped(pipe, x, y)
        stepped(pipe, *data(16))

    found["late"] = seen(late)
    found["rows"] = seen(lambda: stepped(pipeline(check_model=False), x[: 8 - rank], y[: 8 - rank]))

    def beside() -> None:
        pipe = pipeline(check_model=False)
        if rank:
            pipe.eval_step(x, target=y)
        else:
            pipe.step(x, target=y)
        pipe.settle()

    found["beside"] = seen(beside)
    pipe = pipeline(check_model=False)
    if not rank:
        found["left"] = seen(lambda: stepped(pipe, x, y))
    return found


@long
@pytest.mark.cold_ranks
def test_ranks_that_differ_learn_of_it_and_of_the_right_rank() -> None:
    zero, entry = launch(on_a_rank, num_ranks=2, timeout=240)
    assert zero["set"][0] == entry["set"][0] == ""
    assert zero["loaded"][0] == entry["loaded"][0] == ""
    assert zero["strides"][0] == entry["strides"][0] == ""
    texts = {
        "transport": "ranks 0 and 1 disagree on transport: shared-memory and gloo",
        "graph": "ranks 0 and 1 traced the model to different graphs: layers",
        "code": "ranks 0 and 1 have different code of the model: ",
        "setting": "ranks 0 and 1 disagree on merge_weight_gradients: False and True",
        "weights": "ranks 0 and 1 were given models with different values of layers.0.weight",
        "batch": "step 0: ranks 0 and 1 got different batches: same shapes, different values",
        "checked batch": "step 0: ranks 0 and 1 got different batches: same shapes, different values",
        "checked target": "step 0: ranks 0 and 1 got different targets: same shapes, different values",
        "turned": "step 0: ranks 0 and 1 got different batches: same shapes, different values",
        "late": "step 1: ranks 0 and 1 traced the model to different graphs for new inputs",
        "rows": "step 0: ranks 0 and 1 got different batches: float32(8, 6) and float32(7, 6)",
    }
    for what, text in texts.items():
        for each in (zero, entry):
            kind, said, _ = each[what]
            assert (kind, said[: len(text)]) == ("MismatchError", text), what
    assert any(each["beside"][0] == "MismatchError" and "eval_step" in each["beside"][1] for each in (zero, entry))
    kind, said, _ = zero["left"]
    assert kind == "RankFailed"
    assert said.startswith("rank 1 closed its channel while rank 0 was still waiting for it: rank 0 at 0B")
    assert said.endswith("; call step and eval_step the same number of times on every rank, and close() after them")
    assert max(seconds for each in (zero, entry) for *_, seconds in each.values()) < 50  # none waited for its timeout


def leaves_early() -> None:
    import torch.distributed as dist

    pipe = pipeline(check_model=False)
    if dist.get_rank() == 0:
        pipe.step(*data()[:1], target=data()[1])


def test_a_rank_that_left_is_the_one_that_is_named() -> None:
    with pytest.raises(RankFailed, match="rank 1 closed its channel while rank 0") as caught:
        launch(leaves_early, num_ranks=2, timeout=120)
    assert caught.value.rank == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank_is_waited_for_no_longer_than_the_timeout(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    if rank == 0:  # however long a busy machine takes to reach the store of this very process
        store = transports._store
        monkeypatch.setattr(transports, "_store", lambda rank, size, _, interface: store(rank, size, 60.0, interface))
    missing = "rank 1 to report its arrival" if rank == 0 else "the store of rank 0 at 127"
    text = f"rank {rank} waits for {missing}"
    with refused(WaitTimeout, text):
        transports.num_ranks("gloo", None, timeout=0.5)


def test_a_wrong_interface_is_refused_on_one_host_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with refused(RunError, "interface is 'wire7'", expected="an interface of this host"):
        transports.num_ranks("shared-memory", None, interface="wire7")
