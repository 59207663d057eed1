"""What no good run of a pipeline shows: values of ranks that disagree, and what is summed, waited for or guessed."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from drumline.channel.launch import stop
from drumline.channel.lines.slices import Slice
from drumline.core.errors import MismatchError, UsageError
from drumline.engine.model.blocks import guesses
from drumline.engine.ranks import crew
from drumline.engine.updates.whole_matrices import WholeMatrices
from drumline.features.check.by_itself.wanted import _GradientCollector
from drumline.features.check.verdict import RankOutcome, verdict
from drumline.features.saving.state import agreed_paths
from drumline.pipeline.pipeline import Pipeline
from drumline.pipeline.profiling import profile_model
from drumline.verification.verify import verify
from refused import refused
from torch_models import mlp

pytestmark = [pytest.mark.torch, pytest.mark.features("check", "saving")]


def test_ranks_that_see_other_checkpoints_share_no_folder() -> None:
    here, there = [["run/2", "run/1"], ["run/2"], []], [["run/1"], [], []]
    with refused(MismatchError, "rank 1 finds 1 checkpoints and rank 0 2", expected="a folder that all"):
        agreed_paths([here, there])
    with refused(MismatchError, "rank 2 finds 2 checkpoints"):
        agreed_paths([here, here, [["run/3", "run/1"], [], []]])


def test_a_sum_over_ranks_is_wrong_if_one_number_of_its_sketch_is() -> None:
    """Of what several ranks hold, the sketches are added: here 1 + 1, 2 + 2 in place of 2, 5."""
    wanted = {"shared": [2.0, 5.0, 6.0, 6.0]}  # two numbers, the norm, and that of all gradients
    told = [RankOutcome(shared={"shared": [1.0, 2.0]}, wanted=wanted), RankOutcome(shared={"shared": [1.0, 2.0]})]
    checked, error = verdict(told, 1e-4, ["shared"], {"shared": "a"})
    assert checked.wrong == ("shared",)
    assert "the gradient of shared, in block 'a', is 0.17 of its size off" in str(error)
    told[1].shared["shared"] = [1.0, 3.0]
    assert verdict(told, 1e-4, ["shared"], {"shared": "a"}) == (checked.__class__(0.0, 1), None)


def test_gradients_that_come_in_parts_are_added_up() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    collected = _GradientCollector(frozenset([parameter]), in_full=True)
    for part in (1.0, 2.0, 4.0):
        parameter.grad = torch.full((3,), part)
        collected._take(parameter)
        assert parameter.grad is None
    collected._take(parameter)
    assert collected.gradients[parameter].tolist() == [7.0, 7.0, 7.0]
    once = _GradientCollector(frozenset([parameter]), in_full=False)
    parameter.grad = torch.full((3,), 7.0)
    once._take(parameter)
    torch.testing.assert_close(collected.sketches[parameter], once.sketches[parameter])
    assert not once.gradients


@pytest.mark.parametrize("lost", [True, False])
def test_ranks_that_are_gone_are_known_to_who_stops(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "has_lost_ranks", lambda: lost)
    assert stop._others_are_gone() is lost


def test_without_a_pipeline_no_rank_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "drumline.engine.ranks.crew")
    assert stop._others_are_gone() is False


def _config(**given: Any) -> Any:
    return SimpleNamespace(**given)


@pytest.mark.parametrize(
    ("config", "kind", "shapes"),
    [
        (_config(), "input_ids", [{"input_ids": (3, 5)}, {"input_ids": (2, 5)}]),
        (
            _config(vision_config=_config(image_size=8, num_channels=1)),
            "input_ids",
            [{"input_ids": (3, 5)}, {"input_ids": (2, 5)}, {"input_ids": (2, 5), "pixel_values": (2, 1, 8, 8)}],
        ),
        (_config(image_size=(6, 4)), "pixel_values", [{"pixel_values": (2, 3, 6, 4)}]),
        (_config(), "pixel_values", [{"pixel_values": (2, 3, 224, 224)}]),
        (_config(), "input_values", [{"input_values": (2, 4000)}]),
        (_config(num_mel_bins=16), "input_values", [{"input_values": (2, 1024, 16)}]),
        (
            _config(num_mel_bins=16, max_source_positions=20, is_encoder_decoder=True),
            "input_features",
            [
                {"input_features": (2, 16, 40), "decoder_input_ids": (2, 5)},
                {"input_features": (2, 40, 16), "decoder_input_ids": (2, 5)},
            ],
        ),
    ],
)
def test_inputs_are_guessed_by_what_the_config_tells(config: Any, kind: str, shapes: list[Any]) -> None:
    model: Any = SimpleNamespace(
        config=config, main_input_name=kind, dummy_inputs={"input_ids": torch.zeros(3, 5, dtype=torch.long)}
    )
    assert [{name: tuple(value.shape) for name, value in guess.items()} for guess in guesses(model)] == shapes


def test_whole_copies_follow_only_what_others_changed() -> None:
    axes: Any = SimpleNamespace(
        gathered=lambda own, axis: [own, own + 10],
        summed=lambda value, axis: value,
        place=lambda axis: 0,
        size=lambda axis: 2,
    )
    parameters = [nn.Parameter(torch.full((2, 2), float(at))) for at in range(2)]
    for param in parameters:
        param.slice = Slice("tp", 0)  # type: ignore[attr-defined]
    whole = WholeMatrices(axes)
    whole.cover(parameters)
    copies = [whole.of(param) for param in parameters]
    assert copies[0] is not None
    assert copies[1] is not None
    with torch.no_grad():
        copies[0].add_(0.5)  # what the optimizer keeps beyond a parameter's own precision
        copies[1].add_(0.5)
        parameters[1].fill_(7.0)  # such as a loaded state
    whole.take(parameters)
    assert copies[0].tolist() == [[0.5, 0.5], [0.5, 0.5], [10.5, 10.5], [10.5, 10.5]]
    assert copies[1].tolist() == [[7.0, 7.0], [7.0, 7.0], [17.0, 17.0], [17.0, 17.0]]


@pytest.mark.features("adapt")
@pytest.mark.parametrize(("checkpoint", "recompute"), [("full", True), ("none", False)])
def test_a_pipeline_that_adapts_knows_whether_it_recomputes(
    checkpoint: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drumline.features.adapt import attach

    told = []

    def decider(*args: Any, **kwargs: Any) -> None:
        told.append(kwargs["recompute"])

    monkeypatch.setattr(attach, "decider_for", decider)
    Pipeline(
        mlp(),
        loss_fn=functional.mse_loss,
        num_microbatches=4,
        num_ranks=2,
        device="cpu",
        adapt=True,
        checkpoint=checkpoint,
    )
    assert told == [recompute]


def test_a_schedule_by_name_is_verified_and_profiled_on_what_the_pages_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 ranks and 8 microbatches: the docstring of `verify`, and the help of `verify` and `profile`."""
    told: list[dict[str, Any]] = []

    def program(*_: object, **given: Any) -> Any:
        told.append(given)
        raise UsageError("enough")

    monkeypatch.setattr("drumline.verification.verify.program_for", program)
    with refused(UsageError, "enough"):
        verify("1f1b")
    assert (told[0]["num_ranks"], told[0]["num_microbatches"]) == (2, 8)
    defaults = {name: param.default for name, param in inspect.signature(profile_model).parameters.items()}
    assert (defaults["num_ranks"], defaults["microbatch_sizes"]) == (2, (1, 2, 4, 8))
