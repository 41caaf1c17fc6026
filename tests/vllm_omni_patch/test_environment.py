"""What the other tests here stand on: the engine that was asked for, with our distribution as a user installs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distribution, entry_points, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_harness import (
    build_code2wav,
    build_code2wav_stage,
    build_processing_info,
    decode_step,
    engine_config,
    flat_codes,
    in_process,
    lively_sound,
    malformed_slots,
    outside_codebook,
    parse_audio,
    random_codes,
    run_fresh,
    snr,
)

VERSIONS = ("0.30.0", "0.28.0")

# Imports the plugin and calls its entry point, as every process of the engine does, and tells what came with it.
_IMPORT_PLUGIN = """
import json, sys

import mimo_tokenizer_vllm_omni

imported = set(sys.modules)
mimo_tokenizer_vllm_omni.register()
print(json.dumps({"import": sorted(imported), "register": sorted(sys.modules)}))
"""


def test_versions() -> None:
    asked = os.environ.get("MIMO_TEST_ENGINE", version("vllm"))
    assert asked in VERSIONS
    assert (version("vllm"), version("vllm-omni")) == (asked, asked)


def test_the_engine_is_the_installed_one() -> None:
    """What is imported is what `version` tells of, where several are on the path."""
    import vllm
    import vllm_omni

    for module, name in ((vllm, "vllm"), (vllm_omni, "vllm-omni")):
        assert Path(module.__file__ or "") == Path(
            str(distribution(name).locate_file(f"{module.__name__}/__init__.py"))
        )


def test_entry_point() -> None:
    import mimo_tokenizer_vllm_omni

    (point,) = entry_points(group="vllm_omni.general_plugins", name="mimo_audio_tokenizer")
    assert point.value == "mimo_tokenizer_vllm_omni:register"
    assert point.load() is mimo_tokenizer_vllm_omni.register


def test_the_base_install_is_enough() -> None:
    """The plugin's environment has the client library, and nothing that only the server needs."""
    import mimo_tokenizer_client

    for missing in ("grpc_health", "grpc_reflection"):
        with pytest.raises(ModuleNotFoundError):
            __import__(missing)
    assert mimo_tokenizer_client.__version__ == version("mimo-audio-tokenizer-service")


def test_the_plugin_imports_no_engine() -> None:
    """Neither its import nor its entry point, called in processes that never touch audio, may cost an import."""
    done = subprocess.run([sys.executable, "-c", _IMPORT_PLUGIN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for step, modules in json.loads(done.stdout).items():
        heavy = {name.partition(".")[0] for name in modules} & {"torch", "transformers", "vllm", "vllm_omni"}
        assert not heavy, step


# ---------------------------------------------------------------- the harness: the engine without the plugin


def _unpatched(language_model: Path) -> dict[str, Any]:
    """What the engine answers by itself."""
    code2wav = build_code2wav(language_model)
    slots = [flat_codes(random_codes(8)), *malformed_slots().values(), flat_codes(random_codes(12, seed=1))]
    waves = decode_step(code2wav, slots)
    alone = decode_step(code2wav, slots[:1])
    stage = build_code2wav_stage(language_model)
    with pytest.raises(IndexError):
        decode_step(stage, [outside_codebook()])
    chunked = build_code2wav(language_model, async_chunk=True, connector_extra={"codec_chunk_frames": 30})
    parser = build_processing_info(language_model).get_data_parser()
    return {
        "plugin": "mimo_tokenizer_vllm_omni" in sys.modules,
        "config": str(type(engine_config(language_model, 0).model_config)),
        "waves": [wave.numpy() for wave in waves],
        "places": {(str(wave.dtype), wave.device.type) for wave in waves},
        "alone": alone[0].numpy(),
        "stage": decode_step(stage, slots[:1])[0].numpy(),
        "chunk": decode_step(chunked, [flat_codes(random_codes(48))], left_context=[10])[0].numpy(),
        "chunk groups": chunked._codec_chunk_frames,
        "codes": parse_audio(parser, (lively_sound(1.5), 24_000), (lively_sound(1.0, 16_000), 16_000)),
    }


def test_the_engine_by_itself(language_model: Path, small_checkpoint: Path) -> None:
    answer = run_fresh(_unpatched, language_model, env=in_process(small_checkpoint), plugins=False)
    assert not answer["plugin"]
    assert "OmniModelConfig" in answer["config"]
    # As many samples as frames x 960, and none for what is no speech.
    assert [len(wave) for wave in answer["waves"]] == [8 * 960, *[0] * len(malformed_slots()), 12 * 960]
    assert answer["places"] == {("torch.float32", "cpu")}
    assert np.abs(answer["alone"]).max() > 0.01
    assert snr(answer["alone"], answer["stage"]) > 90
    assert answer["chunk groups"] == 30
    assert answer["chunk"].shape == ((48 - 40) * 960,)
    long, short = answer["codes"]
    assert (long.shape, short.shape) == ((8, 40), (8, 28))
    # Lively sound is worth its name: a wrong code would show.
    assert len(np.unique(long[0])) > 10


def test_the_service_and_the_engine_share_the_checkpoint(service: Any, small_checkpoint: Path) -> None:
    from mimo_tokenizer_client import TokenizerClient

    with TokenizerClient(service.address) as client:
        info = client.info()
        assert info.model.sample_rate == 24_000
        assert info.model.samples_per_frame == 960
        assert info.model.codebook_sizes[:8] == (1024, 1024, *[128] * 6)
        assert info.device.device == "cpu"
        assert info.device.dtype == "float32"
        assert np.abs(client.decode(random_codes(8))).max() > 0.01
