"""Functions that a user names: `package.module:function`, or `file.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from drumline.core.errors import ConfigError, nearest
from drumline.core.files import unreadable

EXPECTED = "package.module:function or file.py:function"


def parts_of(name: str) -> tuple[str, str]:
    """Return file or module, and the function's name; refuse what has not both, or names no file.

    >>> parts_of("my.models:build")
    ('my.models', 'build')
    >>> parts_of("my.models")
    Traceback (most recent call last):
    drumline.core.errors.ConfigError: 'my.models' names no function; expected package.module:function or ...
    """
    home, _, function = name.rpartition(":")
    if not home or not function.isidentifier():
        raise ConfigError(f"{name[:80]!r} names no function", expected=EXPECTED)
    if home.endswith(".py"):
        if why := unreadable(home):
            raise ConfigError(f"{home}: {why}", expected=EXPECTED)
    elif not all(part.isidentifier() for part in home.split(".")):
        raise ConfigError(f"{home[:80]!r} is neither a Python file nor a module", expected=EXPECTED)
    return home, function


def is_function(name: str) -> bool:
    """Whether a text has the form of a function's name; the file need not be there.

    >>> is_function("mine.py:make"), is_function("a.b:c"), is_function("run.toml"), is_function("C:/run.toml")
    (True, True, False, False)
    """
    home, _, function = name.rpartition(":")
    return bool(home) and function.isidentifier()


@contextmanager
def _importing(home: str) -> Iterator[None]:
    """Let imports find what stands beside a file, or in the current folder; refuse what cannot be imported."""
    folder = str(Path(home).resolve().parent) if home.endswith(".py") else str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f"{home} cannot be imported: {type(error).__name__}: {error}", fix="make sure that it can be imported alone"
        ) from error
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def function_named(name: str, around: Callable[[str], AbstractContextManager[None]] = _importing) -> Callable[..., Any]:
    """Return the function; `around` is entered while its file or module is loaded.

    >>> function_named("os.path:join")("a", "b")
    'a/b'
    """
    home, function = parts_of(name)
    with around(home):
        module = module_of_file(Path(home)) if home.endswith(".py") else importlib.import_module(home)
    value = getattr(module, function, None)
    if not callable(value):
        texts = [text for text, value in vars(module).items() if callable(value) and not text.startswith("_")]
        raise ConfigError(
            f"{home} has no function {function!r}", expected=EXPECTED, fix=nearest(function, texts) if texts else ""
        )
    new_function: Callable[..., Any] = value
    return new_function


def module_of_file(path: Path) -> ModuleType:
    """Return a Python file as a module; each file runs once, and two files of one name stay apart."""
    name = f"drumline_user_{path.stem}_{blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a path that ends in .py has a loader"
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
