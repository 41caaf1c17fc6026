"""A real engine on the CPU, a real service beside it, and small models for both.

The engine is what the interpreter that runs pytest imports; `make test-engine` runs each version of it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

# With pytest's importlib mode the tests' folders are no import roots.
sys.path.insert(0, str(Path(__file__).parent))

import engine_harness
import pytest
from model_folders import write_checkpoint, write_language_model
from service_process import ServiceProcess

engine_harness.prepare_process()
engine_harness.answer_for_missing_driver()


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that the service and the engine's own tokenizer load: 20 codebooks of the published sizes."""
    return write_checkpoint(tmp_path_factory.mktemp("tokenizer") / "checkpoint")


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes further checkpoints; takes the seed and changes to the config."""

    def make(seed: int = 0, **changes: Any) -> Path:
        return write_checkpoint(tmp_path_factory.mktemp("tokenizer") / "checkpoint", seed, **changes)

    return make


@pytest.fixture(scope="session")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny language model's config and text tokenizer, and no weights."""
    return write_language_model(tmp_path_factory.mktemp("language-model"))


@pytest.fixture(scope="session")
def make_language_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes further language models' folders; takes changes to the config."""

    def make(**changes: Any) -> Path:
        return write_language_model(tmp_path_factory.mktemp("language-model"), **changes)

    return make


@pytest.fixture(scope="session")
def service(small_checkpoint: Path) -> Iterator[ServiceProcess]:
    """The service on `small_checkpoint` that all tests share, and which none may end."""
    shared = ServiceProcess(small_checkpoint)
    try:
        shared.start()
        yield shared
        assert shared.stop() == 0, shared.log
        assert "Traceback" not in shared.log, shared.log
    finally:
        shared.clean_up()


@pytest.fixture
def make_service(small_checkpoint: Path) -> Iterator[Callable[..., ServiceProcess]]:
    """Makes services of the test's own, not started yet; takes the checkpoint and flags of `serve`."""
    made: list[ServiceProcess] = []

    def make(model: Path = small_checkpoint, *flags: str) -> ServiceProcess:
        made.append(ServiceProcess(model, *flags))
        return made[-1]

    yield make
    for one in made:
        one.clean_up()


@pytest.fixture
def set_environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], None]:
    """Gives this process these tokenizer settings and no others, until the test ends."""

    def replace(settings: Mapping[str, str]) -> None:
        for name in [name for name in os.environ if name.startswith(engine_harness.PREFIX)]:
            monkeypatch.delenv(name)
        for name, value in settings.items():
            monkeypatch.setenv(name, value)

    return replace


@pytest.fixture
def make_code2wav(
    language_model: Path, small_checkpoint: Path, set_environment: Callable[[Mapping[str, str]], None]
) -> Callable[..., Any]:
    """Makes the real code2wav; takes `env` and what `build_code2wav` takes.

    Without `env`, its codes are decoded in this process, with `small_checkpoint`; `env=through(service.address)` asks
    the service. The settings stay for the rest of the test.
    """

    def make(env: Mapping[str, str] | None = None, model: Path = language_model, **options: Any) -> Any:
        set_environment(engine_harness.in_process(small_checkpoint) if env is None else env)
        return engine_harness.build_code2wav(model, **options)

    return make


@pytest.fixture
def make_parser(small_checkpoint: Path, set_environment: Callable[[Mapping[str, str]], None]) -> Callable[..., Any]:
    """Makes the real data parser; takes `env` as `make_code2wav` does."""

    def make(env: Mapping[str, str] | None = None) -> Any:
        set_environment(engine_harness.in_process(small_checkpoint) if env is None else env)
        return engine_harness.build_parser()

    return make


@pytest.fixture(autouse=True)
def own_workers() -> Iterator[None]:
    """Leaves no worker of a test to the next, whose service may be another one at the same address, or none."""
    yield
    module = sys.modules.get(f"{engine_harness.MODELS}.mimo_audio_code2wav")
    workers = {} if module is None else module._TOKENIZER_WORKER_CACHE
    for address in [key for key in workers if isinstance(key, str)]:
        workers.pop(address).close()


@pytest.fixture
def plugin_lines(monkeypatch: pytest.MonkeyPatch) -> list[logging.LogRecord]:
    """What the plugin logs during the test, as it comes."""
    records: list[logging.LogRecord] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger = logging.getLogger("vllm_omni.mimo_tokenizer")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, Keeping()])
    monkeypatch.setattr(logger, "level", logging.DEBUG)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    return records


class ErrorLines:
    """The sentences among log records that were logged as errors."""

    def __init__(self, records: list[logging.LogRecord]) -> None:
        self._records = records

    def __iter__(self) -> Iterator[str]:
        return iter([one.getMessage() for one in self._records if one.levelno >= logging.ERROR])


@pytest.fixture
def errors(plugin_lines: list[logging.LogRecord]) -> ErrorLines:
    """The lines that the plugin logs as errors during the test."""
    return ErrorLines(plugin_lines)
