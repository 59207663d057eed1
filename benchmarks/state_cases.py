"""Cases of the fuzzer of state that blocks keep: each is a module's source, drawn from a seed and a number alone.

A case keeps one kind of value (a counter, a generator, a tensor changed in place ...) in one place (an attribute, a
global, a class, a closure ...), changed by some blocks, always or only sometimes:

    VALUES   how it begins, how a forward changes it, and what a forward computes from it
    PLACES   how code reads it and sets it
    TIMES    when a forward uses it: always, in every second microbatch, from the third step on, in training mode

Sources are written as a user would write them: with `global`, `nonlocal`, `self.` and so on.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from textwrap import indent

WIDTH, NUM_MICROBATCHES, NUM_STEPS, LATE_STEP = 4, 4, 5, 2

HEAD = """\
import collections
import contextvars
import copy
import dataclasses
import functools
import io
import itertools
import random
import types
import weakref

import numpy as np
import torch
from torch import nn


@dataclasses.dataclass
class Notes:
    calls: int = 0
    means: list = dataclasses.field(default_factory=list)


class Slots:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


class Numbers:
    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return self.at % 3


def numbers():
    at = 0
    while True:
        at += 1
        yield at % 3


@functools.lru_cache
def table(length):
    return torch.linspace(0.5, 1.5, length)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear({width}, {width})

    def forward(self, x):
        return torch.tanh(self.layer(x)) + x


