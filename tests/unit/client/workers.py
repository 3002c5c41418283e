"""What worker processes of multiprocessing do in the tests; they import it by name."""

from __future__ import annotations

from cubroker.client import Broker


def total(directory: str, name: str) -> int:
    """Attach to a pool and return the sum of the bytes of its tensor ``weight``."""
    with Broker(directory) as broker, broker.attach(name) as pool:
        return sum(pool["weight"].tobytes())
