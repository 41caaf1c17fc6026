"""Reading checkpoints: what they hold, what is wrong with them, where they are; random weights; fingerprints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import (
    CPU,
    TINY,
    load,
    published_shapes,
    random_weights,
    tiny_config,
    tiny_tokenizer,
    training_shapes,
    write_checkpoint,
    write_index,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from mimo_tokenizer_server.model import checkpoint
from mimo_tokenizer_server.model.checkpoint import CheckpointError, locate
from mimo_tokenizer_server.model.config import TokenizerConfig
from mimo_tokenizer_server.model.packing import Spans
from mimo_tokenizer_server.model.rows import linear_layers, pack
from mimo_tokenizer_server.model.tokenizer import MiMoAudioTokenizer

_Q_PROJ = "encoder.layers.1.self_attn.q_proj.weight"
_EMBED = "encoder.quantizer.vq.layers.2._codebook.embed"
_WINDOW = "decoder.vocoder.head.istft.window"


def _same_weights(one: MiMoAudioTokenizer, other: MiMoAudioTokenizer) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def _answers(tokenizer: MiMoAudioTokenizer) -> tuple[Tensor, Tensor]:
    mel = torch.randn((1000, tokenizer.config.n_mels), generator=torch.Generator().manual_seed(0))
    codes = tokenizer.encode(mel, Spans([1000]), tokenizer.config.num_quantizers)
    return codes, tokenizer.decode(codes, Spans([codes.shape[1]]))


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A tiny checkpoint in one file."""
    return write_checkpoint(tmp_path / "whole", random_weights(tiny_config()))


# What loads.


