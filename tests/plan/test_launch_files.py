"""Files for other frameworks: every number of a model and of a layout is written, or said to be missing."""

from __future__ import annotations

import contextlib
import re
import shlex
import tomllib
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import drumline
from drumline.cli.main import VERBS, main
from drumline.core.errors import PlanError
from drumline.plan.cluster.hardware import cluster
from drumline.plan.cluster.hugging_face import transformer_of
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.models import MODELS, model
from drumline.plan.cluster.stages import layer_counts
from drumline.plan.cluster.transformer import ExpertShape, LatentAttention, Transformer
from drumline.plan.launch.launch import Config, launch
from drumline.plan.launch.own import not_run
from drumline.plan.layouts.pins import Pins, tried_schedules
from drumline.plan.layouts.space import meshes
from drumline.schedules import find
from refused import refused, saying
from some import some

SIZES = ("num_layers", "hidden", "num_heads", "vocabulary", "sequence", "feedforward")
SPARSE = Transformer(
    "sparse",
    8,
    64,
    4,
    vocabulary=1000,
    sequence=128,
    num_key_value_heads=2,
    gated=True,
    tied=False,
    learned_positions=False,
    experts=ExpertShape(8, 2, 32, num_shared=1),
    num_dense_layers=2,
    biased=False,
    dropout=False,
)
LATENT = replace(SPARSE, latent=LatentAttention(16, 8, 4, 2, 4))
LAYOUT = Layout(batch=16, tensor=2, pipeline=2, data=2, counts=(4, 4), zero=1, sequence_parallel=True)


def told(transformer: Transformer, layout: Layout, framework: str) -> tuple[str, str, tuple[str, ...]]:
    config = launch(transformer, cluster("a100-40", layout.num_devices), layout).of(framework)
    return config.command, config.text, config.missing


def other_values(part: Any) -> list[tuple[str, Any]]:
    """Return for every field of a dataclass another value that it may have."""
    found: list[tuple[str, Any]] = []
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, bool):
            found.append((field.name, not value))
        elif isinstance(value, int | float):
            found.append((field.name, 2 * value or 1))
        elif isinstance(value, tuple):
            found.append((field.name, ("a norm behind the embedding",)))
    assert found, f"{part} has no field that can be changed"
    return found


def changed_models() -> list[tuple[str, Transformer, Transformer]]:
    plain = [
        ("num_key_value_heads", 4),
        *((name, value) for name, value in other_values(SPARSE) if "heads" not in name),
    ]
    found = [(name, SPARSE, replace(SPARSE, **{name: value})) for name, value in plain]
    found.append(("num_heads", SPARSE, replace(SPARSE, num_heads=8, num_key_value_heads=2, head_width=16)))
    assert SPARSE.experts is not None
    assert LATENT.latent is not None
    for name, value in other_values(SPARSE.experts):
        found.append((f"experts.{name}", SPARSE, replace(SPARSE, experts=replace(SPARSE.experts, **{name: value}))))
    for name, value in other_values(SPARSE.details):
        found.append((f"details.{name}", SPARSE, replace(SPARSE, details=replace(SPARSE.details, **{name: value}))))
    for name, value in other_values(LATENT.latent):
        latent = replace(LATENT.latent, **{name: value})
        found.append((f"latent.{name}", LATENT, replace(LATENT, latent=latent)))
    return [*found, ("latent", SPARSE, LATENT)]


@pytest.mark.parametrize("framework", ["drumline", "torchtitan", "megatron"])
@pytest.mark.parametrize(
    ("field", "before", "after"), changed_models(), ids=lambda name: name if type(name) is str else ""
)
def test_every_number_of_a_model_is_written_or_said(
    field: str, before: Transformer, after: Transformer, framework: str
) -> None:
    assert before != after
    assert told(before, LAYOUT, framework) != told(after, LAYOUT, framework)


