"""What becomes of `make_empty_intermediate_tensors` in each of vLLM-Omni's own models that declares SupportsPP.

Most of them cannot be constructed without their weights, and most set it in their constructor. So the constructors'
source is read, along the chain of `super().__init__`, and every value that the attribute is given there is named. The
classes that the plugin may change are constructed for real and called as the engine's runner calls them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import logging
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_harness

NAME = "make_empty_intermediate_tensors"
PARAMETERS = ("batch_size", "dtype", "device")

# What a class may have: the answers that the runner can use ...
INNER, FACTORY, OWN = "the inner model's", "vLLM's factory's", "a function of its own"
SOUND = frozenset({INNER, FACTORY, OWN})
# ... and those that it cannot; its next step after the call asserts that it was not given None.
ZERO_ARGUMENTS, NONE, MISSING = "takes no arguments", "returns None", "missing"


def declaring_classes() -> dict[str, type[Any]]:
    """vLLM-Omni's registered classes that declare SupportsPP, by name; all modules of its registry are imported.

    Raises:
        AssertionError: Modules cannot be imported here, or two classes have one name.
    """
    from vllm.model_executor.models.interfaces import SupportsPP
    from vllm_omni.model_executor.models import registry

    found: dict[str, type[Any]] = {}
    failed: dict[str, str] = {}
    for folder, module, name in sorted(set(registry._OMNI_MODELS.values())):
        path = f"vllm_omni.model_executor.models.{folder}.{module}"
        try:
            cls = getattr(importlib.import_module(path), name)
        except ImportError as error:
            failed[path] = str(error)
            continue
        if SupportsPP in cls.__mro__:
            assert found.setdefault(name, cls) is cls, f"two classes of vLLM-Omni are called {name}"
    assert not failed, f"modules of vLLM-Omni's registry cannot be imported: {failed}"
    return found


# ---------------------------------------------------------------- by reading


def read_class(cls: type[Any]) -> set[str]:
    """Name what instances of a class may have as `make_empty_intermediate_tensors`, by its source.

    Returns:
        Of the names above, or "unknown: " and the source of a value that is none of them.
    """
    given: set[str] = set()
    if not _constructor_sets(cls, list(cls.__mro__), given):
        given.add(_class_level(cls))
    return given


def _class_level(cls: type[Any]) -> str:
    """What an instance finds that was given none by its constructor."""
    for base in cls.__mro__:
        # A protocol's own method has no body.
        if NAME in vars(base) and not getattr(base, "_is_protocol", False):
            value = inspect.getattr_static(cls, NAME)
            # A plain function gets the instance in front.
            first = () if isinstance(value, staticmethod) else (None,)
            return OWN if _fits(inspect.signature(getattr(cls, NAME)), *first) else ZERO_ARGUMENTS
    return MISSING


def _fits(signature: inspect.Signature, *first: None) -> bool:
    try:
        signature.bind(*first, **dict.fromkeys(PARAMETERS))
    except TypeError:
        return False
    return True


def _constructor_sets(cls: type[Any], order: list[type[Any]], given: set[str]) -> bool:
    """Collect the values that the constructor of the first class of `order` to have one gives the attribute.

    Returns:
        Whether every way through it that makes an instance gives it one.
    """
    for index, base in enumerate(order):
        init = vars(base).get("__init__")
        # Those of Python, torch and protocols set nothing of ours.
        if init is None or base.__module__.partition(".")[0] in _FOREIGN or getattr(base, "_is_protocol", False):
            continue
        return _Method(cls, base, order[index + 1 :], init, given).always_sets()
    return False


_FOREIGN = {"abc", "builtins", "torch", "typing"}


class _Method:
    """One constructor, or a method that it calls, read for what it gives the attribute."""

    def __init__(
        self, cls: type[Any], base: type[Any], rest: list[type[Any]], method: Callable[..., Any], given: set[str]
    ) -> None:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method)))).body[0]
        assert isinstance(tree, ast.FunctionDef)
        self.cls, self.base, self.rest, self.given, self.tree = cls, base, rest, given, tree
        self.functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}

    def always_sets(self) -> bool:
        """Whether every way through it to its end sets the attribute; the values are collected."""
        return not self.leaves_unset(self.tree.body)

    def leaves_unset(self, body: Iterable[ast.stmt]) -> bool:
        """Whether a way leads through these statements on which the attribute is not set; values are collected."""
        unset = True
        for statement in body:
            if isinstance(statement, ast.Raise):
                return False
            if isinstance(statement, ast.Return):
                assert not unset, (
                    f"{self.base.__name__}.{self.tree.name} returns early, which this reading cannot follow"
                )
                return False
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                if any(ast.unparse(target) == f"self.{NAME}" for target in targets) and statement.value is not None:
                    self.given |= self.kinds(statement.value)
                    unset = False
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                unset = not self.follows(statement.value) and unset
            elif isinstance(statement, ast.If):
                either = [self.leaves_unset(statement.body), self.leaves_unset(statement.orelse)]
                unset = any(either) and unset
            elif isinstance(statement, ast.With):
                unset = self.leaves_unset(statement.body) and unset
            elif isinstance(statement, ast.Try):
                ways = [self.leaves_unset(statement.body + statement.orelse)]
                ways += [self.leaves_unset(handler.body) for handler in statement.handlers]
                unset = self.leaves_unset(statement.finalbody) and any(ways) and unset
            elif isinstance(statement, ast.For | ast.While):
                # It may be run through not once: what it sets counts among the values only.
                self.leaves_unset(statement.body)
        return unset

    def follows(self, call: ast.Call) -> bool:
        """Whether a call is that of another class's constructor, or of a method, that sets the attribute."""
        function = ast.unparse(call.func)
        if function.startswith("self."):
            method = inspect.getattr_static(self.cls, function.removeprefix("self."), None)
            if not inspect.isfunction(method) or NAME not in method.__code__.co_names:
                return False
            return _Method(self.cls, self.base, self.rest, method, self.given).always_sets()
        if function in {"super().__init__", f"super({self.base.__name__}, self).__init__"}:
            return _constructor_sets(self.cls, self.rest, self.given)
        named = [base for base in self.rest if function == f"{base.__name__}.__init__"]
        return bool(named) and _constructor_sets(self.cls, self.rest[self.rest.index(named[0]) :], self.given)

    def kinds(self, value: ast.expr) -> set[str]:
        """Name a value that the attribute is given; both of a choice between two."""
        if isinstance(value, ast.IfExp):
            return self.kinds(value.body) | self.kinds(value.orelse)
        if isinstance(value, ast.Attribute) and value.attr == NAME:
            return {INNER}
        if isinstance(value, ast.Lambda):
            return {_kind_of_function(value.args, value.body)}
        if isinstance(value, ast.Name) and value.id in self.functions:
            function = self.functions[value.id]
            last = function.body[-1]
            return {_kind_of_function(function.args, last.value if isinstance(last, ast.Return) else None)}
        if isinstance(value, ast.Call):
            called = ast.unparse(value.func)
            if called == f"{NAME}_factory":
                return {FACTORY}
            if called == "getattr" and len(value.args) == 3 and ast.unparse(value.args[1]) == f"'{NAME}'":
                return {INNER} | self.kinds(value.args[2])
        return {f"unknown: {ast.unparse(value)}"}


