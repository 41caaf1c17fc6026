"""The server beside the in-process reference at the published size: start, speed, memory, and the targets for a CPU.

    make bench DEVICE=cpu REFERENCE=folder BENCH_ARGS='--only decode-280,encode-4'
    python benchmarks/published.py --device cuda:0 --only decode-280,encode-4 --repeats 20

A checkpoint with random weights is written into a temporary folder (4.8 GiB; TMPDIR says where) and removed at the end.
The server loads it; the reference, in a process of its own, has random weights too, in the dtype that its worker uses
on the device: float32 on a CPU, like the server. Both get the same sound and the same codes by turns, so that a machine
whose speed drifts does so for both. Both compute with the same number of threads, which sleep while they wait: left to
spin, the reference takes several times as long as soon as anything else runs on the machine.

- Seconds of ours are those of a client's call over a Unix socket, messages and all; of the reference, of the call in
  its process. Both columns are medians, and the ratio is the median of the pairs' ratios. Up to 15 s of sound are
  computed once before they are timed. A minute is one segment to the reference, which is the least work for it.
- Peak memory is the process's highest resident size during the call (VmHWM, reset before it), less its resident size
  before the call or when it was idle after its start, whichever is smaller; the highest of all calls. Weights, imports
  and what warming up has left are thus not in it; the request and its answer are.
- Start is from the creation of the process until it says that it is healthy, with the checkpoint in the page cache;
  load and warm-up are what the server's log says of them.

Exits with 1 when a target is missed. Targets are for the published size on a CPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mimo_tokenizer_client import TokenizerClient
from mimo_tokenizer_server import threads
from mimo_tokenizer_server.config import BUILT_IN_MODELS

ROOT = Path(__file__).parents[1]
UNPACKED = ROOT / ".cache/reference"
RATE = 24_000
FRAMES_A_SECOND = 25
# Codebooks that the language model uses.
CODE_ROWS = 8

_START_SECONDS = 600.0
_CALL_SECONDS = 36_000.0
# Of audio; longer work is not done before it is timed.
_WARM_UP_SECONDS = 15.0
# Of audio, from which on a decode's peak memory is told.
_PEAK_SECONDS = 30.0
_STARTS = 3


@dataclass(frozen=True)
class Row:
    """Work that is measured.

    Attributes:
        what: it is.
        kind: "decode" or "encode".
        seconds: of audio in a call.
        repeats: calls of each.
        flags: of the server beside the usual ones; it is then a server of its own.
        paired: whether the reference does the same.
    """

    what: str
    kind: str
    seconds: float
    repeats: int
    flags: tuple[str, ...] = ()
    paired: bool = True


# In the order in which they are measured; START comes before them.
START = "start"
ROWS = {
    "int8-280": Row("decode 280 frames, int8", "decode", 280 / FRAMES_A_SECOND, 5, ("--quantize", "int8")),
    "decode-280": Row("decode 280 frames", "decode", 280 / FRAMES_A_SECOND, 5),
    "encode-4": Row("encode 4 s", "encode", 4, 5),
    "decode-30": Row("decode 30 s", "decode", 30, 3),
    "encode-60": Row("encode 60 s", "encode", 60, 3),
    "decode-60": Row("decode 60 s", "decode", 60, 3),
    "decode-120": Row("decode 120 s", "decode", 120, 2),
    "decode-600": Row("decode 600 s", "decode", 600, 1, paired=False),
}


@dataclass(frozen=True)
class Target:
    """The most that a line's "ratio" or "ours" may be."""

    of: str
    most: float


TARGETS = {
    "int8-280 seconds": Target("ratio", 0.33),
    "decode-280 seconds": Target("ratio", 0.80),
    "encode-4 seconds": Target("ratio", 0.90),
    "decode-30 seconds": Target("ratio", 0.76),
    "encode-60 seconds": Target("ratio", 0.90),
    "decode-60 seconds": Target("ratio", 0.66),
    "decode-120 seconds": Target("ratio", 0.55),
    "decode-120 peak": Target("ours", 0.5),
    "decode-600 real time": Target("ours", 0.9),
    "decode-600 peak": Target("ours", 1.5),
    "start load": Target("ours", 4.0),
    "start resident": Target("ours", 0.8),
}


