"""The model on its pinned device. It computes in one thread, the one that made it, and answers questions from any."""

from __future__ import annotations

import dataclasses
import enum
import functools
import gc
import itertools
import logging
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import device as devices
from . import memory
from .config import BUILT_IN_MODELS, ServeConfig
from .errors import Reason, RequestError
from .graphs import Graphs, can_record
from .memory import Division, MemoryLimitError, mib
from .model import checkpoint, int8
from .model.config import SEGMENT_MEL_FRAMES, TokenizerConfig, read_json, unknown_fields
from .model.frontend import Resampler, Segment
from .model.packing import Spans
from .model.rows import can_pack, linear_layers, pack
from .model.tokenizer import MiMoAudioTokenizer
from .telemetry import log, logger
from .work import Answer, Cost, DecodeVqWork, DecodeWork, EncodeWork, Kind, Work

# Received bytes are wrapped, not copied; PyTorch warns that it could write to them. It does not.
warnings.filterwarnings("ignore", message="The given (buffer|NumPy array) is not writable")

# What a batch takes at most, and a step of longer work: what comes meanwhile waits for one of them, and where short and
# long work of both kinds saturate the device, for two of each. Shorter batches would read the weights more often.
BATCH_SECONDS = 0.08
STEP_SECONDS = 0.04


@dataclass(frozen=True)
class _Sample:
    """What is computed at warm-up.

    Attributes:
        frames: code frames of which time and memory are measured.
        items: short items of which the time is.
        layers: of each transformer for all but the time of `frames`; None for all.
        runs: of `frames` with all layers, of which the fastest counts; and one less before anything is measured.
    """

    frames: int
    items: int
    layers: int | None
    runs: int


# An accelerator shows what it can only with many frames, and computes them in no time.
_SAMPLES = {"cpu": _Sample(20, 9, 2, 1)}
_SAMPLE_ELSEWHERE = _Sample(1000, 65, None, 3)

# What is measured is not exact for every length: allocators round, and libraries have workspaces.
_MARGIN = 1.2

# Plans of Fourier transforms that are kept; nearly each batch has another number of frames.
_FFT_PLANS = 16

# Code frames that a step has activations for at the most: the rows that the model's pieces are bounded to.
_STEP_FRAMES = 1024

# With --batch-invariant every matrix product on an accelerator has this many rows.
_TILE_ROWS = 512

# In reduced precision a batch on an accelerator has at least so many code frames; those that it lacks are computed and
# thrown away. For products of fewer rows libraries choose kernels that sum in another order (split-K): codes change,
# and a sound of up to three seconds comes out as much as 1.7 dB nearer to float32, or farther from it, than in a larger
# batch.
_LEAST_FRAMES = 128

# What every sound takes, however short.
_SHORTEST_SOUND_BYTES = 1 << 19

# What must not follow from how fast the device has been so far, or the same item would have other bits an hour later.
# Code frames of which a layer's arithmetic is a piece of an item that is computed in steps:
_PIECE_FRAMES = {"cpu": 256}
_PIECE_FRAMES_ELSEWHERE = 1024
# With --batch-invariant, the floating-point operations of an item up to which it goes into a batch, and not in steps:
_BATCH_FLOPS = {"cpu": 2e10}
_BATCH_FLOPS_ELSEWHERE = 1e13


class DeviceFailure(RuntimeError):
    """The device is unusable for this process from here on."""


@dataclass(frozen=True)
class EngineInfo:
    """What is loaded, where, and what it may use."""

    config: TokenizerConfig
    model_id: str
    revision: str
    fingerprint: str
    random_weights: bool
    device: str
    device_name: str
    memory_total: int
    dtype: str
    quantization: str
    loss: int8.Loss | None
    batch_invariant: bool
    max_batch_frames: int
    memory: Division


