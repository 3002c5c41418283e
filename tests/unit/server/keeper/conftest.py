from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def place() -> Iterator[Path]:
    """An empty directory with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)