"""


@dataclass(frozen=True, slots=True)
class Value:
    """Something that is kept: how it begins, and what a forward does with it; GET and SET stand for its place.

    `seen` are values of a microbatch. The forward sets `factor`. `reads` sets it without changing anything.
    """

    start: str
    use: str
    reads: str = ""
    is_set: bool = False  # whether the forward sets it anew; else it changes what is in it
    is_pure: bool = False  # whether what is kept makes no difference: nobody may refuse it
    is_used_up: bool = False


VALUES = {
    "counter": Value("0", "SET(GET + 1)\nfactor = 1 + GET % 3", "factor = 1 + GET % 3", is_set=True),
    "mean": Value("0.0", "SET(0.5 * GET + float(seen.mean()))\nfactor = 1 + GET", "factor = 1 + GET", is_set=True),
    "largest": Value("0.0", "SET(max(GET, float(seen.abs().max())))\nfactor = 1 + GET", is_set=True),
    "hidden": Value(
        "None",
        "hidden = torch.zeros_like(seen) if GET is None else GET\nSET(torch.tanh(hidden + seen))\nfactor = 1 + hidden",
        is_set=True,
    ),
    "tensor replaced": Value(
        "torch.zeros(WIDTH)", "SET(0.5 * GET + seen.mean(0))\nfactor = 1 + GET", "factor = 1 + GET", is_set=True
    ),
    "tensor in place": Value(
        "torch.zeros(WIDTH)", "GET.mul_(0.5).add_(seen.mean(0))\nfactor = 1 + GET.clone()", "factor = 1 + GET.clone()"
    ),
    "row of a table": Value("torch.zeros(2, WIDTH)", "GET[1].add_(seen.mean(0))\nfactor = 1 + GET.sum(0)"),
    "list": Value("[1.0]", "GET.append(float(seen.mean()))\nfactor = sum(GET[-3:])", "factor = sum(GET[-3:])"),
    "list of tensors": Value("[]", "GET.append(seen.mean(0))\nfactor = 1 + torch.stack(GET).mean(0)"),
    "last in a list": Value("[0.5]", "factor = 1 + GET[0]\nGET[0] = seen.mean()", "factor = 1 + GET[0]"),
    "deque": Value("collections.deque([1.0], maxlen=3)", "GET.append(float(seen.mean()))\nfactor = sum(GET)"),
    "dict": Value('{"calls": 0}', 'GET["calls"] += 1\nfactor = GET["calls"] % 3', 'factor = 1 + GET["calls"] % 3'),
    "dict of tensors": Value(
        '{"mean": torch.zeros(WIDTH)}',
        'GET["mean"] = 0.5 * GET["mean"] + seen.mean(0)\nfactor = 1 + GET["mean"]',
        'factor = 1 + GET["mean"]',
    ),
    "dict that grows": Value("{}", "GET[len(GET)] = seen.mean()\nfactor = 1 + sum(GET.values())"),
    "set": Value("set()", "GET.add(len(GET))\nfactor = len(GET) % 3"),
    "counts": Value("collections.Counter()", 'GET["calls"] += 1\nfactor = GET["calls"] % 3'),
    "object": Value("Notes()", "GET.calls += 1\nfactor = GET.calls % 3", "factor = 1 + GET.calls % 3"),
    "list in an object": Value("Notes()", "GET.means.append(float(seen.mean()))\nfactor = 1 + sum(GET.means[-2:])"),
    "slots": Value("Slots()", "GET.calls += 1\nfactor = GET.calls % 3"),
    "namespace": Value("types.SimpleNamespace(calls=0)", "GET.calls += 1\nfactor = GET.calls % 3"),
    "torch generator": Value(
        "torch.Generator().manual_seed(3)",
        "factor = torch.rand(WIDTH, generator=GET)",
        "factor = 1 + float(GET.initial_seed() % 7)",
    ),
    "numpy generator": Value("np.random.default_rng(3)", "factor = 1 + GET.random()"),
    "numpy state": Value("np.random.RandomState(3)", "factor = 1 + GET.rand()"),
    "random": Value("random.Random(3)", "factor = 1 + GET.random()"),
    "array": Value(
        "np.zeros(WIDTH, dtype=np.float32)",
        "GET[:] = 0.5 * GET + seen.mean(0).numpy()\nfactor = 1 + torch.from_numpy(GET.copy())",
    ),
    "list's iterator": Value("iter([0.5, 1.0, 1.5] * 200)", "factor = 1 + next(GET)", is_used_up=True),
    "cycle": Value("itertools.cycle([0.5, 1.0, 1.5])", "factor = 1 + next(GET)", is_used_up=True),
    "count": Value("itertools.count()", "factor = 1 + next(GET) % 3", is_used_up=True),
    "python generator": Value("numbers()", "factor = 1 + next(GET)", is_used_up=True),
    "own iterator": Value("Numbers()", "factor = 1 + next(GET)"),
    "file": Value('io.StringIO("0.5\\n1.5\\n2.0\\n" * 200)', "factor = float(GET.readline())", is_used_up=True),
    # What makes no difference.
    "memo": Value(
        "{}",
        "if seen.shape[-1] not in GET:\n    GET[seen.shape[-1]] = torch.linspace(0.5, 1.5, seen.shape[-1])\n"
        "factor = GET[seen.shape[-1]]",
        is_pure=True,
    ),
    "memo of numbers": Value(
        "{}",
        "if len(seen) not in GET:\n    GET[len(seen)] = len(seen) ** 0.5\nfactor = GET[len(seen)]",
        is_pure=True,
    ),
    "made when needed": Value(
        "None", "if GET is None:\n    SET(torch.linspace(0.5, 1.5, WIDTH))\nfactor = GET", is_set=True, is_pure=True
    ),
    "grown when needed": Value(
        "1",
        "if seen.shape[-1] > GET:\n    SET(seen.shape[-1])\nfactor = 1 + 1 / GET",
        is_set=True,
        is_pure=True,
    ),
    "calls that nobody reads": Value("0", "SET(GET + 1)\nfactor = 1.5", is_set=True, is_pure=True),
    "what was seen last": Value("None", "SET(seen)\nfactor = 1.5", is_set=True, is_pure=True),
    "scratch": Value("None", "SET(seen.mean(0))\nfactor = 1 + GET", is_set=True, is_pure=True),
    "scratch number": Value("0.0", "SET(float(seen.mean()))\nfactor = 1 + GET", is_set=True, is_pure=True),
    "log": Value("[]", "GET.append(float(seen.mean()))\nfactor = 1.5", is_pure=True),
    "cached function": Value("None", "factor = table(seen.shape[-1])", is_pure=True),
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where something is kept: how code gets it and sets it, and what must be written where.

    START stands for how it begins. A place that `is_shared` is one for all blocks. Without `set`, it keeps what can
    change in place.
    """

    get: str
    set: str = ""
    top: str = ""  # in the module
    of_class: str = ""
    begin: str = ""  # in __init__
    declared: str = ""  # at the beginning of the forward
    arguments: str = ""  # of the forward
    after: str = ""  # the class
    outside: str = ""  # how the test reads it, if not as the forward; "block" is the first that keeps it
    is_shared: bool = False


