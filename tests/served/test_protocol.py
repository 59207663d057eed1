"""The protocol is what protoc makes of inference.proto, and what Triton's client understands."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from tritonclient.grpc import service_pb2

from drumline.serve.wire.inference_descriptor import DESCRIPTORS, PROTO_SHA256
from drumline.serve.wire.protocol import CALLS, message

SCRIPT = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "protocol.py")))

REFERENCE: dict[str, Any] = dict(service_pb2.DESCRIPTOR.message_types_by_name)


def test_the_module_is_that_of_the_proto_file() -> None:
    assert SCRIPT.digest_of() == PROTO_SHA256
    assert SCRIPT.module_of(DESCRIPTORS) == SCRIPT.MODULE.read_text(encoding="utf-8")


def test_protoc_makes_the_module_of_the_proto_file() -> None:
    pytest.importorskip("grpc_tools")
    assert SCRIPT.compiled() == DESCRIPTORS


@pytest.mark.parametrize("name", sorted(f"{call}{end}" for call in CALLS for end in ("Request", "Response")))
def test_messages_have_the_fields_of_the_public_protocol(name: str) -> None:
    _compare(message(name).DESCRIPTOR, REFERENCE[name])


def _compare(ours: Any, reference: Any) -> None:
    """Compare all fields of a message, and of those inside it."""
    fields = {field.name: field for field in reference.fields}
    for field in ours.fields:
        other = fields[field.name]
        for fact in ("number", "type", "is_repeated"):
            assert getattr(field, fact) == getattr(other, fact), f"{ours.full_name}.{field.name} {fact}"
        if field.message_type is not None:
            _compare(field.message_type, other.message_type)


def test_calls_are_those_of_the_file() -> None:
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS).file
    assert [method.name for method in file.service[0].method] == list(CALLS)