@dataclass(frozen=True)
class Line:
    """A line of the table.

    Attributes:
        name: the row's and the quantity's.
        what: the same for people, with the unit.
        ours: of the server.
        reference: of the reference; None where it does not do this.
        ratio: of the two.
    """

    name: str
    what: str
    ours: float
    reference: float | None = None
    ratio: float | None = None

    def value(self, target: Target) -> float:
        """What `target` is about."""
        return self.ours if target.of == "ours" or self.ratio is None else self.ratio


class StartError(RuntimeError):
    """A server that did not start; the text is its log."""


@dataclass(frozen=True)
class Server:
    """A ready server.

    Attributes:
        pid: of the process.
        client: of it.
        start_seconds: from the creation of the process until it was healthy.
        loaded: the fields of its log line about the loaded model.
    """

    pid: int
    client: TokenizerClient
    start_seconds: float
    loaded: dict[str, Any]


class Side:
    """A process that computes, watched.

    Args:
        pid: of the process, which has just started and is idle.
        compute: does work of a kind ("decode", "encode") on so many seconds of audio, and returns the seconds it took.
    """

    def __init__(self, pid: int, compute: Callable[[str, float], float]) -> None:
        self._pid = pid
        self._compute = compute
        self._idle = resident(pid)

    def run(self, kind: str, seconds: float) -> tuple[float, float]:
        """Work once: the seconds that it took, and the GiB of its peak."""
        before = min(self._idle, resident(self._pid))
        reset_peak(self._pid)
        spent = self._compute(kind, seconds)
        return spent, resident(self._pid, "VmHWM") - before


def main() -> None:
    """Measure, and print a table and JSON."""
    arguments = parse_arguments()
    targets = TARGETS if (arguments.device, arguments.config.stem) == ("cpu", "published") else {}
    say(f"{arguments.config.stem} on {arguments.device}, {arguments.threads} threads of each")
    print(f"{'':36}{'ours':>10}{'reference':>11}{'ratio':>8}  target", flush=True)
    lines, missed = [], []
    for line in measure(arguments):
        lines.append(line)
        target = targets.get(line.name)
        numbers = f"{line.ours:10.3f}{shown(line.reference, 11, 3)}{shown(line.ratio, 8, 2)}"
        print(f"{line.what:36}{numbers}{f'  {target.of} <= {target.most:.2f}' if target else ''}", flush=True)
        if target and not line.value(target) <= target.most:
            missed.append(f"  {line.what}: {target.of} {line.value(target):.3f}, at most {target.most:.2f}")
    facts = {"config": arguments.config.stem, "device": arguments.device, "threads": arguments.threads}
    held = {name: asdict(target) for name, target in targets.items()}
    print(json.dumps({**facts, "lines": [asdict(line) for line in lines], "targets": held}), flush=True)
    measured = {line.name for line in lines}
    for name in targets:
        # Of the rows that were asked for, what a server could not do is missed, too.
        if name.split()[0] in arguments.only and name not in measured:
            missed.append(f"  {name}: not measured")
    if missed:
        sys.exit("\n".join(["targets missed:", *missed]))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", type=names, default=[START, *ROWS], help=f"some of {','.join([START, *ROWS])}")
    parser.add_argument("--repeats", type=int, help="of each row; without it, fewer for longer ones")
    add_common_arguments(parser)
    return parser.parse_args()


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what both the table and the plot of growth can be told."""
    parser.add_argument(
        "--config", type=config_file, default="published", help="of the weights: a built-in config, or a JSON file"
    )
    parser.add_argument("--reference", type=Path, default=UNPACKED, help="folder of the unpacked wheel")
    parser.add_argument("--threads", type=int, default=threads.default(), help="of each of the two")


def names(text: str) -> list[str]:
    """Row names, separated by commas."""
    chosen = text.split(",")
    if unknown := set(chosen) - {START, *ROWS}:
        raise argparse.ArgumentTypeError(
            f"there is no {', '.join(sorted(unknown))}; there are {', '.join([START, *ROWS])}"
        )
    return chosen


def config_file(text: str) -> Path:
    """A built-in config's file, or another."""
    path = BUILT_IN_MODELS.get(text, Path(text))
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is neither a file nor one of {', '.join(BUILT_IN_MODELS)}")
    return path


