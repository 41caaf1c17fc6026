"""Readiness, closing, cancelling, threads and imports."""

from __future__ import annotations

import asyncio
import inspect
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import numpy as np
import pytest

from mimo_tokenizer_client import AsyncTokenizerClient, Cancelled, InvalidInput, ServiceUnavailable, TokenizerClient

# Of the fixtures that make something.
Factory = Callable[..., Any]

CODES = np.arange(30).reshape(3, 10)


class Hang:
    """A behaviour that keeps a call until the test lets go, and sees whether it is cancelled."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.ended = threading.Event()

    def __call__(self, context: grpc.ServicerContext) -> None:
        context.add_callback(self.ended.set)
        self.begun.set()
        self.ended.wait(60)


# ---------------------------------------------------------------- health


def test_health(serve: Factory, connect: Factory, socket_path: str) -> None:
    server = serve()
    client = connect(server.address)
    assert client.health() is True
    server.set_serving(False)
    assert client.health() is False
    assert connect(f"unix:{socket_path}-none").health() is False


def test_wait_until_ready(serve: Factory, connect: Factory) -> None:
    server = serve()
    server.set_serving(False)
    threading.Timer(0.7, server.set_serving, [True]).start()
    start = time.monotonic()
    assert connect(server.address).wait_until_ready(60) is None
    assert time.monotonic() - start >= 0.6


def test_wait_until_there_is_a_server(spawn: Factory, connect: Factory, socket_path: str) -> None:
    threading.Timer(0.5, spawn, [f"unix:{socket_path}"]).start()
    client = connect(f"unix:{socket_path}")
    client.wait_until_ready(60)
    assert client.info().model.id == "fake"


def test_not_ready_in_time(serve: Factory, connect: Factory, socket_path: str) -> None:
    server = serve()
    server.set_serving(False)
    with pytest.raises(ServiceUnavailable) as error:
        connect(server.address).wait_until_ready(0.3)
    assert str(error.value) == (
        f"the tokenizer service at {server.address} is not ready after 0.3 s: "
        "its health is NOT_SERVING (it is starting or draining, or its device failed)"
    )
    missing = f"unix:{socket_path}-none"
    with pytest.raises(ServiceUnavailable, match=f"service at {missing} is not ready after 0.3 s: .*No such file"):
        connect(missing).wait_until_ready(0.3)
    with pytest.raises(InvalidInput, match="timeout must be"):
        connect(missing).wait_until_ready(0)


# ---------------------------------------------------------------- closing and cancelling


def test_a_closed_client(serve: Factory, connect: Factory) -> None:
    client = connect(serve().address)
    client.info()
    client.close()
    client.close()
    with pytest.raises(Cancelled, match=r"the client of unix:.* is closed"):
        client.decode(CODES)


def test_context_managers(serve: Factory) -> None:
    server = serve()
    with TokenizerClient(server.address) as client:
        client.info()
    with pytest.raises(Cancelled):
        client.info()

    async def use() -> None:
        async with AsyncTokenizerClient(server.address) as client:
            await client.info()
        with pytest.raises(Cancelled):
            await client.info()

    asyncio.run(use())


@pytest.mark.parametrize("when", ["in a call", "in a pause"])
def test_closing_ends_calls_of_other_threads(when: str, serve: Factory, socket_path: str) -> None:
    server = serve()
    hang = Hang()
    server.script("Decode", hang)
    client = TokenizerClient(server.address if when == "in a call" else f"unix:{socket_path}-none")
    with ThreadPoolExecutor() as pool:
        call = pool.submit(client.decode, CODES)
        if when == "in a call":
            assert hang.begun.wait(30)
        else:
            time.sleep(0.5)
        client.close()
        with pytest.raises(Cancelled, match="is closed"):
            call.result(timeout=20)
    if when == "in a call":
        assert hang.ended.wait(30)


def test_closing_ends_calls_of_other_tasks(serve: Factory) -> None:
    server = serve()
    hang = Hang()
    server.script("Decode", hang)

    async def use() -> None:
        client = AsyncTokenizerClient(server.address)
        call = asyncio.create_task(client.decode(CODES))
        assert await asyncio.to_thread(hang.begun.wait, 30)
        await client.close()
        with pytest.raises(Cancelled, match="is closed"):
            await call

    asyncio.run(use())
    assert hang.ended.wait(30)


@pytest.mark.parametrize("rpc", ["Encode", "Decode", "DecodeVq", "EncodeStream", "DecodeLong"])
def test_cancelling_a_task_cancels_its_call(rpc: str, serve: Factory) -> None:
    server = serve(max_message_bytes=16 << 10)
    hang = Hang()
    server.script(rpc, hang)

    async def use() -> None:
        async with AsyncTokenizerClient(server.address) as client:
            call = {
                "Encode": lambda: client.encode(np.zeros(50), 8000),
                "Decode": lambda: client.decode(CODES),
                "DecodeVq": lambda: client.decode_vq(CODES),
                "EncodeStream": lambda: client.encode(np.zeros(200_000), 8000),
                "DecodeLong": lambda: client.decode(np.zeros((3, 2000), int)),
            }[rpc]
            task = asyncio.create_task(call())
            assert await asyncio.to_thread(hang.begun.wait, 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(hang.ended.wait, 30)
            assert len(server.seen(rpc)) == 1
            await client.decode(CODES)

    asyncio.run(use())


INTERRUPTED = """
import signal
import sys
import numpy as np
from mimo_tokenizer_client import TokenizerClient
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell began the tests in the background
client = TokenizerClient(sys.argv[1])
try:
    client.encode(np.zeros(int(sys.argv[2])), 8000)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.stdin.read()  # the process lives on: it is not its end that cancels the call
