"""What threads and the event loop say to a store, and when."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cubroker.server.store import notify
from cubroker.server.store.notify import Manager
from cubroker.server.store.outbox import Outbox
from cubroker.server.store.store import Store
from tests.server.loops import run, until
from tests.server.store.keeping import memory
from tests.stores import ROOM, Warehouse


def test_memory_that_a_thread_could_not_drop_in_time_is_dropped_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warehouse = Warehouse(tmp_path / "notify")

    def stored() -> set[str]:
        warehouse.settle()
        return set(warehouse.stored)

    async def test() -> None:
        store.attend()
        with warehouse.deaf():
            await asyncio.to_thread(store.drop, "m1.0")
            assert "was not told to forget m1.0" in caplog.text
        await until(lambda: stored() == {"ledger"})

    monkeypatch.setattr(notify, "PATIENCE", 0.01)
    outbox = Outbox(Manager(str(warehouse.path), limit=ROOM))
    store = Store(outbox, {})
    try:
        store.begin()
        with memory(b"") as file:
            store.hold("m1.0", [file])
        assert stored() == {"ledger", "m1.0"}
        run(test())
    finally:
        store.close()
        outbox.close()
        warehouse.close()
