"""Memory of an engine process that has built both stages' audio parts, with the tokenizer in it and with the service.

    PYTHONPATH=.cache/engine/0.30.0 .cache/engine/bin/python benchmarks/engine_memory.py

(after `make test-engine`). The tokenizer has the published size and random weights. The engine process builds the real
code2wav stage and the real data parser on the CPU in float32, encodes one second and decodes it, and tells its memory
before it imports the engine, after the import, and at the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "server/mimo_tokenizer_server/configs/published.json"
sys.path.insert(0, str(ROOT / "tests/vllm_omni_patch"))

import engine_harness  # noqa: E402
from model_folders import server_python, service_environment, write_language_model  # noqa: E402

from mimo_tokenizer_client import TokenizerClient  # noqa: E402


def main() -> None:
    """Measure all three, and print a table."""
    if len(sys.argv) == 3:
        be_an_engine(Path(sys.argv[1]), sys.argv[2] == "plugin")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        language_model = write_language_model(folder / "language-model")
        write_tokenizer(folder / "tokenizer")
        rows = {"in process": run(language_model, engine_harness.in_process(folder / "tokenizer"), "no-plugin")}
        address = f"unix://{folder}/s"
        serve = ["-m", "mimo_tokenizer_server", "serve", "--load-format", "dummy", "--device", "cpu"]
        server = subprocess.Popen(
            [server_python(), *serve, "--address", address, "--log-level", "warning"], env=service_environment()
        )
        try:
            with TokenizerClient(address) as client:
                client.wait_until_ready(300)
            rows["through the service"] = run(language_model, engine_harness.through(address), "plugin")
            rows["the service itself"] = {"end": memory(server.pid)}
        finally:
            server.terminate()
            server.wait()
    report(rows)


def write_tokenizer(folder: Path) -> None:
    """Write a checkpoint of the published size with random weights, 4 bytes each, in the engine's own format."""
    program = (
        "import json, sys, torch\n"
        "from pathlib import Path\n"
        "from vllm_omni.model_executor.models.mimo_audio.modeling_audio_tokenizer import MiMoAudioTokenizer\n"
        "from vllm_omni.model_executor.models.mimo_audio.config_mimo_audio import MiMoAudioTokenizerConfig\n"
        "config = MiMoAudioTokenizerConfig(**json.loads(Path(sys.argv[1]).read_text()))\n"
        "torch.manual_seed(0)\n"
        "MiMoAudioTokenizer(config).save_pretrained(sys.argv[2])\n"
    )
    environment = os.environ | {"VLLM_TARGET_DEVICE": "cpu", "VLLM_PLUGINS": ""}
    subprocess.run([sys.executable, "-c", program, str(PUBLISHED), str(folder)], env=environment, check=True)


def run(language_model: Path, settings: dict[str, str], plugin: str) -> dict[str, dict[str, float]]:
    """Run an engine process, and return what it says of its memory."""
    environment = os.environ | settings | ({} if plugin == "plugin" else {"VLLM_PLUGINS": ""})
    done = subprocess.run(
        [sys.executable, __file__, str(language_model), plugin],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answer: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def be_an_engine(language_model: Path, plugin: bool) -> None:
    """Build both stages' audio parts, use them once, and print the memory at each step as JSON."""
    settings = {name: value for name, value in os.environ.items() if name.startswith(engine_harness.PREFIX)}
    engine_harness.prepare_process()
    os.environ |= settings
    engine_harness.answer_for_missing_driver()
    import numpy as np

    told = {"start": memory(os.getpid())}
    engine_harness.engine_config(language_model, 1)
    from vllm_omni.model_executor.models.mimo_audio import mimo_audio

    told["engine imported"] = memory(os.getpid())
    stage = engine_harness.build_code2wav_stage(language_model)
    parser = engine_harness.build_parser()
    assert (parser.mimo_tokenizer.__class__.__name__ == "RemoteTokenizerWorker") == plugin
    assert isinstance(parser, mimo_audio.MiMoAudioDataParser)
    told["built"] = memory(os.getpid())
    second = np.sin(np.arange(24_000) * 0.05).astype(np.float32)
    (codes,) = engine_harness.parse_audio(parser, (second, 24_000))
    (waveform,) = engine_harness.decode_step(stage, [engine_harness.flat_codes(codes)])
    assert waveform.numel() == codes.shape[1] * 960
    told["end"] = memory(os.getpid())
    print(json.dumps(told))


def memory(pid: int) -> dict[str, float]:
    """Resident size of a process in GiB, now and at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kilobytes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return {"now": int(kilobytes["VmRSS"]) / 2**20, "peak": int(kilobytes["VmHWM"]) / 2**20}


def report(rows: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print GiB resident at each step, and the peak."""
    steps = ("engine imported", "built", "end")
    print(f"{'GiB resident':24}", *(f"{step:>16}" for step in steps), f"{'peak':>8}")
    for name, told in rows.items():
        cells = [f"{told[step]['now']:16.2f}" if step in told else " " * 16 for step in steps]
        print(f"{name:24}", *cells, f"{told['end']['peak']:8.2f}")


if __name__ == "__main__":
    main()
