"""A checkpoint, and the distribution as pip installs it, for those who follow the documents."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# With pytest's importlib mode the tests' folders are no import roots.
sys.path.insert(0, str(Path(__file__).parents[1] / "server" / "process"))
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from documents import ROOT
from rules import Installed, Walk
from safetensors.torch import save_file

from mimo_tokenizer_server.config import BUILT_IN_MODELS
from mimo_tokenizer_server.model import checkpoint
from mimo_tokenizer_server.model.config import TokenizerConfig
from mimo_tokenizer_server.model.tokenizer import MiMoAudioTokenizer

_METADATA = """
import importlib.metadata
(found,) = importlib.metadata.distributions(name="mimo-audio-tokenizer-service")
print(found.metadata["Name"], *found.metadata.get_all("Provides-Extra"))
"""


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with random weights, as a checkpoint."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copy(BUILT_IN_MODELS["tiny"], folder / "config.json")
    config = TokenizerConfig.from_file(folder / "config.json")
    model = MiMoAudioTokenizer(config, torch.device("cpu"), torch.float32)
    checkpoint.fill_random(model, 0, lambda: None)
    tensors = {key: tensor.clone().contiguous() for key, tensor in checkpoint._targets(model).items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Installed]:
    """Installs this checkout into an empty environment, without its requirements, when it is first asked for."""
    made: list[Installed] = []

    def make() -> Installed:
        if not made:
            folder = tmp_path_factory.mktemp("environment")
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], timeout=120, check=True)
            python = folder / "bin" / "python"
            pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
            subprocess.run([*pip, "install", "--no-deps", str(ROOT)], timeout=300, check=True)
            done = subprocess.run([python, "-I", "-c", _METADATA], capture_output=True, text=True, check=True)
            name, *extras = done.stdout.split()
            made.append(Installed(python, name, frozenset(extras)))
        return made[0]

    return make


@pytest.fixture
def walk(model_folder: Path, installed: Callable[[], Installed]) -> Iterator[Callable[[Path], Walk]]:
    """Makes readers of documents; takes the document's folder."""
    made: list[Walk] = []

    def make(folder: Path) -> Walk:
        made.append(Walk(folder, model_folder, installed))
        return made[-1]

    yield make
    for one in made:
        one.close()
