"""Runs what an image, a compose file or a pod says of a container as a process of this machine.

No container engine is needed. What it would do is done here: the image's environment and entry point, the user and its
groups, the volumes with their owners. `STAND_INS` is all that is replaced.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from dockerfile_parse import DockerfileParser
from process_harness import PATIENCE, free_port

from mimo_tokenizer_server.config import ENVIRONMENT_PREFIX
from mimo_tokenizer_vllm_omni._settings import settings_for

ROOT = Path(__file__).parents[2]

# What stands in for what cannot be had here, by flag (a variable of the same name counts as its flag). `Machine` maps
# ports; folders are mapped wherever they are written.
STAND_INS: dict[str, Callable[[str, Machine], str]] = {
    "--model": lambda value, machine: _matching(r"[\w.-]+/[\w.-]+", value, "tiny"),
    "--device": lambda value, machine: _matching(r"cpu|cuda:[0-9]", value, "cpu"),
    "--device-memory-limit": lambda value, machine: _matching(r"[0-9]+GiB", value, "50%"),
    "--address": lambda value, machine: machine.local(value),
    "--metrics-address": lambda value, machine: machine.local(value),
    "--health-address": lambda value, machine: machine.local(value),
}
# With random weights instead of a download.
DUMMY = {f"{ENVIRONMENT_PREFIX}LOAD_FORMAT": "dummy"}

# What an engine asks of the tokenizer: both ways, through the socket.
CALLS = """
import sys
import numpy as np
from mimo_tokenizer_client import TokenizerClient
with TokenizerClient(sys.argv[1], unavailable_timeout=3) as client:
    codes = client.encode(np.sin(np.arange(24_000) / 8).astype("float32"), 24_000)
    print(codes.shape, client.decode(codes).shape)
"""
ANSWER = "(20, 26) (24960,)"


def _matching(pattern: str, value: str, stand_in: str) -> str:
    assert re.fullmatch(pattern, value), f"{value!r} is not {pattern}"
    return stand_in


@dataclass(frozen=True)
class Folder:
    """A folder's owner and permissions."""

    uid: int = 0
    gid: int = 0
    mode: int = 0o755


@dataclass(frozen=True)
class Container:
    """What a container engine would be told.

    Attributes:
        command: entry point and arguments.
        environment: all of it.
        uid: of its user.
        gid: of its user's group.
        groups: further ones.
        mounts: the volume's name by the path that it has in the container, with a "/" before a folder within it.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    uid: int
    gid: int
    groups: tuple[int, ...]
    mounts: Mapping[str, str]

    def told(self, flag: str) -> str | None:
        """A flag's value, from the arguments or the variable of the same name."""
        return options(self.command).get(flag, self.environment.get(variable(flag)))


def variable(flag: str) -> str:
    """The environment variable of a flag."""
    return ENVIRONMENT_PREFIX + flag.removeprefix("--").replace("-", "_").upper()


def options(command: Sequence[str]) -> dict[str, str]:
    """Flags with values, "--flag=value" or "--flag value"."""
    found: dict[str, str] = {}
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            found[flag] = value if equals else following
    return found


# ---------------------------------------------------------------- images


