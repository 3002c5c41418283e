"""No pool ends a capture of a CUDA graph in its process, whatever is done with it; host devices imitate the rules."""

from __future__ import annotations

from pathlib import Path

from cubroker.client import Broker
from tests.unit.client import capturing


@capturing.each_way
def test_a_capture_goes_on(client: Broker, name: str, share: str, tmp_path: Path, way: capturing.Way) -> None:
    capturing.goes_on(client, name, share, way, tmp_path)
