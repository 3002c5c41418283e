"""What is seen through a window is never older than it says, and nobody waits longer for it than it says."""

from __future__ import annotations

import asyncio
import json
import time
from unittest.mock import Mock

import pytest

from cubroker.server.sight import lookout, window
from cubroker.server.sight.lookout import Lookout
from tests.brokers import PATIENCE
from tests.server.loops import run
from tests.server.sight import scenes
from tests.server.sight.windows import watching


def test_whoever_watches_sees_what_is_new_since_somebody_else_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "PERIOD", 0.05)
    deadline = time.monotonic() + PATIENCE
    with watching(scenes.view(1, 0)) as pane, pane.connect() as connection:
        assert pane.get("/metrics")
        pane.view = scenes.view(2, 0)
        connection.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with connection.makefile("rb") as lines:
            for line in lines:
                if line.startswith(b"data: ") and len(json.loads(line[6:])["devices"]) == 2:
                    break
                assert time.monotonic() < deadline, "the picture stays as it was"


def test_all_who_ask_a_broker_that_does_not_answer_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookout, "PATIENCE", 0.2)
    busy = Mock(spec=asyncio.AbstractEventLoop)

    async def test() -> None:
        views = Lookout(busy, lambda: scenes.view(1, 0), lambda: 1)
        answers = await asyncio.gather(*(views.view() for _ in range(50)), return_exceptions=True)
        assert {type(answer) for answer in answers} == {TimeoutError}

    run(test())
    assert busy.call_soon_threadsafe.call_count < 25, "each waited for the one before it to give up"
