"""Write the module of the inference protocol from its .proto file, with protoc from the package grpcio-tools.

    python scripts/protocol.py

The module holds what protoc made of the file. It registers nothing in protobuf's own pool: there the messages would
clash with those of Triton's client in the same process.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

WIRE = Path(__file__).parents[1] / "src" / "drumline" / "serve" / "wire"
PROTO, MODULE = WIRE / "inference.proto", WIRE / "inference_descriptor.py"
_LINE = 64  # bytes of a line


def compiled(proto: Path = PROTO) -> bytes:
    """Return what protoc makes of a file: a FileDescriptorSet."""
    with tempfile.TemporaryDirectory() as work:
        out = Path(work, "set")
        command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={proto.parent}"]
        subprocess.run([*command, f"--descriptor_set_out={out}", proto.name], check=True)
        return out.read_bytes()


def module_of(descriptor: bytes, proto: Path = PROTO) -> str:
    """Return the source of the module."""
    lines = [f"    {descriptor[at : at + _LINE].hex()!r}" for at in range(0, len(descriptor), _LINE)]
    text = "\n".join(lines).replace("'", '"')
    return f'''"""What protoc made of inference.proto. Written by scripts/protocol.py; do not change it by hand."""

PROTO_SHA256 = "{digest_of(proto)}"
DESCRIPTORS = bytes.fromhex(
{text}
)
'''


def digest_of(proto: Path = PROTO) -> str:
    """Return the checksum by which the module knows its .proto file."""
    return hashlib.sha256(proto.read_bytes()).hexdigest()


if __name__ == "__main__":
    MODULE.write_text(module_of(compiled()), encoding="utf-8")