@pytest.mark.parametrize("framework", ["drumline", "torchtitan", "megatron"])
@pytest.mark.parametrize(
    ("changed", "field"),
    [
        (replace(LAYOUT, batch=32), "batch"),
        (replace(LAYOUT, microbatch=2), "microbatch"),
        (replace(LAYOUT, tensor=4), "tensor"),
        (replace(LAYOUT, pipeline=4, counts=(2, 2, 2, 2)), "pipeline"),
        (replace(LAYOUT, data=4), "data"),
        (replace(LAYOUT, context=2), "context"),
        (replace(LAYOUT, expert=2), "expert"),
        (replace(LAYOUT, schedule="zb-h1"), "schedule"),
        (replace(LAYOUT, schedule="interleaved-1f1b", stages_per_rank=2, counts=(2, 2, 2, 2)), "stages_per_rank"),
        (replace(LAYOUT, counts=(3, 5)), "counts"),
        (replace(LAYOUT, zero=3), "zero"),
        (replace(LAYOUT, recompute="full"), "recompute"),
        (replace(LAYOUT, sequence_parallel=False), "sequence_parallel"),
        (replace(LAYOUT, slices=2), "slices"),
    ],
)
def test_every_setting_of_a_layout_is_written_or_said(changed: Layout, field: str, framework: str) -> None:
    assert told(SPARSE, LAYOUT, framework) != told(SPARSE, changed, framework)


def test_no_setting_of_a_layout_was_forgotten_above() -> None:
    # Beside these there is only what the software is assumed to do at the same time.
    settings = {"batch", "microbatch", "tensor", "pipeline", "data", "context", "expert", "schedule", "stages_per_rank"}
    assert {field.name for field in fields(Layout)} == settings | {
        "counts",
        "zero",
        "recompute",
        "sequence_parallel",
        "slices",
        "practice",
    }


def arguments(config: Config) -> dict[str, str]:
    words = [word for line in config.text.splitlines() if not line.startswith("#") for word in shlex.split(line)]
    assert words
    return dict(pairwise([*words, ""]))


def test_latent_attention_is_written_for_megatron_and_said_for_torchtitan() -> None:
    deepseek = model("deepseek-v3")
    layout = Layout(batch=256, pipeline=16, data=16, counts=layer_counts(deepseek, 16, "1f1b", 1), expert=8)
    configs = launch(deepseek, cluster("h800", 256), layout)
    read = arguments(configs.of("megatron"))
    assert "--multi-latent-attention" in read
    # The widths of the published config.json of DeepSeek-V3.
    expected = {
        "q-lora-rank": 1536,
        "kv-lora-rank": 512,
        "qk-head-dim": 128,
        "qk-pos-emb-head-dim": 64,
        "v-head-dim": 128,
    }
    assert {name: int(read[f"--{name}"]) for name in expected} == expected
    assert not {"--group-query-attention", "--num-query-groups", "--kv-channels"} & read.keys()
    assert read["--moe-shared-expert-intermediate-size"] == "2048"
    assert any("sigmoid" in name for name in configs.of("megatron").missing)
    assert any("latent attention" in name for name in configs.of("torchtitan").missing)
    assert "latent_keys_values = 512" in configs.of("drumline").text
    again = launch(deepseek, cluster("h800", 256), replace(layout, recompute="norms+projections")).of("megatron")
    assert "--recompute-granularity selective\n--recompute-modules layernorm mla_up_proj" in again.text


def test_alibi_is_not_written_as_rotary_positions() -> None:
    bloom = model("bloom-176b")
    layout = Layout(batch=64, tensor=4, pipeline=2, counts=(35, 35))
    configs = launch(bloom, cluster("a100-80", 8), layout)
    assert arguments(configs.of("megatron"))["--position-embedding-type"] == "none"
    assert any("ALiBi" in name for name in configs.of("megatron").missing)
    assert any("ALiBi" in name for name in configs.of("torchtitan").missing)
    assert any("tied" in name for name in configs.of("torchtitan").missing)


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "intermediate_size": 18432,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "n_group": 8,
    "num_nextn_predict_layers": 1,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
    "attention_dropout": 0.0,
}


