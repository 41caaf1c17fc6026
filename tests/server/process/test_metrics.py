"""What a server with `--metrics-address` tells Prometheus, against what it was asked."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from process_harness import (
    RATE,
    ServerProcess,
    SlowModel,
    assert_one_sentence,
    eventually,
    noise,
    random_codes,
    run_command,
)
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families

from mimo_audio_tokenizer.v1 import tokenizer_pb2 as pb
from mimo_audio_tokenizer.v1 import tokenizer_pb2_grpc
from mimo_tokenizer_client import InvalidInput, TokenizerClient

ANY_PORT = ("--metrics-address", "127.0.0.1:0")


def metrics_url(server: ServerProcess) -> str:
    line = server.wait_for(" metrics ")
    return f"http://{line.rsplit('address=', 1)[1].strip()}/metrics"


def read(url: str, accept: str = "") -> str:
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=30) as response:
        text: str = response.read().decode()
        return text


def samples(server: ServerProcess) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """All values by name and labels, without the server's own process."""
    families = text_string_to_metric_families(read(metrics_url(server)))
    return {
        (sample.name.removeprefix("mimo_tokenizer_"), frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("mimo_tokenizer_")
    }


def value(server: ServerProcess, name: str, **labels: str) -> float:
    """One value, which is there from the start."""
    return samples(server)[name, frozenset(labels.items())]


def test_calls_and_work_are_counted(start: Callable[..., ServerProcess]) -> None:
    server = start(*ANY_PORT).ready()
    with TokenizerClient(server.address) as client:
        info = client.info()
        codes = client.encode(noise(2), RATE)
        client.decode(random_codes(40))
        client.decode_batch([random_codes(frames) for frames in (1, 2, 7)])
        client.decode_vq(random_codes(30))
        for _ in range(3):
            with pytest.raises(InvalidInput):
                client.decode(np.full((2, 5), 60_000, np.uint16))
    eventually(lambda: value(server, "requests_total", method="Decode", status="INVALID_ARGUMENT") == 3)
    assert value(server, "requests_total", method="Encode", status="OK") == 1
    assert value(server, "requests_total", method="Decode", status="OK") == 2
    assert value(server, "requests_total", method="DecodeVq", status="OK") == 1
    assert value(server, "requests_total", method="GetInfo", status="OK") >= 1
    for method, count in (("Encode", 1), ("Decode", 5), ("DecodeVq", 1)):
        assert value(server, "request_duration_seconds_count", method=method) == count
        assert 0 < value(server, "request_duration_seconds_sum", method=method) < 60
    for kind, frames, items in (("encode", codes.shape[1], 1), ("decode", 50, 4), ("decode_vq", 30, 1)):
        assert value(server, "code_frames_total", kind=kind) == frames
        assert value(server, "audio_seconds_total", kind=kind) == pytest.approx(frames / 25)
        assert value(server, "batch_frames_sum", kind=kind) == frames
        assert value(server, "batch_items_sum", kind=kind) == items
        assert value(server, "queue_seconds_count", kind=kind) == items
        batches = value(server, "batch_items_count", kind=kind)
        assert 1 <= batches <= items
        assert value(server, "compute_seconds_count", kind=kind) == batches
        assert value(server, "compute_seconds_sum", kind=kind) > 0
        assert value(server, "device_busy_seconds_total", kind=kind) > 0
    assert value(server, "queue_frames") == 0
    assert value(server, "queue_limit_frames") == info.limits.max_queued_frames
    assert value(server, "device_memory_limit_bytes") == info.memory.limit
    assert 0 < value(server, "device_memory_bytes") <= info.memory.limit
    labels = {"model": "tiny", "device": "cpu", "dtype": "float32", "quantization": "none"}
    (model,) = [dict(found) for name, found in samples(server) if name == "model_info"]
    assert model.items() >= {**labels, "fingerprint": info.model.fingerprint}.items()
    (build,) = [dict(found) for name, found in samples(server) if name == "build_info"]
    assert build == dict(info.versions)
    assert server.stop() == 0
    assert server.complaints() == []


def test_an_open_stream_and_a_long_item(start: Callable[..., ServerProcess]) -> None:
    server = start(*ANY_PORT).ready()
    with grpc.insecure_channel(server.address) as channel:
        stub = tokenizer_pb2_grpc.AudioTokenizerStub(channel)
        goes_on = socket.socketpair()

        def requests() -> object:
            yield pb.EncodeStreamRequest(
                open=pb.EncodeStreamOpen(sample_rate=RATE, channels=1, format=pb.SAMPLE_FORMAT_FLOAT32)
            )
            goes_on[0].recv(1)
            yield pb.EncodeStreamRequest(pcm=noise(40).tobytes())

        answers = stub.EncodeStream(requests(), timeout=120)
        eventually(lambda: value(server, "requests_in_progress", method="EncodeStream") == 1)
        goes_on[1].send(b"x")
        frames = sum(answer.codes.frames for answer in answers)
        for end in goes_on:
            end.close()
    assert frames == 1001
    eventually(lambda: value(server, "requests_in_progress", method="EncodeStream") == 0)
    assert value(server, "requests_total", method="EncodeStream", status="OK") == 1
    assert value(server, "code_frames_total", kind="encode") == frames
    with TokenizerClient(server.address) as client:
        client.decode(random_codes(9000))  # longer than a batch, so computed in steps
    eventually(lambda: value(server, "code_frames_total", kind="decode") == 9000)
    assert value(server, "batch_items_sum", kind="decode") == value(server, "compute_seconds_count", kind="decode") == 1
    assert server.stop() == 0


def test_readable_from_the_first_moment_to_the_last(start: Callable[..., ServerProcess], tmp_path: Path) -> None:
    model = SlowModel(tmp_path / "model")
    server = start(*ANY_PORT, model=model.flags)
    url = metrics_url(server)
    server.wait_for("listening")
    assert value(server, "ready") == value(server, "device_memory_limit_bytes") == 0
    model.arrive()
    server.ready()
    eventually(lambda: value(server, "ready") == 1)
    assert list(open_metrics(read(url, "application/openmetrics-text; version=1.0.0")))
    # Whoever asks nothing, or something else, is nobody's trouble.
    host, port = url.removeprefix("http://").removesuffix("/metrics").rsplit(":", 1)
    with socket.create_connection((host, int(port))) as silent, socket.create_connection((host, int(port))) as noisy:
        noisy.sendall(b"\x00\xff garbage\r\n\r\n")
        assert value(server, "ready") == 1
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(urllib.request.Request(url, method="BREW"), timeout=30)
        assert server.stop() == 0
        silent.sendall(b"GET")
    with pytest.raises(urllib.error.URLError):
        read(url)


def test_a_call_that_is_given_up(start: Callable[..., ServerProcess]) -> None:
    server = start(*ANY_PORT).ready()
    with grpc.insecure_channel(server.address) as channel:
        stub = tokenizer_pb2_grpc.AudioTokenizerStub(channel)
        codes = random_codes(16_000)
        item = pb.DecodeItem(codes=pb.Codes(num_quantizers=len(codes), frames=codes.shape[1], data=codes.tobytes()))
        call = stub.Decode.future(pb.DecodeRequest(items=[item]), timeout=60)
        eventually(lambda: value(server, "queue_frames") == 16_000)
        call.cancel()
        eventually(lambda: value(server, "requests_total", method="Decode", status="CANCELLED") == 1)
        eventually(lambda: value(server, "requests_in_progress", method="Decode") == value(server, "queue_frames") == 0)
    assert server.stop() == 0


def test_an_environment_for_many_processes(start: Callable[..., ServerProcess], tmp_path: Path) -> None:
    """As it may be inherited from an engine; the folder need not be there."""
    server = start(*ANY_PORT, env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "none")}).ready()
    with TokenizerClient(server.address) as client:
        client.decode_vq(random_codes(3))
    eventually(lambda: value(server, "code_frames_total", kind="decode_vq") == 3)
    assert server.stop() == 0


def test_nothing_listens_without_the_flag(shared_servers: dict[str, ServerProcess]) -> None:
    assert not any(" metrics " in line for line in shared_servers["tcp"].lines)


@pytest.mark.parametrize(
    ("address", "texts"),
    [
        ("unix:///tmp/m", ("unix:///tmp/m", "host:port")),
        ("nowhere", ("'nowhere'", "host:port")),
        ("127.0.0.1:65536", ("65536",)),
        ("192.0.2.1:9100", ("192.0.2.1:9100", "cannot listen")),
        ("taken", ("already listens",)),
    ],
)
def test_addresses_that_cannot_be_had(address: str, texts: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        if address == "taken":
            address = f"127.0.0.1:{other.getsockname()[1]}"
        flags = ("--load-format", "dummy", "--model", "tiny", "--device", "cpu", "--address", "127.0.0.1:0")
        done = run_command("serve", *flags, "--log-level", "error", "--metrics-address", address)
    assert_one_sentence(done, *texts)
