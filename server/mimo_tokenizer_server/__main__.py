"""The command `mimo-tokenizer`, which starts also where its own needs are not installed."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command, or say what it lacks."""
    if sys.argv[1:2] == ["serve"]:
        # Until the server has handlers of its own, seconds later. The first process of a container is otherwise not
        # ended by a signal, and an interrupt here would leave a traceback.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os._exit(0))
    # Or gRPC's library writes a line of its own for each handshake that fails, whoever it was that tried.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        from .cli import cli
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("mimo_"):
            raise
        sys.exit(
            f"mimo-tokenizer needs {error.name}, which is not installed;"
            " pip install 'mimo-audio-tokenizer-service[cli]', or [server] to serve"
        )
    cli(prog_name="mimo-tokenizer")


if __name__ == "__main__":
    main()
