"""Models of transformers on meshes: every style of their own plans, experts and their losses, and routers' loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import drumline as dl
from drumline.channel.lines.slices import put_together, slice_of
from drumline.core.errors import BatchError, ModelError
from drumline.features.mesh.tensor.divide import divided_by
from drumline.model.block import Block
from drumline.model.layers.styles import _THEIRS, StylePlan, style_named
from matrices import ALL, long
from refused import refused
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.matrix, pytest.mark.features("mesh")]
transformers = pytest.importorskip("transformers")

WORDS, WIDTH, LENGTH, ROWS, EXPERTS = 24, 16, 6, 8, 4
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 4, "head_dim": 4,
}  # fmt: skip
# The class of a model, its configuration, and the styles that only it has here.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "Mixtral": (
        "Mixtral",
        {"num_local_experts": EXPERTS, "output_router_logits": True},
        ("moe_tp_experts", "packed_colwise", "rowwise", "colwise", "colwise_gather_output"),
    ),
    "Qwen3Moe": (
        "Qwen3Moe",
        {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH, "head_dim": 4,
         "output_router_logits": True, "decoder_sparse_step": 1},
        ("replicated_with_grad_allreduce", "moe_tp_experts"),
    ),
    "DeepseekV2": (
        "DeepseekV2",
        {**LATENT, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_shared_experts": 1,
         "moe_intermediate_size": WIDTH, "first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1,
         "topk_group": 1},
        ("mla_kv_a_proj", "moe_tp_experts"),
    ),
    "Olmo2": ("Olmo2", {}, ("rowwise_split_input", "colwise_gather_output")),
}  # fmt: skip
MESHES: dict[str, dict[str, int]] = {
    "tp": {"pp": 2, "tp": 2},
    "ep": {"pp": 2, "ep": 2},
    "ep and tp": {"ep": 2, "tp": 2},
}
DENSE = ("Olmo2",)
CASES = [(name, mesh) for name in MODELS for mesh in MESHES if not (name in DENSE and "ep" in mesh)]
if not ALL:  # `make matrices` tries all of them
    CASES = [("Mixtral", "ep"), ("DeepseekV2", "tp")]
RECORDED = ("Mixtral", "ep")


def made(name: str) -> nn.Module:
    """Return a tiny model of a family, the same everywhere."""
    kind, settings, _ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings})
    config._attn_implementation = "sdpa"
    make: Callable[..., nn.Module] = getattr(transformers, f"{kind}ForCausalLM")
    model = make(config).train()
    with torch.no_grad():  # their first values are so small that experts hardly matter
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(5.0)
    return model


def given(step: int) -> dict[str, Tensor]:
    """Return a step's whole batch; a model's loss counts experts by the mask."""
    chance = torch.Generator().manual_seed(step)
    x = torch.randint(3, WORDS, (ROWS, LENGTH), generator=chance)
    return {"input_ids": x, "labels": x.clone(), "attention_mask": torch.ones_like(x)}


def plain(name: str, lines: int) -> dict[str, Any]:
    """Train the model in this process over the microbatches of all lines; return losses and the first gradients."""
    model, losses = made(name), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients: dict[str, Tensor] = {}
    for step in range(2):
        total = 0.0
        parts = [tensor.chunk(2 * lines) for tensor in given(step).values()]
        every = [dict(zip(given(step), entry, strict=True)) for entry in zip(*parts, strict=True)]
        for entry in every:
            loss = model(**entry).loss / len(every)
            torch.autograd.backward(loss)
            total += loss.item()
        losses.append(total)
        if not step:
            gradients = {key: param.grad.clone() for key, param in model.named_parameters() if param.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "gradients": gradients}


def trained(name: str, mesh: dict[str, int], record: Path | bool) -> dict[str, Any]:
    """Train two steps on this rank's part of the batch."""
    example = {key: tensor[: ROWS // 4] for key, tensor in given(0).items()}
    with dl.Pipeline(
        made(name), mesh=mesh, schedule="zb-v" if mesh.get("pp") else "1f1b", num_microbatches=2, balance="even",
        example=example, timeout=120.0, record=record,
    ) as pipe:  # fmt: skip
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        number, count = pipe.axes.rows
        losses: list[float] = []
        gradients: dict[str, Tensor] = {}
        for step in range(2):
            loss = pipe.step(**{key: tensor.chunk(count)[number] for key, tensor in given(step).items()}).loss
            assert loss is not None
            losses.append(loss.item())
            if not step:
                gradients = {
                    key: put_together(param.grad.detach(), slice_of(param), pipe.axes).clone()
                    for key, param in pipe.named_parameters()
                    if param.grad is not None
                }
            optimizer.step()
            optimizer.zero_grad()
        assert pipe.checked is not None
        divided = [key for key, param in pipe.named_parameters() if slice_of(param) is not None]
        return {
            "losses": losses, "gradients": gradients, "divided": divided, "unchecked": pipe.checked.unchecked,
            "checked": pipe.checked.num_parameters,
        }  # fmt: skip


CONTEXT: Any = "context"  # a case of its own: labels must be shifted before sequences are divided


def all_trained(folder: Path) -> dict[tuple[str, str], Any]:
    """Train every case."""
    found = {case: trained(case[0], MESHES[case[1]], folder if case == RECORDED else True) for case in CASES}
    return {**found, CONTEXT: in_parts()}


def windowed(**settings: Any) -> nn.Module:
    """Return a model of which one layer attends to a window, and which takes positions."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(**{**SIZES, "head_dim": 4, "layer_types": kinds, **settings})
    model: nn.Module = transformers.Gemma3ForCausalLM(config).train()
    return model


def shifted_loss(output: Any, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def shifted() -> tuple[Tensor, Tensor]:
    """Return tokens, and for each the one that follows; the last has none."""
    x = given(0)["input_ids"]
    return x, nn.functional.pad(x[:, 1:], (0, 1), value=-100)


def in_parts() -> dict[str, Any]:
    """Train a step with sequences in parts, of tokens alone as a user passes them, and pass what must be refused."""
    x, y = shifted()
    with dl.Pipeline(
        windowed(sliding_window=LENGTH), loss_fn=shifted_loss, mesh={"pp": 2, "cp": 2}, num_microbatches=2,
        balance="even", example=x[:, : LENGTH // 2], timeout=120.0,
    ) as pipe:  # fmt: skip
        told = []
        packed = torch.arange(LENGTH).expand(ROWS, -1) % 3
        wrong = {"input_ids": x.repeat(1, 2)}, {"input_ids": x, "position_ids": packed}, {"input_ids": x, "labels": x}
        for batch in wrong:
            with pytest.raises(BatchError) as error:
                pipe.step(**batch, target=y.repeat(1, batch["input_ids"].shape[1] // LENGTH))
            told.append(str(error.value))
        loss = pipe.step(input_ids=x, target=y).loss
        assert loss is not None
        assert pipe.checked is not None
        gradients = {key: param.grad.clone() for key, param in pipe.named_parameters() if param.grad is not None}
        return {"loss": loss.item(), "gradients": gradients, "told": told}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hugging_face") / "run"


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[tuple[str, str], Any]]:
    return dl.launch(all_trained, folder, num_ranks=4)


@pytest.mark.features("check", "record")
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_losses_and_gradients_are_those_of_one_process(ranks: list[Any], case: tuple[str, str]) -> None:
    wanted = plain(case[0], MESHES[case[1]].get("ep", 1))
    found = {key: gradient for rank in ranks for key, gradient in rank[case]["gradients"].items()}
    assert found.keys() == wanted["gradients"].keys()
    size = torch.stack([gradient.norm() for gradient in wanted["gradients"].values()]).norm()
    for key, value in some(found.items()):
        assert float((value - wanted["gradients"][key]).norm()) <= 1e-5 * float(size), key
    for rank in some(ranks):
        assert rank[case]["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert not rank[case]["unchecked"]
        assert rank[case]["checked"] >= len(wanted["gradients"])
    if case[0] not in DENSE:
        divided = {key for rank in ranks for key in rank[case]["divided"]}
        assert any(".experts." in key for key in divided)


def test_sequences_in_parts_give_the_gradients_of_one_process(ranks: list[Any]) -> None:
    model, (x, y) = windowed(sliding_window=LENGTH), shifted()
    loss = shifted_loss(model(input_ids=x), y)
    torch.autograd.backward(loss)
    found = {key: gradient for rank in ranks for key, gradient in rank[CONTEXT]["gradients"].items()}
    for key, param in some(model.named_parameters()):
        torch.testing.assert_close(found[key], param.grad, rtol=1e-4, atol=1e-5)
    for rank in some(ranks):
        assert rank[CONTEXT]["loss"] == pytest.approx(loss.item(), rel=1e-5)
        long, packed, labels = rank[CONTEXT]["told"]
        assert f"sequences of {2 * LENGTH} tokens" in long
        assert f"a window of {LENGTH}; expected at most {LENGTH} tokens" in long
        assert "position_ids do not count up by one in every row" in packed
        assert "the model shifts labels itself" in labels


def test_attention_that_cannot_be_gathered_is_refused_before_the_start() -> None:
    with refused(ModelError, "Gemma3ForCausalLM computes attention by 'eager'", expected="'sdpa'"):
        dl.Pipeline(windowed(attn_implementation="eager"), mesh={"cp": 2}, num_microbatches=2, transport="gloo")


def test_experts_in_parts_that_grouped_products_cannot_take_are_refused() -> None:
    config = transformers.MixtralConfig(**{**SIZES, "intermediate_size": 20, "num_local_experts": EXPERTS})
    model = transformers.MixtralForCausalLM(config)
    blocks = [Block("", model)]
    with refused(ModelError, "experts are 20 wide and tp is 2.*10 numbers of 4 bytes", expected="multiple of 16"):
        divided_by(StylePlan.of(None, model), blocks, 2)
    model.set_experts_implementation("eager")
    assert divided_by(StylePlan.of(None, model), blocks, 2)


@pytest.mark.features("check", "record")
def test_a_run_records_how_evenly_their_experts_are_loaded(ranks: list[Any], folder: Path) -> None:
    assert ranks
    first = dl.read_run(folder).metrics()[0]
    assert first["expert_metrics/load_max"] == pytest.approx(load_max("Mixtral"))
    assert first["expert_metrics/dropped"] == 0.0


def load_max(name: str) -> float:
    """Return the largest load of an expert in the first step, over the mean of its block; counted at the routers."""
    model = made(name)
    counts: dict[nn.Module, Tensor] = {}

    def count(module: nn.Module, _: Any, routed: tuple[Tensor, ...]) -> None:
        found = torch.bincount(routed[2].reshape(-1), minlength=EXPERTS)
        counts[module] = counts.get(module, torch.zeros(EXPERTS)) + found

    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(count)
    with torch.no_grad():
        model(**given(0))
    return max(float(tensor.max() / tensor.mean()) for tensor in some(counts.values()))


@long
def test_every_style_of_an_installed_plan_is_known() -> None:
    from transformers import CONFIG_MAPPING

    plans = [getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None) or {} for name in CONFIG_MAPPING]
    for pattern, style in some(pair for plan in plans for pair in plan.items()):
        assert style_named(pattern, style) is not None
    assert {style for _, _, own in MODELS.values() for style in own} <= {*_THEIRS, "colwise", "rowwise"}


class Odd(nn.Module):
    """What few plans name: experts by transposed weights, an expert that keeps its input, an embedding by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.stack = OddStack()
        self.shared = OddShared()

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        made: Tensor = self.shared(self.stack(h, h.sigmoid().mean(-1, keepdim=True)), 2.0 * h)
        return made


class OddStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(0.3 * torch.randn(2, *shape)) for shape in ((WIDTH, 16), (8, WIDTH)))
        self.same = nn.Identity()

    def forward(self, h: Tensor, weight: Tensor) -> Tensor:
        made: Tensor = self.same(h)
        for up, down in zip(self.up, self.down, strict=True):
            gate, value = (h @ up).chunk(2, -1)
            made = made + (gate.sigmoid() * value) @ down
        return made * weight


class OddShared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(0.3 * torch.randn(2, 8, WIDTH)), nn.Parameter(0.3 * torch.randn(2, WIDTH, 8))

    def forward(self, h: Tensor, added: Tensor) -> Tensor:
        made: Tensor = (torch.einsum("rlw,efw->rlef", h, self.up).tanh().unsqueeze(-2) @ self.down.mT).sum(
            (-3, -2)
        ) * added
        return made


ODD = {
    "0.tokens": "embedding_colwise",
    "0.stack": "moe_tp_experts", "0.stack.up": "packed_rowwise", "0.stack.down": "colwise",
    "0.stack.same": "moe_identity_expert",
    "0.shared": "all_reduce", "0.shared.up": "colwise", "0.shared.down": "rowwise",
}  # fmt: skip


def odd() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Odd(), nn.Linear(WIDTH, WORDS))


