"""Folders that the engine and the service load: a small tokenizer checkpoint, a tiny language model without weights."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

GROUP_SIZE = 4
AUDIO_CHANNELS = 8
SAMPLE_RATE = 24_000
SAMPLES_PER_FRAME = 960
CODEBOOK_SIZES = (1024, 1024, *[128] * 18)

# The published model's ids: vLLM-Omni has some of them as numbers in its source.
SPECIAL_TOKENS = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|sosp|>": 151665,
    "<|eosp|>": 151666,
    "<|empty|>": 151667,
    "<|Human|>": 151668,
    "<|SpeechLM|>": 151669,
    "<|sostm|>": 151670,
    "<|eostm|>": 151671,
    "<|eot|>": 151672,
}
_WORDS = ("[UNK]", "say", "hello", "to", "the", "engine")

_WRITE_CHECKPOINT = """
import json, pathlib, sys

sys.path.insert(0, sys.argv[1])
import comparison

comparison.make_pair(pathlib.Path(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4]))
"""


def server_python() -> str:
    """The interpreter of the service's environment, which is that of the project's other tests."""
    python = Path(os.environ.get("MIMO_TEST_SERVER_PYTHON", ROOT / ".venv/bin/python"))
    assert python.exists(), f"{python} is not there: `make test-engine` makes it, MIMO_TEST_SERVER_PYTHON names another"
    return str(python)


def service_environment() -> dict[str, str]:
    """This process's environment without what is the engine's: its packages, and the tokenizer's settings."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" and not name.startswith("MIMO_AUDIO_TOKENIZER_")
    }
    return kept | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}


def write_checkpoint(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write the parity tests' small checkpoint: random weights, codebooks that use all of their entries.

    Args:
        folder: Made if it is not there.
        seed: Of the weights.
        changes: To the config.

    Returns:
        The folder.
    """
    parity = ROOT / "tests" / "parity"
    command = [server_python(), "-c", _WRITE_CHECKPOINT, str(parity), str(folder), json.dumps(changes), str(seed)]
    done = subprocess.run(command, env=service_environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"the checkpoint was not written:\n{done.stdout}{done.stderr}"
    return folder


def write_language_model(folder: Path, **changes: Any) -> Path:
    """Write what the engine reads of a language model before its weights: config.json and a text tokenizer.

    Args:
        folder: Made if it is not there.
        changes: To the config.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["MiMoAudioModel"],
        "model_type": "qwen2",
        "vocab_size": 151_680,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 32_768,
        "bos_token_id": SPECIAL_TOKENS["<|endoftext|>"],
        "eos_token_id": SPECIAL_TOKENS["<|im_end|>"],
        "dtype": "float32",
        "group_size": GROUP_SIZE,
        "audio_channels": AUDIO_CHANNELS,
        "local_dim": 32,
        "local_layers": 1,
        "local_attn_heads": 4,
        "local_ffn_dim": 64,
        "input_local_dim": 32,
        "input_local_layers": 1,
        "input_full_attention": True,
    }
    added = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token, number in SPECIAL_TOKENS.items()
    ]
    # Written by hand: the library that would save it warns of each of the 151,637 ids that are left out.
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(_WORDS)} | SPECIAL_TOKENS,
            "unk_token": "[UNK]",
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "[UNK]",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    for name, content in {
        "config.json": config | changes,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings,
    }.items():
        (folder / name).write_text(json.dumps(content))
    return folder
