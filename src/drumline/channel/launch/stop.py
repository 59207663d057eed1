"""Requests to stop a run after its current step: by SIGTERM, by Ctrl-C, or by `launch`.

    first SIGTERM or Ctrl-C     `asked` says so; the ranks agree on a step (`Pipeline.stopping`), save, and end
    Ctrl-C after it             KeyboardInterrupt, and soon the end of the process, wherever it hangs
    SIGTERM after a Ctrl-C      the same: torchrun's agent passes a second Ctrl-C on as SIGTERM
    SIGTERM after a SIGTERM     ignored: whoever sends it ends a process that takes too long by SIGKILL
    SIGTERM, a rank is gone     the end: no step can be finished, and torchrun's agent starts again once all have ended

Signals belong to the process, so this is the one part of a run that is global.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

_INTERRUPTED, _TERMINATED = 130, 143
_SECONDS_ALIKE = 0.5  # a wrapper may pass on what the terminal has sent already
_SECONDS_TO_LEAVE = 5.0
_DEFAULTS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}


@dataclass
class _StopState:
    depth: int = 0  # open blocks of `stop_on_signals`
    cause: str = ""
    at: float = 0.0


_state = _StopState()


def ask(cause: str) -> None:
    """Ask this process to stop after its step; any thread may call it, and only the first call counts."""
    if not _state.cause:
        _state.at = time.monotonic()
        _state.cause = cause


def asked() -> str:
    """Return why this process should stop, "SIGTERM" or "Ctrl-C"; empty while it should not."""
    return _state.cause


def is_on() -> bool:
    """Whether somebody in this process looks at what was asked."""
    return _state.depth > 0


def turn_on() -> None:
    """Let this process stop when asked, for as long as it lives; its signals are somebody else's affair."""
    _state.depth += 1


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Inside, SIGTERM and the first Ctrl-C ask for a stop, and `pipe.stopping()` tells all ranks of it.

    A second Ctrl-C raises KeyboardInterrupt. Handlers of your own stay in place.

    >>> with stop_on_signals():
    ...     signal.raise_signal(signal.SIGTERM)
    ...     asked()
    'SIGTERM'
    >>> asked()
    ''
    """
    handlers: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: handler for number, handler in _DEFAULTS.items() if signal.getsignal(number) is handler}
    for number in handlers:
        signal.signal(number, heard)
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if not _state.depth:
            _state.cause = ""


def heard(number: int, _frame: FrameType | None) -> None:
    """Take a signal: ask for a stop, or, where one was asked for already, end."""
    now = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    before = asked()
    if number == signal.SIGTERM and _others_are_gone():
        _leave_soon(_TERMINATED)
        raise SystemExit(_TERMINATED)
    if not before:
        ask(now)
        if os.environ.get("RANK", "0") == "0":  # not print: the signal may have interrupted one
            os.write(2, f"\ndrumline: {now}: stopping after this step; Ctrl-C again ends it at once\n".encode())
    elif "Ctrl-C" in (before, now) and time.monotonic() - _state.at > _SECONDS_ALIKE:
        _leave_soon(_INTERRUPTED)
        raise KeyboardInterrupt


def _others_are_gone() -> bool:
    crews = sys.modules.get("drumline.engine.ranks.crew")
    return crews is not None and bool(crews.has_lost_ranks())


def _leave_soon(code: int) -> None:
    """End this process after a moment if what it does cannot be interrupted."""

    def leave() -> None:
        time.sleep(_SECONDS_TO_LEAVE)
        if is_on():
            os._exit(code)

    threading.Thread(target=leave, name="drumline-leave", daemon=True).start()