def measure(arguments: argparse.Namespace) -> Iterator[Line]:
    """Measure the chosen rows, one after the other."""
    rows = {name: row for name, row in ROWS.items() if name in arguments.only}
    serve = ("--device", arguments.device, "--threads", str(arguments.threads))
    with ExitStack() as stack:
        model = stack.enter_context(random_checkpoint(arguments.config))
        if START in arguments.only:
            yield from start_lines(model, serve, arguments.repeats or _STARTS)
        reference = None
        if any(row.paired for row in rows.values()):
            reference = stack.enter_context(running_reference(arguments))
        for name, row in rows.items():
            if row.flags:
                try:
                    with running_server(model, *serve, *row.flags) as own:
                        yield from row_lines(name, row, arguments, server_side(own), reference)
                except StartError as error:
                    if "No such option" not in str(error):
                        raise
                    say(f"{row.what} is left out: this server has no {row.flags[0]}")
        rows = {name: row for name, row in rows.items() if not row.flags}
        if rows:
            server = stack.enter_context(running_server(model, *serve))
            ours = server_side(server)
            for name, row in rows.items():
                yield from row_lines(name, row, arguments, ours, reference)
            if allocated := server.client.info().device.memory_allocated:
                yield Line("device memory", "device memory, GiB", allocated / 2**30)


def start_lines(model: Path, flags: Sequence[str], repeats: int) -> Iterator[Line]:
    """Start servers, one after the other."""
    say(f"start, {repeats} times")
    healthy, load, size = [], [], []
    for _ in range(repeats):
        read_through(model)
        with running_server(model, *flags) as server:
            healthy.append(server.start_seconds)
            load.append(server.loaded["load_seconds"] + server.loaded["warm_up_seconds"])
            size.append(resident(server.pid))
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors")) / 2**30
    yield Line("start healthy", "start: process to healthy, s", statistics.median(healthy))
    yield Line("start load", "start: of that load and warm-up, s", statistics.median(load))
    yield Line("start weights", "weights in float32, GiB", weights)
    yield Line("start resident", "start: resident above weights, GiB", statistics.median(size) - weights)


def row_lines(name: str, row: Row, arguments: argparse.Namespace, ours: Side, reference: Side | None) -> Iterator[Line]:
    """Have both do a row's work by turns."""
    repeats = arguments.repeats or row.repeats
    sides = [ours, reference] if reference is not None and row.paired else [ours]
    say(f"{row.what}, {repeats} times{' by turns' if len(sides) > 1 else ''}")
    if row.seconds <= _WARM_UP_SECONDS:
        for side in sides:
            side.run(row.kind, row.seconds)
    rounds = [[side.run(row.kind, row.seconds) for side in sides] for _ in range(repeats)]
    ratio = statistics.median(pair[0][0] / pair[1][0] for pair in rounds) if len(sides) > 1 else None
    spent = [statistics.median(run[0] for run in runs) for runs in zip(*rounds, strict=True)]
    yield Line(f"{name} seconds", f"{row.what}, s", spent[0], spent[1] if len(sides) > 1 else None, ratio)
    if len(sides) == 1:
        yield Line(f"{name} real time", f"{row.what}, real-time factor", spent[0] / row.seconds)
    if row.kind == "decode" and row.seconds >= _PEAK_SECONDS and arguments.device == "cpu":
        peaks = [max(run[1] for run in runs) for runs in zip(*rounds, strict=True)]
        of_both = (peaks[1], peaks[0] / peaks[1]) if len(sides) > 1 else ()
        yield Line(f"{name} peak", f"{row.what}, peak, GiB", peaks[0], *of_both)