def test_a_config_with_latent_attention_keeps_it() -> None:
    found = transformer_of(DEEPSEEK, name="mine")
    assert found.latent == LatentAttention(1536, 512, 128, 64, 128)
    assert found.details.rotary_base == 10000
    said = [
        "scoring_func sigmoid",
        "n_group 8",
        "num_nextn_predict_layers 1",
        "rope_scaling {'type': 'yarn', 'factor': 40}",
    ]
    assert list(found.details.others) == said
    with refused(PlanError, "kv_lora_rank is 'wide'"):
        transformer_of({**DEEPSEEK, "kv_lora_rank": "wide"}, name="mine")
    narrow = {key: value for key, value in DEEPSEEK.items() if key != "v_head_dim"}
    assert "latent attention with unnamed widths" in transformer_of(narrow, name="m").details.others


LLAMA = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize(
    ("family", "more", "phrase"),
    [
        ("mistral", {"sliding_window": 4096}, "sliding_window 4096"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling {'rope_type': 'llama3'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters {'rope_type': 'yarn'"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("gemma", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act gelu_pytorch_tanh"),
        ("gemma2", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ("gpt_oss", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types ['sliding_attention'"),
        ("opt", {"activation_function": "relu", "hidden_act": None}, "activation_function relu"),
        ("falcon", {"bias": False, "hidden_act": "gelu", "parallel_attn": True}, "parallel_attn"),
        ("falcon", {"bias": False, "hidden_act": "gelu"}, "no biases"),
    ],
)
def test_what_a_config_has_beyond_the_plan_is_said(family: str, more: dict[str, Any], phrase: str) -> None:
    found = transformer_of({"model_type": family, **LLAMA, **more}, name="mine")
    layout = Layout(batch=4, pipeline=2, counts=(2, 2))
    for framework in ("torchtitan", "megatron"):
        _, text, missing = told(found, layout, framework)
        assert any(phrase in name for name in missing)
        assert phrase in text
    assert phrase in told(found, layout, "drumline")[1]


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}),
        ("qwen3", {"layer_types": ["full_attention"] * 4, "decoder_sparse_step": 1}),
    ],
)
def test_what_makes_no_other_model_is_not_said(family: str, more: dict[str, Any]) -> None:
    found = transformer_of({"model_type": family, **LLAMA, "rms_norm_eps": None, **more}, name="mine")
    assert found.details.others == ()


def test_norms_and_biases_of_queries_and_keys_are_written() -> None:
    layout = Layout(batch=4, pipeline=2, counts=(2, 2))
    for family, argument in (("qwen2", "--add-qkv-bias"), ("qwen3", "--qk-layernorm")):
        found = transformer_of({"model_type": family, **LLAMA}, name="mine")
        assert argument in told(found, layout, "megatron")[1].splitlines()


PLAN = ("plan", "gpt-1.7b", "--hardware", "h100", "--gpus", "8", "--brief", "--top", "1")
COMMAND = re.compile(r"\bdrumline [a-z]+ [^`\n]*")


@pytest.mark.parametrize("schedule", sorted(tried_schedules()))
def test_every_command_of_drumline_that_a_plan_prints_runs(
    schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*PLAN, "--batch", "32", "--pipeline", "4", "--data", "2", "--microbatch", "2", "--schedules", schedule]
    if schedule == "interleaved-1f1b":
        words += ["--stages-per-rank", "2"]
    commands = set[str]()
    with contextlib.chdir(tmp_path):
        # Of ZeRO's stages, drumline does not run the second, torchtitan not the first.
        for framework, stages in (("", "12"), ("drumline", "1"), ("torchtitan", "23"), ("megatron", "1")):
            chosen = ["--launch", framework] if framework else []
            cannot = {"megatron": not find(schedule).in_megatron, "torchtitan": find(schedule).two_directions}
            for zero in some(stages):
                assert main([*words, *chosen, "--zero", zero]) == (2 if cannot.get(framework) else 0)
                commands |= set(COMMAND.findall(" ".join(capsys.readouterr().out.split())))
        assert any(command.startswith(f"drumline show {schedule} ") for command in commands)
        assert "drumline train plan.toml" in {command.strip() for command in commands}
        assert main([*words, "--zero", "1", "--out", "plan.toml"]) == 0
        for command in commands:
            verb, *rest = shlex.split(command)[1:]
            assert verb in VERBS
            assert main([verb, *rest, *(["--print-config"] if verb == "train" else [])]) == 0, command


@pytest.mark.parametrize(
    ("framework", "pins", "words"),
    [
        (
            "megatron",
            {"zero": 3, "pipeline": 4},
            saying("megatron does not run ZeRO 3 with a pipeline", expected="0 or 1"),
        ),
        (
            "megatron",
            {"zero": 2, "pipeline": 2},
            saying("megatron does not run ZeRO 2 with a pipeline", expected="0 or 1"),
        ),
        ("drumline", {"zero": 2}, saying("drumline does not run ZeRO 2", expected="0 or 1 or 3")),
        ("drumline", {"recompute": "selective"}, saying("drumline does not recompute as 'selective' says")),
    ],
)
def test_pins_that_a_framework_does_not_run_are_refused(
    framework: str, pins: dict[str, Any], words: dict[str, str]
) -> None:
    with refused(PlanError, **words):
        Pins(framework=framework, **pins)


def test_zero_2_and_3_of_megatron_are_planned_without_a_pipeline() -> None:
    found = meshes(SPARSE, CLUSTER, 16, Pins(framework="megatron", zero=3))
    assert {degrees.pipeline for degrees in found} == {1}
    assert {mesh.pipeline for mesh in meshes(SPARSE, CLUSTER, 16, Pins(framework="megatron", zero=1))} > {1, 2}


def test_plans_for_drumline_are_what_it_runs() -> None:
    transformer = replace(SPARSE, sequence=16384)
    tried = [
        layout
        for mesh in meshes(transformer, CLUSTER, 16, Pins(framework="drumline"))
        for zero in Pins(framework="drumline").zero_stages(mesh)
        for layout in (Layout(16, 1, *mesh, zero=zero, counts=layer_counts(transformer, mesh.pipeline)),)
    ]
    assert {layout.context for layout in tried} == {1, 2, 4}
    assert {layout.expert for layout in tried} > {1, 2}
    for layout in some(tried):
        assert not [*not_run(transformer, cluster("a100-80", 8), layout, source="sparse.json")]


def test_a_plan_without_a_pipeline_has_no_schedule_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--batch", "16", "--pipeline", "1", "--data", "8", "--zero", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.endswith("--launch torchtitan and --launch megatron print commands that do.")
    assert not COMMAND.search(shown)


CLUSTER = cluster("a100-40", 8)


def own_config(layout: Layout) -> Config:
    """Return what training is told of a layout of a model that comes from a file."""
    counts = layer_counts(SPARSE, layout.pipeline, layout.schedule, layout.stages_per_rank)
    return launch(SPARSE, CLUSTER, replace(layout, counts=counts), source="sparse.json").of("drumline")


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(batch=16, pipeline=2, data=4, zero=2), "ZeRO 2: training divides optimizer state (--zero 1)"),
        (Layout(batch=16, pipeline=4, context=2, zero=1), "ZeRO 1: no two data-parallel ranks hold the same"),
        (Layout(batch=16, pipeline=2, data=4, expert=4, zero=1), "ZeRO 1: no two data-parallel ranks hold the same"),
        (Layout(batch=16, pipeline=4, data=2, zero=3, schedule="dualpipe"), "ZeRO 3: dualpipe holds each stage on two"),
        (Layout(batch=16, data=2, context=4, expert=4), "expert 4: training shares experts out between data-parallel"),
    ],
)
def test_what_training_does_not_run_is_said_with_a_plan_that_it_runs(layout: Layout, reason: str) -> None:
    config = own_config(layout)
    assert not config.starts
    assert any(name.startswith(reason) for name in config.missing), config.missing
    assert f"# Not run by `drumline train`: {reason}" in config.text
    assert own_config(replace(layout, zero=0, expert=1)).starts


