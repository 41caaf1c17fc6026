"""What stands where the engine's in-process tokenizer worker was: the same attributes, backed by the service."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch

from mimo_tokenizer_client import (
    InvalidInput,
    ServerInfo,
    ServiceUnavailable,
    TokenizerClient,
    TokenizerError,
    TooLarge,
    __version__,
)

from ._engine import engine_version, log
from ._settings import Settings, settings_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    import numpy as np
    import numpy.typing as npt

PATH_VARIABLE: Final = "MIMO_AUDIO_TOKENIZER_PATH"
DEVICE_VARIABLE: Final = "MIMO_AUDIO_TOKENIZER_DEVICE"

_A_FOLDER: Final = os.path.dirname(os.path.abspath(__file__))

# Of the language model's config, where it names none; the engine's own value.
_SAMPLE_RATE: Final = 24000


# Seconds that a call waits for a service that an earlier call has waited for in vain.
_AFTER_AN_OUTAGE: Final = 1.0


class _RemoteEncoder:
    """The one part of the tokenizer's encoder that the engine calls by itself."""

    def __init__(self, worker: RemoteTokenizerWorker) -> None:
        self._worker = worker

    def decode_vq(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the quantizer's output.

        Args:
            codes: (num_quantizers, frames).

        Returns:
            float32 (frames, d_model), on the CPU.
        """
        return _tensor(self._worker.call("decode_vq", codes.detach().cpu().numpy()))


class _RemoteTokenizer:
    """What `worker.audio_tokenizer` is to the engine: a config, and codes to samples.

    Attributes:
        config: The tokenizer's own numbers, under the names that its checkpoint's config gives them.
        encoder: Has `decode_vq`.
    """

    def __init__(self, worker: RemoteTokenizerWorker, info: ServerInfo) -> None:
        model = info.model
        self._worker = worker
        self.config = SimpleNamespace(
            sampling_rate=model.sample_rate,
            hop_length=model.hop_length,
            stride_size=model.stride_size,
            avg_pooler=model.avg_pooler,
            d_model=model.d_model,
            num_quantizers=len(model.codebook_sizes),
            codebook_size=list(model.codebook_sizes),
        )
        self.encoder = _RemoteEncoder(worker)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return samples, float32 (1, 1, samples) on the CPU, of codes (num_quantizers, frames)."""
        return self._worker.decode(codes).reshape(1, 1, -1)


class RemoteTokenizerWorker:
    """A tokenizer worker without a tokenizer.

    Attributes:
        address: Where the service is.
        fingerprint: Of the model that was seen at start-up; every call names it.
        settings: What the plugin was told when it was made.
        device: "cpu": where the codes and samples that it hands out lie.
        config: The language model's config.
        group_size: Frames of a group, from that config.
        audio_channels: Codebooks that the language model uses, from that config.
        sample_rate: The tokenizer's.
        audio_tokenizer: Has `config`, `encoder.decode_vq` and `decode`.
        cuda_graph_wrapper: None.
    """

    device: Final = "cpu"
    cuda_graph_wrapper: Final = None

    def __init__(self, settings: Settings, config: Any) -> None:
        """Wait for the service, and see that it can work with the language model.

        Args:
            settings: With an address.
            config: The language model's config, a MiMoAudioConfig.

        Raises:
            ServiceUnavailable: It is not ready in time.
            AuthenticationFailed: It does not let the engine in, or its certificate is not trusted.
            InvalidInput: A file of the credentials in the environment is no good.
            ValueError: The two cannot work together.
        """
        assert settings.address is not None
        self.address = settings.address
        self.settings = settings
        self.config = config
        self.group_size = int(config.group_size)
        self.audio_channels = int(config.audio_channels)
        name = f"mimo-tokenizer-vllm-omni/{__version__} (vllm-omni {engine_version()})"
        with TokenizerClient(self.address, name=name) as waiting:
            waiting.wait_until_ready(settings.ready_timeout)
            info = waiting.info(timeout=settings.ready_timeout)
        _check_fit(self.address, info, config)
        self.sample_rate = info.model.sample_rate
        self.audio_tokenizer = _RemoteTokenizer(self, info)
        self.fingerprint = info.model.fingerprint

        def client(unavailable_timeout: float) -> TokenizerClient:
            return TokenizerClient(
                self.address,
                timeout=settings.request_timeout,
                unavailable_timeout=unavailable_timeout,
                fingerprint=self.fingerprint,
                name=name,
            )

        self._patient = client(settings.unavailable_timeout)
        self._impatient = client(min(settings.unavailable_timeout, _AFTER_AN_OUTAGE))
        self._away = False
        log.info(
            "the MiMo-Audio tokenizer is the service at %s (model %s, fingerprint %s, %s on %s): none is loaded here",
            self.address, info.model.id, info.model.fingerprint, info.device.dtype, info.device.device,
        )  # fmt: skip
        if info.model.random_weights:
            log.warning("the service at %s has random weights: what it returns carries no meaning", self.address)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the client.

        A service that a call has waited for in vain is not waited for as long again by each call that follows, until
        one has met it: a stage computes one step at a time, and the front end blocks while it encodes.

        Raises:
            TokenizerError: As the method does.
        """
        client = self._impatient if self._away else self._patient
        try:
            answer = getattr(client, method)(*args, **kwargs)
        except ServiceUnavailable:
            self._away = True
            raise
        except TokenizerError:
            self._away = False
            raise
        self._away = False
        return answer

    def close(self) -> None:
        """Close the connections."""
        self._patient.close()
        self._impatient.close()

    def encode(self, audio: tuple[torch.Tensor, int], max_length: float | None = None) -> torch.Tensor:
        """Turn a waveform into codes.

        Args:
            audio: Samples (samples,), full scale [-1, 1], and their rate.
            max_length: Of no meaning here: the service bounds its memory by itself.

        Returns:
            int64 (audio_channels, frames) on the CPU, frames a multiple of group_size by repeating the last one.

        Raises:
            TokenizerError: The service refused it, or was not there in time.
        """
        samples, sample_rate = audio
        # Integers are taken as they are, as by the in-process worker: not scaled by their type's range.
        samples = samples.detach().to("cpu", torch.float32)
        wanted = {"num_quantizers": self.audio_channels, "group_size": self.group_size}
        try:
            codes = self.call("encode", samples.numpy(), int(sample_rate), **wanted)
        except TooLarge as error:
            # The engine answers a ValueError as the caller's fault, which it is.
            raise InvalidInput(error.message, code=error.code, detail=error.detail) from error
        return torch.from_numpy(codes.astype("int64"))

    def encode_wav_base(self, wav: torch.Tensor) -> torch.Tensor:
        """Turn samples (samples,) of the tokenizer's own rate into codes, as `encode` does."""
        return self.encode((wav, self.sample_rate))

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Turn codes into samples.

        Args:
            tokens: (audio_channels, frames).

        Returns:
            float32 (samples,) on the CPU.

        Raises:
            TokenizerError: The service refused it, or was not there in time.
        """
        return _tensor(self.call("decode", tokens.detach().cpu().numpy()))

    def decode_batch(
        self, codes: Sequence[torch.Tensor], left_context_frames: Sequence[int]
    ) -> list[torch.Tensor | TokenizerError]:
        """Turn the codes of several slots into samples, in one call.

        Args:
            codes: Of each slot, (audio_channels, frames).
            left_context_frames: Of each slot, frames to drop from the front of its samples.

        Returns:
            Of each slot, float32 (samples,) on the CPU, or why there are none.
        """
        try:
            items = [item.detach().cpu().numpy() for item in codes]
            answers = self.call("decode_batch", items, list(left_context_frames), return_errors=True)
        except TokenizerError as error:
            return [error] * len(codes)
        self._away = any(isinstance(answer, ServiceUnavailable) for answer in answers)
        return [answer if isinstance(answer, TokenizerError) else _tensor(answer) for answer in answers]

    def is_as_new(self, settings: Settings, config: Any) -> bool:
        """Tell whether a worker that was made now would be no other than this one.

        Raises:
            ServiceUnavailable: The service is not ready in time.
            AuthenticationFailed: It does not let the engine in, or its certificate is not trusted.
            ValueError: It can't work with the language model.
        """
        if settings != self.settings or (config.group_size, config.audio_channels) != (
            self.config.group_size,
            self.config.audio_channels,
        ):
            return False
        self._patient.wait_until_ready(settings.ready_timeout)
        info = self._patient.info(timeout=settings.ready_timeout)
        _check_fit(self.address, info, config)
        return info.model.fingerprint == self.fingerprint

    def __getattr__(self, name: str) -> Any:
        """Say why a part of the in-process worker is not here."""
        raise AttributeError(
            f"{name}: the tokenizer is the service at {self.__dict__.get('address')}, whose worker in the engine has"
            " no such part"
        )


def _tensor(array: npt.NDArray[np.float32]) -> torch.Tensor:
    """Return the array as a tensor; one that lies in a message's bytes, which nobody may write to, is copied."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _check_fit(address: str, info: ServerInfo, config: Any) -> None:
    """Refuse a tokenizer that the language model can't work with.

    Raises:
        ValueError: It has fewer or smaller codebooks, or another sample rate.
    """
    tokenizer = f"the tokenizer at {address} ({info.model.id})"
    sizes = info.model.codebook_sizes
    channels = int(config.audio_channels)
    if channels > len(sizes):
        raise ValueError(
            f"the language model has {channels} audio channels, {tokenizer} {len(sizes)} codebooks; it needs as many"
        )
    vocabularies = config.parsed_speech_vocab_sizes()[:channels]
    # A channel's vocabulary holds an id for "no code", which is no entry of the codebook.
    for channel, (vocabulary, empty) in enumerate(zip(vocabularies, config.parsed_speech_empty_ids(), strict=False)):
        entries = vocabulary - 1 if empty == vocabulary - 1 else vocabulary
        if sizes[channel] < entries:
            raise ValueError(
                f"audio channel {channel} of the language model has {entries} codes, codebook {channel} of {tokenizer}"
                f" {sizes[channel]}; it needs at least as many"
            )
    rate = int(getattr(config, "audio_sample_rate", None) or _SAMPLE_RATE)
    if info.model.sample_rate != rate:
        raise ValueError(
            f"the language model's audio has {rate} Hz, {tokenizer} {info.model.sample_rate} Hz; they must be the same"
        )


# ---------------------------------------------------------------- who gets which worker


@dataclass(frozen=True)
class _Wanted:
    """What the engine's constructor that is running right now is to be given."""

    settings: Settings
    config: Any


_wanted: ContextVar[_Wanted | None] = ContextVar("mimo_tokenizer_wanted", default=None)
_environment = threading.RLock()
_making = threading.Lock()
_caches: list[dict[Any, Any]] = []
_of_the_parent: list[Any] = []
# What the environment had where `remote_worker` has replaced it.
_replaced: dict[str, str | None] = {}


def language_model_config(module: ModuleType, hf_config: Any) -> Any:
    """Return the language model's config with everything that MiMo-Audio adds to it.

    Args:
        module: The engine's module that has MiMoAudioConfig.
        hf_config: As vLLM loaded it, perhaps without the defaults of these; None: the defaults.
    """
    config_class = module.MiMoAudioConfig
    if isinstance(hf_config, config_class):
        return hf_config
    return config_class(**({} if hf_config is None else vars(hf_config)))


@contextmanager
def remote_worker(settings: Settings, config: Any) -> Iterator[None]:
    """Have the engine's code inside take the service for its tokenizer.

    That code asks for a folder in MIMO_AUDIO_TOKENIZER_PATH, and that it exists, before it asks for a worker; and the
    front end asks CUDA for a device where MIMO_AUDIO_TOKENIZER_DEVICE names none. While it runs, the one names a folder
    that is always there, and the other the CPU, where a remote worker's answers lie; what the user said is put back.
    """
    given = {PATH_VARIABLE: _A_FOLDER, DEVICE_VARIABLE: RemoteTokenizerWorker.device}
    with _environment:
        outermost = not _replaced
        if outermost:
            _replaced.update({name: os.environ.get(name) for name in given})
            os.environ.update(given)
        token = _wanted.set(_Wanted(settings, config))
        try:
            yield
        finally:
            _wanted.reset(token)
            if outermost:
                for name, value in _replaced.items():
                    _put(name, value)
                _replaced.clear()


def _put(name: str, value: str | None) -> None:
    """Give a variable of the environment its value back; None: it had none."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def tell_what_is_ignored(settings: Settings) -> None:
    """Say so where the user named a path or a device that an address wins over."""
    # A process that was started while `remote_worker` was at work in its parent has these of it.
    if os.environ.get(PATH_VARIABLE) == _A_FOLDER:
        return
    for name in (PATH_VARIABLE, DEVICE_VARIABLE):
        if os.environ.get(name):
            log.warning(
                "%s=%s is ignored: the tokenizer is the service at %s", name, os.environ[name], settings.address
            )


def worker_for(module: ModuleType) -> RemoteTokenizerWorker | None:
    """Return the worker that `get_tokenizer_worker` is to hand out; None: the engine's own.

    One that this process has already is handed out again where it is as a new one would be: told the same, for a
    language model of the same shape, with the same model in the service.

    Args:
        module: The engine's module that has the cache of workers; the address is the key in it.

    Raises:
        ServiceUnavailable: The service is not ready in time.
        AuthenticationFailed: It does not let the engine in, or its certificate is not trusted.
        ValueError: It can't work with the language model.
    """
    wanted = _wanted.get()
    settings = settings_for(None) if wanted is None else wanted.settings
    if settings.address is None:
        return None
    config = language_model_config(module, None) if wanted is None else wanted.config
    workers = module._TOKENIZER_WORKER_CACHE  # looked up anew: tests and engines replace it
    with _making:
        worker = workers.get(settings.address)
        if not (isinstance(worker, RemoteTokenizerWorker) and worker.is_as_new(settings, config)):
            worker = workers[settings.address] = RemoteTokenizerWorker(settings, config)
        if all(known is not workers for known in _caches):
            _caches.append(workers)
    return worker


def _after_fork() -> None:
    """Let a forked child begin anew: gRPC's threads are not there, nor those that may have held a lock.

    What was the parent's is kept, so that nothing of it is closed.
    """
    global _environment, _making
    _environment, _making = threading.RLock(), threading.Lock()
    for name, value in _replaced.items():
        _put(name, value)
    _replaced.clear()
    for workers in _caches:
        _of_the_parent.extend(workers.pop(key) for key in list(workers) if isinstance(key, str))


os.register_at_fork(after_in_child=_after_fork)