def _kind_of_function(arguments: ast.arguments, answer: ast.expr | None) -> str:
    """Name a local function or lambda by its parameters and by what it returns at its end."""
    plain, keyword = arguments.posonlyargs + arguments.args, arguments.kwonlyargs
    required = plain[: len(plain) - len(arguments.defaults)]
    required += [name for name, default in zip(keyword, arguments.kw_defaults, strict=True) if default is None]
    takes = {argument.arg for argument in arguments.args + keyword}
    if not {argument.arg for argument in required} <= set(PARAMETERS):
        return f"unknown: {ast.unparse(arguments)}"
    if arguments.kwarg is None and not set(PARAMETERS) <= takes:
        return ZERO_ARGUMENTS if not plain + keyword else f"unknown: {ast.unparse(arguments)}"
    return NONE if answer is None or (isinstance(answer, ast.Constant) and answer.value is None) else OWN


# ---------------------------------------------------------------- by calling


def call(model: Any) -> str:
    """Call a model as the runner does on a rank behind the first, and say what came of it."""
    import torch
    from vllm.sequence import IntermediateTensors

    try:
        answer = model.make_empty_intermediate_tensors(batch_size=2, dtype=torch.bfloat16, device=torch.device("cpu"))
    except AttributeError as error:
        return f"{MISSING}: {error}"
    except TypeError as error:
        return f"{ZERO_ARGUMENTS}: {error}"
    if answer is None:
        return NONE
    assert isinstance(answer, IntermediateTensors)
    shapes = {name: (tuple(value.shape), str(value.dtype), str(value.device)) for name, value in answer.items()}
    return f"tensors: {sorted(shapes.items())}"


