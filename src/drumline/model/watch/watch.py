"""Check before every step whether everything that a cut model depends on besides its inputs is unchanged.

    modes, hooks, what is frozen, attributes and variables that the forward reads between blocks     traced again
    another buffer instead of one used between blocks                                                adopted
    another module instead of one, another parameter                                                 refused

The modules are those of the user's model, as long as it lives: a model that is gone no longer changes. What the code
of a model may read elsewhere is in `surroundings`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import call, itemgetter
from types import FunctionType, MethodType
from typing import Any
from weakref import ref

from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.model.catalogue import whole_name
from drumline.model.hooks import BACKWARD, FORWARD
from drumline.model.values import MISSING
from drumline.model.watch.fingerprint import PLAIN, Same, fingerprint
from drumline.model.watch.surroundings import SETTINGS, Surroundings, is_known

AttributeName = tuple[str, str]  # the names of a module and of its attribute
_HOOKS = (*FORWARD, *BACKWARD)
_TABLES = itemgetter(*_HOOKS)
_GLOBAL: list[dict[int, Any]] = [getattr(nn.modules.module, f"_global{kind}") for kind in _HOOKS]

Table = dict[str, Tensor | None]


def global_hooks() -> list[Any]:
    """Return which hooks run on all modules.

    >>> global_hooks() == global_hooks()
    True
    """
    return [len(entry) and list(entry) for entry in _GLOBAL]


def code_of(module: nn.Module) -> list[Any]:
    """Return the functions of a module, its own and those of its classes, without libraries' functions."""
    kind = type(module)
    functions: list[Any] = [kind]
    functions += [function for function in vars(module).values() if isinstance(function, FunctionType | MethodType)]
    for cls in kind.__mro__:
        if not is_known(cls):
            functions += [attribute for attribute in vars(cls).values() if not isinstance(attribute, PLAIN)]
    return [Same(functions), *[fingerprint(tensor) for tensor in functions if isinstance(tensor, Tensor)]]


