"""The clock that reads a device's events, on a device made of numbers: its work takes as long as a test says."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from drumline.runtime.clocks import EventClock
from drumline.runtime.draft import Clock, Draft, NoClock
from some import some

pytestmark = pytest.mark.torch


class Device:
    """A stream of work behind a host: `work` is queued at once and takes its time, `pause` is the host's."""

    def __init__(self) -> None:
        self.host_ns = 1_000_000
        self.free_ns = 0  # when all that was queued will be done
        self.num_events = 0
        self.num_waits = 0

    def work(self, nanoseconds: int) -> None:
        self.free_ns = max(self.free_ns, self.host_ns) + nanoseconds

    def pause(self, nanoseconds: int) -> None:
        self.host_ns += nanoseconds

    # What a stream does.
    def query(self) -> bool:
        return self.free_ns <= self.host_ns

    def synchronize(self) -> None:
        self.num_waits += not self.query()
        self.host_ns = max(self.host_ns, self.free_ns)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.passed_ns = -1
        device.num_events += 1

    def record(self, stream: Device) -> None:
        self.passed_ns = max(stream.free_ns, stream.host_ns)

    def query(self) -> bool:
        return self.passed_ns <= self.device.host_ns

    def synchronize(self) -> None:
        self.device.num_waits += not self.query()
        self.device.host_ns = max(self.device.host_ns, self.passed_ns)

    def elapsed_time(self, other: Event) -> float:
        assert self.query()
        assert other.query()
        return (other.passed_ns - self.passed_ns) / 1e6


class DeviceClock(EventClock):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def now(self) -> int:
        return self.device.host_ns


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr("torch.cuda.current_stream", lambda: made)
    monkeypatch.setattr("torch.cuda.Event", lambda **_: Event(made))
    return made


def step(clock: DeviceClock, *lengths: int) -> Draft:
    """Launch actions of these lengths, each behind a pause of the host."""
    draft = Draft(0)
    clock.begin(draft)
    for length in lengths:
        clock.device.pause(100)
        draft.starts.append(clock.start(False))
        clock.device.work(length)
        draft.ends.append(clock.mark())
    draft.end_ns = clock.now()
    return draft


def test_times_are_the_devices_and_nobody_waits_for_them(device: Device) -> None:
    clock = DeviceClock(device)
    draft = step(clock, 5_000, 7_000)
    assert not clock.settle(draft, wait=False)
    device.pause(50_000)
    assert clock.settle(draft, wait=False)
    assert device.num_waits == 0
    assert (draft.starts, draft.ends) == ([1_000_100, 1_005_100], [1_005_100, 1_012_100])
    assert draft.end_ns == 1_012_100, "the step ends when the device has done it"
    assert draft.on_device


def test_a_device_that_is_behind_is_read_by_the_time_since_it_was_not(device: Device) -> None:
    clock = DeviceClock(device)
    first = step(clock, 500_000)
    second = step(clock, 3_000)  # launched long before the device gets to it
    assert device.num_waits == 0
    assert clock.settle(second, wait=True)
    assert clock.settle(first, wait=False)
    assert first.ends == [1_500_100]
    assert (second.starts, second.ends) == ([1_500_100], [1_503_100])


def test_an_anchor_that_is_old_is_renewed_on_a_device_that_is_never_idle(device: Device) -> None:
    clock = DeviceClock(device)
    drafts = []
    for _ in range(4):
        drafts.append(step(clock, 900_000_000))
        device.pause(800_000_000)
    device.synchronize()
    assert all(some(clock.settle(draft, wait=False) for draft in drafts))
    ends = [draft.ends[0] for draft in drafts]
    assert [later - sooner for sooner, later in pairwise(ends)] == [900_000_000] * 3


def test_an_action_that_follows_directly_shares_an_event(device: Device) -> None:
    clock = DeviceClock(device)
    draft = Draft(0)
    clock.begin(draft)
    marks = [clock.start(True), clock.mark(), clock.start(True), clock.mark()]
    assert marks == [0, 1, 1, 2]


def test_events_of_steps_that_are_settled_are_used_again(device: Device) -> None:
    clock = DeviceClock(device)
    for _ in range(3):
        assert clock.settle(step(clock, 1_000, 1_000), wait=True)
    made = device.num_events
    for _ in range(20):
        assert clock.settle(step(clock, 1_000, 1_000), wait=True)
    # One a step is new: the anchor.
    assert device.num_events == made + 20


def test_other_work_of_the_device_does_not_move_the_anchor(device: Device) -> None:
    clock = DeviceClock(device)
    first = step(clock, 1_000)
    device.work(400_000)  # an optimizer's, say, still going on when the next step begins
    device.pause(2_000)
    assert clock.settle(first, wait=False)
    second = step(clock, 3_000)
    assert clock.settle(second, wait=True)
    assert second.starts == [first.ends[0] + 400_000]


def test_a_host_settles_at_once_and_no_clock_shows_nothing() -> None:
    draft = Draft(0)
    clock: Any = Clock()
    clock.begin(draft)
    assert clock.start(True) <= clock.mark() <= clock.now()
    assert clock.settle(draft, wait=False)
    assert (NoClock().now(), NoClock().mark()) == (0, 0)
    assert Clock().number == Clock().number
