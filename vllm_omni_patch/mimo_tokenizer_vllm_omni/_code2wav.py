"""Stage 1, codes to sound, and who gets which tokenizer worker: through the service where an address is set."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from ._engine import MODELS, UnfamiliarEngine, log, once, require, unfamiliar
from ._settings import settings_for

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    from mimo_tokenizer_client import TokenizerError

    from ._worker import RemoteTokenizerWorker

CODE2WAV: Final = f"{MODELS}.mimo_audio.mimo_audio_code2wav"
OUTER: Final = f"{MODELS}.mimo_audio.mimo_audio"
STAGE_CLASS: Final = "MiMoAudioToken2WavForConditionalGenerationVLLM"
OUTER_CLASS: Final = "MiMoAudioForConditionalGeneration"

_WORKER: Final = f"{__package__}._worker"

# The config of the model whose data parser is being made; the parser itself is told none.
hf_config_of_parser: ContextVar[Any] = ContextVar("mimo_tokenizer_hf_config", default=None)

# The requests of the step that is being computed, where the runner tells.
_request_ids: ContextVar[Sequence[str] | None] = ContextVar("mimo_tokenizer_request_ids", default=None)


def refuse(module: ModuleType, names: Sequence[str], problem: UnfamiliarEngine) -> None:
    """Leave an unfamiliar module as it is, but let nothing of it start that was to use the service.

    Args:
        module: The engine's module.
        names: What of it takes a tokenizer: functions, classes by their constructors, or methods as "Class.method".
        problem: What is unfamiliar.
    """
    log.warning("%s; the tokenizer service cannot be used here: with an address set, start-up fails", problem)
    module._mimo_tokenizer_problem = problem  # type: ignore[attr-defined]
    for name in names:
        owner, _, attribute = f"{module.__name__}.{name}".rpartition(".")
        holder = module if owner == module.__name__ else getattr(module, owner.rpartition(".")[2], None)
        found = getattr(holder, attribute, None)
        if isinstance(found, type):
            found.__init__ = _guarded(found.__init__, problem)  # type: ignore[misc]
        elif callable(found):
            setattr(holder, attribute, _guarded(found, problem))


def _guarded(original: Callable[..., Any], problem: UnfamiliarEngine) -> Callable[..., Any]:
    @wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        address = settings_for(_hf_config_among([*args, *kwargs.values()])).address
        if address is not None:
            raise UnfamiliarEngine(
                f"{problem}, so the tokenizer service at {address} cannot be used: take a version of"
                " mimo-audio-tokenizer-service made for this engine, or name no address"
            ) from problem
        return original(*args, **kwargs)

    return guarded


def _hf_config_among(values: Sequence[Any]) -> Any:
    """Return the model's config that arguments lead to, or the data parser's that is being made, or None."""
    for value in values:
        for holder in (value, getattr(value, "ctx", None)):
            model_config = getattr(holder, "model_config", None)
            if model_config is not None:
                return getattr(model_config, "hf_config", None)
    return hf_config_of_parser.get()


def _patch_code2wav(module: ModuleType) -> None:
    if not once(module, "remote"):
        return
    try:
        stage = _familiar_stage(module)
    except UnfamiliarEngine as problem:
        refuse(module, (STAGE_CLASS, "get_tokenizer_worker"), problem)
        return
    module.get_tokenizer_worker = _handing_out_ours(module, module.get_tokenizer_worker)  # type: ignore[attr-defined]
    stage.__init__ = _built_on_ours(module, stage.__init__)
    stage.forward = _telling_requests(stage.forward)
    stage._batch_decode_waveforms = _decoding_whole(module, stage._batch_decode_waveforms)
    stage._batch_chunked_decode_streaming = _decoding_chunks(module, stage._batch_chunked_decode_streaming)
    log.info("patched %s: takes the tokenizer service where an address is set", CODE2WAV)


def _familiar_stage(module: ModuleType) -> Any:
    """Return the stage's class, if all that is about to be changed or called is as it must be."""
    require(module, "get_tokenizer_worker", ("device", "config_path", "audio_tokenizer_path"))
    if not isinstance(getattr(module, "_TOKENIZER_WORKER_CACHE", None), dict):
        raise unfamiliar(f"{module.__name__}._TOKENIZER_WORKER_CACHE", "a dict")
    require(module, "extract_audio_code_tensor", ("flat_codes", "group_size", "audio_channels", "codes"))
    require(module, "flat_codec_group_element_count", ("group_size", "audio_channels"))
    config = require(module, "MiMoAudioConfig")
    require(config, "parsed_speech_vocab_sizes")
    require(config, "parsed_speech_empty_ids")
    stage = require(module, STAGE_CLASS)
    init = require(stage, "__init__", ("vllm_config", "prefix"))
    names = _names_of(init)
    for name in ("get_tokenizer_worker", "audio_tokenizer_path", "_tokenizer_service", "total_upsample"):
        if name not in names:
            raise unfamiliar(f"{CODE2WAV}.{STAGE_CLASS}.__init__", f"one that uses {name}")
    require(stage, "forward", ("kwargs",))
    require(stage, "_check_dummy_code_tensor", ("code_tensor",))
    require(stage, "_batch_decode_waveforms", ("request_codes_list",))
    require(
        stage,
        "_batch_chunked_decode_streaming",
        (
            "request_codes_list", "default_chunk_size", "default_left_context_size", "per_req_left_context_frames",
            "per_req_codec_chunk_frames",
        ),
    )  # fmt: skip
    return stage


