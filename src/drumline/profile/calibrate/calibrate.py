"""Calibrate a device in a given time: the host, real steps, copies and messages, then works, then real steps again.

A device is slower when it is warm, and a host when others use it. So what the host needs and the real steps are
measured at both ends; works take the time between them.
"""

from __future__ import annotations

import datetime
import gc
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from drumline.plan.calibrated.calibration import (
    CalibratedDevice,
    Calibration,
    MeasuredSize,
    MeasuredStep,
    MeasuredWork,
)
from drumline.plan.calibrated.step_tape import Work
from drumline.profile.calibrate import messages, real_steps, transfers
from drumline.profile.calibrate.cuda import dtypes_of
from drumline.profile.calibrate.recipes import CallOfWork, call_of, precise
from drumline.profile.calibrate.watches import TimeWatch, watch_of
from drumline.profile.calibrate.works import ACCELERATOR, HOST, works

SECONDS = 200.0
_PER_WORK = {"cpu": 0.01}  # seconds of measuring, by kind of device
_USUAL = 0.02
_BEFORE_WORKS = 0.5  # of the time, at most: real steps, copies and messages
_WORKS_AT_LEAST = 0.75  # of the time is over before works give way to the second look at the rest
_KEEPS = ("adamw", "muon")  # what an optimizer holds is counted instead


