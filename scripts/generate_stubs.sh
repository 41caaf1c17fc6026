#!/usr/bin/env bash
# Regenerate the Python stubs of proto/, with pinned tools in an environment of their own.
#
# grpcio-tools 1.71 carries the compiler of protobuf 5.29: generated code refuses an older runtime and accepts a
# newer one, and 5.29 is the oldest protobuf that a vLLM environment resolves.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.cache/stubs-venv
if [ ! -x "$venv/bin/protoc-gen-mypy" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install --quiet 'grpcio-tools==1.71.2' 'protobuf==5.29.6' 'mypy-protobuf==3.6.0' 'setuptools<81'
fi
PATH="$PWD/$venv/bin:$PATH" "$venv/bin/python" -m grpc_tools.protoc \
    --proto_path=proto --python_out=proto --grpc_python_out=proto --mypy_out=proto --mypy_grpc_out=proto \
    proto/mimo_audio_tokenizer/v1/tokenizer.proto