@pytest.mark.parametrize(
    "layout",
    [
        Layout(batch=16, pipeline=2, data=2, tensor=2, zero=1, sequence_parallel=True),
        Layout(batch=16, data=4, context=2, zero=3),
        Layout(batch=16, pipeline=2, data=4, expert=2, zero=1),
        Layout(batch=16, tensor=2, data=4, expert=2, zero=3),
        Layout(batch=16, context=2, data=4, expert=4),
        Layout(batch=16, pipeline=8, zero=1),  # which divides nothing: there is one pipeline
    ],
)
def test_what_training_runs_is_started_by_the_line(layout: Layout) -> None:
    config = own_config(layout)
    assert config.starts
    assert config.command == "drumline train plan.toml"


def test_more_memory_than_planned_is_said_and_too_much_is_not_run() -> None:
    llama = model("llama-3-8b")
    layout = Layout(batch=64, data=8, zero=3, counts=(llama.num_layers,), recompute="full")
    roomy = replace(cluster("h100", 8), device=replace(cluster("h100", 8).device, memory_bytes=200 * 2**30))
    config = launch(llama, roomy, layout).of("drumline")
    assert config.starts
    more = [name for name in config.missing if name.startswith("ZeRO 3 as planned: training gathers whole stages")]
    # Weights of 2 bytes and gradients of 4 are whole, and only two layers' buffers are saved.
    parameters = llama.num_layers * llama.dense_layer_parameters + llama.embedding_parameters + llama.head_parameters
    least = 6 * parameters * 7 / 8
    assert len(more) == 1
    gib = float(re.findall(r"takes ([\d.]+) GiB more", more[0])[0])
    assert 0.97 * least - 4 * llama.dense_layer_parameters <= gib * 2**30 <= 1.01 * least
    tight = launch(llama, cluster("a100-40", 8), layout).of("drumline")
    assert not tight.starts
    assert any(name.startswith("ZeRO 3: training gathers whole stages and would need") for name in tight.missing)