@dataclass
class _Measured:
    """What a kind of work takes.

    Attributes:
        rate: floating-point operations a second, the best seen so far.
        item_seconds: that each further item of a batch takes, however short.
        batch_bytes: of activations, for each code frame of a batch.
        state_bytes: for each code frame of an item that is computed in steps.
    """

    rate: float
    item_seconds: float
    batch_bytes: float
    state_bytes: float


class Engine:
    """Loads the model, warms it up, and computes.

    Args:
        config: what to load, and where.
        on_graph: told of each batch whether it was one of the recorded graphs; not called where there are none.

    Raises:
        DeviceError, QuantizeError, ConfigError, CheckpointError, MemoryLimitError: with the sentence to show.
    """

    def __init__(self, config: ServeConfig, on_graph: Callable[[Kind, bool], None] | None = None) -> None:
        started = time.monotonic()
        # What was imported is not looked through for garbage any more: that takes a tenth of a second each time.
        gc.freeze()
        self._device = devices.resolve(config.device)
        devices.pin(self._device)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        if self._device.type == "cuda":
            # Plans for transforms of so many frames are kept outside of PyTorch's memory, by default thousands of them.
            torch.backends.cuda.cufft_plan_cache[self._device].max_size = _FFT_PLANS
        # A float32 model is asked for to be exact: no TF32 in its products and convolutions.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        limit = memory.limit(config.device_memory_limit, self._device)
        memory.enforce(limit, self._device)
        # On the CPU not everything has sums that do not depend on the batch, so items are computed alone.
        self._alone = config.batch_invariant and self._device.type == "cpu"
        reduced = devices.dtype_of(config.dtype, self._device) != torch.float32
        self._least_frames = _LEAST_FRAMES if reduced and self._device.type != "cpu" else 0
        try:
            self._model, self.info = self._load(config)
            frames = _PIECE_FRAMES.get(self._device.type, _PIECE_FRAMES_ELSEWHERE)
            self._piece_flops = self._model.decode_flops(frames) / self.info.config.decoder_layers
            self._batch_flops = _BATCH_FLOPS.get(self._device.type, _BATCH_FLOPS_ELSEWHERE)
            loaded = time.monotonic()
            self._measured: dict[Kind, _Measured] = {}
            self._graphs: Graphs | None = None
            self._on_graph: Callable[[Kind, bool], None] | None = None
            self._warm_up(config.max_graph_frames)
            memory.release(self._device)
        except torch.OutOfMemoryError as error:
            raise MemoryLimitError(
                f"{self._device} has too little memory for this model: the limit is {mib(limit)}, of which"
                f" {mib(memory.used(self._device))} were taken when there was no more"
            ) from error
        self.info = dataclasses.replace(self.info, memory=self._divide(limit))
        self._on_graph = on_graph
        gc.freeze()  # and the model neither
        log(
            logging.INFO,
            "model loaded",
            model=self.info.model_id,
            revision=self.info.revision or "-",
            fingerprint=self.info.fingerprint,
            device=self.info.device,
            dtype=self.info.dtype,
            threads=torch.get_num_threads(),
            load_seconds=loaded - started,
            warm_up_seconds=time.monotonic() - loaded,
        )

    def _load(self, config: ServeConfig) -> tuple[MiMoAudioTokenizer, EngineInfo]:
        dtype = devices.dtype_of(config.dtype, self._device)
        if config.quantize == "int8":
            int8.check(self._device, dtype)
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
        tiled = config.batch_invariant and not self._alone
        model = MiMoAudioTokenizer(model_config, self._device, dtype, tile_rows=_TILE_ROWS if tiled else None)

        def prepare_thread() -> None:
            devices.pin(self._device)

        if dummy:
            fingerprint = checkpoint.fill_random(model, config.seed, prepare_thread)
            log(logging.WARNING, "random weights: codes and sound carry no meaning", seed=config.seed)
        else:
            kept = int8.layers(model, encoder=config.quantize_encoder) if config.quantize == "int8" else []
            layers = linear_layers(model) if can_pack(self._device, dtype) else []
            packed = set(layers) - set(kept)
            fingerprint = checkpoint.load(model, source.folder, prepare_thread, packed)
        loss = None
        if config.quantize == "int8":
            loss = int8.quantize(model, encoder=config.quantize_encoder)
            log(
                logging.INFO,
                "weights quantized; against float32, on a built-in signal",
                quantization=config.quantize,
                encoder_quantized=loss.encoder,
                decode_snr_db=round(loss.decode_snr, 1),
                equal_codes=round(loss.equal_codes, 4),
            )
        if can_pack(self._device, dtype):
            pack(model)
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
            quantization=config.quantize,
            loss=loss,
            batch_invariant=config.batch_invariant,
            max_batch_frames=config.max_batch_frames,
            memory=Division(0, 0, 0, 0, 0),  # until it is measured what there is to divide
        )

    # ------------------------------------------------------------ what it takes

    def _warm_up(self, max_graph_frames: int) -> None:
        """Compute each kind of work, measure its speed and its memory, and record graphs."""
        sample = _SAMPLES.get(self._device.type, _SAMPLE_ELSEWHERE)
        for work, shortest in zip(self._samples(sample.frames), self._samples(1), strict=True):
            count, flops = self._frames(work), self._flops(work)

            def run(work: Work = work) -> None:
                self._expect(self._compute_batch([work]))

            measured = self._measured[_kind(work)] = _Measured(0.0, 0.0, 0.0, 0.0)
            with self._model.shallow(sample.layers):
                for _ in range(sample.runs - 1):
                    run()  # what libraries take for themselves, once, is none of what follows
                measured.batch_bytes = memory.peak_of(run, self._device) * _MARGIN / count
                if not isinstance(work, DecodeVqWork):
                    # As long items are: with what they hold between their steps, and little beside it.
                    in_steps = functools.partial(self._expect_in_steps, work, flops / 64)
                    measured.state_bytes = memory.peak_of(in_steps, self._device) * _MARGIN / count
                if isinstance(work, EncodeWork) and max_graph_frames and can_record(self._model):
                    # After the libraries have been used once, and before short items are timed.
                    with torch.inference_mode():
                        self._graphs = Graphs(self._model, max_graph_frames)
                one, many = (self._seconds([shortest] * number, 2) for number in (1, sample.items))
                part = self._flops(shortest)
            whole = self._flops(shortest)
            # The best: it is held against deadlines, and must not promise less than can be done.
            measured.rate = flops / self._seconds([work], sample.runs)
            measured.item_seconds = max(0.0, (many - one) / (sample.items - 1)) * whole / part

    def _samples(self, frames: int) -> list[Work]:
        """Work of each kind, of about `frames` code frames."""
        config = self.info.config
        rng = np.random.default_rng(0)
        samples = max(config.min_samples, frames * config.samples_per_frame)
        mel_frames = min(SEGMENT_MEL_FRAMES, samples // config.hop_length + 1)
        sound = rng.uniform(-0.1, 0.1, samples).astype(np.float32)
        segment = Segment(sound, 0, config.sampling_rate, 0, mel_frames, samples)
        codes = np.stack([rng.integers(0, size, frames) for size in config.codebook_sizes]).astype(np.uint16)
        return [EncodeWork(segment, config.num_quantizers), DecodeVqWork(codes), DecodeWork(codes, 0, int16=False)]

    def _expect_in_steps(self, work: Work, flops: float) -> None:
        computation = Computation(self, work, flops)
        while (answer := computation.step()) is None:
            pass
        self._expect([answer])

    def _seconds(self, batch: list[Work], runs: int) -> float:
        """What `batch` takes, at the least of some times."""
        seconds = []
        for _ in range(runs):
            devices.synchronize(self._device)
            started = time.monotonic()
            self._expect(self.run(batch))
            devices.synchronize(self._device)
            seconds.append(time.monotonic() - started)
        return min(seconds)

    @staticmethod
    def _expect(answers: Sequence[Answer]) -> None:
        for answer in answers:
            if isinstance(answer, RequestError):
                raise RuntimeError(f"the model does not run: {answer}")

    def _divide(self, limit: int) -> Division:
        weights = checkpoint.parameter_bytes(self._model)
        frame = max(measured.batch_bytes for measured in self._measured.values())
        fixed = max(0, memory.used(self._device) - weights) + int(self._least_frames * frame)
        # Steps have their activations there, too.
        batch = max(self.info.max_batch_frames, _STEP_FRAMES) * frame
        division = Division.of(limit, weights, fixed, int(batch))
        log(
            logging.INFO,
            "device memory divided",
            limit=mib(division.limit),
            weights=mib(division.weights),
            fixed=mib(division.fixed),
            activations=mib(division.activations),
            state=mib(division.state),
            max_batch_frames=self.info.max_batch_frames,
            longest_decode_frames=int(division.state / self._measured[Kind.DECODE].state_bytes),
        )
        return division

    def cost(self, work: Work) -> Cost:
        """What `work` will take; from any thread."""
        kind, frames = _kind(work), self._frames(work)
        measured = self._measured[kind]
        seconds = measured.item_seconds + self._flops(work) / measured.rate
        batch_bytes = int(frames * measured.batch_bytes) + self._front_end_bytes(work)
        short = self._flops(work) <= self._batch_flops if self.info.batch_invariant else seconds <= BATCH_SECONDS
        batchable = kind is Kind.DECODE_VQ or (
            short
            and not self._has_slow_front_end(work)
            and frames <= self.info.max_batch_frames
            and batch_bytes <= self.info.memory.activations
        )
        if batchable:
            return Cost(kind, frames, seconds, batch_bytes, stepwise=False)
        state_bytes = int(frames * measured.state_bytes) + self._front_end_bytes(work)
        return Cost(kind, frames, seconds, state_bytes, stepwise=True)

    def too_large(self, work: Work) -> RequestError:
        """The refusal of an item that does not fit into the device's memory alone."""
        if isinstance(work, EncodeWork):
            size = f"{len(work.segment.pcm) / work.segment.sample_rate:.1f} seconds of audio"
        else:
            size = f"{work.codes.shape[1]} frames"
        return RequestError(
            Reason.OUT_OF_MEMORY, f"{self.info.device} has too little free memory for this item of {size}", value=size
        )

    def memory_allocated(self) -> int:
        """Bytes of the device that this process holds; 0 where it does not tell."""
        return devices.memory_allocated(self._device)

    def memory_used(self) -> int:
        """Bytes that this process holds, of the device or on the CPU of the host."""
        return memory.used(self._device)

    def trim(self) -> None:
        """Give the system what is free of the host's memory, when there is time for it."""
        memory.trim()

    def _frames(self, work: Work) -> int:
        if isinstance(work, EncodeWork):
            return self.info.config.code_frames(work.segment.frames)
        return int(work.codes.shape[1])

    def _flops(self, work: Work) -> float:
        if isinstance(work, EncodeWork):
            return self._model.encode_flops(work.segment.frames)
        if isinstance(work, DecodeWork):
            return self._model.decode_flops(self._frames(work))
        return float(work.codes.size * self.info.config.d_model)

    def _has_slow_front_end(self, work: Work) -> bool:
        if not isinstance(work, EncodeWork):
            return False
        return not Resampler(work.segment.sample_rate, self.info.config.sampling_rate).is_dense

    def _front_end_bytes(self, work: Work) -> int:
        """What sound takes beyond what was measured, at the model's own rate and for many frames."""
        if not isinstance(work, EncodeWork):
            return 0
        if work.segment.sample_rate == self.info.config.sampling_rate:
            return _SHORTEST_SOUND_BYTES
        filters = Resampler(work.segment.sample_rate, self.info.config.sampling_rate).filter_bytes
        # The sound itself and its filtered copies.
        return _SHORTEST_SOUND_BYTES + filters + 3 * 4 * len(work.segment.pcm)

    # ------------------------------------------------------------ computing

    def run(self, batch: Sequence[Work]) -> list[Answer]:
        """Answer each item of `batch`, all of one kind; each gets what it gets alone.

        Where the device's memory does not suffice the batch is halved, down to single items; where the computation
        fails, its items are tried alone, so that one does not spoil the others.

        Raises:
            DeviceFailure: the device is lost; nothing that is waiting can be answered.
        """
        # Items of one length side by side: their attention is computed together.
        order = sorted(range(len(batch)), key=lambda index: self._frames(batch[index]))
        ordered = [batch[index] for index in order]
        parts: list[Sequence[Work]] = [[work] for work in ordered] if self._alone else [ordered]
        answers: list[Answer] = []
        while parts:
            part = parts.pop(0)
            started = time.monotonic()
            outcome = self._attempt(part)
            if isinstance(outcome, list):
                answers += outcome
                # Of what has failed the time tells nothing: it may have failed at once.
                self._learn(_kind(part[0]), sum(map(self._flops, part)), time.monotonic() - started)
            elif len(part) == 1:
                answers.append(self._refusal(part[0], outcome))
            elif outcome is _Failure.OUT_OF_MEMORY:
                half = len(part) // 2
                parts[:0] = [part[:half], part[half:]]
            else:
                parts[:0] = [[work] for work in part]
        return [answer for _, answer in sorted(zip(order, answers, strict=True), key=lambda pair: pair[0])]

    def begin(self, work: Work) -> Computation:
        """Compute `work` in steps of about `STEP_SECONDS`."""
        step = STEP_SECONDS * self._measured[_kind(work)].rate
        return Computation(self, work, step, self._piece_flops)

    def _attempt(self, part: Sequence[Work]) -> list[Answer] | _Failure:
        try:
            return self._compute_batch(part)
        except Exception as error:
            return self._failure(error)

    def _failure(self, error: Exception) -> _Failure:
        """What a failed computation means.

        Raises:
            DeviceFailure: that the device is lost.
        """
        if _is_out_of_memory(error):
            # What the frames of its traceback hold is to be free for the next attempt.
            error.__traceback__ = None
            memory.release(self._device)
            return _Failure.OUT_OF_MEMORY
        # After a failure that it does not recover from, a GPU refuses everything; what was refused first may have come
        # from any library, under any name.
        if not devices.works(self._device):
            raise DeviceFailure(f"{self.info.device} failed: {str(error).splitlines()[0]}") from error
        logger.error("the computation failed", exc_info=error)
        return _Failure.FAULT

    def _refusal(self, work: Work, failure: _Failure) -> RequestError:
        if failure is _Failure.OUT_OF_MEMORY:
            return self.too_large(work)
        return RequestError(Reason.INTERNAL, "the server failed to compute this item; its log says why")

    def _learn(self, kind: Kind, flops: float, seconds: float) -> None:
        measured = self._measured[kind]
        measured.rate = max(measured.rate, flops / seconds)

    @torch.inference_mode()
    def _compute_batch(self, batch: Sequence[Work]) -> list[Answer]:
        first = batch[0]
        if isinstance(first, EncodeWork):
            return self._encode([work for work in batch if isinstance(work, EncodeWork)])
        codes = [work.codes for work in batch if not isinstance(work, EncodeWork)]
        if isinstance(first, DecodeVqWork):
            packed, spans, books = self._packed(codes)
            return _split(self._model.decode_vq(packed, spans, books), spans.lengths)
        works = [work for work in batch if isinstance(work, DecodeWork)]
        if self._graphs is not None:
            graphed = self._graphs.decode(codes)
            self._count(Kind.DECODE, graphed is not None)
            if graphed is not None:
                return _wanted(works, graphed, self.info.config.samples_per_frame)
        if (missing := self._missing(works)) > 0:
            codes.append(np.zeros((max(map(len, codes)), missing), np.uint16))
        packed, spans, books = self._packed(codes)
        samples = self._model.decode(packed, spans, books)
        cut, frame = self.info.config.samples_cut, self.info.config.samples_per_frame
        waveforms = torch.split(samples, [length * frame - cut for length in spans.lengths])
        return _wanted(works, waveforms[: len(works)], frame)

    def _count(self, kind: Kind, graphed: bool) -> None:
        if self._on_graph is not None:
            self._on_graph(kind, graphed)

    def _missing(self, works: Sequence[Work]) -> int:
        """Code frames that a batch has too few."""
        return self._least_frames - sum(map(self._frames, works))

    def _packed(self, codes: Sequence[npt.NDArray[np.uint16]]) -> tuple[Tensor, Spans, list[int]]:
        """Codes on the device (most codebooks, frames), where the items are in them, and the codebooks of each."""
        spans = Spans([array.shape[1] for array in codes])
        books = [array.shape[0] for array in codes]
        packed = np.zeros((max(books), spans.total), np.int32)  # PyTorch indexes with int32, not with uint16
        for array, start in zip(codes, spans.starts, strict=True):
            packed[: array.shape[0], start : start + array.shape[1]] = array
        return torch.from_numpy(packed).to(self._device), spans, books

    def _encode(self, works: Sequence[EncodeWork]) -> list[Answer]:
        mels = [self._model.mel.segment(work.segment) for work in works]
        codes = None
        if self._graphs is not None:
            codes = self._graphs.encode(mels)
            self._count(Kind.ENCODE, codes is not None)
        if codes is None:
            codes = self._encode_mels(mels, self._missing(works), max(work.num_quantizers for work in works))
        lengths = [self._frames(work) for work in works]
        together = _to_host_codes(codes)
        starts = np.cumsum([0, *lengths])
        return [
            np.ascontiguousarray(together[: work.num_quantizers, start : start + length])
            for work, start, length in zip(works, starts, lengths, strict=False)
        ]

    def _encode_mels(self, mels: list[Tensor], missing: int, books: int) -> Tensor:
        if missing > 0:
            config = self.info.config
            enough = next(frames for frames in itertools.count(missing) if config.code_frames(frames) >= missing)
            mels = [*mels, mels[0].new_zeros(enough, config.n_mels)]
        return self._model.encode(torch.cat(mels), Spans([len(mel) for mel in mels]), books)

    @torch.inference_mode()
    def _steps(self, work: Work, flops: float) -> Generator[float, None, Answer]:
        """Compute one item in steps of about `flops`, each of which is yielded."""
        if isinstance(work, EncodeWork):
            mel = yield from self._model.mel.segment_steps(work.segment)
            codes = yield from self._model.encode_steps(mel, work.num_quantizers, flops)
            return _to_host_codes(codes)
        if not isinstance(work, DecodeWork):
            raise TypeError(f"{type(work).__name__} is never computed in steps")
        codes = torch.from_numpy(work.codes.astype(np.int32)).to(self._device)
        samples = yield from self._model.decode_steps(codes, flops)
        return _wanted([work], [samples], self.info.config.samples_per_frame)[0]


class Computation:
    """A long piece of work on its way to its answer, a step at a time.

    Args:
        engine: computes it.
        work: to be computed.
        step: floating-point operations of a step.
        piece: those of a piece that the model computes at once, of which a step is one or more; None for those of a
            step.
    """

    def __init__(self, engine: Engine, work: Work, step: float, piece: float | None = None) -> None:
        self._engine = engine
        self._work = work
        self._flops = step
        self._left = self._whole = engine._flops(work)
        self._seconds = 0.0
        self._steps: Generator[float, None, Answer] | None = engine._steps(work, step if piece is None else piece)

    @property
    def seconds_left(self) -> float:
        """About how long the device still takes."""
        return max(0.0, self._left) / self._engine._measured[_kind(self._work)].rate

    def step(self) -> Answer | None:
        """Go one step further.

        Returns:
            The answer after the last step, before it None.

        Raises:
            DeviceFailure: the device is lost.
        """
        assert self._steps is not None, "a computation that has ended"
        try:
            started, done = time.monotonic(), 0.0
            # The model's pieces can be much smaller than a step. A GPU runs behind of what it is given: now and then it
            # is waited for, as an estimate alone can be far off where attention is most of the work.
            while done < self._flops and time.monotonic() - started < STEP_SECONDS:
                until = done + self._flops / 4
                while done < until and time.monotonic() - started < STEP_SECONDS:
                    done += next(self._steps)
                devices.synchronize(self._engine._device)
            self._left -= done
            self._seconds += time.monotonic() - started
        except StopIteration as end:
            self.close()
            # Of the whole, as steps differ: a product of two thousand rows is twice as fast as attention.
            self._engine._learn(_kind(self._work), self._whole, self._seconds + time.monotonic() - started)
            answer: Answer = end.value
            return answer
        except Exception as error:
            self.close()
            return self._engine._refusal(self._work, self._engine._failure(error))
        return None

    def close(self) -> None:
        """Leave off, and give back the memory."""
        if self._steps is not None:
            self._steps.close()
        self._steps = None


class _Failure(enum.Enum):
    OUT_OF_MEMORY = enum.auto()
    FAULT = enum.auto()


def _kind(work: Work) -> Kind:
    if isinstance(work, EncodeWork):
        return Kind.ENCODE
    return Kind.DECODE if isinstance(work, DecodeWork) else Kind.DECODE_VQ


def _split(packed: Tensor, lengths: Sequence[int]) -> list[Answer]:
    """Rows of `packed`, taken to the host in one piece, item by item."""
    rows = _to_host(packed)
    ends = np.cumsum(lengths)
    return [rows[end - length : end] for length, end in zip(lengths, ends, strict=True)]


def _to_host(values: Tensor) -> npt.NDArray[Any]:
    """The values in the host's memory; from a GPU into pinned memory, which is twenty times as fast."""
    if values.device.type != "cuda":
        array: npt.NDArray[Any] = values.cpu().numpy()
        return array
    host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    pinned: npt.NDArray[Any] = host.copy_(values).numpy()
    return pinned


def _to_host_codes(codes: Tensor) -> npt.NDArray[np.uint16]:
    return codes.to(torch.int32).cpu().numpy().astype(np.uint16)


def _wanted(works: Sequence[DecodeWork], waveforms: Sequence[Tensor], samples_per_frame: int) -> list[Answer]:
    """The waveforms without their left contexts, each in its format; each format goes to the host in one piece."""
    answers: list[Answer] = [np.empty(0, np.float32)] * len(works)
    for int16 in (False, True):
        indices = [index for index, work in enumerate(works) if work.int16 == int16]
        if not indices:
            continue
        kept = [waveforms[index][works[index].left_context_frames * samples_per_frame :] for index in indices]
        packed = torch.cat(kept)
        if int16:
            packed = packed.mul(32768).round_().clamp_(-32768, 32767).to(torch.int16)
        for index, answer in zip(indices, _split(packed, [len(part) for part in kept]), strict=True):
            answers[index] = answer
    return answers


def _is_out_of_memory(error: Exception) -> bool:
    # The CPU's allocator, the driver and the libraries raise errors of other classes.
    sentences = ("can't allocate memory", "out of memory", "_ALLOC_FAILED")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in sentences)
