"""Models of the cluster planner: parameters and operations as their authors count them."""

from __future__ import annotations

import pytest

from cluster_models import num_parameters
from drumline.core.errors import PlanError
from drumline.plan.cluster.hugging_face import transformer_of
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.models import MODELS, model
from drumline.plan.cluster.transformer import ExpertShape, Transformer, model_flops
from published_runs import run_flops
from refused import refused, saying


@pytest.mark.parametrize(
    ("name", "billions", "within"),
    [
        ("gpt-1.7b", 1.7, 0.03),
        ("gpt-3.6b", 3.6, 0.02),
        ("gpt-7.5b", 7.5, 0.01),
        ("gpt-18.4b", 18.4, 0.005),
        ("gpt-39.1b", 39.1, 0.005),
        ("gpt-76.1b", 76.1, 0.005),
        ("gpt-145.6b", 145.6, 0.005),
        ("gpt-310.1b", 310.1, 0.005),
        ("gpt-529.6b", 529.6, 0.005),
        ("gpt-1008b", 1008.0, 0.005),
        ("bloom-176b", 176.247, 0.001),
        ("llama-3-8b", 8.030, 0.001),
        ("llama-3-70b", 70.554, 0.001),
        ("llama-3-405b", 405.853, 0.001),
        ("mixtral-8x7b", 46.703, 0.001),
        ("deepseek-v3", 671.0, 0.01),
    ],
)
def test_models_have_the_parameters_that_their_authors_name(name: str, billions: float, within: float) -> None:
    assert num_parameters(model(name)) / 1e9 == pytest.approx(billions, rel=within)


def active_parameters(transformer: Transformer) -> int:
    """Return the parameters that one token uses: all of them, but of the experts only those it goes to."""
    if transformer.experts is None:
        return num_parameters(transformer)
    idle = transformer.experts.num_experts - transformer.experts.per_token
    num_layers = transformer.num_layers - transformer.num_dense_layers
    return num_parameters(transformer) - num_layers * idle * transformer.expert_parameters


@pytest.mark.parametrize(("name", "billions", "within"), [("mixtral-8x7b", 12.88, 0.005), ("deepseek-v3", 37.0, 0.02)])
def test_a_token_uses_some_of_the_experts(name: str, billions: float, within: float) -> None:
    assert active_parameters(model(name)) / 1e9 == pytest.approx(billions, rel=within)
    assert active_parameters(model("llama-3-8b")) == num_parameters(model("llama-3-8b"))


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "vocab_size": 129280,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "tie_word_embeddings": False,
}  # fmt: skip


def test_a_config_with_latent_attention_has_the_parameters_that_its_authors_name() -> None:
    found = transformer_of({**DEEPSEEK_V3, "max_position_embeddings": 4096}, name="v3")
    assert num_parameters(found) == num_parameters(model("deepseek-v3")) == 671_026_404_352
    assert active_parameters(found) / 1e9 == pytest.approx(37.0, rel=0.02)
    assert found.latent == model("deepseek-v3").latent
    assert found.details.others == ()


# What PyTorch counts in the models that Transformers makes of these sizes, as deepseek_v3 and as deepseek_v2.
@pytest.mark.parametrize(("queries", "parameters"), [(12, 47_666), (None, 49_358)])
def test_latent_attention_has_the_parameters_that_pytorch_counts(queries: int | None, parameters: int) -> None:
    sizes = {
        "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4,
        "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "vocab_size": 100, "q_lora_rank": queries, "kv_lora_rank": 10,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "head_dim": 4,
    }  # fmt: skip
    assert num_parameters(transformer_of({**DEEPSEEK_V3, **sizes}, name="tiny")) == parameters


