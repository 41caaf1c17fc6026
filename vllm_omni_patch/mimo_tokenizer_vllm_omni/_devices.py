"""The in-process tokenizer of an older engine, put on the device that it was told and fed with tensors that lie there.

Each repair is made only where this engine lacks it. Without an address these are all that changes in stage 1.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from ._code2wav import CODE2WAV, STAGE_CLASS
from ._engine import UnfamiliarEngine, dotted, log, once, require, tree_of, unfamiliar

if TYPE_CHECKING:
    from types import ModuleType

    import torch

_DEVICE_VARIABLE: Final = "MIMO_AUDIO_TOKENIZER_DEVICE"
_DECODERS: Final = ("_batch_decode_waveforms", "_batch_chunked_decode_streaming")

# Where the constructor of stage 1 that is running right now is to have its tokenizer.
_stage_device: ContextVar[torch.device | None] = ContextVar("mimo_tokenizer_stage_device", default=None)


def _patch(module: ModuleType) -> None:
    if not once(module, "devices"):
        return
    try:
        repairs = [
            (_lacks_stage_device, _honour_stage_device, "stage 1 honours MIMO_AUDIO_TOKENIZER_DEVICE"),
            (_lacks_index, _keep_index, "the index of a device stays in the worker cache's key and the constructor"),
            (_lacks_mel_on_cpu, _mel_on_cpu, "MelSpectrogram is built on the CPU"),
            (_lacks_codes_on_device, _codes_on_device, "codes and lengths go to the tokenizer's device"),
        ]
        # All are looked at before the first is made.
        lacking = [lacks(module) for lacks, _, _ in repairs]
    except UnfamiliarEngine as problem:
        log.warning("%s; the in-process tokenizer's devices are left as they are", problem)
        return
    for lacks, (_, repair, what) in zip(lacking, repairs, strict=True):
        if lacks:
            repair(module)
            log.info("patched %s: %s", CODE2WAV, what)
        else:
            log.info("left %s alone: there already, %s", CODE2WAV, what)


# ---------------------------------------------------------------- stage 1 takes the device it is told


def _lacks_stage_device(module: ModuleType) -> bool:
    init = require(require(module, STAGE_CLASS), "__init__", ("vllm_config", "prefix"))
    require(module, "get_tokenizer_worker", ("device",))
    return not any(
        isinstance(node, ast.Constant) and node.value == _DEVICE_VARIABLE
        for node in ast.walk(_source(init, STAGE_CLASS))
    )


def _honour_stage_device(module: ModuleType) -> None:
    import torch

    stage = getattr(module, STAGE_CLASS)
    init, get_worker = stage.__init__, module.get_tokenizer_worker

    @wraps(init)
    def __init__(self: Any, vllm_config: Any, prefix: str = "") -> None:
        told = os.environ.get(_DEVICE_VARIABLE)
        token = _stage_device.set(torch.device(told.lower()) if told else None)
        try:
            init(self, vllm_config=vllm_config, prefix=prefix)
        finally:
            _stage_device.reset(token)

    @wraps(get_worker)
    def get_tokenizer_worker(device: Any, *args: Any, **kwargs: Any) -> Any:
        return get_worker(_stage_device.get() or device, *args, **kwargs)

    stage.__init__ = __init__
    module.get_tokenizer_worker = get_tokenizer_worker  # type: ignore[attr-defined]


# ---------------------------------------------------------------- cuda:1 is not cuda


def _lacks_index(module: ModuleType) -> bool:
    import torch

    normalize = require(
        module, "_normalize_tokenizer_worker_cache_key", ("device", "config_path", "audio_tokenizer_path")
    )
    key = normalize(torch.device("cuda:1"), None, "")
    if not (isinstance(key, tuple) and len(key) == 3 and key[0] in ("cuda", "cuda:1")):
        raise unfamiliar(f"{CODE2WAV}.{normalize.__name__}", "one that answers (device, config path, tokenizer path)")
    return bool(key[0] == "cuda")


def _keep_index(module: ModuleType) -> None:
    import torch

    # The constructor takes its device from the key.
    normalize = module._normalize_tokenizer_worker_cache_key

    @wraps(normalize)
    def _normalize_tokenizer_worker_cache_key(device: torch.device | str, *args: Any, **kwargs: Any) -> Any:
        resolved = torch.device(device)
        if resolved.type == "cuda" and resolved.index is None and torch.cuda.is_available():
            resolved = torch.device("cuda", torch.cuda.current_device())
        return (str(resolved), *normalize(resolved, *args, **kwargs)[1:])

    module._normalize_tokenizer_worker_cache_key = _normalize_tokenizer_worker_cache_key  # type: ignore[attr-defined]


# ---------------------------------------------------------------- no mix of devices in the mel filter bank


def _lacks_mel_on_cpu(module: ModuleType) -> bool:
    require(module, "MelSpectrogram")
    worker = require(module, "MiMoAudioTokenizerWorker")
    tree = _source(require(worker, "__init__"), "MiMoAudioTokenizerWorker")
    return not any(
        isinstance(node, ast.With)
        and any(ast.unparse(item.context_expr) == "torch.device('cpu')" for item in node.items)
        and any(isinstance(inner, ast.Call) and dotted(inner.func) == "MelSpectrogram" for inner in ast.walk(node))
        for node in ast.walk(tree)
    )


def _mel_on_cpu(module: ModuleType) -> None:
    import torch

    transform = module.MelSpectrogram

    @wraps(transform, updated=())
    def build(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            return transform(*args, **kwargs)

    module.MelSpectrogram = build  # type: ignore[attr-defined]


# ---------------------------------------------------------------- codes go where the weights are


def _lacks_codes_on_device(module: ModuleType) -> bool:
    stage = require(module, STAGE_CLASS)
    moved = []
    for name in _DECODERS:
        tree = _source(require(stage, name, ("request_codes_list",)), f"{STAGE_CLASS}.{name}")
        moved.append(any(dotted(node) == "self._tokenizer_service.device" for node in ast.walk(tree)))
    if len(set(moved)) > 1:
        raise unfamiliar(f"{CODE2WAV}.{STAGE_CLASS}.{' and '.join(_DECODERS)}", "alike in where they put the codes")
    return not moved[0]


class _OnTokenizerDevice:
    """A stage whose `device`, where its decode methods put codes and lengths, is its tokenizer's."""

    def __init__(self, stage: Any, device: torch.device) -> None:
        self._stage = stage
        self.device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


def _codes_on_device(module: ModuleType) -> None:
    stage = getattr(module, STAGE_CLASS)
    for name in _DECODERS:
        setattr(stage, name, _decoding_on_device(getattr(stage, name)))


def _decoding_on_device(original: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    import torch

    @wraps(original)
    def decode(self: Any, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        told = getattr(self._tokenizer_service, "device", None)
        if told is None or torch.device(told) == torch.device(self.device):
            return original(self, *args, **kwargs)
        waveforms = original(_OnTokenizerDevice(self, torch.device(told)), *args, **kwargs)
        # Empty slots are the stage's own, as they were.
        return [samples if samples.numel() else samples.to(self.device) for samples in waveforms]

    return decode


def _source(function: Any, name: str) -> ast.AST:
    tree = tree_of(function)
    if tree is None:
        raise unfamiliar(f"{CODE2WAV}.{name}", "there with its source")
    return tree


PATCHES: dict[str, Callable[[ModuleType], None]] = {CODE2WAV: _patch}