def test_dropout_inside_attention_is_left_out_and_said_beside_tensor_parallelism() -> None:
    gpt = model("gpt-1.7b")
    assert gpt.dropout
    for tensor in (1, 2):
        layout = Layout(batch=16, tensor=tensor, pipeline=8 // tensor, counts=layer_counts(gpt, 8 // tensor))
        config = launch(gpt, CLUSTER, layout).of("drumline")
        assert config.starts
        assert ("attention_dropout = 0.0" in config.text) == (tensor > 1)
        assert any(name.startswith("dropout inside attention") for name in config.missing) == (tensor > 1)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_no_file_of_any_model_names_a_verb_that_is_not_there(name: str) -> None:
    transformer = MODELS[name]
    layout = Layout(batch=64, pipeline=4, counts=layer_counts(transformer, 4, "1f1b", 1))
    for config in some(launch(transformer, cluster("h100", 4), layout).configs):
        for text in (config.command, config.text, *config.missing):
            assert set(re.findall(r"drumline(?:\.cli\.main)? ([a-z]+)", text)) <= VERBS.keys()


def test_no_message_of_the_package_names_a_verb_that_is_not_there() -> None:
    named = set[str]()
    for path in Path(drumline.__file__).parent.rglob("*.py"):
        named |= set(re.findall(r"drumline ([a-z]+)(?=`| --| [A-Z{\[])", path.read_text(encoding="utf-8")))
    assert {"plan", "show", "profile"} <= named <= VERBS.keys()


def test_fp8_is_written_for_those_that_have_it() -> None:
    hopper, layout = cluster("h100", LAYOUT.num_devices), replace(LAYOUT, practice=Pins(precision="fp8").practice)
    configs = launch(SPARSE, hopper, layout)
    arguments = configs.of("megatron").text.splitlines()
    assert {"--bf16", "--fp8-format hybrid", "--fp8-recipe tensorwise"} <= set(arguments)
    written = tomllib.loads(configs.of("torchtitan").text)
    assert written["model"] == {"converters": ["quantize.linear.float8", "quantize.grouped_mm.float8"]}
    assert written["quantize"]["linear"]["float8"] == {"filter_fqns": ["output", "router.gate"]}
    assert written["quantize"]["grouped_mm"]["float8"] == {"fqns": ["experts"]}
    assert written["compile"] == {"enable": True}
    assert not configs.of("drumline").starts
    assert any(some("FP8" in name for name in configs.of("drumline").missing))
    for framework in ("megatron", "torchtitan"):
        assert "fp8" not in told(SPARSE, LAYOUT, framework)[1]
        assert "float8" not in told(SPARSE, LAYOUT, framework)[1]


def test_fp8_is_refused_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "llama-3-8b", "--gpus", "8", "--batch", "16", "--brief", "--precision", "fp8"]
    for more, words in (
        (["--hardware", "a100-80"], "A100 80 GB has no FP8 products"),
        (["--hardware", "h100", "--launch", "drumline"], "drumline has no FP8 products"),
    ):
        assert main([*asked, *more]) != 0
        assert words in " ".join(capsys.readouterr().err.split())
    with refused(PlanError, "precision is 'fp4'"):
        Pins(precision="fp4")