@pytest.mark.parametrize(
    "changes", [{}, {"avg_pooler": 1}, {"ln_type": "RMSNorm"}, {"num_quantizers": 5}, {"codebook_size": 9}], ids=str
)
def test_weights_arrive(changes: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config(**changes)
    weights = random_weights(config)
    tokenizer, _ = load(config, write_checkpoint(tmp_path, weights))
    layer, name = tokenizer.encoder.layers[1].self_attn, "encoder.layers.1.self_attn"
    q, k, v = (weights[f"{name}.{part}_proj.weight"] for part in "qkv")
    assert torch.equal(layer.qkv.weight, torch.cat((q, k, v)))
    assert torch.equal(
        layer.qkv.bias, torch.cat((weights[f"{name}.q_proj.bias"], torch.zeros(16), weights[f"{name}.v_proj.bias"]))
    )
    head = tokenizer.decoder.vocoder.head
    assert torch.equal(head.window, weights[_WINDOW])
    assert torch.equal(tokenizer.encoder.quantizer.codebooks[2], weights[_EMBED])
    assert torch.equal(tokenizer.decoder.dconv2.conv.weight, weights["decoder.dconv2.conv.weight"])
    assert sum(p.numel() for p in tokenizer.parameters()) == sum(
        weights[key].numel() for key in published_shapes(config)
    ) + sum(
        width * depth
        for width, depth in (
            (config.d_model, config.encoder_layers + config.decoder_layers),
            (config.vocoder_dim, config.vocoder_num_layers),
        )
    )


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_stored_types_become_float32(stored: torch.dtype, tmp_path: Path) -> None:
    config = tiny_config()
    weights = {key: weight.to(stored) for key, weight in random_weights(config).items()}
    tokenizer, _ = load(config, write_checkpoint(tmp_path / "stored", weights))
    as_float32 = {key: weight.float() for key, weight in weights.items()}
    expected, _ = load(config, write_checkpoint(tmp_path / "float32", as_float32))
    assert {p.dtype for p in tokenizer.parameters()} == {torch.float32}
    assert _same_weights(tokenizer, expected)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_packed_as_they_are_read(stored: torch.dtype, tmp_path: Path) -> None:
    """As if read first and packed then; whichever layers are meant."""
    config = tiny_config()
    folder = write_checkpoint(tmp_path, {key: weight.to(stored) for key, weight in random_weights(config).items()})
    expected, fingerprint = load(config, folder)
    pack(expected)
    for of in ("decoder", "encoder", "decoder.vocoder", ""):
        tokenizer = MiMoAudioTokenizer(config, CPU, torch.float32)
        chosen = linear_layers(tokenizer.get_submodule(of))
        assert checkpoint.load(tokenizer, folder, lambda: None, chosen) == fingerprint
        assert all(layer.packed == (layer in chosen) for layer in linear_layers(tokenizer))
        pack(tokenizer)
        assert all(
            torch.equal(mine, theirs) for mine, theirs in zip(_answers(tokenizer), _answers(expected), strict=True)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_is_rounded_but_for_quantizer_and_window(dtype: torch.dtype, whole: Path) -> None:
    config = tiny_config()
    weights = random_weights(config)
    tokenizer, _ = load(config, whole, dtype)
    exact, _ = load(config, whole)
    assert torch.equal(tokenizer.encoder.layers[1].self_attn.qkv.weight[:16], weights[_Q_PROJ].to(dtype))
    for (name, rounded), kept in zip(tokenizer.named_parameters(), exact.parameters(), strict=True):
        wanted = torch.float32 if "quantizer" in name or name.endswith("head.window") else dtype
        assert rounded.dtype == wanted
        assert torch.equal(rounded, kept.to(wanted))


def test_mixed_types_and_shards(tmp_path: Path) -> None:
    weights = random_weights(tiny_config())
    weights = {key: weight.bfloat16() if number % 3 else weight for number, (key, weight) in enumerate(weights.items())}
    whole, print_of_whole = load(tiny_config(), write_checkpoint(tmp_path / "whole", weights))
    for shards in (2, 5):
        folder = write_checkpoint(tmp_path / f"{shards}", weights, shards)
        cut, print_of_cut = load(tiny_config(), folder)
        assert _same_weights(cut, whole)
        assert print_of_cut == print_of_whole


def test_many_stretches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read in stretches; how long these are does not matter."""
    folder = write_checkpoint(tmp_path, random_weights(tiny_config()), 3)
    expected, print_of_expected = load(tiny_config(), folder)
    monkeypatch.setattr(checkpoint, "_STRETCH", 1)
    tokenizer, print_of_tokenizer = load(tiny_config(), folder)
    assert _same_weights(tokenizer, expected)
    assert print_of_tokenizer == print_of_expected


def test_one_file_goes_before_an_index(whole: Path) -> None:
    write_index(whole, {"x": "nowhere.safetensors"})
    load(tiny_config(), whole)


def test_other_shards_and_files_beside_are_not_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, random_weights(tiny_config()), 2)
    (folder / "model-00003-of-00002.safetensors").write_bytes(b"damaged")
    (folder / "pytorch_model.bin").write_bytes(b"damaged")
    load(tiny_config(), folder)


@pytest.mark.parametrize("stale", [1, 2])
def test_the_index_decides_between_two_of_a_name(stale: int, tmp_path: Path) -> None:
    weights = random_weights(tiny_config())
    expected, _ = load(tiny_config(), write_checkpoint(tmp_path / "whole", weights))
    folder = write_checkpoint(tmp_path / "shards", weights, 2)
    names = [f"model-{number:05}-of-00002.safetensors" for number in (stale, 3 - stale)]
    parts = [load_file(folder / name) for name in names]
    key = next(iter(parts[1]))
    save_file(parts[0] | {key: torch.zeros_like(weights[key])}, folder / names[0])
    tokenizer, _ = load(tiny_config(), folder)
    assert _same_weights(tokenizer, expected)


def test_each_thread_is_prepared_once(whole: Path) -> None:
    import threading

    prepared: list[int] = []
    tokenizer = MiMoAudioTokenizer(tiny_config(), CPU, torch.float32)
    checkpoint.load(tokenizer, whole, lambda: prepared.append(threading.get_ident()))
    assert prepared
    assert threading.get_ident() not in prepared


def test_threads_are_as_many_after_loading(whole: Path) -> None:
    """The loader's own compute alone; those that the process has, and those it makes later, do not."""
    tokenizer = MiMoAudioTokenizer(tiny_config(), CPU, torch.float32)
    before, within = torch.get_num_threads(), set()
    try:
        torch.set_num_threads(3)
        checkpoint.load(tokenizer, whole, lambda: None)
        with checkpoint._pool(lambda: None) as pool:
            within.add(pool.submit(torch.get_num_threads).result())
        assert within == {1}
        with ThreadPoolExecutor(1) as pool:
            assert (torch.get_num_threads(), pool.submit(torch.get_num_threads).result()) == (3, 3)
    finally:
        torch.set_num_threads(before)


# What does not.


def _refused(config: TokenizerConfig, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(config, folder)
    return str(caught.value)


def test_all_that_is_wrong_is_in_one_error(tmp_path: Path) -> None:
    weights = random_weights(tiny_config())
    del weights[_Q_PROJ], weights["decoder.layer_norm.bias"]
    weights["encoder.layers.7.fc1.weight"] = torch.zeros(2, 3)
    weights["something"] = torch.zeros(())
    weights["encoder.conv1.weight"] = torch.zeros(16, 12, 5)
    weights["encoder.quantizer.vq.layers.0._codebook.cluster_size"] = torch.zeros(63)
    weights["decoder.dconv2.conv.bias"] = torch.zeros(12, dtype=torch.int64)
    weights["decoder.dconv1.conv.bias"] = torch.zeros(16, dtype=torch.bool)
    sentence = _refused(tiny_config(), write_checkpoint(tmp_path, weights))
    assert sentence.split("\n  ") == [
        "the checkpoint does not fit its config.json:",
        "missing: decoder.layer_norm.bias (16,)",
        f"missing: {_Q_PROJ} (16, 16)",
        "surplus: encoder.layers.7.fc1.weight (2, 3)",
        "surplus: something ()",
        "wrong shape: encoder.conv1.weight is (16, 12, 5), the config asks for (16, 12, 3)",
        "wrong shape: encoder.quantizer.vq.layers.0._codebook.cluster_size is (63,), the config asks for (64,)",
        "wrong type: decoder.dconv1.conv.bias is BOOL, not one of F64, F32, F16, BF16",
        "wrong type: decoder.dconv2.conv.bias is I64, not one of F64, F32, F16, BF16",
    ]


def test_every_needed_key_is_needed(tmp_path: Path) -> None:
    config = tiny_config()
    keys = published_shapes(config)
    folder = write_checkpoint(tmp_path, {"x": torch.zeros(1)})
    lines = _refused(config, folder).split("\n  ")
    assert sorted(lines[1:]) == sorted(["surplus: x (1,)", *(f"missing: {key} {shape}" for key, shape in keys.items())])


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"avg_pooler": 1}, "surplus: decoder.dconv1.norm.bias"),
        ({"ln_type": "RMSNorm"}, "surplus: encoder.layer_norm.bias"),
        ({"encoder_layers": 3}, "missing: encoder.layers.2.fc1.bias"),
        ({"num_quantizers": 2}, f"surplus: {_EMBED}"),
        ({"codebook_size": [64, 32, 15]}, f"wrong shape: {_EMBED}"),
        ({"nfft": 98}, f"wrong shape: {_WINDOW}"),
        ({"kernel_size": 5}, "wrong shape: encoder.conv2.weight"),
    ],
)
def test_a_config_of_another_model(changes: dict[str, Any], fault: str, whole: Path) -> None:
    assert fault in _refused(tiny_config(**changes), whole)


