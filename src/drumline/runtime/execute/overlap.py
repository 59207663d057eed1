"""Overlap two computations that exchange tokens: while one waits for its exchange, the other computes.

    forward    attention │ (1)                      │ experts │ (2)                       │ attention of the next layer
    backward             │ backward of experts      │ (3)     │ backward of attention     │ (4)

    (1) tokens to their experts   (2) outputs back   (3) gradients back to the tokens   (4) gradients to the experts

Each hands over after it has started an exchange, at two points of a layer in both directions. So the large pieces of
work interleave as drawn, and each exchange has one of them to hide behind. The forward's exchange of counts comes right
before (1) and hands nothing over: a third turn would put the pieces out of step.

The two run in two threads, one at a time. So exchanges start in an order that depends on the program alone, which is
the same on all lines, and nothing runs at the same time but the exchanges themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

_of_thread = threading.local()


class _Turns:
    """Two threads that take turns; one that has ended leaves all turns to the other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn = 0
        self._ended = [False, False]

    def begin(self, number: int) -> None:
        """Enter as one of the two, and wait for the turn."""
        _of_thread.place = (self, number)
        with self._changed:
            self._changed.wait_for(lambda: self._turn == number)

    def hand_over(self, number: int) -> None:
        """Let the other one run until it hands over in turn or ends."""
        with self._changed:
            if self._ended[1 - number]:
                return
            self._turn = 1 - number
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._turn == number)

    def end(self, number: int) -> None:
        """Leave all further turns to the other one."""
        _of_thread.place = None
        with self._changed:
            self._ended[number] = True
            self._turn = 1 - number
            self._changed.notify_all()


def hand_over() -> None:
    """Let the other computation run, if this thread runs one of two; call it while an exchange is on its way."""
    place = getattr(_of_thread, "place", None)
    if place is not None:
        turns, number = place
        turns.hand_over(number)


def _stream() -> torch.Stream | None:
    """Return the accelerator's current stream, if an accelerator is in use."""
    device = torch.accelerator.current_accelerator()
    if device is None or not getattr(torch.get_device_module(device), "is_initialized", bool)():
        return None
    return torch.accelerator.current_stream()


def run_both(here: Callable[[], Any], aside: Callable[[], Any]) -> tuple[Any, Any]:
    """Run two computations in turns, one of them in its own thread; return both results.

    >>> steps_seen = []
    >>> def counting(name):
    ...     for number in range(2):
    ...         steps_seen.append(f"{name}{number}")
    ...         hand_over()
    ...     return name
    >>> run_both(lambda: counting("a"), lambda: counting("b")), steps_seen
    (('a', 'b'), ['a0', 'b0', 'a1', 'b1'])
    """
    turns = _Turns()
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    stream = _stream()

    def run(number: int, compute: Callable[[], Any]) -> None:
        turns.begin(number)
        try:
            results[number] = compute()
        except BaseException as error:
            errors[number] = error
        finally:
            turns.end(number)

    def run_aside() -> None:
        torch.autocast_increment_nesting()  # so that casts of weights are kept when a context ends there
        if stream is not None:
            torch.accelerator.set_stream(stream)
        run(1, aside)
        torch.autocast_decrement_nesting()

    thread = threading.Thread(target=run_aside, daemon=True)
    thread.start()
    run(0, here)
    thread.join()
    for error in (errors[number] for number in sorted(errors)):
        raise error
    return results[0], results[1]
