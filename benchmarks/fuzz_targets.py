"""What is fuzzed: every parser of files that users hand over, each from valid files of its kind.

A target makes a file of a case and uses it as its reader does: loads it, prints it, writes it again, and hands it to
the verbs that take it. A refusal is a DrumlineError, or exit code 2; whatever else is raised is a traceback.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.cli.main import main
from drumline.core.action import Action
from drumline.core.costs import Costs, Edge
from drumline.core.errors import DrumlineError
from drumline.core.program import Program
from drumline.core.simulate import simulate
from drumline.core.validate import validate
from drumline.plan.cluster.evaluate import estimate
from drumline.plan.cluster.hugging_face import read_config
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.machines import MACHINES, cluster, machine_table
from drumline.plan.cluster.models import model
from drumline.plan.cluster.tables import table_of
from drumline.plan.launch.launch import read_train_config, train_config
from drumline.plan.model_profile import ModelProfile
from drumline.plan.plan import Plan
from drumline.plan.planner import plan
from drumline.report.analysis import analyze
from drumline.report.explore import EXPORTS, Settings, answer, explain, export
from drumline.report.profiles import profile_page, profile_svg, profile_text
from drumline.schedules import generate
from fuzz_mutations import damaged, json_text, rows_text, word
from kineto_traces import STYLES, written
from profiles import SOME, model_profile
from simulated_runs import even_blocks, per_stage, write_simulated_run

Case = Callable[[random.Random], None]


@dataclass(frozen=True, slots=True)
class Target:
    """A parser: makes its seeds in a folder, and then runs one case after the other there."""

    name: str
    begin: Callable[[Path], Case]


class Refused(DrumlineError):
    """A command that ended with exit code 2."""


def command(*words: object) -> str:
    """Run a verb as its user does, and return what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(word) for word in words])
    if code == 2:
        assert "cannot be written" not in err.getvalue(), err.getvalue()
        raise Refused(err.getvalue() or out.getvalue())
    assert code in (0, 1), f"exit code {code}: {err.getvalue()}"
    if "--json" in words:
        json.loads(out.getvalue(), parse_constant=_not_json)
    return out.getvalue()


def _not_json(word: str) -> None:
    raise AssertionError(f"{word} is printed, which is no JSON")


def _put(path: Path, text: str, chance: random.Random) -> Path:
    path.write_bytes(damaged(text.encode(errors="surrogatepass"), chance))
    return path


# ---- programs --------------------------------------------------------------------------------------------------------

_WORDS = (
    *("0F0", "1B0", "0I1", "0W1", "9F9", "0F999999999", "999999999F0", "1SEND_F0", "0RECV_B0", "0UNSHARD", "1RESHARD"),
    *("0REDUCE_GRAD", "1UPDATE3", "(0F1;1B0)OVERLAP_F_B", "(0F0;0F0)OVERLAP_F_B", "", " ", "0F", "F0", "x", "0F00"),
)


def _programs() -> list[Program]:
    named = (("1f1b", 2, 3), ("zb-h1", 2, 3), ("interleaved-1f1b", 2, 4), ("zb-v", 2, 4), ("dualpipe-v", 2, 4))
    made = [generate(name, num_ranks=ranks, num_microbatches=microbatches) for name, ranks, microbatches in named]
    from drumline.core.lower import lower

    return [*made, *(lower(one) for one in made[:2])]


def _action(folder: Path) -> Case:
    seeds = ("2F0", "13B7", "2I0", "0W11", "2SEND_F0", "3RECV_B1", "2UNSHARD", "2REDUCE_GRAD", "2UPDATE5")

    def case(chance: random.Random) -> None:
        text = word(chance.choice((*seeds, "(0F5;1B2)OVERLAP_F_B")), chance)
        found = Action.parse(text)
        assert str(found) == text
        assert Action.parse(str(found)) == found
        assert repr(found)

    return case


def _program(folder: Path) -> Case:
    seeds = [one.format() for one in _programs()]

    def case(chance: random.Random) -> None:
        path = _put(folder / "own.csv", rows_text(chance.choice(seeds), chance, _WORDS), chance)
        found = Program.load(path)
        assert Program.parse(found.format()) == found
        assert repr(found)
        assert str(found)
        verb = chance.choice(("check", "simulate", "show", "simulate --json", "check --json", "show --format svg"))
        command(*verb.split()[:1], path, *verb.split()[1:])

    return case


