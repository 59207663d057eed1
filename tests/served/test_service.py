"""A service of two stages: what clients get, in order and by name, and what they are told is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from drumline.serve.wire.protocol import CALLS, SERVICE, InferRequest, message, path_of, stub
from drumline.serve.wire.tensors import read_outputs
from served.services import (
    WIDTH,
    Running,
    channel_to,
    expected,
    inferred,
    metrics_at,
    request_of,
    rows_of,
    status_of,
    together,
)
from some import some

pytestmark = pytest.mark.slow
INVALID = grpc.StatusCode.INVALID_ARGUMENT
LISTENS = "0A"  # how Linux notes a socket that waits for connections


def test_tritons_client_gets_state_metadata_and_the_right_answer(running: Running) -> None:
    with triton.InferenceServerClient(running.address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("tanh")
        told = client.get_model_metadata("tanh", as_json=True)
        assert told["inputs"] == [{"name": "x", "datatype": "FP32", "shape": ["-1", str(WIDTH)]}]
        x = rows_of(3)
        given = triton.InferInput("x", x.shape, "FP32").set_data_from_numpy(x)
        wanted = triton.InferRequestedOutput("y")
        answer = client.infer("tanh", [given], outputs=[wanted], request_id="seven")
        np.testing.assert_allclose(answer.as_numpy("y"), expected(x), atol=1e-6)
        assert answer.get_response().id == "seven"


def test_every_request_of_a_mixed_load_gets_its_own_rows(running: Running) -> None:
    def client(number: int) -> None:
        chance = np.random.default_rng(number)
        with channel_to(running.address) as channel:
            for at in range(25):
                x = rows_of(int(chance.integers(1, 9)), seed=1000 * number + at)
                right = expected(x)
                found = inferred(channel, {"x": x})["y"]
                assert np.abs(found - right).max() <= 1e-5 * np.abs(right).max()

    assert together(8, client) == []


def test_values_without_raw_bytes_are_answered_in_kind(running: Running) -> None:
    request = InferRequest(model_name="tanh")
    x = rows_of(2)
    request.inputs.add(name="x", datatype="FP32", shape=x.shape).contents.fp32_contents.extend(x.ravel().tolist())
    with channel_to(running.address) as channel:
        answer = stub(channel, "ModelInfer")(request, timeout=30)
    assert not answer.raw_output_contents
    np.testing.assert_allclose(read_outputs(answer)["y"], expected(x), atol=1e-6)


def _odd(change: str) -> Any:
    request = request_of({"x": rows_of(2)})
    value = request.inputs[0]
    if change == "name":
        value.name = "z"
    elif change == "missing":
        del request.inputs[:], request.raw_input_contents[:]
    elif change == "type":
        value.datatype = "INT64"
    elif change == "width":
        value.shape[1] = WIDTH + 1
    elif change == "dimensions":
        value.shape.append(1)
    elif change == "bytes":
        request.raw_input_contents[0] = b"\0" * 7
    elif change == "negative":
        value.shape[0] = -1
    elif change == "huge":
        value.shape[0] = 2**60
    elif change == "twice":
        request.inputs.add().CopyFrom(value)
    elif change == "contents":
        del request.raw_input_contents[:]
    elif change == "output":
        request.outputs.add(name="nothing")
    elif change == "classes":
        request.outputs.add(name="y").parameters["classification"].int64_param = 3
    elif change == "shared":
        value.parameters["shared_memory_region"].string_param = "region"
        del request.raw_input_contents[:]
    return request


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("name", "input 'z' is unknown; expected x"),
        ("missing", "input 'x' is missing"),
        ("type", "input 'x' has datatype 'INT64'; expected FP32"),
        ("width", "input 'x' has shape [2, 9]; expected [batch, 8]"),
        ("dimensions", "input 'x' has shape [2, 8, 1]"),
        ("bytes", "input 'x' has 7 bytes; expected 64"),
        ("negative", "input 'x' has batch -1 in dimension 0"),
        ("huge", "input 'x' has batch 1152921504606846976 in dimension 0"),
        ("twice", "an input is given twice"),
        ("contents", "input 'x' has 0 values; expected 16"),
        ("output", "output 'nothing' is unknown; expected y"),
        ("shared", "input 'x' is in shared memory, which is not offered"),
        ("classes", "output 'y' asks for classification, which is not offered"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_by_the_name_of_its_input(
    running: Running, change: str, named: str
) -> None:
    with channel_to(running.address) as channel:
        code, why = status_of(lambda: stub(channel, "ModelInfer")(_odd(change), timeout=30))
    assert code is INVALID
    assert named in why


def test_other_models_and_versions_are_not_found(running: Running) -> None:
    with channel_to(running.address) as channel:
        infer, about = stub(channel, "ModelInfer"), stub(channel, "ModelMetadata")
        asked = message("ModelMetadataRequest")(name="tanh", version="7")
        calls = [
            lambda: infer(request_of({"x": rows_of(1)}, model="other"), timeout=30),
            lambda: about(asked, timeout=30),
        ]
        for call in calls:
            assert status_of(call)[0] is grpc.StatusCode.NOT_FOUND
    with triton.InferenceServerClient(running.address) as client:
        asked_of = [("tanh", ""), ("tanh", "1"), ("tanh", "7"), ("other", "")]
        assert [client.is_model_ready(*pair) for pair in asked_of] == [True, True, False, False]


def test_health_reflection_and_metrics_are_served(running: Running) -> None:
    with channel_to(running.address) as channel:
        inferred(channel, {"x": rows_of(1)})
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=30)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        asked = iter([reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)])
        told = next(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked, timeout=30))
        assert b"ModelInferRequest" in told.file_descriptor_response.file_descriptor_proto[0]
    text = metrics_at(running.started.metrics_port)
    for name in some(["requests_total", "queue_requests", "bubble", "stage_seconds_bucket", "pipe_seconds_bucket"]):
        assert f"drumline_{name}" in text


def test_a_cancelled_request_and_a_passed_deadline_leave_the_service_whole(running: Running) -> None:
    with channel_to(running.address) as channel:
        call = stub(channel, "ModelInfer")
        code, _ = status_of(lambda: call(request_of({"x": rows_of(4)}), timeout=1e-6))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        begun = channel.unary_unary(f"/{SERVICE}/ModelInfer").future(
            request_of({"x": rows_of(4)}).SerializeToString(), timeout=30
        )
        begun.cancel()
        x = rows_of(2)
        np.testing.assert_allclose(inferred(channel, {"x": x})["y"], expected(x), atol=1e-6)


def test_serving_imports_no_torch_and_what_it_imports_leaves_no_files(tmp_path: Path) -> None:
    """ONNX Runtime would leave some: those of its telemetry, which is off."""
    modules = "drumline.serve.front.lifecycle, drumline.serve.stage, drumline.serve.load.generator, drumline.cli.serve"
    code = f"import sys, {modules}; assert not {{'torch', 'onnx'}} & set(sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment |= {name: str(tmp_path) for name in ("TMPDIR", "HOME", "XDG_CACHE_HOME")}
    done = subprocess.run([sys.executable, "-B", "-c", code], env=environment, check=False, timeout=120)
    assert (done.returncode, list(tmp_path.iterdir())) == (0, [])


def test_a_message_that_is_no_request_is_an_invalid_argument(running: Running) -> None:
    with channel_to(running.address) as channel:
        for call in some(list(CALLS)):
            code, why = status_of(partial(channel.unary_unary(path_of(call)), b"\xff\xff\xff", timeout=60))
            assert (code, why) == (INVALID, f"the message is no {call}Request")


def test_reflection_describes_every_service_that_it_lists(running: Running) -> None:
    asked = reflection_pb2.ServerReflectionRequest
    with channel_to(running.address) as channel:
        info = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        (listed,) = info(iter([asked(list_services="")]), timeout=60)
        names = [service.name for service in listed.list_services_response.service]
        assert len(names) == 3
        told = list(info(iter([asked(file_containing_symbol=name) for name in names]), timeout=60))
        assert [bool(each.file_descriptor_response.file_descriptor_proto) for each in told] == [True] * 3


def test_tritons_timeout_is_honoured(running: Running) -> None:
    with triton.InferenceServerClient(running.address) as client:
        x = rows_of(2)
        given = triton.InferInput("x", x.shape, "FP32").set_data_from_numpy(x)
        with pytest.raises(triton.InferenceServerException, match="DEADLINE_EXCEEDED") as caught:
            client.infer("tanh", [given], timeout=1)
        assert "no answer within 1e-06 seconds" in str(caught.value)
        np.testing.assert_allclose(
            client.infer("tanh", [given], timeout=60_000_000).as_numpy("y"), expected(x), atol=1e-6
        )
    request = request_of({"x": rows_of(2)})
    request.parameters["timeout"].string_param = "soon"
    with channel_to(running.address) as channel:
        code, why = status_of(lambda: stub(channel, "ModelInfer")(request, timeout=60))
    assert code is INVALID
    assert "expected microseconds, 1 or more" in why


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs Linux, which lists the ports of a process")
def test_stages_of_this_machine_listen_on_sockets_of_this_user_and_on_no_port(running: Running) -> None:
    assert [address.partition(":")[0] for address in running.started.stages.addresses] == ["unix", "unix"]
    assert listening(os.getpid())  # the front itself
    assert [listening(process) for process in running.processes] == [[], []]


def listening(process: int) -> list[str]:
    """Return the addresses on which a process listens for connections from any machine or user."""
    opened = set()
    for path in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            opened.add(os.readlink(path))
    tables = [Path(f"/proc/{process}/net/{name}") for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return [words[1] for words in lines if words[3] == LISTENS and f"socket:[{words[9]}]" in opened]
