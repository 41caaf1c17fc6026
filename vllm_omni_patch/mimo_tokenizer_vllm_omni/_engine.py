"""How the plugin looks at the engine that it is to change: by what is there, not by version numbers."""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

# Below "vllm_omni", whose handler and level the engine sets.
log: Final = logging.getLogger("vllm_omni.mimo_tokenizer")

MODELS: Final = "vllm_omni.model_executor.models"


class UnfamiliarEngine(RuntimeError):
    """A part of the engine that the plugin must change is not as the plugin knows it."""


@cache
def engine_version() -> str:
    """Return vLLM-Omni's version, for people; nothing is decided by it."""
    try:
        return version("vllm-omni")
    except PackageNotFoundError:
        return "of unknown version"


def unfamiliar(attribute: str, expected: str) -> UnfamiliarEngine:
    """Return the error that says which attribute is not as expected.

    Args:
        attribute: Its full name.
        expected: What it should have been.
    """
    return UnfamiliarEngine(f"vLLM-Omni {engine_version()}: {attribute} is not {expected}")


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's parameters, in order."""
    return tuple(inspect.signature(function).parameters)


def require(owner: Any, name: str, names: tuple[str, ...] = ()) -> Any:
    """Return a callable of the engine's that the plugin is about to wrap or call.

    Args:
        owner: The module or class that has it.
        name: Its name.
        names: Parameters that it must have.

    Raises:
        UnfamiliarEngine: It is not there, is not callable, or lacks one of them.
    """
    where = getattr(owner, "__module__", None)
    attribute = f"{where}.{owner.__name__}.{name}" if where else f"{owner.__name__}.{name}"
    found = getattr(owner, name, None)
    if not callable(found):
        raise unfamiliar(attribute, "there to be called")
    missing = [wanted for wanted in names if wanted not in parameters(found)]
    if missing:
        raise unfamiliar(attribute, f"a callable with the parameter {' and '.join(missing)}")
    return found


def once(target: Any, key: str) -> bool:
    """Mark a class or module as changed by us; False if it was already.

    A class is marked by itself: what its base class was marked with does not count.
    """
    done: set[str] = vars(target).get("_mimo_tokenizer_patches") or set()
    if key in done:
        return False
    target._mimo_tokenizer_patches = done | {key}
    return True


def tree_of(function: Callable[..., Any]) -> ast.AST | None:
    """Return the syntax tree of a function's source; None where the source is not there."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` for the node of such an expression, else an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return base and f"{base}.{node.attr}"
    return ""
