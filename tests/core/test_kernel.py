"""The compiled kernel gives the bits of the Python form, and an installation without it works as well."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernel_cases
from drumline.core.costs import Costs
from drumline.core.kernel import build, library
from drumline.core.program import Program
from drumline.core.prove.violation import InvalidProgram
from drumline.core.simulate.durations import sums
from drumline.core.simulate.simulate import makespans, simulate
from kernels import compiled
from kernels import library as library_file
from matrices import examples
from programs import costs_for, programs
from refused import refused
from some import some


@pytest.fixture(scope="module")
def kernel() -> library.Kernel:
    return compiled()


@settings(max_examples=examples(200))
@given(programs(), st.data(), st.integers(0, 2**32 - 1), st.booleans())
def test_every_time_has_the_bits_of_the_python_form(
    kernel: library.Kernel, program: Program, data: st.DataObject, seed: int, spelled: bool
) -> None:
    """Jitter makes sums of which the last bit depends on their order."""
    costs = data.draw(costs_for(program))
    kernel_cases.compare(kernel, program, costs, seed, spelled)


@settings(max_examples=examples(40))
@given(st.sampled_from(kernel_cases.WRITTEN), st.integers(1, 9), st.integers(1, 30), st.integers(1, 3))
def test_recipes_write_the_same_rows_without_a_kernel(
    kernel: library.Kernel, name: str, num_ranks: int, num_microbatches: int, waves: int
) -> None:
    more = {"stages_per_rank": 2 * waves} if name == "hanayo" else {}
    kernel_cases.compare_rows(kernel, name, num_ranks=num_ranks, num_microbatches=num_microbatches, **more)


@pytest.mark.parametrize("use", [True, False], ids=["kernel", "python"])
def test_ranks_that_wait_for_each_other_are_refused(kernel: library.Kernel, use: bool) -> None:
    for text in ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "0F0,2F0,2B0,0B0\n3F0,3B0,1F0,1B0"):
        with kernel_cases.using(kernel if use else None):
            with refused(InvalidProgram, "wait for each other"):
                simulate(Program.parse(text))
            with refused(InvalidProgram, "wait for each other"):
                makespans(Program.parse(text), [Costs(), Costs(forward=2)])


def test_rows_in_any_order_run_in_steps_of_one_node_each(kernel: library.Kernel) -> None:
    """Stages lie in reverse, so that every chain halts at its first node until the one after it has run."""
    rows = "\n".join(f"{stage}F0,{stage}B0" for stage in reversed(range(40)))
    kernel_cases.compare(kernel, Program.parse(rows), Costs(comm=0.1), 3, False)


def test_the_kernel_refuses_arrays_of_another_type(kernel: library.Kernel) -> None:
    """It would read other numbers in them, or behind them."""
    bounds, need, times = np.array([[0, 2]]), np.full(4, -1, dtype=np.int32), np.zeros(3)
    kernel.starts(1, bounds, need[:2], None, times, times.copy())
    for wrong in (need.astype(np.int64)[:2], need[::2], need.astype(np.float32)[:2]):
        with pytest.raises(ctypes.ArgumentError, match="expected int32"):
            kernel.starts(1, bounds, wrong, None, times, times.copy())


def test_a_library_that_does_not_fit_counts_as_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(library.NoKernel, match="was not compiled"):
        library.loaded(tmp_path / build.file_name())
    other = tmp_path / "other.shared"
    other.write_bytes(b"\x7fELF, but of no machine")
    with pytest.raises(library.NoKernel, match="cannot be loaded"):
        library.loaded(other)
    fits = library_file()
    library.loaded(fits)
    monkeypatch.setattr(build, "digest", lambda: "of later sources")
    with pytest.raises(library.NoKernel, match="from other sources"):
        library.loaded(fits)


def test_the_digest_changes_with_every_source_and_the_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in build.sources():
        shutil.copy(path, tmp_path)
    digests = {build.digest()}
    assert build.digest(tmp_path) in digests
    for path in some(build.sources(tmp_path)):
        path.write_text(path.read_text().replace("drumline", "drumlin3", 1))
        digests.add(build.digest(tmp_path))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O1"))
    digests.add(build.digest())
    assert len(digests) == len(build.sources()) + 2 - len(
        [p for p in build.sources() if "drumline" not in p.read_text()]
    )


def test_the_file_is_named_by_its_platform() -> None:
    assert build.file_name() == f"kernel-{sys.platform}-{os.uname().machine.lower()}.shared"


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/nonexistent", "No such file"),
        ("false", "it ends with code 1"),
        ("true", "it made nothing that this Python can load"),
        ("'", "No closing quotation"),
    ],
)
def test_a_compiler_that_fails_leaves_nothing_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(build.NotBuilt, match=reason):
        build.build(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def without_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installation without a kernel, whose process has computed nothing yet."""
    monkeypatch.setattr(build, "HERE", Path("/nonexistent"))
    monkeypatch.setattr(library._Told, "nodes", 0)
    monkeypatch.setattr(library._Told, "is_told", False)
    library._installed.cache_clear()
    yield
    library._installed.cache_clear()