def test_training_only_keys_are_not_needed_nor_read(tmp_path: Path) -> None:
    config = tiny_config()
    weights = random_weights(config)
    tokenizer, fingerprint = load(config, write_checkpoint(tmp_path / "with", weights))
    for key, shape in training_shapes(config).items():
        weights[key] = torch.full(shape, torch.nan)
    other, fingerprint_of_other = load(config, write_checkpoint(tmp_path / "other", weights))
    bare, fingerprint_of_bare = load(
        config, write_checkpoint(tmp_path / "bare", random_weights(config, training=False))
    )
    assert _same_weights(tokenizer, other)
    assert _same_weights(tokenizer, bare)
    assert fingerprint == fingerprint_of_other == fingerprint_of_bare


@pytest.mark.parametrize("damage", ["empty", "text", "header", "cut", "long header"])
def test_damaged_file(damage: str, whole: Path) -> None:
    path = whole / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "text": b"this is no checkpoint, whatever its name says",
            "header": content[:8] + b"{" + b"x" * 200 + content[209:],
            "cut": content[:-100],
            "long header": (1 << 40).to_bytes(8, "little") + content[8:],
        }[damage]
    )
    sentence = _refused(tiny_config(), whole)
    assert str(path) in sentence
    assert "not a readable safetensors file" in sentence


