"""`mimo-tokenizer serve`: flags, environment variables, what it refuses, and what it logs."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import grpc
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from process_harness import COMMAND, RATE, ServerProcess, assert_one_sentence, noise, random_codes, run_command
from safetensors.torch import save_file

import mimo_tokenizer_server.server
from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_audio_tokenizer.v1 import tokenizer_pb2_grpc
from mimo_tokenizer_client import InvalidInput, TokenizerClient, TokenizerError
from mimo_tokenizer_server.cli import cli
from mimo_tokenizer_server.config import BUILT_IN_MODELS, ServeConfig
from mimo_tokenizer_server.model import checkpoint
from mimo_tokenizer_server.model.tokenizer import MiMoAudioTokenizer

SERVE = cli.commands["serve"]
FLAGS = {parameter.opts[0]: parameter for parameter in SERVE.params if isinstance(parameter, click.Option)}

# Each flag with a value that is not its default, and what it is in ServeConfig.
VALUES: dict[str, tuple[str, str, Any]] = {
    "--model": ("a/b", "model", "a/b"),
    "--revision": ("main", "revision", "main"),
    "--load-format": ("dummy", "load_format", "dummy"),
    "--seed": ("7", "seed", 7),
    "--device": ("cpu", "device", "cpu"),
    "--dtype": ("bfloat16", "dtype", "bfloat16"),
    "--quantize": ("int8", "quantize", "int8"),
    "--quantize-encoder": ("true", "quantize_encoder", True),
    "--threads": ("3", "threads", 3),
    "--address": ("unix:///run/x", "address", "unix:///run/x"),
    "--socket-mode": ("600", "socket_mode", 0o600),
    "--tls-cert": ("/x/cert.pem", "tls_cert", Path("/x/cert.pem")),
    "--tls-key": ("/x/key.pem", "tls_key", Path("/x/key.pem")),
    "--tls-client-ca": ("/x/ca.pem", "tls_client_ca", Path("/x/ca.pem")),
    "--token-file": ("/x/tokens", "token_file", Path("/x/tokens")),
    "--health-address": ("127.0.0.1:50052", "health_address", "127.0.0.1:50052"),
    "--max-connections": ("9", "max_connections", 9),
    "--max-connection-idle-seconds": ("2.5", "max_connection_idle_seconds", 2.5),
    "--max-connection-age-seconds": ("600", "max_connection_age_seconds", 600.0),
    "--max-streams-per-connection": ("8", "max_streams_per_connection", 8),
    "--max-message-mib": ("3", "max_message_bytes", 3 << 20),
    "--max-audio-seconds": ("12.5", "max_audio_seconds", 12.5),
    "--max-queued-frames": ("999", "max_queued_frames", 999),
    "--max-concurrent-calls": ("5", "max_concurrent_calls", 5),
    "--max-batch-frames": ("77", "max_batch_frames", 77),
    "--max-graph-frames": ("256", "max_graph_frames", 256),
    "--device-memory-limit": ("3GiB", "device_memory_limit", "3GiB"),
    "--batch-invariant": ("true", "batch_invariant", True),
    "--metrics-address": ("127.0.0.1:9100", "metrics_address", "127.0.0.1:9100"),
    "--trace": ("true", "trace", True),
    "--grace-seconds": ("1.5", "grace_seconds", 1.5),
    "--log-level": ("debug", "log_level", "debug"),
    "--log-format": ("json", "log_format", "json"),
}
# Without these the command has nothing to serve.
NEEDED = ("--model", "x", "--device", "cpu")
# Flags that go with others only.
TOGETHER = {
    "--quantize-encoder": ("--quantize", "int8"),
    "--tls-cert": ("--tls-key", "k"),
    "--tls-key": ("--tls-cert", "c"),
    "--tls-client-ca": ("--tls-cert", "c", "--tls-key", "k"),
}
# Those of which neither goes without the other, and the other's setting.
PAIR = {"--tls-cert": "tls_key", "--tls-key": "tls_cert"}


def given(flag: str, value: str) -> tuple[str, ...]:
    """The flag as it stands on a command line."""
    parameter = FLAGS[flag]
    return (flag,) if isinstance(parameter, click.Option) and parameter.is_flag else (flag, value)


def variable(flag: str) -> str:
    return "MIMO_AUDIO_TOKENIZER_" + flag.removeprefix("--").replace("-", "_").upper()


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Runs `serve` up to where a server would be made; returns the config, or the outcome where there is none."""
    logger = logging.getLogger("mimo_tokenizer_server")
    before = logger.handlers[:], logger.level, logger.propagate
    got: list[ServeConfig] = []

    async def serve(config: ServeConfig) -> int:
        got.append(config)
        return 0

    monkeypatch.setattr(mimo_tokenizer_server.server, "serve", serve)
    for flag in FLAGS:
        monkeypatch.delenv(variable(flag), raising=False)

    def run(*arguments: str, env: dict[str, str] | None = None) -> Any:
        got.clear()
        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # what --threads goes by, and changes
        outcome = CliRunner().invoke(cli, ["serve", *arguments], env=env)
        if got:
            assert outcome.exit_code == 0
            return got[0]
        return outcome

    yield run
    logger.handlers[:], logger.level, logger.propagate = before