HELPER = """
class Helper(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.state = state

"""
PLACES = {
    "attribute": Place("self.state", "self.state = {}", begin="self.state = START"),
    "attribute by setattr": Place(
        'getattr(self, "state")', 'setattr(self, "state", {})', begin='setattr(self, "state", START)',
        outside="block.state",
    ),
    "__dict__": Place(
        'self.__dict__["state"]', 'self.__dict__["state"] = {}', begin="self.state = START", outside="block.state"
    ),
    "in a dict": Place('self.box["state"]', 'self.box["state"] = {}', begin='self.box = {"state": START}'),
    "in a tuple": Place("self.box[1]", begin='self.box = ("unused", START)'),
    "in an object": Place(
        "self.box.state", "self.box.state = {}", begin="self.box = types.SimpleNamespace(state=START)"
    ),
    "hidden module": Place(
        "self.others[0].state", "self.others[0].state = {}", top=HELPER, begin="self.others = [Helper(START)]"
    ),
    "submodule": Place("self.helper.state", "self.helper.state = {}", top=HELPER, begin="self.helper = Helper(START)"),
    "weak reference": Place(
        "self.box().state", "self.box().state = {}", top="ALIVE = []\n",
        begin="own = Notes()\nown.state = START\nALIVE.append(own)\nself.box = weakref.ref(own)",
    ),
    "property": Place(
        "self.state", "self.state = {}",
        of_class="@property\ndef state(self):\n    return self._kept\n\n"
        "@state.setter\ndef state(self, value):\n    self._kept = value\n",
        begin="self._kept = START",
    ),
    "object of several blocks": Place(
        "self.box.state", "self.box.state = {}", top="def box():\n    return types.SimpleNamespace(state=START)\n",
        is_shared=True,
    ),
    "global": Place("STATE", "STATE = {}", top="STATE = START\n", declared="global STATE", is_shared=True),
    "in a global dict": Place('BOX["state"]', 'BOX["state"] = {}', top='BOX = {"state": START}\n', is_shared=True),
    "in a global object": Place(
        "BOX.state", "BOX.state = {}", top="BOX = types.SimpleNamespace(state=START)\n", is_shared=True
    ),
    "class": Place(
        "type(self).state", "type(self).state = {}", of_class="state = START\n", outside="Keeps.state", is_shared=True
    ),
    "named class": Place("Keeps.state", "Keeps.state = {}", of_class="state = START\n", is_shared=True),
    "context variable": Place(
        "STATE.get()", "STATE.set({})", top='STATE = contextvars.ContextVar("STATE")\nSTATE.set(START)\n',
        is_shared=True,
    ),
    "default argument": Place(
        'box["state"]', 'box["state"] = {}', arguments=', box={"state": START}',
        outside='Keeps.forward.__defaults__[0]["state"]', is_shared=True,
    ),
    "function": Place("note.state", "note.state = {}", top="def note():\n    pass\n\nnote.state = START\n",
                      is_shared=True),
    "closure": Place(
        "self.get()", "self.put({})",
        top="def pair(state):\n    def get():\n        return state\n\n    def put(value):\n        nonlocal state\n"
        "        state = value\n\n    return get, put\n",
        begin="self.get, self.put = pair(START)",
    ),
    "closure of a hook": Place("state", "state = {}", declared="nonlocal state", outside="block.get()"),
}  # fmt: skip

# Where a block of another class finds it too.
READABLE = ("object of several blocks", "global", "in a global dict", "in a global object", "named class",
            "context variable", "function")  # fmt: skip