class Image:
    """What the last stage of a Dockerfile says.

    Args:
        path: the Dockerfile's.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.steps = [
                (step["instruction"], step["value"])
                for step in DockerfileParser(fileobj=file).structure
                if step["instruction"] != "COMMENT"
            ]
        last = max(number for number, (instruction, _) in enumerate(self.steps) if instruction == "FROM")
        self.last = self.steps[last:]

    def value(self, instruction: str, default: str = "") -> str:
        """The last one's."""
        return next((value for name, value in reversed(self.last) if name == instruction), default)

    @property
    def user(self) -> tuple[int, int]:
        """Its uid and gid."""
        uid, gid = map(int, self.value("USER", "0:0").split(":"))
        return uid, gid

    @property
    def environment(self) -> dict[str, str]:
        """ENV, and the HOME of its user."""
        words = [word for name, value in self.last if name == "ENV" for word in shlex.split(value)]
        told = dict(word.split("=", 1) for word in words)
        home = re.search(r"useradd .*--home-dir (\S+)", " ".join(value for _, value in self.last))
        return told | ({"HOME": home[1]} if home else {})

    @property
    def folders(self) -> dict[str, Folder]:
        """What `install --directory` makes in it; a new volume mounted there looks the same."""
        made: dict[str, Folder] = {}
        for name, value in self.last:
            for command in value.split("&&") if name == "RUN" else ():
                words = shlex.split(command)
                if words[:2] == ["install", "--directory"]:
                    told = options(words)
                    owner = Folder(int(told["--owner"]), int(told["--group"]), int(told.get("--mode", "755"), 8))
                    made |= {word: owner for word in words if word.startswith("/")}
        return made


SERVER = Image(ROOT / "deploy/Dockerfile")
ENGINE = Image(ROOT / "deploy/engine/Dockerfile")


def image_of(name: str) -> Image:
    """The image that is built under this name."""
    return {"mimo-audio-tokenizer": SERVER, "mimo-audio-engine": ENGINE}[name.split(":")[0]]


def engine_address(container: Container) -> str:
    """Where an engine looks for the tokenizer, as the plugin reads it from the deploy file in its image."""
    file = container.told("--deploy-config")
    assert file is not None
    ((source, target),) = (value.split() for name, value in ENGINE.last if name == "COPY")
    assert file.startswith(target)
    path = ROOT / file.replace(target, f"{Path(source).parent}/")
    assert path.match(source)
    addresses = {
        settings_for(SimpleNamespace(**stage["hf_overrides"]), container.environment).address
        for stage in yaml.safe_load(path.read_text())["stages"]
    }
    (address,) = addresses
    assert address is not None
    return address


# ---------------------------------------------------------------- processes


