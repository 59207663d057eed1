"""An axis tp divides the layers of a pipeline's stages: it trains as one process does, whatever the schedule."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from drumline.channel.launch.launch import launch
from drumline.core.errors import DrumlineError, ModelError
from drumline.pipeline.pipeline import Pipeline
from matrices import ALL, long
from refused import refused
from some import some
from tensor_models import MODELS, alone, batch, chain, gpt, llama, loss_fn, plan

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.matrix]
NUM_STEPS = 20 if ALL else 4
PP2_TP2 = {"pp": 2, "tp": 2}
Case = tuple[str, str, dict[str, int], dict[str, Any]]
CASES: dict[str, Case] = {
    "1f1b": ("chain", "1f1b", PP2_TP2, {}),
    "zb-v": ("chain", "zb-v", PP2_TP2, {}),
    "interleaved-zb": ("chain", "interleaved-zb", PP2_TP2, {}),
    "dualpipe-v": ("chain", "dualpipe-v", PP2_TP2, {}),
    "two copies": ("chain", "dualpipe", PP2_TP2, {}),
    "recomputed": ("chain", "zb-v", PP2_TP2, {"checkpoint": "full"}),
    "traced": ("gpt", "zb-v", PP2_TP2, {}),
    "sequences": ("gpt", "dualpipe-v", PP2_TP2, {"sequence_parallel": True}),
    "sequences of a chain": ("chain", "interleaved-zb", PP2_TP2, {"sequence_parallel": True, "checkpoint": "full"}),
    "Hugging Face": ("llama", "zb-v", PP2_TP2, {}),
    "Hugging Face, sequences": ("llama", "1f1b", PP2_TP2, {"sequence_parallel": True}),
    "beside dp": ("gpt", "1f1b", {"dp": 2, "tp": 2}, {"sequence_parallel": True}),
}
# `make matrices` runs all of them over 20 steps, other runs those that together have every part, over fewer.
if not ALL:
    KEPT = ("recomputed", "two copies", "sequences", "Hugging Face")
    CASES = {name: CASES[name] for name in KEPT}


def pipeline(kind: str, schedule: str, mesh: dict[str, int], **settings: Any) -> Pipeline:
    model = MODELS[kind]()
    how: dict[str, Any] = {"balance": "even"} if kind == "chain" else {"balance": "parameters", "example": batch(0)[0]}
    if kind == "llama":
        how["example"] = {"input_ids": batch(0)[0], "labels": batch(0)[1]}
    if kind == "chain" and mesh.get("tp", 1) > 1:
        how["tensor_parallel"] = plan()
    return Pipeline(
        model,
        loss_fn=None if kind == "llama" else loss_fn,
        schedule=schedule,
        mesh=mesh,
        timeout=120.0,
        **{"num_microbatches": 4 // mesh.get("dp", 1), **how, **settings},
    )


def stepped(pipe: Pipeline, step: int) -> float:
    """Run a step on this line's rows, clip and return the loss."""
    x, y = batch(step)
    at, count = pipe.axes.rows
    x, y = (tensor.chunk(count)[at] for tensor in (x, y))
    named = pipe._run.intake.has_own_loss
    result = pipe.step(input_ids=x, labels=y) if named else pipe.step(x, target=y)
    pipe.clip_grad_norm_(1.0)
    assert result.loss is not None
    return float(result.loss)


def trained(names: list[str]) -> dict[str, tuple[list[float], int]]:
    """Train each case; return the losses, and how many parameters the first step was checked for."""
    found = {}
    for name in names:
        kind, schedule, mesh, settings = CASES[name]
        with pipeline(kind, schedule, mesh, **settings) as pipe:
            optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-3)
            losses = []
            for step in range(NUM_STEPS):
                losses.append(stepped(pipe, step))
                optimizer.step()
                optimizer.zero_grad()
            assert pipe.checked is not None
            assert not pipe.checked.unchecked
            found[name] = losses, pipe.checked.num_parameters
    return found


def shown(names: list[str]) -> dict[str, Any]:
    """Return all that four ranks show, in one launch."""
    return {
        "trained": trained(names),
        "muon": _muon(),
        "states": _states(),
        "evaluated": _evaluated(),
        "dropout": _dropout(),
        "refused": _refused(),
    }


