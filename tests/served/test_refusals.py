"""What serving refuses that no good service asks for, and figures that no request shows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from drumline.cli.main import main
from drumline.core.errors import DrumlineError, RecordError, UsageError
from drumline.serve.export.export import _named_cut, export
from drumline.serve.export.onnx_graph import _initializer
from drumline.serve.front.lifecycle import ServiceSettings
from drumline.serve.front.metrics import Metrics
from drumline.serve.front.pipe import Pipe, Rules
from drumline.serve.load.generator import Demand, load
from drumline.serve.stage import check_place
from drumline.serve.wire.links import Tls, listen, parts_of
from drumline.serve.wire.loops import run_to_end
from drumline.serve.wire.manifest import Tensor, read_manifest
from drumline.serve.wire.protocol import InferRequest
from drumline.serve.wire.stage_times import StageTimes
from drumline.serve.wire.tensors import Refused, read_inputs
from refused import refused, saying
from served.services import write_served

MS = 1_000_000
HERE = Path("served")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Demand(least=0), saying("--rows is 0", expected="1 or more")),
        (lambda: Demand(length=0), saying("--length is 0", expected="1 or more")),
        (lambda: Demand(below=0), saying("--integers-below is 0", expected="1 or more")),
        (lambda: Demand(least=3, most=2), saying("--rows is 3-2", expected="the smaller number first")),
        (
            lambda: run_to_end(load("a:1", concurrencies=[0])),
            saying("--concurrency is 0", expected="1 request or more"),
        ),
        (lambda: run_to_end(load("a:1", rates=[0.0])), saying("--rate is 0", expected="more than 0")),
        (lambda: run_to_end(load("a:1", seconds=0.0)), saying("--seconds is 0", expected="more than 0")),
        (lambda: ServiceSettings(HERE, threads=0), saying("--threads is 0", expected="1 or more")),
        (lambda: ServiceSettings(HERE, max_requests=0), saying("--max-requests is 0", expected="1 or more")),
        (lambda: ServiceSettings(HERE, rules=Rules(max_batch=0)), saying("--max-batch is 0", expected="1 or more")),
        (lambda: ServiceSettings(HERE, budget=0.0), saying("--budget is 0", expected="more than 0 seconds")),
        (lambda: ServiceSettings(HERE, timeout=-1.0), saying("--timeout is -1", expected="more than 0 seconds")),
        (lambda: ServiceSettings(HERE, rules=Rules(max_wait=-1.0)), saying("--max-wait is -1", expected="0 or more")),
        (lambda: ServiceSettings(HERE, rules=Rules(retries=-1)), saying("--retries is -1", expected="0 or more")),
        (lambda: ServiceSettings(HERE, drain=-0.5), saying("--drain is -0.5", expected="0 or more")),
        (lambda: ServiceSettings(HERE, hosts=("a:1",), pin=True), saying("--pin with --hosts")),
        (lambda: ServiceSettings(HERE, hosts=("a:1",), record=HERE), saying("--record with --hosts")),
        (lambda: export(None, HERE, num_stages=0), saying("--stages is 0", expected="1 or more")),  # type: ignore[arg-type]
        (lambda: export(None, HERE, num_stages=1, rows=0), saying("0 rows of length 32", expected="1 or more of each")),  # type: ignore[arg-type]
        (lambda: export(None, HERE, num_stages=1, length=0), saying("4 rows of length 0")),  # type: ignore[arg-type]
        (lambda: _named_cut(["a", "bb", "cc"], 2, ["bc"]), saying("--cuts names block 'bc'")),
        (lambda: _named_cut(["a", "bb", "cc"], 2, ["a"]), saying("--cuts names block 'a'")),
        (lambda: check_place(2, 2, ""), saying("there is no stage 2", expected="a number below 2")),
        (lambda: check_place(-1, 2, ""), saying("there is no stage -1")),
        (lambda: check_place(1, 2, "a:1"), saying("stage 1 is the last one", fix="leave out --next")),
        (lambda: Tls(authority="ca.pem").server(), saying("--tls-ca without --tls-cert")),
        (lambda: Tls(certificate="cert.pem"), saying("--tls-key is missing")),
        (lambda: Tls(key="key.pem"), saying("--tls-cert is missing")),
        (lambda: parts_of(":80", flag="--listen"), saying("--listen is ':80'", expected="HOST:PORT")),
        (lambda: parts_of("a:x", flag="--listen"), saying("--listen is 'a:x'")),
        (lambda: parts_of("a:65536", flag="--listen"), saying("--listen is 'a:65536'")),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: Callable[[], Any], said: dict[str, str]) -> None:
    with refused(UsageError, **said):
        make()


def test_least_settings_are_taken() -> None:
    assert ServiceSettings(HERE, threads=1, max_requests=1, rules=Rules(1, 0.0, 0), drain=0.0).rules.max_batch == 1
    assert parts_of("a:65535", flag="--listen") == ("a", 65535)
    assert Demand(least=2, most=2, length=1, below=1).most == 2
    assert Rules() == Rules(max_batch=64, max_wait=0.005, retries=1)


@pytest.mark.parametrize("port", [0, RuntimeError("taken"), ValueError("no address")])
def test_an_address_that_is_taken_is_named(port: Any) -> None:
    def add(_: str) -> int:
        if isinstance(port, Exception):
            raise port
        return int(port)

    with refused(UsageError, "cannot listen on a:1", fix="choose another --listen"):
        listen(SimpleNamespace(add_insecure_port=add), "a:1", Tls())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "served", "--next", "a:1"], "--next without --stage"),
        (["serve", "served", "--stage", "0", "--pin"], "--pin with --stage"),
        (["serve", "served", "--hosts", "a"], "--hosts is 'a'"),
        (["load", "grpcs://a:1"], "URL is grpcs://a:1\n  name the authority of its certificate: --tls-ca FILE"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cert.pem"
    path.write_text("hello")
    with refused(DrumlineError, r"cert.pem holds no certificate or key"):
        Tls(str(path), str(path)).server()


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["dimensions"], [], saying(r"dimensions is \[\]", expected="an object")),
        (["inputs"], [], saying(r"inputs is \[\]", expected="at least one tensor")),
        (["stages", 0, "files"], {}, saying(expected="an object with the stage's files")),
        (["stages", 0, "files"], [], saying(expected="an object with the stage's files")),
    ],
)
def test_a_damaged_manifest_is_refused_where_it_is_damaged(
    tmp_path: Path, path: list[str | int], value: object, said: dict[str, str]
) -> None:
    folder = write_served(tmp_path / "tanh")
    table = json.loads((folder / "manifest.json").read_text())
    inside = table
    for step in path[:-1]:
        inside = inside[step]
    inside[path[-1]] = value
    (folder / "manifest.json").write_text(json.dumps(table))
    with refused(RecordError, **said):
        read_manifest(folder)


def test_a_manifest_whose_rows_are_not_first_is_refused(tmp_path: Path) -> None:
    folder = write_served(tmp_path / "tanh")
    text = (folder / "manifest.json").read_text()
    table = json.loads(text)

    def turned(row: Any) -> Any:
        if isinstance(row, dict):
            return {name: [*value[1:], *value[:1]] if name == "shape" else turned(value) for name, value in row.items()}
        return [turned(value) for value in row] if isinstance(row, list) else row

    (folder / "manifest.json").write_text(json.dumps(turned(table)))
    with refused(RecordError, expected="'batch' as the first dimension of each"):
        read_manifest(folder)


def test_inputs_of_requests_fit_each_other() -> None:
    wanted = [Tensor("x", "INT32", ("batch",)), Tensor("y", "INT32", ("batch",))]

    def asked(x: list[int], y: list[int], raw: int = 0) -> Any:
        request = InferRequest()
        for name, values in (("x", x), ("y", y)):
            value = request.inputs.add(name=name, datatype="INT32", shape=[len(values)])
            value.contents.int_contents.extend(values)
        request.raw_input_contents.extend([b"abcd"] * raw)
        return request

    found = read_inputs(asked([1, 2], [3, 4]), wanted, {})
    assert found["y"].tolist() == [3, 4]
    with pytest.raises(Refused, match="'y' has batch 1 and another input 2; expected the same"):
        read_inputs(asked([1, 2], [3]), wanted, {})
    with pytest.raises(Refused, match="1 raw contents for 2 inputs; expected one for each"):
        read_inputs(asked([1, 2], [3, 4], raw=1), wanted, {})
    small = [Tensor("x", "INT8", ("batch",))]
    request = InferRequest()
    request.inputs.add(name="x", datatype="INT8", shape=[1]).contents.int_contents.extend([300])
    with pytest.raises(Refused, match="'x' has a value that INT8 cannot hold"):
        read_inputs(request, small, {})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"value_int": 7}, np.array(7, np.int64)),
        ({"value_ints": [7, 8]}, np.array([7, 8], np.int64)),
        ({"value_float": 0.5}, np.array(0.5, np.float32)),
        ({"value_floats": [0.5, 2.0]}, np.array([0.5, 2.0], np.float32)),
        ({"value": numpy_helper.from_array(np.eye(2, dtype=np.float32))}, np.eye(2, dtype=np.float32)),
    ],
)
def test_a_constant_becomes_a_weight_of_its_name_and_value(given: dict[str, Any], expected: Any) -> None:
    made = _initializer(helper.make_node("Constant", [], ["c"], **given))
    found = numpy_helper.to_array(made)
    assert made.name == "c"
    assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())


def test_stages_are_measured_in_seconds() -> None:
    metrics = Metrics(2)
    metrics.took(
        [
            StageTimes(0, 10 * MS, 13 * MS, 20 * MS, 21 * MS, 1, 1),
            StageTimes(1, 22 * MS, 27 * MS, 40 * MS, 41 * MS, 1, 1),
        ],
        rows=5,
    )

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"drumline_{name}", labels)

    assert value("stage_queue_seconds", stage="0") == pytest.approx(0.003)
    assert value("stage_queue_seconds", stage="1") == pytest.approx(0.005)
    assert value("stage_seconds_sum", stage="1") == pytest.approx(0.018)
    assert value("stage_compute_seconds_sum", stage="1") == pytest.approx(0.013)
    assert value("pipe_seconds_sum") == pytest.approx(0.030)
    assert value("microbatch_rows_sum") == 5


class _Cancelled:
    """A call that is cancelled once, and answered if somebody asks again."""

    times = 0

    def __await__(self) -> Iterator[Any]:
        self.times += 1
        if self.times == 1:
            raise asyncio.CancelledError
        return
        yield

    def cancelled(self) -> bool:
        return False


def test_a_service_that_stops_waits_for_no_answer() -> None:
    call = _Cancelled()
    microbatch: Any = SimpleNamespace(call=call, is_over=False)
    with pytest.raises(asyncio.CancelledError):
        run_to_end(Pipe._through(SimpleNamespace(), microbatch, lambda: None))  # type: ignore[arg-type]
    assert call.times == 1