@contextmanager
def random_checkpoint(config: Path) -> Iterator[Path]:
    """A folder with a checkpoint of seeded random weights, for as long as the body runs."""
    with tempfile.TemporaryDirectory(prefix="mimo-bench-") as name:
        say("writing a checkpoint")
        writer = multiprocessing.get_context("spawn").Process(target=write_checkpoint, args=(config, Path(name)))
        writer.start()
        writer.join()
        if writer.exitcode != 0:
            sys.exit("the checkpoint cannot be written; the error is above")
        yield Path(name)


def write_checkpoint(config: Path, folder: Path) -> None:
    """Write a checkpoint in the published format; in a process of its own, which takes its memory with it."""
    import torch
    from safetensors.torch import save_file

    from mimo_tokenizer_server.model import checkpoint
    from mimo_tokenizer_server.model.config import TokenizerConfig
    from mimo_tokenizer_server.model.tokenizer import MiMoAudioTokenizer

    model = MiMoAudioTokenizer(TokenizerConfig.from_file(config), torch.device("cpu"), torch.float32)
    checkpoint.fill_random(model, 0, lambda: None)
    # The keys' names and places are the loader's affair alone; a benchmark may look at them.
    save_file(checkpoint._targets(model), folder / "model.safetensors")
    shutil.copy(config, folder / "config.json")


def read_through(model: Path) -> None:
    """Have the checkpoint in the page cache."""
    buffer = bytearray(1 << 24)
    for path in model.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


@contextmanager
def running_server(model: Path, *flags: str) -> Iterator[Server]:
    """A server on a Unix socket that is healthy, for as long as the body runs.

    Raises:
        StartError: it ended, or was not healthy in ten minutes.
    """
    with tempfile.TemporaryDirectory() as name:
        socket, log = Path(name) / "tokenizer.sock", Path(name) / "log"
        command = [sys.executable, "-m", "mimo_tokenizer_server", "serve", "--model", str(model), *flags]
        with log.open("wb") as stream:
            started = time.monotonic()
            process = subprocess.Popen(
                [*command, "--address", f"unix://{socket}", "--log-level", "info", "--log-format", "json"],
                stdout=stream,
                stderr=stream,
            )
        try:
            with TokenizerClient(f"unix://{socket}", timeout=_CALL_SECONDS) as client:
                # gRPC waits a second and more before it tries again to connect to what is not there.
                while not (socket.exists() and client.health()):
                    if process.poll() is not None or time.monotonic() > started + _START_SECONDS:
                        raise StartError(f"the server did not start:\n{log.read_text()}")
                    time.sleep(0.1)
                yield Server(process.pid, client, time.monotonic() - started, loaded_fields(log))
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def loaded_fields(log: Path) -> dict[str, Any]:
    """Of a server's log, the line about the loaded model."""
    events = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    fields: dict[str, Any] = next(event for event in events if event["message"] == "model loaded")
    return fields


def server_side(server: Server) -> Side:
    """A server's part, as a client sees it."""
    sizes = server.client.info().model.codebook_sizes

    def compute(kind: str, seconds: float) -> float:
        if kind == "encode":
            sound = sound_of(seconds)
            return timed(lambda: server.client.encode(sound, RATE, timeout=_CALL_SECONDS))
        codes = codes_of(sizes, seconds)
        return timed(lambda: server.client.decode(codes, timeout=_CALL_SECONDS))

    return Side(server.pid, compute)


