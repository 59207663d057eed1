"""Compile the blocks of a stage with torch.compile.

A segment that draws no random numbers is compiled as one function. If it may draw some, each block is compiled
separately, because the generators are seeded between blocks. Blocks are arguments of the compiled code, so stages with
the same structure share it, as do later pipelines of the process. Compiled code draws the random numbers of plain code.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from drumline.core.errors import ModelError, nearest
from drumline.model.blocks.pieces import Piece
from drumline.model.loss.factors import stay_out_of_compiled_code
from drumline.runtime.backward.facts import needs_triton
from drumline.runtime.backward.split_backend import AotEager, Inductor, at, uncompiled

Compile = bool | str | Mapping[str, Any]
Named = Sequence[tuple[str, nn.Module]]

_SETTINGS = ("backend", "dynamic", "fullgraph", "mode", "options")
_RECOMPILES = 64  # per function, for the modes, shapes and stages that share it
_numbers = count()
_compilers: dict[str, Compiler] = {}  # by settings


class Compiler:
    """Compiles blocks of stages, all with the same torch.compile arguments.

    >>> linear = nn.Linear(2, 2)
    >>> run = Compiler({"backend": "aot_eager"}).function([("0", linear)], stage=0, split=False)
    >>> x = torch.ones(1, 2)
    >>> torch.equal(run(x), linear(x))
    True
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)
        self._shared: dict[Any, Any] = {}

    def function(self, blocks: Named, *, stage: int, split: bool) -> Callable[[Any], Any]:
        """Return a function that runs some blocks in order; `split` if their backward may be split."""
        if any(isinstance(module, Piece) for _, module in blocks):
            return partial(_through, [self._piece(block, stage, split) for block in blocks])
        modules = tuple(module for _, module in blocks)
        return _Compiled(self, blocks, stage, split, partial(self.shared(modules, split), modules))

    def _piece(self, block: tuple[str, Any], stage: int, split: bool) -> _Compiled:
        """Return a piece of a traced model, whose generated code is compiled once for each kind of input."""
        run = partial(block[1].forward, compiled=cache(partial(self.compiled, split=split)))
        return _Compiled(self, [block], stage, split, run)

    def shared(self, modules: Sequence[nn.Module], split: bool) -> Any:
        """Return the compiled function for modules with the same structure as these."""
        made_like = tuple((type(module), repr(module), _shapes(module)) for module in modules)
        key = (split, made_like)
        if key not in self._shared:
            self._shared[key] = self.compiled(_through, split)
        return self._shared[key]

    def compiled(self, function: Any, split: bool) -> Any:
        """Compile a function with its own code: torch counts recompilations, and learns shapes, per code object."""
        name = f"blocks_{next(_numbers)}"
        fresh = FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)
        return torch.compile(fresh, backend=self._backend(split), **self._rest())

    def _backend(self, split: bool) -> Any:
        backend = self.settings["backend"]
        if backend == "inductor":
            return Inductor(_patches(self.settings), split)
        return AotEager(split) if backend == "aot_eager" else backend

    def _rest(self) -> dict[str, Any]:
        done = ("backend", "mode", "options") if self.settings["backend"] == "inductor" else ("backend",)
        rest = {name: value for name, value in self.settings.items() if name not in done}
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # since torch 2.13
            rest.update(recompile_limit=_RECOMPILES, isolate_recompiles=True)
        return rest


class _Compiled:
    """Some blocks of a stage, run by a compiled function."""

    def __init__(self, compiler: Compiler, blocks: Named, stage: int, split: bool, run: Callable[[Any], Any]) -> None:
        from torch._dynamo.exc import TorchDynamoException

        self.compiler, self.blocks, self.stage, self.split, self.run = compiler, blocks, stage, split, run
        self.errors = TorchDynamoException
        names = ", ".join(name for name, _ in blocks)
        self.title = f"stage {stage}, {'block' if len(blocks) == 1 else 'blocks'} {names},"

    def __call__(self, value: Any) -> Any:
        """Run the blocks; name the block that cannot be compiled."""
        at.title = self.title
        try:
            return self.run(value)
        except self.errors as error:
            if "a leaf Variable that requires grad" in str(error):
                raise  # the stage will pass a copy
            if len(self.blocks) > 1:
                self._one_by_one(value)
            raise uncompiled(self.title, error) from error

    def _one_by_one(self, value: Any) -> None:
        """Run every block as a separate function, so that the one that cannot be compiled raises."""
        for block in self.blocks:
            value = self.compiler.function([block], stage=self.stage, split=self.split)(value)


