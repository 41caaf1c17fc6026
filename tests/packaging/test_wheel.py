"""What people install: the wheel's content, and how it behaves where only a part of its extras is there."""

from __future__ import annotations

import email
import json
import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from process_harness import (
    RATE,
    SAMPLES_PER_FRAME,
    ServerProcess,
    assert_one_sentence,
    environment,
    noise,
    random_codes,
    run_command,
)

from mimo_tokenizer_client import TokenizerClient

# The oldest that may be installed: what the generated stubs ask for.
OLDEST = ("protobuf==5.29.6", "grpcio==1.71.2")

# Calls everything that the client has, and writes what it got.
CALLS = """
import asyncio, importlib.util, json, sys
import google.protobuf, grpc, numpy as np
from mimo_tokenizer_client import AsyncTokenizerClient, InvalidInput, TokenizerClient

address, source, target = sys.argv[1:]
given = np.load(source)

with TokenizerClient(address) as client:
    client.wait_until_ready(30)
    info = client.info()
    codes = client.encode(given["sound"], 24000)
    pair = client.encode_batch([given["sound"], given["sound"][:4800]], 24000, group_size=4)
    samples = client.decode(given["codes"], 2)
    features = client.decode_vq(given["codes"])
    try:
        client.decode(np.full((20, 3), 999))
    except InvalidInput as error:
        refusal = error.message, error.detail.reason, error.detail.row

async def main():
    async with AsyncTokenizerClient(address) as client:
        return await client.encode(given["sound"], 24000), await client.decode(given["codes"], 2)

again = asyncio.run(main())
assert (again[0] == codes).all() and (again[1] == samples).all()
np.savez(target, codes=codes, first=pair[0], second=pair[1], samples=samples, features=features)
absent = [name for name in ("torch", "torchaudio", "click", "soundfile") if importlib.util.find_spec(name) is None]
print(json.dumps({
    "fingerprint": info.model.fingerprint, "refusal": refusal, "absent": absent,
    "loaded": sorted(name for name in sys.modules if name.startswith("mimo_")),
    "protobuf": google.protobuf.__version__, "grpcio": grpc.__version__,
}))
"""


