"""What the plugin is told: by the deploy YAML, or else by the process's environment.

What stands in `hf_overrides` of a stage becomes attributes of the model's Hugging Face config, which every process that
has the model's config sees, the front end included: it makes the multimodal processor from stage 0's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from types import ModuleType
from typing import Any, Final, Literal, NamedTuple, get_args

from ._engine import UnfamiliarEngine, log, once, require

OnFailure = Literal["empty", "raise"]

RUNTIME: Final = "vllm_omni.engine.stage_runtime"
ARCHITECTURE: Final = "MiMoAudioModel"


class Name(NamedTuple):
    """A setting's name in a stage's `hf_overrides`, and in the environment."""

    key: str
    variable: str


ADDRESS: Final = Name("mimo_audio_tokenizer_address", "MIMO_AUDIO_TOKENIZER_ADDRESS")
ON_FAILURE: Final = Name("mimo_audio_tokenizer_on_failure", "MIMO_AUDIO_TOKENIZER_ON_FAILURE")
READY_TIMEOUT: Final = Name("mimo_audio_tokenizer_ready_timeout", "MIMO_AUDIO_TOKENIZER_READY_TIMEOUT")
REQUEST_TIMEOUT: Final = Name("mimo_audio_tokenizer_timeout", "MIMO_AUDIO_TOKENIZER_TIMEOUT")
UNAVAILABLE_TIMEOUT: Final = Name(
    "mimo_audio_tokenizer_unavailable_timeout", "MIMO_AUDIO_TOKENIZER_UNAVAILABLE_TIMEOUT"
)


@dataclass(frozen=True)
class Settings:
    """The plugin's settings in one process.

    Attributes:
        address: Where the tokenizer service listens; None: the remote parts stay out.
        on_failure: What becomes of a slot that cannot be decoded: it comes back empty, or the step raises.
        ready_timeout: Seconds that start-up waits for the service.
        request_timeout: Seconds that a call may take, retries included; None: the client's own time, which grows with
            the audio.
        unavailable_timeout: Seconds of that time for which a call waits for a service that is not there.
    """

    address: str | None = None
    on_failure: OnFailure = "empty"
    ready_timeout: float = 120.0
    request_timeout: float | None = None
    unavailable_timeout: float = 30.0


def settings_for(hf_config: object | None, environment: Mapping[str, str] = os.environ) -> Settings:
    """Return what `hf_config` (the deploy YAML's way) and the environment say; the deploy YAML goes first.

    Args:
        hf_config: The model's Hugging Face config; None: there is only the environment.
        environment: This process's, or that of another one.

    Raises:
        ValueError: A value is not allowed, or the two name different addresses.
    """
    said = partial(_said, hf_config, environment)
    address = _address(said(ADDRESS))
    if address is None:
        return Settings()  # the others are about the service
    return Settings(
        address=address,
        on_failure=_on_failure(said(ON_FAILURE)),
        ready_timeout=_seconds(said(READY_TIMEOUT)) or Settings.ready_timeout,
        request_timeout=_seconds(said(REQUEST_TIMEOUT)),
        unavailable_timeout=_seconds(said(UNAVAILABLE_TIMEOUT)) or Settings.unavailable_timeout,
    )


# ---------------------------------------------------------------- reading one setting


class _Said(NamedTuple):
    """A value, and where it was said."""

    value: Any
    source: str


def _said(hf_config: object | None, environment: Mapping[str, str], name: Name) -> list[_Said]:
    """Return what is said about a setting, the one that counts first; a blank is as good as nothing."""
    sources = [
        _Said(getattr(hf_config, name.key, None), f"{name.key} in the deploy YAML's hf_overrides"),
        _Said(environment.get(name.variable), f"{name.variable} in the environment"),
    ]
    stripped = [said._replace(value=said.value.strip()) if isinstance(said.value, str) else said for said in sources]
    return [said for said in stripped if said.value is not None and said.value != ""]


def _address(said: list[_Said]) -> str | None:
    addresses = [_checked_address(*one) for one in said]
    if len(set(addresses)) > 1:
        named = " and ".join(f"{value!r} ({source})" for value, source in said)
        raise ValueError(f"two different addresses of a tokenizer service are named, {named}: name one, or the same")
    return addresses[0] if addresses else None


def _checked_address(value: Any, source: str) -> str:
    # Not at the top: a process without an address has no use for gRPC.
    from mimo_tokenizer_client import InvalidInput
    from mimo_tokenizer_client._transport import resolve_address

    try:
        address = resolve_address(value)
    except InvalidInput as error:
        raise ValueError(f"{source} cannot be used: {error}; allowed is unix:///path or host:port") from error
    # unix:/path and unix:///path are one socket, and must not look like two services.
    path = address.removeprefix("unix:")
    return f"unix:///{path.lstrip('/')}" if path.startswith("/") else address


def _on_failure(said: list[_Said]) -> OnFailure:
    for value, source in said:
        for allowed in get_args(OnFailure):
            if value == allowed:
                return allowed  # type: ignore[no-any-return]
        raise ValueError(f"{source} is {value!r}; allowed is 'empty' or 'raise'")
    return Settings.on_failure


def _seconds(said: list[_Said]) -> float | None:
    for value, source in said:
        try:
            seconds = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            seconds = math.nan
        if math.isfinite(seconds) and seconds > 0:
            return seconds
        raise ValueError(f"{source} is {value!r}; allowed is a positive, finite number of seconds")
    return None


# ---------------------------------------------------------------- all stages of one engine


def _patch(module: ModuleType) -> None:
    """Have the front end look at every stage's settings before it starts the first stage's process."""
    where = f"{RUNTIME}.StageRuntime._prepare_stage_plans"
    try:
        runtime = require(module, "StageRuntime")
        original = require(runtime, "_prepare_stage_plans", ("self",))
    except UnfamiliarEngine as problem:
        # Each process still checks what it is told itself.
        log.info("left %s alone, a wrong setting is found later, by the stage that has it: %s", where, problem)
        return
    if once(runtime, "settings"):
        runtime._prepare_stage_plans = _checking(original)
        log.info("patched %s: checks the tokenizer settings of all stages, and that there is one address", where)


def _checking(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _prepare_stage_plans(self: Any) -> Any:
        plans = original(self)
        _check_one_address(plans)
        return plans

    return _prepare_stage_plans


def _check_one_address(plans: Iterable[Any]) -> None:
    """Check the settings of an engine's stages, as the front end is about to start them.

    Raises:
        ValueError: A value is not allowed, or not all of the engine is to use the same address, or none.
    """
    addresses: dict[str, str | None] = {}
    for plan in plans:
        for replica in getattr(plan, "replicas", ()):
            model_config = getattr(getattr(replica, "stage_vllm_config", None), "model_config", None)
            if ARCHITECTURE not in getattr(model_config, "architectures", ()):
                continue
            hf_config = getattr(model_config, "hf_config", None)
            # The front end has the config of the first stage, and an environment of its own.
            addresses.setdefault("the front end", settings_for(hf_config).address)
            stage = f"stage {getattr(plan, 'stage_id', '?')}"
            addresses[stage] = settings_for(hf_config, _environment_of(replica)).address
    uses = [f"{who} the one at {address}" if address else f"{who} none" for who, address in addresses.items()]
    if len(set(addresses.values())) > 1:
        raise ValueError(
            f"not all of the engine is to use the same tokenizer service, {', '.join(uses)}: name one address, in"
            f" {ADDRESS.key} of every stage's hf_overrides or in {ADDRESS.variable}"
        )


def _environment_of(replica: Any) -> dict[str, str]:
    """Return what a stage's process will find in its environment: this one's, and `env` of the stage's deploy YAML."""
    runtime = getattr(getattr(replica, "metadata", None), "runtime_cfg", None)
    given = runtime.get("env") if isinstance(runtime, Mapping) else getattr(runtime, "env", None)
    return {**os.environ, **{str(name): str(value) for name, value in (given or {}).items()}}


PATCHES: dict[str, Callable[[ModuleType], None]] = {RUNTIME: _patch}
