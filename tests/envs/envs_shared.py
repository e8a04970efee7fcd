"""Where the sample data lie, if they do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def shared_data() -> Path:
    """The folder of sample data; skips the test when there is none."""
    root = Path(os.environ.get("FATHOM_SHARED", Path(__file__).parents[3] / "shared"))
    if not (root / "data").is_dir():
        pytest.skip(f"no sample data in {root}; set FATHOM_SHARED")
    return root / "data"
