"""What a followed model is watched for."""

from __future__ import annotations

import functools
import io
import logging
import threading
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from drumline.model.follow.attributes import BETWEEN, Attributes
from drumline.model.values import MISSING
from drumline.model.watch import surroundings
from drumline.model.watch.fingerprint import fingerprint
from drumline.model.watch.surroundings import Surroundings
from drumline.model.watch.watch import Watch

pytestmark = pytest.mark.torch


def test_a_hook_in_the_place_of_another_is_a_change() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    first = model[0].register_forward_hook(lambda module, given, made: made * 2)
    watch = Watch(model.named_modules(), frozenset({""}))
    first.remove()
    model[0].register_forward_hook(lambda module, given, made: made * 3)
    assert watch.has_changed()
    assert not watch.has_changed()


def test_what_answers_to_any_name_is_not_asked() -> None:
    class Proxy:
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt(name)  # which hasattr() lets through

    anything, scales = Proxy(), [1.0]

    @functools.cache
    def scale(at: int) -> float:
        return scales[at]

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * scale(0) if anything is not None else x

    around = Surroundings([Scaled()])
    before = around.now()
    scales[0] = 2.0
    assert around.changed(before)
    with around.keeping_contents():
        scale(0)
    assert scale.cache_info().currsize == 0


def test_a_cache_of_one_result_is_emptied_if_it_has_another() -> None:
    @functools.lru_cache(maxsize=1)
    def square(number: int) -> int:
        return number * number

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * square(2)

    around = Surroundings([Scaled()])
    square(2)
    with around.keeping_contents():
        square(2)
    assert square.cache_info().currsize == 1  # nothing is new
    with around.keeping_contents():
        square(3)
    assert square.cache_info().currsize == 0
    square(2)
    with around.keeping_contents() as clear:
        square(3)
        clear()
        square(3)  # as many as there were at first
    assert square.cache_info().currsize == 0


def test_an_attribute_that_is_set_before_it_is_read_is_the_forwards_own() -> None:
    module = nn.Linear(1, 1)
    found = Attributes({id(module): "0"}, lambda: BETWEEN)
    found.set(module, "scale", MISSING, 1.0)
    found.read(module, "scale", 1.0)
    found.set(module, "scale", 1.0, 2.0)
    assert found.read_between() == []
    found.judge(str, lambda first, last, why: None)  # refuses nothing


THING = object()
NESTED = [
    [THING, 1], [1, THING], [[THING], 1], [[THING, 1]], [THING, [1]], [1, [THING]], [[1], THING], (THING, 1),
    {"a": THING, "b": 1}, {"a": 1, "b": THING}, {"a": {"b": 1}}, {"a": {}, "b": 1}, {}, [], (), [[]], [[], []],
    [1, 1], [1, True], [1.0, 1], [None], ["None"], [float("nan")], ["nan"], {1}, frozenset({1}), {1: None},
    SimpleNamespace(a=1), functools.partial(print, 1), functools.partial(print, [1]), functools.partial(repr, 1),
]  # fmt: skip


def test_values_with_the_same_parts_in_other_places_differ() -> None:
    for at, item in enumerate(NESTED):
        equal = [other for other, value in enumerate(NESTED) if fingerprint(item) == fingerprint(value)]
        assert equal == [at]
        assert not fingerprint(item) != fingerprint(item)  # noqa: SIM202 - both comparisons are used


class Layer(nn.Module):
    """Has a method and a tensor that belong to its class."""

    table = torch.zeros(2)

    def scaled(self, x: Tensor) -> Tensor:
        return x * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x) + self.table


def watch_of(model: nn.Module) -> Watch:
    watch = Watch(model.named_modules(), frozenset({""}))
    assert not watch.has_changed()
    return watch


def test_another_method_of_a_class_is_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watch_of(Layer())
    monkeypatch.setattr(Layer, "scaled", lambda self, x: x * 3)
    assert watch.has_changed()
    assert not watch.has_changed()


def test_a_method_of_an_object_is_a_change() -> None:
    model = Layer()
    watch = watch_of(model)
    setattr(model, "scaled", lambda x: x * 3)  # noqa: B010 - a method in the place of the class's own
    assert watch.has_changed()
    assert not watch.has_changed()


def test_a_tensor_of_a_class_that_changes_in_place_is_a_change() -> None:
    watch = watch_of(Layer())
    Layer.table.add_(1.0)
    assert watch.has_changed()
    assert not watch.has_changed()