def calibrate(
    device: torch.device,
    *,
    seconds: float = SECONDS,
    dtypes: Sequence[str] | None = None,
    num_devices: int = 1,
    say: Callable[[str], None] = lambda text: None,
    now: Callable[[], float] = time.monotonic,
    clock: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Measure a device in about so many seconds, by `now`; `clock` times what the host does.

    What fails or does not fit is listed as missing, with the reason.
    """
    return _Run(device, seconds, list(dtypes or dtypes_of(device)), num_devices, say, now, clock).done()


@dataclass(slots=True)
class _Run:
    device: torch.device
    seconds: float
    dtypes: list[str]
    num_devices: int
    say: Callable[[str], None]
    now: Callable[[], float]
    clock: Callable[[], float]
    missing: list[str] = field(default_factory=list)
    works: dict[Work, MeasuredWork] = field(default_factory=dict)
    begun: float = 0.0
    workspace: int = 0
    watch: TimeWatch = field(init=False)

    def done(self) -> Calibration:
        """Measure everything, in order."""
        self.begun, self.watch = self.now(), watch_of(self.device, self.clock)
        self._warm_up()
        begun = self._spent()
        host = self._host()
        took = self._spent() - begun
        self.workspace = self._left_by_products()  # before captures, which leave workspaces of their own
        copies = list(self._whatever("copies", transfers.copies, self.device, self.watch, self.seconds / 4000))
        if self.num_devices > 1:
            self.say(f"messages between {self.num_devices} devices")
            copies += self._whatever(
                "messages", messages.messages, self.device.type, self.num_devices, self.seconds / 1000
            )
        begun = self._spent()
        steps = self._steps(_BEFORE_WORKS)
        took += self._spent() - begun
        self._measure_works(max(1 - took, _WORKS_AT_LEAST))
        missing = list(self.missing)
        if self._spent() < 1:
            host += self._host()
            # Their bytes count once: captures have left workspaces behind.
            steps += [replace(step, peak_bytes=0) for step in self._steps(1.0)]
            self.missing = missing  # each is there once
        self.missing += [] if self.num_devices > 1 else ["messages: one device"]
        return Calibration(
            self._described(),
            datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            round(self.now() - self.begun, 1),
            tuple(self.works.values()),
            tuple(host),
            tuple(copies),
            tuple(steps),
            tuple(self.missing),
        )

    def _spent(self) -> float:
        """Return the share of the time that is over."""
        return (self.now() - self.begun) / self.seconds

    def _warm_up(self) -> None:
        """Let an accelerator reach the clock that it keeps under load."""
        if self.device.type == "cpu":
            return
        self.say("warming up")
        until = self.now() + min(2.0, self.seconds / 50)
        call = call_of(Work("product", "bf16", (4096, 4096, 4096)), self.device).call
        while self.now() < until:
            for _ in range(20):
                call()
            torch.accelerator.synchronize(self.device)

    def _whatever(self, what: str, measure: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what a measurement yields until it fails; a failure is listed."""
        entries: list[Any] = []
        try:
            entries.extend(measure(*args))
        except (RuntimeError, NotImplementedError) as error:
            self._lacks(what, error)
        return entries

    def _lacks(self, what: str, error: Exception) -> None:
        reason = str(error).strip().split("\n")[0][:120]
        self.missing.append(f"{what}: {reason or type(error).__name__}")

    def _host(self) -> list[MeasuredSize]:
        """Measure what the host takes."""
        self.say("host: layers, losses, optimizers")
        count = 10 if self.seconds > 5 else 3
        return self._whatever("host times", real_steps.host_times, self.device, count, self.clock)

    def _steps(self, until: float) -> list[MeasuredStep]:
        """Train real models until that share of the time is over."""
        entries: list[MeasuredStep] = []
        for shape, setting in real_steps.judges(self.device, self.dtypes):
            name = f"real steps of {shape.num_layers} layers of {shape.hidden}"
            if self._spent() > until:
                self.missing.append(f"{name}: no time")
                continue
            self.say(name)
            count = 10 if self.device.type == "cpu" else 20
            entries += self._whatever(name, lambda *args: [real_steps.measured_step(*args)], shape, setting,
                                      self.device, count, self.clock)  # fmt: skip
            self._cleared()
        return entries

    def _measure_works(self, until: float) -> None:
        """Measure works, the most telling first, until that share of the time is over."""
        listed = works(HOST if self.device.type == "cpu" else ACCELERATOR, self.dtypes)
        skipped: set[tuple[str, str]] = set()
        for at, work in enumerate(listed):
            if self._spent() > until and at > 0:
                self.missing.append(f"{len(listed) - at} of {len(listed)} works: no time")
                break
            if at % 20 == 0:
                self.say(f"works: {at} of {len(listed)}, {work.kind} in {work.dtype}")
            if (work.kind, work.dtype) in skipped:
                continue
            try:
                with precise(work.dtype):
                    self.works[work] = self._measured(work)
            except torch.OutOfMemoryError:
                self._cleared()
            except (RuntimeError, NotImplementedError) as error:
                skipped.add((work.kind, work.dtype))
                self._lacks(f"{work.kind} in {work.dtype}", error)

    def _measured(self, work: Work) -> MeasuredWork:
        """Measure a work, and before it the one that its call contains besides."""
        recipe = call_of(work, self.device)
        each = min(_PER_WORK.get(self.device.type, _USUAL), self.seconds / 500)
        timed = self.watch.timed(recipe.call, each, recipe.kernels)
        seconds = timed.seconds
        if recipe.besides is not None:
            besides = self.works.get(recipe.besides) or self._measured(recipe.besides)
            self.works[recipe.besides] = besides
            seconds = max(seconds - besides.seconds, seconds / 10)
        return MeasuredWork(work, seconds, round(timed.spread, 4), self._workspace(work, recipe))

    def _workspace(self, work: Work, recipe: CallOfWork) -> int:
        """Return the bytes that a work needs beyond what it returns, where the allocator counts."""
        if self.device.type == "cpu" or work.kind.startswith(_KEEPS):
            return 0
        result = None if recipe.besides is None else call_of(recipe.besides, self.device).call()
        forward = 0
        if recipe.besides is not None:  # what it makes is there during the rest, and counted apart
            before = torch.accelerator.memory_allocated(self.device)
            result = None
            forward = before - torch.accelerator.memory_allocated(self.device)
        torch.accelerator.synchronize(self.device)
        torch.accelerator.reset_peak_memory_stats(self.device)
        before = torch.accelerator.memory_allocated(self.device)
        result = recipe.call()
        returned = torch.accelerator.memory_allocated(self.device) - before
        del result
        return max(int(torch.accelerator.max_memory_allocated(self.device)) - before - returned - forward, 0)

    def _cleared(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
            torch.accelerator.empty_cache()

    def _described(self) -> CalibratedDevice:
        device, version = self.device, platform.python_version()
        if device.type == "cpu":
            name, memory = _processor(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            return CalibratedDevice(name, "cpu", torch.get_num_threads(), memory, 0, torch.__version__, version)
        known = torch.get_device_module(device).get_device_properties(device)
        processors = int(getattr(known, "multi_processor_count", 1))
        return CalibratedDevice(
            str(known.name), device.type, processors, int(known.total_memory), self.workspace,
            torch.__version__, version,
        )  # fmt: skip

    def _left_by_products(self) -> int:
        """Return what stays allocated when nothing is held any more: workspaces of products, and little else."""
        gc.collect()
        self._cleared()
        return 0 if self.device.type == "cpu" else int(torch.accelerator.memory_allocated(self.device))


def _processor() -> str:
    """Return the processor's name, as far as the system tells."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