def test_pickles_are_not_read(tmp_path: Path) -> None:
    torch.save(random_weights(tiny_config()), tmp_path / "pytorch_model.bin")
    sentence = _refused(tiny_config(), tmp_path)
    assert sentence == (
        f"{tmp_path} holds neither model.safetensors nor model.safetensors.index.json; "
        "weights are read from safetensors only"
    )


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", ".", "..", "", 3, None])
def test_an_index_names_files_in_its_folder(name: Any, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    write_checkpoint(tmp_path, random_weights(tiny_config()))
    write_index(inner, dict.fromkeys(published_shapes(tiny_config()), name))
    sentence = _refused(tiny_config(), inner)
    assert "model.safetensors.index.json names" in sentence
    assert repr(name) in sentence


@pytest.mark.parametrize("content", ['{"metadata": {}}', '{"weight_map": {}}', '{"weight_map": [1]}', "[]", "{", ""])
def test_an_index_without_a_map(content: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(content)
    assert str(path) in _refused(tiny_config(), tmp_path)


def test_absent_shard(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, random_weights(tiny_config()), 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    sentence = _refused(tiny_config(), folder)
    assert "model-00002-of-00003.safetensors" in sentence


def test_a_shard_without_what_the_index_says(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, random_weights(tiny_config()), 2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = "model-00001-of-00002.safetensors"
    write_index(folder, index["weight_map"] | {"b.weight": name, "a.weight": name})
    sentence = _refused(tiny_config(), folder)
    assert sentence.endswith(f"{name} lacks what model.safetensors.index.json says it holds: a.weight, b.weight")


# Fingerprints.


def test_fingerprint_does_not_depend_on_the_model_s_type(whole: Path) -> None:
    prints = {load(tiny_config(), whole, dtype)[1] for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    assert len(prints) == 1
    assert len(prints.pop()) == 32


def test_fingerprint_is_of_every_weight(tmp_path: Path) -> None:
    """One bit of one value of each tensor changes it, and each to another."""
    config = tiny_config()
    weights = random_weights(config, training=False)
    prints = [load(config, write_checkpoint(tmp_path, weights))[1]]
    for key, weight in weights.items():
        changed = weight.clone()
        changed.view(torch.int32).view(-1)[-1] ^= 1
        prints.append(load(config, write_checkpoint(tmp_path, weights | {key: changed}))[1])
    assert len(set(prints)) == len(weights) + 1


def test_fingerprint_is_of_names_shapes_and_types(tmp_path: Path) -> None:
    config = tiny_config()
    weights = random_weights(config, training=False)
    one, other = "encoder.layers.0.fc1.weight", "encoder.layers.1.fc1.weight"
    swapped = weights | {one: weights[other], other: weights[one]}
    zeros = weights | {one: torch.zeros_like(weights[one])}
    bfloat16_zeros = weights | {one: torch.zeros_like(weights[one]).bfloat16()}
    float16_zeros = weights | {one: torch.zeros_like(weights[one]).half()}
    prints = [
        load(config, write_checkpoint(tmp_path / f"{number}", tensors))[1]
        for number, tensors in enumerate((weights, swapped, zeros, bfloat16_zeros, float16_zeros))
    ]
    assert len(set(prints)) == 5


def test_fingerprint_is_of_the_config(whole: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"encoder_causal": True},
        {"decoder_causal": False},
        {"vocoder_attn_window_size": [4, 2]},
        {"encoder_attn_window_size": [4, 2]},
        {"encoder_skip_layer_id": None},
        {"rope_theta": 500},
        {"activation_function": "relu"},
        {"vocoder_padding": "center"},
        {"fmax": 1000},
        {"encoder_attention_heads": 4},
        {"hop_length": 22},
    ]
    assert len({load(tiny_config(**change), whole)[1] for change in changes}) == len(changes)


def test_fingerprint_is_not_of_how_the_config_is_written(whole: Path) -> None:
    sizes = {"codebook_size": [64, 32, 16, 8]}
    assert load(tiny_config(**sizes, fmin=0.0), whole)[1] == load(tiny_config(), whole)[1]


# Random weights.


def _filled(seed: int, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[MiMoAudioTokenizer, str]:
    tokenizer = MiMoAudioTokenizer(tiny_config(**changes), CPU, dtype)
    for parameter in tokenizer.parameters():
        parameter.fill_(torch.nan)
    return tokenizer, checkpoint.fill_random(tokenizer, seed, lambda: None)


@pytest.mark.parametrize("changes", [{}, {"avg_pooler": 1}, {"ln_type": "RMSNorm"}, {"avg_pooler": 3}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_weights_fill_everything(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    tokenizer, _ = _filled(0, dtype, **changes)
    assert all(parameter.isfinite().all() for parameter in tokenizer.parameters())
    # Off the neutral values: each tensor varies.
    assert all(parameter.unique().numel() > 1 for parameter in tokenizer.parameters())


def test_random_weights_depend_on_the_seed_alone() -> None:
    (one, print_of_one), (same, print_of_same), (other, print_of_other) = _filled(7), _filled(7), _filled(8)
    assert _same_weights(one, same)
    assert print_of_one == print_of_same
    assert print_of_one != print_of_other
    differing = [not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True)]
    assert sum(differing) == len(differing) - 1  # the window


def test_random_weights_differ_from_key_to_key() -> None:
    tokenizer, _ = _filled(0)
    square = [p for p in tokenizer.parameters() if p.shape == (48, 16)]
    assert len(square) == 6
    assert not any(torch.equal(a, b) for i, a in enumerate(square) for b in square[:i])


def test_random_weights_do_not_touch_the_global_generator() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    _filled(0)
    assert torch.equal(torch.get_rng_state(), before)


def test_random_weights_in_another_type_are_the_same_rounded() -> None:
    (exact, print_of_exact), (rounded, print_of_rounded) = _filled(0), _filled(0, torch.bfloat16)
    pairs = zip(exact.parameters(), rounded.parameters(), strict=True)
    assert all(torch.equal(mine.to(theirs.dtype), theirs) for mine, theirs in pairs)
    assert print_of_exact == print_of_rounded


def test_random_fingerprint_is_of_the_config() -> None:
    assert len({_filled(0, **change)[1] for change in ({}, {"rope_theta": 500}, {"encoder_layers": 3})}) == 3


def test_random_weights_make_a_lively_model() -> None:
    """Deeper and wider than tiny: signals neither die nor explode."""
    tokenizer = tiny_tokenizer(
        d_model=64,
        encoder_layers=12,
        decoder_layers=12,
        vocoder_num_layers=8,
        vocoder_dim=64,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        n_mels=40,
        codebook_size=[256, 128, 64],
    )
    codes, waveform = _answers(tokenizer)
    assert min(len(row.unique()) for row in codes) >= 32
    assert waveform.isfinite().all()
    assert 0.01 < waveform.square().mean().sqrt() < 10
    half = len(waveform) // 2
    assert not torch.allclose(waveform[:half], waveform[half : 2 * half], atol=0.01)


# Where a model is.


def _locate_elsewhere(cases: list[tuple[str, str | None]], cache: Path, offline: bool = True) -> list[Any]:
    """What a process of its own says to `locate`, with the hub's cache in a folder and the hub out of reach."""
    script = (
        "import json, sys\n"
        "from mimo_tokenizer_server.model.checkpoint import CheckpointError, locate\n"
        "answers = []\n"
        "for model, revision in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        source = locate(model, revision)\n"
        "        answers.append([str(source.folder), source.model_id, source.revision])\n"
        "    except CheckpointError as error:\n"
        "        answers.append(str(error))\n"
        "print(json.dumps(answers))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
    environment |= {"HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment |= (
        {"HF_HUB_OFFLINE": "1"} if offline else {"HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(cases)],
        env=environment,
        cwd=cache,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    answers: list[Any] = json.loads(done.stdout)
    return answers


def test_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "MiMo-Audio-Tokenizer"
    folder.mkdir()
    source = locate(str(folder), None)
    assert (source.folder, source.model_id, source.revision) == (folder, "MiMo-Audio-Tokenizer", "")
    monkeypatch.chdir(tmp_path)
    assert locate("MiMo-Audio-Tokenizer", None).folder.samefile(folder)
    assert locate("./MiMo-Audio-Tokenizer/", None).model_id == "MiMo-Audio-Tokenizer"
    monkeypatch.chdir(folder)
    assert locate(".", None).model_id == "MiMo-Audio-Tokenizer"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/MiMo-Audio-Tokenizer", None).folder == folder


def test_a_local_folder_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^a revision \(main\) goes with a hub id; .* is a local folder$"):
        locate(str(tmp_path), "main")


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "~/nothing-here-at-all", "a/b/c", "", "a b", "../x"])
def test_neither_folder_nor_hub_id(model: str) -> None:
    with pytest.raises(CheckpointError, match="is neither a folder nor a hub id") as caught:
        locate(model, None)
    assert model in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="is neither a folder nor a hub id"):
        locate(str(path), None)


def test_the_hub_s_cache_offline(tmp_path: Path) -> None:
    old, new = "0" * 39 + "a", "0" * 39 + "b"
    repository = tmp_path / "models--organization--name"
    for commit, branch in ((old, "v1"), (new, "main")):
        snapshot = repository / "snapshots" / commit
        write_checkpoint(snapshot, {"x": torch.zeros(1)})
        (snapshot / "config.json").write_text(json.dumps(TINY))
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
    cases = [("organization/name", revision) for revision in (None, "main", "v1", old, "v2", "0" * 39 + "c")]
    cases += [("organization/other", None), ("--bad--/..name", None)]
    answers = _locate_elsewhere(cases, tmp_path)
    for answer, commit in zip(answers[:4], (new, new, old, old), strict=True):
        assert answer == [str(repository / "snapshots" / commit), "organization/name", commit]
    for answer, (model, revision) in zip(answers[4:], cases[4:], strict=True):
        assert isinstance(answer, str)
        assert answer.startswith(model)
        assert "\n" not in answer
        assert revision is None or f" at {revision}: " in answer


def test_a_hub_out_of_reach(tmp_path: Path) -> None:
    (answer,) = _locate_elsewhere([("organization/name", None)], tmp_path, offline=False)
    assert isinstance(answer, str)
    assert answer.startswith("organization/name is no folder here, and the hub does not give it: ")
    assert "\n" not in answer


# Memory.

_MEMORY_SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
os.sched_getaffinity = lambda _: range(8)  # as many threads as load on a large machine
from safetensors.torch import save_file
sys.path.insert(0, sys.argv[1])
from model_helpers import CPU, load, published_shapes, tiny_config
from mimo_tokenizer_server.model import checkpoint
from mimo_tokenizer_server.model.rows import linear_layers
from mimo_tokenizer_server.model.tokenizer import MiMoAudioTokenizer

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

config = tiny_config(d_model=1024, encoder_layers=4, decoder_layers=4, encoder_ffn_dim=4096, decoder_ffn_dim=4096)
folder = Path(sys.argv[3])
if sys.argv[2] == "write":
    weights = {key: torch.full(shape, 0.01) for key, shape in published_shapes(config).items()}
    save_file(weights, folder / "model.safetensors")
else:
    torch.ones(64, 64) @ torch.ones(64, 64)
    before = status("VmRSS")
    tokenizer = MiMoAudioTokenizer(config, CPU, getattr(torch, sys.argv[4]))
    if sys.argv[2] == "load":
        checkpoint.load(tokenizer, folder, lambda: None)
    elif sys.argv[2] == "pack":
        checkpoint.load(tokenizer, folder, lambda: None, linear_layers(tokenizer))
    else:
        checkpoint.fill_random(tokenizer, 0, lambda: None)
    print(json.dumps([status("VmHWM") - before, checkpoint.parameter_bytes(tokenizer)]))
"""


def _in_own_process(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", _MEMORY_SCRIPT, str(Path(__file__).parent), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    ).stdout


def test_loading_takes_no_second_copy(tmp_path: Path) -> None:
    """The peak is the weights and a stretch or two of the file, in the model's own type and a smaller one."""
    _in_own_process("write", str(tmp_path))
    path = tmp_path / "model.safetensors"
    try:
        assert path.stat().st_size > 400 << 20
        kinds = (("load", "float32"), ("pack", "float32"), ("load", "bfloat16"), ("random", "bfloat16"))
        for kind, dtype in kinds:
            grown, weights = json.loads(_in_own_process(kind, str(tmp_path), dtype))
            assert weights > 200 << 20
            assert grown <= weights + (250 << 20), f"{kind}, {dtype}: {grown >> 20} MiB for {weights >> 20} MiB"
    finally:
        path.unlink()
