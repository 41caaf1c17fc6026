"""What the plugin is told: values, precedence, refusals, and how a stage's `hf_overrides` reach every process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_harness import build_processing_info, engine_config

from mimo_tokenizer_vllm_omni._settings import Settings, settings_for

SetEnvironment = Callable[[Mapping[str, str]], None]

SOCKET = "unix:///run/mimo.sock"
ADDRESS, ADDRESS_VARIABLE = "mimo_audio_tokenizer_address", "MIMO_AUDIO_TOKENIZER_ADDRESS"
NAMES = {
    "on_failure": ("mimo_audio_tokenizer_on_failure", "MIMO_AUDIO_TOKENIZER_ON_FAILURE"),
    "ready_timeout": ("mimo_audio_tokenizer_ready_timeout", "MIMO_AUDIO_TOKENIZER_READY_TIMEOUT"),
    "request_timeout": ("mimo_audio_tokenizer_timeout", "MIMO_AUDIO_TOKENIZER_TIMEOUT"),
    "unavailable_timeout": (
        "mimo_audio_tokenizer_unavailable_timeout",
        "MIMO_AUDIO_TOKENIZER_UNAVAILABLE_TIMEOUT",
    ),
}


@pytest.fixture(autouse=True)
def _nothing_said(set_environment: SetEnvironment) -> None:
    set_environment({})


def yaml(**overrides: Any) -> SimpleNamespace:
    """Stand for the Hugging Face config that has them; the tests at the end use real ones."""
    return SimpleNamespace(**overrides)


def test_nothing_said() -> None:
    assert settings_for(None) == settings_for(yaml()) == Settings(None, "empty", 120.0, None, 30.0)


@pytest.mark.parametrize("blank", ["", "   ", None])
def test_a_blank_says_nothing(blank: str | None, set_environment: SetEnvironment) -> None:
    names = [(ADDRESS, ADDRESS_VARIABLE), *NAMES.values()]
    set_environment({variable: blank for _, variable in names if blank is not None})
    assert settings_for(yaml(**{key: blank for key, _ in names})) == Settings()


def test_the_environment(set_environment: SetEnvironment) -> None:
    values = ("raise", "2.5", " 7 ", "1e1")
    set_environment(
        {ADDRESS_VARIABLE: f" {SOCKET}"} | {NAMES[name][1]: v for name, v in zip(NAMES, values, strict=True)}
    )
    assert settings_for(None) == settings_for(yaml()) == Settings(SOCKET, "raise", 2.5, 7.0, 10.0)


def test_the_deploy_yaml_goes_first(set_environment: SetEnvironment) -> None:
    set_environment({NAMES[name][1]: v for name, v in zip(NAMES, ("empty", "1", "2", "3"), strict=True)})
    told = yaml(
        **{ADDRESS: SOCKET} | {NAMES[name][0]: v for name, v in zip(NAMES, ("raise", 3, "4.5", 6), strict=True)}
    )
    assert settings_for(told) == Settings(SOCKET, "raise", 3.0, 4.5, 6.0)


def test_the_deploy_yaml_in_part(set_environment: SetEnvironment) -> None:
    set_environment({ADDRESS_VARIABLE: SOCKET, NAMES["ready_timeout"][1]: "1"})
    assert settings_for(yaml(**{NAMES["request_timeout"][0]: 9})) == Settings(SOCKET, "empty", 1.0, 9.0, 30.0)


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("unix:///run/mimo.sock", SOCKET),
        ("unix:/run/mimo.sock", SOCKET),
        ("unix:mimo.sock", "unix:mimo.sock"),
        ("localhost:50051", "localhost:50051"),
        (":50051", "127.0.0.1:50051"),
        ("[::1]:50051", "[::1]:50051"),
    ],
)
def test_addresses(written: str, address: str, set_environment: SetEnvironment) -> None:
    assert settings_for(yaml(**{ADDRESS: written})).address == address
    set_environment({ADDRESS_VARIABLE: written})
    assert settings_for(None).address == address


@pytest.mark.parametrize("other", [SOCKET, "unix:/run/mimo.sock", f"  {SOCKET} "])
def test_one_address_said_twice(other: str, set_environment: SetEnvironment) -> None:
    set_environment({ADDRESS_VARIABLE: other})
    assert settings_for(yaml(**{ADDRESS: SOCKET})).address == SOCKET


def test_two_addresses_are_refused(set_environment: SetEnvironment) -> None:
    set_environment({ADDRESS_VARIABLE: "localhost:50051"})
    with pytest.raises(ValueError, match="two different addresses") as refused:
        settings_for(yaml(**{ADDRESS: SOCKET}))
    for part in (repr(SOCKET), ADDRESS, "'localhost:50051'", ADDRESS_VARIABLE):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("localhost", "neither unix:///path nor host:port"),
        ("/run/mimo.sock", "then write unix:///run/mimo.sock"),
        ("localhost:70000", "outside 1..65535"),
        ("unix://mimo.sock", "needs an absolute path"),
        ("unix:///" + 107 * "x", "longer than the 107 bytes"),
        (50051, "not text"),
    ],
)
def test_what_is_no_address(address: Any, why: str, set_environment: SetEnvironment) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        settings_for(yaml(**{ADDRESS: address}))
    assert f"{ADDRESS} in the deploy YAML" in str(refused.value)
    assert str(address) in str(refused.value)
    if isinstance(address, str):
        set_environment({ADDRESS_VARIABLE: address})
        with pytest.raises(ValueError, match=f"{ADDRESS_VARIABLE} in the environment .*{why}"):
            settings_for(None)


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        *(("on_failure", value, "'empty' or 'raise'") for value in ("Raise", "ignore", True, 0)),
        *(
            (setting, value, "a positive, finite number of seconds")
            for setting in ("ready_timeout", "request_timeout", "unavailable_timeout")
            for value in (0, -1, "nan", "inf", "-inf", "soon", "1s", True, [1], 10**400)
        ),
    ],
)
def test_bad_values(setting: str, value: Any, allowed: str, set_environment: SetEnvironment) -> None:
    key, variable = NAMES[setting]
    # Without an address it is about nothing, and harms nobody.
    assert settings_for(yaml(**{key: value})) == Settings()
    with pytest.raises(ValueError, match=allowed) as refused:
        settings_for(yaml(**{ADDRESS: SOCKET, key: value}))
    assert str(refused.value).startswith(f"{key} in the deploy YAML's hf_overrides is {value!r}")
    set_environment({ADDRESS_VARIABLE: SOCKET, variable: str(value)})
    with pytest.raises(ValueError, match=f"^{variable} in the environment is '.*'; allowed is {allowed}$"):
        settings_for(None)


# ---------------------------------------------------------------- on the real engine's configs


@pytest.mark.parametrize("stage", [0, 1])
def test_hf_overrides_reach_the_stages(stage: int, language_model: Path) -> None:
    told = {ADDRESS: SOCKET, NAMES["request_timeout"][0]: 4}
    config = engine_config(language_model, stage, hf_overrides=dict(told))
    assert settings_for(config.model_config.hf_config) == Settings(SOCKET, "empty", 120.0, 4.0, 30.0)
    # So it travels to the stage's process.
    assert settings_for(pickle.loads(pickle.dumps(config.model_config)).hf_config).address == SOCKET


def test_hf_overrides_outlive_the_models_own_config_class(language_model: Path) -> None:
    from vllm_omni.model_executor.models.mimo_audio.config_mimo_audio import MiMoAudioConfig

    hf_config = engine_config(language_model, 1, hf_overrides={ADDRESS: SOCKET}).model_config.hf_config
    assert not isinstance(hf_config, MiMoAudioConfig)
    assert settings_for(MiMoAudioConfig(**vars(hf_config))).address == SOCKET


def test_hf_overrides_reach_the_front_end(language_model: Path) -> None:
    info = build_processing_info(language_model, hf_overrides={ADDRESS: SOCKET})
    assert settings_for(info.ctx.get_hf_config()).address == SOCKET
    assert settings_for(info.get_hf_config()).address == SOCKET
