"""No pool ends a capture of a CUDA graph in its process, whatever is done with it; host devices imitate the rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from cubroker.client import Broker
from tests.sampling import daily
from tests.unit.client import capturing


@pytest.mark.parametrize("way", daily(capturing.WAYS, 8))
def test_a_capture_goes_on(client: Broker, name: str, share: str, tmp_path: Path, way: capturing.Way) -> None:
    capturing.goes_on(client, name, share, way, tmp_path)
