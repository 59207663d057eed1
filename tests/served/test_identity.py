"""What is served is one export: in every handshake, in the front's own copy, and in the files that graphs name."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import pytest
from onnx import external_data_helper

from drumline.core.errors import LaunchError, RecordError, UsageError
from drumline.serve.stage import run_stage
from drumline.serve.stages.home import ModelHome
from drumline.serve.wire import graph_files
from drumline.serve.wire.files import check_files, digest_of, hold, remove_home
from drumline.serve.wire.flow import CallStream
from drumline.serve.wire.flows import Flows
from drumline.serve.wire.flows import Home as Sent
from drumline.serve.wire.frames import EXPORT, SERVICE, Answer
from drumline.serve.wire.graph_files import external_files
from drumline.serve.wire.links import PLAIN, connect, options
from drumline.serve.wire.loops import run_to_end
from drumline.serve.wire.manifest import read_manifest
from refused import refused
from served.carried import EXPORTED, LIMIT, Code, failure, until
from served.certificates import Authority
from served.services import (
    Running,
    channel_to,
    expected,
    inferred,
    rows_of,
    serving,
    waiting_for,
    write_served,
)
from serving import first_object

OTHER = "fedcba9876543210 1"


async def _stage(export: str, begun: list[bytes], address: str = "127.0.0.1:0") -> tuple[Any, str]:
    async def answer(body: bytes, seconds: float, left: Any, home: Sent) -> Answer:
        begun.append(body)
        return Answer(body)

    server = grpc.aio.server(options=options(LIMIT))
    server.add_generic_rpc_handlers((Flows(answer, export=export, max_bytes=LIMIT).handlers(),))
    port = server.add_insecure_port(address)
    await server.start()
    return server, f"127.0.0.1:{port}"


@pytest.mark.parametrize("export", [OTHER, EXPORTED[:-1] + "2", ""])
def test_a_stage_of_another_export_gets_nothing_to_compute_and_calls_wait_for_the_right_one(export: str) -> None:
    async def run() -> None:
        wrong: list[bytes] = []
        right: list[bytes] = []
        server, address = await _stage(export, wrong)
        async with connect(address, PLAIN, LIMIT) as channel:
            flow = CallStream(channel, stage=1, export=EXPORTED, max_bytes=LIMIT)
            call = flow(b"seven", timeout=600)
            await until(lambda: "another export" in flow._waits_for)
            code, why = await failure(flow(b"late", timeout=0.01))
            assert (code, why) == (Code.DEADLINE_EXCEEDED, "stage 1: it is of another export, or another stage")
            await server.stop(None)
            server, _ = await _stage(EXPORTED, right, address)
            assert (await call).body == b"seven"
            await flow.close()
        await server.stop(None)
        assert (wrong, right) == ([], [b"seven"])

    run_to_end(run())


def test_a_caller_sends_nothing_to_a_stage_of_another_export_that_takes_any_caller() -> None:
    async def run() -> None:
        frames: list[bytes] = []

        async def answer(requests: Any, context: Any) -> None:
            await context.send_initial_metadata(((EXPORT, OTHER),))
            while (data := await context.read()) is not grpc.aio.EOF:
                frames.append(data)

        server = grpc.aio.server(options=options(LIMIT))
        flows = {"Flow": grpc.stream_stream_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, flows),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with connect(f"127.0.0.1:{port}", PLAIN, LIMIT) as channel:
            flow = CallStream(channel, stage=1, export=EXPORTED, max_bytes=LIMIT)
            call = flow(b"seven", timeout=600)
            await until(lambda: "another export" in flow._waits_for or bool(frames))
            assert frames == []
            await flow.close()
            assert (await failure(call))[0] is Code.UNAVAILABLE
        await server.stop(None)

    run_to_end(run())


def test_a_stage_computes_nothing_for_a_caller_that_names_another_export_or_none() -> None:
    async def run() -> None:
        begun: list[bytes] = []
        server, address = await _stage(EXPORTED, begun)
        async with connect(address, PLAIN, LIMIT) as channel:
            for metadata in ((), ((EXPORT, OTHER),), ((EXPORT, EXPORTED[:-1] + "0"),)):
                stream = channel.stream_stream(f"/{SERVICE}/Flow")(metadata=metadata)
                assert await stream.code() is Code.FAILED_PRECONDITION
                assert "0123456789ab, stage 1" in await stream.details()
        await server.stop(None)
        assert begun == []

    run_to_end(run())


def test_every_part_of_an_export_changes_its_identity(tmp_path: Path) -> None:
    manifest = read_manifest(write_served(tmp_path / "tanh"))
    other = read_manifest(write_served(tmp_path / "wide", width=4))
    assert manifest.digest == read_manifest(tmp_path / "tanh").digest != other.digest
    assert len({manifest.handshake(0), manifest.handshake(1), other.handshake(0)}) == 3


def test_a_stage_does_not_start_on_another_export_than_its_front_serves(tmp_path: Path) -> None:
    folder = write_served(tmp_path / "tanh")
    started = run_stage(folder, 1, "127.0.0.1:0", "", threads=1, limit=2, max_bytes=LIMIT, export="0" * 64)
    with refused(RecordError, "is another export", expected="000000000000"):
        run_to_end(asyncio.wait_for(started, 60))


def _external(folder: Path, location: str) -> None:
    """Let the weights of stage 0 be read from another file."""
    path = folder / "stage0" / "model.onnx"
    graph = onnx.load(str(path))
    external_data_helper.convert_model_to_external_data(graph, location="weights", size_threshold=0)
    onnx.save(graph, str(path))
    graph = onnx.load(str(path), load_external_data=False)
    for entry in graph.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location
    path.write_bytes(graph.SerializeToString())


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("weights", "stage0/weights"),
        ("../stage1/model.onnx", "stage1/model.onnx"),
        ("/etc/hostname", "/etc/hostname"),
        ("*/_ORT_MEM_ADDR_/*", "stage0/*/_ORT_MEM_ADDR_/*"),
    ],
)
def test_weights_from_a_file_that_the_manifest_does_not_list_are_refused(
    tmp_path: Path, location: str, name: str
) -> None:
    folder = write_served(tmp_path / "tanh")
    _external(folder, location)
    graph = "stage0/model.onnx"
    assert external_files(folder, graph) == [name]
    manifest = read_manifest(folder)
    files = manifest.stages[0].files
    assert isinstance(files, dict)
    files[graph] = digest_of(folder / graph)
    with refused(RecordError, f"reads weights from '{name}'".replace("*", r"\*"), expected="checksums"):
        check_files(folder, manifest, 0)
    if location == "weights":
        files[name] = digest_of(folder / name)
        assert check_files(folder, manifest, 0) == folder / graph


def test_the_fields_by_which_a_graph_reaches_weights_are_those_of_onnx() -> None:
    """Every field of ONNX's messages that can lead to external data is followed, and no other."""
    names = {"Attr": "AttributeProto"}
    fields: Mapping[str, Mapping[int, str]] = graph_files._FIELDS
    leads = {"StringStringEntryProto"}
    descriptors = {name: getattr(onnx, names.get(name, name)).DESCRIPTOR for name in fields}
    for _ in range(len(fields)):
        leads |= {
            descriptor.name
            for descriptor in descriptors.values()
            for field in descriptor.fields
            if field.message_type is not None and _leads(field, leads)
        }
    wanted = {
        name: {field.number: field.message_type.name for field in descriptor.fields
               if field.message_type is not None and _leads(field, leads)}
        for name, descriptor in descriptors.items()
    }  # fmt: skip
    found = {name: {at: names.get(kind, kind) for at, kind in kinds.items()} for name, kinds in fields.items()}
    assert found == wanted


