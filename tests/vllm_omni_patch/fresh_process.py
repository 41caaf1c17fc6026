"""What `engine_harness.run_fresh` runs in a new process: one function, found by its file and name."""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
from pathlib import Path


def _main() -> None:
    import engine_harness

    settings = {name: value for name, value in os.environ.items() if name.startswith(engine_harness.PREFIX)}
    engine_harness.prepare_process()
    os.environ |= settings
    engine_harness.answer_for_missing_driver()
    call, answer = map(Path, sys.argv[1:])
    file, name, arguments = pickle.loads(call.read_bytes())
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(file).stem] = module
    spec.loader.exec_module(module)
    answer.write_bytes(pickle.dumps(getattr(module, name)(*arguments)))


if __name__ == "__main__":
    _main()