class Watch:
    """A model's modules and their states; `inside` are those traced inside, whose code is checked too.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    >>> watch = Watch(model.named_modules(), frozenset({""}))
    >>> watch.has_changed(), model[1].eval().training, watch.has_changed(), watch.has_changed()
    (False, False, True, False)
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        inside: frozenset[str],
        carried: frozenset[str] = frozenset(),
    ) -> None:
        places = [name.rpartition(".") for name in carried]
        self._carried = {path: [key for other, _, key in places if other == path] for path, _, _ in places}
        self._modules = {name: ref(module) for name, module in modules}
        self._inside = {name: module for name, module in self._modules.items() if name in inside}
        self._children = {name: _children(module) for name, module in self._named()}
        self._every_child = _every_child(self._alive())
        self._surroundings = Surroundings(_living(self._inside.values()))
        self._places: dict[AttributeName, ref[nn.Module]] = {}
        self._before = self._now()
        self._tables: list[tuple[str, ref[nn.Module], Table, Table]] = []

    def _alive(self) -> list[nn.Module]:
        return _living(self._modules.values())

    def _named(self) -> list[tuple[str, nn.Module]]:
        return [(name, module) for name, reference in self._modules.items() if (module := reference()) is not None]

    def read(self, places: Iterable[AttributeName]) -> None:
        """Also check these attributes, on which the trace depends."""
        self._places.update((place, self._modules[place[0]]) for place in places if place[0] in self._modules)
        modes, _ = self._before  # an evaluation has others while it lasts
        self._before = modes, self._now()[1]

    def begin(self) -> None:
        """Record the current parameters and buffers between blocks as the expected ones."""
        self._tables = [
            (name, reference, dict(module._parameters), self._buffers_of(name, module))
            for name, reference in self._inside.items()
            if (module := reference()) is not None
        ]

    def _buffers_of(self, name: str, module: nn.Module) -> Table:
        """Return a module's buffers, and the tensors in its attributes that stages hold like these."""
        table = dict(module._buffers)
        table.update((key, module.__dict__.get(key)) for key in self._carried.get(name, ()))
        return table

    def has_changed(self) -> bool:
        """Whether anything has changed since the last call; refuse replaced modules."""
        self.refuse_exchanged()
        before, self._before = self._before, self._now()
        if before == self._before:
            return False
        self._surroundings = Surroundings(_living(self._inside.values()))  # other code may read other variables
        self._before = self._now()
        return True

    def _now(self) -> tuple[list[bool], list[Any]]:
        """Return the modules' modes, and all else that is looked after."""
        spaces = [module.__dict__ for module in self._alive()]
        modes = [space.get("training", True) for space in spaces]  # one that torch.compile made has its module's
        states: list[Any] = [*global_hooks(), [*map(call, SETTINGS.values())]]
        states += [code_of(module) for module in _living(self._inside.values())]
        states += [[*map(list, tables)] for tables in map(_TABLES, spaces) if any(tables)]
        parameters = chain.from_iterable([space["_parameters"].values() for space in spaces])
        states.append([param is not None and param.requires_grad for param in parameters])
        read: dict[int, tuple[Any, Any]] = {}  # values and states: many modules share a config
        for (_, key), reference in self._places.items():
            if (owner := reference()) is not None:
                space = owner.__dict__
                value = space[key] if key in space else _of_class(owner, key)
                if id(value) not in read:
                    read[id(value)] = value, fingerprint(value, name=key)
                states.append(read[id(value)][1])
        return modes, states + self._surroundings.now()

    def refuse_exchanged(self) -> None:
        """Refuse modules that were replaced, added or removed."""
        if _every_child(self._alive()) == self._every_child:
            return
        for name, module in self._named():
            before, now = dict(self._children[name]), dict(_children(module))
            keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
            if keys:
                raise ModelError(
                    f"the module {whole_name(name, keys[0])!r} was replaced, added or removed after the pipeline was "
                    "created",
                    expected="the modules with which the model was cut",
                    fix="create a new pipeline",
                )

    def exchanged(self) -> list[tuple[str, Tensor]]:
        """Return the buffers between blocks that were replaced by another tensor; refuse replaced parameters."""
        tensors = []
        for at, (name, reference, parameters, buffers) in enumerate(self._tables):
            module = reference()
            if module is None:
                continue
            for key, param in module._parameters.items():
                if param is not parameters.get(key):
                    raise ModelError(
                        f"the parameter {whole_name(name, key)!r} was replaced after the pipeline was created",
                        expected="the original parameter, because the forward uses it between blocks",
                        fix="change it in place, use load_state_dict, or create a new pipeline",
                    )
            now = self._buffers_of(name, module) if name in self._carried else module._buffers
            new = [(key, buffer) for key, buffer in now.items() if buffer is not buffers.get(key)]
            if new:
                tensors += [(whole_name(name, key), tensor) for key, tensor in new if tensor is not None]
                self._tables[at] = (name, reference, parameters, dict(now))
        return tensors


def _living(references: Iterable[ref[nn.Module]]) -> list[nn.Module]:
    return [module for reference in references if (module := reference()) is not None]


def _every_child(modules: Iterable[nn.Module]) -> tuple[list[str], list[int]]:
    """Return the names and identities of all children, in one look at all modules."""
    tables = [module.__dict__["_modules"] for module in modules]
    return [*chain.from_iterable(tables)], [id(child) for table in tables if table for child in table.values()]


def _children(module: nn.Module) -> list[tuple[str, int]]:
    return [(key, id(layer)) for key, layer in module.__dict__["_modules"].items()]


def _of_class(module: nn.Module, key: str) -> Any:
    """Return an attribute of a module's class without running any code: a value, not a method or a property."""
    for cls in type(module).__mro__:
        if key in cls.__dict__:
            value = cls.__dict__[key]
            return MISSING if hasattr(type(value), "__get__") else value
    return MISSING


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has its own hooks.

    >>> has_hooks(nn.ReLU())
    False
    """
    return any(_TABLES(vars(module)))


def refuse_hooks(root: nn.Module) -> None:
    """Refuse hooks on an nn.Sequential whose blocks run one by one, without it."""
    if any(map(vars(root).get, _HOOKS)):
        raise ModelError(
            "the model is an nn.Sequential with its own hooks, which no stage would run",
            expected="hooks on its blocks, or an example with which to trace the model, hooks included",
            fix="register the hook on a block, or pass example= to Pipeline",
        )
