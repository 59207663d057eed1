"""Settings from files, functions and flags: read, refused with every problem at once, and written back."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.adapt.settings import Adapt
from drumline.core.errors import ConfigError
from drumline.core.settings.setting import Setting
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.models import MODELS
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.launch.launch import train_config
from drumline.train.config.files.settings_file import from_toml, read_settings
from drumline.train.config.flags import assigned
from drumline.train.config.keys import GROUPS, TABLES, keys
from drumline.train.config.settings import (
    AdaptSettings,
    MeshSettings,
    OptimizerGroup,
    OptimizerSettings,
    PipelineSettings,
    RunSettings,
    TrainSettings,
)
from drumline.train.config.tables import Reading
from drumline.train.config.write import config_text
from matrices import ALL, examples
from refused import refused, saying
from some import some

TORCH = find_spec("torch") is not None


def refusal(text: str, tmp_path: Path, overrides: Any = None, **more: Any) -> ConfigError:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_settings(path, overrides, **more)
    return caught.value


def told(text: str, tmp_path: Path, overrides: Any = None, **more: Any) -> list[str]:
    """Return where, key, error and mend of every problem, without the folder."""
    found = refusal(text, tmp_path, overrides, **more).problems
    parts = ("where", "key", "error", "expected", "fix")
    return ["|".join(entry[part] for part in parts).replace(f"{tmp_path}/", "") for entry in found]


def test_nothing_at_all_is_the_built_in_gpt_on_the_shipped_text() -> None:
    assert read_settings() == TrainSettings()
    assert (read_settings().model.kind, read_settings().data.files) == ("gpt", ())


def test_every_key_has_a_meaning_and_a_default_that_its_rule_admits() -> None:
    for table in some(keys()):
        for key in some(keys()[table].values()):
            assert key.short, key.path
            assert key.rule.unit in key.short, key.path
            if key.path != GROUPS:
                assert key.taken(key.default) == key.default
    assert list(TABLES) == [field.name for field in fields(TrainSettings)]


def test_all_problems_are_told_at_once_with_line_key_and_the_nearest_right_one(tmp_path: Path) -> None:
    text = """format = "drumline-train"
