"""README fits one screen, what it says to type runs, and its numbers are those of the tool and of the results."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from drumline.cli.main import main
from drumline.core.costs import Costs
from drumline.core.simulate.simulate import simulate
from drumline.schedules import generate, schedules
from some import some
from test_docs import blocks, prose, sentences

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = README.rstrip("\n").split("\n")
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
MOST_LINES, MOST_WORDS, FIRST_SCREEN, LONGEST_SENTENCE = 70, 450, 40, 25


def outside_of_code(lines: list[str]) -> list[str]:
    """Return the lines that are in no fenced block.

    >>> outside_of_code(["one", "```sh", "make demo", "```", "two"])
    ['one', 'two']
    """
    inside = {at for block in blocks(lines) for at in range(block.first - 1, block.first + len(block.lines) + 1)}
    return [line for at, line in enumerate(lines) if at not in inside]


def commands() -> list[str]:
    """Return what the README tells the reader to type, without comments."""
    shell = [line for block in blocks(LINES) if block.kind == "sh" for line in block.lines]
    return some(re.sub(r"\s+#.*", "", line) for line in shell)


def number(pattern: str, text: str) -> float:
    """Return the one number that a text has in such a place, wherever its lines break."""
    found = re.findall(pattern, " ".join(text.split()))
    assert len(found) == 1, f"{pattern} is there {len(found)} times"
    return float(found[0])


def test_readme_is_one_screen() -> None:
    assert len(LINES) <= MOST_LINES
    words = sum(len(line.split()) for line in outside_of_code(LINES))
    assert 200 < words <= MOST_WORDS


def test_readme_has_one_picture_that_the_tool_draws() -> None:
    assert re.findall(r"!\[[^]]*\]\(([^)]*)\)", README) == ["docs/readme.svg"]
    assert "zb-v" in (ROOT / "docs" / "readme.svg").read_text(encoding="utf-8")


def test_the_caption_has_the_idle_shares_of_the_picture() -> None:
    usual, split = (
        simulate(generate(name, num_ranks=4, num_microbatches=8), Costs(seconds, seconds, seconds))
        for name, seconds in (("1f1b", 1.0), ("zb-v", 0.5))
    )
    assert split.makespan < usual.makespan
    shares = [100 * timeline.idle[rank] / timeline.makespan for timeline in (usual, split) for rank in range(4)]
    caption = [number(rf"By `{name}`,[^.]*is idle for ([\d.]+)%", README) for name in ("1f1b", "zb-v")]
    assert shares == pytest.approx([caption[0]] * 4 + [caption[1]] * 4, abs=0.05)
    assert number(r"one of (\d+) schedules", README) == len(schedules())


def test_readme_opens_with_the_two_commands() -> None:
    assert {"make demo", "make test"} <= set(commands())
    first = "\n".join(LINES[:FIRST_SCREEN])
    assert "make demo" in first
    assert "make test" in first


def test_sentences_of_readme_are_short() -> None:
    spoken = [sentence for paragraph in prose(LINES) for sentence in sentences(paragraph)]
    assert len(spoken) > 15
    assert [text for text in spoken if len(text.split()) > LONGEST_SENTENCE] == []


def test_four_commands_show_what_drumline_does() -> None:
    shown = [command for command in commands() if not command.startswith(("source", "make test"))]
    assert [" ".join(command.split()[:2]) for command in shown] == [
        "make demo",
        "drumline compare",
        "drumline verify",
        "drumline train",
    ]


def test_every_command_says_what_it_shows() -> None:
    shell = [line for block in blocks(LINES) if block.kind == "sh" for line in block.lines]
    assert [line for line in some(shell) if "#" not in line] == ["source .venv/bin/activate"]


# What makes a command quick: no processes, no training.
QUICK = {"verify": ["--transport", "in-process"], "train": ["--dry-run"]}


def ran(verb: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what README's command with this verb prints."""
    (words,) = (shlex.split(command)[1:] for command in commands() if command.startswith(f"drumline {verb} "))
    assert main([*words, *QUICK.get(verb, [])]) == 0
    return capsys.readouterr().out


def test_the_comparison_lists_every_schedule_of_a_training_step(capsys: pytest.CaptureFixture[str]) -> None:
    printed = ran("compare", capsys)
    lines = [line.split() for line in printed.splitlines()]
    assert set(schedules()) - {line[0] for line in lines if line} == {"forward-only"}
    assert "Run zb-v" in printed


@pytest.mark.torch
def test_a_pipeline_has_the_bits_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert "all bits are equal" in ran("verify", capsys)


@pytest.mark.torch
def test_a_small_gpt_can_be_trained(capsys: pytest.CaptureFixture[str]) -> None:
    assert "30 steps" in ran("train", capsys)


def test_python_is_short_and_links_are_few() -> None:
    code = [line for block in blocks(LINES) if block.kind == "python" for line in block.lines if line]
    assert 5 <= len([line for line in code if not line.startswith("import ")]) <= 6
    last = LINES[LINES.index("## Go on") :]
    assert len([line for line in last if line.startswith("- ")]) == 3


def test_readme_leads_to_examples_and_to_fine_tuning() -> None:
    assert {"examples", "docs/finetune.md", "docs/index.md", "docs/limits.md"} <= set(
        re.findall(r"\]\(([^)]*)\)", README)
    )


@pytest.mark.parametrize("path", some(sorted((ROOT / "examples").glob("*.py"))), ids=lambda path: path.name)
def test_a_page_leads_to_each_example(path: Path) -> None:
    pages = [page for page in (ROOT / "docs").glob("*.md") if f"](../examples/{path.name})" in page.read_text("utf-8")]
    assert pages != []


def test_the_range_of_speed_is_that_of_the_results() -> None:
    part = RESULTS.split("## `benchmarks/runtime_cpu.py`")[1].split("\n## ")[0]
    ratios = re.findall(r"^ *(\d+/\d+) .* (?:class|csv) +([\d.]+) \(", part, re.MULTILINE)
    sizes = {size: [round(100 * (1 - float(ratio))) for other, ratio in ratios if other == size] for size, _ in ratios}
    largest, smallest = sizes["1024/128"], sizes["256/16"]
    assert (len(largest), len(smallest)) == (10, 10)
    assert number(r"takes (\d+) to \d+% less time than by PyTorch's own pipelining at the largest", README) == min(
        largest
    )
    assert number(r"takes \d+ to (\d+)% less time than by PyTorch's own pipelining at the largest", README) == max(
        largest
    )
    assert number(r"smallest size it takes up to (\d+)% less", README) == max(smallest)


def test_the_gain_of_fine_tuning_is_that_of_the_results() -> None:
    part = RESULTS.split("## `benchmarks/finetune_pair.py`")[1].split("\n## ")[0]
    measured = number(r"the whole batch at once, one rank at a time \|[^|]*\|[^|]*\| ([\d.]+) \(", part)
    assert number(r"two ranks are ([\d.]+) times as fast as a naive split", README) == round(measured, 1)