# ---------------------------------------------------------------- flags and environment


def test_every_flag_and_setting_is_known_to_these_tests() -> None:
    assert VALUES.keys() == FLAGS.keys() - {"--help"}
    assert {name for _, name, _ in VALUES.values()} == {field.name for field in fields(ServeConfig)}


def test_help_shows_flags_and_their_variables() -> None:
    done = run_command("serve", "--help")
    assert done.returncode == 0
    words = done.stdout.split()
    for flag, parameter in FLAGS.items():
        assert flag in words
        if flag == "--help":
            continue
        assert parameter.help
        # The longest name is wider than its column.
        assert re.search(rf"\b{variable(flag)}\b", "".join(words)), flag
    assert "Exit status" in done.stdout


@pytest.mark.parametrize("flag", VALUES)
def test_a_variable_does_what_its_flag_does(parse: Callable[..., Any], flag: str) -> None:
    value, name, wanted = VALUES[flag]
    together = TOGETHER.get(flag, ())
    default = parse(*NEEDED) if flag in PAIR else parse(*NEEDED, *together)
    assert isinstance(default, ServeConfig)
    needed = tuple(text for text in NEEDED if flag not in ("--model", "--device"))
    if flag in ("--model", "--device"):
        needed = ("--device", "cpu") if flag == "--model" else ("--model", "x")
    by_flag = parse(*needed, *together, *given(flag, value))
    by_variable = parse(*needed, *together, env={variable(flag): value})
    assert getattr(by_flag, name) == wanted
    assert by_variable == by_flag
    for field in fields(ServeConfig):
        if field.name not in (name, "device", PAIR.get(flag)):
            assert getattr(by_flag, field.name) == getattr(default, field.name) or flag == "--model"


@pytest.mark.parametrize("flag", VALUES)
def test_a_flag_beats_its_variable(parse: Callable[..., Any], flag: str) -> None:
    value, name, wanted = VALUES[flag]
    other = {"--load-format": "safetensors", "--device": "auto", "--dtype": "float32", "--log-level": "error"}
    other |= {"--log-format": "text", "--socket-mode": "644"}
    other |= {"--batch-invariant": "false", "--quantize": "none", "--quantize-encoder": "false"}
    env = {variable(flag): other.get(flag, "1")}
    flags = {"--model": "x", "--device": "cpu"} | {flag: value}
    config = parse(*(text for pair in flags.items() for text in given(*pair)), *TOGETHER.get(flag, ()), env=env)
    assert getattr(config, name) == wanted


def test_a_built_in_config_has_no_weights() -> None:
    done = CliRunner().invoke(cli, ["serve", "--model", "tiny", "--device", "cpu"])
    assert done.exit_code == 2
    assert "tiny is a built-in config without weights; add --load-format dummy" in done.output