def compiler_for(choice: Compile, device: torch.device) -> Compiler | None:
    """Return a compiler for the user's choice, None for no compilation; refuse what cannot work here.

    >>> compiler_for(False, torch.device("cpu"))
    >>> compiler_for({"backend": "aot_eager", "dynamic": True}, torch.device("cpu")).settings
    {'backend': 'aot_eager', 'dynamic': True}
    """
    if choice is False:
        return None
    settings = settings_of(choice)
    backend = settings["backend"]
    if isinstance(backend, str):
        from torch._dynamo import list_backends

        known = list_backends(exclude_tags=())
        if backend not in known:
            raise ModelError(f"torch.compile has no backend {backend!r}", fix=nearest(backend, known))
    if backend == "inductor":
        if missing := missing_tool(device):
            raise ModelError(
                f"compile=True needs {missing}, which this machine lacks",
                expected=f"the tools with which torch's inductor compiles stages on {device.type}",
                fix='install it, or use compile=False or compile="aot_eager"',
            )
        _patches(settings)
    stay_out_of_compiled_code()
    _look_at_every_tensor()
    return _compilers.setdefault(str(settings), Compiler(settings))


def _look_at_every_tensor() -> None:
    """Have code that torch before 2.13 compiled be compiled again, for as many kinds of input as later ones do.

    There, code whose dictionaries of parameters look untouched is run as it is. So a parameter that was frozen when it
    was compiled, and is trained now, would get no gradient.
    """
    from torch._dynamo import config

    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        config.skip_tensor_guards_with_matching_dict_tags = False
        config.recompile_limit = max(config.recompile_limit, _RECOMPILES)


def settings_of(choice: Compile) -> dict[str, Any]:
    """Return the torch.compile arguments for a choice.

    >>> settings_of(True), settings_of("aot_eager")
    ({'backend': 'inductor'}, {'backend': 'aot_eager'})
    """
    if isinstance(choice, Mapping):
        for name in choice:
            if name not in _SETTINGS:
                raise ModelError(
                    f"compile has {name!r}", expected="arguments of torch.compile", fix=nearest(str(name), _SETTINGS)
                )
        return {"backend": "inductor", **choice}
    if isinstance(choice, bool | str):
        return {"backend": choice if isinstance(choice, str) else "inductor"}
    raise ModelError(
        f"compile is a {type(choice).__name__}",
        expected="True, False, a backend, or a dict of torch.compile arguments",
    )


def _patches(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return inductor's options: those of the mode, the user's, and the random numbers of uncompiled code."""
    from torch._inductor import list_mode_options

    try:
        mode: dict[str, Any] = list_mode_options(settings["mode"]) if settings.get("mode") else {}
    except RuntimeError as error:
        raise ModelError(f"compile: {error}") from error
    patches = {**mode, **(settings.get("options") or {})}
    if patches.get("triton.cudagraphs"):
        raise ModelError(
            "compile asks for its own CUDA graphs, which microbatches in flight would overwrite",
            fix='use mode="max-autotune-no-cudagraphs"; to capture steps as CUDA graphs, pass capture=True',
        )
    if patches.get("fallback_random") is False:
        raise ModelError(
            "compile asks for inductor's own random numbers (fallback_random is False)",
            expected="eager random numbers, which are the same however a block runs",
        )
    return {**patches, "fallback_random": True}


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    named = (*module.named_parameters(), *module.named_buffers())
    return tuple((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in named)


def _through(modules: Sequence[Callable[[Any], Any]], value: Any) -> Any:
    for module in modules:
        value = module(value)
    return value


def missing_tool(device: torch.device) -> str:
    """Return the tool that inductor needs but this machine lacks; an empty text if none."""
    if needs_triton(device):
        from torch.utils._triton import has_triton

        compilers = (os.environ.get("CC", ""), "gcc", "clang", "cc")
        return "" if has_triton() and any(map(shutil.which, compilers)) else "Triton and a C compiler"
    if device.type != "cpu":
        return ""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception:  # its type depends on what is wrong with the compiler
        return "a C++ compiler (g++, or what CXX names)"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return "" if header.exists() else f"Python's headers ({header})"