@dataclass
class Machine:
    """Where the containers run.

    Attributes:
        root: holds the volumes; a short name, for the sockets'.
        ports: that stand in for the containers', by theirs.
    """

    root: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="mimo-", dir="/tmp")))
    ports: dict[int, int] = field(default_factory=dict)
    _started: list[subprocess.Popen[str]] = field(default_factory=list)

    def __enter__(self) -> Machine:
        """Let every user in."""
        self.root.chmod(0o755)
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes, and leave nothing behind."""
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        shutil.rmtree(self.root)

    def volume(self, name: str, folder: Folder) -> Path:
        """Make a volume."""
        path = self.root / name
        path.mkdir(parents=True)
        if os.geteuid() == 0:
            os.chown(path, folder.uid, folder.gid)
            path.chmod(folder.mode)
        return path

    def local(self, address: str) -> str:
        """An address on this machine alone, at a port that is free; the path of a socket is mapped elsewhere."""
        if address.startswith("unix:"):
            return address
        host, _, port = address.rpartition(":")
        assert host == "0.0.0.0", f"who is outside of the container does not reach {address}"
        return f"127.0.0.1:{self.ports.setdefault(int(port), free_port())}"

    def mapped(self, container: Container, text: str) -> str:
        """With the folders of this machine for those of the container."""
        places = {path: str(self.root / volume) for path, volume in container.mounts.items()}
        places["/opt/venv"] = sys.prefix
        pattern = "|".join(sorted(map(re.escape, places), key=len, reverse=True))
        return re.sub(rf"(?<![\w.])(?:{pattern})(?=/|:|$)", lambda found: places[found[0]], text)

    def _flag(self, container: Container, flag: str, value: str) -> str:
        return self.mapped(container, STAND_INS[flag](value, self) if flag in STAND_INS else value)

    def _arguments(self, container: Container, command: Sequence[str]) -> list[str]:
        arguments: list[str] = []
        for word in command:
            flag, equals, value = word.partition("=")
            if equals and flag.startswith("--"):
                arguments.append(f"{flag}={self._flag(container, flag, value)}")
            else:
                arguments.append(self._flag(container, arguments[-1] if arguments else "", word))
        return arguments

    def start(
        self, container: Container, command: Sequence[str] | None = None, *, groups: tuple[int, ...] | None = None
    ) -> subprocess.Popen[str]:
        """Start the container's command, or another one in it, as its user with its environment and no other.

        Args:
            container: what is run.
            command: None for its own.
            groups: None for its own.
        """
        flags = {variable(flag): flag for flag in STAND_INS}
        environment = {
            name: self._flag(container, flags.get(name, ""), value) for name, value in container.environment.items()
        }
        # Where the code is, if it is not installed.
        environment |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ} | DUMMY
        launcher: list[str] = []
        if os.geteuid() == 0:
            # The user may read what the real image would have and this machine keeps from it: its interpreter.
            launcher = [
                "setpriv", f"--reuid={container.uid}", f"--regid={container.gid}", *self._groups(container, groups),
                "--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search",
                "--bounding-set=-all,+dac_read_search", "--no-new-privs",
            ]  # fmt: skip
        process = subprocess.Popen(
            [*launcher, *self._arguments(container, container.command if command is None else command)],
            env=environment,
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    @staticmethod
    def _groups(container: Container, groups: tuple[int, ...] | None) -> list[str]:
        groups = container.groups if groups is None else groups
        return ["--groups=" + ",".join(map(str, groups))] if groups else ["--clear-groups"]

    def run(
        self, container: Container, *command: str, groups: tuple[int, ...] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a container to its end."""
        process = self.start(container, command, groups=groups)
        said, _ = process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(command, process.returncode, said)

    def wait(self, process: subprocess.Popen[str], healthy: Callable[[], bool]) -> None:
        """Wait until a container is healthy."""
        end = time.monotonic() + PATIENCE
        while not healthy():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < end, "it was never healthy"
            time.sleep(0.5)

    def stop(self, process: subprocess.Popen[str], seconds: float) -> tuple[int, str]:
        """End a container as its engine does; return the exit status and what it wrote."""
        process.terminate()
        said, _ = process.communicate(timeout=seconds)
        return process.returncode, said

    def calls(self, container: Container, address: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Encode and decode from within a container."""
        return self.run(container, "/opt/venv/bin/python", "-c", CALLS, address, **options)


# ---------------------------------------------------------------- what all files have in common


def words_of(content: Any) -> list[str]:
    """All keys and values of a file, as text."""
    if isinstance(content, dict):
        return [word for key, value in content.items() for word in [str(key), *words_of(value)]]
    if isinstance(content, list):
        return [word for value in content for word in words_of(value)]
    return [str(content)]


def assert_pinned(image: str, version: str) -> None:
    """Check that an image has an exact tag, and one of ours this project's version."""
    name, _, tag = image.partition(":")
    assert re.fullmatch(r"v?\d+\.\d+\.\d+(-[a-z]+)?", tag), f"{image} is not pinned"
    assert not name.startswith("mimo-audio-") or tag.split("-")[0] == version, f"{image} is not of {version}"


def assert_no_secrets(content: Any) -> None:
    """Check that nothing in a file looks like one, or gives up what keeps containers apart."""
    for word in words_of(content):
        assert not re.search(r"(?i)password|passwd|hf_[a-z0-9]{20}|-----BEGIN|secret_?key", word), word
        assert word not in {"privileged", "hostNetwork", "hostPID", "hostIPC", "hostPath", "stringData"}, word
        assert not re.search(r":latest$|docker\.sock", word), word


def json_list(text: str) -> list[str]:
    """An instruction's exec form."""
    words = json.loads(text)
    assert isinstance(words, list)
    return words
