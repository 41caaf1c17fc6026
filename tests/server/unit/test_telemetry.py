"""Log lines."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from mimo_tokenizer_server import telemetry


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    logger = telemetry.logger
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


def test_text_lines_keep_their_fields_apart(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.configure_logging("info", "text")
    # What a client may send as its identity must not look like another field, nor like another line.
    telemetry.log(logging.INFO, "Encode", request_id="a b=c", client='x"\ny', seconds=1 / 3, frames=7, error="-")
    telemetry.log(logging.DEBUG, "not shown")
    (line,) = capsys.readouterr().err.splitlines()
    time, level, rest = line.split(maxsplit=2)
    assert time.startswith("20")
    assert level == "INFO"
    assert rest == 'Encode request_id="a b=c" client="x\\"\\ny" seconds=0.333333 frames=7 error=-'


def test_json_lines_are_objects(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.configure_logging("debug", "json")
    telemetry.log(logging.DEBUG, "Encode", request_id='a"\nb', frames=7)
    try:
        raise ZeroDivisionError("oh")
    except ZeroDivisionError:
        telemetry.logger.exception("Decode failed, request %s", "r")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["level"], first["message"], first["request_id"], first["frames"]) == ("debug", "Encode", 'a"\nb', 7)
    assert (second["level"], second["message"]) == ("error", "Decode failed, request r")
    assert "ZeroDivisionError: oh" in second["traceback"]
    assert second["time"].endswith("Z")
