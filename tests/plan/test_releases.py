"""What is written for a release of another framework is what it takes, by our facts and by its own classes."""

from __future__ import annotations

import json
import random
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from drumline.cli import plan_cluster
from drumline.cli.main import main
from drumline.core.errors import PlanError
from drumline.plan.cluster.device_memory import peak_bytes
from drumline.plan.cluster.hardware import cluster
from drumline.plan.cluster.hugging_face import transformer_of
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.models import model
from drumline.plan.cluster.stages import layer_counts
from drumline.plan.cluster.transformer import ExpertShape, LatentAttention, Transformer
from drumline.plan.launch.launch import Config, launch
from drumline.plan.launch.releases import RELEASES, arguments, flattened, release
from drumline.plan.layouts.pins import Pins
from drumline.plan.layouts.planner import plan
from drumline.plan.layouts.space import meshes
from launch_plans import Question, WrittenFile, drawn_layouts, questions, written
from real_configs import refused_by
from refused import refused
from some import some
from warm_ranks import WarmRanks

ROOT = Path(__file__).parents[2]
CONFIG_CLASSES = ("transformer_config.py", "model_parallel_config.py", "pipeline_parallel_layer_layout.py")
MEGATRONS = RELEASES["megatron"]
DENSE = Transformer(
    "dense", 8, 64, 4, vocabulary=1000, sequence=128, num_key_value_heads=2, gated=True, tied=False,
    learned_positions=False, biased=False, dropout=False,
)  # fmt: skip
SPARSE = replace(DENSE, name="sparse", experts=ExpertShape(8, 2, 32, num_shared=1), num_dense_layers=2)
LATENT = replace(SPARSE, name="latent", latent=LatentAttention(16, 8, 4, 2, 4))
LAYOUT = Layout(batch=16, tensor=2, pipeline=2, data=2, counts=(4, 4), zero=1, sequence_parallel=True)
SHARDED = Layout(batch=16, data=8, counts=(8,), zero=3)
FP8 = Pins(precision="fp8").practice


def config_of(transformer: Transformer, layout: Layout, named: str, framework: str = "megatron") -> Config:
    machines = cluster("h100", layout.num_devices)
    return launch(transformer, machines, layout, releases={framework: named}).of(framework)


def lines_of(transformer: Transformer, layout: Layout, named: str) -> list[str]:
    return [line for line in config_of(transformer, layout, named).text.splitlines() if line[:2] == "--"]


def drawn_files(seed: int, framework: str, named: str, count: int) -> list[tuple[Question, Layout, WrittenFile]]:
    """Return files for layouts among which the planner chooses, for many questions to one release."""
    draw = random.Random(seed)
    asked = islice(
        (item for item in questions(seed) if (item.pins.framework, item.pins.release) == (framework, named)), count
    )
    return [
        (question, layout, written(question, layout))
        for question in asked
        for layout in drawn_layouts(question, draw, 6)
    ]


@dataclass(frozen=True)
class Said:
    """What Megatron-LM's config class of one release says to files as written, and to files that people changed.

    Its package takes seconds to import, so it is asked once for both.
    """

    files: list[tuple[Question, Layout, WrittenFile]]
    of_files: list[str]
    changed: list[dict[str, Any]]
    of_changed: list[str]

    @staticmethod
    @cache
    def by(named: str, ranks: WarmRanks) -> Said:
        files, facts = drawn_files(1, "megatron", named, 30), release("megatron", named)
        changed = changed_files(named, checked_rules(named))
        said = refused_by(ranks, facts.package, "megatron", [*(file.values for _, _, file in files), *changed])
        return Said(files, said[: len(files)], changed, said[len(files) :])


def checked_rules(named: str) -> list[Mapping[str, Any]]:
    """Return the rules that the config classes check."""
    return [rule for rule in release("megatron", named).refuses if rule["from"].endswith(CONFIG_CLASSES)]


@pytest.mark.torch
@pytest.mark.parametrize("named", MEGATRONS)
def test_files_for_megatron_are_taken_by_its_config_class(named: str, warm_ranks: WarmRanks) -> None:
    asked = Said.by(named, warm_ranks)
    files, said = asked.files, asked.of_files
    facts = release("megatron", named)
    assert [facts.refusals(file.values) for _, _, file in some(files)] == [[]] * len(files)
    assert all(file.starts for _, _, file in some(files))
    assert [(text, file.values) for text, (_, _, file) in zip(said, files, strict=True) if text] == []
    # The files are of all kinds: each of these was written for some.
    every = {name for _, _, file in files for name in file.values}
    kinds = {"--multi-latent-attention", "--moe-grouped-gemm", "--fp8-format", "--pipeline-model-parallel-layout"}
    assert kinds | {"--recompute-modules", "--recompute-method", "--squared-relu", "--apply-layernorm-1p"} <= every
    assert facts.flags.keys() >= {name for name in every if name[0] == "-"}


