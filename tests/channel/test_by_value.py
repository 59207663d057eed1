"""Functions, classes and arrays sent to another process by value: what travels, and what comes back."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import drumline
from drumline.channel.launch import by_value
from drumline.channel.launch.blame import blame
from drumline.channel.launch.by_name import goes_by_name, is_importable

# What a notebook's cells might hold. Every case is called in another process, which cannot import any of it.
CELLS = '''
import abc, collections, dataclasses, enum, functools, os, threading, typing, xml.etree.ElementTree
from dataclasses import dataclass, field

scale = 3
unused = threading.Lock()
T = typing.TypeVar("T")

def uses_a_global(x=2, *, y=5): return x * scale + y
def uses_a_module(): return os.path.join("a", "b")
def uses_a_submodule(): return xml.etree.ElementTree.fromstring("<a b='1'/>").get("b")
def names_an_attribute_like_a_global(): return getattr(types_with, "unused", None) or types_with.scale
class types_with: scale = 7

def factorial(n=5): return 1 if n == 0 else n * factorial(n - 1)
def is_even(n=10): return True if n == 0 else is_odd(n - 1)
def is_odd(n): return False if n == 0 else is_even(n - 1)

def recursive_closure():
    def down(n): return [n] + (down(n - 1) if n else [])
    return down
def shared_variable():
    count = 0
    def add():
        nonlocal count
        count += 1
    def read(): return count
    return add, read
add, read = shared_variable()
def shares_a_variable():
    add(); add()
    return read()
def comprehends(): return [scale * i for i in range(3)]
def sets_a_global():
    global scale
    scale = scale + 1
    return scale
def a_class_inside_uses_a_global():
    class Inside: tripled = 3 * scale
    return Inside.tripled
square = lambda x=4: x * x
triple = functools.partial(uses_a_global, 10, y=0)

@functools.cache
def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
def uses_a_cache(): return fibonacci(60)

class Base:
    def __init__(self, x): self.x = x
    def hello(self): return f"base {self.x}"
class Child(Base):
    """A child."""
    made = []
    def __init__(self, x): super().__init__(x + 1); self.made.append(x)
    def hello(self): return "child of " + super().hello()
    @staticmethod
    def static(): return Child.__name__
    @classmethod
    def make(cls): return cls(8)
    @property
    def double(self): return 2 * self.x
    @functools.cached_property
    def cached(self): return self.x * 10
def uses_super(): return Child(1).hello()
def uses_descriptors(): return Child.static(), Child.make().x, Child(2).double, Child(3).cached, Child.__doc__
held = Child(4)
def uses_an_instance(): return held.hello()
method = held.hello

class Chain:
    def again(self): return isinstance(Chain(), Chain) and type(self) is Chain
def refers_to_itself(): return Chain().again()

@dataclass(frozen=True, order=True)
class Point:
    x: int
    tags: list = field(default_factory=list, metadata={"unit": "m"})
    y: int = 0
def uses_a_dataclass():
    moved = dataclasses.replace(Point(1, ["a"]), y=2)
    return repr(moved), [f.name for f in dataclasses.fields(Point)], Point(1) < Point(2), Point(1) == Point(1)
def keeps_the_marks_of_dataclasses(): return dataclasses.fields(Point)[0].default is dataclasses.MISSING
@dataclass(slots=True)
class Slotted:
    a: int = 1
def uses_slots(): return Slotted(5).a, hasattr(Slotted(), "__dict__")

class Color(enum.Enum):
    RED = 1
    CRIMSON = 1
    BLUE = (2, 3)
    def shout(self): return self.name + "!"
class Bits(enum.IntFlag):
    A = enum.auto()
    B = enum.auto()
class Planet(enum.Enum):
    EARTH = (5, 6)
    def __init__(self, mass, radius): self.mass = mass
red = Color.RED
def uses_enums():
    members = list(Color.__members__), Planet.EARTH.mass, int(Bits.A | Bits.B)
    return red is Color.RED, Color(1).name, Color.CRIMSON is red, Color.BLUE.shout(), *members

class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...
class Unit(Shape):
    def area(self): return 1
def uses_abc():
    try: Shape()
    except TypeError: return Unit().area(), isinstance(Unit(), Shape)
class Box(typing.Generic[T]):
    def __init__(self, one: T): self.one = one
def uses_generics(): return Box[int](3).one
class Pair(typing.NamedTuple):
    a: int
    b: int = 2
Old = collections.namedtuple("Old", "a b")
def uses_tuples(): return Pair(1)._asdict(), Pair(1) == (1, 2), Old(3, 4).b
class Meta(type):
    def __call__(cls, *a): return ("made", super().__call__(*a).v)
class Made(metaclass=Meta):
    v = 9
def uses_a_metaclass(): return Made()
'''

EXPECTED: dict[str, Any] = {
    "uses_a_global": 11,
    "uses_a_module": "a/b",
    "uses_a_submodule": "1",
    "names_an_attribute_like_a_global": 7,
    "factorial": 120,
    "is_even": True,
    "shares_a_variable": 2,
    "comprehends": [0, 3, 6],
    "sets_a_global": 4,
    "a_class_inside_uses_a_global": 9,
    "square": 16,
    "triple": 30,
    "uses_a_cache": 1548008755920,
    "uses_super": "child of base 2",
    "uses_descriptors": ("Child", 9, 6, 40, "A child."),
    "uses_an_instance": "child of base 5",
    "method": "child of base 5",
    "refers_to_itself": True,
    "uses_a_dataclass": ("Point(x=1, tags=['a'], y=2)", ["x", "tags", "y"], True, True),
    "keeps_the_marks_of_dataclasses": True,
    "uses_slots": (5, False),
    "uses_enums": (True, "RED", True, "BLUE!", ["RED", "CRIMSON", "BLUE"], 5, 3),
    "uses_abc": (1, True),
    "uses_generics": 3,
    "uses_tuples": ({"a": 1, "b": 2}, True, 4),
    "uses_a_metaclass": ("made", 9),
}

# Each case is loaded by itself, then called: no case helps another.
RECEIVER = """
import pickle, sys, traceback
from drumline.channel.launch import by_value
answers = {}
for name, parts in pickle.load(sys.stdin.buffer).items():
    try:
        answers[name] = [bytes(part) for part in by_value.dumps(by_value.loads(parts)(), reply=True)]
    except Exception:
        answers[name] = traceback.format_exc()
