"""Weights: a published checkpoint, or seeded random ones, straight into a model on its device."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from .config import ConfigError, TokenizerConfig, read_json
from .rows import Linear
from .tokenizer import MiMoAudioTokenizer
from .transformer import Attention

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Tensors are read through a memory map, whose pages count as this process's for as long as the file is open: it is
# opened anew for each stretch of this many bytes.
_STRETCH = 32 << 20

# Of a published codebook, beside its entries `embed`: what training keeps. Checked where present, never needed.
_TRAINING_ONLY = ("embed_avg", "cluster_size", "inited")

_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the sentence names every key or file at fault."""


@dataclass(frozen=True)
class Source:
    """Where a model comes from: `folder` on this machine, and what to call it."""

    folder: Path
    model_id: str
    revision: str


def locate(model: str, revision: str | None, *, weights: bool = True) -> Source:
    """Find a model: a local folder, or a Hugging Face hub id, fetched into the hub's cache if it isn't there.

    Args:
        model: a path, or an id such as "organization/name".
        revision: branch, tag or commit on the hub; None for its default.
        weights: False to fetch the config alone.

    Raises:
        CheckpointError: no such folder, or the hub does not give it.
    """
    folder = Path(model).expanduser()
    if model and folder.is_dir():  # "" would be the current folder
        if revision is not None:
            raise CheckpointError(f"a revision ({revision}) goes with a hub id; {model} is a local folder")
        return Source(folder, folder.resolve().name, "")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.startswith("."):
        raise CheckpointError(f"{model} is neither a folder nor a hub id (organization/name)")
    # Slow to import, and not needed for a local folder.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = ["config.json", "*.safetensors", INDEX_FILE] if weights else ["config.json"]
        snapshot = snapshot_download(model, revision=revision, allow_patterns=patterns)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"{model} is no folder here, and the hub does not give it{f' at {revision}' if revision else ''}: {reason}"
        ) from error
    return Source(Path(snapshot), model, Path(snapshot).name)


def load(
    model: MiMoAudioTokenizer, folder: Path, prepare_thread: Callable[[], None], packed: Collection[Linear] = ()
) -> str:
    """Fill `model` with the checkpoint in `folder`.

    Each tensor is read once, hashed, and copied to its place; no second copy of the whole is ever made.

    Args:
        model: uninitialized, on its device.
        folder: holds `model.safetensors`, or `model.safetensors.index.json` and the shards it names.
        prepare_thread: run in each thread that touches the device.
        packed: of its layers, those whose weights are to be packed, straight from the files.

    Returns:
        The fingerprint: a hash of the config and of the weights' names, shapes, types and bytes. It does not depend on
        how the weights are cut into files, nor on device or dtype.

    Raises:
        CheckpointError: a file is absent or damaged, or keys are missing, surplus, or of another shape or type; one
            error for all of them.
    """
    targets = _targets(model)
    parts = _packed_parts(model, packed)
    stored = _read_headers(folder)
    _check_keys(targets, _training_shapes(model.config), stored)

    def copy(stretch: list[str]) -> dict[str, bytes]:
        path = stored[stretch[0]].path
        digests = {}
        with safe_open(path, framework="pt", device="cpu") as file:
            for key in stretch:
                tensor = file.get_tensor(key)
                entry = stored[key]
                # It tells apart what differs by mistake. A hash that withstands forgery takes as long as all the rest.
                digest = xxhash.xxh3_128(f"{key} {entry.dtype} {entry.shape} ".encode())
                digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
                if key in parts:
                    layer, first = parts[key]
                    layer.pack_part(first, tensor)
                else:
                    targets[key].copy_(tensor)
                digests[key] = digest.digest()
        return digests

    digests: dict[str, bytes] = {}
    try:
        with _pool(prepare_thread) as pool:
            for part in pool.map(copy, _stretches(sorted(targets), stored)):
                digests |= part
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read the weights in {folder}: {error}") from error
    return _fingerprint(model.config, (digests[key] for key in sorted(digests)))


def fill_random(model: MiMoAudioTokenizer, seed: int, prepare_thread: Callable[[], None]) -> str:
    """Fill `model` with random weights that depend on `seed`, the config and nothing else.

    They are scaled so that signals neither die nor explode on their way through the layers; norms and biases are off
    their neutral values, so that leaving one out shows.

    Returns:
        The fingerprint.
    """

    def fill(item: tuple[str, Tensor]) -> None:
        key, target = item
        seed_of_key = int.from_bytes(hashlib.sha256(f"{seed} {key}".encode()).digest()[:7], "little")
        generator = torch.Generator(device="cpu").manual_seed(seed_of_key)
        values = torch.empty(target.shape, dtype=torch.float32, device="cpu").normal_(generator=generator)
        if key.endswith("istft.window"):
            values = torch.hann_window(len(target), device="cpu")
        elif "norm" in key.rsplit(".", 2)[-2]:
            values = values.mul_(0.1).add_(1.0 if key.endswith("weight") else 0.0)
        elif key.endswith(".embed"):
            values.mul_(0.1)
        elif key.endswith(".bias"):
            values.mul_(0.02)
        else:
            # A transposed convolution's weight is (in, out, kernel), any other (out, in, ...).
            fan_in = target.shape[0] if ".dconv" in key else math.prod(target.shape[1:])
            values.mul_(fan_in**-0.5)
            if "down_sample_layer" in key:
                # Taps that sum to zero answer to change: without training, what all frames have in common would
                # drown what tells them apart, and the codes hardly vary.
                values.sub_(values.mean(-1, keepdim=True))
        target.copy_(values)

    targets = _targets(model)
    with _pool(prepare_thread) as pool:
        list(pool.map(fill, targets.items()))
    return _fingerprint(model.config, [f"random weights, seed {seed}".encode()])


