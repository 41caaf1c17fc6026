"""A picture of sounds: for each its waveform above its mel spectrogram."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .audio_files import FileError

_MELS = 80
_WINDOW = 1024
_MAX_COLUMNS = 1200


def draw(path: Path, sounds: Sequence[tuple[str, npt.NDArray[Any], int]]) -> None:
    """Draw sounds side by side.

    Args:
        path: written in the format of its ending, as PNG if it has none.
        sounds: title, waveform (samples,) or (channels, samples), sample rate.

    Raises:
        FileError: the ending names no format of matplotlib's, or the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kind = format_of(path)
    figure = Figure(figsize=(6.5 * len(sounds), 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(sounds), squeeze=False, sharex="col", height_ratios=(1, 2))
    for (upper, lower), (title, waveform, rate) in zip(axes.T, sounds, strict=True):
        mono = _mono(waveform)
        seconds = len(mono) / rate
        upper.plot(np.arange(len(mono)) / rate, mono, linewidth=0.4)
        upper.set_title(title, parse_math=False)
        upper.set(ylabel="amplitude", xlim=(0, seconds))
        upper.grid(alpha=0.3)
        mel = log_mel(mono, rate)
        image = lower.imshow(
            mel, origin="lower", aspect="auto", extent=(0, seconds, 0, _MELS), vmin=mel.max() - 80, cmap="magma"
        )
        lower.set(xlabel="seconds", ylabel="mel band")
        figure.colorbar(image, ax=lower, label="dB")
    try:
        figure.savefig(path, format=kind, dpi=110)
    except (OSError, ValueError) as error:
        raise FileError(f"cannot write {path}: {error}") from error


def format_of(path: Path) -> str:
    """The format that a picture's ending names, PNG if it has none.

    Raises:
        FileError: it names none of matplotlib's.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    kind = path.suffix[1:].lower() or "png"
    if kind not in known:
        raise FileError(f"cannot write {path}: its ending names none of {', '.join(known)}")
    return kind


def log_mel(mono: npt.NDArray[np.float64], rate: int) -> npt.NDArray[np.float64]:
    """Mel spectrogram in dB, (mel bands, columns): as many columns as a picture shows."""
    padded = np.pad(mono, _WINDOW // 2)
    hop = max(_WINDOW // 4, len(mono) // _MAX_COLUMNS)
    starts = np.arange(0, len(padded) - _WINDOW + 1, hop)
    frames = padded[starts[:, None] + np.arange(_WINDOW)] * np.hanning(_WINDOW)
    power = np.abs(np.fft.rfft(frames)) ** 2  # (columns, bins)
    return np.asarray(10 * np.log10(np.maximum(_mel_filters(rate) @ power.T, 1e-10)))


def _mel_filters(rate: int) -> npt.NDArray[np.float64]:
    """Triangles on the mel scale (O'Shaughnessy: 2595 log10(1 + f / 700)), (mel bands, bins)."""
    top = 2595 * np.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, _MELS + 2) / 2595) - 1)
    bins = np.fft.rfftfreq(_WINDOW, 1 / rate)
    rising = (bins - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - bins) / np.diff(edges)[1:, None]
    return np.maximum(0, np.minimum(rising, falling))


def _mono(waveform: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    samples = waveform.astype(np.float64)
    if waveform.dtype == np.int16:
        samples /= 32768
    return samples.mean(axis=0) if samples.ndim == 2 else samples
