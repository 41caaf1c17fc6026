"""What the deployment files say is held against real servers, as the tests of the server start them."""

from __future__ import annotations

import sys
from pathlib import Path

# With pytest's importlib mode the tests' folders are no import roots.
sys.path.insert(0, str(Path(__file__).parents[1] / "server/process"))