sys.stdout.buffer.write(pickle.dumps(answers))
"""


def called_elsewhere(cases: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return what each case returns in another process, or its traceback."""
    import pickle

    task = pickle.dumps({name: [bytes(part) for part in by_value.dumps(case)] for name, case in cases.items()})
    done = subprocess.run([sys.executable, "-c", RECEIVER], input=task, capture_output=True, check=True)
    answers = pickle.loads(done.stdout)
    return {name: answer if isinstance(answer, str) else by_value.loads(answer) for name, answer in answers.items()}


def cell_namespace() -> dict[str, Any]:
    space = vars(types.ModuleType("__main__"))
    exec(compile(CELLS, "<cell 1>", "exec"), space)
    return space


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    return cell_namespace()


@pytest.fixture(scope="module")
def answers(cells: dict[str, Any]) -> dict[str, Any]:
    return called_elsewhere({name: cells[name] for name in EXPECTED})


@pytest.mark.parametrize("name", EXPECTED)
def test_code_of_a_cell_runs_in_another_process(name: str, answers: dict[str, Any]) -> None:
    assert answers[name] == EXPECTED[name]


def test_only_globals_that_are_used_travel(cells: dict[str, Any]) -> None:
    by_value.dumps(cells["uses_a_global"])
    unused = cells["unused"]
    with pytest.raises(TypeError, match="lock"):
        by_value.dumps(lambda: unused)


def test_local_functions_and_classes_of_this_test_travel() -> None:
    class Local:
        def who(self) -> str:
            return type(self).__qualname__

    def down(n: int) -> list[int]:
        return [n, *(down(n - 1) if n else [])]

    got = called_elsewhere({"class": lambda: Local().who(), "recursion": lambda: down(2), "test": own_helper})
    assert got == {
        "class": "test_local_functions_and_classes_of_this_test_travel.<locals>.Local",
        "recursion": [2, 1, 0],
        "test": "helped",
    }


def own_helper() -> str:
    return helped()


def helped() -> str:
    return "helped"


def test_what_comes_back_is_of_the_senders_own_class(cells: dict[str, Any]) -> None:
    point, color, child = cells["Point"], cells["Color"], cells["Child"]
    got = called_elsewhere({"all": lambda: (point(1, ["a"]), color.BLUE, child(3), child)})["all"]
    assert type(got[0]) is point
    assert got[0] == point(1, ["a"])
    assert got[1] is color.BLUE
    assert type(got[2]) is child
    assert got[3] is child


def test_a_class_made_elsewhere_comes_back_by_value() -> None:
    def make() -> Any:
        class There:
            def __init__(self) -> None:
                self.x = 5

            def double(self) -> int:
                return 2 * self.x

        return There()

    assert called_elsewhere({"made": make})["made"].double() == 10


def test_loading_never_changes_a_variable_of_this_main(monkeypatch: pytest.MonkeyPatch) -> None:
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec("limit = 1\ndef read():\n    return limit", vars(main))
    parts = by_value.dumps(vars(main)["read"])
    exec("limit = 2", vars(main))
    assert by_value.loads(parts)() == 2


def test_a_traceback_shows_the_lines_of_a_cell() -> None:
    import linecache

    source = "def broken():\n    raise KeyError('here')  # the culprit\n"
    linecache.cache["<cell 7>"] = (len(source), None, source.splitlines(keepends=True), "<cell 7>")
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "<cell 7>", "exec"), space)
    assert "# the culprit" in called_elsewhere({"broken": space["broken"]})["broken"]