@contextmanager
def _pool(prepare_thread: Callable[[], None]) -> Iterator[ThreadPoolExecutor]:
    """Threads that each do their work by themselves.

    PyTorch's number of threads is the process's as well: a thread that first asks for it meanwhile would keep the 1.
    """

    def prepare() -> None:
        prepare_thread()
        torch.set_num_threads(1)

    threads = torch.get_num_threads()
    # Not as many as compute on the CPU: that may be one, beside a GPU.
    try:
        with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))), "load", initializer=prepare) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)  # what threads to come begin with


def _fingerprint(config: TokenizerConfig, parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256(config.canonical_json().encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:32]


def _targets(model: MiMoAudioTokenizer) -> dict[str, Tensor]:
    """The place of each published key in `model`. Parts of fused weights that no key fills are set to zero."""
    targets: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            targets[name] = parameter.data
        if isinstance(module, Attention):
            for name, rows in zip("qkv", module.qkv.weight.data.chunk(3), strict=True):
                targets[f"{path}.{name}_proj.weight"] = rows
            query, key, value = module.qkv.bias.data.chunk(3)
            key.zero_()
            targets[f"{path}.q_proj.bias"] = query
            targets[f"{path}.v_proj.bias"] = value
    published = {}
    for name, target in targets.items():
        if ".self_attn.qkv." in name:
            continue
        name = re.sub(r"quantizer\.codebooks\.(\d+)", r"quantizer.vq.layers.\1._codebook.embed", name)
        published[name.replace("head.window", "head.istft.window")] = target
    return published


def _packed_parts(model: MiMoAudioTokenizer, packed: Collection[Linear]) -> dict[str, tuple[Linear, int]]:
    """The layer that each published key goes to if that is to be packed, and the row that it begins at."""
    parts: dict[str, tuple[Linear, int]] = {}
    chosen = set(packed)
    for path, module in model.named_modules():
        if isinstance(module, Attention) and module.qkv in chosen:
            for number, name in enumerate("qkv"):
                parts[f"{path}.{name}_proj.weight"] = (module.qkv, number * module.dim)
        elif isinstance(module, Linear) and module in chosen and not path.endswith(".qkv"):
            parts[f"{path}.weight"] = (module, 0)
    return parts


def _training_shapes(config: TokenizerConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for number, size in enumerate(config.codebook_sizes):
        book = f"encoder.quantizer.vq.layers.{number}._codebook"
        of_book = ((size, config.d_model), (size,), (1,))
        shapes |= {f"{book}.{name}": shape for name, shape in zip(_TRAINING_ONLY, of_book, strict=True)}
    return shapes


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file."""

    path: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * {"F64": 8, "F32": 4}.get(self.dtype, 2)


def _read_headers(folder: Path) -> dict[str, _Stored]:
    """Every tensor in the checkpoint's files, by key."""
    stored: dict[str, _Stored] = {}
    for path, wanted in _files(folder).items():
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                present = set(file.keys())
                for key in sorted(present if wanted is None else present & wanted):
                    part = file.get_slice(key)
                    stored[key] = _Stored(path, tuple(part.get_shape()), str(part.get_dtype()))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
        if wanted is not None and wanted - present:
            raise CheckpointError(
                f"{path} lacks what {INDEX_FILE} says it holds: {', '.join(sorted(wanted - present))}"
            )
    return stored


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """The checkpoint's files, each with the keys that the index says it holds; None for whatever it holds."""
    if (folder / SINGLE_FILE).is_file():
        return {folder / SINGLE_FILE: None}
    if not (folder / INDEX_FILE).is_file():
        raise CheckpointError(
            f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; weights are read from safetensors only"
        )
    try:
        weight_map: Any = read_json(folder / INDEX_FILE).get("weight_map")
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX_FILE} has no weight_map")
    files: dict[Path, set[str]] = {}
    for key, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
            raise CheckpointError(f"{folder / INDEX_FILE} names {name!r}; a shard is a file in the same folder")
        files.setdefault(folder / name, set()).add(key)
    return dict(files)


def _check_keys(targets: dict[str, Tensor], training: dict[str, tuple[int, ...]], stored: dict[str, _Stored]) -> None:
    expected = {key: tuple(target.shape) for key, target in targets.items()} | training
    problems = [f"missing: {key} {shape}" for key, shape in expected.items() if key in targets and key not in stored]
    problems += [f"surplus: {key} {entry.shape}" for key, entry in stored.items() if key not in expected]
    problems += [
        f"wrong shape: {key} is {stored[key].shape}, the config asks for {shape}"
        for key, shape in expected.items()
        if key in stored and stored[key].shape != shape
    ]
    problems += [
        f"wrong type: {key} is {stored[key].dtype}, not one of {', '.join(_FLOAT_TYPES)}"
        for key in targets
        if key in stored and stored[key].dtype not in _FLOAT_TYPES
    ]
    if problems:
        raise CheckpointError("the checkpoint does not fit its config.json:\n  " + "\n  ".join(sorted(problems)))


def _stretches(keys: list[str], stored: dict[str, _Stored]) -> list[list[str]]:
    """Keys in runs of one file and about `_STRETCH` bytes."""
    stretches: list[list[str]] = []
    size = 0
    for key in sorted(keys, key=lambda key: (stored[key].path, key)):
        if not stretches or stored[stretches[-1][0]].path != stored[key].path or size > _STRETCH:
            stretches.append([])
            size = 0
        stretches[-1].append(key)
        size += stored[key].bytes
    return stretches


def parameter_bytes(model: nn.Module) -> int:
    """Bytes that the weights take on the device."""
    packed = sum(module.packed_bytes for module in model.modules() if isinstance(module, Linear))
    return packed + sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