def _leads(field: Any, leads: set[str]) -> bool:
    """Whether a field can lead to external data; other texts and quantization do not."""
    kind = field.message_type.name
    return field.name == "external_data" if kind == "StringStringEntryProto" else kind in leads


@pytest.mark.parametrize("damage", [b"", b"\xff" * 20, b"\x3a\x7f", b"\x0b", b"\x3a\x02\x3a\xff"])
def test_a_damaged_graph_is_refused(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(damage)
    with refused(RecordError, "is empty|is damaged", expected="a graph of ONNX"):
        external_files(tmp_path, "model.onnx")


def test_a_copy_that_there_is_no_room_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    folder = write_served(tmp_path / "tanh")
    monkeypatch.setattr("drumline.serve.wire.files.shutil.copyfileobj", full)
    with refused(UsageError, "cannot hold a copy of .*: No space left", fix="set TMPDIR"):
        hold(folder, read_manifest(folder), tmp_path / "copy")


@pytest.mark.slow
def test_a_stage_that_is_started_after_the_folder_was_replaced_serves_what_was_there_before(tmp_path: Path) -> None:
    """Once the files are overwritten where they are, once the whole folder is another one."""
    folder, other = write_served(tmp_path / "tanh"), write_served(tmp_path / "other", repeat=3)
    x = rows_of(3)
    with serving(folder) as running, channel_to(running.address) as channel:
        for replace in (_overwritten, _exchanged):
            replace(other, folder)
            process = running.processes[1]
            os.kill(process, signal.SIGKILL)
            waiting_for(partial(_is_another, running, process))
            np.testing.assert_allclose(inferred(channel, {"x": x})["y"], expected(x), atol=1e-6)
    with serving(folder) as running, channel_to(running.address) as channel:
        np.testing.assert_allclose(inferred(channel, {"x": x})["y"], expected(x, repeat=3), atol=1e-6)


def _is_another(running: Running, process: int) -> bool:
    """Whether stage 1 is another process than that, and ready."""
    return running.processes[1] != process and not running.started.stages.down


def _overwritten(source: Path, target: Path) -> None:
    for path in source.rglob("*.*"):
        (target / path.relative_to(source)).write_bytes(path.read_bytes())


def _exchanged(source: Path, target: Path) -> None:
    shutil.rmtree(target)
    shutil.copytree(source, target)


@pytest.mark.slow
def test_a_front_that_is_killed_leaves_no_folder_and_no_stage(
    tmp_path: Path, served_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, "-m", "drumline", "serve", str(served_folder), "--listen", "127.0.0.1:0", "--json"]
    certificate, key = Authority(tmp_path, "ours").sign("server")
    command += ["--metrics", "none", "--tls-cert", certificate, "--tls-key", key]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        _greet_without_tls(json.loads(first_object(process.stdout))["address"])
        (home,) = tmp_path.glob("drumline-*")
        assert (home / "export" / "manifest.json").exists()
        process.kill()
        assert process.stderr is not None  # which its stages have too: it ends when they do
        assert [json.loads(line)["event"] for line in process.stderr][-1] == "serving"  # gRPC adds nothing
        waiting_for(lambda: not list(tmp_path.glob("drumline-*")))


def _greet_without_tls(address: str) -> None:
    """Let a handshake fail, of which gRPC's core would write a line; returns once the connection is closed."""
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection, suppress(ConnectionResetError):
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while connection.recv(1000):
            pass


def test_what_a_front_and_all_its_stages_left_is_removed_by_the_next_front(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    running = ModelHome()
    killed = tmp_path / "drumline-killed"
    killed.mkdir()
    (killed / "lock").touch()
    (tmp_path / "drumline-other").mkdir()  # not that of a service
    second = ModelHome()
    assert sorted(tmp_path.iterdir()) == sorted([running.path, second.path, tmp_path / "drumline-other"])
    for home in (running, second):
        home.remove()


def test_a_folder_whose_removal_is_cut_short_keeps_the_lock_by_which_the_next_front_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*args: object, **more: object) -> None:
        raise SystemExit

    (tmp_path / "export").mkdir()
    for name in ("lock", "ledger0"):
        (tmp_path / name).touch()
    with monkeypatch.context() as patched:
        patched.setattr("drumline.serve.wire.files.shutil.rmtree", ended)
        with pytest.raises(SystemExit):
            remove_home(tmp_path)
    assert (tmp_path / "lock").exists()
    remove_home(tmp_path)
    assert not tmp_path.exists()


def test_a_stage_that_ends_by_itself_does_not_cut_short_the_removal_of_its_folder() -> None:
    """Its front was killed: the thread removes what the stage is just about to read, and the stage ends of that."""
    code = """
import threading, time
from drumline.serve import stage

def slowly(home):
    begun.set()
    time.sleep(0.2)
    print("removed", home, flush=True)

begun, stage.remove_home = threading.Event(), slowly
parent = stage._WithParent("home")
parent.start()
begun.wait()
parent.finish()
"""
    done = subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"removed home\n")


@pytest.mark.slow
def test_files_that_change_while_they_are_copied_are_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is of one export, and the graph that is copied of another."""
    folder, other = write_served(tmp_path / "tanh"), write_served(tmp_path / "other", repeat=3)

    def late(source: Path, manifest: Any, copy: Path) -> Path:
        _overwritten(other, source)
        return hold(source, manifest, copy)

    monkeypatch.setattr("drumline.serve.stages.home.hold", late)
    with refused(LaunchError, r"stage \d ended with code 2 before it was ready"), serving(folder):
        pass
