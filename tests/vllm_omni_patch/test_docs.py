"""The commands of the documents that start an engine, through the engine's own command line."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

# With pytest's importlib mode the tests' folders are no import roots.
sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

import pytest
from documents import ROOT, Command, our_flags, vllm_commands, vllm_flags


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """What `vllm serve` would start with, in place of starting."""
    from vllm_omni.entrypoints.cli.serve import OmniServeCommand

    got: list[argparse.Namespace] = []
    monkeypatch.setattr(OmniServeCommand, "cmd", staticmethod(got.append))
    return got


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the command `vllm`."""
    from vllm.entrypoints.cli.main import main

    monkeypatch.setattr(sys, "argv", words)
    main()


@pytest.mark.parametrize("command", vllm_commands(), ids=str)
def test_a_command(
    command: Command, language_model: Path, parsed: list[argparse.Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The command line looks into the model's folder, and reads the deploy file where the command is typed.
    words = [*command.words[:2], str(language_model), *command.words[3:]]
    deploy = words[words.index("--deploy-config") + 1] if "--deploy-config" in words else None
    monkeypatch.chdir(ROOT if deploy is None or (ROOT / deploy).is_file() else ROOT / "deploy" / "engine")
    run(words, monkeypatch)
    (arguments,) = parsed
    assert arguments.omni
    assert arguments.model_tag == str(language_model)
    assert arguments.deploy_config == deploy
    assert deploy is None or Path(deploy).is_file()


def test_flags_in_sentences(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["vllm", "serve", "--omni", "--help=all"], monkeypatch)
    assert ended.value.code == 0
    known = set(re.findall(r"--[a-z][a-z0-9-]*", capsys.readouterr().out))
    flags = vllm_flags(our_flags())
    assert flags
    for flag, where in flags:
        assert flag in known, where
