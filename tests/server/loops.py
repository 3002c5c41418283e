"""An event loop for tests that drive a part of the broker in their own process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tests.brokers import PATIENCE


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run a test on a loop of its own, for as long as a test may take."""
    asyncio.run(asyncio.wait_for(test, PATIENCE))


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until ``condition()`` is true; :func:`run` bounds it."""
    while not condition():
        await asyncio.sleep(0.001)
