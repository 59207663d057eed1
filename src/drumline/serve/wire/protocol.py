"""The messages and calls of KServe's inference protocol, version 2, that front, stages and clients use.

They are described in inference.proto; `inference_descriptor` is what protoc made of that. They have their own pool, so
that they do not clash with those of Triton's client in the same process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from drumline.serve.wire.inference_descriptor import DESCRIPTORS

_PACKAGE = "inference"
SERVICE = f"{_PACKAGE}.GRPCInferenceService"
CALLS = ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer")
PROTOCOL_FILES = tuple(descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS).file)
_POOL = descriptor_pool.DescriptorPool()
for _file in PROTOCOL_FILES:
    _POOL.Add(_file)


def message(name: str) -> Any:
    """Return the class of a message.

    >>> request = message("ModelInferRequest")(model_name="gpt", id="7")
    >>> message("ModelInferRequest").FromString(request.SerializeToString()).id
    '7'
    """
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


InferRequest = message("ModelInferRequest")
InferResponse = message("ModelInferResponse")
Contents = message("InferTensorContents")


def handler(call: str, answer: Callable[..., Any]) -> Any:
    """Return what answers a call, as gRPC wants it; a request that is none gets INVALID_ARGUMENT.

    `answer` returns a response or the bytes of one.
    """
    read = message(f"{call}Request").FromString

    async def answered(body: bytes, context: Any) -> Any:
        try:
            request = read(body)
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the message is no {call}Request")
        return await answer(request, context)

    def serialized(response: Any) -> bytes:
        return response if isinstance(response, bytes) else bytes(response.SerializeToString())

    return grpc.unary_unary_rpc_method_handler(answered, response_serializer=serialized)


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
