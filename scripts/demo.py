"""A round trip through a server of its own: `make demo`.

Starts `mimo-tokenizer serve` as a process, sends a WAV through Encode and its codes through Decode, writes what comes
back and a picture of both to demo-output/, says what was done, and stops the server.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile

from mimo_tokenizer_client import TokenizerClient, TokenizerError

OUTPUT = Path("demo-output")
# A checkpoint may come from the hub first.
START_SECONDS = 1800.0
STOP_SECONDS = 60.0

# Formants of five vowels in Hz, as a man's (Peterson and Barney, 1952).
VOWELS = ((730, 1090, 2440), (530, 1840, 2480), (270, 2290, 3010), (570, 840, 2410), (300, 870, 2240))


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a checkpoint's folder or Hugging Face hub id; without: random weights")
    parser.add_argument("--wav", type=Path, help="a sound file; without: a sound that the demo makes")
    parser.add_argument("--device", default="cpu", help="as for `mimo-tokenizer serve`")
    arguments = parser.parse_args()
    if arguments.wav is not None and not arguments.wav.is_file():
        sys.exit(f"there is no file {arguments.wav}")
    OUTPUT.mkdir(exist_ok=True)
    source = arguments.wav or write_vowels(OUTPUT / "input.wav")
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix://{folder}/tokenizer.sock"
        with server(address, arguments.model, arguments.device) as process:
            wait_until_ready(address, process)
            roundtrip(address, source)
        print(f"server stopped, exit status {process.returncode}")
    if process.returncode != 0:
        sys.exit(1)


@contextmanager
def server(address: str, model: str | None, device: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server process for as long as the body runs."""
    what = ["--model", model] if model else ["--load-format", "dummy", "--model", "tiny"]
    command = ["mimo_tokenizer_server", "serve", "--address", address, "--device", device, *what]
    print(f"starting: mimo-tokenizer {' '.join(command[1:])}")
    process = subprocess.Popen([sys.executable, "-m", *command])
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(address: str, process: subprocess.Popen[bytes]) -> None:
    """Return when the server is healthy; end the demo if it ends first."""
    deadline = time.monotonic() + START_SECONDS
    with TokenizerClient(address) as client:
        while not client.health():
            if process.poll() is not None:
                sys.exit(f"the server ended with exit status {process.returncode}; its last line above says why")
            if time.monotonic() > deadline:
                sys.exit(f"the server was not ready after {START_SECONDS:.0f} seconds")
            time.sleep(0.1)
        info = client.info()
    print(f"healthy: {info.model.id} on {info.device.device} ({info.device.name}), {info.device.dtype}")


def roundtrip(address: str, source: Path) -> None:
    """Send the file there and back, with the command that anybody would use."""
    target = OUTPUT / "output.wav"
    command = ["roundtrip", str(source), str(target), "--address", address, "--plot", str(OUTPUT / "roundtrip.png")]
    print(f"running: mimo-tokenizer {' '.join(command)}", flush=True)
    if subprocess.run([sys.executable, "-m", "mimo_tokenizer_server", *command]).returncode:
        sys.exit("the round trip failed; the line above says why")


def write_vowels(path: Path, rate: int = 24_000) -> Path:
    """Write three seconds of a voice-like sound: a gliding pitch through the formants of five vowels."""
    seconds = 0.6
    voice = [vowel(formants, seconds, rate, 110 + 15 * index) for index, formants in enumerate(VOWELS)]
    samples = np.concatenate(voice)
    soundfile.write(path, 0.5 * samples / np.abs(samples).max(), rate, subtype="PCM_16")
    return path


def vowel(formants: tuple[int, ...], seconds: float, rate: int, pitch: float) -> npt.NDArray[np.float64]:
    """Harmonics of a falling pitch, each as strong as the formants near it make it."""
    time_axis = np.arange(int(seconds * rate)) / rate
    glide = pitch * (1.1 - 0.3 * time_axis)
    phase = 2 * np.pi * np.cumsum(glide) / rate
    sound = np.zeros_like(time_axis)
    for number in range(1, int(5000 / pitch)):
        frequency = number * glide
        gain = sum(1 / (1 + ((frequency - formant) / 90) ** 2) for formant in formants)
        sound += gain * np.sin(number * phase) / number**0.5
    return sound * np.sin(np.pi * time_axis / seconds) ** 0.5


if __name__ == "__main__":
    try:
        main()
    except TokenizerError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
