"""Stage 0, sound to codes: the front end's data parser takes the tokenizer service where an address is set."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from ._code2wav import OUTER, OUTER_CLASS, hf_config_of_parser, home_of_workers, refuse, require_ours
from ._engine import UnfamiliarEngine, log, once, require
from ._settings import settings_for

if TYPE_CHECKING:
    from types import ModuleType

PARSER_CLASS: Final = "MiMoAudioDataParser"
INFO_CLASS: Final = "MiMoAudioLLMProcessingInfo"


def _patch(module: ModuleType) -> None:
    if not once(module, "data parser"):
        return
    try:
        parser = require(module, PARSER_CLASS)
        require(parser, "__init__", ("target_sr",))
        info = require(module, INFO_CLASS)
        require(info, "get_data_parser")
        code2wav = home_of_workers(module)
        require_ours(code2wav)
    except UnfamiliarEngine as problem:
        refuse(module, (PARSER_CLASS, f"{INFO_CLASS}.get_data_parser", OUTER_CLASS), problem)
        return
    # Where this module was imported before the plugin, it holds the function as it was.
    module.get_tokenizer_worker = code2wav.get_tokenizer_worker  # type: ignore[attr-defined]
    parser.__init__ = _built_on_ours(code2wav, parser.__init__)
    info.get_data_parser = _telling_config(info.get_data_parser)
    log.info("patched %s.%s: encodes through the tokenizer service where an address is set", OUTER, PARSER_CLASS)


def _telling_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def get_data_parser(self: Any) -> Any:
        token = hf_config_of_parser.set(self.ctx.model_config.hf_config)
        try:
            return original(self)
        finally:
            hf_config_of_parser.reset(token)

    return get_data_parser


def _built_on_ours(code2wav: ModuleType, original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        hf_config = hf_config_of_parser.get()
        settings = settings_for(hf_config)
        if settings.address is None:
            original(self, *args, **kwargs)
            return
        from ._worker import language_model_config, remote_worker, tell_what_is_ignored

        tell_what_is_ignored(settings)
        with remote_worker(settings, language_model_config(code2wav, hf_config)):
            original(self, *args, **kwargs)
        self.audio_tokenizer_path = self.tokenizer_config_path = settings.address

    return __init__


PATCHES: dict[str, Callable[[ModuleType], None]] = {OUTER: _patch}