def _costs(folder: Path) -> Case:
    programs = _programs()
    edges = {(0, 1): Edge(0.5), (1, 0): Edge(0.1, 1e9)}
    seeds = [
        Costs(forward=[2, 1], backward_input=[2, 1], backward_weight=0.5, comm=0.1, edges=edges).to_json(),
        Costs(activation_bytes=[8, 4], held_until_weight_bytes=3, weight_bytes=5.0, gradient_bytes=1).to_json(),
        Costs(recompute=[True, False], checkpoint_bytes=1, activation_bytes=4, overlap=False, reduce=1).to_json(),
        Costs(microbatch_factor=[1, 2, 1.5], overlapped=3, message_bytes=[4, 0], bytes_per_second=1e6).to_json(),
    ]

    def case(chance: random.Random) -> None:
        path = _put(folder / "costs.json", json_text(chance.choice(seeds), chance), chance)
        found = Costs.load(path)
        assert Costs.from_json(json.dumps(found.to_json(), allow_nan=False)) == found
        assert repr(found)
        program = chance.choice(programs)
        counts = ("--ranks", program.num_ranks, "--microbatches", program.num_microbatches)
        if chance.random() < 0.3:
            command("simulate", program.name, *counts, "--costs", path, chance.choice(("--json", "--intervals")))
        timeline = simulate(program, found)
        assert timeline.makespan >= 0
        assert repr(timeline)
        assert timeline.peak_activations
        assert timeline.causes is not None

    return case


# ---- profiles and plans ----------------------------------------------------------------------------------------------


def _profiles() -> list[ModelProfile]:
    return [
        model_profile([1e-3, 2e-3, 1e-3, 1e-3], rows=(1, 2), overheads=SOME),
        model_profile([1e-3] * 4, rows=(2,), tape=0.1, frozen=1),
    ]


def _profile(folder: Path) -> Case:
    seeds = [json.loads(one.to_json()) for one in _profiles()]
    shapes: dict[str, Any] = {"from": 0, "to": 1, "points": [[64, 1e-5], [4096, 2e-5]], "latency": 1e-5}
    seeds[0]["links"] = [{**shapes, "seconds_per_byte": 1e-9}]
    seeds[0]["sizes"][0]["profile"]["layers"][0]["tied"] = [["emb", 10, 10]]

    def case(chance: random.Random) -> None:
        path = _put(folder / "profile.json", json_text(chance.choice(seeds), chance), chance)
        found = ModelProfile.load(path)
        assert ModelProfile.from_json(found.to_json()) == found
        assert repr(found)
        assert profile_text(found)
        assert profile_svg(found)
        assert profile_page(found).encode()
        if chance.random() < 0.2:
            words = ("--ranks", 2, "--batch", 4, "--schedules", "1f1b", "--seconds", 0)
            command("plan", path, *words, *chance.choice(((), ("--json",), ("--memory", "1GiB"))))

    return case


def _plan(folder: Path) -> Case:
    limited = plan(_profiles()[0], num_ranks=2, batch=4, memory_bytes=10**6, schedules=("1f1b", "zb-h1"), seconds=0)
    plain = plan(_profiles()[1], num_ranks=2, batch=8, schedules=("gpipe",), seconds=0)
    seeds = [json.loads(one.best.to_json()) for one in (limited, plain)]

    def case(chance: random.Random) -> None:
        path = _put(folder / "plan.json", json_text(chance.choice(seeds), chance), chance)
        found = Plan.load(path)
        assert Plan.from_json(found.to_json()) == found
        assert repr(found)
        assert str(found)
        json.dumps(found.summary(), allow_nan=False)
        assert found.pipeline_settings
        assert found.step_seconds == found.step_seconds
        assert found.bubble == found.bubble
        assert found.stages_per_rank >= 0
        assert [one.stash + one.total for one in found.rank_bytes]
        if not validate(found.program):
            assert simulate(found.program).makespan > 0

    return case


# ---- run folders -----------------------------------------------------------------------------------------------------


