"""The small model of the published architecture against the reference, over seeds and lengths."""

from __future__ import annotations

from pathlib import Path

import comparison
import pytest
import torch
from comparison import Pair, check_decode, check_diverse, check_encode, lively_sound

from mimo_tokenizer_server.model.config import TokenizerConfig, read_json, unknown_fields

# 6000 mel frames, a full segment, are 5999 * 240 samples and up to 239 more: 60 s are already a frame over it.
_LENGTHS = [
    481,
    959,
    960,
    961,
    12_345,
    24_000,
    1_439_759,
    1_439_760,
    1_439_999,
    1_440_000,
    1_440_001 + 777,
    61 * 24_000,
    121 * 24_000 + 13,
]


@pytest.mark.parametrize("samples", _LENGTHS)
def test_codes(pair: Pair, samples: int) -> None:
    codes = check_encode(pair, lively_sound(samples, 24_000, seed=samples))
    if samples >= 1_439_000:
        check_diverse(codes)


@pytest.mark.parametrize("rows", [1, 8, 19])
def test_codes_of_the_first_codebooks(pair: Pair, rows: int) -> None:
    check_encode(pair, lively_sound(77_777, 24_000, seed=rows), rows)


@pytest.mark.parametrize("kind", ["silence", "one click", "full scale", "denormal"])
def test_codes_of_extreme_sound(pair: Pair, kind: str) -> None:
    sound = torch.zeros(30_001)
    if kind == "one click":
        sound[17_000] = 1
    elif kind == "full scale":
        sound = torch.sin(torch.arange(30_001) * 0.3).sign()
    elif kind == "denormal":
        sound = lively_sound(30_001, 24_000, seed=0) * 1e-39
    check_encode(pair, sound)


@pytest.mark.parametrize("frames", [1, 2, 3, 25, 280, 1501])
def test_waveform(pair: Pair, frames: int) -> None:
    check_decode(pair, frames)


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("frames", [1, 25, 101])
def test_waveform_of_fewer_rows_than_codebooks(pair: Pair, frames: int, rows: int) -> None:
    check_decode(pair, frames, rows)


def test_the_reference_s_config_file_is_understood(pair: Pair) -> None:
    values = read_json(pair.folder / "config.json")
    assert unknown_fields(values) == []
    assert TokenizerConfig.from_dict(values) == TokenizerConfig.from_dict(pair.values)


def test_sharded_checkpoint(tmp_path: Path) -> None:
    whole = comparison.make_pair(tmp_path / "whole", {}, 4)
    whole.reference.save_pretrained(tmp_path / "shards", max_shard_size="300KB")
    assert (tmp_path / "shards/model.safetensors.index.json").is_file()
    assert not (tmp_path / "shards/model.safetensors").exists()
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    shards = Pair(whole.values, whole.reference, comparison.load(tmp_path / "shards"), tmp_path / "shards")
    check_encode(shards, lively_sound(100_000, 24_000, seed=4))
    check_decode(shards, 40)
