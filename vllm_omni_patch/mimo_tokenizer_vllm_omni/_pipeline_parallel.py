"""Pipeline parallelism: the empty tensors that a rank behind the first asks its model for.

On such a rank the engine's runner calls `make_empty_intermediate_tensors(batch_size=..., dtype=..., device=...)` of the
outermost model and fills what it gets with what the rank before sends. vLLM's `SupportsPP` only declares that
attribute, so a class that says it supports pipeline parallelism has to bring it. A stage without an inner language
model hands nothing from rank to rank: its answer has no entries.

Whatever is unfamiliar here is left as it is, with a warning: without pipeline parallelism nothing asks for it.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from functools import partial, wraps
from inspect import signature, unwrap
from typing import TYPE_CHECKING, Any, Final

from ._engine import MODELS, engine_version, log, once

if TYPE_CHECKING:
    from types import ModuleType

    import torch
    from vllm.sequence import IntermediateTensors

_NAME: Final = "make_empty_intermediate_tensors"


def _of_inner_model(self: Any, batch_size: int, dtype: torch.dtype, device: torch.device) -> IntermediateTensors:
    """The inner language model's empty tensors: it is what the ranks share."""
    tensors: IntermediateTensors = self.model.make_empty_intermediate_tensors(
        batch_size=batch_size, dtype=dtype, device=device
    )
    return tensors


def _no_tensors(batch_size: int, dtype: torch.dtype, device: torch.device) -> IntermediateTensors:
    """The answer of a stage without an inner language model."""
    from vllm.sequence import IntermediateTensors

    return IntermediateTensors({})


def _assigns(cls: type[Any], attribute: str) -> bool:
    """Whether a class's constructor sets an attribute of something, which here is the instance."""
    code = getattr(unwrap(cls.__init__), "__code__", None)
    return code is not None and any(
        step.opname == "STORE_ATTR" and step.argval == attribute for step in dis.get_instructions(code)
    )


def _source(cls: type[Any]) -> str | None:
    """Say where a class has the attribute from; None where it has none."""
    for base in cls.__mro__:
        # A protocol's method does nothing: it is there for type checkers.
        if _NAME in vars(base) and not getattr(base, "_is_protocol", False):
            return f"{base.__name__} defines it"
    return "its constructor sets it" if _assigns(cls, _NAME) else None


def _answers(make: Any) -> bool:
    """Whether the runner's call fits, and something comes of it."""
    try:
        signature(make).bind(batch_size=1, dtype=None, device=None)
    except (TypeError, ValueError):
        return False
    import torch

    try:
        return make(batch_size=1, dtype=torch.float32, device=torch.device("cpu")) is not None
    except Exception:  # of the engine's own code, whatever it is: no answer
        return False


def _mend(model: Any) -> None:
    """Give a model of several stages the answer of the stage that was constructed, if its own is none."""
    inside = getattr(model, "model", None)
    own, inner = getattr(model, _NAME, None), getattr(inside, _NAME, None)
    stage = f"{type(model).__name__}.{_NAME} with {type(inside).__name__} in it"
    # The inner model's own function is not tried out: it may be a large one's.
    if own is not None and (own == inner or _answers(own)):
        log.info("left %s alone: it can be called with batch_size, dtype and device", stage)
        return
    model.make_empty_intermediate_tensors = _no_tensors if inner is None else inner
    log.info("patched %s: the engine's cannot be called with batch_size, dtype and device, or returns None", stage)


def _find(module: ModuleType, name: str, *, inner: bool) -> type[Any] | None:
    """Return a class that is to be changed, once; None, with a warning, where it is unfamiliar.

    Args:
        module: The engine's.
        name: The class's.
        inner: Whether its constructor must set `model`, the model inside.
    """
    cls = getattr(module, name, None)
    if not isinstance(cls, type):
        wrong = f"{module.__name__}.{name} is not a class"
    elif inner and not _assigns(cls, "model"):
        wrong = f"{module.__name__}.{name}.model is not set by the constructor"
    else:
        return cls if once(cls, _NAME) else None
    log.warning(
        "vLLM-Omni %s: %s, so its %s is left as it is; pipeline parallelism may fail", engine_version(), wrong, _NAME
    )
    return None


def _supply(name: str, method: Any, reason: str, module: ModuleType) -> None:
    """Give a class a method, where it has none of its own; one that its instances set comes before it."""
    cls = _find(module, name, inner=method is _of_inner_model)
    if cls is None:
        return
    if source := _source(cls):
        log.info("left %s.%s alone: %s", name, _NAME, source)
        return
    setattr(cls, _NAME, method)
    log.info("patched %s.%s: SupportsPP only declares it; %s", name, _NAME, reason)


def _mend_after_construction(name: str, module: ModuleType) -> None:
    """Have a class of several stages looked at when it has been constructed: only then is the stage known."""
    cls = _find(module, name, inner=True)
    if cls is None:
        return
    init = cls.__init__

    @wraps(init)
    def init_and_mend(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _mend(self)

    cls.__init__ = init_and_mend
    log.info("patched %s.__init__: a stage whose %s has no answer gets one", name, _NAME)


_FROM_INNER: Final = "it now returns the inner language model's"
_NO_ENTRIES: Final = "it now returns no entries, since the stage has no language model"

PATCHES: dict[str, Callable[[ModuleType], None]] = {
    f"{MODELS}.mimo_audio.mimo_audio_llm": partial(
        _supply, "MiMoAudioLLMForConditionalGeneration", _of_inner_model, _FROM_INNER
    ),
    f"{MODELS}.mimo_audio.mimo_audio_code2wav": partial(
        _supply, "MiMoAudioToken2WavForConditionalGenerationVLLM", staticmethod(_no_tensors), _NO_ENTRIES
    ),
    f"{MODELS}.covo_audio.covo_audio_code2wav": partial(
        _supply, "CovoAudioCode2WavForConditionalGeneration", staticmethod(_no_tensors), _NO_ENTRIES
    ),
    f"{MODELS}.mimo_audio.mimo_audio": partial(_mend_after_construction, "MiMoAudioForConditionalGeneration"),
    f"{MODELS}.covo_audio.covo_audio": partial(_mend_after_construction, "CovoAudioForConditionalGeneration"),
}
