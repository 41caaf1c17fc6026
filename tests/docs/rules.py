"""How the documents' commands are run: a rule for each kind of them, and a place where paths and servers are real.

A command that no rule knows fails, so a new one in a document asks for a rule here, or fits one. Not every rule runs
its command: each says what it does.
"""

from __future__ import annotations

import configparser
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import soundfile
import trustme
import yaml
from documents import ROOT, SHELL, Command, is_vllm, tracked
from packaging.requirements import Requirement
from process_harness import COMMAND, PATIENCE, ServerProcess, environment, free_port, noise, short_folder

from mimo_tokenizer_server import device
from mimo_tokenizer_server.cli import cli
from mimo_tokenizer_server.config import DEFAULT_ADDRESS, ENVIRONMENT_PREFIX

# An absolute path: a word's beginning, or behind unix://, a quote, `=` or a bracket.
_PATH = re.compile(r"(?:(?<=unix://)|(?<=[\s'\"=(])|^)/(?!dev/)\w[\w./-]*")
# A place in the network; the hosts of a document's example are this machine.
_PLACE = re.compile(r"(?<![\w.:/-])((?:[a-z][\w.-]*|[\d.]+)?):(\d{4,5})\b|(?<=//)([\w.-]+):(\d{4,5})\b")
_ASSIGNMENT = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)")
_CLIENTS = ("encode", "decode", "roundtrip", "info", "health")


class Broken(AssertionError):
    """A document says something that is not so."""


@dataclass(frozen=True)
class Installed:
    """The distribution, as pip installed it from this checkout into an empty environment."""

    python: Path
    name: str
    extras: frozenset[str]


