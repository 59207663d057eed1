"""Rotation: whole checkpoints of a run's line stay, and a resume finds the newest, whatever was damaged or left."""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from drumline.core.errors import DrumlineError, RecordError, UsageError
from drumline.pipeline.pipeline import Pipeline
from matrices import ALL, examples
from refused import refused
from rotation import flip, live, lose, lose_manifest, shorten, small_pipeline
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.features("saving")]


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda number: None)


def test_a_whole_checkpoint_of_the_line_always_remains_and_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "drumline")
    memory, reader = Path("/dev/shm"), small_pipeline()
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as home:  # many small files
        lives = [live(Path(home, str(seed)), seed, reader) for seed in range(600 if ALL else examples(8))]
    assert sum(life.crashes for life in lives) > len(lives)


def saved(pipe: Pipeline, folder: Path, *steps: int, keep: int | None = None) -> Path:
    for step in steps:
        path = pipe.save(folder, step=step, extra={"step": step}, keep=keep, wait=True).path
        assert path.is_dir()
    return path


def names(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


@pytest.mark.parametrize("damage", [flip, shorten, lose, lose_manifest])
def test_damaged_checkpoints_do_not_push_out_whole_ones(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    saved(small_pipeline(), tmp_path, 2, 4, 6, 8)
    for step in (6, 8):
        damage(tmp_path / f"step-{step:08d}")
    again = small_pipeline()
    assert again.load(tmp_path).step == 4
    assert saved(again, tmp_path, 5, keep=2).name == "step-00000005"
    assert names(tmp_path) == [4, 5]
    assert small_pipeline().load(tmp_path).step == 5


@pytest.mark.parametrize("damage", [shorten, lose_manifest])
def test_what_is_damaged_while_a_run_goes_on_counts_no_more(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    pipe = small_pipeline()
    damage(saved(pipe, tmp_path, 2, 4))
    saved(pipe, tmp_path, 6, keep=2)
    assert names(tmp_path) == [2, 6]


def test_later_steps_of_a_line_that_was_left_are_not_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = small_pipeline()
    saved(pipe, tmp_path, 2, 4, 6, 8)
    pipe.load(tmp_path / "step-00000004")
    saved(pipe, tmp_path, 5, keep=4)
    assert names(tmp_path) == [2, 4, 5, 6, 8], "fewer than four are whole on this line: the others stay"
    assert small_pipeline().load(tmp_path).step == 5
    assert "step-00000008 has a later step, on a line that was left" in caplog.text
    lose_manifest(tmp_path / "step-00000005")
    assert small_pipeline().load(tmp_path).step == 4, "the line is known without the newest manifest"
    for step in (2, 4):
        flip(tmp_path / f"step-{step:08d}")
    with refused(RecordError, "no checkpoint that is whole", fix="step-00000008 is whole"):
        small_pipeline().load(tmp_path)
    back = small_pipeline()
    assert back.load(tmp_path / "step-00000008").step == 8
    saved(back, tmp_path, 9, keep=2)
    assert names(tmp_path) == [8, 9]
    assert small_pipeline().load(tmp_path).step == 9


def test_an_earlier_step_without_a_load_leaves_the_later_ones(tmp_path: Path) -> None:
    pipe = small_pipeline()
    saved(pipe, tmp_path, 2, 4, 6)
    saved(pipe, tmp_path, 3, keep=2)
    assert names(tmp_path) == [2, 3]
    assert small_pipeline().load(tmp_path).step == 3


def test_folders_may_count_steps_each_in_its_own_way(tmp_path: Path) -> None:
    pipe = small_pipeline()
    for epoch in (1, 2, 3, 4):
        saved(pipe, tmp_path / "hourly", 100 * epoch, keep=2)
        saved(pipe, tmp_path / "best", epoch, keep=2)
    assert (names(tmp_path / "hourly"), names(tmp_path / "best")) == ([300, 400], [3, 4])
    again = small_pipeline()
    assert again.load(tmp_path / "hourly").step == 400
    saved(again, tmp_path / "hourly", 500, keep=2)
    saved(again, tmp_path / "best", 5, keep=2)
    assert (names(tmp_path / "hourly"), names(tmp_path / "best")) == ([400, 500], [4, 5])
    flip(tmp_path / "hourly" / "step-00000500")
    assert small_pipeline().load(tmp_path / "hourly").step == 400


def test_checkpoints_of_other_runs_neither_count_nor_go(tmp_path: Path) -> None:
    saved(small_pipeline(), tmp_path, 7, 9)
    saved(small_pipeline(), tmp_path, 1, 2, 3, keep=1)
    assert names(tmp_path) == [3, 7, 9]
    assert small_pipeline().load(tmp_path).step == 3


def edited(checkpoint: Path, content: Any) -> None:
    """Let a manifest say something else, with a checksum that is right."""
    path = checkpoint / "manifest.json"
    given = json.loads(path.read_text())
    crc = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    path.write_text(json.dumps({**given, "crc32": crc, "content": content}))


def test_checkpoints_of_earlier_versions_load_and_rotate(tmp_path: Path) -> None:
    saved(small_pipeline(), tmp_path, 2, 4, 6)
    for path in some(list(tmp_path.glob("step-*"))):
        content = json.loads((path / "manifest.json").read_text())["content"]
        edited(path, without(content, ("line",), ...))
    flip(tmp_path / "step-00000006")
    again = small_pipeline()
    assert again.load(tmp_path).step == 4
    saved(again, tmp_path, 5, keep=2)
    assert names(tmp_path) == [4, 5]
    assert small_pipeline().load(tmp_path).step == 5


def test_a_manifest_that_another_version_wrote_is_left_alone(tmp_path: Path) -> None:
    pipe = small_pipeline()
    path = saved(pipe, tmp_path, 1) / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    saved(pipe, tmp_path, 2, 3, keep=1)
    assert names(tmp_path) == [1, 3]


def parts(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield (*at, key)
            yield from parts(value[key], (*at, key))


def without(content: Any, at: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(content)
    home = changed
    for key in at[:-1]:
        home = home[key]
    if value is ...:
        del home[at[-1]]
    else:
        home[at[-1]] = value
    return changed


def test_a_manifest_is_refused_whatever_part_of_it_is_wrong(tmp_path: Path) -> None:
    pipe = small_pipeline()
    path = saved(pipe, tmp_path, 3)
    good = json.loads((path / "manifest.json").read_text())["content"]
    required = ["step", "number", "num_trained", "files", "tensors", "optimizers", "generators", "num_processes"]
    for name in some([*required, "token", "extra"]):
        edited(path, without(good, (name,), ...))
        with refused(RecordError, fix=rf"manifest\.json: .*'{name}' is missing"):
            pipe.load(path)
    wrong: list[tuple[str, Any]] = [
        ("step", -3),
        ("step", True),
        ("files", []),
        ("optimizers", {}),
        ("num_processes", 0),
    ]
    for name, value in some(wrong):
        edited(path, without(good, (name,), value))
        with refused(RecordError, fix=rf"manifest\.json: .*{name} is "):
            pipe.load(path)
    values: list[Any] = [..., None, -3, 1.5, "x", [], {"a": None}, 2**70]
    for at, key in enumerate(some(list(parts(good)))):
        for value in values if ALL else [values[at % len(values)], values[at // 3 % len(values)]]:
            edited(path, without(good, key, value))
            try:
                small = pipe.load(path)
            except DrumlineError:
                continue
            assert small.step >= 0
    for text in some(["[]", "{", "null", '{"format": "drumline-checkpoint", "version": 1, "content": 3}']):
        (path / "manifest.json").write_text(text)
        with refused(RecordError, fix="manifest"):
            pipe.load(tmp_path)


def test_numbers_of_extra_come_back_whatever_they_are(tmp_path: Path) -> None:
    pipe, extra = small_pipeline(), {"best": float("inf"), "state": 2**127 + 1}
    pipe.save(tmp_path, extra=extra, wait=True)
    assert pipe.load(tmp_path).extra == extra
    odd: list[Any] = [-1, True, 1.5]
    for step in some(odd):
        with refused(RecordError, "step is", expected="a whole number of 0 or more"):
            pipe.save(tmp_path, step=step)


def test_further_files_stand_in_every_checkpoint_and_may_be_changed(tmp_path: Path) -> None:
    pipe = small_pipeline()
    (tmp_path / "source.txt").write_text("copied")
    files: dict[str, Any] = {"a.json": "{}", "inner/b.bin": b"\0", "c.txt": tmp_path / "source.txt"}
    path = pipe.save(tmp_path / "saved", files=files, wait=True).path
    assert [(path / file).read_bytes() for file in files] == [b"{}", b"\0", b"copied"]
    (path / "a.json").write_text('{"changed": true}')
    assert pipe.load(tmp_path / "saved").step == 0
    for name in some(["../out", "/abs", "manifest.json", "model-00001-of-00001.safetensors", ""]):
        with refused(UsageError, "files has"):
            pipe.save(tmp_path / "saved", files={name: "x"})


def test_a_folder_that_cannot_be_removed_does_not_fail_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = small_pipeline()
    saved(pipe, tmp_path, 1)
    rename = os.rename

    def denied(source: Any, target: Any) -> None:
        if str(target).endswith(".gone.old"):
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", denied)
    saved(pipe, tmp_path, 2, keep=1)
    assert "cannot be removed: Permission denied" in caplog.text
    monkeypatch.undo()
    saved(pipe, tmp_path, 3, keep=1)
    assert names(tmp_path) == [3]
    shutil.rmtree(tmp_path)
