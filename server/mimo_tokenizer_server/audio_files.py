"""Sound files and code files of the command line."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import click
import numpy as np
import numpy.typing as npt
import soundfile

from mimo_tokenizer_client import ServerInfo


class FileError(click.ClickException):
    """A file that cannot be read or written; the sentence names it, and the command ends with it."""


@dataclass(frozen=True)
class StoredCodes:
    """Codes (num_quantizers, frames), and the fingerprint of the model that made them."""

    codes: npt.NDArray[np.uint16]
    fingerprint: str | None


def read(path: Path) -> tuple[npt.NDArray[Any], int]:
    """Read a sound file.

    Returns:
        The waveform (channels, samples) in float32, or in int16 where the file holds that; and its rate.

    Raises:
        FileError: soundfile cannot read it, or it holds no samples.
    """
    try:
        with soundfile.SoundFile(path) as file:
            dtype = "int16" if file.subtype == "PCM_16" else "float32"
            samples = file.read(dtype=dtype, always_2d=True)
            rate = file.samplerate
    except (soundfile.SoundFileError, OSError, TypeError) as error:  # TypeError: headerless, by its ending
        raise FileError(f"cannot read {path} as a sound file: {error}") from error
    if not len(samples):
        raise FileError(f"{path} holds no samples")
    return np.ascontiguousarray(samples.T), rate


def format_of(path: Path) -> str:
    """What soundfile calls the format that the file's ending names.

    Raises:
        FileError: it names none that soundfile writes.
    """
    # RAW would keep neither rate nor type, SD2 needs a second file by its side.
    known = sorted(soundfile.available_formats().keys() - {"RAW", "SD2"})
    ending = path.suffix[1:].upper()
    kind = {"OGA": "OGG"}.get(ending, ending)
    if kind not in known:
        raise FileError(f"cannot write {path}: its ending names none of {', '.join(known).lower()}")
    return kind


def write(path: Path, samples: npt.NDArray[np.float32], rate: int) -> None:
    """Write mono samples (samples,) in the format of the file's ending, 16 bits a sample where it has the choice.

    Raises:
        FileError: the ending names no format that soundfile writes, or the file cannot be written.
    """
    kind = format_of(path)

    def save(file: IO[bytes]) -> None:
        soundfile.write(file, samples, rate, format=kind)

    _replace(path, save)


def fit(samples: npt.NDArray[np.float32], length: int) -> npt.NDArray[np.float32]:
    """Cut or, with silence, lengthen (samples,) to `length`."""
    return np.pad(samples[:length], (0, max(0, length - len(samples))))


def write_codes(path: Path, codes: npt.NDArray[np.uint16], info: ServerInfo, samples: int, rate: int) -> None:
    """Write codes and where they come from: the model, and the recording's length and rate."""

    def save(file: IO[bytes]) -> None:
        np.savez_compressed(
            file,
            codes=codes,
            sample_rate=np.int64(rate),
            samples=np.int64(samples),
            model_id=np.str_(info.model.id),
            revision=np.str_(info.model.revision),
            fingerprint=np.str_(info.model.fingerprint),
        )

    _replace(path, save)


def read_codes(path: Path) -> StoredCodes:
    """Read an .npz with `codes`, and `fingerprint` if it is there.

    Raises:
        FileError: it is no such file.
    """
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no archive of arrays")
        with np.load(path, allow_pickle=False) as stored:
            codes = stored.get("codes")
            fingerprint = str(stored["fingerprint"]) if "fingerprint" in stored else None
    except Exception as error:  # zipfile, zlib and numpy each have their own for a file that is damaged
        raise FileError(f"cannot read {path} as an .npz of codes: {error}") from error
    if codes is None:
        raise FileError(f"{path} holds no array named 'codes'")
    if codes.ndim != 2:
        raise FileError(f"the codes in {path} have shape {codes.shape}, not (num_quantizers, frames)")
    return StoredCodes(codes, fingerprint)


def _replace(path: Path, save: Callable[[IO[bytes]], None]) -> None:
    """Write a file next to its place and move it there: never half of it, never an old one destroyed for nothing."""
    try:
        place = path.resolve()  # what a link points to
        if not place.parent.is_dir():
            raise FileError(f"cannot write {path}: there is no folder {place.parent}")
        if place.exists() and not place.is_file():
            # A device or a pipe is written to, never replaced.
            with tempfile.TemporaryFile() as whole, open(place, "wb") as target:
                save(whole)
                whole.seek(0)
                shutil.copyfileobj(whole, target)
            return
        descriptor, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
        try:
            with open(descriptor, "wb") as file:
                save(file)
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(name, 0o666 & ~mask)
            os.replace(name, place)
        except BaseException:
            os.unlink(name)
            raise
    except (OSError, soundfile.SoundFileError) as error:
        raise FileError(f"cannot write {path}: {error}") from error