def test_without_a_kernel_the_same_numbers_come_and_one_line_says_that_it_is_slower(
    without_kernel: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program.parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    assert library.kernel() is None
    with caplog.at_level(logging.WARNING, "drumline"):
        timeline = simulate(program, Costs(comm=0.5))
        assert (timeline.makespan, timeline.start, timeline.tracks[1].starts) == (10.0, 0.0, [1.5, 2.5, 4.5, 5.5])
        assert makespans(program, [Costs(), Costs(forward=2)]).tolist() == [9.0, 12.0]
        assert caplog.records == []  # for so little, nobody needs to know
        monkeypatch.setattr(library, "_WORTH_TELLING", 10)
        for _ in range(3):
            simulate(program)
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith(f"simulations run in Python, with the same results but slower: {build.file_name()} was not")
    assert said.endswith("to compile it, run: python -m drumline.core.kernel.build")


SANITIZED = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.mark.slow
def test_sanitizers_find_nothing_in_the_kernel() -> None:
    """Addresses and undefined behaviour, in a process of its own that loads the sanitizers first."""
    path = library_file(*SANITIZED)
    names = ("libasan.so", "libubsan.so")
    found = [subprocess.run(["cc", f"-print-file-name={n}"], capture_output=True, text=True, check=True) for n in names]
    env = os.environ | {
        "LD_PRELOAD": " ".join(each.stdout.strip() for each in found),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own would be found
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONMALLOC": "malloc",  # so that what Python frees is known to be gone
    }
    command = [sys.executable, kernel_cases.__file__, str(path), "too short"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    said = ["compared 30 programs and 12 searches", "an array is too short"]
    assert done.stdout.splitlines() == said, done.stderr
    assert "ERROR: AddressSanitizer" in done.stderr  # it was there
    assert done.returncode != 0


@settings(max_examples=examples(200))
@given(st.lists(st.lists(st.floats(-1e100, 1e100) | st.sampled_from([1e16, 1.0, -1e16, 2**-53, 1e-300])), min_size=1))
def test_sums_are_rounded_once(kernel: library.Kernel, groups: list[list[float]]) -> None:
    values = np.array([value for group in groups for value in group], dtype=np.float64)
    with kernel_cases.using(kernel):
        found = sums(values, [len(group) for group in groups])
    assert [struct.pack("d", total) for total in found] == [struct.pack("d", math.fsum(group)) for group in groups]


def test_the_time_of_many_samples_does_not_depend_on_how_many_there_are(kernel: library.Kernel) -> None:
    """The kernel takes eight side by side; the last ones are fewer."""
    program = Program.parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    factors = np.random.default_rng(1).uniform(0.5, 2.0, (19, program.num_actions))
    for use in (kernel, None):
        with kernel_cases.using(use):
            each = [makespans(program, Costs(comm=0.1), factors=factors[:n])[-1] for n in range(1, 20)]
            assert each == makespans(program, Costs(comm=0.1), factors=factors).tolist()
            assert each == [simulate(program, Costs(comm=0.1), factors=row).makespan for row in factors]