def _run(folder: Path) -> Case:
    program = generate("1f1b", num_ranks=2, num_microbatches=3)
    split = generate("zb-h1", num_ranks=2, num_microbatches=2)
    times: dict[str, Any] = {"forward": 1e-3, "backward": 2e-3, "backward_input": 1e-3, "backward_weight": 1e-3}
    profiled = {"costs": None, "blocks": [{"name": str(at), **times} for at in range(4)]}
    base = [
        write_simulated_run(folder / "one", program, per_stage(1e-3, 2e-3), blocks=even_blocks(2, 2), weigh=64.0),
        write_simulated_run(
            folder / "two", split, per_stage(1e-3, 2e-3), blocks=even_blocks(2, 2), predicted=profiled, overhead=1e-5
        ),
    ]
    verbs = ("report {} --json", "report {} --format text", "report {} --format html", "report {} --format perfetto")
    verbs += ("watch {} --once", "watch {} --once --json", "report {} --step 1 --json")

    def case(chance: random.Random) -> None:
        path = folder / "run"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(chance.choice(base), path)
        for _ in range(chance.choice((1, 1, 2))):
            _spoil(chance.choice(sorted(path.iterdir())), chance)
        verb = chance.choice(verbs).format(path).split()
        if verb[-1] == "perfetto":
            verb += ["--out", str(folder / "trace.json.gz")]
        command(*verb)

    return case


def _spoil(path: Path, chance: random.Random) -> None:
    """Change one file of a run."""
    text = path.read_text(errors="surrogateescape")
    try:
        if path.suffix == ".jsonl" and chance.random() < 0.9:
            lines = text.splitlines()
            at = chance.randrange(len(lines))
            lines[at] = json_text(json.loads(lines[at]), chance, compact=True)
            text = "\n".join(lines) + chance.choice(("\n", "\n", "\n", ""))
        elif path.suffix == ".json" and chance.random() < 0.9:
            text = json_text(json.loads(text), chance)
        elif path.suffix == ".csv":
            text = rows_text(text, chance, _WORDS)
        else:
            path.unlink()
            return
    except (ValueError, IndexError):  # it was spoiled before
        return
    _put(path, text, chance)


# ---- traces ----------------------------------------------------------------------------------------------------------


def _trace(folder: Path) -> Case:
    program = generate("1f1b", num_ranks=2, num_microbatches=2)
    timeline = simulate(program, Costs(comm=0.1))
    base = [written(timeline, folder / f"seed-{style}", style=style, num_steps=2) for style in STYLES]
    base.append(written(timeline, folder / "seed-hosts", skews=(0.0, 5e4), hosts=("a", "b"), num_steps=2))
    verbs = ("analyze {} --json", "analyze {}", "analyze {} --format html", "analyze {} --format csv")

    def case(chance: random.Random) -> None:
        path = folder / "traces"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(chance.choice(base), path)
        chosen = chance.choice(sorted(path.iterdir()))
        table = json.loads(gzip.decompress(chosen.read_bytes()))
        text = json_text(table, chance)
        if chance.random() < 0.3:
            events = table["traceEvents"]
            events[chance.randrange(len(events))]["name"] = chance.choice(_LABELS)
            text = json.dumps(table)
        data = damaged(text.encode(errors="surrogatepass"), chance)
        chosen.write_bytes(damaged(gzip.compress(data, 1), chance))
        if chance.random() < 0.15:
            command(*chance.choice(verbs).format(path).split())
            return
        found = analyze([path])
        assert json.dumps(found.summary(), allow_nan=False)
        assert repr(found.timeline)
        assert Program.parse(found.timeline.ran.format()) == found.timeline.ran

    return case


_LABELS = (
    *("PP:0F0", "PP:9F9", "PP:0F999999999", "PP:999999999F0", "PP:1B0", "PP:0I0", "PP:0W0", "PP:(0F1;1B0)OVERLAP_F_B"),
    *("PP:1RECV_F0", "PP:0SEND_F7", "PP:0UPDATE5", "PP:0REDUCE_GRAD", "Forward 999999999", "Backward 0", "nccl:send"),
    *("ProfilerStep#" + "9" * 15, "ProfilerStep#" + "9" * 5000, "c10d::send", "gloo:recv", "record_param_comms"),
)


# ---- clusters and pages ----------------------------------------------------------------------------------------------

_CONFIGS: tuple[dict[str, Any], ...] = (
    {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 512,
        "vocab_size": 1000,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    },
    {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 500,
        "max_position_embeddings": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
    },
    {"model_type": "vl", "text_config": {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 9, "n_ctx": 32}},
)


