"""Run the unsplit model if no rank holds all of it: each rank runs the model's forward, each block runs on its owner.

    rank 0   embed ──► layers.0 ──► (layers.1: received from rank 1) ──► loss
    rank 1   (received) ─► (received) ──► layers.1 ────────────────────► loss

So every rank computes its own blocks and everything between blocks, with the user's hooks, modes and attributes. It
receives the outputs of other ranks' blocks and, in the backward, the gradients of their inputs. What is not its own
takes no memory meanwhile, even if the user's model still has values there, which are those of the start.

The ranks send in turns. The n-th message of each is about the same call. If it is not, or if one rank fails, all ranks
learn this at once and give up, so that none waits for a message that never comes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from drumline.core.errors import RankFailed, WaitTimeout
from drumline.engine.ranks.crew import Crew
from drumline.features.check.by_itself.places import Home, Places
from drumline.features.check.by_itself.remote_hooks import Sketches, are_alike, watched_hooks
from drumline.model.block import Block
from drumline.model.catalogue import named_tensors, places_in
from drumline.model.follow.between_blocks import places_of
from drumline.model.patches import put_in
from drumline.model.randomness import Randomness
from drumline.model.values import pack, plain_in, unpack
from drumline.model.watch.fingerprint import can_change

MOST_BYTES = 512 * 2**20  # most bytes that blocks send in total


class GaveUp(Exception):
    """The ranks cannot run the model together; the text says why. All of them raise it at the same message."""


@dataclass(frozen=True, slots=True)
class _Word:
    call: str
    speaks: bool = False
    tensors: tuple[Tensor | None, ...] = ()
    form: Any = None
    wants_gradient: tuple[bool, ...] = ()
    generators: tuple[Tensor, ...] = ()


@dataclass(slots=True)
class Relay:
    """One run of a model through the blocks of all ranks; `home` has those of this process.

    Without a model, somebody else passes blocks to `call` one by one.
    """

    crew: Crew
    model: nn.Module | None
    places: Places
    home: Home
    device: torch.device
    randomness: Randomness
    changed: str = ""  # an argument that a block may have changed unseen by other ranks
    _num_bytes: int = 0
    _is_inside: bool = False
    _calls: dict[str, list[tuple[bool, _Word]]] = field(default_factory=dict)  # with gradients or not, and message

    @contextmanager
    def running(self) -> Iterator[None]:
        """Replace blocks of other ranks inside by what they send; raise GaveUp on all ranks if any of them fails."""
        try:
            with ExitStack() as stack:
                if self.model is not None:
                    stack.enter_context(self._lit(self.model))
                    for name in self.places.blocks:
                        module = self.model.get_submodule(name)
                        if any(True for _ in (*module.parameters(), *module.buffers())):
                            own_module = self.home.modules.get(name, module)
                            # Instead of its forward, so that its hooks still run around it.
                            stack.enter_context(
                                put_in([(vars(module), "forward", self._run(name, own_module.forward))])
                            )
                            stack.enter_context(watched_hooks(module, partial(self._agree, name)))
                yield
            self._exchange(_Word("the end"))
        except (GaveUp, RankFailed, WaitTimeout):
            raise
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}")

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def _run(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        is_here = name in self.home.modules

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self.call(name, forward, args, kwargs, is_here=is_here)

        return run

    def call(
        self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, is_here: bool
    ) -> Any:
        """Run a block where it is; all ranks call it, and have what it returns."""
        if self._is_inside:  # inside another block, which runs it
            return forward(*args, **kwargs)
        tensors, form = pack((args, kwargs))
        wants = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        calls = self._calls.setdefault(name, [])
        call = f"call {len(calls) + 1} of {name}{' with gradients' if wants else ''}"
        if torch._C._current_graph_task_id() >= 0:
            wanted, heard = calls.pop() if len(calls) > 1 else calls[0]
            if wants != wanted:
                self._give_up(f"the model calls {name!r} in the middle of its backward")
            return self._inside(forward, args, kwargs) if is_here else self._received(call, heard, tensors, wants)
        for value in plain_in(form):
            if can_change(value):
                self.changed = f"{name!r} receives a {type(value).__name__}"
        if is_here:
            result, word = self._at_home(call, forward, tensors, form, wants)
        else:
            word = self._exchange(_Word(call))
            result = self._received(call, word, tensors, wants)
        calls.append((wants, word))
        return result

    def _agree(self, name: str, what: str, mine: Sketches) -> None:
        """Give up if a block's hooks return something else here than where the block is."""
        is_rerun = what == "its output" and torch._C._current_graph_task_id() >= 0
        if not self._is_inside and not is_rerun:
            word = self._exchange(_Word(f"what hooks of {name} make of {what}", name in self.home.modules, mine))
            if not are_alike(mine, word.tensors):
                self._give_up(f"hooks of {name!r} make something else of {what} than in its own process")

    def _inside(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._is_inside = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._is_inside = False

    def _at_home(
        self, call: str, forward: Callable[..., Any], tensors: Sequence[Tensor], form: Any, wants: bool
    ) -> tuple[Any, _Word]:
        """Run a block of this process, and send its output."""
        inputs = list(tensors)
        places = [at for at, tensor in enumerate(inputs) if wants and tensor.requires_grad]
        if places:
            entered = _Home.apply(self, call, *(inputs[at] for at in places))  # type: ignore[no-untyped-call]
            for at, value in zip(places, entered, strict=True):
                inputs[at] = value
        versions = [tensor._version for tensor in inputs]
        args, kwargs = unpack(inputs, form)
        output = self._inside(forward, args, kwargs)
        if [tensor._version for tensor in inputs] != versions:
            self._give_up(f"{call} changes its arguments in place")
        outputs, output_form = pack(output)
        copies = tuple(output.detach().to("cpu", copy=True) for output in outputs)
        wanted = tuple(output.requires_grad for output in outputs)
        self._exchange(_Word(call, True, copies, output_form, wanted, tuple(self.randomness.states())))
        return output, _Word(call)

    def _received(self, call: str, heard: _Word, tensors: Sequence[Tensor], wants: bool) -> Any:
        """Return the output of another process's block for these tensors."""
        self.randomness.go_on(heard.generators)
        if wants:
            given_tensors = [tensor for tensor in tensors if tensor.requires_grad]
            result = _Elsewhere.apply(self, call, heard, *given_tensors)  # type: ignore[no-untyped-call]
        else:
            # Copies, because a tensor that gets a gradient must not be changed in place.
            pairs = zip(self.placed(heard.tensors), heard.wants_gradient, strict=True)
            result = [value.requires_grad_().clone() if wanted else value for value, wanted in pairs]
        return unpack(result, heard.form)

    def gradients(self, call: str, mine: Sequence[Tensor | None] | None) -> list[Tensor | None]:
        """Send the gradients of a block's inputs, or receive them from the block's owner."""
        copies = tuple(None if tensor is None else tensor.detach().to("cpu", copy=True) for tensor in mine or ())
        heard = self._exchange(_Word(f"the backward of {call}", mine is not None, copies))
        return self.placed(heard.tensors)

    def placed(self, tensors: Sequence[Tensor | None]) -> list[Any]:
        """Return tensors on this rank's device."""
        return [None if tensor is None else tensor.to(self.device) for tensor in tensors]

    # ---- words -------------------------------------------------------------------------------------------------------

    def _exchange(self, word: _Word) -> _Word:
        self._num_bytes += sum(tensor.nbytes for tensor in word.tensors if tensor is not None)
        if self._num_bytes > MOST_BYTES:
            self._give_up(f"its blocks produce over {MOST_BYTES // 2**20} MiB per microbatch")
        try:
            packed = pickle.dumps(word)
        except Exception as error:  # an object's own pickling may raise anything
            self._give_up(f"{word.call} cannot be sent: {error}")
        heard = [pickle.loads(chunk) for chunk in self._replies("", word.call, packed)]
        return next((value for value in heard if value.speaks), word)

    def _give_up(self, why: str) -> NoReturn:
        self._replies(why, "", b"")
        raise AssertionError("giving up raises on all ranks")

    def _replies(self, why: str, call: str, packed: bytes) -> list[bytes]:
        """Send one message and return those of all ranks; raise GaveUp if they are not about the same call."""
        answers = self.crew.all_told("check block", [(why, call, packed)])
        naming = self.crew.naming
        problems = [f"{naming.rank(at)}: {problem}" for at, (problem, _, _) in enumerate(answers) if problem]
        if not problems and len({call for _, call, _ in answers}) > 1:
            calls = " and ".join(f"{naming.rank(at)} at {call}" for at, (_, call, _) in enumerate(answers))
            problems = [f"the ranks run blocks in different orders: {calls}"]
        if problems:
            raise GaveUp(problems[0])
        return [packed for *_, packed in answers]

    # ---- what is used between blocks ---------------------------------------------------------------------------------

    def _values_between(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values of parameters and buffers that the forward uses between blocks."""
        mine, own_ids = self.home.between, self.home.tensor_ids
        others = [name for name in self.places.between if name not in mine]
        elsewhere = [name for name in others if id(named.get(name)) not in own_ids]
        lacking = {name for value in self.crew.all_told("check between", [elsewhere]) for name in value}
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in mine.items() if name in lacking}
        if sum(tensor.nbytes for tensor in copies.values()) > MOST_BYTES:
            self._give_up(f"parameters between its blocks take over {MOST_BYTES // 2**20} MiB")
        heard = [pickle.loads(chunk) for chunk in self._replies("", "values between blocks", pickle.dumps(copies))]
        values = {name: value for item in heard for name, value in item.items() if name in elsewhere}
        return {**values, **mine}

    def _lit(self, model: nn.Module) -> AbstractContextManager[None]:
        """Let the model have only what is this rank's own, and values of what is used between blocks; else zeros.

        The zeros need no memory. They serve code that asks a module for its device.
        """
        named = dict(named_tensors(model))
        values = self._values_between({**places_of(model), **named})
        values_by_id = {id(named[name]): value for name, value in values.items() if name in named}
        others = {id(tensor): tensor for tensor in named.values() if id(tensor) not in self.home.tensor_ids}
        lit_tensors = {at: self._lit_by(tensor, values_by_id.get(at)) for at, tensor in others.items()}
        places = places_in(Block("", model))
        lit_places: list[tuple[dict[str, Any], str, Any]] = [
            (place.table, place.key, lit_tensors[id(place.tensor)])
            for place in places
            if id(place.tensor) in lit_tensors
        ]
        for name, value in values.items():
            if name not in named:  # a tensor in an attribute, which a stage holds
                path, _, key = name.rpartition(".")
                lit_places.append((vars(model.get_submodule(path)), key, value.to(self.device)))
        return put_in(lit_places)

    def _lit_by(self, tensor: Tensor, value: Tensor | None) -> Tensor:
        """Return what stands for a tensor: what this rank trains in its place, its value, or zeros."""
        if value is not None and id(value) in self.home.tensor_ids:
            return value
        stand_in = torch.zeros((), dtype=tensor.dtype, device=self.device).expand(tensor.shape)
        if value is not None:
            stand_in = value.to(self.device)
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(stand_in, requires_grad=tensor.requires_grad) if is_parameter else stand_in


class _Home(torch.autograd.Function):
    """Passes on the inputs of a block in this process, so that their gradients can be sent."""

    @staticmethod
    def forward(ctx: Any, relay: Relay, call: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.relay, ctx.call = relay, call
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.relay.gradients(ctx.call, gradients)
        return (None, None, *gradients)


class _Elsewhere(torch.autograd.Function):
    """A block of another process."""

    @staticmethod
    def forward(ctx: Any, relay: Relay, call: str, heard: _Word, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.relay, ctx.call = relay, call
        outputs = relay.placed(heard.tensors)
        ctx.mark_non_differentiable(*(v for v, wants in zip(outputs, heard.wants_gradient, strict=True) if not wants))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        return (None, None, None, *ctx.relay.gradients(ctx.call, None))
