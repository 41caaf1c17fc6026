"""The images: what the Dockerfiles say, and the packages that go into them."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import published
import pytest
from containers import ENGINE, ROOT, SERVER, Folder, assert_pinned, json_list
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest

PYTHON = re.search(r"^FROM python:(\d+\.\d+)", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
assert PYTHON is not None
# The container's, whichever Python runs the tests.
MARKERS = {
    "python_version": PYTHON[1],
    "python_full_version": f"{PYTHON[1]}.0",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
}


def script(name: str) -> Path:
    return Path(sys.executable).with_name(name)


@pytest.mark.parametrize("name", ["deploy/Dockerfile", "deploy/engine/Dockerfile"])
def test_the_linter_has_nothing_to_say(name: str) -> None:
    done = subprocess.run([script("hadolint"), "--no-color", ROOT / name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_every_image_that_is_built_on_has_an_exact_tag() -> None:
    stages: set[str] = set()
    for image in (SERVER, ENGINE):
        for value in (value for name, value in image.steps if name == "FROM"):
            base, _, stage = value.partition(" AS ")
            if base not in stages and "$" not in base:
                assert_pinned(base.replace("-slim-bookworm", "-slim"), "")
            stages.add(stage)


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_both_variants_have_their_stage(variant: str) -> None:
    stages = {value.partition(" AS ")[2] for name, value in SERVER.steps if name == "FROM"}
    assert f"torch-{variant}" in stages
    assert ("ARG", "VARIANT=cpu") in SERVER.steps


def test_the_server_runs_as_a_user_without_rights() -> None:
    uid, gid = SERVER.user
    created = next(value for name, value in SERVER.last if name == "RUN" and "useradd" in value)
    assert f"useradd --uid {uid} --gid {gid} " in created
    assert f"groupadd --gid {gid} " in created
    assert uid == gid == 10001
    assert [name for name, _ in SERVER.last].count("USER") == 1


def test_only_the_sockets_folder_and_the_cache_are_written_to() -> None:
    written = json_list(SERVER.value("VOLUME"))
    assert SERVER.folders == {path: Folder(*SERVER.user, 0o750) for path in written}
    assert SERVER.environment["HOME"] in written
    assert str(Path(SERVER.environment["HF_HOME"]).parent) in written
    socket = SERVER.environment["MIMO_AUDIO_TOKENIZER_ADDRESS"].removeprefix("unix://")
    assert str(Path(socket).parent) in written


def test_the_command_is_one_of_the_projects() -> None:
    scripts = importlib.metadata.entry_points(group="console_scripts")
    (command,) = json_list(SERVER.value("ENTRYPOINT"))
    health = json_list(SERVER.value("HEALTHCHECK").partition(" CMD ")[2])
    assert health == [command, "health"]
    (entry,) = [one for one in scripts if one.name == command]
    assert entry.value == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"][command]
    assert callable(entry.load())
    assert SERVER.value("STOPSIGNAL") == "SIGTERM"


def test_nothing_that_builds_comes_into_the_final_image() -> None:
    text = " ".join(value for _, value in SERVER.last)
    assert not re.search(r"apt-get|requirements-build|\binstall (?!--directory)|gcc|make\b", text)
    assert {value.split()[-1] for name, value in SERVER.last if name == "COPY"} == {"/opt/venv"}


def test_what_is_sent_to_the_builder_suffices(tmp_path: Path) -> None:
    """The project's wheel, built from what .dockerignore lets through."""
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in ignore if line and not line.startswith("#")]
    assert patterns[0] == "*"
    context = tmp_path / "context"
    for pattern in (line[1:] for line in patterns if line.startswith("!")):
        found = list(ROOT.glob(pattern))
        assert found, f"there is no {pattern}"
        for path in found:
            target = context / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if path.is_dir() else shutil.copy)(path, target)
    for image in (SERVER, ENGINE):
        text = " ".join(value for _, value in image.steps)
        for source in [*re.findall(r"source=(\S+?),", text), *re.findall(r"(deploy/engine/\S+) ", text)]:
            assert list(context.glob(source)), f"{source} is not sent to the builder"
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, context]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {
        "mimo_audio_tokenizer",
        "mimo_tokenizer_client",
        "mimo_tokenizer_server",
        "mimo_tokenizer_vllm_omni",
    } < names