version = 1
[model]
kind = "gtp"
[batch]
sequnces = 8
microbatch = 5
[pipeline]
schedule = "1f1v"
[optimizer]
kind = "AdamX"
[mesh]
expert = 2
steps = 3
[modle]
hidden = 8
"""
    assert told(text, tmp_path, {"run.steps": 0}, flags={"run.steps": "--steps"}) == [
        'mine.toml, line 4|model.kind|is \'gtp\'|"gpt", "mlp", "hf" or "function"|did you mean gpt?',
        "mine.toml, line 6|batch.sequnces|unknown key||did you mean sequences?",
        "mine.toml, line 14|mesh.steps|unknown key||did you mean run.steps?",
        "mine.toml, line 15|modle|unknown table||did you mean model?",
        "--steps|run.steps|is 0|a whole number of 1 or more|",
        "mine.toml, line 9|pipeline.schedule|unknown schedule '1f1v'||did you mean 1f1b?",
        "mine.toml, line 13|mesh.expert|is 2|a divisor of mesh.data, 1, whose ranks share out the experts|",
        *(
            ["mine.toml, line 11|optimizer.kind|is 'AdamX'|a class of torch.optim|did you mean Adamax?"]
            if TORCH
            else []
        ),
    ]


def test_a_schedule_of_a_python_file_is_written_to_a_csv_file_first(tmp_path: Path) -> None:
    (problem,) = told('format = "drumline-train"\n[pipeline]\nschedule = "mine.py:rev"\n', tmp_path)
    assert problem == (
        "mine.toml, line 3|pipeline.schedule|is 'mine.py:rev'|the name of a schedule, or a CSV file with a program|"
        "write its program to one: drumline show mine.py:rev --ranks 2 --microbatches 8 --out FILE.csv"
    )


WRONG = {
    "version = 2": "line 1|version|is 2|1|a newer Drumline wrote this file: update Drumline",
    'format = "torchtitan"': "line 1|format|is 'torchtitan'|\"drumline-train\"|",
    "steps = 3": "line 1|steps|is outside of any table||it belongs to [run]",
    "model = 3": "line 1|model|is 3|a table: [model]|",
    "[run]\n\nsteps = 2.5": "line 3|run.steps|is 2.5|a whole number of 1 or more|",
    "[run]\nseed = true": "line 2|run.seed|is True|a whole number from 0 to 2^63 - 1|",
    "[optimizer]\nlr = nan": "line 2|optimizer.lr|is nan|a number of 0 or more|",
    f"[optimizer]\nlr = 1{'0' * 400}": f"line 2|optimizer.lr|is 1{'0' * 27}...{'0' * 29}|a number of 0 or more|",
    "[data]\nfiles = 'a.txt'": "line 2|data.files|is 'a.txt'|a list of strings|",
    "[data]\nfiles = [\n'a.txt']": "line 3|data.files|a.txt: no such file|a file to read|",
    "[optimizer]\nsettings = { when = 1979-05-27 }": "line 2|optimizer.settings|is {'when': datetime.date(1979, 5, 27)}"
    "|a table|",
    "[optimizer]\ngroups = 3": "line 2|optimizer.groups|is 3|tables, each under [[optimizer.groups]]|",
    "[[optimizer.groups]]\nnmes = ['a']": "line 2|optimizer.groups.nmes|unknown key||did you mean names?",
    "[pipeline]\nschedule = 'chimera'\n[mesh]\npipeline = 3": "line 2|pipeline.schedule|chimera cannot use 3 ranks: its"
    " two directions meet in the middle|an even number of ranks|use 2 or 4",
    "[pipeline]\nschedule = 'pipedream'": "|optimizer.clip_norm|is 1.0 (the default), and pipedream makes an "
    "update at different times on different ranks|updates at the same place in all rows: ranks can add up their "
    "norms only where all of them update|set pipeline.vertical_sync = true",
    "[pipeline]\nlayers = [3, 2]": "line 2|pipeline.layers|sums to 5|6, as model.num_layers says|",
    "[pipeline]\nlayers = [3, 2, 1]": "line 2|pipeline.layers|has 3 numbers|one for each of 2 stages|",
    "[pipeline]\nlayers = [3, 3]\nbalance = 'even'": "line 3|pipeline.balance|stands beside pipeline.layers|one way to "
    "cut the model|leave one out",
    "[pipeline]\nplan = 'p.json'": "line 2|pipeline.plan|cannot read p.json: No such file or directory|a JSON file "
    "that `drumline plan PROFILE.json --out PLAN.json` wrote|",
    "[mesh]\npipeline = 9": "|model.num_layers|is 6 (the default)|enough layers for 9 stages|use fewer ranks or "
    "stages per rank",
    "[batch]\nmicrobatch = 5": "line 1|batch.sequences|is 32 (the default)|a multiple of 5 = 5 (microbatch) x 1 "
    "(mesh.data) x 1 (accumulate)|use 30 or 35",
    "[model]\nnum_heads = 5": "line 2|model.num_heads|is 5|a number that divides model.hidden, 384|use 4, or set "
    "model.head_width",
    "[model]\nkind = 'hf'": "line 1|model.path|is missing|a Hugging Face model's folder, or its config.json|",
    "[model]\nkind = 'hf'\npath = 'no'": "line 3|model.path|no: no such file or folder|a folder with a config.json, or "
    "that file|",
    "[model]\nkind = 'function'\nfunction = 'a.py:b'": "line 3|model.function|a.py: no such file|"
    "package.module:function or file.py:function|",
    "[model]\nexperts_num_experts = 8": "line 2|model.experts_num_experts|is 8, which the built-in GPT does not have|a "
    'dense GPT|train the model itself: kind = "hf" and path = its folder, or leave the key out for a plain GPT',
    "[model]\nkind = 'mlp'\n[data]\nkind = 'text'": 'line 4|data.kind|is "text", and an MLP takes points|"points" or '
    '"function"|',
    "[lengths]\nhow = 'buckets'\nbuckets = [64, 32]": "line 3|lengths.buckets|is [64, 32]|rising lengths of at most "
    "batch.sequence, 256|",
    "[memory]\nsequence_parallel = true": "line 2|memory.sequence_parallel|is true, and the mesh has no tp "
    "(mesh.tensor)|lines along tp: tensor-parallel lines divide the tokens between their layers|set "
    "memory.sequence_parallel = false",
    "[precision]\ncompute = 'fp16'\nweights = 'bf16'": "line 3|precision.weights|the model has parameters in bf16, and "
    'precision.compute is "fp16"|float32 parameters: gradients in float32 can be unscaled without loss|set '
    "precision.master_weights = true",
}


# What only a feature refuses.
DECLARED = {"schedule = 'pipedream'": "stream", "sequence_parallel = true": "mesh", "weights = 'bf16'": "precision"}


def _marks(text: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.features(feature) for end, feature in DECLARED.items() if text.endswith(end)]


@pytest.mark.parametrize("text", [pytest.param(text, marks=_marks(text), id=text) for text in WRONG])
def test_what_is_wrong_is_refused_with_its_line_and_the_mend(text: str, tmp_path: Path) -> None:
    where = "mine.toml" if WRONG[text].startswith("|") else "mine.toml, "
    assert told(text, tmp_path) == [where + WRONG[text]]


def test_text_that_is_no_toml_is_refused_with_line_and_column(tmp_path: Path) -> None:
    error = refusal("[run]\nsteps = \n", tmp_path)
    assert re.fullmatch(r".*mine\.toml, line 2, column 9: not TOML: invalid value", error.error)
    assert "end of document" in refusal("[run", tmp_path).error or "column" in refusal("[run", tmp_path).error
    assert "is JSON" in refusal('{"format": "drumline plan"}', tmp_path).error
    with refused(ConfigError, r"cannot read .*none\.toml"):
        read_settings(tmp_path / "none.toml")


@pytest.mark.torch
def test_optimizers_and_their_arguments_are_known_before_anything_starts(tmp_path: Path) -> None:
    text = """[optimizer]
