"""The generated code in proto/ says what the .proto says."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from mimo_audio_tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc

NAME = "mimo_audio_tokenizer/v1/tokenizer.proto"
PROTO = Path(__file__).parent.parent.parent / "proto"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> descriptor_pb2.FileDescriptorProto:
    """The .proto, compiled now."""
    target = tmp_path_factory.mktemp("proto") / "set"
    well_known = resources.files("grpc_tools") / "_proto"
    arguments = ["", f"--proto_path={PROTO}", f"--proto_path={well_known}", f"--descriptor_set_out={target}", NAME]
    assert protoc.main(arguments) == 0
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file
    return without_json_names(file)


def without_json_names(file: descriptor_pb2.FileDescriptorProto) -> descriptor_pb2.FileDescriptorProto:
    """Clear what some versions of the compiler fill in and others leave to the reader."""
    for message in messages_of(file.message_type):
        for field in message.field:
            field.ClearField("json_name")
    return file


def messages_of(messages: Any) -> Iterator[Any]:
    for message in messages:
        yield message
        yield from messages_of(message.nested_type)


def test_the_messages_are_those_of_the_proto(compiled: descriptor_pb2.FileDescriptorProto) -> None:
    generated = descriptor_pb2.FileDescriptorProto.FromString(tokenizer_pb2.DESCRIPTOR.serialized_pb)
    assert without_json_names(generated) == compiled, "run scripts/generate_stubs.sh"


def test_the_comparison_notices_a_change(compiled: descriptor_pb2.FileDescriptorProto) -> None:
    changed = descriptor_pb2.FileDescriptorProto()
    changed.CopyFrom(compiled)
    changed.message_type[0].field[0].number += 100
    assert changed != compiled


def test_the_stub_and_the_servicer_have_the_methods(compiled: descriptor_pb2.FileDescriptorProto) -> None:
    (service,) = compiled.service
    full_name = f"{compiled.package}.{service.name}"
    called: dict[str, tuple[str, Any, Any]] = {}

    def kind(name: str) -> Any:
        def method(path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> None:
            called[path] = name, request_serializer, response_deserializer

        return method

    kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    stub = tokenizer_pb2_grpc.AudioTokenizerStub(SimpleNamespace(**{name: kind(name) for name in kinds}))
    handlers: dict[str, Any] = {}
    server = SimpleNamespace(
        add_generic_rpc_handlers=lambda given: None,
        add_registered_method_handlers=lambda name, given: handlers.update({name: given}),
    )
    servicer = tokenizer_pb2_grpc.AudioTokenizerServicer()
    tokenizer_pb2_grpc.add_AudioTokenizerServicer_to_server(servicer, server)

    assert called.keys() == {f"/{full_name}/{method.name}" for method in service.method}
    assert handlers.keys() == {full_name}
    assert handlers[full_name].keys() == {method.name for method in service.method}
    own = {name for name, _ in inspect.getmembers(tokenizer_pb2_grpc.AudioTokenizerServicer, inspect.isfunction)}
    assert own == {method.name for method in service.method}
    for method in service.method:
        assert hasattr(stub, method.name)
        name, serialize, deserialize = called[f"/{full_name}/{method.name}"]
        sides = ("stream" if method.client_streaming else "unary", "stream" if method.server_streaming else "unary")
        assert name == "_".join(sides)
        request = getattr(tokenizer_pb2, method.input_type.rpartition(".")[2])
        response = getattr(tokenizer_pb2, method.output_type.rpartition(".")[2])
        assert serialize(request()) == b""
        assert type(deserialize(b"")) is response
        handler = handlers[full_name][method.name]
        assert (handler.request_streaming, handler.response_streaming) == (
            method.client_streaming,
            method.server_streaming,
        )
        assert type(handler.request_deserializer(b"")) is request


def names_in(body: list[ast.stmt]) -> dict[str, dict[str, Any]]:
    """Classes by name, each with its own, and the plain names as keys with nothing in them."""
    names: dict[str, dict[str, Any]] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = names_in(node.body)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = {}
        elif isinstance(node, ast.FunctionDef):
            names[node.name] = {}
    return names


def test_the_types_have_all_messages_fields_and_methods(compiled: descriptor_pb2.FileDescriptorProto) -> None:
    types = PROTO / NAME.replace(".proto", "_pb2.pyi")
    names = names_in(ast.parse(types.read_text()).body)

    def check(messages: Any, enums: Any, there: dict[str, Any]) -> None:
        for enum in enums:
            assert {value.name for value in enum.value} <= there.keys()
            assert enum.name in there
        for message in messages:
            if message.options.map_entry:
                continue
            own = there[message.name]
            assert {field.name for field in message.field} <= own.keys(), message.name
            numbers = {name for name in own if name.endswith("_FIELD_NUMBER")}
            assert numbers == {f"{field.name.upper()}_FIELD_NUMBER" for field in message.field}
            check(message.nested_type, message.enum_type, own)

    check(compiled.message_type, compiled.enum_type, names)
    methods = names_in(ast.parse((PROTO / NAME.replace(".proto", "_pb2_grpc.pyi")).read_text()).body)
    for cls in ("AudioTokenizerStub", "AudioTokenizerServicer"):
        assert {method.name for method in compiled.service[0].method} <= methods[cls].keys()
