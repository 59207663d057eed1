"""What does not go together is said once: `Pipeline`, `drumline train` and the pages follow.

Each entry of the table is met twice: by a pipeline, and by a config if one can spell it. Running this file rewrites the
tables of the pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drumline as dl
from drumline.cli.main import main
from drumline.core.errors import ConfigError, DrumlineError
from drumline.core.settings.clash import Clash, Together
from drumline.engine.together import mesh_facts, program_facts
from drumline.pipeline.together import table
from drumline.schedules import generate
from drumline.train.config import together as training
from drumline.train.config.files.settings_file import read_settings
from mesh import cells
from some import some

pytestmark = [
    pytest.mark.torch,
    pytest.mark.features(
        "adapt", "capture", "lengths", "mesh", "moving", "precision", "record", "slices", "stream", "validated"
    ),
]

DOCS = Path(__file__).parents[2] / "docs"
ALL = "all"
BEGIN, END = re.compile(r"<!-- clashes: (.*) -->"), "<!-- end of clashes -->"


def clashes() -> dict[str, Clash]:
    """Return everything that does not go together, by a name."""
    return {f"{clash.first.shown} x {clash.other.shown}": clash for clash in (*table(), *training.CLASHES)}


# ---- every entry is met --------------------------------------------------------------------------------------------

STREAM, FLUSH = {"schedule": "pipedream-2bw"}, "a schedule without a flush"
KEY = {"pipeline.schedule": "pipedream-2bw"}
AFTER: dict[str, Any] = {"validated": "after"}
LATE = {"optimizer.validated": "after"}
SHORT = generate("1f1b", num_ranks=2, num_microbatches=1)
DP, TP = {"pp": 1, "dp": 2}, {"pp": 1, "tp": 2}
LINES = {"cp": {"mesh.context": 2}, "tp": {"mesh.tensor": 2}, "ep": {"mesh.data": 2, "mesh.expert": 2}}
Call = Callable[[dl.Pipeline], Any]
# What `Pipeline` is given, what is called then, and the keys of a config that ask for the same.
MET: dict[str, tuple[dict[str, Any], Call | None, dict[str, Any]]] = {
    **{
        f"`{name}` x `plan`": ({"plan": "plan.json", name: value}, None, keys)
        for name, value, keys in (
            ("schedule", "gpipe", {"pipeline.schedule": "gpipe"}),
            ("num_microbatches", 4, {}),
            ("stages_per_rank", 2, {"pipeline.stages_per_rank": 2}),
            ("balance", "even", {"pipeline.balance": "even"}),
            ("cuts", ["1"], {"pipeline.layers": [3, 3]}),
            ("checkpoint", "full", {"memory.recompute": "full"}),
        )
    },
    '`transport="in-process"` x a `mesh` with several lines': (
        {"transport": "in-process", "mesh": DP}, None, {"pipeline.transport": "in-process", "mesh.data": 2}),
    "`programs` x `schedule=\"auto\"`": ({"programs": {"few": 1}, "schedule": "auto"}, None, {}),
    "`record=False` x `schedule=\"auto\"`": ({"record": False, "schedule": "auto"}, None, {}),
    "`record=False` x `adapt`": ({"record": False, "adapt": {}}, None, {}),
    "a step's `program` x `schedule=\"auto\"`": (
        {"schedule": "auto"}, lambda pipe: stepped(pipe, program=SHORT), {}),
    "`arrange` x `capture`": (
        {"arrange": True, "capture": True}, None, {"lengths.search": True, "pipeline.capture": True}),
    "`capture` x `adapt`": ({"capture": True, "adapt": True}, None, {"pipeline.capture": True, "adapt.on": True}),
    "`capture` x a `mesh` with several lines": (
        {"capture": True, "mesh": DP}, None, {"pipeline.capture": True, "mesh.data": 2}),
    "`zero` x no `dp`": ({"zero": 1}, None, {"memory.zero": 1}),
    "`sequence_parallel` x no `tp`": ({"sequence_parallel": True}, None, {"memory.sequence_parallel": True}),
    **{
        f"`compile` x a `mesh` with `{axis}`": (
            {"compile": True, "mesh": {"pp": 2, axis: 2}}, None, {"pipeline.compile": True, **keys})
        for axis, keys in LINES.items()
    },
    f"`repartition` x {FLUSH}": (STREAM, lambda pipe: pipe.repartition(balance=[1, 1]), {}),
    '`repartition` x `validated="after"`': (
        {}, lambda pipe: (pipe.optimizer(torch.optim.SGD, **AFTER), pipe.repartition(balance=[1, 1])), {}),
    'parameters in bf16 or fp16, without `master_weights` x `precision="fp16"`': (
        {"model": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16(), "precision": "fp16"}, None,
        {"precision.weights": "bf16", "precision.compute": "fp16"}),
    f"`capture` x {FLUSH}": ({"capture": True, **STREAM}, None, {"pipeline.capture": True, **KEY}),
    f"`compile` x {FLUSH}": ({"compile": True, **STREAM}, None, {"pipeline.compile": True, **KEY}),
    f"`programs` x {FLUSH}": ({"programs": {"few": 1}, **STREAM}, None, {"lengths.how": "buckets", **KEY}),
    f"a step's `program` x {FLUSH}": (STREAM, lambda pipe: stepped(pipe, program="few"), {}),
    f"`take_program` x {FLUSH}": (STREAM, lambda pipe: pipe.take_program("1f1b"), {}),
    f"`adapt` x {FLUSH}": ({"adapt": True, **STREAM}, None, {"adapt.on": True, **KEY}),
    f"`arrange` x {FLUSH}": ({"arrange": True, **STREAM}, None, {"lengths.search": True, **KEY}),
    f"a `mesh` x {FLUSH}": ({"mesh": {"pp": 2}, **STREAM}, None, {"mesh.tensor": 2, **KEY}),
    f"several steps for one update x {FLUSH}": (
        STREAM, lambda pipe: stepped(pipe, share=0.5), {"batch.accumulate": 2, **KEY}),
    f'`precision="fp16"` x {FLUSH}': ({"precision": "fp16", **STREAM}, None, {"precision.compute": "fp16", **KEY}),
    f'`validated="after"` x {FLUSH}': (STREAM, lambda pipe: pipe.optimizer(torch.optim.SGD, **AFTER), LATE | KEY),
    f"a program from a file x {FLUSH}": (
        {"schedule": generate("pipedream", num_ranks=2, num_microbatches=2), "num_microbatches": None}, None, {}),
    "`max_norm` x `pipedream` without `vertical_sync`": (
        {"schedule": "pipedream"}, lambda pipe: pipe.optimizer(torch.optim.SGD, max_norm=1.0),
        {"pipeline.schedule": "pipedream"}),
    f"`clip_grad_norm_` x {FLUSH}": (STREAM, lambda pipe: pipe.clip_grad_norm_(1.0), {}),
    '`validated="after"` x `precision="fp16"`': (
        {"precision": "fp16"}, lambda pipe: pipe.optimizer(torch.optim.SGD, **AFTER),
        LATE | {"precision.compute": "fp16"}),
    '`clip_grad_norm_` x `validated="after"`': (
        {}, lambda pipe: (pipe.optimizer(torch.optim.SGD, **AFTER), pipe.clip_grad_norm_(1.0)), {}),
}  # fmt: skip
# What needs several processes, or a device: the facts of it, and the keys. Others' tests run some of them.
TWO_LINES = {**mesh_facts({"pp": 2, "dp": 2}), "zero": 3}
KNOWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a step's `program` x `capture`": ({"program": "few", "capture": True}, {}),
    "`zero=3` x a schedule with two copies of each stage": (
        {**TWO_LINES, **program_facts(generate("dualpipe", num_ranks=2, num_microbatches=4))},
        {"memory.zero": 3, "mesh.data": 2, "pipeline.schedule": "dualpipe"}),
    "a quantised model x `zero=3`": ({**TWO_LINES, "quantised": True}, {}),
    "a quantised model x a `mesh` with `tp`": ({**mesh_facts(TP), "quantised": True}, {}),
    "an optimizer that may need whole matrices x `zero=3`": ({**TWO_LINES, "optimizer": "Muon"}, {}),
    "`repartition` x `zero=3` of some stages": (
        {"call": "repartition", **TWO_LINES, "zero_by_stage": {1: 3}, "num_stages": 2}, {}),
    '`validated="after"` x `capture`': ({"capture": True, **AFTER}, LATE | {"pipeline.capture": True}),
    '`validated="after"` x `zero`': ({**TWO_LINES, **AFTER}, LATE | {"memory.zero": 1, "mesh.data": 2}),
    '`validated="after"` x a `mesh` with `tp` or `ep` or `cp`': (
        {**mesh_facts(TP), **AFTER}, LATE | {"mesh.context": 2}),
    f"`--elastic` x {FLUSH}": (
        {"elastic": True, "flushed": False, "program_name": "pipedream"}, {"failures.elastic": True, **KEY}),
    "`--adapter` x a `mesh` with `tp` or `ep`": (
        {"adapter": "lora", **mesh_facts(TP)}, {"adapter.method": "lora", "mesh.tensor": 2}),
    "a quantised `--base` x `zero=3`": (
        {"base": "nf4", **TWO_LINES}, {"adapter.base": "nf4", "memory.zero": 3, "mesh.data": 2}),
    "`--adapter loha` or `lokr` x `--base nf4`": (
        {"adapter": "loha", "base": "nf4"}, {"adapter.method": "lokr", "adapter.base": "nf4"}),
    **{
        f"{other} x `slices`": ({"slices": 3, **facts}, {})
        for other, facts in {
            FLUSH: {"flushed": False, "program_name": "pipedream"},
            "a schedule with two copies of each stage": program_facts(
                generate("dualpipe", num_ranks=2, num_microbatches=4)),
            "a `mesh` with `cp` or `tp` or `ep`": mesh_facts(TP),
            "a step's `program`": {"program": "few"},
            "`programs`": {"programs": {"few": 1}},
            "`adapt`": {"adapt": True},
            "`arrange`": {"arrange": True},
            "`capture`": {"capture": True},
            "`compile`": {"compile": True},
            "`take_program`": {"call": "take_program"},
            "`search`": {"call": "search"},
            "`repartition`": {"call": "repartition"},
        }.items()
    },
    "`--elastic` x several lines without `dp`": (
        {"elastic": True, **mesh_facts(TP)}, {"failures.elastic": True, "mesh.tensor": 2}),
}  # fmt: skip


def stepped(pipe: dl.Pipeline, **how: Any) -> None:
    pipe.optimizer(torch.optim.SGD)
    pipe.step(torch.ones(4, 4), target=torch.ones(4, 4), **how)


def met(name: str) -> DrumlineError:
    """Return how a pipeline refuses an entry."""
    if name in KNOWN:
        clash = clashes()[name]
        with pytest.raises(clash.kind) as caught:
            Together((clash,), KNOWN[name][0]).refuse()
        return caught.value
    options, call, _ = MET[name]
    given: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "num_microbatches": 2, "num_ranks": 2}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if "plan" in options:
        given = {"loss_fn": nn.functional.mse_loss}

    def asked() -> None:
        pipe = dl.Pipeline(**{"model": model, **given, **options})
        if call is not None:
            call(pipe)

    with pytest.raises(clashes()[name].kind) as caught:
        asked()
    assert isinstance(caught.value, DrumlineError)
    return caught.value


def told(overrides: dict[str, Any]) -> list[dict[str, str]]:
    """Return what is wrong with a config."""
    with pytest.raises(ConfigError) as caught:
        read_settings(None, overrides)
    return list(caught.value.problems)


def test_every_entry_of_the_table_is_met_below() -> None:
    assert len(clashes()) == len(table()) + len(training.CLASHES)
    assert set(clashes()) == MET.keys() | KNOWN.keys()


@pytest.mark.parametrize("name", [*MET, *KNOWN])
def test_a_pipeline_and_a_config_refuse_in_the_same_words(name: str, tmp_path: Path) -> None:
    clash, refusal = clashes()[name], met(name)
    assert refusal.expected == (f"{clash.expected}: {clash.why}" if clash.why else clash.expected)
    keys = KNOWN[name][1] if name in KNOWN else MET[name][2]
    if not keys:
        return
    if clash.other.option == "plan":
        found = [item for item in told({"pipeline.plan": "plan.json", **keys}) if item["expected"] == refusal.expected]
    else:
        found = [entry for entry in told(keys) if entry["expected"] == refusal.expected]
    (problem,) = found
    assert problem["key"] in training.KEYS[clash.first.option]
    assert problem["key"] in keys or "(the default)" in problem["error"]
    if clash.use is None:
        assert problem["fix"] == refusal.fix
    else:
        assert f"use {clash.use[0]}={clash.use[1]!r}" == refusal.fix
        assert problem["fix"].startswith(f"set {training.KEYS[clash.use[0]][0]} = ")


def test_keys_of_options_are_keys_of_configs() -> None:
    from drumline.train.config.keys import keys

    for each in some(training.KEYS.values()):
        for key in some(each):
            group, name = key.split(".")
            assert name in keys()[group]


def test_two_lines_refuse_what_they_divide() -> None:
    for rank in dl.launch(_of_lines, num_ranks=2):
        zero, matrices, after = rank
        assert zero.startswith("UsageError: validated is 'after', and zero is 1; expected updates that are validated")
        assert matrices.startswith("RunError: Adafactor may need whole matrices, and zero is 3")
        assert after.startswith("UsageError: validated is 'after', and the mesh is pp1 x tp2")


def _of_lines() -> list[str]:
    def small(**options: Any) -> dl.Pipeline:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        how = {"loss_fn": nn.functional.mse_loss, "num_microbatches": 1, "timeout": 60.0, **options}
        return dl.Pipeline(model, **how)

    plan = {"0": "colwise", "1": "rowwise"}
    calls: list[tuple[dict[str, Any], Call]] = [
        ({"mesh": DP, "zero": 1}, lambda pipe: pipe.optimizer(torch.optim.SGD, **AFTER)),
        ({"mesh": DP, "zero": 3}, lambda pipe: pipe.optimizer(torch.optim.Adafactor)),
        ({"mesh": TP, "tensor_parallel": plan}, lambda pipe: pipe.optimizer(torch.optim.SGD, **AFTER)),
    ]
    found = []
    for options, call in calls:
        with small(**options) as pipe:
            try:
                call(pipe)
            except DrumlineError as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


# ---- the pages -----------------------------------------------------------------------------------------------------


def shown(half: str) -> str:
    """Return the table of a page: everything, or what does not go with one thing."""
    if half == ALL:
        rows = [f"| {clash.first.shown} | {clash.other.shown} | {clash.why} |" for clash in clashes().values()]
        return "\n".join(["| this | does not go with | because |", "|---|---|---|", *rows])
    pairs = [(clash.first, clash.other, clash.why) for clash in clashes().values()]
    found = [
        (two if value.shown == half else value, why) for value, two, why in pairs if half in (value.shown, two.shown)
    ]
    return "\n".join(["| this | because |", "|---|---|", *(f"| {value.shown} | {why} |" for value, why in found)])


def pages() -> Iterator[tuple[Path, str, str]]:
    """Yield every page with such tables, as it is and as it should be."""
    for path in sorted(DOCS.glob("*.md")):
        text = wanted = path.read_text(encoding="utf-8")
        for begin in BEGIN.finditer(text):
            before, _, rest = wanted.partition(begin[0])
            wanted = f"{before}{begin[0]}\n{shown(begin[1])}\n{END}{rest.partition(END)[2]}"
        if BEGIN.search(text):
            yield path, text, wanted


def test_the_pages_show_the_table() -> None:
    found = list(pages())
    assert {path.name for path, _, _ in found} == {"moving.md", "no-flush.md", "together.md", "update-ahead.md"}
    for path, text, wanted in found:
        assert text == wanted, f"{path.name}: run python tests/pipeline/test_together.py"


# ---- one place -----------------------------------------------------------------------------------------------------


def test_a_changed_declaration_is_told_everywhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from drumline.features.capture import together as capture

    name = "`capture` x a `mesh` with several lines"
    own = clashes()[name]
    changed = replace(own, expected="dry weather", why="graphs do not swim", use=("capture", False))
    monkeypatch.setattr(capture, "CLASHES", tuple(changed if clash == own else clash for clash in capture.CLASHES))
    says = "dry weather: graphs do not swim"
    assert met(name).expected == says
    (problem,) = told(MET[name][2])
    assert (problem["key"], problem["expected"]) == ("pipeline.capture", says)
    assert main(["train", "--set", "pipeline.capture=true", "--set", "mesh.data=2", "--print-config"]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert any(wanted != text and "graphs do not swim" in wanted for _, text, wanted in pages())
    assert "Graphs do not swim." in cells.table()


def test_a_feature_that_is_not_there_declares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from drumline.features.capture import together as capture
    from drumline.pipeline import together

    without = [module_type for module_type in together._declaring() if module_type is not capture]
    monkeypatch.setattr(together, "_declaring", lambda: without)
    assert "`arrange` x `capture`" not in clashes()
    assert read_settings(None, {"lengths.search": True, "pipeline.capture": True}).pipeline.capture


if __name__ == "__main__":
    for path, text, wanted in pages():
        if text != wanted:
            path.write_text(wanted, encoding="utf-8")
