"""What the documents of the repository say: their commands, code, flags, variables and links."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]

# Of a fence; without a name it is a shell's.
SHELL = ("", "sh", "bash", "shell", "console")

VLLM = "vllm serve"

_FROM_A_CLONE = re.compile(r"# from a clone: (\S.*)")
# A flag as it is written, at the beginning of a word.
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


@dataclass(frozen=True)
class Command:
    """A command of a document, or a piece of code.

    Attributes:
        where: The document and the line, for messages.
        text: As it stands there, continued lines joined.
        language: "shell"; "span" for one that stands within a sentence; or the fence's.
    """

    where: str
    text: str
    language: str = "shell"

    @property
    def words(self) -> list[str]:
        """Of a shell's command, without its comment."""
        return shlex.split(self.text, comments=True)

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


@dataclass(frozen=True)
class Sentence:
    """A paragraph, a heading or a table's cell, as far as it is more than text."""

    where: str
    spans: tuple[str, ...]
    links: tuple[str, ...]

    @property
    def flags(self) -> list[str]:
        """The flags in its code spans."""
        return [flag for span in self.spans for flag in _FLAG.findall(span)]

    def names(self, tool: str) -> bool:
        """Whether one of its code spans begins with `tool`."""
        return any(re.match(rf"{re.escape(tool)}(?![\w-])", span) for span in self.spans)


class Document:
    """One Markdown file.

    Args:
        path: Of the file.
        root: Of the repository that it is in.
    """

    def __init__(self, path: Path, root: Path = ROOT) -> None:
        self.path = path
        self.name = path.relative_to(root).as_posix()
        self.text = path.read_text()

    @cached_property
    def _tokens(self) -> list[Token]:
        return MarkdownIt("commonmark").enable("table").parse(self.text)

    def commands(self) -> list[Command]:
        """What it tells to run, in its order; for deploy/engine, also what the deploy files' first lines tell."""
        found: list[Command] = []
        for token in self._tokens:
            line = (token.map or [0])[0] + 1
            if token.type in ("fence", "code_block"):
                language = token.info.split()[0] if token.info else ""
                if language in SHELL:
                    found += _shell_commands(token.content, self.name, line)
                else:
                    found.append(Command(f"{self.name}:{line}", token.content, language))
            elif token.type == "inline":
                found += [Command(f"{self.name}:{line}", span, "span") for span in _spans(token)]
        if self.name == "deploy/engine/README.md":
            for path in sorted(self.path.parent.glob("*.yaml")):
                head = re.match("(#.*\n)*", path.read_text())
                assert head is not None
                block = "".join(f"{text}\n" for text in re.findall(r"^#  +(.*)", head[0], re.MULTILINE))
                found += _shell_commands(block, f"{self.name}, {path.name}", 1)
        return found

    @cached_property
    def sentences(self) -> list[Sentence]:
        """All of its text but the blocks of code."""
        found = []
        for token in self._tokens:
            if token.type == "inline":
                links = [
                    str(child.attrs[key])
                    for child in token.children or []
                    for key in ("href", "src")
                    if key in child.attrs
                ]
                where = f"{self.name}:{(token.map or [0])[0] + 1}"
                found.append(Sentence(where, tuple(_spans(token)), tuple(links)))
        return found

    @cached_property
    def anchors(self) -> set[str]:
        """What a link may have behind its `#`, made of the headings as GitHub does it."""
        found: set[str] = set()
        for token, inline in zip(self._tokens, self._tokens[1:], strict=False):
            if token.type == "heading_open":
                title = "".join(child.content for child in inline.children or [])
                slug = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
                number = sum(1 for one in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", one))
                found.add(f"{slug}-{number}" if number else slug)
        return found


def _spans(token: Token) -> list[str]:
    return [child.content for child in token.children or [] if child.type == "code_inline"]


def _shell_commands(block: str, name: str, line: int) -> Iterator[Command]:
    for text in re.sub(r"\\\n\s*", "", block).splitlines():
        if text.strip() and not text.lstrip().startswith("#"):
            yield Command(f"{name}:{line}", text.strip().removeprefix("$ "))
        if (clone := _FROM_A_CLONE.search(text)) is not None:
            yield Command(f"{name}:{line}", clone[1])


def tracked(root: Path = ROOT) -> list[str]:
    """The files that git has, and those that are to be added, by their path from the repository's root."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted(name for name in set(listed) if (root / name).is_file())


def documents() -> list[Document]:
    """All of the repository's, but the tests'."""
    names = [name for name in tracked() if name.endswith(".md") and PurePosixPath(name).parts[0] != "tests"]
    return [Document(ROOT / name) for name in names]


def vllm_commands() -> list[Command]:
    """The commands that start an engine; its own tests give them to vLLM's parser."""
    return [command for document in documents() for command in document.commands() if is_vllm(command)]


def is_vllm(command: Command) -> bool:
    """Whether it starts an engine."""
    return command.text.startswith(f"{VLLM} ")


def vllm_flags(ours: set[str]) -> set[tuple[str, str]]:
    """Flags in sentences about `vllm serve` that are none of ours, and where; vLLM's parser must know them."""
    return {
        (flag, sentence.where)
        for document in documents()
        for sentence in document.sentences
        if sentence.names(VLLM)
        for flag in sentence.flags
        if flag not in ours
    }


def our_flags() -> set[str]:
    """The flags of all subcommands of `mimo-tokenizer`."""
    from mimo_tokenizer_server.cli import cli

    found = {"--help", "--version"}
    for command in cli.commands.values():
        for parameter in command.params:
            found |= {name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("--")}
    return found
