"""What a config.json may say, and what is said of one that may not."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from model_helpers import TINY, tiny_config

from mimo_tokenizer_server.model.config import ConfigError, TokenizerConfig, read_json, unknown_fields

_POSITIVE = (
    "stride_size",
    "avg_pooler",
    "d_model",
    "kernel_size",
    "encoder_layers",
    "encoder_attention_heads",
    "encoder_ffn_dim",
    "decoder_layers",
    "decoder_attention_heads",
    "decoder_ffn_dim",
    "decoder_kernel_size",
    "decoder_stride_size",
    "nfft",
    "vocoder_dim",
    "vocoder_intermediate_dim",
    "vocoder_num_layers",
    "n_mels",
    "sampling_rate",
    "hop_length",
    "window_size",
    "num_quantizers",
    "vocoder_attention_heads",
)
_STRINGS = ("activation_function", "vocoder_padding", "position_embedding_type", "rope_type", "ln_type")
_FLAGS = ("scale_embedding", "encoder_causal", "decoder_causal")
_WINDOWS = ("encoder_attn_window_size", "decoder_attn_window_size", "vocoder_attn_window_size")

_REFUSED: list[tuple[str, Any]] = [
    *((field, value) for field in _POSITIVE for value in (0, -1, 1.5, "2", None, True, [2], 1e400)),
    *((field, value) for field in ("max_audio_seconds", "rope_theta") for value in (0, -1, "2", None, True)),
    *((field, value) for field in _STRINGS for value in ("other", "", 3, None)),
    *((field, value) for field in _FLAGS for value in (1, 0, "true", None)),
    *(
        (field, value)
        for field in _WINDOWS
        for value in ([4, -2], [-2, 4], [4], [1, 2, 3], [], 4, "4", [1, "2"], [1.5, 2])
    ),
    ("encoder_skip_layer_id", -1),
    ("encoder_skip_layer_id", 3),
    ("encoder_skip_layer_id", "1"),
    ("encoder_skip_layer_id", False),
    ("decoder_stride_size", 3),
    ("decoder_kernel_size", 1),
    ("encoder_attention_heads", 3),
    ("encoder_attention_heads", 16),
    ("decoder_attention_heads", 5),
    ("decoder_attention_heads", 16),
    ("vocoder_attention_heads", 3),
    ("codebook_size", []),
    ("codebook_size", [0]),
    ("codebook_size", [64, -1]),
    ("codebook_size", [65_537]),
    ("codebook_size", 0),
    ("codebook_size", "64"),
    ("codebook_size", [64, "32"]),
    ("codebook_size", {"0": 64}),
    ("nfft", 97),
    ("window_size", 97),
    ("hop_length", 49),
    ("hop_length", 23),
    ("fmin", -1),
    ("fmin", 1200),
    ("fmin", 5000),
    ("fmin", "low"),
    ("fmin", None),
    ("fmax", 0),
    ("fmax", -3),
    ("fmax", 1201),
    ("fmax", "high"),
    ("threshold_ema_dead_code", "never"),
]


@pytest.mark.parametrize(("field", "value"), _REFUSED, ids=lambda item: str(item)[:24])
def test_a_refused_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        TokenizerConfig.from_dict(TINY | {field: value})
    sentence = str(caught.value)
    assert sentence.startswith("config.json: ")
    assert f"{field} is " in sentence
    assert "; it must be " in sentence or "; supported: " in sentence


@pytest.mark.parametrize(
    ("field", "value", "meant"),
    [
        ("d_model", 16.0, 16),
        ("fmax", 1200, 1200.0),
        ("fmax", None, None),
        ("fmin", 0, 0.0),
        ("encoder_skip_layer_id", None, None),
        ("encoder_skip_layer_id", 0, 0),
        ("encoder_skip_layer_id", 2, 2),
        ("encoder_attn_window_size", None, (-1, -1)),
        ("decoder_attn_window_size", None, (-1, -1)),
        ("vocoder_attn_window_size", None, (40, 10)),
        ("vocoder_attn_window_size", [0, -1], (0, -1)),
        ("codebook_size", None, (1024,)),
        ("codebook_size", 77, (77,)),
        ("codebook_size", [65_536], (65_536,)),
        ("codebook_size", [9, 8, 7, 6, 5], (9, 8, 7, 6, 5)),
        ("scale_embedding", False, False),
        ("threshold_ema_dead_code", 0, 0.0),
        ("hop_length", 48, 48),
        ("window_size", 50, 50),
        ("kernel_size", 8, 8),
    ],
)
def test_an_accepted_value(field: str, value: Any, meant: Any) -> None:
    got = getattr(tiny_config(**{field: value}), field)
    assert got == meant
    assert type(got) is type(meant)


def test_all_refused_values_are_in_one_error() -> None:
    wrong = {
        "ln_type": "BatchNorm",
        "activation_function": "mish",
        "decoder_stride_size": 3,
        "vocoder_attention_heads": 7,
        "codebook_size": [70_000],
        "vocoder_attn_window_size": [4, -5],
        "fmax": 99_999,
    }
    with pytest.raises(ConfigError) as caught:
        TokenizerConfig.from_dict(TINY | wrong)
    assert all(f"{field} is " in str(caught.value) for field in wrong)


def test_all_values_of_a_wrong_type_are_in_one_error() -> None:
    wrong = {"d_model": "16", "encoder_causal": 1, "ln_type": None, "fmax": "high", "codebook_size": ["a"]}
    with pytest.raises(ConfigError) as caught:
        TokenizerConfig.from_dict(TINY | wrong)
    assert all(f"{field} is {wrong[field]!r}" in str(caught.value) for field in wrong)


def test_all_values_that_are_not_positive_are_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        TokenizerConfig.from_dict(TINY | dict.fromkeys(_POSITIVE, 0))
    assert all(f"{field} is 0" in str(caught.value) for field in _POSITIVE)


def test_defaults_are_the_published_format_s() -> None:
    config = TokenizerConfig.from_dict({})
    assert config == TokenizerConfig()
    # Given or not, a default is the same value of the same type.
    assert TokenizerConfig.from_dict(asdict(config)).canonical_json() == config.canonical_json()
    assert config.avg_pooler == 1
    assert config.encoder_skip_layer_id is None
    assert config.codebook_sizes == (1024,) * 12
    assert config.vocoder_attn_window_size == (40, 10)


@pytest.mark.parametrize("model_type", ["qwen2", "", None, 3])
def test_another_model_type(model_type: Any) -> None:
    with pytest.raises(ConfigError, match=r"^model_type is .*; this server runs 'mimo_audio_tokenizer'$"):
        TokenizerConfig.from_dict(TINY | {"model_type": model_type})


def test_model_type_may_be_absent() -> None:
    assert (
        TokenizerConfig.from_dict({key: value for key, value in TINY.items() if key != "model_type"}) == tiny_config()
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{'d_model': 16}", "is not JSON"),
        ("", "is not JSON"),
        ("[1, 2]", "holds a JSON list, not an object"),
        ('"text"', "holds a JSON str, not an object"),
        ("null", "holds a JSON NoneType, not an object"),
        ('{"d_model": NaN}', "d_model is nan"),
        ('{"rope_theta": Infinity}', "rope_theta is inf"),
    ],
)
def test_files_that_hold_no_config(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=sentence) as caught:
        TokenizerConfig.from_file(path)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_json(path)


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json: No such file"):
        TokenizerConfig.from_file(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="cannot read"):
        TokenizerConfig.from_file(tmp_path)


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY | {"transformers_version": "5.0.0"}))
    assert TokenizerConfig.from_file(path) == tiny_config()


def test_unknown_fields() -> None:
    values = TINY | {"zeta": 1, "alpha": None, "_name_or_path": "x", "dtype": "float32", "architectures": ["A"]}
    assert unknown_fields(values) == ["alpha", "zeta"]
    assert unknown_fields({}) == []
    assert unknown_fields(TINY) == []


def test_unknown_fields_change_nothing() -> None:
    assert TokenizerConfig.from_dict(TINY | {"zeta": 1}) == tiny_config()


@pytest.mark.parametrize(
    ("count", "sizes", "meant"),
    [
        (4, [9, 8], (9, 8, 8, 8)),
        (2, [9, 8, 7], (9, 8)),
        (3, 5, (5, 5, 5)),
        (3, [9, 8, 7], (9, 8, 7)),
        (1, [9], (9,)),
    ],
)
def test_codebook_sizes(count: int, sizes: Any, meant: tuple[int, ...]) -> None:
    assert tiny_config(num_quantizers=count, codebook_size=sizes).codebook_sizes == meant


def test_lengths_of_the_published_model() -> None:
    config = TokenizerConfig.from_dict(
        {
            "avg_pooler": 2,
            "nfft": 960,
            "window_size": 960,
            "n_mels": 128,
            "d_model": 1280,
            "encoder_attention_heads": 20,
        }
        | {"decoder_attention_heads": 20}
    )
    assert config.samples_per_frame == 960
    assert config.segment_samples == 1_440_000
    assert config.min_samples == 481
    assert config.samples_cut == 0
    assert [config.audio_code_frames(samples) for samples in (481, 24_000, 1_439_999, 1_440_000)] == [1, 26, 1500, 1501]
    # Within a segment N // 960 + 1, and each of the others gives 1500 for its 6000 mel frames.
    for samples in range(481, 3_500_000, 9_973):
        full, rest = divmod(samples // 240 + 1, 6000)
        frames = full * 1500 + (-(-((rest + 1) // 2) // 2) if rest else 0)
        assert config.audio_code_frames(samples) == frames
        if not full:
            assert frames == samples // 960 + 1


@pytest.mark.parametrize(("padding", "cut"), [("same", 0), ("center", 24)])
def test_samples_cut(padding: str, cut: int) -> None:
    assert tiny_config(vocoder_padding=padding).samples_cut == cut


def test_equal_configs_have_one_spelling() -> None:
    assert tiny_config(codebook_size=[64, 32, 16, 8]).canonical_json() == tiny_config().canonical_json()
    assert tiny_config(fmin=0.0, d_model=16.0).canonical_json() == tiny_config().canonical_json()
    short, long = tiny_config(codebook_size=64), tiny_config(codebook_size=[64, 64, 64])
    assert short.canonical_json() == long.canonical_json()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("encoder_causal", True),
        ("encoder_attn_window_size", [3, 3]),
        ("decoder_causal", False),
        ("decoder_attn_window_size", [3, 3]),
        ("vocoder_attn_window_size", [3, 3]),
        ("vocoder_padding", "center"),
        ("encoder_skip_layer_id", None),
        ("activation_function", "relu"),
        ("ln_type", "RMSNorm"),
        ("rope_theta", 500),
        ("fmin", 10),
        ("fmax", 1000),
        ("window_size", 90),
        ("encoder_attention_heads", 4),
        ("decoder_attention_heads", 4),
        ("vocoder_attention_heads", 4),
        ("sampling_rate", 2401),
        ("hop_length", 22),
        ("num_quantizers", 2),
        ("codebook_size", [64, 32, 15]),
    ],
)
def test_other_configs_have_other_spellings(field: str, value: Any) -> None:
    assert tiny_config(**{field: value}).canonical_json() != tiny_config().canonical_json()


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        tiny_config().d_model = 3  # type: ignore[misc]