def test_an_empty_variable_is_none(parse: Callable[..., Any]) -> None:
    """As Compose files make them for what is not set."""
    config = parse(*NEEDED, env={variable(flag): "" for flag in VALUES if flag not in ("--model", "--device")})
    assert config == parse(*NEEDED)


def test_the_defaults_are_those_of_the_config(parse: Callable[..., Any]) -> None:
    assert parse(*NEEDED) == ServeConfig(model="x", device="cpu", threads=1)


def test_dummy_weights_are_of_the_published_size(parse: Callable[..., Any]) -> None:
    assert parse("--load-format", "dummy", "--device", "cpu").model == "published"


def test_a_real_server_takes_its_settings_from_the_environment(start: Callable[..., ServerProcess]) -> None:
    env = {
        "MODEL": "tiny",
        "LOAD_FORMAT": "dummy",
        "SEED": "3",
        "DEVICE": "cpu",
        "DTYPE": "bfloat16",
        "ADDRESS": "127.0.0.1:0",
        "MAX_AUDIO_SECONDS": "2",
        "MAX_CONCURRENT_CALLS": "7",
        "LOG_FORMAT": "json",
    }
    server = start(address="", model=(), env={f"MIMO_AUDIO_TOKENIZER_{name}": value for name, value in env.items()})
    server.ready()
    assert server.address.startswith("127.0.0.1:")
    with TokenizerClient(server.address) as client:
        info = client.info()
        assert (info.model.id, info.device.dtype, info.limits.max_audio_seconds) == ("tiny", "bfloat16", 2.0)
        codes = client.encode(noise(2), RATE)
        assert codes.shape == (20, 51)
        assert np.isfinite(client.decode(codes)).all()
    for line in server.lines:
        assert json.loads(line)["message"]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ((), ("--model",)),
        (("--model", "x", "--dtype", "int8"), ("--dtype", "float32", "bfloat16")),
        (("--model", "x", "--quantize", "int4"), ("--quantize", "none", "int8")),
        (("--model", "x", "--quantize-encoder"), ("--quantize-encoder goes with --quantize int8",)),
        (
            ("--model", "x", "--device", "cpu", "--quantize", "int8", "--dtype", "bfloat16"),
            ("--quantize: int8 is for float32 weights on cpu", "bfloat16 on cpu"),
        ),
        (("--model", "x", "--load-format", "pickle"), ("--load-format", "safetensors", "dummy")),
        (("--model", "x", "--socket-mode", "rw"), ("'rw'", "octal")),
        (("--model", "x", "--socket-mode", "1000"), ("'1000'", "octal")),
        (("--model", "x", "--socket-mode", "-1"), ("'-1'", "octal")),
        (("--model", "x", "--seed", "-1"), ("--seed",)),
        (("--model", "x", "--max-message-mib", "0"), ("--max-message-mib", "1<=x<=1024")),
        (("--model", "x", "--max-message-mib", "2048"), ("--max-message-mib", "1<=x<=1024")),
        (("--model", "x", "--max-audio-seconds", "0"), ("--max-audio-seconds",)),
        (("--model", "x", "--max-audio-seconds", "nan"), ("--max-audio-seconds",)),
        (("--model", "x", "--max-audio-seconds", "inf"), ("--max-audio-seconds",)),
        (("--model", "x", "--max-audio-seconds", "1e30"), ("--max-audio-seconds",)),
        (("--model", "x", "--max-queued-frames", "0"), ("--max-queued-frames",)),
        (("--model", "x", "--max-queued-frames", str(2**64)), ("--max-queued-frames",)),
        (("--model", "x", "--max-concurrent-calls", "0"), ("--max-concurrent-calls",)),
        (("--model", "x", "--max-concurrent-calls", str(2**32)), ("--max-concurrent-calls",)),
        (("--model", "x", "--max-batch-frames", "0"), ("--max-batch-frames",)),
        (("--model", "x", "--max-batch-frames", "many"), ("--max-batch-frames",)),
        *(
            (
                ("--model", "x", "--device-memory-limit", text),
                ("--device-memory-limit", f"{text!r} is no amount of memory", "12GiB", "50%"),
            )
            for text in ("lots", "-1GiB", "0", "0%", "101%", "12 parsecs", "GiB", "1e9", "nan", "inf")
        ),
        (("--model", "x", "--batch-invariant=maybe"), ("--batch-invariant",)),
        (("--model", "x", "--tls-cert", "c"), ("--tls-cert and --tls-key go together",)),
        (("--model", "x", "--tls-key", "k"), ("--tls-cert and --tls-key go together",)),
        (("--model", "x", "--tls-client-ca", "a"), ("--tls-client-ca goes with --tls-cert and --tls-key",)),
        (
            ("--model", "x", "--address", "unix:///x/s", "--tls-cert", "c", "--tls-key", "k"),
            ("--tls-cert is for host:port", "--socket-mode"),
        ),
        (("--model", "x", "--token-file", "/"), ("--token-file", "is a directory")),
        (("--model", "x", "--max-connections", "0"), ("--max-connections",)),
        (("--model", "x", "--max-connection-idle-seconds", "0"), ("--max-connection-idle-seconds",)),
        (("--model", "x", "--max-connection-age-seconds", "nan"), ("--max-connection-age-seconds",)),
        (("--model", "x", "--max-streams-per-connection", "0"), ("--max-streams-per-connection",)),
        (("--model", "x", "--grace-seconds", "-1"), ("--grace-seconds",)),
        (("--model", "x", "--grace-seconds", "nan"), ("--grace-seconds",)),
        (("--model", "x", "--log-level", "loud"), ("--log-level",)),
        (("--model", "x", "--device", "tpu"), ("tpu", "cpu")),
        (("--model", "x", "--device", "cuda:99"), ("cuda:99", "cpu")),
        (("--model", "x", "--device", "GPU 0"), ("GPU 0", "cpu")),
        (("--model", "x", "--device", "cuda:-1"), ("cuda:-1", "cpu")),
        (("--model", "x", "surplus"), ("surplus",)),
        (("--model", "x", "--no-such-flag"), ("--no-such-flag",)),
    ],
    ids=lambda value: " ".join(value) if value and value[0] in ("--model",) else "",
)
def test_wrong_flags_are_status_2(
    parse: Callable[..., Any], arguments: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    outcome = parse(*arguments)
    assert not isinstance(outcome, ServeConfig), outcome
    done = subprocess.CompletedProcess([], outcome.exit_code, outcome.stdout, outcome.stderr)
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.exception
    assert_one_sentence(done, *texts, status=2)


@pytest.mark.parametrize(
    "address",
    ["nowhere", "unix:", "unix://relative/path", "/tmp/s", "host:", "127.0.0.1:65536", "::1:0", "http://127.0.0.1:80"],
)
def test_addresses_that_are_none(parse: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.undo()  # the real one; it refuses the address before it makes anything
    outcome = parse(*NEEDED, "--address", address)
    done = subprocess.CompletedProcess([], outcome.exit_code, outcome.stdout, outcome.stderr)
    assert_one_sentence(done, repr(address))


def test_an_unknown_device_is_refused_by_the_real_command() -> None:
    done = run_command("serve", "--load-format", "dummy", "--model", "tiny", "--device", "cuda:77")
    assert_one_sentence(done, "cuda:77", "there are: cpu", status=2)


@pytest.mark.parametrize("text", ["twelve", "120%", "0"])
def test_a_memory_limit_that_says_nothing_is_refused_by_the_real_command(text: str) -> None:
    done = run_command(
        "serve", "--load-format", "dummy", "--model", "tiny", "--device", "cpu", "--device-memory-limit", text
    )
    assert_one_sentence(done, "--device-memory-limit", f"{text!r} is no amount of memory", "800MiB", status=2)


def test_a_memory_limit_that_leaves_nothing_is_refused(start: Callable[..., ServerProcess]) -> None:
    server = start("--log-level", "error", "--device-memory-limit", "64MiB")
    status = server.wait()
    done = subprocess.CompletedProcess([], status, "", server.log)
    assert_one_sentence(
        done, "the memory limit of 64 MiB leaves nothing to compute with", "the weights take 10 MiB", status=1
    )
    assert not server.socket.exists()


def test_a_server_with_little_memory_tells_and_keeps_its_limits(
    start: Callable[..., ServerProcess], channel: Callable[[str], grpc.Channel]
) -> None:
    """Its fixed part differs from machine to machine: ask a first one, and leave the second one 120 MiB more."""

    def info_of(server: ServerProcess) -> pb.GetInfoResponse:
        stub: Any = tokenizer_pb2_grpc.AudioTokenizerStub(channel(server.address))
        response: pb.GetInfoResponse = stub.GetInfo(pb.GetInfoRequest(), timeout=60)
        return response

    memory = info_of(start().ready()).memory
    limit = memory.weights + memory.fixed + (120 << 20)
    server = start(
        "--device-memory-limit", str(limit), "--max-batch-frames", "100", "--batch-invariant", "--log-format", "json"
    ).ready()
    (divided,) = (line for line in map(json.loads, server.lines) if line["message"] == "device memory divided")
    assert divided["limit"] == f"{limit / 2**20:,.0f} MiB"
    assert divided["max_batch_frames"] == 100
    info = info_of(server)
    assert info.device.batch_invariant
    assert info.limits.max_batch_frames == 100
    assert info.memory.limit == limit
    assert sum((info.memory.weights, info.memory.fixed, info.memory.activations, info.memory.state)) == limit
    with TokenizerClient(server.address) as client:
        short, middle = random_codes(50), random_codes(300)
        # In steps, as it is longer than a batch.
        assert client.decode(middle).shape == (300 * 960,)
        alone = client.decode(short)
        for samples in client.decode_batch([short, random_codes(30, seed=1), short])[::2]:
            np.testing.assert_array_equal(samples, alone)
        with pytest.raises(TokenizerError, match="too little free memory for this item of 40000 frames"):
            client.decode(random_codes(40_000))
        np.testing.assert_array_equal(client.decode(short), alone)


# ---------------------------------------------------------------- models


def save_checkpoint(folder: Path, seed: int) -> str:
    """Write the tiny model with random weights as a checkpoint; return the fingerprint of its weights as dummy ones."""
    folder.mkdir()
    shutil.copy(BUILT_IN_MODELS["tiny"], folder / "config.json")
    config = checkpoint_config(folder)
    model = MiMoAudioTokenizer(config, torch.device("cpu"), torch.float32)
    fingerprint = checkpoint.fill_random(model, seed, lambda: None)
    tensors = {key: tensor.clone().contiguous() for key, tensor in checkpoint._targets(model).items()}
    save_file(tensors, folder / "model.safetensors")
    return fingerprint


def checkpoint_config(folder: Path) -> Any:
    from mimo_tokenizer_server.model.config import TokenizerConfig

    return TokenizerConfig.from_file(folder / "config.json")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A checkpoint's folder; the weights are those of the shared servers."""
    save_checkpoint(tmp_path / "stored", seed=0)
    return tmp_path / "stored"


def test_a_checkpoint_is_served(start: Callable[..., ServerProcess], stored: Path, unix_server: ServerProcess) -> None:
    server = start(model=("--model", str(stored), "--device", "cpu")).ready()
    with TokenizerClient(server.address) as client, TokenizerClient(unix_server.address) as same_weights:
        info = client.info()
        assert not info.model.random_weights
        assert info.model.id == "stored"
        assert info.model.fingerprint != same_weights.info().model.fingerprint
        codes = client.encode(noise(1), RATE)
        np.testing.assert_array_equal(codes, same_weights.encode(noise(1), RATE))
        np.testing.assert_allclose(client.decode(codes), same_weights.decode(codes), rtol=0, atol=1e-5)
    assert "random weights" not in server.log


def test_a_checkpoint_with_all_kinds_of_faults(stored: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    serve = ("serve", "--device", "cpu", "--address", f"unix://{tmp_path}/s", "--model", str(stored))
    tensors = load_file(stored / "model.safetensors")
    first, second, *_ = sorted(key for key in tensors if key.endswith("weight"))
    broken = dict(tensors)
    del broken[first]
    broken[second] = broken[second][:-1].clone()
    broken["decoder.surplus.weight"] = torch.zeros(2)
    save_file(broken, stored / "model.safetensors")
    done = run_command(*serve)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    for text in (f"missing: {first}", f"wrong shape: {second}", "surplus: decoder.surplus.weight"):
        assert text in done.stderr, done.stderr

    whole = (stored / "model.safetensors").read_bytes()
    (stored / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    done = run_command(*serve)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "model.safetensors is not a readable safetensors file" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("config", "texts"),
    [
        (None, ("cannot read", "config.json")),
        ({"ln_type": "BatchNorm"}, ("ln_type", "BatchNorm")),
        ("tiny", ("model.safetensors", "neither")),
    ],
    ids=["no config", "a field", "no weights"],
)
def test_checkpoint_errors(
    start: Callable[..., ServerProcess], tmp_path: Path, config: Any, texts: tuple[str, ...]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    tiny = json.loads(BUILT_IN_MODELS["tiny"].read_text())
    if config is not None:
        content = json.dumps(tiny | config) if isinstance(config, dict) else config
        (folder / "config.json").write_text(json.dumps(tiny) if config == "tiny" else content)
    server = start("--log-level", "warning", model=("--model", str(folder), "--device", "cpu"))
    status = server.wait()
    assert_one_sentence(subprocess.CompletedProcess([], status, "", server.log), *texts)
    assert not server.socket.exists()


def test_a_model_that_is_nowhere(start: Callable[..., ServerProcess], tmp_path: Path) -> None:
    server = start("--log-level", "warning", model=("--model", str(tmp_path / "absent"), "--device", "cpu"))
    status = server.wait()
    done = subprocess.CompletedProcess([], status, "", server.log)
    assert_one_sentence(done, str(tmp_path / "absent"), "neither a folder nor a hub id")


def test_a_json_file_with_dummy_weights(start: Callable[..., ServerProcess], tmp_path: Path) -> None:
    config = json.loads(BUILT_IN_MODELS["tiny"].read_text())
    config |= {"num_quantizers": 3, "codebook_size": [16], "max_audio_seconds": 5, "made_up": 1}
    (tmp_path / "small.json").write_text(json.dumps(config))
    server = start(model=("--load-format", "dummy", "--model", str(tmp_path / "small.json"), "--device", "cpu")).ready()
    assert "fields=made_up" in server.wait_for("fields that mean nothing")
    with TokenizerClient(server.address) as client:
        info = client.info()
        assert (info.model.id, info.model.codebook_sizes) == ("small", (16, 16, 16))
        assert info.limits.max_audio_seconds == 5
        assert client.encode(noise(1), RATE).shape == (3, 26)
        with pytest.raises(InvalidInput, match=r"codebook 0 has 0\.\.15"):
            client.decode(np.full((3, 2), 16))


def test_a_torchaudio_that_does_not_load(tmp_path: Path) -> None:
    """As torchaudio's wheels are beside a PyTorch without CUDA."""
    (tmp_path / "torchaudio").mkdir()
    (tmp_path / "torchaudio" / "__init__.py").write_text(
        "raise OSError('libcudart.so.13: cannot open shared object file: No such file or directory')\n"
    )
    done = run_command(
        "serve", "--load-format", "dummy", "--model", "tiny", "--device", "cpu", env={"PYTHONPATH": str(tmp_path)}
    )
    from importlib.metadata import version

    assert_one_sentence(
        done, f"torch {version('torch')}", f"torchaudio {version('torchaudio')}", "libcudart.so.13", "pip install"
    )


# ---------------------------------------------------------------- logs


def calls_of(server: ServerProcess) -> None:
    with TokenizerClient(server.address, name="log-test/1") as client:
        codes = client.encode(noise(0.5), RATE)
        client.decode(codes)
        client.decode_vq(codes)
        with pytest.raises(InvalidInput):
            client.decode(np.full((20, 3), 999))


LINE = re.compile(r"(\S+) (DEBUG|INFO|WARNING|ERROR|CRITICAL) +(.*?)((?: \w+=(?:\"(?:[^\"\\]|\\.)*\"|[^ \"=]+))*)")
FIELD = re.compile(r" (\w+)=(\"(?:[^\"\\]|\\.)*\"|[^ \"=]+)")


def fields_of_text(line: str) -> dict[str, str]:
    found = LINE.fullmatch(line)
    assert found is not None, line
    datetime.fromisoformat(found[1])
    values = {name: json.loads(value) if value.startswith('"') else value for name, value in FIELD.findall(found[4])}
    return {"level": found[2].lower(), "message": found[3]} | values


def check_request_lines(lines: list[dict[str, Any]]) -> None:
    """One line at debug for each of the calls of `calls_of`, with everything but the sound."""
    calls = [line for line in lines if "log-test/1" in str(line.get("client"))]
    assert [line["message"] for line in calls if line["message"] != "GetInfo"] == [
        "Encode",
        "Decode",
        "DecodeVq",
        "Decode",
    ]
    assert {line["level"] for line in calls} == {"debug"}
    encode, decode, vq, bad = (line for line in calls if line["message"] != "GetInfo")
    for line in (encode, decode, vq):
        assert (line["status"], str(line["items"]), str(line["frames"])) == ("OK", "1", "13")
        assert len(line["request_id"]) == 32
        assert float(line["total_seconds"]) >= float(line["compute_seconds"]) > 0
        assert float(line["queue_seconds"]) >= 0
    assert bad["status"] == "INVALID_ARGUMENT"
    assert "row 0, frame 0 is 999" in bad["error"] or "row 2, frame 0 is 999" in bad["error"]
    assert all(len(str(line)) < 1000 for line in calls)


def test_text_logs_at_debug(start: Callable[..., ServerProcess]) -> None:
    server = start("--log-level", "debug").ready()
    calls_of(server)
    assert server.stop() == 0
    lines = [fields_of_text(line) for line in server.lines]
    check_request_lines(lines)
    serving = next(line for line in lines if line["message"] == "serving")
    assert serving["pid"] == str(server.pid)
    loaded = next(line for line in lines if line["message"] == "model loaded")
    assert {"model", "fingerprint", "device", "dtype", "load_seconds", "warm_up_seconds"} <= loaded.keys()


def test_json_logs_at_debug(start: Callable[..., ServerProcess]) -> None:
    server = start("--log-level", "debug", "--log-format", "json").ready()
    calls_of(server)
    assert server.stop() == 0
    lines = [json.loads(line) for line in server.lines]
    check_request_lines(lines)
    for line in lines:
        assert datetime.fromisoformat(line["time"].removesuffix("Z"))
        assert line["level"] in ("debug", "info", "warning")
    assert next(line for line in lines if line["message"] == "serving")["pid"] == server.pid


def test_info_logs_nothing_of_requests(shared_servers: dict[str, ServerProcess]) -> None:
    server = shared_servers["tcp"]
    before = len(server.lines)
    calls_of(server)
    with TokenizerClient(server.address) as client:
        client.decode(random_codes(2))
    assert server.lines[before:] == []


def test_the_module_runs_as_the_command_does() -> None:
    for start_of in ([str(COMMAND)], [sys.executable, "-m", "mimo_tokenizer_server"]):
        done = subprocess.run([*start_of, "--version"], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0
        assert re.fullmatch(r"mimo-tokenizer, version \d+\.\d+\.\d+\n", done.stdout)