def run_calls(python: Path, server: ServerProcess, folder: Path) -> dict[str, Any]:
    """Run CALLS with `python`, compare what it got with this environment's client, and return what it printed."""
    sound, codes = noise(1), random_codes(25)
    np.savez(folder / "given.npz", sound=sound, codes=codes)
    done = subprocess.run(
        [python, "-I", "-W", "error", "-c", CALLS, server.address, folder / "given.npz", folder / "got.npz"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    got = np.load(folder / "got.npz")
    with TokenizerClient(server.address) as client:
        np.testing.assert_array_equal(got["codes"], client.encode(sound, RATE))
        first, second = client.encode_batch([sound, sound[:4800]], RATE, group_size=4)
        np.testing.assert_array_equal(got["first"], first)
        np.testing.assert_array_equal(got["second"], second)
        np.testing.assert_array_equal(got["samples"], client.decode(codes, 2))
        np.testing.assert_array_equal(got["features"], client.decode_vq(codes))
        printed: dict[str, Any] = json.loads(done.stdout)
        assert printed["fingerprint"] == client.info().model.fingerprint
    message, reason, row = printed["refusal"]
    assert (reason, row) == ("INVALID_VALUE", 2)
    assert "999" in message
    return printed


# ---------------------------------------------------------------- content


def test_the_wheel_has_what_it_should_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    wanted = {
        "mimo_audio_tokenizer/__init__.py",
        "mimo_audio_tokenizer/py.typed",
        "mimo_audio_tokenizer/v1/__init__.py",
        "mimo_audio_tokenizer/v1/tokenizer.proto",
        "mimo_audio_tokenizer/v1/tokenizer_pb2.py",
        "mimo_audio_tokenizer/v1/tokenizer_pb2.pyi",
        "mimo_audio_tokenizer/v1/tokenizer_pb2_grpc.py",
        "mimo_audio_tokenizer/v1/tokenizer_pb2_grpc.pyi",
        "mimo_tokenizer_client/__init__.py",
        "mimo_tokenizer_client/py.typed",
        "mimo_tokenizer_server/__main__.py",
        "mimo_tokenizer_server/cli.py",
        "mimo_tokenizer_server/configs/published.json",
        "mimo_tokenizer_server/configs/tiny.json",
        "mimo_tokenizer_server/model/tokenizer.py",
        "mimo_tokenizer_server/py.typed",
        "mimo_tokenizer_vllm_omni/__init__.py",
        "mimo_tokenizer_vllm_omni/py.typed",
    }
    assert wanted <= set(names)
    for licence in ("LICENSE", "NOTICE"):
        assert any(re.fullmatch(rf"[^/]+\.dist-info/licenses/{licence}", name) for name in names)
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    packages = ("mimo_tokenizer_client", "mimo_tokenizer_server", "mimo_tokenizer_vllm_omni")
    assert tops == {"mimo_audio_tokenizer", *packages}
    for name in names:
        assert not re.search(r"test|conftest|benchmark|__pycache__|\.pyc$|demo", name), name


def test_the_wheel_has_every_module_of_the_checkout(wheel: Path) -> None:
    root = Path(__file__).parent.parent.parent
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for top in ("proto", "client", "server"):
        for path in (root / top).rglob("*"):
            if path.suffix in (".py", ".pyi", ".json", ".proto") and "__pycache__" not in path.parts:
                assert path.relative_to(root / top).as_posix() in names


def test_the_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
        points = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    base = {
        re.split(r"[<>=!~ ;\[]", requirement)[0]
        for requirement in metadata.get_all("Requires-Dist", [])
        if "extra ==" not in requirement
    }
    assert base == {"grpcio", "protobuf", "numpy", "wrapt"}
    assert {"cli", "server"} <= set(metadata.get_all("Provides-Extra", []))
    assert "mimo-tokenizer = mimo_tokenizer_server.__main__:main" in points
    assert "[vllm_omni.general_plugins]\nmimo_audio_tokenizer = mimo_tokenizer_vllm_omni:register" in points
    assert metadata["Requires-Python"] == ">=3.10"


# ---------------------------------------------------------------- in fresh environments


def test_the_client_works_with_base_dependencies_only(
    environment_with: Callable[..., Path], server: ServerProcess, tmp_path: Path
) -> None:
    printed = run_calls(environment_with(), server, tmp_path)
    assert printed["absent"] == ["torch", "torchaudio", "click", "soundfile"]
    assert not any(name.startswith("mimo_tokenizer_server") for name in printed["loaded"])


def test_the_client_works_with_the_oldest_dependencies(
    environment_with: Callable[..., Path], server: ServerProcess, tmp_path: Path
) -> None:
    printed = run_calls(environment_with("", *OLDEST), server, tmp_path)
    assert (f"protobuf=={printed['protobuf']}", f"grpcio=={printed['grpcio']}") == OLDEST


@pytest.mark.parametrize("arguments", ["health", "info --json", "serve --load-format dummy", "--help"])
def test_the_command_says_what_it_lacks(environment_with: Callable[..., Path], arguments: str) -> None:
    command = environment_with().with_name("mimo-tokenizer")
    done = run_command(*arguments.split(), command=command)
    assert_one_sentence_of_install(done, "click", "[cli]", "[server]")


def assert_one_sentence_of_install(done: subprocess.CompletedProcess[str], *texts: str) -> None:
    """As `assert_one_sentence`, for a command that has not come to where its errors get their prefix."""
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.strip().splitlines()
    for text in (*texts, "pip install", "mimo-audio-tokenizer-service"):
        assert text in line


def test_the_command_works_without_torch(
    environment_with: Callable[..., Path], server: ServerProcess, tmp_path: Path
) -> None:
    python = environment_with("cli")
    command = python.with_name("mimo-tokenizer")
    probe = "import importlib.util; print(importlib.util.find_spec('torch'), importlib.util.find_spec('grpc_health'))"
    found = subprocess.run([python, "-I", "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "None None\n"

    done = run_command("health", "--wait", "30", "--address", server.address, command=command)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\n", "")
    done = run_command("info", "--json", "--address", server.address, command=command)
    assert json.loads(done.stdout)["model"]["id"] == "tiny"

    soundfile.write(tmp_path / "in.wav", noise(1, 44_100), 44_100)
    done = run_command(
        "roundtrip",
        tmp_path / "in.wav",
        tmp_path / "out.flac",
        "--plot",
        tmp_path / "picture.png",
        "--address",
        server.address,
        command=command,
    )
    assert done.returncode == 0, done.stderr
    assert soundfile.info(tmp_path / "out.flac").frames == RATE
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    done = run_command("encode", tmp_path / "in.wav", tmp_path / "x.npz", "--address", server.address, command=command)
    assert done.returncode == 0, done.stderr
    done = run_command("decode", tmp_path / "x.npz", tmp_path / "x.wav", "--address", server.address, command=command)
    assert done.returncode == 0, done.stderr
    assert soundfile.info(tmp_path / "x.wav").frames == 26 * SAMPLES_PER_FRAME

    for arguments in ("serve --load-format dummy --model tiny --device cpu", "serve --model x"):
        assert_one_sentence(run_command(*arguments.split(), command=command), "pip install", "[server]")