def _muon() -> list[float]:
    with warnings.catch_warnings(), pipeline("chain", "zb-v", PP2_TP2) as pipe:
        warnings.simplefilter("ignore")
        matrices = [name for name, shape in pipe.parameter_shapes().items() if len(shape) == 2]
        optimizer = pipe.optimizer(torch.optim.Muon, names=matrices, lr=1e-3)
        losses = []
        for step in range(3):
            losses.append(stepped(pipe, step))
            optimizer.step()
            optimizer.zero_grad()
        shapes = pipe.parameter_shapes()
        state = optimizer.state_dict()["state"]
        assert all(entry["momentum_buffer"].shape == shapes[name] for name, entry in some(state.items()))
        return losses


def _states() -> dict[str, torch.Tensor]:
    """Return the whole state after a step from loaded weights."""
    whole = chain()
    with torch.no_grad():
        for param in whole.parameters():
            param.mul_(0.5)
    with pipeline("chain", "1f1b", PP2_TP2) as pipe:
        pipe.load_state_dict(whole.state_dict())
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        stepped(pipe, 0)
        optimizer.step()
        local = dict(pipe.named_parameters())
        state = pipe.state_dict()
        for name, param in some(local.items()):
            divided = getattr(param, "slice", None) is not None
            assert (param.shape == pipe.parameter_shapes()[name]) is not divided
            assert state[name].shape == pipe.parameter_shapes()[name]
        return state


def _evaluated() -> list[torch.Tensor | None]:
    """Return outputs: of an input of another length, and after the model's mode changed, so that it is traced again."""
    model = gpt()
    with Pipeline(
        model, loss_fn=loss_fn, example=batch(0)[0], balance="even", num_microbatches=4, mesh=PP2_TP2, timeout=120.0
    ) as pipe:
        stepped(pipe, 0)
        found = [pipe.eval_step(batch(0)[0][:, :4]).output]
        model.eval()
        found.append(pipe.eval_step(batch(0)[0]).output)
        model.train()
        stepped(pipe, 0)
        return found


def _dropout() -> list[float]:
    """Return losses with dropout on what all lines have, with whole rows and with parts of them."""
    found = []
    for sequence in (False, True):
        model = chain(dropout=0.2)
        with Pipeline(
            model,
            loss_fn=loss_fn,
            num_microbatches=4,
            mesh=PP2_TP2,
            tensor_parallel=plan(),
            timeout=120.0,
            sequence_parallel=sequence,
        ) as pipe:
            found += [stepped(pipe, step) for step in range(2)]
    return found


def _error(**settings: Any) -> str:
    """Return the error of a pipeline, or of its first step."""
    model = settings.pop("model", None) or chain()
    x, y = batch(settings.pop("step", 0))
    given = {"loss_fn": loss_fn, "num_microbatches": 4, "mesh": PP2_TP2, "timeout": 120.0}
    try:
        with Pipeline(model, **{**given, **settings}) as pipe:
            pipe.step(x, target=y)
    except DrumlineError as error:
        return str(error)
    return ""


def _refused() -> dict[str, str]:
    three, x = {"num_heads": 3, "num_key_value_heads": 3, "hidden": 12, "qk_norm": False}, batch(0)[0]
    return {
        "no plan": _error(),
        "no module": _error(tensor_parallel={"*.q": "colwise"}),
        "uneven": _error(model=nn.Sequential(nn.Embedding(24, 5), nn.Linear(5, 9)), tensor_parallel={"1": "colwise"}),
        "no rows": _error(tensor_parallel={name: style for name, style in plan().items() if style != "rowwise"}),
        "no columns": _error(tensor_parallel={name: style for name, style in plan().items() if style == "rowwise"}),
        "heads": _error(model=gpt(**three), example=x, balance="parameters"),
        "drawn": _error(model=gpt(dropout=0.5), example=x, balance="parameters"),
        "rows": _error(tensor_parallel=plan(), step=int(os.environ["RANK"]) % 2),
        "compile": _error(tensor_parallel=plan(), compile="aot_eager"),
    }


REFUSALS = {
    "no plan": "has no tensor_parallel_plan",
    "no module": "no module of the model matches it",
    "uneven": "1.weight of shape (9, 5) is divided by 2 (tp)",
    "no rows": 'by columns, and no layer by rows takes its part; expected a "rowwise" layer behind it',
    "no columns": 'by rows, and no layer by columns makes its input in parts; expected a "colwise" layer before it',
    "heads": "has 3 heads of 4 features, and tp is 2",
    "drawn": "random numbers are drawn before blocks.",
    "rows": "which hold parts of the same layers (tp), got different batches",
    "compile": "expected compile=False",
}


