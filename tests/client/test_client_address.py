"""Where a client looks for the service, and what it cannot be given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mimo_tokenizer_client import AsyncTokenizerClient, InvalidInput, TokenizerClient

# Of the fixtures that make something.
Factory = Callable[..., Any]

VARIABLE = "MIMO_AUDIO_TOKENIZER_ADDRESS"


@pytest.mark.parametrize(
    "address",
    [
        "unix:///run/x.sock",
        "unix:/run/x.sock",
        "unix:x.sock",
        "localhost:50051",
        "127.0.0.1:1",
        "[::1]:65535",
        "a-b.c:80",
    ],
)
def test_addresses(address: str) -> None:
    with TokenizerClient(address) as client:
        assert client.address == address


def test_a_port_alone_is_this_machine() -> None:
    with TokenizerClient(":50051") as client:
        assert client.address == "127.0.0.1:50051"


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("", "neither unix:///path nor host:port"),
        ("localhost", "neither unix:///path nor host:port"),
        (":0", "port outside 1..65535"),
        (50051, "not text such as unix:///path or host:port"),
        ("localhost:", "neither unix:///path nor host:port"),
        ("http://localhost:50051", "neither unix:///path nor host:port"),
        ("::1:50051", "neither unix:///path nor host:port"),
        ("localhost:0", "port outside 1..65535"),
        ("localhost:70000", "port outside 1..65535"),
        ("/run/x.sock", "then write unix:///run/x.sock"),
        ("unix:", "has no path"),
        ("unix://x.sock", "needs an absolute path"),
        ("unix:///" + 107 * "x", "longer than the 107 bytes that a socket's path may have"),
    ],
)
@pytest.mark.parametrize("kind", [TokenizerClient, AsyncTokenizerClient])
def test_what_is_no_address(kind: Any, address: Any, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        kind(address)


def test_the_environment(monkeypatch: pytest.MonkeyPatch, serve: Factory) -> None:
    server = serve()
    monkeypatch.setenv(VARIABLE, server.address)
    with TokenizerClient() as client:
        assert client.info().model.id == "fake"
    monkeypatch.setenv(VARIABLE, "nonsense")
    with pytest.raises(InvalidInput, match=f"the address in {VARIABLE} 'nonsense'"):
        TokenizerClient()
    for empty in (lambda: monkeypatch.setenv(VARIABLE, ""), lambda: monkeypatch.delenv(VARIABLE)):
        empty()
        with pytest.raises(InvalidInput, match=f"no address of a tokenizer service: .*{VARIABLE}"):
            TokenizerClient()


def test_a_proxy_is_not_the_way_to_it(monkeypatch: pytest.MonkeyPatch, serve: Factory) -> None:
    for name in ("http_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    with TokenizerClient(serve("127.0.0.1:0").address, unavailable_timeout=1) as client:
        assert client.info().model.id == "fake"