def test_defaults_of_a_function_are_watched() -> None:
    def scaled(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return scaled(x)

    model = Scaled()
    watch = watch_of(model)
    scaled.__defaults__ = (3.0,)
    assert watch.has_changed()
    assert not watch.has_changed()


def test_an_attribute_of_an_object_or_of_its_class_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(nn.Module):
        kind = 1

        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0

    model = Reads()
    watch = Watch(model.named_modules(), frozenset())
    watch.read([("", "scale"), ("", "kind")])
    assert not watch.has_changed()
    model.scale = 2.0
    assert watch.has_changed()
    monkeypatch.setattr(Reads, "kind", 2)
    assert watch.has_changed()
    assert not watch.has_changed()


LOGGER = logging.getLogger("a library that logs at module level")


class Logs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock, self.log = threading.Lock(), logging.getLogger(__name__)
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        LOGGER.debug("forward of %s", type(self).__name__)
        with self.lock:
            return self.layer(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LOGGER,
        lambda: logging.LoggerAdapter(LOGGER),
        threading.Lock,
        threading.RLock,
        threading.Event,
        io.StringIO,
    ],
)
def test_what_computes_nothing_is_compared_by_identity(make: Callable[[], Any]) -> None:
    value = make()
    before = fingerprint({"it": value})
    assert len(before[0]) == 2  # the dict and one entry: nothing inside is looked at
    assert fingerprint({"it": value}) == before
    assert fingerprint({"it": object()}) != before


def test_a_model_that_logs_is_the_same_after_other_loggers_were_made() -> None:
    model = Logs()
    watch = Watch(model.named_modules(), frozenset({""}))
    for number in range(50):
        logging.getLogger(f"{LOGGER.name}.{number}").setLevel(logging.ERROR)
    assert not watch.has_changed()


class Variables:
    """What a function reads that stands elsewhere: it changes in place, or is replaced."""

    rate = 1.0
    table: ClassVar[dict[str, float]] = {"scale": 1.0}
    tensor = torch.ones(2)
    kinds = (nn.Identity, 2)
    unlike = ([1.0],)


def reads(x: Tensor, by: float = 1.0, *, offset: float = 0.0) -> Tensor:
    if Variables.kinds and Variables.unlike:
        x = x * Variables.tensor
    return x * by * Variables.rate * Variables.table["scale"] + offset


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return reads(x)


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "a number": lambda patch: patch.setattr(Variables, "rate", 2.0),
    "a number of another type": lambda patch: patch.setattr(Variables, "rate", 1),
    "an entry of a table": lambda patch: patch.setitem(Variables.table, "scale", 2.0),
    "a tensor in place": lambda patch: Variables.tensor.mul_(1.0),
    "another tensor": lambda patch: patch.setattr(Variables, "tensor", torch.ones(2)),
    "a tuple": lambda patch: patch.setattr(Variables, "kinds", (nn.ReLU, 2)),
    "what a tuple holds": lambda patch: Variables.unlike[0].append(2.0),
    "a number that becomes a table": lambda patch: patch.setattr(Variables, "rate", {"a": 1.0}),
    "a default": lambda patch: patch.setattr(reads, "__defaults__", (2.0,)),
    "a default by keyword": lambda patch: patch.setattr(reads, "__kwdefaults__", {"offset": 1.0}),
    "an attribute of a function": lambda patch: patch.setattr(reads, "mark", 1, raising=False),
    "a function's code": lambda patch: patch.setattr(reads, "__code__", (lambda x, by=1.0, *, offset=0.0: x).__code__),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_variable_that_changes_or_is_replaced_is_noticed_once(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    around = Surroundings([Reads()])
    before = around.now()
    assert around.now() == before
    CHANGES[change](monkeypatch)
    after = around.now()
    assert after != before
    assert around.now() == after
    monkeypatch.undo()


def test_another_object_that_is_equal_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    around = Surroundings([Reads()])
    before = around.now()
    monkeypatch.setattr(Variables, "kinds", tuple([nn.Identity, 2]))  # noqa: C409 - not the constant
    assert around.now() == before


def test_a_second_look_takes_only_the_states_of_what_changes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    around = Surroundings([Reads()])
    around.now()
    taken: list[str] = []

    def count(value: Any, *, name: str) -> Any:
        taken.append(name)
        return fingerprint(value, name=name)

    monkeypatch.setattr(surroundings, "fingerprint", count)
    around.now()
    assert sorted(taken) == ["table", "tensor", "unlike"]


def test_a_look_into_a_large_value_has_a_bound_that_is_said_once() -> None:
    value = [[[float(number)] for number in range(1000)] for _ in range(20)]
    with pytest.warns(UserWarning, match=r"LARGE, which .* is a builtins.list of more than 16,384 parts"):
        before = fingerprint(value, name="LARGE")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fingerprint(value, name="LARGE") == before
    assert len(before[0]) < 50_000
    value[0][0][0] = -1.0  # beyond the bound
    assert fingerprint(value, name="LARGE") == before
    value[0][0] = [1.0]
    assert fingerprint(value, name="LARGE") != before