TIMES = {
    "always": "",
    "every second": "self.turn += 1\nif self.turn % 2 == 0:\n",
    "every third": "self.turn += 1\nif self.turn % 3 == 0:\n",
    "late": "if self.is_late:\n",
    "in training": "if self.training:\n",
}
SCHEDULES = (
    ("1f1b", "none"), ("1f1b", "full"), ("zb-h1", "none"), ("zb-h1", "full"), ("zb-v", "none"), ("gpipe", "full"),
    ("dualpipe", "none"), ("interleaved-1f1b", "none"), ("zb-v", "full"), ("chimera", "none"), ("dualpipe", "full"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One model and one schedule."""

    seed: int
    number: int
    value: str
    place: str
    time: str
    keepers: tuple[int, ...]  # the blocks that keep it
    readers: tuple[int, ...]  # those that only read it, where it is shared
    form: str  # chain or traced
    schedule: str
    checkpoint: str
    checks: bool  # whether the first step and sentinels are checked

    @property
    def num_blocks(self) -> int:
        """Of the model."""
        return 6

    @property
    def is_pure(self) -> bool:
        """Whether plain training comes to the same without what is kept: nobody may refuse it."""
        if self.value in ("log", "calls that nobody reads") and self.place not in ("attribute", "submodule", "global"):
            return False  # code shows only in these places that nobody reads it
        return VALUES[self.value].is_pure and self.time in ("always", "in training", "late")

    @property
    def is_last_seen_by_chance(self) -> bool:
        """Whether what makes no difference is from another microbatch in the end: another is the last one there."""
        has_copies = self.schedule in ("dualpipe", "chimera")
        return VALUES[self.value].is_pure and (has_copies or PLACES[self.place].is_shared)

    @property
    def title(self) -> str:
        """Say what the case is."""
        return (
            f"{self.value} | {self.place} | {self.time} | blocks {self.keepers}, read by {self.readers} | {self.form} "
            f"{self.schedule} checkpoint={self.checkpoint} check={self.checks}"
        )


def drawn(seed: int, number: int, form: str = "") -> Case:
    """Draw a case."""
    chance = random.Random(f"{seed} {number}")
    while True:
        value, place = chance.choice(list(VALUES)), chance.choice(list(PLACES))
        if VALUES[value].is_set and not PLACES[place].set:
            continue
        time = chance.choice(["always", "always", "always", *TIMES])
        keepers = tuple(sorted(chance.sample(range(6), chance.choice((1, 1, 2, 3)))))
        readers: tuple[int, ...] = ()
        if place in READABLE and VALUES[value].reads and chance.random() < 0.4:
            readers = tuple(at for at in sorted(chance.sample(range(6), 2)) if at not in keepers)
        schedule, checkpoint = chance.choice(SCHEDULES)
        own_form = chance.choice(("chain", "chain", "chain", "traced"))
        checks = chance.random() < 0.75
        return Case(seed, number, value, place, time, keepers, readers, form or own_form, schedule, checkpoint, checks)


def source(case: Case) -> str:
    """Write the module of a case."""
    value, place = VALUES[case.value], PLACES[case.place]
    top = place.top.replace("START", value.start)
    keeps = _class("Keeps", case, value.use)
    reads = _class("Reads", case, value.reads) if case.readers else ""
    lines = []
    if case.place == "object of several blocks":
        lines.append("shared = box()")
    argument = "shared" if lines else ""
    names = [
        f"Keeps({argument})" if at in case.keepers else f"Reads({argument})" if at in case.readers else "Plain()"
        for at in range(case.num_blocks)
    ]
    lines.append(f"return [{', '.join(names)}]")
    outside = place.outside or place.get.replace("self.", "block.")
    return (
        HEAD.replace("{width}", str(WIDTH)) + f"WIDTH = {WIDTH}\n\n{top}\n\n{keeps}\n\n{reads}\n\n"
        f"def blocks():\n{indent(chr(10).join(lines), '    ')}\n\n\n"
        f"def kept(block):\n    return {outside}\n\n\n"
        "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.blocks = nn.ModuleList(blocks())\n\n"
        "    def forward(self, x):\n        for block in self.blocks:\n            x = block(x)\n        return x\n"
    )


def _class(name: str, case: Case, use: str) -> str:
    """Write the class of blocks that keep something, or of those that only read it."""
    value, place, own = VALUES[case.value], PLACES[case.place], name == "Keeps"
    shares = case.place == "object of several blocks"
    begin = ["super().__init__()", f"self.layer = nn.Linear({WIDTH}, {WIDTH})", "self.is_late, self.turn = False, 0"]
    begin += ["self.box = box"] if shares else []
    begin += place.begin.replace("START", value.start).splitlines() if own else []
    inside = _written(use, place)
    if head := TIMES[case.time] if own else "":
        inside = head + indent(inside, "    ")
    body = [place.declared] if place.declared and own else []
    body += ["seen = x.detach()", "factor = 1.0", *inside.splitlines()]
    if case.place == "closure of a hook":
        hook = ["x, = inputs", *body, "return torch.tanh(output) * factor + x"]
        at = [number for number, line in enumerate(hook) if line == place.declared]
        hook = [*(hook[number] for number in at), *(line for line in hook if line != place.declared)]
        begin += [f"state = {value.start}", *_function("scaled(module, inputs, output)", hook)]
        begin += [*_function("get()", ["return state"]), "self.get = get", "self.register_forward_hook(scaled)"]
        forward = ["return self.layer(x)"]
    else:
        forward = [*body, "return torch.tanh(self.layer(x)) * factor + x"]
    lines = place.of_class.replace("START", value.start).splitlines() if own else []
    lines += _function(f"__init__(self{', box' if shares else ''})", begin)
    lines += ["", *_function(f"forward(self, x{place.arguments.replace('START', value.start)})", forward)]
    return f"class {name}(nn.Module):\n{indent(chr(10).join(lines), '    ')}"


def _function(head: str, lines: list[str]) -> list[str]:
    return [f"def {head}:", *("    " + line for line in lines)]


def _written(code: str, place: Place) -> str:
    """Write code for a place."""
    lines = []
    for line in code.replace("GET", place.get).splitlines():
        found = re.fullmatch(r"(\s*)SET\((.*)\)", line)
        lines.append(line if found is None else found[1] + place.set.format(found[2]))
    return "\n".join(lines)