def require_ours(module: ModuleType) -> None:
    """Raise what was unfamiliar in the module that makes the workers, if it was left alone for it."""
    problem = getattr(module, "_mimo_tokenizer_problem", None)
    if problem is not None:
        raise problem


def _names_of(function: Any) -> tuple[str, ...]:
    """Return the names that a function's own code uses, whoever wrapped it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        raise unfamiliar(f"{CODE2WAV}.{STAGE_CLASS}.__init__", "a function written in Python")
    names: tuple[str, ...] = code.co_names
    return names


# ---------------------------------------------------------------- which worker


def _handing_out_ours(module: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def get_tokenizer_worker(*args: Any, **kwargs: Any) -> Any:
        # A constructor that asks for ours has loaded it; without an address nothing of the client is.
        if _WORKER not in sys.modules and settings_for(None).address is None:
            return original(*args, **kwargs)
        from ._worker import worker_for

        worker = worker_for(module)
        return original(*args, **kwargs) if worker is None else worker

    return get_tokenizer_worker


def _built_on_ours(module: ModuleType, original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def __init__(self: Any, vllm_config: Any, prefix: str = "") -> None:
        settings = settings_for(vllm_config.model_config.hf_config)
        if settings.address is None:
            original(self, vllm_config=vllm_config, prefix=prefix)
            return
        from ._worker import language_model_config, remote_worker, tell_what_is_ignored

        tell_what_is_ignored(settings)
        config = language_model_config(module, vllm_config.model_config.hf_config)
        with remote_worker(settings, config):
            original(self, vllm_config=vllm_config, prefix=prefix)
        # What the constructor was told of a folder is not so.
        self.audio_tokenizer_path = self.tokenizer_config_path = settings.address

    return __init__


# ---------------------------------------------------------------- decoding a step


def _telling_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _request_ids.set(kwargs.get("request_ids"))
        try:
            return original(self, *args, **kwargs)
        finally:
            _request_ids.reset(token)

    return forward


def _ours(stage: Any) -> RemoteTokenizerWorker | None:
    """Return the stage's worker if it is one of ours."""
    if _WORKER not in sys.modules:
        return None
    from ._worker import RemoteTokenizerWorker

    worker = stage._tokenizer_service
    return worker if isinstance(worker, RemoteTokenizerWorker) else None


def _decoding_whole(module: ModuleType, original: Callable[..., list[torch.Tensor]]) -> Callable[..., Any]:
    @wraps(original)
    def _batch_decode_waveforms(self: Any, request_codes_list: list[torch.Tensor]) -> list[torch.Tensor]:
        worker = _ours(self)
        if worker is None:
            return original(self, request_codes_list)
        return _decode_step(module, self, worker, request_codes_list, [0] * len(request_codes_list))

    return _batch_decode_waveforms


