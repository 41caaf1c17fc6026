"""The model on its pinned device. Everything here runs in one thread, the one that made the engine."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import device as devices
from .config import BUILT_IN_MODELS, ServeConfig
from .errors import Reason, RequestError
from .model import checkpoint
from .model.config import TokenizerConfig, read_json, unknown_fields
from .model.tokenizer import EncodeState, MiMoAudioTokenizer
from .telemetry import log

# Received bytes are wrapped, not copied; PyTorch warns that it could write to them. It does not.
warnings.filterwarnings("ignore", message="The given (buffer|NumPy array) is not writable")

# Sound and codes that the engine computes once before it is ready, in code frames.
_WARM_UP_FRAMES = 25


class DeviceFailure(RuntimeError):
    """The device is unusable for this process from here on."""


@dataclass
class Recording:
    """One recording on its way to codes; its pieces are encoded in their order.

    Attributes:
        sample_rate: samples a second of its pieces.
        num_quantizers: codebooks wanted, counted from the first.
        group_size: the frame count is padded to a multiple of this.
    """

    sample_rate: int
    num_quantizers: int
    group_size: int
    state: EncodeState | None = field(default=None, repr=False)


@dataclass
class EncodePiece:
    """The next samples of a recording: (samples, channels), float32 or int16. Answered with uint16 codes."""

    recording: Recording
    pcm: npt.NDArray[Any]
    last: bool


@dataclass
class DecodeVqWork:
    """uint16 codes (num_quantizers, frames), checked. Answered with float32 (frames, d_model)."""

    codes: npt.NDArray[np.uint16]


@dataclass
class DecodeWork:
    """uint16 codes (num_quantizers, frames), checked. Answered with samples, float32 or int16."""

    codes: npt.NDArray[np.uint16]
    left_context_frames: int
    int16: bool


Work = EncodePiece | DecodeVqWork | DecodeWork
Answer = npt.NDArray[Any] | RequestError


@dataclass(frozen=True)
class EngineInfo:
    """What is loaded, and where."""

    config: TokenizerConfig
    model_id: str
    revision: str
    fingerprint: str
    random_weights: bool
    device: str
    device_name: str
    memory_total: int
    dtype: str


class Engine:
    """Loads the model, warms it up, and runs batches of work.

    Args:
        config: what to load, and where.

    Raises:
        DeviceError, ConfigError, CheckpointError: with the sentence to show.
    """

    def __init__(self, config: ServeConfig) -> None:
        started = time.monotonic()
        self._device = devices.resolve(config.device)
        devices.pin(self._device)
        # A float32 model is asked for to be exact: no TF32 in its products and convolutions.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        dtype = devices.dtype_of(config.dtype, self._device)
        self._model, self.info = self._load(config, dtype)
        loaded = time.monotonic()
        self._warm_up()
        log(
            logging.INFO,
            "model loaded",
            model=self.info.model_id,
            revision=self.info.revision or "-",
            fingerprint=self.info.fingerprint,
            device=self.info.device,
            dtype=self.info.dtype,
            weights_mib=checkpoint.parameter_bytes(self._model) // 2**20,
            load_seconds=loaded - started,
            warm_up_seconds=time.monotonic() - loaded,
        )

    def _load(self, config: ServeConfig, dtype: torch.dtype) -> tuple[MiMoAudioTokenizer, EngineInfo]:
        dummy = config.load_format == "dummy"
        if dummy and config.model in BUILT_IN_MODELS:
            source = checkpoint.Source(BUILT_IN_MODELS[config.model].parent, config.model, "")
            config_file = BUILT_IN_MODELS[config.model]
        elif dummy and Path(config.model).is_file():
            source = checkpoint.Source(Path(config.model).parent, Path(config.model).stem, "")
            config_file = Path(config.model)
        else:
            source = checkpoint.locate(config.model, config.revision, weights=not dummy)
            config_file = source.folder / "config.json"
        model_config = TokenizerConfig.from_file(config_file)
        if ignored := unknown_fields(read_json(config_file)):
            log(logging.WARNING, "config.json has fields that mean nothing here", fields=", ".join(ignored))
        model = MiMoAudioTokenizer(model_config, self._device, dtype)

        def prepare_thread() -> None:
            devices.pin(self._device)

        if dummy:
            fingerprint = checkpoint.fill_random(model, config.seed, prepare_thread)
            log(logging.WARNING, "random weights: codes and sound carry no meaning", seed=config.seed)
        else:
            fingerprint = checkpoint.load(model, source.folder, prepare_thread)
        devices.synchronize(self._device)
        return model, EngineInfo(
            config=model_config,
            model_id=source.model_id,
            revision=source.revision,
            fingerprint=fingerprint,
            random_weights=dummy,
            device=str(self._device),
            device_name=devices.describe(self._device),
            memory_total=devices.memory_total(self._device),
            dtype=str(dtype).removeprefix("torch."),
        )

    def _warm_up(self) -> None:
        config = self.info.config
        rng = np.random.default_rng(0)
        samples = max(config.min_samples, _WARM_UP_FRAMES * config.samples_per_frame)
        sound = rng.uniform(-0.1, 0.1, (samples, 1)).astype(np.float32)
        codes = np.stack([rng.integers(0, size, _WARM_UP_FRAMES) for size in config.codebook_sizes]).astype(np.uint16)
        recording = Recording(config.sampling_rate, config.num_quantizers, 1)
        for answer in self.run([EncodePiece(recording, sound, last=True), DecodeWork(codes, 0, int16=False)]):
            if isinstance(answer, RequestError):
                raise RuntimeError(f"the model does not run: {answer}")

    def memory_allocated(self) -> int:
        """Bytes of the device that this process holds; 0 where it does not tell."""
        return devices.memory_allocated(self._device)

    @torch.inference_mode()
    def run(self, batch: Sequence[Work]) -> list[Answer]:
        """Answer each item of `batch`, alone.

        Raises:
            DeviceFailure: the device is lost; nothing that is waiting can be answered.
        """
        return [self._run_one(work) for work in batch]

    def _run_one(self, work: Work) -> Answer:
        try:
            if isinstance(work, EncodePiece):
                return self._encode(work)
            if isinstance(work, DecodeVqWork):
                return self._model.decode_vq(self._codes(work.codes)).cpu().numpy()
            return self._decode(work)
        except (RuntimeError, MemoryError) as error:
            if _is_out_of_memory(error):
                devices.release_memory(self._device)
                return _out_of_memory(work, self.info.device)
            if isinstance(error, torch.AcceleratorError):
                raise DeviceFailure(f"{self.info.device} failed: {str(error).splitlines()[0]}") from error
            raise

    def _encode(self, work: EncodePiece) -> npt.NDArray[np.uint16]:
        recording = work.recording
        if recording.state is None:
            recording.state = EncodeState(
                self._model, recording.sample_rate, recording.num_quantizers, recording.group_size
            )
        samples = torch.from_numpy(work.pcm).to(self._device)
        if samples.dtype == torch.int16:
            samples = samples.float().div_(32768)
        mono = samples.mean(dim=1) if samples.shape[1] > 1 else samples.squeeze(1)
        codes = recording.state.push(mono)
        if work.last:
            codes = torch.cat((codes, recording.state.finish()), dim=1)
            recording.state = None
        return codes.to(torch.int32).cpu().numpy().astype(np.uint16)

    def _decode(self, work: DecodeWork) -> npt.NDArray[Any]:
        config = self.info.config
        samples = self._model.decode(self._codes(work.codes))
        samples = samples[work.left_context_frames * config.samples_per_frame :]
        if work.int16:
            samples = samples.mul(32768).round_().clamp_(-32768, 32767).to(torch.int16)
        return samples.cpu().numpy()

    def _codes(self, codes: npt.NDArray[np.uint16]) -> Tensor:
        # PyTorch indexes with int32, not with uint16.
        return torch.from_numpy(codes.astype(np.int32)).to(self._device)


def _is_out_of_memory(error: Exception) -> bool:
    # The CPU's allocator and cuBLAS raise plain RuntimeErrors.
    sentences = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in sentences)


def _out_of_memory(work: Work, device: str) -> RequestError:
    size = (
        f"{len(work.pcm) / work.recording.sample_rate:.1f} seconds of audio"
        if isinstance(work, EncodePiece)
        else f"{work.codes.shape[1]} frames"
    )
    return RequestError(
        Reason.OUT_OF_MEMORY, f"{device} has too little free memory for this item of {size}", value=size
    )