class Walk:
    """A reader who does what a document says, from its first command to its last.

    Absolute paths lie in a folder of its own, with a short name for the sockets' sake, and ports are free ones.

    Args:
        folder: Of the document, for files that it names.
        checkpoint: Folder of a checkpoint, which stands wherever a document has one.
        installed: Makes the installed distribution.
    """

    def __init__(self, folder: Path, checkpoint: Path, installed: Callable[[], Installed]) -> None:
        self.folder = folder
        self.installed = installed
        self._checkpoint = checkpoint
        self._root = short_folder()
        self._ports: dict[str, int] = {}
        self._servers: dict[str, ServerProcess] = {}
        self._ended: list[ServerProcess] = []
        self._flags: dict[str, list[str]] = {}
        self.work = self._root / "work"
        self.work.mkdir()
        for name in ("run", "tmp"):  # what every machine has
            (self._root / name).mkdir()
        self.variables: dict[str, str] = {}
        authority = trustme.CA()
        server, client = authority.issue_cert("127.0.0.1", "localhost"), authority.issue_cert("client@localhost")
        self._given: dict[str, bytes] = {
            "tls-cert": server.cert_chain_pems[0].bytes(),
            "tls-key": server.private_key_pem.bytes(),
            "tls-client-ca": authority.cert_pem.bytes(),
            "tls-ca": authority.cert_pem.bytes(),
            "tls-client-cert": client.cert_chain_pems[0].bytes(),
            "tls-client-key": client.private_key_pem.bytes(),
            "token-file": b"the-token-of-the-documents\n",
        }

    def close(self) -> None:
        """End what still runs, and leave nothing behind."""
        for server in [*self._servers.values(), *self._ended]:
            server.clean_up()
        shutil.rmtree(self._root)

    def end(self) -> None:
        """End the servers, as one does when all is done."""
        for address in list(self._servers):
            self.stop(address)

    # ------------------------------------------------------------ what stands in for what

    def port(self, number: str) -> int:
        """The port that stands in for one of a document's."""
        return self._ports.setdefault(number, free_port())

    def real(self, text: str) -> str:
        """The text with paths and places of the walk's own."""

        def place(found: re.Match[str]) -> str:
            host, number = (found[1], found[2]) if found[2] else (found[3], found[4])
            return f"{host if re.fullmatch(r'[0-9.]*', host) else '127.0.0.1'}:{self.port(number)}"

        return _PATH.sub(lambda found: f"{self._root}{found[0]}", _PLACE.sub(place, text))

    @property
    def environment(self) -> dict[str, str]:
        """Of its commands: nothing of the tests' settings, and what the document has exported."""
        path = f"{COMMAND.parent}{os.pathsep}{os.environ['PATH']}"
        kept = {name: value for name, value in environment().items() if not name.startswith("MAKE")}
        default = {"MIMO_AUDIO_TOKENIZER_ADDRESS": self.real(DEFAULT_ADDRESS), "PATH": path}
        return kept | default | self.variables

    # ------------------------------------------------------------ what it does

    def run(self, argv: list[str] | str, *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
        """Run a program, or a shell's text, to its good end; return what it printed."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", argv] if isinstance(argv, str) else argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd or self.work,
            env=self.environment | (env or {}),
            timeout=2 * PATIENCE,
            check=False,
        )
        if done.returncode != 0:
            raise Broken(f"exit status {done.returncode} of {argv}\n{done.stdout}")
        return done.stdout

    def serve(self, flags: list[str]) -> None:
        """Start a server and wait until it serves; one at the same address is ended before."""
        address = option(flags, "--address") or self.environment["MIMO_AUDIO_TOKENIZER_ADDRESS"]
        if address in self._servers:
            self.stop(address)
        where = ("env", "--chdir", str(self.work))
        server = ServerProcess(*flags, address="", model=(), env=self.environment, launcher=where)
        self._servers[address] = server
        self._flags[address] = flags
        server.ready()

    def stop(self, address: str) -> None:
        """End a server."""
        server = self._servers.pop(address)
        self._ended.append(server)
        if server.stop() != 0 or server.complaints():
            raise Broken(f"a server did not end well:\n{server.log}")

    def server(self, address: str | None = None) -> str:
        """The address of the server that the document started last, or else of one somebody else has started."""
        if not self._servers:
            address = address or self.environment["MIMO_AUDIO_TOKENIZER_ADDRESS"]
            if address.startswith("unix:"):
                Path(address.removeprefix("unix:").removeprefix("//")).parent.mkdir(parents=True, exist_ok=True)
            self.serve(["--model", str(self._checkpoint), "--device", "cpu", "--address", address])
        return list(self._servers)[-1].replace("0.0.0.0:", "127.0.0.1:")

    def metrics(self, place: str) -> None:
        """Have the last server serve its metrics at a place, as the sentence with `--metrics-address` has it."""
        flags = self._flags[list(self._servers)[-1]]
        if place not in flags:
            self.serve([*flags, "--metrics-address", place])

    def file(self, name: str) -> Path:
        """A file that a command names: beside the document, or in the repository.

        Raises:
            Broken: There is none.
        """
        for folder in (self.folder, ROOT):
            if (folder / name).is_file():
                return folder / name
        raise Broken(f"there is no file {name}")

    def give(self, name: str, path: Path) -> None:
        """Put a certificate, a key or a token where a document takes it for granted.

        Args:
            name: Of the flag that names the file, without its dashes; nothing happens for other flags.
            path: Of the file; what is there stays.
        """
        if name in self._given and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._given[name])
            path.chmod(0o600)

    def give_all(self, words: list[str]) -> None:
        """The same for all flags of a command."""
        for word in words:
            name = word.partition("=")[0].removeprefix("--")
            for path in _values(words, f"--{name}"):
                self.give(name, self.work / path)

    def model(self, name: str) -> str:
        """The checkpoint, at the path that a document gives it; a hub's name becomes that of its folder."""
        if not name.startswith(str(self._root)):
            return str(self._checkpoint)
        path = Path(name)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(self._checkpoint)
        return name


def option(words: list[str], flag: str) -> str | None:
    """The value of a flag in a command's words."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == flag:
            return following
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def replaced(words: list[str], flag: str, change: Callable[[str], str]) -> list[str]:
    """The words of a command with another value of a flag."""
    value = option(words, flag)
    if value is None:
        return words
    words = [f"{flag}={change(value)}" if word == f"{flag}={value}" else word for word in words]
    return [change(word) if before == flag else word for before, word in zip(["", *words], words, strict=False)]


@functools.cache
def variables() -> frozenset[str]:
    """The environment variables that something here reads."""
    options = [parameter for command in cli.commands.values() for parameter in command.params]
    read = {option.envvar for option in options if isinstance(option.envvar, str)}
    for name in tracked():
        if name.endswith(".py") and not name.startswith("tests/docs/"):
            read |= set(re.findall(r"""["']([A-Z][A-Z0-9]*_[A-Z0-9_]+)["']""", (ROOT / name).read_text()))
    return frozenset(read)


# ---------------------------------------------------------------- the rules


def _serve(walk: Walk, command: Command) -> None:
    words = shlex.split(walk.real(command.text), comments=True)[2:]
    if words[-1:] == ["&"]:
        words.pop()
    try:
        device.resolve(option(words, "--device") or "auto")
    except device.DeviceError as error:
        if " is no device; " in str(error):  # else it is one that is not here
            raise Broken(str(error)) from None
    walk.give_all(words)
    if option(words, "--load-format") != "dummy":  # else it names a config, and there is no checkpoint
        words = replaced(words, "--model", walk.model)
    walk.serve(replaced(words, "--device", lambda _: "cpu"))


def _in_a_shell(walk: Walk, command: Command) -> None:
    walk.run(walk.real(command.text))


def _install(walk: Walk, command: Command) -> None:
    words = shlex.split(walk.real(command.text), comments=True)
    words = replaced(words, "--owner", lambda _: str(os.geteuid()))
    walk.run(replaced(words, "--group", lambda _: str(os.getegid())))


def _curl(walk: Walk, command: Command) -> None:
    walk.run(walk.real(command.text).replace("curl ", "curl --fail --silent --show-error ", 1))


def _client(walk: Walk, command: Command) -> None:
    words = shlex.split(walk.real(command.text), comments=True)
    if words[0] != "mimo-tokenizer":
        words = ["mimo-tokenizer", *words]
    # Where a document's hosts are this machine, so are the names in their certificates.
    words = replaced(words, "--tls-server-name", lambda _: "localhost")
    walk.give_all(words)
    address = walk.server(option(words, "--address"))
    named = command.language == "shell" or "MIMO_AUDIO_TOKENIZER_ADDRESS" in walk.variables
    env = {} if named else {"MIMO_AUDIO_TOKENIZER_ADDRESS": address}
    if words[1] in ("encode", "decode", "roundtrip") and not (walk.work / words[2]).exists():
        _given(walk.work / words[2], address)
    if words[1] == "bench":
        words += ["--duration", "1", "--warm-up", "0"]
    if words[1] == "top":
        walk.metrics(words[2])
        words += ["--once"]
    walk.run(words, env=env)


def _given(path: Path, address: str) -> None:
    """A file that a document takes for granted: a sound, or the codes of one."""
    if path.suffix == ".npz":
        sound = path.with_suffix(".wav")
        _given(sound, address)
        done = subprocess.run([COMMAND, "encode", sound, path, "--address", address], env=environment(), check=False)
        assert done.returncode == 0
    else:
        soundfile.write(path, noise(1.0, 44_100), 44_100)


def _pip(walk: Walk, command: Command) -> None:
    installed = walk.installed()
    requirements = [word for word in command.words[2:] if not word.startswith("-")]
    if not requirements:
        raise Broken("it installs nothing")
    for text in requirements:
        if text.startswith("."):
            text = f"{installed.name}{text.removeprefix('.')}"
        requirement = Requirement(text)
        if requirement.name != installed.name:
            raise Broken(f"{requirement.name} is not what this repository is")
        if missing := requirement.extras - installed.extras:
            raise Broken(f"there is no extra {', '.join(missing)}")
    code = "import mimo_tokenizer_client as client; print(client.TokenizerClient, client.__file__)"
    # The requirements are those of the tests' environment: only the distribution itself is in question.
    packages = {"PYTHONPATH": sysconfig.get_paths()["purelib"]}
    where = walk.run([str(installed.python), "-c", code], env=packages)
    if str(installed.python.parents[1]) not in where:
        raise Broken(f"the client comes from elsewhere: {where}")


def _make(walk: Walk, command: Command) -> None:
    words = command.words
    makefile = (ROOT / "Makefile").read_text()
    steps = walk.run(["make", "--dry-run", "--always-make", *words[1:]], cwd=ROOT)
    for name, value in filter(None, (_assignment(word) for word in words[1:])):
        if re.search(rf"^{name} \?=", makefile, re.MULTILINE) is None or value not in steps:
            raise Broken(f"the Makefile makes nothing of {name}={value}")
    files = set(tracked())
    folders = {str(parent) for name in files for parent in Path(name).parents}
    for word in re.findall(r"(?<![\w./-])(?:scripts|benchmarks|tests)/[\w./-]+", steps):
        if word not in files | folders:
            raise Broken(f"it would run {word}, which is not there")
    for script, rest in re.findall(r"(?<=/python )((?:scripts|benchmarks)/\w+\.py)(.*)", steps):
        known = script_flags(script)
        for flag in re.findall(r"(?<!\S)--[a-z-]+", rest):
            if flag not in known:
                raise Broken(f"{script} has no {flag}")


def _export(walk: Walk, command: Command) -> None:
    for name, _ in filter(None, (_assignment(word) for word in command.words[1:])):
        if name not in variables():
            raise Broken(f"nothing reads {name}")
        walk.variables[name] = walk.run(f'{walk.real(command.text).partition(" #")[0]}; printf %s "${name}"')
        flag = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("_", "-")
        walk.give(flag, walk.work / walk.variables[name])


def _assignment(word: str) -> tuple[str, str] | None:
    found = _ASSIGNMENT.fullmatch(word)
    return (found[1], found[2]) if found else None


def _vllm(walk: Walk, command: Command) -> None:
    assert is_vllm(command)
    if not (ROOT / "tests/vllm_omni_patch/test_docs.py").is_file():
        raise Broken("nothing gives it to vLLM's parser")
    for name in _values(command.words, "--deploy-config"):
        walk.file(name)


def _compose(walk: Walk, command: Command) -> None:
    words = command.words[2:]
    if "logs" in words:  # behind it -f is no file
        words = [word for number, word in enumerate(words) if word != "-f" or number < words.index("logs")]
    services: dict[str, Any] = {}
    for name in _values(words, "-f", "--file") or ["docker-compose.yml"]:
        services |= yaml.safe_load(walk.file(name).read_text())["services"]
    profiles = {profile for service in services.values() for profile in service.get("profiles", ())}
    if unknown := set(_values(words, "--profile")) - profiles:
        raise Broken(f"no service has the profile {', '.join(unknown)}")
    action, *named = _operands(words, "-f", "--file", "--profile", "--env-file", "-p", "--project-name", "--tail")
    inside: list[str] = []
    if action in ("exec", "run"):
        named, inside = named[:1], words[words.index(named[0]) + 1 :]
    if unknown := set(named) - set(services):
        raise Broken(f"there is no service {', '.join(unknown)}")
    _in_a_container(walk, command, inside)


def _in_a_container(walk: Walk, command: Command, words: list[str]) -> None:
    """Run here what a command runs in a container, whose environment names the server's address."""
    if words:
        _do(walk, replace(command, text=shlex.join(words), language="container"))


def _docker_build(walk: Walk, command: Command) -> None:
    words = command.words[2:]
    (context,) = _operands(words, "-f", "--file", "-t", "--tag", "--target", "--build-arg", "--platform")
    (name,) = _values(words, "-f", "--file") or [f"{context}/Dockerfile"]
    path = walk.file(name)
    if not any((folder / context).is_dir() for folder in (walk.folder, ROOT)):
        raise Broken(f"there is no folder {context}")
    text = path.read_text()
    for target in _values(words, "--target"):
        if re.search(rf"^FROM .* AS {re.escape(target)}$", text, re.MULTILINE | re.IGNORECASE) is None:
            raise Broken(f"{path.name} has no stage {target}")
    for argument in _values(words, "--build-arg"):
        if re.search(rf"^ARG {re.escape(argument.partition('=')[0])}\b", text, re.MULTILINE) is None:
            raise Broken(f"{path.name} has no argument {argument}")


def _kubectl(walk: Walk, command: Command) -> None:
    words, inside = command.words[1:], []
    if "--" in words:
        words, inside = words[: words.index("--")], words[words.index("--") + 1 :]
    for path in map(walk.file, _values(words, "-f", "--filename")):
        if not all(isinstance(part, dict) and "kind" in part for part in yaml.safe_load_all(path.read_text())):
            raise Broken(f"{path.name} holds something that is no object of Kubernetes")
    text = "".join(path.read_text() for path in walk.folder.glob("*.yaml"))
    known = set(re.findall(r"\b(?:name|secretName): *([a-z][\w-]*)", text))
    named = _values(words, "-c", "--container") + [word.partition("/")[2] for word in words if "/" in word]
    operands = _operands(words, "-f", "--filename", "-c", "--container")
    if operands[:2] == ["create", "secret"]:
        named.append(operands[3])
    elif operands[0] in ("exec", "logs", "attach", "port-forward"):
        named.append(operands[1].partition("/")[2] or operands[1])
    if unknown := {name for name in named if re.fullmatch(r"[a-z][a-z0-9-]*", name)} - known:
        raise Broken(f"none of the files names {', '.join(unknown)}")
    _in_a_container(walk, command, inside)


def _unit(walk: Walk, command: Command) -> None:
    """A unit of systemd's: what it starts is run, in the folder that it would have made."""
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read_string(command.text)
    service = dict(unit["Service"])
    known = {"ExecStart", "User", "Group", "RuntimeDirectory", "RuntimeDirectoryMode", "Restart", "TimeoutStopSec"}
    if unknown := service.keys() - known:
        raise Broken(f"no rule says what these do: {', '.join(unknown)}")
    program, *words = shlex.split(service["ExecStart"])
    folder = f"/run/{service['RuntimeDirectory']}"
    if str(option(words, "--address")).removeprefix("unix://").rpartition("/")[0] != folder:
        raise Broken(f"the socket is not in {folder}")
    (grace,) = (one.default for one in cli.commands["serve"].params if one.name == "grace_seconds")
    if float(service["TimeoutStopSec"]) <= float(option(words, "--grace-seconds") or str(grace)):
        raise Broken("it is killed before its calls are done")
    Path(walk.real(folder)).mkdir(exist_ok=True)
    _do(walk, replace(command, text=shlex.join([Path(program).name, *words]), language="shell"))


def _values(words: list[str], *flags: str) -> list[str]:
    """All values of a flag that may be given several times."""
    pairs = zip(words, [*words[1:], ""], strict=True)
    return [following for word, following in pairs if word in flags] + [
        word.partition("=")[2] for word in words if word.partition("=")[0] in flags and "=" in word
    ]


def _operands(words: list[str], *with_value: str) -> list[str]:
    """The words that are neither a flag nor a flag's value."""
    pairs = zip(["", *words], words, strict=False)
    return [word for before, word in pairs if not word.startswith("-") and before not in with_value]


def script_flags(script: str) -> set[str]:
    """The flags of a script of this repository."""
    done = subprocess.run(
        [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    if done.returncode != 0:
        raise Broken(f"{script} --help: {done.stderr}")
    return set(re.findall(r"--[a-z][a-z-]*", done.stdout))


@dataclass(frozen=True)
class Rule:
    """How commands of one kind are run, and why so."""

    pattern: str
    run: Callable[[Walk, Command], None]
    why: str


RULES = (
    Rule("mimo-tokenizer .*--(help|version)$", _in_a_shell, "it needs nothing"),
    Rule("mimo-tokenizer serve ", _serve, "for real, but for the device: CI has no GPU, so its name is checked alone"),
    Rule(f"mimo-tokenizer ({'|'.join(_CLIENTS)})\\b", _client, "for real, on files that are made where they are meant"),
    Rule("mimo-tokenizer bench\\b", _client, "for real, for a second: the load and not its length is the command's"),
    Rule("mimo-tokenizer top\\b", _client, "once: it has no end otherwise"),
    Rule("pip install ", _pip, "from the checkout, once: the index has no such package before a release"),
    Rule("make ", _make, "what it would do: .ci/run does demo and test themselves, and others take half an hour"),
    Rule("export [A-Z]", _export, "for the commands behind it"),
    Rule("mkdir ", _in_a_shell, "for real"),
    Rule("install --directory ", _install, "for real, but for the tests' own user and group"),
    Rule("openssl ", _in_a_shell, "for real, as curl is: both are taken for granted where the tests run"),
    Rule("curl ", _curl, "for real; by itself it is content with an answer that says there is nothing"),
    Rule("vllm serve ", _vllm, "vLLM is in an environment of its own: tests/vllm_omni_patch/test_docs.py parses it"),
    Rule("docker compose ", _compose, "no container engine is at hand; tests/deploy runs what the file says"),
    Rule("docker build ", _docker_build, "no container engine is at hand; tests/deploy runs what the file says"),
    Rule("kubectl ", _kubectl, "no cluster is at hand; tests/deploy runs what the files say"),
)


def rule_for(command: Command) -> Rule | None:
    """The rule of a command; None for a code span that is none.

    Raises:
        Broken: There is no rule for it.
    """
    text = " ".join(command.text.split())
    if command.language == "span":
        # A command by itself names it; with something behind it, it is one to type. `mimo-tokenizer` may be left out.
        if re.match(rf"({'|'.join(_CLIENTS)}) \S", text):
            text = f"mimo-tokenizer {text}"
        elif not re.match(r"(mimo-tokenizer \w+ \S|make \w|pip install \S)", text):
            return None
    for rule in RULES:
        if re.match(rule.pattern, text):
            return rule
    raise Broken(f"no rule says how it is run: {command}")


def follow(walk: Walk, commands: Iterable[Command]) -> None:
    """Do what a document says.

    Raises:
        Broken: Something cannot be done.
    """
    for command in commands:
        try:
            _do(walk, command)
        except (Broken, AssertionError, subprocess.SubprocessError, ValueError) as error:
            raise Broken(f"{command}\n{error}") from error
    walk.end()


def _do(walk: Walk, command: Command) -> None:
    if command.language == "python":
        code = walk.real(command.text)
        for name, path in re.findall(r"""\b(\w+)["']?[=:] ?["']([^"']+)["']""", code):
            walk.give(name.replace("_", "-"), walk.work / path)
        if "TokenizerClient" in code:
            walk.server()
        walk.run([sys.executable, "-c", code])
    elif command.language in ("yaml", "json"):
        yaml.safe_load(command.text)
    elif command.language == "ini":
        _unit(walk, command)
    elif command.language == "text":
        for line in command.text.splitlines():
            if any(re.match(rule.pattern, line) for rule in RULES):
                raise Broken(f"a block of text holds a command: {line}")
    elif command.language in ("shell", "span", "container"):
        rule = rule_for(command)
        if rule is not None:
            rule.run(walk, command)
    else:
        raise Broken(f"no rule says what a block of {command.language!r} is; a shell's are {SHELL}")
