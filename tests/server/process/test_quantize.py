"""A server with `--quantize int8`: what it logs and tells, and what it answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import numpy as np
import pytest
from process_harness import RATE, ServerProcess, assert_one_sentence, noise, random_codes, run_command, snr

from mimo_tokenizer_client import TokenizerClient


@pytest.mark.parametrize("flags", [(), ("--quantize-encoder",)], ids=["decoder", "encoder too"])
def test_what_it_costs_is_logged_told_and_true(
    start: Callable[..., ServerProcess], unix_server: ServerProcess, flags: tuple[str, ...]
) -> None:
    server = start("--quantize", "int8", *flags).ready()
    with TokenizerClient(server.address) as client, TokenizerClient(unix_server.address) as exact:
        device, other = client.info().device, exact.info().device
        assert (other.quantization, other.encoder_quantized) == ("none", False)
        assert other.decode_snr_db is other.equal_codes is None
        assert device.quantization == "int8"
        assert device.encoder_quantized is bool(flags)
        assert device.decode_snr_db is not None
        assert device.equal_codes is not None
        codes = random_codes(100)
        assert abs(snr(exact.decode(codes), client.decode(codes)) - device.decode_snr_db) < 4
        equal = float((exact.encode(noise(2), RATE) == client.encode(noise(2), RATE)).mean())
        if flags:
            assert 0.5 < device.equal_codes < 1
            assert equal < 1
        else:
            assert equal == device.equal_codes == 1
        # Weights are the same, and so is their fingerprint: what is lost is told beside it.
        assert client.info().model.fingerprint == exact.info().model.fingerprint
        assert client.info().memory.weights < exact.info().memory.weights
    line = server.wait_for("weights quantized")
    assert f"decode_snr_db={device.decode_snr_db:.1f}" in line
    assert f"equal_codes={round(device.equal_codes, 4):g}" in line
    assert f"encoder_quantized={bool(flags)}" in line

    done = run_command("info", "--address", server.address)
    for name, value in (("quantization", "int8"), ("decode_snr_db", device.decode_snr_db)):
        assert re.search(rf"device\.{name} +{re.escape(str(value))}", done.stdout), done.stdout
    done = run_command("info", "--json", "--address", server.address)
    assert json.loads(done.stdout)["device"]["equal_codes"] == device.equal_codes
    assert server.stop() == 0
    assert server.complaints() == []


def test_by_the_environment_and_batch_invariant(start: Callable[..., ServerProcess]) -> None:
    server = start("--batch-invariant", env={"MIMO_AUDIO_TOKENIZER_QUANTIZE": "int8"}).ready()
    with TokenizerClient(server.address) as client:
        device = client.info().device
        assert (device.quantization, device.batch_invariant) == ("int8", True)
        items = [random_codes(frames, seed=frames) for frames in (25, 3, 70)]
        for item, wave in zip(items, client.decode_batch(items), strict=True):
            np.testing.assert_array_equal(wave, client.decode(item))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--quantize", "int8", "--dtype", "bfloat16"), "--quantize: int8 is for float32 weights on cpu"),
        (("--quantize", "int8", "--dtype", "float16"), "these would be float16 on cpu"),
        (("--quantize", "fp8"), "'fp8' is not one of 'none', 'int8'"),
        (("--quantize-encoder",), "--quantize-encoder goes with --quantize int8"),
    ],
)
def test_what_does_not_go_together(flags: tuple[str, ...], text: str) -> None:
    done = run_command("serve", "--load-format", "dummy", "--model", "tiny", "--device", "cpu", *flags)
    assert_one_sentence(done, text, status=2)