def near(found: list[float], wanted: list[float], case: str) -> None:
    for value, other in some(zip(found, wanted, strict=True)):
        assert abs(value - other) <= 1e-5 * abs(other), (case, found, wanted)


def _cases() -> list[str]:
    try:
        import transformers  # noqa: F401 - only whether it is there
    except ModuleNotFoundError:
        return [name for name, case in CASES.items() if case[0] != "llama"]
    return list(CASES)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch(shown, _cases(), num_ranks=4)


@long
def test_losses_are_those_of_one_process_over_20_steps(ranks: list[dict[str, Any]]) -> None:
    names, each = _cases(), [rank["trained"] for rank in ranks]
    wanted = {kind: alone(kind, NUM_STEPS) for kind in {CASES[name][0] for name in names}}
    for name in some(names):
        kind = CASES[name][0]
        near(each[0][name][0], wanted[kind], name)
        assert all(value[name] == each[0][name] for value in some(each)), name  # all ranks tell the same
        assert each[0][name][1] == len(list(MODELS[kind]().parameters())), name  # all were checked


@long
def test_whole_matrices_states_dropout_and_refusals(ranks: list[dict[str, Any]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about products in bf16 on some processors
        # In a process of its own: matrices in bfloat16 change the last bits of later ones on some processors.
        near(ranks[0]["muon"], launch(alone, "chain", 3, torch.optim.Muon, num_ranks=1)[0], "muon")
    whole = {name: state for found in ranks for name, state in found["states"].items()}
    reference = chain()
    with torch.no_grad():
        for param in reference.parameters():
            param.mul_(0.5)
    torch.autograd.backward(loss_fn(reference(batch(0)[0]), batch(0)[1]))
    nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for name, param in some(reference.state_dict().items()):
        torch.testing.assert_close(whole[name], param, rtol=1e-5, atol=1e-6)
    model, x = gpt(), batch(0)[0]
    for made, wanted in some(zip(ranks[3]["evaluated"], (model(x[:, :4]), model(x)), strict=True)):
        torch.testing.assert_close(made, wanted.detach(), rtol=1e-5, atol=1e-6)
    with Pipeline(chain(dropout=0.2), loss_fn=loss_fn, num_microbatches=4, num_ranks=1) as pipe:
        alike = [stepped(pipe, step) for step in range(2)]
    near(ranks[0]["dropout"], alike * 2, "dropout")
    for found in some(ranks):
        for what, text in some(REFUSALS.items()):
            assert text in found["refused"][what], (what, found["refused"][what])


def eight() -> list[float]:
    with pipeline("gpt", "zb-v", {"pp": 2, "dp": 2, "tp": 2}, num_microbatches=4, sequence_parallel=True) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-3)
        losses = []
        for step in range(NUM_STEPS):
            losses.append(stepped(pipe, step))
            optimizer.step()
            optimizer.zero_grad()
        return losses


@long
def test_three_axes_train_as_one_process_does() -> None:
    each = launch(eight, num_ranks=8)
    near(each[0], alone("gpt", NUM_STEPS), "pp2 x dp2 x tp2")


def test_a_plan_is_translated_from_torch_and_hugging_face() -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    from drumline.model.layers.styles import Colwise, Rowwise, StylePlan

    given = StylePlan.of(
        {"a": ColwiseParallel(), "b": RowwiseParallel(), "c": ColwiseParallel(output_layouts=Replicate())}, None
    )
    assert [style for _, style in given.styles] == [Colwise(), Rowwise(), Colwise(gather=True)]
    with refused(DrumlineError, "RowwiseParallel", fix="sequence_parallel=True"):
        StylePlan.of({"a": RowwiseParallel(output_layouts=Shard(1))}, None)
    with refused(ModelError, "tensor_parallel_plan"):
        StylePlan.of(None, chain())
    assert StylePlan.of(None, gpt()).style_of("blocks.3.attention.out") == Rowwise()


def test_a_hugging_face_model_brings_its_plan() -> None:
    pytest.importorskip("transformers")
    from drumline.model.layers.styles import Colwise, PlainStyle, StylePlan

    own = StylePlan.of(None, llama())
    assert own.style_of("model.layers.0.self_attn.q_proj") == Colwise()
    assert own.style_of("lm_head") == Colwise(gather=True)
    assert own.style_of("model.embed_tokens") == PlainStyle.VOCABULARY
    assert own.style_of("model.norm") is None