def test_a_function_of_another_doctest_travels_without_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    import linecache

    def among_the_examples(name: str) -> list[str]:
        examples: list[list[str]] = []
        return examples[3] if name == "<doctest other[3]>" else []

    monkeypatch.setattr(linecache, "getlines", among_the_examples)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def seven():\n    return 7\n", "<doctest other[3]>", "exec"), space)
    assert by_value.loads(by_value.dumps(space["seven"]))() == 7


def test_arrays_are_parts_of_their_own_and_stay_writable() -> None:
    array = np.arange(100_000)
    parts = by_value.dumps({"a": array})
    assert [memoryview(part).nbytes for part in parts[1:]] == [array.nbytes]
    loaded = by_value.loads([bytearray(part) for part in parts])["a"]
    loaded[0] = 7
    assert loaded[0] == 7
    assert array[0] == 0


@pytest.mark.torch
def test_tensors_that_share_memory_still_do_and_models_of_a_cell_travel() -> None:
    import torch

    base = torch.arange(10_000.0)
    loaded = by_value.loads([bytearray(part) for part in by_value.dumps((base, base[5:8], torch.ones(2, 3).t()))])
    loaded[0][6] = -1
    assert loaded[1].tolist() == [5, -1, 7]
    assert loaded[2].shape == (3, 2)
    assert base[6] == 6

    space: dict[str, Any] = {"__name__": "__main__"}
    exec(MODELS, space)
    assert called_elsewhere({"model": space["run"]})["model"] == (6.0, 2.0, True)


MODELS = """
import torch
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return 2 * x
    @staticmethod
    def backward(ctx, g): return 2 * g
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.tied = self.weight
    def forward(self, x): return Twice.apply(x * self.weight)
net = Net()
def run():
    x = torch.tensor(3.0, requires_grad=True)
    y = net(x)
    y.backward()
    return y.item(), x.grad.item(), net.tied is net.weight
"""


def test_what_can_be_imported_goes_by_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert goes_by_name(functools.wraps)
    assert goes_by_name(by_value.dumps)
    assert len(bytes(by_value.dumps(by_value.dumps)[0])) < 100
    made = types.ModuleType("made_by_hand")
    monkeypatch.setitem(sys.modules, "made_by_hand", made)
    assert not is_importable("made_by_hand")
    (tmp_path / "on_the_path.py").write_text("def f(): return 1")
    monkeypatch.syspath_prepend(tmp_path)
    import on_the_path  # type: ignore[import-not-found]

    assert goes_by_name(on_the_path.f)
    monkeypatch.setattr(sys, "path", [name for name in sys.path if name != str(tmp_path)])
    assert not goes_by_name(on_the_path.f)


def test_blame_names_the_whole_way(cells: dict[str, Any]) -> None:
    lock = threading.Lock()
    holder = cells["Child"](1)
    holder.guard = {"inner": [0, lock]}

    def helper() -> Any:
        return holder

    def fn() -> Any:
        return helper()

    assert blame(fn, "fn") == (
        "fn uses the variable `helper`, which uses the variable `holder`, which holds `.guard`, "
        "which holds ['inner'], which holds [1], a lock: cannot pickle '_thread.lock' object"
    )
    assert blame(lock, "argument 0") == "argument 0, a lock: cannot pickle '_thread.lock' object"
    assert blame([1, 2], "argument 1") == ""


WITHOUT_CLOUDPICKLE = """
import sys
sys.modules["cloudpickle"] = None
from functools import partial
from drumline.core.errors import LaunchError
from drumline.channel.launch import by_value
from drumline.channel.launch.launch import launch
print(by_value.loads(by_value.dumps(partial(max, 1, 2)))())
def own(): return 1
try:
    launch(own)
except LaunchError as error:
    print(error)
"""


def test_without_cloudpickle_functions_must_be_importable_and_the_error_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_CLOUDPICKLE], capture_output=True, text=True, check=True)
    value, error = done.stdout.splitlines()
    assert value == "2"
    assert error == (
        "the ranks cannot import own from __main__, and cloudpickle is not installed; "
        "move it to a module that the ranks can import, or install cloudpickle, which sends its code"
    )


def test_no_private_name_of_cloudpickle_is_used() -> None:
    import cloudpickle

    private = {
        name
        for owner in (cloudpickle.cloudpickle, cloudpickle.Pickler)
        for name in vars(owner)
        if name.startswith("_") and not name.startswith("__")
    }
    assert {"_make_empty_cell", "_dynamic_function_reduce"} <= private
    sources = [path.read_text() for path in Path(drumline.__file__).parent.rglob("*.py")]
    users = [source for source in sources if "cloudpickle" in source]
    assert users
    for source in users:
        assert not private & {name for node in ast.walk(ast.parse(source)) for name in names_in(node)}


def names_in(node: ast.AST) -> list[str]:
    """Return the names that code uses here: as a variable, an attribute, an import or a text for `getattr`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) | ast.Constant(value=str(name)):
            return name.split(".")
        case _:
            return []
