"""`verify` on meshes: gradients put together from all ranks are those of one process, and wrong ones are found."""

from __future__ import annotations

from typing import Any

import pytest

import drumline as dl
from drumline.core.errors import UsageError
from matrices import ALL
from mesh.wrong import wrong_on_one_line
from refused import refused, saying
from some import some

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.features("check", "mesh", "record"),
]

DP, TP, CP, EP = ({"pp": 2, axis: 2} for axis in ("dp", "tp", "cp", "ep"))
MESHES: list[tuple[dict[str, int], dict[str, Any]]] = [
    (DP, {"zero": 3, "dropout": 0.1, "schedule": "zb-v"}),
    ({"ep": 2, "tp": 2}, {}),
]
OTHERS: list[tuple[dict[str, int], dict[str, Any]]] = [
    (CP, {"schedule": "zb-v"}),
    (DP, {"zero": 1, "schedule": "dualpipe"}),
    (DP, {"dropout": 0.1}),
    (TP, {"dropout": 0.1, "schedule": "interleaved-zb"}),
    (EP, {"schedule": "dualpipe-v"}),
    ({"dp": 2, "ep": 2}, {"zero": 3}),
    (TP, {"sequence_parallel": True}),
    ({"dp": 2, "ep": 2}, {"zero": 1}),
    ({"cp": 2, "ep": 2}, {}),
]


@pytest.mark.matrix
def test_meshes_have_the_gradients_of_one_process() -> None:
    for mesh, more in some([*MESHES, *(OTHERS if ALL else [])]):
        given = {"schedule": "1f1b", **more}
        steps = 2 if mesh == DP else 1
        found = dl.verify(given.pop("schedule"), mesh=mesh, num_microbatches=4, num_steps=steps, timeout=120.0, **given)
        assert found.passes, (mesh, more, found.summary())
        assert 0 < found.tolerance <= 1e-5
        assert found.num_ranks == 4
        assert len(found.gradient_differences) > 20
        assert found.summary()["mesh"] == found.mesh != ""


def test_a_gradient_that_is_wrong_on_one_line_is_found_and_named() -> None:
    found = dl.verify("1f1b", mesh={"dp": 2}, num_microbatches=2, model=wrong_on_one_line, timeout=120.0)
    assert not found.passes
    assert found.last_wrong_parameter == "1.weight"
    assert found.first_right_parameter == "2.1.weight"
    assert found.loss_difference <= found.tolerance


WRONG: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"mesh": {"pp": 2, "data": 2}}, saying("the mesh has an axis 'data'")),
    ({"mesh": {"pp": 2, "dp": 0}}, saying("the mesh's axis dp is 0")),
    ({"mesh": DP, "num_ranks": 4}, saying("num_ranks is 4", expected="2, the mesh's pp")),
    ({"mesh": DP, "transport": "in-process"}, saying("transport is 'in-process', and the mesh is pp2 x dp2")),
    ({"mesh": CP, "dropout": 0.1}, saying("dropout is 0.1, and the mesh is pp2 x cp2")),
    ({"mesh": TP, "zero": 1}, saying("zero is 1, and the mesh has no dp")),
    ({"zero": 3}, saying("zero is 3, and the mesh has no dp")),
    ({"mesh": DP, "zero": 2}, saying("zero is 2", expected="^0, 1 ")),
]


def test_what_cannot_be_compared_is_refused_before_any_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("drumline.verification.verify.launch", launched)
    for given, words in some(WRONG):
        with refused(UsageError, **words):
            dl.verify("1f1b", num_microbatches=4, **given)