def test_megatron_shards_with_as_many_connections_as_it_accepts() -> None:
    sharded = replace(LAYOUT, pipeline=1, data=4, counts=(8,), zero=3)
    command, text, missing = told(SPARSE, sharded, "megatron")
    assert "--use-megatron-fsdp" in text
    assert "CUDA_DEVICE_MAX_CONNECTIONS=8 " in command
    assert any(some("hidden tensor-parallel messages" in name for name in missing))
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1 " in told(SPARSE, LAYOUT, "megatron")[0]


def test_messages_that_a_plan_takes_for_hidden_are_switched_on() -> None:
    hides = Pins(overlaps=("forward", "experts", "context")).practice
    layout = replace(LAYOUT, context=2, expert=2)
    hidden = replace(layout, practice=hides)
    assert "--cp-comm-type all_gather" in told(SPARSE, layout, "megatron")[1].splitlines()
    _, text, missing = told(SPARSE, hidden, "megatron")
    assert {"--cp-comm-type p2p", "--tp-comm-overlap"} <= set(text.splitlines())
    assert any(some("messages of experts" in name for name in missing))
    _, text, missing = told(SPARSE, hidden, "torchtitan")
    written = tomllib.loads(text)
    assert written["parallelism"]["context_parallel_rotate_method"] == "alltoall"
    assert written["parallelism"]["enable_async_tensor_parallel"]
    assert written["compile"] == {"enable": True}
    assert any(some("messages of experts" in name for name in missing))


def test_experts_of_torchtitan_are_divided_as_planned() -> None:
    layout = replace(LAYOUT, expert=2)
    written = tomllib.loads(told(SPARSE, layout, "torchtitan")[1])
    assert written["parallelism"]["expert_tensor_parallel_degree"] == layout.tensor
    long = replace(SPARSE, sequence=32768)
    found = meshes(long, cluster("h100", 8), 8, Pins(framework="torchtitan"))
    assert any(some(degrees.context > 1 and degrees.expert > 1 for degrees in found))
    assert all(some(degrees.expert == 1 or degrees.expert % degrees.context == 0 for degrees in found))


def test_latent_attention_of_megatron_has_plain_positions_and_kernels_for_it() -> None:
    lines = told(LATENT, LAYOUT, "megatron")[1].splitlines()
    assert {"--rope-type rope", "--attention-backend fused"} <= set(lines)
    assert "--attention-backend flash" in told(SPARSE, LAYOUT, "megatron")[1].splitlines()


def test_what_megatron_needs_or_refuses_besides_is_said() -> None:
    missing = told(SPARSE, replace(LAYOUT, sequence_parallel=False), "megatron")[2]
    assert any(some("--train-iters and --lr" in name for name in missing))
    assert any(some("refuses experts with tensor parallelism" in name for name in missing))
