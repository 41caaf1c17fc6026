"""`mimo-tokenizer encode`, `decode`, `roundtrip`, `info` and `health`, as a person or a container runs them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
from click.testing import CliRunner
from PIL import Image
from process_harness import (
    PATIENCE,
    RATE,
    SAMPLES_PER_FRAME,
    UNPRIVILEGED,
    ServerProcess,
    SlowModel,
    assert_one_sentence,
    noise,
    random_codes,
    run_command,
    sweep,
    tone,
)

from mimo_tokenizer_client import TokenizerClient
from mimo_tokenizer_server.cli import cli

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(unix_server: ServerProcess) -> Run:
    """Runs the command in this process, against the shared server; takes its arguments."""

    def invoke(command: str, *arguments: str | Path, address: str = "") -> subprocess.CompletedProcess[str]:
        words = [command, *map(str, arguments), "--address", address or unix_server.asked]
        outcome = CliRunner().invoke(cli, words)
        if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
            raise outcome.exception  # what would be a traceback
        return subprocess.CompletedProcess(words, outcome.exit_code, outcome.stdout, outcome.stderr)

    return invoke


@pytest.fixture
def wav(tmp_path: Path) -> Path:
    """Two seconds at 44.1 kHz, 16 bits."""
    soundfile.write(tmp_path / "in.wav", sweep(2, 44_100), 44_100, subtype="PCM_16")
    return tmp_path / "in.wav"


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    """Codes without a fingerprint, 25 frames."""
    np.savez(tmp_path / "in.npz", codes=random_codes(25))
    return tmp_path / "in.npz"


def save_npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


# ---------------------------------------------------------------- the main ways, as processes


def test_encode_and_decode(server: ServerProcess, wav: Path, tmp_path: Path) -> None:
    done = run_command("encode", wav, tmp_path / "codes.npz", "--address", server.address)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for text in ("2.00 s of sound", "51 frames of 20 codes", "tiny on cpu (float32)", "noise", "codes.npz"):
        assert text in done.stdout
    with np.load(tmp_path / "codes.npz", allow_pickle=False) as stored, TokenizerClient(server.address) as client:
        info = client.info()
        assert set(stored) == {"codes", "sample_rate", "samples", "model_id", "revision", "fingerprint"}
        assert stored["codes"].dtype == np.uint16
        samples, rate = soundfile.read(wav, dtype="int16")
        np.testing.assert_array_equal(stored["codes"], client.encode(samples, rate))
        assert (int(stored["sample_rate"]), int(stored["samples"])) == (44_100, 88_200)
        assert (str(stored["model_id"]), str(stored["revision"])) == ("tiny", "")
        assert str(stored["fingerprint"]) == info.model.fingerprint
        wanted = client.decode(stored["codes"])

    done = run_command("decode", tmp_path / "codes.npz", tmp_path / "out.wav", "--address", server.address)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    samples, rate = soundfile.read(tmp_path / "out.wav")
    assert rate == RATE
    assert samples.shape == (51 * SAMPLES_PER_FRAME,)
    np.testing.assert_allclose(samples, np.clip(wanted, -1, 1), atol=1 / 32768)
    assert soundfile.info(tmp_path / "out.wav").subtype == "PCM_16"


def test_a_round_trip_with_its_picture(server: ServerProcess, wav: Path, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    done = run_command("roundtrip", wav, tmp_path / "out.wav", "--plot", picture, "--address", server.address)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    samples, rate = soundfile.read(tmp_path / "out.wav")
    assert (len(samples), rate) == (2 * RATE, RATE)
    assert f"wrote {picture}" in done.stdout
    check_picture(picture)


def check_picture(path: Path) -> None:
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        assert image.width > image.height > 400
        assert len(np.unique(np.asarray(image.convert("L")))) > 50, "a blank picture"
    assert 20_000 < path.stat().st_size < 2_000_000


def test_the_address_from_the_environment(unix_server: ServerProcess) -> None:
    done = run_command("health", env={"MIMO_AUDIO_TOKENIZER_ADDRESS": unix_server.asked})
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\n", "")


def test_info(server: ServerProcess) -> None:
    done = run_command("info", "--json", "--address", server.address)
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert facts["model"]["id"] == "tiny"
    assert facts["model"]["codebook_sizes"] == [1024, 1024] + [128] * 18
    assert facts["device"]["device"] == "cpu"
    assert facts["limits"]["max_message_bytes"] == 64 << 20
    assert "torch" in facts["versions"]

    done = run_command("info", "--address", server.address)
    assert (done.returncode, done.stderr) == (0, "")
    for section, values in facts.items():
        for name in values:
            assert f"{section}.{name}" in done.stdout
    assert facts["model"]["fingerprint"] in done.stdout


def test_health_from_loading_to_the_end(start: Callable[..., ServerProcess], tmp_path: Path) -> None:
    model = SlowModel(tmp_path / "slow")
    server = start(model=model.flags)
    address = server.address
    assert_one_sentence(run_command("health", "--address", address), "not ready", address)
    assert_one_sentence(run_command("health", "--wait", "0.5", "--address", address), "not ready", address)
    assert_one_sentence(run_command("info", "--address", address), "loaded")

    answers: list[subprocess.CompletedProcess[str]] = []
    waiting = threading.Thread(
        target=lambda: answers.append(run_command("health", "--wait", "60", "--address", address))
    )
    waiting.start()
    time.sleep(0.3)
    assert not answers
    model.arrive()
    waiting.join(PATIENCE)
    assert [(done.returncode, done.stdout, done.stderr) for done in answers] == [(0, "ready\n", "")]
    assert run_command("health", "--address", address).returncode == 0

    # A process that hangs is as bad as none, and told from one in seconds.
    server.signal(signal.SIGSTOP)
    began = time.monotonic()
    assert_one_sentence(run_command("health", "--address", address), "not ready", address)
    assert time.monotonic() - began < 20
    server.signal(signal.SIGCONT)
    assert server.stop() == 0
    assert_one_sentence(run_command("health", "--address", address), "not ready", address)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_server_that_is_not_there(kind: str, wav: Path, npz: Path, tmp_path: Path) -> None:
    # Port 1 is privileged, and nobody's.
    address = f"unix://{tmp_path}/absent" if kind == "unix" else "127.0.0.1:1"
    commands: list[list[Any]] = [
        ["encode", wav, tmp_path / "x.npz"],
        ["decode", npz, tmp_path / "x.wav"],
        ["roundtrip", wav, tmp_path / "x.wav"],
        ["info"],
        ["health"],
        ["health", "--wait", "1"],
    ]
    began = time.monotonic()
    with ThreadPoolExecutor(len(commands)) as pool:
        for done in pool.map(lambda command: run_command(*command, "--address", address), commands):
            assert_one_sentence(done, address)
            assert done.stdout == ""
    assert time.monotonic() - began < 30
    assert not list(tmp_path.glob("x.*"))


@pytest.mark.parametrize("command", ["", "serve", "encode", "decode", "roundtrip", "info", "health"])
def test_help(command: str) -> None:
    done = run_command(*command.split(), "--help")
    assert done.returncode == 0
    assert done.stderr == ""
    assert "Usage: mimo-tokenizer" in done.stdout
    assert done.stdout == run_command(*command.split(), "-h").stdout


# ---------------------------------------------------------------- formats

FORMATS = {
    "16 bits": ("in.wav", {"subtype": "PCM_16"}),
    "24 bits": ("in.wav", {"subtype": "PCM_24"}),
    "8 bits": ("in.wav", {"subtype": "PCM_U8"}),
    "float": ("in.wav", {"subtype": "FLOAT"}),
    "double": ("in.wav", {"subtype": "DOUBLE"}),
    "mu-law": ("in.wav", {"subtype": "ULAW"}),
    "flac": ("in.flac", {}),
    "ogg": ("in.ogg", {}),
    "mp3": ("in.mp3", {}),
    "aiff": ("in.aiff", {}),
}


@pytest.mark.parametrize(
    ("kind", "rate"),
    [*((kind, 44_100) for kind in FORMATS), ("16 bits", 8_000), ("16 bits", 48_000), ("float", 48_000), ("mp3", 8_000)],
)
@pytest.mark.parametrize("channels", [1, 2])
def test_a_round_trip_is_as_long_as_its_source(run: Run, tmp_path: Path, kind: str, channels: int, rate: int) -> None:
    name, options = FORMATS[kind]
    sound: npt.NDArray[Any] = sweep(1.3, rate)
    if channels == 2:
        sound = np.stack([sound, tone(1.3, rate)], axis=1)
    soundfile.write(tmp_path / name, sound, rate, **options)
    length = soundfile.info(tmp_path / name).frames
    # The picture does not depend on the format, only on how its samples are read: as integers or not.
    plot = ("--plot", tmp_path / "picture.png") if kind in ("16 bits", "float") else ()
    done = run("roundtrip", tmp_path / name, tmp_path / "out.wav", *plot)
    assert done.returncode == 0, done.stderr
    out = soundfile.info(tmp_path / "out.wav")
    assert (out.frames, out.samplerate, out.channels) == (-(-length * RATE // rate), RATE, 1)
    if plot:
        check_picture(tmp_path / "picture.png")


@pytest.mark.parametrize("ending", ["wav", "WAV", "flac", "ogg", "oga", "mp3", "aiff", "au"])
def test_targets(run: Run, wav: Path, npz: Path, tmp_path: Path, ending: str) -> None:
    assert run("decode", npz, tmp_path / f"out.{ending}").returncode == 0
    info = soundfile.info(tmp_path / f"out.{ending}")
    assert (info.samplerate, info.channels) == (RATE, 1)
    # A lossy format may keep more than it was given.
    assert 0 <= info.frames - 25 * SAMPLES_PER_FRAME <= (2304 if ending == "mp3" else 0)
    assert run("roundtrip", wav, tmp_path / f"again.{ending}").returncode == 0


@pytest.mark.parametrize("ending", sorted(name.lower() for name in soundfile.available_formats()))
def test_every_ending_works_or_is_refused_in_a_sentence(
    run: Run, npz: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    # Where a second file would turn up (libsndfile's "._" of SD2).
    monkeypatch.chdir(tmp_path)
    target = tmp_path / f"out.{ending}"
    done = run("decode", npz, target)
    if done.returncode:
        assert_one_sentence(done, str(target))
    assert target.exists() == (done.returncode == 0)
    assert {path.name for path in tmp_path.iterdir()} <= {"in.npz", target.name}


@pytest.mark.parametrize("samples", [481, 960, 1000])
def test_the_shortest_sounds(run: Run, tmp_path: Path, samples: int) -> None:
    soundfile.write(tmp_path / "in.wav", noise(1)[:samples], RATE)
    done = run("roundtrip", tmp_path / "in.wav", tmp_path / "out.wav", "--plot", tmp_path / "picture.png")
    assert done.returncode == 0, done.stderr
    assert soundfile.info(tmp_path / "out.wav").frames == samples


def test_silence_has_a_picture_too(run: Run, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "in.wav", np.zeros(RATE), RATE)
    done = run("roundtrip", tmp_path / "in.wav", tmp_path / "out.wav", "--plot", tmp_path / "picture.png")
    assert done.returncode == 0, done.stderr
    with Image.open(tmp_path / "picture.png") as image:
        image.load()


def test_file_names_are_no_formulas(run: Run, wav: Path, tmp_path: Path) -> None:
    source = wav.rename(tmp_path / r"a $\nonsense$ [red]_x^.wav")
    done = run("roundtrip", source, tmp_path / "$out$.wav", "--plot", tmp_path / "picture.png")
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "$out$.wav") in done.stdout
    check_picture(tmp_path / "picture.png")


def test_options_of_encode(run: Run, wav: Path, tmp_path: Path) -> None:
    target = tmp_path / "codes.npz"
    assert run("encode", wav, target).returncode == 0
    plain = np.load(target)["codes"]
    assert run("encode", wav, target, "--num-quantizers", "8", "--group-size", "4", "--timeout", "60").returncode == 0
    codes = np.load(target)["codes"]
    assert codes.shape == (8, 52)
    np.testing.assert_array_equal(codes[:, :51], plain[:8])
    assert run("decode", target, tmp_path / "out.wav").returncode == 0
    assert soundfile.info(tmp_path / "out.wav").frames == 52 * SAMPLES_PER_FRAME
    assert run("roundtrip", wav, tmp_path / "out.wav", "--num-quantizers", "2").returncode == 0
    assert_one_sentence(run("encode", wav, target, "--num-quantizers", "21"), "num_quantizers is 21")
    assert_one_sentence(run("encode", wav, target, "--group-size", "5000"), "group_size is 5000")
    for wrong in (("--num-quantizers", "0"), ("--group-size", "0"), ("--timeout", "0"), ("--timeout", "nan")):
        assert_one_sentence(run("encode", wav, target, *wrong), wrong[0], status=2)
    np.testing.assert_array_equal(np.load(target)["codes"], codes)


def test_a_time_that_is_too_short(run: Run, tmp_path: Path) -> None:
    np.savez(tmp_path / "long.npz", codes=random_codes(2000))
    done = run("decode", tmp_path / "long.npz", tmp_path / "out.wav", "--timeout", "0.1")
    # The server may see it first: that it cannot be done by then.
    assert_one_sentence(done)
    assert re.search(r"0\.1 s|the deadline is 0\.\d+ seconds off", done.stderr)
    assert not (tmp_path / "out.wav").exists()


# ---------------------------------------------------------------- bad files


def bad_sounds(folder: Path) -> dict[str, Path]:
    """Files that are no sound, by what is wrong with them."""
    soundfile.write(folder / "no samples.wav", np.zeros(0), RATE)
    (folder / "empty.wav").write_bytes(b"")
    (folder / "text.wav").write_text("this is no sound\n" * 100)
    (folder / "text.mp3").write_text("this is no sound\n" * 100)
    (folder / "codes.npz").write_bytes(b"PK\x03\x04")
    (folder / "headerless.raw").write_bytes(bytes(10_000))
    soundfile.write(folder / "whole.flac", noise(1), RATE)
    (folder / "cut.flac").write_bytes((folder / "whole.flac").read_bytes()[:30])
    names = ("no samples.wav", "empty.wav", "text.wav", "text.mp3", "codes.npz", "headerless.raw", "cut.flac")
    return {name: folder / name for name in names}


@pytest.mark.parametrize("command", ["encode", "roundtrip"])
@pytest.mark.parametrize(
    "name", ["no samples.wav", "empty.wav", "text.wav", "text.mp3", "codes.npz", "headerless.raw", "cut.flac"]
)
def test_sources_that_are_no_sound(run: Run, tmp_path: Path, command: str, name: str) -> None:
    source = bad_sounds(tmp_path)[name]
    target = tmp_path / ("out.npz" if command == "encode" else "out.wav")
    assert_one_sentence(run(command, source, target), str(source))
    assert not target.exists()


def test_sounds_that_the_server_refuses(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    soundfile.write(tmp_path / "short.wav", noise(0.01), RATE)
    assert_one_sentence(run("encode", tmp_path / "short.wav", target), "240 samples", "at least")
    soundfile.write(tmp_path / "nan.wav", np.full(RATE, np.nan, np.float32), RATE, subtype="FLOAT")
    assert_one_sentence(run("encode", tmp_path / "nan.wav", target), "nan at sample 0")
    soundfile.write(tmp_path / "slow.wav", noise(1), 500)
    assert_one_sentence(run("encode", tmp_path / "slow.wav", target), "500")
    assert not target.exists()


def bad_codes(folder: Path) -> dict[str, Path]:
    """Files that `decode` refuses, by what is wrong with them."""
    good = random_codes(25)
    (folder / "text.npz").write_text("this is no archive")
    (folder / "empty.npz").write_bytes(b"")
    np.save(folder / "array.npy", good)
    save_npz(folder / "whole.npz", codes=good)
    whole = (folder / "whole.npz").read_bytes()
    (folder / "cut.npz").write_bytes(whole[: len(whole) // 2])
    damaged = bytearray(whole)
    damaged[len(damaged) // 2] ^= 0xFF
    (folder / "damaged.npz").write_bytes(damaged)
    save_npz(folder / "no codes.npz", samples=good)
    save_npz(folder / "objects.npz", codes=np.array([{}], dtype=object))
    save_npz(folder / "floats.npz", codes=good.astype(np.float32))
    save_npz(folder / "too large.npz", codes=good.astype(np.int64) + 65_536)
    save_npz(folder / "out of range.npz", codes=np.full((20, 25), 500))
    save_npz(folder / "one row.npz", codes=good[0])
    save_npz(folder / "scalar.npz", codes=np.int64(3))
    save_npz(folder / "three axes.npz", codes=good[None])
    save_npz(folder / "no frames.npz", codes=good[:, :0])
    save_npz(folder / "other.npz", codes=good, fingerprint=np.str_("0" * 32))
    return {path.name: path for path in folder.iterdir() if path.name != "whole.npz"}


BAD_CODES = [
    "array.npy", "cut.npz", "damaged.npz", "empty.npz", "floats.npz", "no codes.npz", "no frames.npz", "objects.npz",
    "one row.npz", "other.npz", "out of range.npz", "scalar.npz", "text.npz", "three axes.npz", "too large.npz",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_CODES)
def test_sources_that_are_no_codes(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "files").mkdir()
    sources = bad_codes(tmp_path / "files")
    assert sorted(sources) == BAD_CODES
    done = run("decode", sources[name], tmp_path / "out.wav")
    assert_one_sentence(done)
    if name in ("array.npy", "cut.npz", "damaged.npz", "empty.npz", "no codes.npz", "objects.npz", "text.npz"):
        assert str(sources[name]) in done.stderr
    assert not (tmp_path / "out.wav").exists()


def test_codes_of_another_model_are_refused(run: Run, wav: Path, tmp_path: Path, unix_server: ServerProcess) -> None:
    codes = tmp_path / "codes.npz"
    assert run("encode", wav, codes).returncode == 0
    assert run("decode", codes, tmp_path / "out.wav").returncode == 0
    with np.load(codes) as stored:
        other = dict(stored) | {"fingerprint": np.str_("f" * 32)}
    save_npz(codes, **other)
    with TokenizerClient(unix_server.address) as client:
        ours = client.info().model.fingerprint
    before = (tmp_path / "out.wav").read_bytes()
    assert_one_sentence(run("decode", codes, tmp_path / "out.wav"), "f" * 32, ours)
    assert (tmp_path / "out.wav").read_bytes() == before


# ---------------------------------------------------------------- bad targets


@pytest.mark.parametrize("name", ["out", "out.xyz", "out.", ".wav"])
def test_endings_that_name_no_format(run: Run, wav: Path, npz: Path, tmp_path: Path, name: str) -> None:
    for command, source in (("decode", npz), ("roundtrip", wav)):
        assert_one_sentence(run(command, source, tmp_path / name), "its ending names none", "wav", "flac")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npz", "in.wav"]


def test_an_ending_that_names_no_format_costs_no_work(run: Run, npz: Path, tmp_path: Path) -> None:
    """Nobody wants to learn it at the end of half an hour."""
    address = f"unix://{tmp_path}/absent"
    assert_one_sentence(run("decode", npz, tmp_path / "out.xyz", address=address), "its ending names none")
    soundfile.write(tmp_path / "in.wav", noise(1), RATE)
    done = run("roundtrip", tmp_path / "in.wav", tmp_path / "out.xyz", address=address)
    assert_one_sentence(done, "its ending names none")


@pytest.mark.parametrize("command", ["encode", "decode", "roundtrip"])
def test_targets_in_no_folder(run: Run, wav: Path, npz: Path, tmp_path: Path, command: str) -> None:
    source, name = {"encode": (wav, "x.npz"), "decode": (npz, "x.wav"), "roundtrip": (wav, "x.wav")}[command]
    target = tmp_path / "absent" / name
    assert_one_sentence(run(command, source, target), str(target))


def test_targets_in_a_folder_that_is_not_writable(unix_server: ServerProcess, wav: Path, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    target = tmp_path / "closed" / "x.npz"
    done = run_command("encode", wav, target, "--address", unix_server.asked, launcher=UNPRIVILEGED)
    assert_one_sentence(done, str(target), "Permission denied")
    (tmp_path / "closed").chmod(0o755)


@pytest.mark.parametrize("name", ["absent/picture.png", "picture.xyz"])
def test_pictures_that_cannot_be_written(run: Run, wav: Path, tmp_path: Path, name: str) -> None:
    done = run("roundtrip", wav, tmp_path / "out.wav", "--plot", tmp_path / name)
    assert_one_sentence(done, str(tmp_path / name))
    # What the ending tells is refused before any work; what only the system knows costs the picture alone.
    if name.endswith(".xyz"):
        assert not (tmp_path / "out.wav").exists()
    else:
        assert soundfile.info(tmp_path / "out.wav").frames == 2 * RATE


def test_a_picture_without_an_ending(run: Run, wav: Path, tmp_path: Path) -> None:
    assert run("roundtrip", wav, tmp_path / "out.wav", "--plot", tmp_path / "picture").returncode == 0
    check_picture(tmp_path / "picture")


def test_a_target_is_kept_when_the_call_fails(run: Run, wav: Path, npz: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "bad.npz", codes=np.full((20, 3), 999))
    for command, good, bad in (
        ("encode", [wav, tmp_path / "x.npz"], [wav, tmp_path / "x.npz", "--num-quantizers", "21"]),
        ("decode", [npz, tmp_path / "x.wav"], [tmp_path / "bad.npz", tmp_path / "x.wav"]),
        ("roundtrip", [wav, tmp_path / "y.wav"], [wav, tmp_path / "y.wav", "--num-quantizers", "21"]),
    ):
        target = good[1]
        target.write_text("precious")
        assert_one_sentence(run(command, *bad))
        assert target.read_text() == "precious"
        assert run(command, *good).returncode == 0
        assert target.read_bytes() != b"precious"
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["bad.npz", "in.npz", "in.wav", "x.npz", "x.wav", "y.wav"]


def test_a_target_may_be_the_source(run: Run, wav: Path) -> None:
    before = wav.read_bytes()
    assert run("roundtrip", wav, wav).returncode == 0
    assert wav.read_bytes() != before
    assert soundfile.info(wav).samplerate == RATE


def test_a_target_has_the_permissions_of_any_new_file(run: Run, wav: Path, tmp_path: Path) -> None:
    (tmp_path / "any").touch()
    assert run("encode", wav, tmp_path / "x.npz").returncode == 0
    assert (tmp_path / "x.npz").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_what_a_link_points_to_is_written(run: Run, wav: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "real.npz").write_bytes(b"")
    (tmp_path / "link.npz").symlink_to("elsewhere/real.npz")
    assert run("encode", wav, tmp_path / "link.npz").returncode == 0
    assert (tmp_path / "link.npz").is_symlink()
    assert np.load(tmp_path / "elsewhere" / "real.npz")["codes"].shape == (20, 51)


def test_a_device_is_written_to_and_not_replaced(run: Run, wav: Path, tmp_path: Path) -> None:
    """`/dev/null` as the target, run by root, must not become a file; a named pipe stands for it here."""
    pipe = tmp_path / "pipe.npz"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert run("encode", wav, pipe).returncode == 0
    assert pipe.is_fifo()
    reader.join(PATIENCE)
    (tmp_path / "got.npz").write_bytes(got[0])
    assert np.load(tmp_path / "got.npz")["codes"].shape == (20, 51)


def test_what_is_no_code_file_is_said(run: Run, wav: Path, tmp_path: Path) -> None:
    done = run("decode", wav, tmp_path / "out.wav")
    assert_one_sentence(done, str(wav), "it is no archive of arrays")
    done = run("encode", wav, tmp_path / "absent" / "x.npz")
    assert_one_sentence(done, f"there is no folder {tmp_path / 'absent'}")