def _decoding_chunks(module: ModuleType, original: Callable[..., list[torch.Tensor]]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @wraps(original)
    def _batch_chunked_decode_streaming(self: Any, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        worker = _ours(self)
        if worker is None:
            return original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()  # engines differ in which of these have one
        slots = given.arguments["request_codes_list"]
        group_ids = module.flat_codec_group_element_count(worker.group_size, worker.audio_channels)

        def of_slot(name: str, slot: int) -> int | None:
            values = given.arguments[name]
            return values[slot] if values is not None and slot < len(values) else None

        context = []
        for slot, ids in enumerate(slots):
            groups = of_slot("per_req_left_context_frames", slot)
            if groups is None:
                # A first chunk has no context, and is told by its length.
                length = 0 if ids is None else ids.numel() if ids.ndim == 1 else ids.shape[-1]
                chunk = of_slot("per_req_codec_chunk_frames", slot)
                chunk = given.arguments["default_chunk_size"] if chunk is None else chunk
                groups = 0 if length // group_ids <= chunk else given.arguments["default_left_context_size"]
            # The engine's "frames" of context are groups of frames.
            context.append(int(groups) * worker.group_size)
        return _decode_step(module, self, worker, slots, context)

    return _batch_chunked_decode_streaming


def _decode_step(
    module: ModuleType,
    stage: Any,
    worker: RemoteTokenizerWorker,
    slots: Sequence[torch.Tensor | None],
    left_context_frames: Sequence[int],
) -> list[torch.Tensor]:
    """Decode all of a step's slots in one call.

    Args:
        module: The stage's module.
        stage: The stage.
        worker: Its worker.
        slots: Token ids of each request, as the talker sends them.
        left_context_frames: Of each request, code frames to drop from the front of its samples.

    Returns:
        Of each slot, float32 (samples,) on the CPU; empty, on the stage's device, where there was nothing to decode or
        it could not be decoded.

    Raises:
        TokenizerError: A slot could not be decoded, and the plugin was told to raise.
    """
    import torch

    from mimo_tokenizer_client import TokenizerError

    empty = torch.zeros((0,), dtype=torch.float32, device=stage.device)
    if not slots:
        return [empty]
    indices: list[int] = []
    codes: list[torch.Tensor] = []
    for index, ids in enumerate(slots):
        if ids is None or ids.numel() == 0 or stage._check_dummy_code_tensor(ids):
            continue
        found = module.extract_audio_code_tensor(
            ids.detach().to("cpu", torch.long), worker.group_size, worker.audio_channels, stage.codes
        )
        if found is not None and found.numel():
            indices.append(index)
            codes.append(found)
    result: list[torch.Tensor] = [empty] * len(slots)
    if not codes:
        return result

    failures: list[tuple[int, TokenizerError]] = []
    answers = worker.decode_batch(codes, [max(left_context_frames[index], 0) for index in indices])
    for index, answer in zip(indices, answers, strict=True):
        if isinstance(answer, TokenizerError):
            failures.append((index, answer))
        else:
            result[index] = answer
    if failures:
        _tell_failures(failures, len(slots), worker)
    return result


def _tell_failures(failures: Sequence[tuple[int, TokenizerError]], slots: int, worker: RemoteTokenizerWorker) -> None:
    """Log one line for the slots of a step that could not be decoded, and raise if told to.

    Raises:
        TokenizerError: The first slot's, which names it as the line does.
    """
    from mimo_tokenizer_client import ModelMismatch

    ids = _request_ids.get()
    raising = worker.settings.on_failure == "raise"
    by_reason: dict[str, list[str]] = {}
    for index, error in failures:
        # The call had no items for the slots without codes: its count of them is not the step's.
        reason = re.sub(r"^(item \d+( of the batch)?|items\[\d+\][.\w]*): ", "", str(error))
        if isinstance(error, ModelMismatch):
            reason += "; the engine keeps to the model that it started with until it is started again"
        which = f"request {ids[index]}" if ids is not None and len(ids) == slots else f"slot {index}"
        by_reason.setdefault(reason, []).append(which)
    said = "; ".join(f"{', '.join(which)}: {reason}" for reason, which in by_reason.items())
    log.error(
        "%d of %d slots of this step could not be decoded and %s: %s",
        len(failures), slots, "the step fails" if raising else "stay silent", said,
    )  # fmt: skip
    # Raising ends the stage with all its requests: the engine knows no way to fail a slot.
    if raising:
        error = failures[0][1]
        raise type(error)(said, code=error.code, detail=error.detail) from error


# ---------------------------------------------------------------- the class around both stages


def _patch_outer(module: ModuleType) -> None:
    if not once(module, "outer"):
        return
    try:
        outer = require(module, OUTER_CLASS)
        require(outer, "load_weights", ("weights",))
        require(outer, "__init__", ("vllm_config",))
        require_ours(home_of_workers(module))
    except UnfamiliarEngine as problem:
        refuse(module, (OUTER_CLASS,), problem)
        return
    outer.__init__ = _asking_for_request_ids(outer.__init__)
    outer.load_weights = _loading_without_a_folder(outer.load_weights)
    log.info("patched %s.%s: needs no folder of a tokenizer where an address is set", OUTER, OUTER_CLASS)


def home_of_workers(module: ModuleType) -> ModuleType:
    """Return the module that makes the workers which `module` uses."""
    require(module, "get_tokenizer_worker", ("device", "config_path", "audio_tokenizer_path"))
    return import_module(module.get_tokenizer_worker.__module__)


def _asking_for_request_ids(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if settings_for(vllm_config.model_config.hf_config).address is not None:
            # The runner then tells the ids of a step's requests, for the line about those that could not be decoded.
            self.requires_request_ids = True

    return __init__


def _loading_without_a_folder(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = settings_for(self.vllm_config.model_config.hf_config)
        # A stage without code2wav reads no path, and takes minutes.
        if settings.address is None or getattr(self, "token2wav", None) is None:
            return original(self, *args, **kwargs)
        from ._worker import remote_worker

        with remote_worker(settings, self.config):
            return original(self, *args, **kwargs)

    return load_weights


PATCHES: dict[str, Callable[[ModuleType], None]] = {CODE2WAV: _patch_code2wav, OUTER: _patch_outer}