"""


@pytest.mark.parametrize(("rpc", "samples"), [("Encode", 50), ("EncodeStream", 200_000)])
def test_an_interrupt_cancels_the_call(rpc: str, samples: int, serve: Factory) -> None:
    server = serve(max_message_bytes=16 << 10)
    hang = Hang()
    server.script(rpc, hang)
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, server.address, str(samples)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert hang.begun.wait(60)
            time.sleep(1)  # the server may have the call before the client waits for its answer
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "interrupted\n"
            assert hang.ended.wait(30)
        finally:
            process.stdin.close()


# ---------------------------------------------------------------- many callers


def test_sixteen_threads(serve: Factory, fake: ModuleType) -> None:
    server = serve()
    with TokenizerClient(server.address) as client, ThreadPoolExecutor(16) as pool:

        def use(seed: int) -> None:
            codes = np.random.default_rng(seed).integers(0, 1000, (3, seed + 1))
            for _ in range(10):
                np.testing.assert_array_equal(client.decode(codes), fake.decode(codes))
                np.testing.assert_array_equal(client.decode_vq(codes), fake.decode_vq(codes))

        for done in [pool.submit(use, seed) for seed in range(16)]:
            done.result(timeout=120)


def test_many_tasks(serve: Factory, fake: ModuleType) -> None:
    server = serve()

    async def use() -> None:
        async with AsyncTokenizerClient(server.address) as client:
            arrays = [np.full((3, n + 1), n) for n in range(50)]
            for got, array in zip(await asyncio.gather(*map(client.decode, arrays)), arrays, strict=True):
                np.testing.assert_array_equal(got, fake.decode(array))

    asyncio.run(use())


# ---------------------------------------------------------------- the package


def test_both_clients_have_the_same_methods() -> None:
    def methods(cls: type) -> dict[str, inspect.Signature]:
        return {n: inspect.signature(m) for n, m in vars(cls).items() if inspect.isfunction(m) and n[0] != "_"}

    assert methods(TokenizerClient) == methods(AsyncTokenizerClient)
    assert inspect.signature(TokenizerClient) == inspect.signature(AsyncTokenizerClient)


def test_an_async_client_may_be_made_outside_of_a_loop(serve: Factory) -> None:
    client = AsyncTokenizerClient(serve().address)

    async def use() -> str:
        async with client:
            return (await client.info()).model.id

    assert asyncio.run(use()) == "fake"


def test_the_import_takes_only_what_the_base_install_has() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'torchaudio', 'grpc_health', 'grpc_status', 'grpc_reflection', 'soundfile', 'click',\n"
        "             'rich', 'mimo_tokenizer_server'):\n"
        "    sys.modules[name] = None  # its import fails, as where it is not installed\n"
        "import mimo_tokenizer_client\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_import_does_not_take_torch_where_there_is_one() -> None:
    code = "import sys, mimo_tokenizer_client; sys.exit('torch' in sys.modules or 'grpc_health.v1' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_package_is_typed() -> None:
    import mimo_tokenizer_client

    assert Path(mimo_tokenizer_client.__file__).with_name("py.typed").exists()