def odd_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def odd_trained() -> tuple[float, dict[str, Tensor], int]:
    with dl.Pipeline(
        odd(), loss_fn=odd_loss, mesh={"tp": 2}, num_microbatches=2, tensor_parallel=ODD, schedule="zb-h1", timeout=60.0
    ) as pipe:
        loss = pipe.step(given(0)["input_ids"], target=given(1)["labels"]).loss
        assert loss is not None
        assert pipe.checked is not None
        parameters = list(pipe.named_parameters())
        found = {
            key: put_together(item.grad, slice_of(item), pipe.axes) for key, item in parameters if item.grad is not None
        }
        return loss.item(), found, sum(slice_of(param) is not None for _, param in parameters)


@pytest.mark.features("check")
def test_styles_that_few_plans_name_compute_what_one_process_computes() -> None:
    model = odd()
    wanted = odd_loss(model(given(0)["input_ids"]), given(1)["labels"])
    torch.autograd.backward(wanted)
    for loss, found, num_divided in dl.launch(odd_trained, num_ranks=2):
        assert loss == pytest.approx(wanted.item(), rel=1e-5)
        assert num_divided == 5
        for key, param in model.named_parameters():
            torch.testing.assert_close(found[key], param.grad, rtol=1e-4, atol=1e-6)


def test_experts_with_an_unnamed_parameter_are_refused() -> None:
    plan = StylePlan.of({name: style for name, style in ODD.items() if name != "0.stack.down"}, None)
    with refused(ModelError, r"gives 0.stack.down no style"):
        divided_by(plan, [Block("0", Odd())], 2)
