"""The documents can be followed, and what they name is there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from documents import ROOT, VLLM, Document, documents, our_flags, tracked
from rules import Walk, follow, rule_for, script_flags, variables

from mimo_tokenizer_server.cli import cli

DOCUMENTS = documents()
# Tools of others: vLLM's flags are checked beside vLLM, in tests/vllm_omni_patch; nobody here can ask the others.
FOREIGN = (VLLM, "docker", "kubectl", "curl", "pip")

each = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)


def test_the_documents_are_found() -> None:
    assert {"README.md", "deploy/engine/README.md"} <= {document.name for document in DOCUMENTS}
    commands = [str(command) for document in DOCUMENTS for command in document.commands()]
    for text in ("mimo-tokenizer serve", "vllm serve", "from mimo_tokenizer_client", "pip install '.[server]'"):
        assert any(text in command for command in commands), text
    assert sum("_gpu.yaml" in command or "_tokenizer.yaml" in command for command in commands) >= 3


@each
def test_every_command_has_a_rule(document: Document) -> None:
    for command in document.commands():
        if command.language in ("shell", "span"):
            rule_for(command)


@each
def test_a_document_can_be_followed(document: Document, walk: Callable[[Path], Walk]) -> None:
    """Its commands and code are run in their order, as rules.py says.

    Not run, but held against what they name: `docker` and `kubectl` (files, profiles, services, stages, arguments,
    objects; a command within a container is run outside of it), `make` (what it would run) and `vllm serve` (the files;
    its own tests parse the rest). `pip install` installs this checkout once, without what it requires. A checkpoint
    is a tiny one, a GPU is the CPU, `install` gives to the tests' own user and group, and of a unit of systemd what it
    starts is run.
    """
    follow(walk(document.path.parent), document.commands())


@each
def test_flags_in_sentences(document: Document) -> None:
    known, scripts = our_flags(), set(re.findall(r"\b(?:scripts|benchmarks)/\w+\.py", document.text))
    for command in document.commands():
        if command.language == "shell" and command.text.startswith(FOREIGN):
            known |= {word for word in command.words if word.startswith("--")}
    for sentence in document.sentences:
        unknown = set(sentence.flags) - known
        if unknown and not any(sentence.names(tool) for tool in FOREIGN):
            for script in scripts & {found for span in sentence.spans for found in re.findall(r"[\w/]+\.py", span)}:
                unknown -= script_flags(script)
            assert not unknown, f"{sentence.where}: nothing that is named beside it has {unknown}"


@each
def test_subcommands_in_sentences(document: Document) -> None:
    for sentence in document.sentences:
        for span in sentence.spans:
            if (found := re.match(r"mimo-tokenizer (\w[\w-]*)", span)) is not None:
                assert found[1] in cli.commands, f"{sentence.where}: {span}"


@each
def test_variables(document: Document) -> None:
    named = set(re.findall(r"\bMIMO_[A-Z0-9_]*[A-Z0-9]\b(?!_)", document.text))
    assert named <= variables()


@each
def test_links(document: Document) -> None:
    files = set(tracked())
    folders = {parent.as_posix() for name in files for parent in Path(name).parents}
    for sentence in document.sentences:
        for link in sentence.links:
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (document.path.parent / path).resolve() if path else document.path
            assert target.is_relative_to(ROOT), f"{sentence.where}: {link} leads out of the repository"
            name = target.relative_to(ROOT).as_posix()
            assert name in files | folders, f"{sentence.where}: git has no {name}"
            if anchor:
                assert anchor in Document(target).anchors, f"{sentence.where}: {name} has no heading #{anchor}"


@each
def test_files_in_sentences(document: Document) -> None:
    files = set(tracked())
    places = files | {parent.as_posix() for name in files for parent in Path(name).parents}
    tops = {place for place in places if "/" not in place and (ROOT / place).is_dir()}
    for sentence in document.sentences:
        for span in sentence.spans:
            if re.fullmatch(r"[\w.-]+(/[\w.-]+)+", span) and span.partition("/")[0] in tops:
                assert span in places, f"{sentence.where}: git has no {span}"