settings = { weight_decy = 0.1, lr = 3 }
[[optimizer.groups]]
names = ["blocks.*"]
kind = "Muon"
[[optimizer.groups]]
kind = "LBFGS"
"""
    assert told(text, tmp_path) == [
        "mine.toml, line 2|optimizer.settings.weight_decy|is no argument of AdamW||did you mean weight_decay?",
        "mine.toml, line 2|optimizer.settings.lr|is no argument of AdamW||it has its own key: optimizer.lr",
        "mine.toml, line 3|optimizer.groups.0.only_matrices|is false|true: Muon takes matrices alone|",
        "mine.toml, line 7|optimizer.groups.1.kind|is 'LBFGS', which a pipeline cannot run|a class of torch.optim|"
        + told(text, tmp_path)[3].rpartition("|")[2],
    ]


def test_how_to_adapt_is_no_use_without_saying_whether(tmp_path: Path) -> None:
    assert told("[adapt]\nrebalance = 'half'\n", tmp_path) == [
        "mine.toml, line 2|adapt.rebalance|is given, but not whether to adapt|adapt.on, true or false|add --adapt"
    ]
    path = tmp_path / "off.toml"
    path.write_text("[adapt]\non = false\nrebalance = 'half'\n")
    assert read_settings(path).adapt.rebalance == "half"


def test_what_a_plan_writes_is_read_as_it_was_planned(tmp_path: Path) -> None:
    layout = Layout(batch=16, microbatch=2, pipeline=4, counts=(6, 6, 6, 6), recompute="full")
    path = tmp_path / "plan.toml"
    path.write_text(train_config(MODELS["gpt-1.7b"], layout))
    found = read_settings(path)
    assert (found.model.num_layers, found.model.hidden, found.model.dropout, found.model.tied) == (24, 2304, 0.1, True)
    assert (found.num_ranks, found.num_microbatches, found.batch.sequence) == (4, 8, 2048)
    assert (found.pipeline.layers, found.memory.recompute) == ((6, 6, 6, 6), "full")
    llama = Transformer("tiny", 4, 64, 4, 1000, 128, 2, gated=True, tied=False, learned_positions=False, biased=False)
    path.write_text(train_config(llama, Layout(batch=4, pipeline=2, counts=(2, 2))))
    assert read_settings(path).model.num_key_value_heads == 2
    path.write_text(train_config(MODELS["deepseek-v3"], replace(layout, counts=(15, 16, 15, 15))))
    with pytest.raises(ConfigError) as caught:
        read_settings(path)
    wrong = {problem["key"] for problem in caught.value.problems}
    assert {"model.experts_num_experts", "model.latent_keys_values", "model.num_dense_layers"} <= wrong


def test_a_function_returns_settings_or_some_of_their_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "from steps_beside import STEPS\n"
        "from drumline.train.config.settings import *\n"
        "def all_of_it(): return TrainSettings(run=RunSettings(steps=STEPS), model=ModelSettings(kind='mlp'))\n"
        "def some_of_it(): return {'run': RunSettings(steps=8), 'mesh': {'pipeline': 4}}\n"
        "def wrong(): return {'run': {'stps': 8}}\n"
        "def failing(): return 1 / 0\n"
        "def nothing(): return None\n"
    )
    (tmp_path / "steps_beside.py").write_text("STEPS = 7\n")
    name = f"{tmp_path}/mine.py"
    found = read_settings(f"{name}:all_of_it", {"run.seed": 3})
    assert (found.run, found.data.kind) == (RunSettings(steps=7, seed=3), "points")
    monkeypatch.chdir(tmp_path)
    assert read_settings("mine:some_of_it").mesh == MeshSettings(pipeline=4)
    for function, said in {
        "wrong": saying("mine:wrong: run.stps: unknown key", fix=r"did you mean steps\?"),
        "failing": saying("mine:failing failed with ZeroDivisionError: division by zero"),
        "nothing": saying("mine:nothing returns None"),
        "som_of_it": saying(
            "mine has no function 'som_of_it'", expected="file.py:function", fix=r"did you mean some_of_it\?"
        ),
    }.items():
        with refused(ConfigError, **said):
            read_settings(f"mine:{function}")


def test_flags_lie_over_a_file_and_reach_into_tables(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[run]\nsteps = 5\nseed = 1\n[[optimizer.groups]]\nlr = 1\n")
    over = {"run.steps": 9, "optimizer.settings.weight_decay": 0.1, "optimizer.groups.0.lr": 2.0, "num_microbatches": 4}
    found = read_settings(path, over)
    assert (found.run.steps, found.run.seed, found.batch.microbatch) == (9, 1, 8)
    assert found.optimizer.settings == {"weight_decay": 0.1}
    assert found.optimizer.groups == (OptimizerGroup(lr=2.0),)
    assert told("", tmp_path, {"num_microbatches": 5}, flags={"num_microbatches": "--microbatches"}) == [
        "--microbatches|batch.sequences|is 32, for 5 microbatches|a multiple of 5|use 30"
    ]
    assert told("", tmp_path, {"optimizer.groups.1.lr": 5}) == [
        "optimizer.groups.1.lr|optimizer.groups.1.lr|is no key that a value can be given to|table.key, like run.steps|"
    ]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
PLAIN: Any = st.recursive(
    st.integers(-(2**63), 2**63 - 1) | st.booleans() | TEXTS | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


def values_of(key: Setting) -> Any:
    """Return a strategy for the values that a key may have."""
    if key.path == "model.others":
        return st.dictionaries(st.sampled_from(["num_dense_layers", "alibi", "experts_per_token", "others"]), PLAIN)
    if key.rule.choices:
        return st.sampled_from(key.rule.choices)
    if key.path == "pipeline.check_model":
        return st.booleans() | st.just("first") | st.integers(1, 2**62)
    if key.path == "pipeline.slices":
        return st.integers(1, 2**62) | st.lists(st.integers(2, 2**62), min_size=1, max_size=3).map(tuple)
    kind = get_origin(key.inner) or key.inner
    inner = get_args(key.inner)[0] if kind is tuple else kind
    value: Any = {
        str: TEXTS,
        bool: st.booleans(),
        int: st.integers(0, 3) | st.integers(1, 2**62),
        float: st.floats(0, 0.99) | st.floats(1, 1e300),
        dict: st.dictionaries(TEXTS, PLAIN, max_size=3),
    }[inner]
    made = st.lists(value, max_size=3).map(tuple) if kind is tuple else value
    made = made.filter(key.rule.holds)
    return st.none() | made if key.is_optional else made


def table_of(name: str) -> Any:
    return st.fixed_dictionaries(
        {}, optional={key: values_of(setting) for key, setting in keys()[name].items() if setting.path != GROUPS}
    )


@given(st.fixed_dictionaries({name: table_of(name) for name in TABLES}), st.lists(table_of(GROUPS), max_size=2))
@settings(max_examples=60 if ALL else examples(25), deadline=None)
def test_settings_that_are_written_read_back_as_the_same(tables: Any, groups: Any) -> None:
    whole = TrainSettings()
    made = replace(whole, **{name: replace(getattr(whole, name), **table) for name, table in tables.items()})
    made = replace(made, optimizer=replace(made.optimizer, groups=tuple(OptimizerGroup(**group) for group in groups)))
    reading = Reading(from_toml(config_text(made), "written.toml"))
    assert (reading.settings(), reading.problems) == (made, [])


def test_what_is_printed_reads_back_through_all_checks(tmp_path: Path) -> None:
    path = tmp_path / "printed.toml"
    group = OptimizerGroup(("*.weight",), "SGD", lr=0.1, settings={"momentum": 0.9})
    made = replace(TrainSettings(), optimizer=OptimizerSettings(groups=(group,), settings={"betas": [0.9, 0.95]}))
    path.write_text(config_text(made))
    assert read_settings(path) == made
    assert json.loads(json.dumps(refusal("[a]", tmp_path).problems))[0]["key"] == "a"


def test_what_may_change_while_a_run_goes_on_is_what_may_change_in_a_pipeline() -> None:
    def stated(kind: type) -> dict[str, Any]:
        hints = get_type_hints(kind)
        return {field.name: (hints[field.name], field.default, field.metadata) for field in fields(kind)}

    ours = stated(AdaptSettings)
    assert ours.pop("on")[:2] == (bool, False)
    assert ours == stated(Adapt)


def test_the_steps_to_check_are_a_switch_a_word_or_a_number(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    for text, value in {"true": True, "false": False, '"first"': "first", "500": 500, "1": 1}.items():
        path.write_text(f"[pipeline]\ncheck_model = {text}\n")
        found = read_settings(path).pipeline.check_model
        assert (found, type(found)) == (value, type(value))
    check_model = read_settings(lambda: {"pipeline": PipelineSettings(check_model=1)}).pipeline.check_model
    assert type(check_model) is int
    expected = 'true, false, "first", or a whole number of 1 or more'
    assert expected in told('[pipeline]\ncheck_model = "always"\n', tmp_path)[0]
    assert expected in told("[pipeline]\ncheck_model = 0\n", tmp_path)[0]
    assert assigned("pipeline.check_model=first") == ("pipeline.check_model", "first")
