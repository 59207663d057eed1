"""The messages and calls of KServe's inference protocol, version 2, that front, stages and clients use.

The messages are built from the table below when this module is imported, in their own pool. So they do not clash
with those of Triton's client in the same process, and no generated code is kept. Names and numbers of fields are those
of the public protocol: any of its clients understands them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "inference.GRPCInferenceService"
_PACKAGE, _FILE = "inference", "drumline_inference.proto"

# Message: fields as "name number type"; * repeats, @ is a map from strings, | is one of a choice.
_TENSOR = "name 1 string, datatype 2 string, shape 3 *int64"
_MODEL = "name 1 string, version 2 string"
_MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live 1 bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "ready 1 bool",
    "ModelReadyRequest": _MODEL,
    "ModelReadyResponse": "ready 1 bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": f"{_MODEL}, extensions 3 *string",
    "ModelMetadataRequest": _MODEL,
    "ModelMetadataResponse.TensorMetadata": _TENSOR,
    "ModelMetadataResponse": "name 1 string, versions 2 *string, platform 3 string,"
    "inputs 4 *ModelMetadataResponse.TensorMetadata, outputs 5 *ModelMetadataResponse.TensorMetadata",
    "InferParameter": "bool_param 1 |bool, int64_param 2 |int64, string_param 3 |string,"
    "double_param 4 |double, uint64_param 5 |uint64",
    "InferTensorContents": "bool_contents 1 *bool, int_contents 2 *int32, int64_contents 3 *int64,"
    "uint_contents 4 *uint32, uint64_contents 5 *uint64, fp32_contents 6 *float, fp64_contents 7 *double,"
    "bytes_contents 8 *bytes",
    "ModelInferRequest.InferInputTensor": f"{_TENSOR}, parameters 4 @InferParameter, contents 5 InferTensorContents",
    "ModelInferRequest.InferRequestedOutputTensor": "name 1 string, parameters 2 @InferParameter",
    "ModelInferRequest": "model_name 1 string, model_version 2 string, id 3 string, parameters 4 @InferParameter,"
    "inputs 5 *ModelInferRequest.InferInputTensor, outputs 6 *ModelInferRequest.InferRequestedOutputTensor,"
    "raw_input_contents 7 *bytes",
    "ModelInferResponse.InferOutputTensor": f"{_TENSOR}, parameters 4 @InferParameter, contents 5 InferTensorContents",
    "ModelInferResponse": "model_name 1 string, model_version 2 string, id 3 string, parameters 4 @InferParameter,"
    "outputs 5 *ModelInferResponse.InferOutputTensor, raw_output_contents 6 *bytes",
}
CALLS = ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer")

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = ("bool", "int32", "int64", "uint32", "uint64", "float", "double", "string", "bytes")


def _add_field(message: Any, text: str) -> None:
    """Add a field to a message's description; a map is its own message, with a key and a value."""
    name, number, kind = text.split()
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    mark, kind = (kind[0], kind[1:]) if kind[0] in "*@|" else ("", kind)
    if mark in ("*", "@"):
        field.label = _Field.LABEL_REPEATED
    if mark == "@":
        entry = message.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        _add_field(entry, "key 1 string")
        _add_field(entry, f"value 2 {kind}")
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_path(message)}.{entry.name}"
    elif kind in _SCALARS:
        field.type = getattr(_Field, f"TYPE_{kind.upper()}")
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    if mark == "|":
        field.oneof_index = 0


def _path(message: Any) -> str:
    """Return the whole name of a message, whose parts say which message it is inside of."""
    inside = next((name for name in _MESSAGES if name.rpartition(".")[2] == message.name), message.name)
    return f"{_PACKAGE}.{inside}"


def _described() -> Any:
    """Return the description of the protocol as a file."""
    file = descriptor_pb2.FileDescriptorProto(name=_FILE, package=_PACKAGE, syntax="proto3")
    fields: dict[str, Any] = {}
    for name in sorted(_MESSAGES, key=lambda word: word.count(".")):
        home, _, last = name.rpartition(".")
        fields[name] = (fields[home].nested_type if home else file.message_type).add(name=last)
        if "|" in _MESSAGES[name]:
            fields[name].oneof_decl.add(name="parameter_choice")
        for text in filter(None, _MESSAGES[name].split(",")):
            _add_field(fields[name], text)
    service = file.service.add(name=SERVICE.rpartition(".")[2])
    for call in CALLS:
        types = (f".{_PACKAGE}.{call}{end}" for end in ("Request", "Response"))
        service.method.add(name=call, input_type=next(types), output_type=next(types))
    return file


POOL = descriptor_pool.DescriptorPool()
POOL.Add(_described())


def message(name: str) -> Any:
    """Return the class of a message.

    >>> request = message("ModelInferRequest")(model_name="gpt", id="7")
    >>> message("ModelInferRequest").FromString(request.SerializeToString()).id
    '7'
    """
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


InferRequest = message("ModelInferRequest")
InferResponse = message("ModelInferResponse")
Contents = message("InferTensorContents")


def handler(call: str, answer: Callable[..., Any]) -> Any:
    """Return what answers a call, as gRPC wants it."""
    return grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=message(f"{call}Request").FromString,
        response_serializer=message(f"{call}Response").SerializeToString,
    )


def path_of(call: str) -> str:
    """Return the path under which gRPC finds a call.

    >>> path_of("ModelInfer")
    '/inference.GRPCInferenceService/ModelInfer'
    """
    return f"/{SERVICE}/{call}"


def stub(channel: Any, call: str) -> Callable[..., Any]:
    """Return a function that makes a call over a channel."""
    function: Callable[..., Any] = channel.unary_unary(
        path_of(call),
        request_serializer=message(f"{call}Request").SerializeToString,
        response_deserializer=message(f"{call}Response").FromString,
    )
    return function
