"""Descriptor files and message classes of `.proto` texts, with protoc from the package grpcio-tools."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_tools import protoc

WELL_KNOWN = str(Path(protoc.__file__).with_name("_proto"))


def descriptor_set(text: str, imports: bool = True, **others: str) -> bytes:
    """The descriptor set of a `.proto` file with ``text``; ``others`` are further files, by their names."""
    with tempfile.TemporaryDirectory() as directory:
        for name, content in {"main": text, **others}.items():
            Path(directory, f"{name}.proto").write_text(content, encoding="utf-8")
        target = Path(directory, "set")
        command = ["protoc", f"-I{directory}", f"-I{WELL_KNOWN}", f"--descriptor_set_out={target}", "main.proto"]
        assert protoc.main(command + ["--include_imports"] * imports) == 0
        return target.read_bytes()


def message_class(data: bytes, name: str) -> Any:
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(data).file:
        pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName(name))