@pytest.mark.torch
def test_files_for_torchtitan_are_taken_by_its_config_class(warm_ranks: WarmRanks) -> None:
    files, facts = drawn_files(2, "torchtitan", "0.2", 20), release("torchtitan")
    assert all(file.starts for _, _, file in some(files)), [file.missing for _, _, file in files if not file.starts][:1]
    wrong: list[dict[str, Any]] = [{"parallelism": {"data_parallel_degree": 8}}, {"training": {"seq_len": "8"}}]
    wrong.append({"compile": {"enable": 1}})
    said = refused_by(warm_ranks, facts.package, "torchtitan", [*(file.values for _, _, file in files), *wrong])
    assert [text for text in said[: len(files)] if text] == []
    assert any("quantize" in file.values for _, _, file in files)
    assert all(some(said[len(files) :]))
    assert all(facts.refusals(flattened(tables)) for tables in some(wrong))


def changed_files(named: str, rules: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return files that people may have changed, which are refused often; some are changed so that a rule is broken."""
    draw, facts = random.Random(4), release("megatron", named)
    modules = ["layernorm", "moe_act", "mla_up_proj", "core_attn", "moe", "mlp", "shared_experts", "norms"]
    layouts = ["Ettt|tttttL", "Etttt|ttttL", "Et*4|t*4L", "t*4|Et*4L", "Et|t|tt|tt|t|tL", "E|t*8L"]
    given = ("--moe-grouped-gemm", "--multi-latent-attention", "--sequence-parallel", "--disable-bias-linear")
    more = (
        "--no-bias-gelu-fusion",
        "--no-rope-fusion",
        "--moe-router-pre-softmax",
        "--overlap-moe-expert-parallel-comm",
    )
    choices: dict[str, list[Any]] = {
        "--recompute-granularity": ["selective", "full"],
        "--recompute-modules": [[name] for name in modules],
        "--recompute-method": ["uniform", "block"],
        "--recompute-num-layers": [1],
        "--fp8-format": ["hybrid"],
        "--fp8-recipe": ["delayed", "tensorwise"],
        "--moe-router-topk": [1, 2],
        "--tensor-model-parallel-size": [1, 2, 3, 4],
        "--expert-model-parallel-size": [1, 2],
        "--num-query-groups": [1, 2, 4],
        "--pipeline-model-parallel-layout": layouts,
        **{name: [True] for name in (*given, *more)},
    }
    known = sorted(choices.keys() & facts.flags.keys())
    start = [file.values for _, _, file in drawn_files(3, "megatron", named, 30)]
    found = []
    for _ in range(400):
        values = dict(draw.choice(start))
        for name in draw.sample(known, draw.choice([1, 1, 2, 3])):
            if name in values and draw.random() < 0.5:
                del values[name]
            else:
                values[name] = draw.choice(choices[name])
        found.append(values)
    for rule in rules:
        found += [broken(dict(values), rule["when"]) for values in draw.sample(start, 8)]
    return found


GIVEN = {
    "--fp8-format": "hybrid",
    "--num-experts": 8,
    "--pipeline-model-parallel-layout": "Et|tL",
    "--num-virtual-stages-per-pipeline-rank": 2,
    "--recompute-method": "uniform",
    "--recompute-num-layers": 1,
}


def broken(values: dict[str, Any], conditions: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return a file with what a rule speaks of: flags given or left out, and words."""
    for key, said, *operand in conditions:
        if said == "is absent":
            values.pop(key, None)
        elif said == "is given" and key not in values:
            values[key] = GIVEN.get(key, True)
        elif said == "is" and not key.startswith("$"):
            values[key] = operand[0]
        elif said == "has":
            values[key] = [operand[0]]
        elif said == "has others than":
            values[key] = ["norms"]
        elif said == "is no multiple of":
            values[operand[0][-1]] = 7
        elif said == "has another number of layers than":
            values[key] = "Et|" * (values["--pipeline-model-parallel-size"] - 1) + "L"
        elif said == "does not match":
            bars = "|" * (values["--pipeline-model-parallel-size"] - 1)
            values[key] = f"t*{values['--num-layers']}{bars}EL"
        elif said == "is more than":
            values[key] = operand[0] + 1
        elif said == "is less than":
            values[key] = 1
    return values


@pytest.mark.torch
@pytest.mark.parametrize("named", MEGATRONS)
def test_facts_refuse_what_megatrons_config_class_refuses(named: str, warm_ranks: WarmRanks) -> None:
    asked = Said.by(named, warm_ranks)
    checked, files, said = checked_rules(named), asked.changed, asked.of_changed
    of_class = replace(release("megatron", named), refuses=tuple(checked))
    differ = [
        (text, ours, values)
        for text, values in zip(said, files, strict=True)
        if bool(text) != bool(ours := of_class.refusals(values))
    ]
    assert differ == []
    # Each rule was broken by some file alone, so that the class refused just that.
    alone = {tuple(of_class.refusals(values)) for values in files}
    assert [rule["what"] for rule in checked if (rule["what"],) not in alone] == []
    assert 0.25 < sum(map(bool, said)) / len(said) < 0.75


def blocks(page: str) -> list[str]:
    return re.findall(r"^# Written by `drumline plan` for Megatron-LM.*?(?=^\$|^```)", page, re.MULTILINE | re.DOTALL)


def test_every_file_on_a_page_is_what_its_release_takes() -> None:
    found = [block for page in sorted(ROOT.glob("docs/*.md")) for block in blocks(page.read_text(encoding="utf-8"))]
    for block in some(found):
        named = re.findall(r"Megatron-LM ([\d.]+) \(core_v[\d.]+\)", block)
        whole = block.replace("\n    ", " ")  # pages break long lines
        lines = [line for line in whole.splitlines() if line.startswith("--")]
        assert release("megatron", named[0]).refusals(arguments("\n".join(some(lines)))) in ([], CONNECTIONS)


# Pages show the file without its command, which sets the connections.
CONNECTIONS = ["tensor or context parallelism with several connections, before Blackwell"]


@pytest.mark.parametrize(("framework", "named"), [(name, item) for name in RELEASES for item in RELEASES[name]])
def test_a_file_says_for_which_release_it_is(framework: str, named: str) -> None:
    facts = release(framework, named)
    assert re.fullmatch("[0-9a-f]{40}", facts.commit)
    text = config_of(DENSE, LAYOUT, named, framework).text
    assert text.startswith(f"# Written by `drumline plan` for {facts.name} {named} ({facts.tag}).")


def test_older_megatron_shards_by_the_flags_that_it_has() -> None:
    # The mistake: files that said 0.13 and spoke 0.14, which does not parse.
    old, new = (lines_of(LATENT, SHARDED, named) for named in ("0.13", "0.14"))
    assert "--use-custom-fsdp" in old
    assert not {"--use-megatron-fsdp", "--ckpt-format fsdp_dtensor", "--rope-type rope"} & set(old)
    assert {"--use-megatron-fsdp", "--ckpt-format fsdp_dtensor", "--rope-type rope", "--no-rope-fusion"} <= set(new)
    for named, lines in (("0.13", new), ("0.14", old)):
        refusals = release("megatron", named).refusals(arguments("\n".join(lines)))
        assert any("which it does not have" in text for text in refusals)


def test_fp8_and_recomputed_norms_meet_only_where_they_may() -> None:
    layout = replace(LAYOUT, recompute="expert-norms+expert-activation", practice=FP8)
    assert not any("--recompute" in line for line in some(lines_of(SPARSE, layout, "0.13")))
    assert any("0.13 runs no recomputation" in text for text in some(config_of(SPARSE, layout, "0.13").missing))
    new = lines_of(SPARSE, layout, "0.14")
    assert {"--fp8-recipe tensorwise", "--recompute-modules layernorm moe_act"} <= set(new)
    delayed = [line for line in new if "recipe" not in line]
    assert any("delayed scaling" in text for text in some(release("megatron").refusals(arguments("\n".join(delayed)))))
    kinds = [
        Pins(framework="megatron", release=name, precision="fp8").recomputations(SPARSE) for name in ("0.13", "0.14")
    ]
    assert kinds[0] == ("none", "full")
    assert kinds[1] == Pins(framework="megatron").recomputations(SPARSE)
    assert set(kinds[1]) > set(kinds[0])
    with refused(PlanError, "megatron 0.13 does not recompute as 'expert-norms' says in FP8"):
        Pins(framework="megatron", release="0.13", precision="fp8", recompute="expert-norms")


@pytest.mark.parametrize("named", MEGATRONS)
def test_norms_that_are_part_of_a_product_are_not_promised(named: str) -> None:
    # The mistake: a file that promised 35.0 GiB and took 38.0, over its limit.
    pins = Pins(framework="megatron", release=named)
    assert not any("norms" in how for how in some(pins.recomputations(DENSE)))
    config = config_of(DENSE, replace(LAYOUT, recompute="norms"), named)
    assert "layernorm" not in config.text
    held = [peak_bytes(DENSE, replace(LAYOUT, recompute=how)) for how in ("none", "norms")]
    more = next(text for text in config.missing if text.startswith("recomputation of norms"))
    assert f"holds {(held[0] - held[1]) / 1024:.0f} KiB more per device" in more
    assert plan(model("gpt-7.5b"), cluster("h100", 8), batch=64, pins=pins, top=1).chosen.layout.recompute in (
        "none", "full", *(f"full:{count}" for count in range(40))
    )  # fmt: skip


def test_what_a_module_recomputes_is_what_the_plan_counts() -> None:
    """By hand: sequences of 128 tokens, width 64, two experts of width 32 a token, numbers of 2 bytes each."""
    layout = replace(LAYOUT, tensor=1, data=4, sequence_parallel=False, recompute="none")
    tokens, hidden, inner = 128, 64, 2 * 32
    kept = {
        how: peak_bytes(SPARSE, replace(layout, recompute=how)) for how in ("none", "expert-norms", "expert-activation")
    }
    # The fullest rank is the first, which holds two microbatches of 2 dense layers and 2 with experts.
    assert kept["none"] - kept["expert-norms"] == 2 * 2 * 2 * tokens * hidden
    assert kept["none"] - kept["expert-activation"] == 2 * 2 * 2 * tokens * inner
    # Without a pipeline: 8 layers, one microbatch. All norms are also those before feed-forwards and of 16 + 8 latents.
    alone = replace(layout, pipeline=1, data=8, counts=(8,))
    latent = {how: peak_bytes(LATENT, replace(alone, recompute=how)) for how in ("none", "input-norms", "norms")}
    assert latent["none"] - latent["input-norms"] == 8 * 2 * tokens * hidden
    assert latent["none"] - latent["norms"] == 8 * 2 * tokens * (2 * hidden + 24)


def test_activation_functions_of_experts_are_recomputed_by_megatron() -> None:
    # The mistake: `moe_act` was denied.
    lines = lines_of(SPARSE, replace(LAYOUT, recompute="expert-activation"), "0.14")
    assert {"--recompute-modules moe_act", "--moe-grouped-gemm"} <= set(lines)
    assert "expert-activation" in Pins(framework="megatron").recomputations(SPARSE)
    refusals = release("megatron").refusals(arguments("\n".join(line for line in lines if "grouped" not in line)))
    assert any("without grouped products" in text for text in some(refusals))
    with refused(PlanError, "recompute is 'expert-activation', but dense has no experts"):
        meshes(DENSE, cluster("h100", 8), 16, Pins(recompute="expert-activation"))


NEMOTRON = {
    "model_type": "nemotron",
    "num_hidden_layers": 32,
    "hidden_size": 6144,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "intermediate_size": 24576,
    "vocab_size": 256000,
    "max_position_embeddings": 4096,
    "hidden_act": "relu2",
    "norm_eps": 1e-05,
    "tie_word_embeddings": False,
}


def test_the_norm_of_nemotron_is_not_guessed_from_its_biases() -> None:
    found = transformer_of(NEMOTRON, name="nemotron-4-15b")
    assert not found.biased
    layout = Layout(batch=64, tensor=8, counts=(32,), zero=0, sequence_parallel=True)
    lines = lines_of(found, layout, "0.14")
    assert {"--apply-layernorm-1p", "--squared-relu", "--norm-epsilon 1e-05", "--disable-bias-linear"} <= set(lines)
    assert not any("RMSNorm" in line for line in some(lines))
    assert found.details.others == ()


def test_a_norm_that_nobody_named_is_said_to_be_a_guess() -> None:
    for transformer, kind in ((DENSE, "RMSNorm"), (replace(DENSE, biased=True), "LayerNorm")):
        missing = config_of(transformer, LAYOUT, "0.14").missing
        assert any(text.startswith(f"the kind of norm: {kind} is written") for text in some(missing))
    assert not any("kind of norm" in text for text in some(config_of(model("llama-3-8b"), SHARDED, "0.14").missing))


def test_a_plan_that_a_release_refuses_does_not_start() -> None:
    biased = replace(SPARSE, biased=True)
    config = config_of(biased, LAYOUT, "0.14")
    assert not config.starts
    assert "Megatron-LM 0.14 refuses biases in experts" in config.missing
    assert "# It does not run:\n# - Megatron-LM 0.14 refuses biases in experts\n" in config.text
    assert not config_of(SPARSE, replace(LAYOUT, sequence_parallel=False), "0.13").starts
    odd = config_of(replace(DENSE, sequence=126), replace(LAYOUT, sequence_parallel=False), "0.2", "torchtitan")
    assert (
        "torchtitan 0.2 refuses sequences that TP and two pieces per context-parallel rank do not divide" in odd.missing
    )


def test_hidden_messages_of_experts_are_switched_on_where_the_release_has_it() -> None:
    hides = replace(SHARDED, zero=1, expert=2, practice=Pins(overlaps=("experts",)).practice)
    assert "--overlap-moe-expert-parallel-comm" in lines_of(SPARSE, hides, "0.14")
    assert any("0.13 has no --overlap-moe" in text for text in some(config_of(SPARSE, hides, "0.13").missing))
    whole = replace(hides, recompute="full")
    assert any("without full recomputation" in text for text in some(config_of(SPARSE, whole, "0.14").missing))


def test_dual_pipe_of_torchtitan_hides_experts_only_if_planned() -> None:
    counts = layer_counts(SPARSE, 2, "dualpipe-v", 2)
    layout = Layout(16, pipeline=2, data=4, expert=2, schedule="dualpipe-v", stages_per_rank=2, counts=counts, zero=2)
    name = "pipeline_parallel_expert_parallel_overlap"
    config = config_of(SPARSE, replace(layout, recompute="full"), "0.2", "torchtitan")
    assert config.starts
    assert f"{name} = false" in config.text
    hides = replace(layout, practice=Pins(overlaps=("experts",)).practice)
    assert name not in config_of(SPARSE, hides, "0.2", "torchtitan").text
    again = config_of(SPARSE, replace(hides, recompute="full"), "0.2", "torchtitan")
    assert f"{name} = false" in again.text
    assert any(text.startswith("messages of experts that hide") for text in some(again.missing))
    taken = tomllib.loads(again.text)
    del taken["parallelism"][name]
    assert release("torchtitan").refusals(flattened(taken)) == [
        "DualPipeV with overlapped experts and recomputation"
    ]  # fmt: skip


def test_releases_that_are_not_known_are_refused() -> None:
    with refused(PlanError, "unknown release 0.12 of megatron"):
        Pins(framework="megatron", release="0.12")
    with refused(PlanError, "release 0.14 of drumline", expected="a release of megatron or torchtitan"):
        Pins(framework="drumline", release="0.14")


def test_releases_are_named_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = [f"{framework}@{item}" for framework, items in RELEASES.items() for item in items]
    # The command line has the names by itself, to start fast.
    assert sorted(named) == sorted(f"{name}@{item}" for name, items in plan_cluster._RELEASES.items() for item in items)
    asked = ["plan", "mixtral-8x7b", "--hardware", "h100", "--gpus", "16", "--batch", "64", "--brief", "--top", "1"]
    for name in named:
        framework, item = name.split("@")
        out = tmp_path / f"{name}{'.args' if framework == 'megatron' else '.toml'}"
        assert main([*asked, "--launch", name, "--out", str(out)]) == 0
        assert f"for {release(framework, item).name} {item} (" in out.read_text(encoding="utf-8").splitlines()[0]
        capsys.readouterr()
    assert main([*asked, "--launch", "megatron@0.12"]) != 0
    assert "megatron@0.13" in " ".join(capsys.readouterr().err.split())


def test_the_text_says_why_a_release_does_not_run_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_layer": 8,
        "n_embd": 512,
        "n_head": 8,
        "vocab_size": 1000,
        "n_inner": 1024,
    }
    path = tmp_path / "biased.json"
    path.write_text(json.dumps({"model_type": "gpt_bigcode", **config}), encoding="utf-8")
    asked = [str(path), "--hardware", "h100", "--gpus", "8", "--batch", "16", "--brief", "--top", "1"]
    assert main(["plan", *asked, "--launch", "megatron"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "megatron does not run this plan: - Megatron-LM 0.14 refuses biases in experts" in told
    assert "Start it" not in told