def _config(folder: Path) -> Case:
    machine = cluster("h100", 8)
    layout = Layout(batch=8, tensor=2, pipeline=2, data=2, zero=1)

    def case(chance: random.Random) -> None:
        path = _put(folder / "config.json", json_text(chance.choice(_CONFIGS), chance), chance)
        found = read_config(path)
        assert repr(found)
        assert json.dumps(table_of(found), allow_nan=False)
        if chance.random() < 0.02:
            words = ("--hardware", "h100", "--gpus", 2, "--batch", 2, "--schedules", "1f1b", "--zero", 0)
            command("plan", path, *words, "--brief", *chance.choice(((), ("--json",))))
        assert estimate(found, machine, layout).seconds.total >= 0

    return case


def _machine(folder: Path) -> Case:
    seeds = [json.loads(json.dumps(machine_table(one))) for one in (MACHINES["h100"], MACHINES["a100-40"])]
    transformer, layout = model("gpt-1.7b"), Layout(batch=8, tensor=2, pipeline=2, data=2)

    def case(chance: random.Random) -> None:
        path = _put(folder / "machine.json", json_text(chance.choice(seeds), chance), chance)
        found = cluster(str(path), 8)
        assert repr(found)
        if chance.random() < 0.01:
            words = ("--gpus", 2, "--batch", 2, "--schedules", "1f1b", "--zero", 1, "--tensor", 1, "--sequence", 64)
            command("plan", "gpt-1.7b", "--hardware", path, *words, "--brief", "--json")
        assert estimate(transformer, found, layout).seconds.total >= 0

    return case


def _train(folder: Path) -> Case:
    text = train_config(model("gpt-1.7b"), Layout(batch=8, pipeline=2, data=2, counts=(12, 12)))

    def case(chance: random.Random) -> None:
        lines = text.split("\n")
        at = chance.randrange(len(lines))
        match chance.randrange(4):
            case 0:
                del lines[at]
            case 1:
                lines.insert(at, lines[chance.randrange(len(lines))])
            case 2:
                name = lines[at].partition("=")[0]
                lines[at] = f"{name}= {chance.choice(_TOML)}"
            case 3:
                lines[at] = word(lines[at], chance)
        found = read_train_config(damaged("\n".join(lines).encode(), chance).decode(errors="replace"))
        assert repr(found)
        assert json.dumps(table_of(found), allow_nan=False)

    return case


_TOML = (
    "0",
    "-1",
    "nan",
    "inf",
    "1" * 5000,
    "true",
    '""',
    "[]",
    "[1, 'x']",
    "{a = 1}",
    "1979-05-27",
    "[" * 500,
    "1e99",
)


def _explore(folder: Path) -> Case:
    seeds: list[dict[str, Any]] = [
        {"schedule": "1f1b", "ranks": "2", "microbatches": "3", "comm": "0.5"},
        {"schedule": "zb-v", "ranks": "2", "microbatches": "4", "forward": "2", "max_activations": "3"},
    ]
    texts = [one.format() for one in _programs()]
    values = ("", "0", "-1", "3", "1e9", "nan", "inf", "-inf", "1e308", "9" * 5000, "٣", "1_0", "x", "1e-320", "99999")

    def case(chance: random.Random) -> None:
        query = dict(chance.choice(seeds))
        for _ in range(chance.choice((1, 1, 2))):
            query[chance.choice((*query, "stages_per_rank", "odd"))] = chance.choice(values)
        csv = rows_text(chance.choice(texts), chance, _WORDS) if chance.random() < 0.5 else None
        settings = Settings.of(query)
        found = answer(settings, csv)
        json.dumps(found, allow_nan=False)
        if "error" in found:
            raise Refused(found["error"]["error"])
        json.dumps(explain(settings, csv), allow_nan=False)
        export(settings, chance.choice(list(EXPORTS)), csv)

    return case


TARGETS = (
    Target("action text", _action),
    Target("program CSV", _program),
    Target("costs", _costs),
    Target("profile", _profile),
    Target("plan", _plan),
    Target("run folder", _run),
    Target("trace", _trace),
    Target("model config", _config),
    Target("machine", _machine),
    Target("train config", _train),
    Target("explore page", _explore),
)


def named(names: str) -> Iterator[Target]:
    """Yield the targets whose names begin like one of these, or all of them.

    >>> [one.name for one in named("costs,plan")]
    ['costs', 'plan']
    """
    wanted = tuple(one.strip() for one in names.split(",") if one.strip())
    return (one for one in TARGETS if not wanted or one.name.startswith(wanted))
