"""Writes published.json: what the index says that each pinned package needs, which never changes for a version.

Run it after a change of deploy/requirements*.txt. It downloads what is pinned, 3 GB, where the index does not give
metadata alone; the tests only read what it wrote.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

FILE = Path(__file__).with_name("published.json")
DEPLOY = Path(__file__).parents[2] / "deploy"


def main() -> None:
    """Ask pip."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed",
            "--ignore-requires-python", "--python-version", "3.12", "--only-binary", ":all:",
            "--target", f"{folder}/target", "--report", f"{folder}/report",
        ]  # fmt: skip
        for variant in ("", "-cuda", "-build"):
            command += ["--requirement", str(DEPLOY / f"requirements{variant}.txt")]
        subprocess.run(command, check=True)
        report = json.loads(Path(folder, "report").read_text())
    keys = ("version", "requires_python", "requires_dist")
    packages = {
        item["metadata"]["name"]: {key: item["metadata"].get(key) for key in keys} for item in report["install"]
    }
    lines = [f"{json.dumps(name)}: {json.dumps(what)}" for name, what in sorted(packages.items())]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
