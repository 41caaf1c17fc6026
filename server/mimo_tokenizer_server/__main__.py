"""The command `mimo-tokenizer`, which starts also where its own needs are not installed."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command, or say what it lacks."""
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