def answer_without_gpu() -> None:
    """Stand in for what the constructors ask of a GPU, or of vLLM's CPU wheel, and use only in `forward`.

    Covo-Audio's attention looks at the GPU's generation; vLLM's activation, on its CPU platform, takes the handle of an
    operator that only its CPU wheel has compiled. All else is the engine's.
    """
    import torch

    if not torch.cuda.is_available():
        properties: Any = SimpleNamespace(major=0, minor=0)
        torch.cuda.get_device_properties = lambda device=None: properties
    if not hasattr(torch.ops._C, "silu_and_mul"):
        # Kept: it is undefined again when the library object goes.
        _libraries.append(torch.library.Library("_C", "FRAGMENT"))  # type: ignore[no-untyped-call]
        _libraries[-1].define("silu_and_mul(Tensor! result, Tensor input) -> ()")


_libraries: list[Any] = []

# vLLM's rotary embedding fits MiMo-Audio's fixed sections to a head of 128.
TINY = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}


def build_language_model(folder: Path, rendezvous: Path, *, outer: bool = False, rank: int = 0, ranks: int = 1) -> Any:
    """The real stage 0 by its own constructor, as one rank of a pipeline of processes that talk by gloo.

    Args:
        folder: Of a language model with the config's changes of `TINY`.
        rendezvous: A file that all ranks have and nobody has used.
        outer: Whether it is to stand in the class that the engine constructs, as in production.
        rank: This process's.
        ranks: How many there are.

    Returns:
        A `MiMoAudioLLMForConditionalGeneration`, or the `MiMoAudioForConditionalGeneration` around it.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm_omni.model_executor.models.mimo_audio import mimo_audio_llm

    answer_without_gpu()
    config = engine_harness.engine_config(folder, 0, pipeline_parallel_size=ranks)
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.init_distributed_environment(ranks, rank, f"file://{rendezvous}", rank, "gloo")
            parallel_state.initialize_model_parallel(1, ranks, backend="gloo")
        if outer:
            return initialize_model(config)
        return mimo_audio_llm.MiMoAudioLLMForConditionalGeneration(vllm_config=config)


def build_covo_code2wav(folder: Path) -> Any:
    """The real `CovoAudioForConditionalGeneration` of stage 1, with the real code2wav in it, and no weights loaded.

    Args:
        folder: An empty one, for what the constructors read.
    """
    import numpy as np
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    answer_without_gpu()
    # The published config's own class comes with the checkpoint; this stage reads nothing of it.
    config = {"model_type": "qwen2", "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["CovoAudioForCausalLM"]}))
    (folder / "token2wav").mkdir()
    torch.save({}, folder / "token2wav" / "model.pt")
    np.save(folder / "token2wav" / "global_mean_var.npy", np.ones(128, np.float32))
    options = {"model_arch": "CovoAudioForCausalLM", "skip_tokenizer_init": True}
    vllm_config = engine_harness.engine_config(folder, 1, **options)
    # Its decoder has the published size whatever the config says: nothing is computed with it, so it gets no memory.
    with set_current_vllm_config(vllm_config), torch.device("meta"):
        return initialize_model(vllm_config)


# ---------------------------------------------------------------- in a fresh process


def survey(code2wav_model: Path, language_model: Path, scratch: Path) -> dict[str, Any]:
    """All that is to be known of this process's engine, which loads its plugins, or not, as it does in production.

    Args:
        code2wav_model: Folder from `write_language_model`; the environment says where its codes are decoded.
        language_model: Such a folder with `TINY`.
        scratch: An empty folder.

    Returns:
        "read": for each class what its instances may have. "called": for each class that the plugin may change and each
        stage it was constructed for, what came of calling it. "log": the plugin's lines about it.
    """
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    plugin_log = logging.getLogger("vllm_omni.mimo_tokenizer")
    plugin_log.setLevel(logging.INFO)
    plugin_log.addHandler(handler)

    from vllm_omni.plugins import load_omni_general_plugins

    load_omni_general_plugins()
    read = {name: read_class(cls) for name, cls in declaring_classes().items()}
    covo_folder = scratch / "covo"
    covo_folder.mkdir()
    models = {
        "code2wav": [build_covo_code2wav(covo_folder), engine_harness.build_code2wav_stage(code2wav_model)],
        "fused_thinker_talker": [build_language_model(language_model, scratch / "rendezvous", outer=True)],
    }
    called: dict[str, dict[str, str]] = {}
    for stage, outers in models.items():
        for model in [model for outer in outers for model in (outer, outer.model)]:
            called.setdefault(type(model).__name__, {})[stage] = call(model)
    return {"read": read, "called": called, "log": [line for line in lines if NAME in line]}