# Keys as in the files of these models, with what their authors count.
@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (
            {"model_type": "gemma", "num_hidden_layers": 18, "hidden_size": 2048, "num_attention_heads": 8,
             "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 16384, "vocab_size": 256000},
            2.506,
        ),
        (
            {"model_type": "starcoder2", "num_hidden_layers": 32, "hidden_size": 4608, "num_attention_heads": 36,
             "num_key_value_heads": 4, "intermediate_size": 18432, "vocab_size": 49152},
            7.174,
        ),
        (
            {"model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71,
             "multi_query": True, "new_decoder_architecture": False, "vocab_size": 65024},
            6.922,
        ),
        (
            {"model_type": "mpt", "n_layers": 32, "d_model": 4096, "n_heads": 32, "max_seq_len": 2048,
             "vocab_size": 50432, "expansion_ratio": 4, "no_bias": True},
            6.649,
        ),
        (
            {"model_type": "bloom", "n_layer": 24, "n_embed": 1024, "num_attention_heads": 16, "vocab_size": 250880},
            0.559,
        ),
        (
            {"model_type": "qwen2_moe", "num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 16,
             "num_key_value_heads": 16, "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_experts": 60,
             "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632, "vocab_size": 151936},
            14.316,
        ),
    ],
    ids=lambda entry: entry["model_type"] if isinstance(entry, dict) else "",
)  # fmt: skip
def test_a_config_has_the_parameters_that_its_authors_count(config: dict[str, object], billions: float) -> None:
    assert num_parameters(transformer_of(config, name="it")) / 1e9 == pytest.approx(billions, rel=0.002)


@pytest.mark.parametrize(
    ("given", "shared"),
    [
        ({"shared_expert_intermediate_size": 5632}, 4),
        ({"shared_expert_intermediate_size": 1409}, 2),  # a little more than one: no weights are left out
        ({"shared_expert_intermediate_size": 1408}, 1),
        ({"n_shared_experts": 3, "shared_expert_intermediate_size": 5632}, 3),
        ({}, 0),
    ],
)
def test_one_wide_shared_expert_counts_as_several(given: dict[str, object], shared: int) -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, **given}
    found = transformer_of({**config, "num_experts": 8, "moe_intermediate_size": 1408}, name="it")
    assert found.experts is not None
    assert found.experts.num_shared == shared


def test_a_config_without_a_length_is_planned_with_one_that_is_said() -> None:
    found = transformer_of(DEEPSEEK_V3, name="v3")
    assert found.sequence == 2048
    assert found.details.others == ("no length of sequences: planned with 2048 tokens",)


def test_operations_are_six_per_active_parameter_and_token_but_for_attention_and_the_embedding() -> None:
    transformer = model("mixtral-8x7b")
    weights = active_parameters(transformer) - transformer.hidden * transformer.vocabulary
    attention = 12 * transformer.sequence**2 * transformer.hidden * transformer.num_layers
    assert model_flops(transformer, 1) - attention == pytest.approx(6 * weights * transformer.sequence, rel=1e-3)


def test_causal_attention_counts_half() -> None:
    transformer = model("llama-3-8b")
    attention = 12 * transformer.sequence**2 * transformer.hidden * transformer.num_layers
    assert model_flops(transformer, 1) - model_flops(transformer, 1, causal=True) == pytest.approx(attention / 2)


def test_what_is_run_grows_with_what_is_computed_again() -> None:
    flops = [run_flops(model("gpt-175b"), Layout(batch=1, recompute=kind)) for kind in ("none", "selective", "full")]
    assert flops == sorted(flops)
    assert flops[0] == model_flops(model("gpt-175b"), 1)
    assert flops[2] / flops[0] == pytest.approx(4 / 3, rel=0.01)


def test_an_unknown_model_is_refused_with_the_nearest() -> None:
    with refused(PlanError, "unknown model 'llama3-405b'", fix=r"did you mean llama-3-405b\?"):
        model("llama3-405b")


def test_names_are_found_whatever_their_case() -> None:
    assert all(model(name.upper()) is transformer for name, transformer in MODELS.items())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_layers": 0}, saying("num_layers of x is 0", expected="1 or more")),
        ({"feedforward": -4}, saying("feedforward of x is -4", expected="0 or more")),
        ({"num_key_value_heads": 3}, saying("4 heads of x cannot share 3 keys and values")),
        ({"experts": ExpertShape(8, 2, 16), "num_dense_layers": 3}, saying("x has 3 dense layers of 2")),
    ],
)
def test_a_transformer_that_cannot_be_is_refused(wrong: dict[str, int], message: dict[str, str]) -> None:
    plain = {"num_layers": 2, "hidden": 64, "num_heads": 4, "vocabulary": 10, "sequence": 8}
    with refused(PlanError, **message):
        Transformer("x", **{**plain, **wrong})  # type: ignore[arg-type]


def test_more_experts_per_token_than_there_are_is_refused() -> None:
    with refused(PlanError, "a token uses 9 of 8 experts"):
        ExpertShape(8, 9, 64)