@contextmanager
def running_reference(arguments: argparse.Namespace) -> Iterator[Side]:
    """The reference in a process of its own, for as long as the body runs."""
    folders = (arguments.reference / "vllm_omni/model_executor/models/mimo_audio", arguments.reference)
    folder = next((path for path in folders if (path / "modeling_audio_tokenizer.py").is_file()), None)
    if folder is None:
        sys.exit(f"the reference is not in {arguments.reference}; `make reference` unpacks it into {UNPACKED}")
    say("building the reference")
    # As the server does it; the worker inherits this process's environment.
    threads.prepare(arguments.threads, os.environ)
    context = multiprocessing.get_context("spawn")
    pipe, far_end = context.Pipe()
    worker = context.Process(
        target=work_as_reference, args=(far_end, folder, arguments.config, arguments.device), daemon=True
    )
    worker.start()
    far_end.close()

    def ask(kind: str, seconds: float) -> float:
        try:
            pipe.send((kind, seconds))
            answer: float = pipe.recv()
        except (EOFError, OSError):
            sys.exit("the reference ended; its error is above")
        return answer

    try:
        # Like a server that is healthy, it has then computed.
        for kind in ("decode", "encode"):
            ask(kind, 1)
        assert worker.pid is not None
        yield Side(worker.pid, ask)
    finally:
        worker.terminate()
        worker.join()


def work_as_reference(pipe: Connection, folder: Path, config_path: Path, device_name: str) -> None:
    """In the reference's process: build it, then do what comes through the pipe, and answer how long it took."""
    import torch

    sys.path.insert(0, str(ROOT / "tests/parity"))
    import reference

    reference.FOLDER = folder
    config = {key: value for key, value in json.loads(config_path.read_text()).items() if key != "model_type"}
    device = torch.device(device_name)
    with device:
        tokenizer = reference.build(config, seed=0)
    tokenizer.to(torch.float32 if device.type == "cpu" else torch.bfloat16)
    tokenizer.encoder.quantizer.float()
    to_mel = reference.mel_front_end(config, device)

    def compute(kind: str, seconds: float) -> float:
        if kind == "encode":
            samples = torch.from_numpy(sound_of(seconds))
            return timed(lambda: reference.encode_segment(tokenizer, to_mel(samples)).cpu())
        codes = torch.from_numpy(codes_of(config["codebook_size"], seconds).astype(np.int64)).to(device)
        return timed(lambda: tokenizer.decode(codes).cpu())

    with torch.inference_mode():
        while True:
            try:
                work = pipe.recv()
            except EOFError:
                return
            pipe.send(compute(*work))


def sound_of(seconds: float) -> npt.NDArray[np.float32]:
    """Noise, (samples,)."""
    return 0.1 * np.random.default_rng(0).standard_normal(round(seconds * RATE), np.float32)


def codes_of(sizes: Sequence[int], seconds: float) -> npt.NDArray[np.uint16]:
    """Random codes, (rows, frames), for codebooks of these sizes."""
    rng, frames = np.random.default_rng(0), round(seconds * FRAMES_A_SECOND)
    return np.stack([rng.integers(0, size, frames, np.uint16) for size in sizes[:CODE_ROWS]])


def timed(call: Callable[[], Any]) -> float:
    """Seconds that `call` takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def resident(pid: int, which: str = "VmRSS") -> float:
    """GiB of a process's memory that are resident, or with "VmHWM" that were at the most."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{which}:"):
            return int(line.split()[1]) / 2**20
    raise RuntimeError(f"/proc/{pid}/status has no {which}")


def reset_peak(pid: int) -> None:
    """Have a process's VmHWM begin anew."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError as error:
        say(f"peaks are since the process began, and so too high: clear_refs: {error.strerror}")


def shown(value: float | None, width: int, digits: int) -> str:
    """A number, or a dash for none."""
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def say(sentence: str) -> None:
    """Tell on standard error what is going on."""
    print(f"-- {sentence}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main()
    except StartError as failure:
        sys.exit(str(failure))