# ---------------------------------------------------------------- packages


def pins(*variants: str) -> dict[str, Version]:
    found: dict[str, Version] = {}
    for variant in variants:
        for line in (ROOT / f"deploy/requirements{variant}.txt").read_text().splitlines():
            if line and not line.startswith("#"):
                match = re.fullmatch(r"([\w.-]+)==(\S+)", line)
                assert match is not None, f"{line} is no pin"
                assert canonicalize_name(match[1]) not in found, f"{line} is there twice"
                found[canonicalize_name(match[1])] = Version(match[2])
    return found


# What the index says of the pinned packages, by name.
PUBLISHED: dict[str, dict[str, Any]] = {
    canonicalize_name(name): what for name, what in json.loads(published.FILE.read_text()).items()
}


def test_what_the_index_says_is_of_the_pinned_versions() -> None:
    pinned = pins("", "-cuda") | pins("-build")
    assert {name: Version(what["version"]) for name, what in PUBLISHED.items()} == pinned, "run published.py"


def needed(requirement: Requirement, pinned: dict[str, Version]) -> set[str]:
    """Names of all that a requirement needs; fails where a pin does not do."""
    left, done = [(requirement, "")], set()
    while left:
        wanted, by = left.pop()
        name = canonicalize_name(wanted.name)
        assert name in pinned, f"{by} needs {name}, which is not pinned"
        assert wanted.specifier.contains(pinned[name], prereleases=True), f"{by} needs {wanted}, not {pinned[name]}"
        if (name, frozenset(wanted.extras)) in done:
            continue
        done.add((name, frozenset(wanted.extras)))
        python = SpecifierSet(PUBLISHED[name]["requires_python"] or "")
        assert python.contains(MARKERS["python_full_version"]), f"{name} is not for this Python"
        for text in PUBLISHED[name]["requires_dist"] or ():
            needs = Requirement(text)
            if needs.marker is None or any(
                needs.marker.evaluate(MARKERS | {"extra": extra}) for extra in ("", *wanted.extras)
            ):
                left.append((needs, name))
    return {name for name, _ in done}


def of_the_server() -> list[Requirement]:
    """What the [server] extra asks for, the extras that it names included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [Requirement(text) for text in project["dependencies"]]
    left = ["server"]
    while left:
        for one in map(Requirement, project["optional-dependencies"][left.pop()]):
            if one.name == project["name"]:
                left += one.extras
            else:
                asked.append(one)
    return asked


def test_the_pins_are_all_that_is_needed_and_no_more() -> None:
    pinned = pins("", "-cuda")
    reached = {name for requirement in of_the_server() for name in needed(requirement, pinned)}
    assert reached == set(pinned)


def test_the_builder_has_what_it_needs() -> None:
    pinned = pins("-build")
    assert needed(Requirement("hatchling>=1.26"), pinned) == set(pinned)
    assert '"hatchling>=1.26"' in (ROOT / "pyproject.toml").read_text()


def test_pytorch_is_the_same_pair_in_both_variants() -> None:
    cpu, cuda = pins("-cpu"), pins("-cuda")
    assert {name: version.local for name, version in cpu.items()} == {"torch": "cpu", "torchaudio": "cpu"}
    for name, version in cpu.items():
        assert version.public == str(cuda[name]) == "2.11.0"
    others = {name for name in cuda if not name.startswith(("nvidia-", "cuda-"))}
    assert others == {"torch", "torchaudio", "triton"}, "the CPU variant would lack what is only there"
    assert "https://download.pytorch.org/whl/cpu" in " ".join(value for _, value in SERVER.steps)
